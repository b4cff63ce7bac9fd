"""What each type of a decoder's layers lets the nodes of a draft see: a row for each type in one table."""

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
from mmspec.pipelines.target.state import State
from mmspec.ragged_cache import visibility


@dataclass(frozen=True)
class Visibility:
    """Where the nodes of a draft and the slots of the cache stand to each other."""

    state: State  # of the rows, before the nodes
    ancestors: Tensor  # bool [B, n, n]
    depth: Tensor  # int64 [B, n]

    @cached_property
    def all(self) -> Tensor:
        """bool [B, n, T]: the text before the draft, and each node's ancestors."""
        return visibility(self.state.cache.lengths, self.state.open_slots, self.ancestors)

    @cached_property
    def _place(self) -> Tensor:
        """int64 [B, T]: how far behind the root (negative), or after it, what a slot holds stands."""
        behind = torch.arange(self.all.shape[2], device=self.all.device) - self.state.cache.lengths.device[:, None]
        return torch.where(behind < 0, behind, self.depth.gather(1, behind.clamp(0, self.depth.shape[1] - 1)))

    def near(self, window: int | None) -> Tensor:
        """bool [B, n, T]: of all, what stands less than `window` places back; None: all."""
        return self.all if window is None else self.all & (self.depth[:, :, None] - self._place[:, None, :] < window)

    def chunk(self, size: int) -> Tensor:
        """bool [B, n, T]: of all, what stands in the same stretch of `size` places, padding left out."""
        padding = (self.state.open_slots.cumsum(1) == 0).sum(1)
        first = (self.state.cache.lengths.device - padding)[:, None]
        here = (first + self.depth) // size
        return self.all & (here[:, :, None] == ((first + self._place) // size)[:, None])

    def near_or_prompt(self, window: int) -> Tensor:
        """bool [B, n, T]: as `near`, and the prompt.

        Stock's cache has let go of what the window has passed, and looks up the padding as if the prompt had moved up.
        """
        slot, prompt = torch.arange(self.all.shape[2], device=self.all.device), self.state.prompt[:, None]
        passed = (self.state.cache.lengths.device[:, None] + self.depth - prompt - window + 1).clamp(min=0)
        held = pad(self.state.open_slots, (0, 1), value=True)
        looked_up = (slot + passed[..., None]).clamp(max=held.shape[1] - 1)  # [B, n, T]
        open_there = held[:, None].expand(-1, self.depth.shape[1], -1).gather(2, looked_up)
        return self.near(window) | (open_there & (slot < prompt)[:, None])


# layer type → what it sees. Layers with an index choose among what the mask shows them.
KINDS: dict[str, Callable[[Visibility, HostModel], Tensor]] = {
    "full_attention": lambda visible, host: visible.all,
    "sliding_attention": lambda visible, host: visible.near(host.window),
    "chunked_attention": lambda visible, host: visible.chunk(host.chunk or 0),
    "indexed_attention": lambda visible, host: visible.all,
    "minimax_m3_sparse": lambda visible, host: visible.all,
    "reference_sliding_attention": lambda visible, host: visible.near_or_prompt(host.window or 0),
}
_ATTENTION_OF = {"hybrid": "full_attention", "hybrid_sliding": "sliding_attention"}  # types with a recurrence, too
_SEES_ALL = ("full_attention", "indexed_attention", "minimax_m3_sparse")


def additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """A bool mask as one to add to the scores: what sdpa on a CPU would make of it anew in every layer."""
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~visible, torch.finfo(dtype).min)


@dataclass(frozen=True)
class Masks:
    """The masks that a decoder wants."""

    host: HostModel  # the facts of the model
    name: str  # the attention implementation that reads drafts
    kinds: frozenset[str]  # the types of its attentions
    mixed: bool  # whether it takes one for each type, rather than one for all layers

    @classmethod
    def of(cls, host: HostModel, name: str) -> Masks:
        if host.kinds:
            kinds = frozenset(_ATTENTION_OF.get(kind, kind) for kind in host.kinds) - recurrent.KINDS
        else:  # all layers have the same window, or none
            kinds = frozenset(["sliding_attention" if host.window and host.slides else "full_attention"])
        return cls(host, name, kinds, bool(host.kinds) and not kinds.issubset(_SEES_ALL))

    @property
    def plain(self) -> bool:
        """Whether a single token sees all that is cached, so that it needs no mask."""
        return self.kinds <= {"full_attention"}

    def causal(self, n: int) -> bool:
        """Whether in every layer each of n tokens sees all before it: what is near reaches as far."""
        near = {"sliding_attention": self.host.window, "chunked_attention": self.host.chunk}
        reach = (near[kind] for kind in self.kinds if kind in near)
        return self.kinds <= {"full_attention", *near} and all(size is not None and size >= n for size in reach)

    def made(self, visible: Visibility, dtype: torch.dtype, chain: bool) -> Mask:
        """One mask, bool or additive [B, 1, n, T], or one for each type of layers.

        Args:
            dtype: of additive ones.
            chain: whether the host knows the nodes to be a chain.
        """

        def of(kind: str) -> Tensor:
            return self._as_wanted(visible, KINDS[kind](visible, self.host)[:, None], kind, dtype, chain)

        if not self.mixed:
            return of("sliding_attention" if self.kinds == {"sliding_attention"} else "full_attention")
        masks = {kind: of(kind) for kind in self.kinds | {"full_attention"}}
        return {**dict.fromkeys(recurrent.KINDS), **dict.fromkeys(KINDS, masks["full_attention"]), **masks}

    def _as_wanted(self, visible: Visibility, seen: Tensor, kind: str, dtype: torch.dtype, chain: bool) -> Tensor:
        """What a type of layers sees, as the attention implementation takes it."""
        if self.name != tree_attention.NAME:
            on_cpu = seen.device.type == "cpu" and not torch.is_autocast_enabled("cpu")
            return additive(seen, dtype) if on_cpu or self.name == "eager" else seen
        if kind not in tree_attention.KINDS:
            return seen
        state, window = visible.state, self.host.window if kind == "sliding_attention" else None
        at = state.cache.lengths
        causal = chain and at.even and not state.padded
        return tree_attention.marked(
            seen, at.device, state.open_slots, visible.ancestors, visible.depth, window, causal
        )
