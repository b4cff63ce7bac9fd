"""Which slots of the cache the nodes of a draft see, by type of layer, and the masks that say so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmspec.pipelines.host import recurrent, tree_attention
from mmspec.pipelines.host.kinds import Mask
from mmspec.pipelines.host.model import HostModel
from mmspec.ragged_cache import Lengths, visibility


@dataclass(frozen=True)
class Visibility:
    """Which cache slots the nodes of a draft see, by kind of attention."""

    lengths: Lengths  # of the rows, before the nodes are appended
    open_slots: Tensor  # bool [B, L], false at the prompt's padding
    padded: bool  # whether any slot may be padding, as far as the host knows
    prompt: Tensor  # int64 [B], the number of slots of the prompt
    ancestors: Tensor  # bool [B, n, n]
    depth: Tensor  # int64 [B, n]

    @cached_property
    def all(self) -> Tensor:
        """bool [B, n, T]: the text before the draft, and each node's ancestors."""
        return visibility(self.lengths, self.open_slots, self.ancestors)

    @cached_property
    def _place(self) -> Tensor:
        """int64 [B, T]: the position of each slot's token relative to the root: negative before it, else the depth."""
        behind = torch.arange(self.all.shape[2], device=self.all.device) - self.lengths.device[:, None]
        return torch.where(behind < 0, behind, self.depth.gather(1, behind.clamp(0, self.depth.shape[1] - 1)))

    def near(self, window: int | None) -> Tensor:
        """bool [B, n, T]: the part of `all` that is less than `window` positions back; None: no limit."""
        return self.all if window is None else self.all & (self.depth[:, :, None] - self._place[:, None, :] < window)

    def chunk(self, size: int) -> Tensor:
        """bool [B, n, T]: the part of `all` in the node's own chunk of `size` positions, not counting padding."""
        padding = (self.open_slots.cumsum(1) == 0).sum(1)
        first = (self.lengths.device - padding)[:, None]
        here = (first + self.depth) // size
        return self.all & (here[:, :, None] == ((first + self._place) // size)[:, None])

    def near_or_prompt(self, window: int) -> Tensor:
        """bool [B, n, T]: `near`, and the prompt.

        Stock's cache has dropped what is outside the window, and reads the padding mask as if the prompt had shifted.
        """
        slot, prompt = torch.arange(self.all.shape[2], device=self.all.device), self.prompt[:, None]
        passed = (self.lengths.device[:, None] + self.depth - prompt - window + 1).clamp(min=0)
        padded = pad(self.open_slots, (0, 1), value=True)
        looked_up = (slot + passed[..., None]).clamp(max=padded.shape[1] - 1)  # [B, n, T]
        open_there = padded[:, None].expand(-1, self.depth.shape[1], -1).gather(2, looked_up)
        return self.near(window) | (open_there & (slot < prompt)[:, None])


# layer type → the slots that it sees. Layers with an indexer choose among these.
MASKS_BY_KIND: dict[str, Callable[[Visibility, HostModel], Tensor]] = {
    "full_attention": lambda visible, host: visible.all,
    "sliding_attention": lambda visible, host: visible.near(host.window),
    "chunked_attention": lambda visible, host: visible.chunk(host.chunk or 0),
    "indexed_attention": lambda visible, host: visible.all,
    "minimax_m3_sparse": lambda visible, host: visible.all,
    "reference_sliding_attention": lambda visible, host: visible.near_or_prompt(host.window or 0),
}
_ATTENTION_OF = {"hybrid": "full_attention", "hybrid_sliding": "sliding_attention"}  # types that also have a recurrence
_SEES_ALL = ("full_attention", "indexed_attention", "minimax_m3_sparse")


def additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """A bool mask as an additive one; done here once, since sdpa on a CPU would convert it again in every layer."""
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~visible, torch.finfo(dtype).min)


@dataclass(frozen=True)
class Masks:
    """Builds the masks that a decoder needs."""

    host: HostModel
    name: str  # the attention implementation that reads drafts
    kinds: frozenset[str]  # the types of its attention layers
    mixed: bool  # whether it takes one mask for each type, rather than one for all layers

    @classmethod
    def of(cls, host: HostModel, name: str) -> Masks:
        if host.kinds:
            kinds = frozenset(_ATTENTION_OF.get(kind, kind) for kind in host.kinds) - recurrent.KINDS
        else:  # all layers have the same window, or none
            kinds = frozenset(["sliding_attention" if host.window and host.slides else "full_attention"])
        return cls(host, name, kinds, bool(host.kinds) and not kinds.issubset(_SEES_ALL))

    @property
    def plain(self) -> bool:
        """Whether a single token sees the whole cache, so that it needs no mask."""
        return self.kinds <= {"full_attention"}

    def causal(self, n: int) -> bool:
        """Whether each of n tokens sees all tokens before it in every layer, since no window or chunk is shorter."""
        limits = {"sliding_attention": self.host.window, "chunked_attention": self.host.chunk}
        sizes = (limits[kind] for kind in self.kinds if kind in limits)
        return self.kinds <= {"full_attention", *limits} and all(size is not None and size >= n for size in sizes)

    def build(self, visible: Visibility, dtype: torch.dtype, chain: bool) -> Mask:
        """One mask, bool or additive [B, 1, n, T], or one for each type of layers.

        Args:
            dtype: of additive masks.
            chain: whether the nodes are known on the host to be a chain.
        """

        def of(kind: str) -> Tensor:
            return self._converted(visible, MASKS_BY_KIND[kind](visible, self.host)[:, None], kind, dtype, chain)

        if not self.mixed:
            return of("sliding_attention" if self.kinds == {"sliding_attention"} else "full_attention")
        masks = {kind: of(kind) for kind in self.kinds | {"full_attention"}}
        return {**dict.fromkeys(recurrent.KINDS), **dict.fromkeys(MASKS_BY_KIND, masks["full_attention"]), **masks}

    def _converted(self, visible: Visibility, seen: Tensor, kind: str, dtype: torch.dtype, chain: bool) -> Tensor:
        """The bool mask of a layer type in the format of the attention implementation."""
        if self.name != tree_attention.NAME:
            on_cpu = seen.device.type == "cpu" and not torch.is_autocast_enabled("cpu")
            return additive(seen, dtype) if on_cpu or self.name == "eager" else seen
        if kind not in tree_attention.KINDS:
            return seen
        window = self.host.window if kind == "sliding_attention" else None
        causal = chain and visible.lengths.even and not visible.padded
        return tree_attention.marked(
            seen, visible.lengths.device, visible.open_slots, visible.ancestors, visible.depth, window, causal
        )
