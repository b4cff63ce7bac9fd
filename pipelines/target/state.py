"""What a target keeps for each row between two forwards: cache, positions, padding, types."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmspec.pipelines.host.cache import RaggedCache
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
        count, used = round_.acceptance.count, round_.counts
        if self.cache.recurrent and used != (own := tuple(map(len, round_.new))):
            # a state cannot be cut back to where its row has ended, as keys are
            count, used = torch.tensor(own, device=count.device), own
        kept, count = (each_stream(t, self.streams) for t in (round_.kept, count))
        counts = tuple(n for n in used for _ in range(self.streams))
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
