"""What attends in drafts: tree attention on CUDA, in place of sdpa, and sdpa in place of what takes no tree mask.

On other devices tree attention can be chosen with `model.set_attn_implementation("mmspec_tree")`. An attention module
is switched through a config that only it sees.
"""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from mmspec.functional import sdpa
from mmspec.kernels import dispatch, smoke
from mmspec.kernels import reference as ops
from mmspec.pipelines.host import devices, recurrent
from mmspec.pipelines.host.forward import now
from mmspec.pipelines.host.hooks import stock
from mmspec.pipelines.host.kinds import PretrainedConfig, TextDecoder

NAME = "mmspec_tree"
TREES = ("sdpa", "eager", NAME)  # implementations that take a tree mask
FLEX = "flex_attention"
KINDS = ("full_attention", "sliding_attention")  # layer types that the kernel supports
_UNKNOWN = ("position_bias", "softcap", "s_aux")  # arguments that change the scores; left to transformers' sdpa


@dataclass(frozen=True)
class PackedMask:
    """A tree's 4-D mask in compact form."""

    lengths: Tensor  # int64 [B], cached slots of each row, before the nodes
    bits: Tensor  # int64 [B, n, W], which nodes each query sees
    open_slots: Tensor  # bool [B, L], false at cached slots with padding
    first: Tensor | None = None  # int64 [B, n], the first cached slot within the query's window
    causal: bool = False  # whether in every row each query sees all slots except those of later queries


def marked(
    mask: Tensor, lengths: Tensor, open_slots: Tensor, ancestors: Tensor, depth: Tensor, window: int | None = None,
    causal: bool = False,
) -> Tensor:  # fmt: skip
    """Attach a PackedMask to a mask; if it reaches `attend` unchanged, the kernel is used.

    Args:
        mask: bool [B, 1, n, T], in the format of sdpa.
        lengths: int64 [B], cached slots of each row.
        open_slots: bool [B, L].
        ancestors: bool [B, n, N].
        depth: int64 [B, N], of the nodes; the n queries are the first of them.
        window: how many positions a query sees, including its own; None: all.
        causal: whether the nodes are a chain after rows of equal length without padding.
    """
    first = None
    if window is not None:
        here = depth[:, : ancestors.shape[1]]
        ancestors = ancestors & (here[:, :, None] - depth[:, None, :] < window)
        first = (lengths[:, None] + here - window + 1).clamp(min=0)
    mask._mmspec_packed = PackedMask(lengths, ops.bit_rows(ancestors), open_slots, first, causal and first is None)  # type: ignore[attr-defined]
    return mask


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attention by the kernel for drafts, and by sdpa for prefills, vision towers and any mask without a PackedMask.

    Where it replaces sdpa, keys and values of drafts are not repeated for the heads that share them.

    Args:
        query: [B, heads, n, D]; key and value: [B, kv_heads, T, D].

    Returns:
        [B, n, heads, D], and no attention maps.
    """
    packed = packed_mask(attention_mask)
    plain = not kwargs.get("dropout") and all(kwargs.get(name) is None for name in _UNKNOWN)
    plain = plain and query.dtype == key.dtype == value.dtype  # may differ under autocast, which sdpa supports
    if attention_mask is None or not plain or attention_mask.shape[-1] != key.shape[2]:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    scale = kwargs.get("scaling")
    own = vars(module).get("config") if module is not None else None
    if packed is None and (own is None or own._attn_implementation == NAME):  # it replaces no other implementation
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    if packed is None or not serves(query, key, value):
        out = sdpa(query, key, value, attention_mask, scale)
    elif packed.causal and flash_serves(query, key, value):
        bias = causal_lower_right(query.shape[2], key.shape[2])
        out = F.scaled_dot_product_attention(query, key, value, bias, scale=scale, enable_gqa=True)
    else:
        out = dispatch.tree_attention(
            query, key, value, packed.lengths, packed.bits, packed.open_slots, packed.first, scale
        )
    return out.transpose(1, 2).contiguous(), None


def packed_mask(mask: Tensor | None) -> PackedMask | None:
    """What `marked` has attached to a mask, if anything."""
    return getattr(mask, "_mmspec_packed", None)


def used(device: torch.device) -> bool:
    """Whether drafts on this device are read by the kernel."""
    return device.type == "cuda" and not dispatch.defined("tree_attention", torch.empty(0, device=device))


def serves(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether the kernel, or on another device than CUDA its definition, may be used for tensors like these."""
    return not query.is_cuda or trusted(*_shape(query, key, value))


def flash_serves(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether torch's flash attention supports these tensors without a mask."""
    if not query.is_cuda:
        return False
    params = torch.backends.cuda.SDPAParams(query, key, value, None, 0.0, False, query.shape[1] != key.shape[1])
    return torch.backends.cuda.can_use_flash_attention(params)


def _shape(query: Tensor, key: Tensor, value: Tensor) -> tuple[torch.device, torch.dtype, int, int, int, int, str]:
    """The arguments of `trusted`."""
    backend = os.environ.get(dispatch.VARIABLE, "")
    return query.device, query.dtype, query.shape[1], key.shape[1], key.shape[3], value.shape[3], backend


@lru_cache(maxsize=64)
def trusted(
    device: torch.device, dtype: torch.dtype, heads: int, groups: int, width: int, wide: int, backend: str
) -> bool:
    """Whether the kernel agrees with its reference on this device, for heads of these sizes; tested once.

    If it does not, there is a warning, and drafts use grouped sdpa.
    """
    if backend == "reference" or dtype not in smoke.TOLERANCES:
        return False
    sizes = {"B": 2, "N": 7, "T": 75, "heads": heads, "kv_heads": groups, "D": width}
    try:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):  # whatever the default device is
            given = smoke.attention(sizes, device, dtype)
        given |= {"values": given["values"][..., :wide] if wide <= width else F.pad(given["values"], (0, wide - width))}
        kernel = dispatch.chosen("tree_attention", device.type, backend)
        if kernel is ops.tree_attention:  # there is no Triton
            return False
        near = smoke.near(kernel(**given), ops.tree_attention(**given), *smoke.TOLERANCES[dtype])
        wrong = None if bool(near.all()) else f"{int((~near).sum())} of {near.numel()} entries are off"
    except Exception as error:  # a compiler or a launch may fail in any way
        wrong = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    if wrong is not None:
        warnings.warn(f"mmspec's drafts use sdpa on {device} instead of tree attention: {wrong}", stacklevel=2)
    return wrong is None


class Renamed:
    """Mixin for an attention module that reads the name of its implementation from its config."""

    @property
    def config(self) -> PretrainedConfig | _Overridden:
        own, instead = self.__dict__["config"], now().attention
        return own if instead is None else _Overridden(own, instead)


class _Overridden:
    """A config with another attention implementation; the model's own config is unchanged for all other threads."""

    def __init__(self, own: PretrainedConfig, name: str) -> None:
        self._own, self._attn_implementation = own, name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)


def for_drafts(decoder: TextDecoder) -> str | None:
    """What reads draft trees if the decoder's own implementation takes no tree mask (FlashAttention, FlexAttention).

    On CUDA, tree attention also replaces sdpa, which repeats keys and values under a mask. None: the decoder's own
    implementation reads drafts, or is unknown.
    """
    name = decoder.config._attn_implementation
    if name == "sdpa" and devices.execution(decoder).type == "cuda" and modules(decoder):
        return NAME
    if name in TREES or not (name == FLEX or "flash" in name) or not modules(decoder):
        return None
    return "sdpa" if getattr(decoder, "_supports_sdpa", False) else "eager"


def unfit(text: TextDecoder) -> str | None:
    """Why neither the attention that a decoder's config names nor a replacement can read a tree; None: one can."""
    name = text.config._attn_implementation
    if name in TREES or for_drafts(text) is not None:
        return None
    return (
        f"its attention is {name!r}, which takes no tree mask; load it with attn_implementation='sdpa', or call "
        f"model.set_attn_implementation('sdpa') (allowed: {', '.join(sorted(TREES))}, and FlashAttention and "
        "flex_attention, for which sdpa reads the drafts)"
    )


def modules(decoder: TextDecoder) -> list[nn.Module]:
    """The modules of a decoder whose forward reads the attention implementation from their config."""
    layers = [module for layer in decoder.layers for module in layer.modules()]
    return [module for module in layers if "config" in module.__dict__ and _reads_name(stock(module))]


@cache
def _reads_name(cls: type) -> bool:
    return "_attn_implementation" in recurrent.names(cls)


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, sdpa_mask)
