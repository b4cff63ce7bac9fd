"""Attention modules that use another implementation for a while: their config names it to them, and to nobody else."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import nn

from mmspec.pipelines.host import devices, recurrent, tree_attention
from mmspec.pipelines.host.forward import now
from mmspec.pipelines.host.hooks import stock
from mmspec.pipelines.host.kinds import PretrainedConfig, TextDecoder

TREES = ("sdpa", "eager", tree_attention.NAME)  # what takes a tree's mask
FLEX = "flex_attention"


class Renamed:
    """Mixin of an attention module, which asks its config for the implementation."""

    @property
    def config(self) -> PretrainedConfig | _Named:
        own, instead = self.__dict__["config"], now().attention
        return own if instead is None else _Named(own, instead)


class _Named:
    """A config with another attention implementation; the model's own stays as it is, for all other threads."""

    def __init__(self, own: PretrainedConfig, name: str) -> None:
        self._own, self._attn_implementation = own, name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)


def for_drafts(decoder: TextDecoder) -> str | None:
    """What reads a draft's tree where the decoder's own attention takes no mask, FlashAttention and FlexAttention.

    On CUDA tree attention in place of sdpa, which repeats keys and values under a mask. None: it reads them itself, or
    nobody knows what it is.
    """
    name = decoder.config._attn_implementation
    if name == "sdpa" and devices.execution(decoder).type == "cuda" and modules(decoder):
        return tree_attention.NAME
    if name in TREES or not (name == FLEX or "flash" in name) or not modules(decoder):
        return None
    return "sdpa" if getattr(decoder, "_supports_sdpa", False) else "eager"


def unfit(text: TextDecoder) -> str | None:
    """Why the attention that a decoder's config names cannot read a tree, nor another in its place; or None."""
    name = text.config._attn_implementation
    if name in TREES or for_drafts(text) is not None:
        return None
    return (
        f"its attention is {name!r}, which takes no tree mask; load it with attn_implementation='sdpa', or call "
        f"model.set_attn_implementation('sdpa') (allowed: {', '.join(sorted(TREES))}, and FlashAttention and "
        "flex_attention, for which sdpa reads the drafts)"
    )


def modules(decoder: TextDecoder) -> list[nn.Module]:
    """The modules of a decoder that ask their config for an implementation when they attend."""
    layers = [module for layer in decoder.layers for module in layer.modules()]
    return [module for module in layers if "config" in module.__dict__ and _asks(stock(module))]


@cache
def _asks(cls: type) -> bool:
    return "_attn_implementation" in recurrent.names(cls)
