"""What a target keeps for each row between two forwards (cache, positions, padding, types), and the masks over it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmspec.pipelines.host import recurrent, tree_attention
from mmspec.pipelines.host.cache import RaggedCache
from mmspec.pipelines.host.kinds import Mask
from mmspec.pipelines.host.model import HostModel
from mmspec.ragged_cache import visibility
from mmspec.types import Round, stacked


def each_stream(t: Tensor, streams: int) -> Tensor:
    """Repeat each row for its streams: [B, …] to [B·S, …], with the streams of a row adjacent."""
    return t if streams == 1 else t.repeat_interleave(streams, 0)


_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class Onward:
    """Positions that increase by one."""

    first: Tensor  # [..., B, 1], of the first generated token; Qwen's M-RoPE has leading axes

    def at(self, index: Tensor) -> Tensor:
        """Position ids [..., B, N] of generated tokens number `index` [B, N] (from 0)."""
        return self.first + index

    def select(self, rows: Tensor) -> Onward:
        return Onward(self.first[..., rows, :])

    def join(self, other: Any) -> Onward:
        return Onward(torch.cat([self.first, other.first], -2))


@dataclass(frozen=True)
class Listed:
    """Positions from a table, for example of an image that is generated row by row."""

    table: Tensor  # [B, axes, steps]

    def at(self, index: Tensor) -> Tensor:
        steps = index.clamp(max=self.table.shape[2] - 1)  # no row keeps tokens beyond it
        return self.table.gather(2, steps[:, None].expand(-1, self.table.shape[1], -1)).permute(1, 0, 2)

    def select(self, rows: Tensor) -> Listed:
        return Listed(self.table[rows])

    def join(self, other: Any) -> Listed:
        longest = max(self.table.shape[2], other.table.shape[2])
        tables = [pad(t, (0, longest - t.shape[2]), mode="replicate") for t in (self.table, other.table)]
        return Listed(torch.cat(tables))


Places = Onward | Listed  # positions of the tokens to generate


def positions_read(given: Tensor | None, places: Places, begin: Tensor, read: int) -> Tensor:
    """Position ids [B, A, L + 1], on A axes, of the prompt that the decoder has read, and of the token after it.

    Args:
        given: the position ids passed to the decoder, [A, B or 1, L] or [B or 1, L]; None: it counted by itself.
        places: of the tokens to generate.
        begin: zeros [B, 1].
        read: L.
    """
    onward = places.at(begin)
    onward = onward[None] if onward.dim() == 2 else onward
    if given is None:
        given = onward[:1] + torch.arange(-read, 0, device=onward.device)
    given = given[None] if given.dim() == 2 else given
    onward = onward if len(onward) == len(given) else onward[-1:].expand(len(given), -1, -1)
    return torch.cat([given.to(onward.device).expand(-1, len(begin), -1), onward], -1).transpose(0, 1)


@dataclass
class State:
    """A target's state for B rows in S streams: B·S rows, with the streams of a row adjacent."""

    cache: RaggedCache
    places: Places
    open_slots: Tensor  # bool [B·S, L], false at the prompt's padding
    types: dict[str, Tensor]  # arguments per generated token: its type, images it attends to; each [B·S, 1, …]
    arguments: dict[str, Any] = field(default_factory=dict)  # the other arguments of a forward
    streams: int = 1
    padded: bool = True  # whether any slot may be padding, as far as the host knows
    prompt: Tensor = None  # type: ignore[assignment]  # int64 [B·S], the number of slots of the prompt
    cuts: Tensor | None = None  # set after a prefill that goes into the prefix cache, see prefixes.cuts

    def __post_init__(self) -> None:
        if self.prompt is None:
            slots = self.open_slots
            self.prompt = torch.full((len(slots),), slots.shape[1], device=slots.device)

    def commit(self, round_: Round) -> None:
        """Keep the accepted nodes, in every stream; those of a chain are already in their places."""
        kept, count = (each_stream(t, self.streams) for t in (round_.kept, round_.acceptance.count))
        counts = tuple(n for n in round_.counts for _ in range(self.streams))
        self.cache.commit(kept, counts, count, round_.draft.tree.is_chain)

    def select(self, rows: Tensor) -> State:
        S, whole = self.streams, len(self.open_slots)
        rows = rows if S == 1 else (S * rows[:, None] + torch.arange(S, device=rows.device)).flatten()
        types = {name: t[rows] for name, t in self.types.items()}
        arguments = {name: selected(value, rows, whole) for name, value in self.arguments.items()}
        places, open_slots = self.places.select(rows), self.open_slots[rows]
        prompt = self.prompt[rows]
        return State(self.cache.select(rows), places, open_slots, types, arguments, S, self.padded, prompt)

    def join(self, other: State) -> State:
        """These rows, then the other's. Of the arguments, only these rows' plain values and those with an entry for
        each row are kept."""
        longest = max(self.open_slots.shape[1], other.open_slots.shape[1])
        open_slots = [pad(t, (0, longest - t.shape[1]), value=True) for t in (self.open_slots, other.open_slots)]
        types = {name: stacked(*self._both(name, other)) for name in {**self.types, **other.types}}
        arguments: dict[str, Any] = {name: v for name, v in self.arguments.items() if isinstance(v, _PLAIN)}
        for name, mine in self.arguments.items():
            theirs: Any = other.arguments.get(name)
            if self._by_row(mine) and other._by_row(theirs) and mine.dim() == theirs.dim():
                arguments[name] = stacked(mine, theirs)
        cache, places = self.cache.join(other.cache), self.places.join(other.places)
        padded, prompt = self.padded or other.padded, torch.cat([self.prompt, other.prompt])
        return State(cache, places, torch.cat(open_slots), types, arguments, self.streams, padded, prompt)

    def _both(self, name: str, other: State) -> tuple[Tensor, Tensor]:
        """An entry of `types` for the rows of both; zeros for one without it, which is plain text without images."""
        mine, theirs = self.types.get(name), other.types.get(name)
        like = theirs if mine is None else mine
        assert like is not None
        mine = like.new_zeros(len(self.open_slots), *like.shape[1:]) if mine is None else mine
        return mine, like.new_zeros(len(other.open_slots), *like.shape[1:]) if theirs is None else theirs

    def _by_row(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.dim() > 0 and len(value) == len(self.open_slots)


def selected(value: Any, rows: Tensor, whole: int) -> Any:
    """The entries of some rows if `value` is a tensor with an entry for each of `whole` rows, else just `value`."""
    return value[rows.to(value.device)] if isinstance(value, Tensor) and value.dim() and len(value) == whole else value


def interleaved(cond: State, uncond: State) -> State:
    """Merge the states of two streams of the same rows into one."""
    B, both = len(cond.open_slots), cond.join(uncond)
    order = torch.arange(2 * B, device=both.open_slots.device).view(2, B).T.flatten()
    merged = both.select(order)
    merged.streams, merged.arguments = 2, cond.arguments
    return merged


@dataclass(frozen=True)
class Visibility:
    """Which cache slots the nodes of a draft see, by kind of attention."""

    state: State  # of the rows, before the nodes are appended
    ancestors: Tensor  # bool [B, n, n]
    depth: Tensor  # int64 [B, n]

    @cached_property
    def all(self) -> Tensor:
        """bool [B, n, T]: the text before the draft, and each node's ancestors."""
        return visibility(self.state.cache.lengths, self.state.open_slots, self.ancestors)

    @cached_property
    def _place(self) -> Tensor:
        """int64 [B, T]: the position of each slot's token relative to the root: negative before it, else the depth."""
        behind = torch.arange(self.all.shape[2], device=self.all.device) - self.state.cache.lengths.device[:, None]
        return torch.where(behind < 0, behind, self.depth.gather(1, behind.clamp(0, self.depth.shape[1] - 1)))

    def near(self, window: int | None) -> Tensor:
        """bool [B, n, T]: the part of `all` that is less than `window` positions back; None: no limit."""
        return self.all if window is None else self.all & (self.depth[:, :, None] - self._place[:, None, :] < window)

    def chunk(self, size: int) -> Tensor:
        """bool [B, n, T]: the part of `all` in the node's own chunk of `size` positions, not counting padding."""
        padding = (self.state.open_slots.cumsum(1) == 0).sum(1)
        first = (self.state.cache.lengths.device - padding)[:, None]
        here = (first + self.depth) // size
        return self.all & (here[:, :, None] == ((first + self._place) // size)[:, None])

    def near_or_prompt(self, window: int) -> Tensor:
        """bool [B, n, T]: `near`, and the prompt.

        Stock's cache has dropped what is outside the window, and reads the padding mask as if the prompt had shifted.
        """
        slot, prompt = torch.arange(self.all.shape[2], device=self.all.device), self.state.prompt[:, None]
        passed = (self.state.cache.lengths.device[:, None] + self.depth - prompt - window + 1).clamp(min=0)
        padded = pad(self.state.open_slots, (0, 1), value=True)
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
        state, window = visible.state, self.host.window if kind == "sliding_attention" else None
        at = state.cache.lengths
        causal = chain and at.even and not state.padded
        return tree_attention.marked(
            seen, at.device, state.open_slots, visible.ancestors, visible.depth, window, causal
        )
