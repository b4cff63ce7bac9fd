"""Tree attention as an attention implementation of transformers: `model.set_attn_implementation("mmspec_tree")`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from mmspec.kernels import dispatch
from mmspec.kernels import reference as ops

NAME = "mmspec_tree"
KINDS = ("full_attention", "sliding_attention")  # types of layers that the kernel reads
_UNKNOWN = ("position_bias", "softcap", "s_aux")  # arguments that change the scores; sdpa knows which it can take


@dataclass(frozen=True)
class Sight:
    """What a tree's 4-D mask says, in few bytes."""

    lengths: Tensor  # int64 [B], cached slots of each row, before the nodes
    bits: Tensor  # int64 [B, n, W], which nodes each query sees
    open_slots: Tensor  # bool [B, L], false at cached slots that hold padding
    first: Tensor | None = None  # int64 [B, n], the first cached slot within the query's window


def marked(
    mask: Tensor, lengths: Tensor, open_slots: Tensor, ancestors: Tensor, depth: Tensor, window: int | None = None
) -> Tensor:
    """The mask, with a note of what it says; whoever passes it on unchanged is served by the kernel.

    Args:
        mask: bool [B, 1, n, T], as sdpa wants it.
        lengths: int64 [B], cached slots of each row.
        open_slots: bool [B, L].
        ancestors: bool [B, n, N].
        depth: int64 [B, N], of the nodes; the n queries are the first of them.
        window: how many positions back a query sees, itself included; None: all.
    """
    first = None
    if window is not None:
        here = depth[:, : ancestors.shape[1]]
        ancestors = ancestors & (here[:, :, None] - depth[:, None, :] < window)
        first = (lengths[:, None] + here - window + 1).clamp(min=0)
    mask._mmspec_sight = Sight(lengths, ops.bit_rows(ancestors), open_slots, first)  # type: ignore[attr-defined]
    return mask


def additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """A bool mask as one to add to the scores: what sdpa on a CPU would make of it anew in every layer."""
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~visible, torch.finfo(dtype).min)


def attend(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Drafts by the kernel; prefills, vision towers and all that has no marked mask by sdpa, which the mask serves too.

    Args:
        query: [B, heads, n, D]; key and value: [B, kv_heads, T, D].

    Returns:
        [B, n, heads, D], and no attention maps.
    """
    sight: Sight | None = getattr(attention_mask, "_mmspec_sight", None)
    plain = not kwargs.get("dropout") and all(kwargs.get(name) is None for name in _UNKNOWN)
    plain = plain and query.dtype == key.dtype == value.dtype  # under autocast they may differ, which sdpa can take
    if sight is None or attention_mask is None or not plain or attention_mask.shape[-1] != key.shape[2]:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    out = dispatch.tree_attention(
        query, key, value, sight.lengths, sight.bits, sight.open_slots, sight.first, kwargs.get("scaling")
    )
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, sdpa_mask)
