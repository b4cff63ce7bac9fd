"""Switches attention modules to another implementation for a while, through a config that only they see."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import nn

from mmspec.pipelines.host import devices, recurrent, tree_attention
from mmspec.pipelines.host.forward import now
from mmspec.pipelines.host.hooks import stock
from mmspec.pipelines.host.kinds import PretrainedConfig, TextDecoder

TREES = ("sdpa", "eager", tree_attention.NAME)  # implementations that take a tree mask
FLEX = "flex_attention"


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
        return tree_attention.NAME
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
