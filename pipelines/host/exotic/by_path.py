"""Each node of a draft as a row of its own, whose cache holds the text and the node's ancestors in order.

Modules that count the slots of the cache, or keep inputs in a way of their own, read such rows by stock's own code: an
indexer that pools the keys of neighbouring slots, a distance between slots, or a convolution that nobody knows means
the same on such a row as in stock's decoding of one token. What comes back is put in the order of the real slots. The
price is a copy for each node of what such a module keeps: an indexer's keys, the last inputs of a convolution.
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
    """A draft's nodes as rows of their own: of each node's row, place s holds what stock would have in slot s."""

    parents: Tensor  # int64 [B, n]
    depth: Tensor  # int64 [B, n]
    ancestors: Tensor  # bool [B, n, n], a node counts among its own
    lengths: Lengths  # slots of each row before the nodes

    @cached_property
    def slots(self) -> int:
        """Of the cache once the nodes are appended, T."""
        return self.lengths.longest + self.depth.shape[1]

    @cached_property
    def _line(self) -> Tensor:
        """int64 [B, n, T]: which node stands at each place of a node's row; negative: none, the text does."""
        B, n = self.depth.shape
        index = torch.where(self.ancestors, self.depth[:, None].expand(B, n, n), n)
        nodes = torch.arange(n, device=index.device).expand(B, n, n)
        line = index.new_zeros(B, n, n + 1).scatter(2, index, nodes)
        after = torch.arange(self.slots, device=index.device) - self.lengths.on(index.device)[:, None]  # [B, T]
        return line.gather(2, after.clamp(0, n)[:, None].expand(B, n, -1)).where((after >= 0)[:, None], -1)

    @cached_property
    def own(self) -> Tensor:
        """bool [B, 1, n, T]: whether a slot holds the text, padding included, or an ancestor of a node."""
        return visibility(self.lengths, self.ancestors.new_ones(len(self.depth), 0), self.ancestors)[:, None]

    @cached_property
    def live(self) -> Tensor:
        """bool [B·n, 1, T]: whether a place of a node's row is in use."""
        place = torch.arange(self.slots, device=self.depth.device)
        end = self.lengths.on(self.depth.device)[:, None] + self.depth
        return (place <= end[..., None]).flatten(0, 1)[:, None]

    def slot(self, first: Tensor | int | None = None) -> Tensor:
        """int64 [B, n, T]: the slot in which what stands at a place lies, the nodes from `first` on; None: in the
        cache, from the row's own length on."""
        at = self.lengths.on(self.depth.device)[:, None, None] if first is None else first
        place = torch.arange(self.slots, device=self.depth.device)
        return torch.where(self._line < 0, place, at + self._line)

    @cached_property
    def place(self) -> Tensor:
        """int64 [B, T]: the place at which the row of any node has what lies in a slot."""
        after = torch.arange(self.slots, device=self.depth.device) - self.lengths.on(self.depth.device)[:, None]
        own = self.lengths.on(after.device)[:, None] + self.depth.gather(1, after.clamp(0, self.depth.shape[1] - 1))
        return torch.where(after < 0, torch.arange(self.slots, device=after.device), own)

    @cached_property
    def distance(self) -> Tensor:
        """int64 [B, 1, n, T]: how many tokens what lies in a slot stands before a node."""
        here = self.lengths.on(self.depth.device)[:, None] + self.depth
        return (here[:, :, None] - self.place[:, None])[:, None]

    @cached_property
    def ends(self) -> list[int]:
        """Of the nodes' rows, B·n numbers: how many places are in use."""
        return [n + d + 1 for n, own in zip(self.lengths.host, self.depth.tolist(), strict=True) for d in own]

    def chosen(self, scores: Tensor, k: int) -> Tensor:
        """As `scores.topk(k).indices` over slots [B, n, T], of each node what a single step would choose."""
        if scores.device.type != "cpu":
            return scores.topk(k).indices
        slots = self.slot()
        places = self.chosen_places(scores.gather(2, slots).flatten(0, 1), k, self.ends, [end - 1 for end in self.ends])
        return slots.gather(2, places.view(*scores.shape[:2], k))

    @staticmethod
    def chosen_places(scores: Tensor, k: int, widths: Sequence[int], rest: Sequence[int]) -> Tensor:
        """The same over places [R, T] of rows that are so wide, `rest` where a row has fewer than k.

        Which of several equal scores `topk` takes depends on the width on a CPU; on a GPU it takes the first.
        """
        places = torch.tensor(rest)[:, None].repeat(1, k)
        for width in set(widths):
            rows = torch.tensor([i for i, own in enumerate(widths) if own == width])
            most = min(k, width)
            places[rows, :most] = scores[rows, :width].topk(most).indices
        return places

    def fold(self, t: Tensor) -> Tensor:
        """[B·n, 1, …] of what each node has, [B, n, …]."""
        return t.expand(len(self.depth), *t.shape[1:]).flatten(0, 1)[:, None]

    def unfold(self, t: Tensor) -> Tensor:
        """[B, n, …] of [B·n, 1, …]."""
        return t[:, 0].unflatten(0, tuple(self.depth.shape))

    def rows(self, held: Tensor, first: int | None = None) -> Tensor:
        """What each node's row holds, [B·n, T, D], of what the cache holds, [B, T, D]; nothing where it is not in use.

        Args:
            first: see `slot`.
        """
        B, n = self.depth.shape
        index = self.slot(first).to(held.device).flatten(1)[..., None].expand(-1, -1, held.shape[2])
        rows = held.gather(1, index).view(B * n, self.slots, -1)
        return rows.masked_fill(~self.live.to(held.device).transpose(1, 2), 0)

    def real(self, mask: Tensor) -> Tensor:
        """A mask over places, [B, h, n, T], as one over slots; two nodes at one place share what it says."""
        place = self.place.to(mask.device)[:, None, None]
        return mask.gather(3, place.expand(*mask.shape[:3], -1))


@contextmanager
def reads(parents: Tensor, depth: Tensor, ancestors: Tensor, lengths: Lengths) -> Iterator[None]:
    """Within, forwards read the nodes of this draft; see Paths."""
    draft = recurrent.Reading(parents, depth, ancestors)
    with during(draft=draft, paths=Paths(parents, depth, ancestors, lengths)):
        yield


def paths() -> Paths | None:
    """Of the draft that is being read."""
    return now().paths


class Choosing(TorchFunctionMode):
    """Within, `scores.topk(k, dim=-1)` has the indices that `choose(scores, k)` gives, and no values."""

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
    """The cache of the nodes' rows, as far as a module looks into it.

    Args:
        coming: what the module will put into its window, [B·n, C, 1], where it looks there before it does so.
    """

    def __init__(self, cache: Any, paths: Paths, coming: Tensor | None = None) -> None:
        self.cache, self.paths, self.coming = cache, paths, coming
        self.layers = self

    def __getitem__(self, layer_idx: int) -> _RowLayer:
        return _RowLayer(self, layer_idx)

    def update_indexer(self, new: Tensor, layer_idx: int) -> Tensor:
        return self.paths.rows(self.cache.update_indexer(self.paths.unfold(new), layer_idx))

    def update_conv_state(self, new: Tensor, layer_idx: int, state_idx: int = 0, **_: object) -> Tensor:
        """The inputs that each node's window covers, [B·n, C, W + 1], the node's own at the end."""
        x = self.paths.unfold(new.transpose(1, 2)).transpose(1, 2)  # [B, C, n]
        state = self.cache.get_conv_state(layer_idx, state_idx=state_idx)
        self.cache.update_conv_state(x, layer_idx, state_idx=state_idx)
        index = ops.conv_windows(self.paths.parents, self.paths.depth, state.shape[-1] + 1).to(x.device) - 1
        inputs = torch.cat([state, x.to(state.dtype)], 2).transpose(1, 2)
        seen = inputs[torch.arange(len(x), device=x.device)[:, None, None], index]  # [B, n, W + 1, C]
        return seen.flatten(0, 1).transpose(1, 2)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor:
        assert self.coming is not None
        return self.update_conv_state(self.coming, layer_idx, state_idx)[..., :-1]


class _RowLayer:
    """One layer of it."""

    def __init__(self, rows: RowCache, layer_idx: int) -> None:
        self.rows, self.index = rows, layer_idx

    def update_index(self, new: Tensor) -> Tensor:
        return self.rows.update_indexer(new[:, 0], self.index)[:, None]

    @property
    def keys(self) -> Tensor:
        return torch.empty(0, self.get_seq_length(), 0)  # only how many there are is asked

    def get_seq_length(self) -> int:
        return self.rows.paths.slots


class OneChannel:
    """A cache for a window of token ids [B, W], which is a convolution's of one channel, [B, 1, W]."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        held = self.cache.get_conv_state(layer_idx, state_idx=state_idx)
        return None if held is None else held[:, 0]

    def update_conv_state(self, new: Tensor, layer_idx: int, **more: object) -> Tensor:
        return self.cache.update_conv_state(new[:, None], layer_idx, **more)[:, 0]
