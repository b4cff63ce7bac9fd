"""How much a prompt's text attends to each of its tokens, recorded in a few layers of its prefill."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import AttentionInterface

from mmspec.pipelines.targets.renamed import own_name, using

NAME = "mmspec_attended"
ASKING = 256  # last tokens of a prompt that are asked: scores of all would be heads · L² numbers
_SHARES = (4, 5, 6, 7)  # eighths of the depth: middle and late layers, where text reads images


def layers(decoder: Any) -> dict[str, Any]:
    """The attention modules to listen to, by tap name."""
    attending = [i for i, layer in enumerate(decoder.layers) if hasattr(layer, "self_attn")]
    chosen = sorted({attending[len(attending) * share // 8] for share in _SHARES})
    return {f"attention {i}": decoder.layers[i].self_attn for i in chosen}


@dataclass
class Attended:
    """What one prefill tells: [B, L] of shares of attention, averaged over layers, heads and asking rows.

    The text behind the last image asks, or that image's last token where there is none: the last `ASKING` of them.
    """

    visual: Tensor  # [B, L], above 0 at visual tokens
    valid: Tensor  # bool [B, T], of the cached tokens and of these
    shares: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        L = self.visual.shape[1]
        at, seen = torch.arange(L, device=self.visual.device), self.visual > 0
        last = torch.where(seen, at, -1).amax(1, keepdim=True)
        asks = (at > last) & seen.any(1, keepdim=True)  # nothing is looked for in rows without images
        asks[:, : max(0, L - ASKING)] = False
        asks[:, -1] = True
        self.wanted = bool(seen.any())
        self.first = int((~asks).sum(1).min())  # rows end together, so only these can ask
        self.asks = asks[:, self.first :].float()

    @property
    def mean(self) -> Tensor | None:
        """[B, L]; None where nothing was recorded although there are images."""
        if not self.wanted:
            return torch.zeros(self.visual.shape, device=self.visual.device)
        return torch.stack(self.shares).mean(0) if self.shares else None

    def record(self, query: Tensor, key: Tensor, scaling: float) -> None:
        """Take in one layer: queries [B, heads, L, D] and keys [B, kv_heads, T, D], rotated as they meet."""
        L, T = query.shape[2], key.shape[2]
        at, asks, k = torch.arange(self.first, L, device=query.device), self.asks.to(query.device), key.float()
        q = query[:, :, self.first :].float().unflatten(1, (k.shape[1], -1)).flatten(2, 3)  # [B, kv_heads, group·n, D]
        valid = self.valid[:, -T:].to(key.device)
        seen = (torch.arange(T, device=key.device) <= at[:, None] + T - L) & valid[:, None]
        scores = (q @ k.transpose(2, 3) * scaling).unflatten(2, (-1, L - self.first)).flatten(1, 2)
        scores = scores.masked_fill(~seen[:, None], torch.finfo(torch.float32).min)
        share = (scores.softmax(-1).mean(1) * asks[..., None]).sum(1) / asks.sum(1, keepdim=True)
        self.shares.append(share[:, -L:].to(self.visual.device))


_asking: ContextVar[Attended | None] = ContextVar("mmspec_attended", default=None)


@contextmanager
def attending(decoder: Any, visual: Tensor, valid: Tensor) -> Iterator[Attended]:
    """Within, the prefill is recorded in some layers of the decoder, if there are images in it."""
    attended = Attended(visual, valid)
    token = _asking.set(attended)
    try:
        with using(NAME, tuple(layers(decoder).values())) if attended.wanted else nullcontext():
            yield attended
    finally:
        _asking.reset(token)


def recording(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> Any:
    """What the module's own implementation gives; who attends to what is noted on the way."""
    attended = _asking.get()
    if attended is not None:
        scaling = kwargs.get("scaling")
        attended.record(query, key, query.shape[-1] ** -0.5 if scaling is None else scaling)
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", sdpa_attention_forward)
    return AttentionInterface().get_interface(own_name(module), eager)(
        module, query, key, value, attention_mask, **kwargs
    )


AttentionInterface.register(NAME, recording)
