"""Presents each node of a draft as a row of its own, whose cache has the text and the node's ancestors in order.

Modules that count the slots of the cache, or store inputs in their own way, read such rows with stock's own code: an
indexer that pools the keys of adjacent slots, a distance between slots, or a special convolution gives on such a row
what it gives in stock's decoding of one token. The results are mapped back to the real slots. The cost is a copy per
node of the module's state: an indexer's keys, or the last inputs of a convolution.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, return_types
from torch.overrides import TorchFunctionMode

from mmspec.kernels import reference_recurrent as ops
from mmspec.pipelines.host import recurrent
from mmspec.pipelines.host.forward import during, now
from mmspec.ragged_cache import Lengths, visibility


@dataclass(frozen=True)
class Paths:
    """A draft's nodes as rows of their own: place s of a node's row corresponds to slot s of stock's cache."""

    parents: Tensor  # int64 [B, n]
    depth: Tensor  # int64 [B, n]
    ancestors: Tensor  # bool [B, n, n], including the node itself
    lengths: Lengths  # slots of each row before the nodes

    @cached_property
    def slots(self) -> int:
        """T, the number of slots of the cache after the nodes are appended."""
        return self.lengths.longest + self.depth.shape[1]

    @cached_property
    def _line(self) -> Tensor:
        """int64 [B, n, T]: which node is at each place of a node's row; negative: a token of the text."""
        B, n = self.depth.shape
        index = torch.where(self.ancestors, self.depth[:, None].expand(B, n, n), n)
        nodes = torch.arange(n, device=index.device).expand(B, n, n)
        line = index.new_zeros(B, n, n + 1).scatter(2, index, nodes)
        after = torch.arange(self.slots, device=index.device) - self.lengths.on(index.device)[:, None]  # [B, T]
        return line.gather(2, after.clamp(0, n)[:, None].expand(B, n, -1)).where((after >= 0)[:, None], -1)

    @cached_property
    def own(self) -> Tensor:
        """bool [B, 1, n, T]: whether a slot has a token of the text (or padding), or an ancestor of the node."""
        return visibility(self.lengths, self.ancestors.new_ones(len(self.depth), 0), self.ancestors)[:, None]

    @cached_property
    def live(self) -> Tensor:
        """bool [B·n, 1, T]: whether a place of a node's row is in use."""
        place = torch.arange(self.slots, device=self.depth.device)
        end = self.lengths.on(self.depth.device)[:, None] + self.depth
        return (place <= end[..., None]).flatten(0, 1)[:, None]

    def slot(self, first: Tensor | int | None = None) -> Tensor:
        """int64 [B, n, T]: the slot of each place, if the nodes are in slots from `first` on; None: from the row's own
        length on, as in the cache."""
        at = self.lengths.on(self.depth.device)[:, None, None] if first is None else first
        place = torch.arange(self.slots, device=self.depth.device)
        return torch.where(self._line < 0, place, at + self._line)

    @cached_property
    def place(self) -> Tensor:
        """int64 [B, T]: the place of each slot, in the row of any node that has it."""
        after = torch.arange(self.slots, device=self.depth.device) - self.lengths.on(self.depth.device)[:, None]
        own = self.lengths.on(after.device)[:, None] + self.depth.gather(1, after.clamp(0, self.depth.shape[1] - 1))
        return torch.where(after < 0, torch.arange(self.slots, device=after.device), own)

    @cached_property
    def distance(self) -> Tensor:
        """int64 [B, 1, n, T]: how many tokens before a node each slot's token is."""
        here = self.lengths.on(self.depth.device)[:, None] + self.depth
        return (here[:, :, None] - self.place[:, None])[:, None]

    @cached_property
    def ends(self) -> list[int]:
        """How many places are in use in each of the B·n nodes' rows."""
        return [n + d + 1 for n, own in zip(self.lengths.host, self.depth.tolist(), strict=True) for d in own]

    def chosen(self, scores: Tensor, k: int) -> Tensor:
        """Like `scores.topk(k).indices` over slots [B, n, T], but for each node with the choice of a single step."""
        if scores.device.type != "cpu":
            return scores.topk(k).indices
        slots = self.slot()
        places = self.chosen_places(scores.gather(2, slots).flatten(0, 1), k, self.ends, [end - 1 for end in self.ends])
        return slots.gather(2, places.view(*scores.shape[:2], k))

    @staticmethod
    def chosen_places(scores: Tensor, k: int, widths: Sequence[int], rest: Sequence[int]) -> Tensor:
        """The same over places [R, T] of rows with these widths; filled with `rest` if a row has fewer than k.

        Which of several equal scores `topk` takes depends on the width on a CPU; on a GPU it takes the first.
        """
        places = torch.tensor(rest, device=scores.device)[:, None].repeat(1, k)
        for width in set(widths):
            rows = torch.tensor([i for i, own in enumerate(widths) if own == width], device=scores.device)
            most = min(k, width)
            places[rows, :most] = scores[rows, :width].topk(most).indices
        return places

    def fold(self, t: Tensor) -> Tensor:
        """[B, n, …], an entry for each node, to [B·n, 1, …]."""
        return t.expand(len(self.depth), *t.shape[1:]).flatten(0, 1)[:, None]

    def unfold(self, t: Tensor) -> Tensor:
        """[B·n, 1, …] to [B, n, …]."""
        return t[:, 0].unflatten(0, tuple(self.depth.shape))

    def rows(self, cached: Tensor, first: int | None = None) -> Tensor:
        """The nodes' rows [B·n, T, D] of a cached tensor [B, T, D]; zero in places that are not in use.

        Args:
            first: see `slot`.
        """
        B, n = self.depth.shape
        index = self.slot(first).to(cached.device).flatten(1)[..., None].expand(-1, -1, cached.shape[2])
        rows = cached.gather(1, index).view(B * n, self.slots, -1)
        return rows.masked_fill(~self.live.to(cached.device).transpose(1, 2), 0)

    def real(self, mask: Tensor) -> Tensor:
        """Convert a mask over places, [B, h, n, T], to one over slots; two nodes at one place get the same value."""
        place = self.place.to(mask.device)[:, None, None]
        return mask.gather(3, place.expand(*mask.shape[:3], -1))


@contextmanager
def reads(parents: Tensor, depth: Tensor, ancestors: Tensor, lengths: Lengths) -> Iterator[None]:
    """A context in which forwards read the nodes of this draft; see Paths."""
    draft = recurrent.Reading(parents, depth, ancestors)
    with during(draft=draft, paths=Paths(parents, depth, ancestors, lengths)):
        yield


def paths() -> Paths | None:
    """The Paths of the draft that is being read, or None."""
    return now().paths


class Choosing(TorchFunctionMode):
    """A context in which `scores.topk(k, dim=-1)` returns the indices `choose(scores, k)`, and no values."""

    def __init__(self, choose: Callable[[Tensor, int], Tensor]) -> None:
        super().__init__()
        self.choose = choose

    def __torch_function__(
        self, function: Callable[..., object], types: object, args: Any = (), kwargs: Any = None
    ) -> object:
        if function is not Tensor.topk:
            return function(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunction():
            return return_types.topk((args[0], self.choose(args[0], args[1])))


class RowCache:
    """The cache of the nodes' rows, with the methods that such modules call.

    Args:
        new: the inputs [B·n, C, 1] that the module will append to its window, if it reads the window before that.
    """

    def __init__(self, cache: Any, paths: Paths, new: Tensor | None = None) -> None:
        self.cache, self.paths, self.new = cache, paths, new
        self.layers = self

    def __getitem__(self, layer_idx: int) -> _RowLayer:
        return _RowLayer(self, layer_idx)

    def update_indexer(self, new: Tensor, layer_idx: int) -> Tensor:
        return self.paths.rows(self.cache.update_indexer(self.paths.unfold(new), layer_idx))

    def update_conv_state(self, new: Tensor, layer_idx: int, state_idx: int = 0, **_: object) -> Tensor:
        """The inputs in each node's window, [B·n, C, W + 1], with the node's own last."""
        x = self.paths.unfold(new.transpose(1, 2)).transpose(1, 2)  # [B, C, n]
        state = self.cache.get_conv_state(layer_idx, state_idx=state_idx)
        self.cache.update_conv_state(x, layer_idx, state_idx=state_idx)
        index = ops.conv_windows(self.paths.parents, self.paths.depth, state.shape[-1] + 1).to(x.device) - 1
        inputs = torch.cat([state, x.to(state.dtype)], 2).transpose(1, 2)
        seen = inputs[torch.arange(len(x), device=x.device)[:, None, None], index]  # [B, n, W + 1, C]
        return seen.flatten(0, 1).transpose(1, 2)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor:
        assert self.new is not None
        return self.update_conv_state(self.new, layer_idx, state_idx)[..., :-1]


class _RowLayer:
    """One layer of a RowCache."""

    def __init__(self, rows: RowCache, layer_idx: int) -> None:
        self.rows, self.index = rows, layer_idx

    def update_index(self, new: Tensor) -> Tensor:
        return self.rows.update_indexer(new[:, 0], self.index)[:, None]

    @property
    def keys(self) -> Tensor:
        return torch.empty(0, self.get_seq_length(), 0)  # modules read only its length

    def get_seq_length(self) -> int:
        return self.rows.paths.slots


class OneChannel:
    """A cache for a window of token ids [B, W], stored as that of a convolution with one channel, [B, 1, W]."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        state = self.cache.get_conv_state(layer_idx, state_idx=state_idx)
        return None if state is None else state[:, 0]

    def update_conv_state(self, new: Tensor, layer_idx: int, **more: object) -> Tensor:
        return self.cache.update_conv_state(new[:, None], layer_idx, **more)[:, 0]
