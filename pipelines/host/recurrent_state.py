"""What decoder layers keep beside keys and values: the last inputs of convolutions, and recurrent states."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from mmspec.kernels import reference_recurrent as ops
from mmspec.modes import lasting

Kind = tuple[tuple[torch.Size, torch.dtype, torch.device], ...]  # of tensors that go together


class Writes(NamedTuple):
    """What the nodes of a draft wrote into one layer's state; see `ops.recurrent_fold`."""

    k: Tensor  # [B, H, n, K]
    u: Tensor  # [B, H, n, V]
    G: Tensor  # [B, H, n] or [B, H, n, K]


class AcceptedPath:
    """The nodes of a draft that stand, as all layers fold them: the first `count` [B] of `kept` [B, m]."""

    def __init__(self, kept: Tensor, count: Tensor) -> None:
        self.kept, self.count = kept, count
        self._taken: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = {}
        self._inputs: dict[tuple[int, torch.device], Tensor] = {}

    def taken(self, nodes: int, home: torch.device) -> tuple[Tensor, Tensor]:
        """Which of the nodes stand, bool [B, nodes], and the last that does, [B]."""
        if (nodes, home) not in self._taken:
            there = torch.arange(self.kept.shape[1], device=self.kept.device) < self.count[:, None]
            path = there.new_zeros(len(there), nodes + 1).scatter_(1, self.kept.where(there, nodes), True)[:, :nodes]
            last = self.kept.gather(1, (self.count[:, None] - 1).clamp(min=0))[:, 0]
            self._taken[nodes, home] = path.to(home), last.to(home)
        return self._taken[nodes, home]

    def inputs(self, width: int, home: torch.device) -> Tensor:
        """As `ops.kept_inputs`."""
        if (width, home) not in self._inputs:
            self._inputs[width, home] = ops.kept_inputs(self.kept, self.count, width).to(home)
        return self._inputs[width, home]


class RecurrentLayer:
    """The state of one layer: the last inputs of its convolutions and its recurrent state, by stock's `state_idx`."""

    def __init__(self) -> None:
        self.conv: dict[int, Tensor] = {}  # [B, C, W]
        self.state: dict[int, Tensor] = {}  # [B, H, K, V], written in place
        self.inputs: dict[int, Tensor] = {}  # of the draft that was read last, [B, C, n]
        self.writes: dict[int, Writes] = {}  # likewise

    def extend(self, x: Tensor, index: int, width: int | None) -> Tensor:
        """As stock: new inputs [B, C, n] behind those that are kept, of which the last `width` are kept from now on."""
        full = torch.cat([self.conv[index], x], -1) if index in self.conv else x
        keep = self.conv[index].shape[-1] if index in self.conv else width or x.shape[-1]
        kept = F.pad(full, (max(0, keep - full.shape[-1]), 0))[..., -keep:]
        self.conv[index] = kept.clone(memory_format=torch.contiguous_format)
        return full

    def replace(self, state: Tensor, index: int) -> None:
        """Keep a copy of this recurrent state [B, H, …]."""
        with lasting():
            self.state[index] = state.clone(memory_format=torch.contiguous_format)

    def held(self) -> list[Tensor]:
        """What a draft is read from, in an order of its own."""
        return [*self.conv.values(), *self.state.values()]

    def before(self, held: Iterator[Tensor]) -> RecurrentLayer:
        """Another with these tensors for what `held` gives, and nothing that was read."""
        made = RecurrentLayer()
        made.conv, made.state = ({index: next(held) for index in mine} for mine in (self.conv, self.state))
        return made

    def read(self) -> list[Tensor]:
        """What the draft that was read last left, in the order of `held`; every state has been read."""
        return [*(self.inputs[i] for i in self.conv), *(t for i in self.state for t in self.writes[i])]

    def put(self, read: Iterator[Tensor]) -> None:
        """As if it had read what another has; see `read`."""
        self.inputs = {index: next(read) for index in self.conv}
        self.writes = {index: Writes(next(read), next(read), next(read)) for index in self.state}


class RecurrentLayers(dict[int, RecurrentLayer]):
    """These layers of one cache, by number.

    Layers whose states have one shape are folded together, in one buffer of which each layer's state is a view: a dozen
    operations a round, where each layer by itself would take as many.
    """

    def __init__(self, given: Iterable[tuple[int, RecurrentLayer]] = ()) -> None:
        super().__init__(given)
        self._buffers: dict[Kind, tuple[Tensor, tuple[Tensor, ...]]] = {}  # by kind, and its views in the layers

    def commit(self, path: AcceptedPath) -> None:
        """These nodes of the draft that was read last stand, and no others."""
        inputs: defaultdict[Kind, list[tuple[RecurrentLayer, int]]] = defaultdict(list)
        states: defaultdict[tuple[Kind, Kind], list[tuple[RecurrentLayer, int]]] = defaultdict(list)
        for layer in self.values():
            for index, x in layer.inputs.items():
                inputs[_kind(layer.conv[index], x)].append((layer, index))
            for index, written in layer.writes.items():
                states[_kind(layer.state[index]), _kind(*written)].append((layer, index))
        for alike in inputs.values():
            _fold_inputs(alike, path)
        for (kind, _), alike in states.items():
            self._fold_states(kind, alike, path)
        for layer in self.values():
            layer.inputs, layer.writes = {}, {}

    def _fold_states(self, kind: Kind, alike: list[tuple[RecurrentLayer, int]], path: AcceptedPath) -> None:
        """Fold what the nodes wrote into the states of layers of one kind."""
        own = tuple(layer.state[index] for layer, index in alike)
        buffer, views = self._buffers.get(kind, (own[0], ()))
        if len(own) != len(views) or any(a is not b for a, b in zip(own, views, strict=True)):  # rows came or went
            with lasting():
                buffer = torch.stack(own)
            views = tuple(buffer.unbind())
            self._buffers[kind] = buffer, views
            for (layer, index), view in zip(alike, views, strict=True):
                layer.state[index] = view
        k, u, G = (torch.cat(each) for each in zip(*(layer.writes[index] for layer, index in alike), strict=True))
        taken, last = path.taken(k.shape[2], k.device)
        flat = buffer.flatten(0, 1)
        wide = flat.float()
        ops.recurrent_fold(wide, k, u, G, taken.repeat(len(own), 1), last.repeat(len(own)))
        if wide is not flat:
            flat.copy_(wide)

    def copied(self, rows: slice) -> RecurrentLayers:
        """Others that hold the same of some rows."""
        with lasting():
            return RecurrentLayers(
                (number, layer.before(iter([t[rows].clone() for t in layer.held()]))) for number, layer in self.items()
            )

    def select(self, rows: Tensor) -> None:
        self._buffers = {}
        for layer in self.values():
            for held in (layer.conv, layer.state):
                held.update({index: t[rows.to(t.device)] for index, t in held.items()})

    def join(self, other: RecurrentLayers) -> None:
        """These rows, then the other's."""
        self._buffers = {}
        for number, layer in self.items():
            theirs = other[number]
            for mine, more in ((layer.conv, theirs.conv), (layer.state, theirs.state)):
                mine.update({index: torch.cat([t, more[index]]) for index, t in mine.items()})


def _kind(*tensors: Tensor) -> Kind:
    return tuple((t.shape, t.dtype, t.device) for t in tensors)


def _fold_inputs(alike: list[tuple[RecurrentLayer, int]], path: AcceptedPath) -> None:
    """The last inputs of convolutions of one shape, once a path has been taken."""
    held = torch.cat([layer.conv[index] for layer, index in alike])
    x = torch.cat([layer.inputs[index] for layer, index in alike])
    kept = path.inputs(held.shape[-1], x.device).repeat(len(alike), 1)
    for (layer, index), inputs in zip(alike, ops.conv_fold(x, held, kept).chunk(len(alike)), strict=True):
        layer.conv[index] = inputs
