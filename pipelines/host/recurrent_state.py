"""The state of decoder layers other than keys and values: the last inputs of convolutions, and recurrent states."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from mmspec.kernels import few_rows
from mmspec.kernels import reference_recurrent as ops
from mmspec.modes import lasting

Kind = tuple[tuple[torch.Size, torch.dtype, torch.device], ...]  # of one or several tensors


class Writes(NamedTuple):
    """What the nodes of a draft add to one layer's state; see `ops.recurrent_fold`."""

    k: Tensor  # [B, H, n, K]
    u: Tensor  # [B, H, n, V]
    G: Tensor  # [B, H, n] or [B, H, n, K]


class AcceptedPath:
    """The accepted nodes of a draft, the first `count` [B] of `kept` [B, m], in the forms that the layers need."""

    def __init__(self, kept: Tensor, count: Tensor) -> None:
        self.kept, self.count = kept, count
        self._taken: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = {}
        self._inputs: dict[tuple[int, torch.device], Tensor] = {}

    def taken(self, nodes: int, home: torch.device) -> tuple[Tensor, Tensor]:
        """Which of the nodes are accepted, bool [B, nodes], and the last accepted one, [B]."""
        if (nodes, home) not in self._taken:
            valid = torch.arange(self.kept.shape[1], device=self.kept.device) < self.count[:, None]
            path = valid.new_zeros(len(valid), nodes + 1).scatter_(1, self.kept.where(valid, nodes), True)[:, :nodes]
            last = self.kept.gather(1, (self.count[:, None] - 1).clamp(min=0))[:, 0]
            self._taken[nodes, home] = path.to(home), last.to(home)
        return self._taken[nodes, home]

    def inputs(self, width: int, home: torch.device) -> Tensor:
        """See `ops.kept_inputs`."""
        if (width, home) not in self._inputs:
            self._inputs[width, home] = ops.kept_inputs(self.kept, self.count, width).to(home)
        return self._inputs[width, home]


class RecurrentLayer:
    """The state of one layer: the last inputs of its convolutions and its recurrent state, by stock's `state_idx`."""

    def __init__(self) -> None:
        self.conv: dict[int, Tensor] = {}  # [B, C, W]
        self.state: dict[int, Tensor] = {}  # [B, H, K, V], written in place
        self.inputs: dict[int, Tensor] = {}  # of the last draft, [B, C, n]
        self.writes: dict[int, Writes] = {}  # of the last draft

    def extend(self, x: Tensor, index: int, width: int | None) -> Tensor:
        """Append new inputs [B, C, n] to the stored ones, return all, and store the last `width`, as stock does."""
        full = torch.cat([self.conv[index], x], -1) if index in self.conv else x
        keep = self.conv[index].shape[-1] if index in self.conv else width or x.shape[-1]
        kept = F.pad(full, (max(0, keep - full.shape[-1]), 0))[..., -keep:]
        self.conv[index] = kept.clone(memory_format=torch.contiguous_format)
        return full

    def replace(self, state: Tensor, index: int) -> None:
        """Store a copy of this recurrent state [B, H, …]."""
        with lasting():
            self.state[index] = state.clone(memory_format=torch.contiguous_format)

    def held(self) -> list[Tensor]:
        """The tensors of the state, convolutions first."""
        return [*self.conv.values(), *self.state.values()]

    def before(self, tensors: Iterator[Tensor]) -> RecurrentLayer:
        """A layer whose state has these tensors in the order of `held`, and that has not read a draft."""
        layer = RecurrentLayer()
        layer.conv, layer.state = ({index: next(tensors) for index in own} for own in (self.conv, self.state))
        return layer

    def read(self) -> list[Tensor]:
        """The inputs and writes of the last draft, in the order of `held`; the draft has used every state."""
        return [*(self.inputs[i] for i in self.conv), *(t for i in self.state for t in self.writes[i])]

    def put(self, tensors: Iterator[Tensor]) -> None:
        """Set the inputs and writes to those that another layer's `read` returned."""
        self.inputs = {index: next(tensors) for index in self.conv}
        self.writes = {index: Writes(next(tensors), next(tensors), next(tensors)) for index in self.state}


Group = list[tuple[RecurrentLayer, int]]  # layers whose states are updated together, each with a state's index


class RecurrentLayers(dict[int, RecurrentLayer]):
    """The recurrent layers of one cache, by layer index.

    Layers whose states have the same shape are updated together: by one operation where `few_rows` serves them, else in
    one buffer of which each layer's state is a view, by a dozen operations, as many as each layer alone would take.
    """

    def __init__(self, given: Iterable[tuple[int, RecurrentLayer]] = ()) -> None:
        super().__init__(given)
        # by what a draft has read: the groups of convolutions, and of recurrent states
        self._groups: dict[Hashable, tuple[list[Group], list[Group]]] = {}
        self._buffers: dict[Kind, tuple[Tensor, tuple[Tensor, ...]]] = {}  # kind → its buffer, and the layers' views

    def commit(self, path: AcceptedPath) -> None:
        """Apply the writes of the accepted nodes of the last draft to the states, and drop all others."""
        read = tuple((*layer.inputs, None, *layer.writes) for layer in self.values())
        if read not in self._groups:
            self._groups[read] = self._grouped()
        convolutions, states = self._groups[read]
        for group in convolutions:
            _fold_inputs(group, path)
        for group in states:
            self._fold_states(group, path)
        for layer in self.values():
            layer.inputs, layer.writes = {}, {}

    def _grouped(self) -> tuple[list[Group], list[Group]]:
        """The layers' convolutions and recurrent states by the shapes of what is updated together."""
        inputs, states = defaultdict[Kind, Group](list), defaultdict[Kind, Group](list)
        for layer in self.values():
            for index, x in layer.inputs.items():
                inputs[_kind(layer.conv[index], x)].append((layer, index))
            for index, written in layer.writes.items():
                states[_kind(layer.state[index], *written)].append((layer, index))
        return [*inputs.values()], [*states.values()]

    def _fold_states(self, group: Group, path: AcceptedPath) -> None:
        """Fold the nodes' writes into the states of layers of one kind."""
        own = tuple(layer.state[index] for layer, index in group)
        writes = [layer.writes[index] for layer, index in group]
        taken, last = path.taken(writes[0].k.shape[2], own[0].device)
        if few_rows.folds(own, writes[0].k, writes[0].G):
            few_rows.fold(own, writes, taken, last)
            return
        kind = _kind(own[0])
        buffer, views = self._buffers.get(kind, (own[0], ()))
        if len(own) != len(views) or any(a is not b for a, b in zip(own, views, strict=True)):  # rows joined or left
            with lasting():
                buffer = torch.stack(own)
            views = tuple(buffer.unbind())
            self._buffers[kind] = buffer, views
            for (layer, index), view in zip(group, views, strict=True):
                layer.state[index] = view
        k, u, G = (torch.cat(each) for each in zip(*writes, strict=True))
        flat = buffer.flatten(0, 1)
        wide = flat.float()
        ops.recurrent_fold(wide, k, u, G, _for_each(taken, group), _for_each(last, group))
        if wide is not flat:
            flat.copy_(wide)

    def copied(self, rows: slice) -> RecurrentLayers:
        """A copy of the states of some rows."""
        with lasting():
            return RecurrentLayers(
                (number, layer.before(iter([t[rows].clone() for t in layer.held()]))) for number, layer in self.items()
            )

    def select(self, rows: Tensor) -> None:
        self._buffers = {}
        for layer in self.values():
            for tensors in (layer.conv, layer.state):
                tensors.update({index: t[rows.to(t.device)] for index, t in tensors.items()})

    def join(self, other: RecurrentLayers) -> None:
        """These rows, then the other's."""
        self._buffers = {}
        for number, layer in self.items():
            theirs = other[number]
            for own, more in ((layer.conv, theirs.conv), (layer.state, theirs.state)):
                own.update({index: torch.cat([t, more[index]]) for index, t in own.items()})


def _kind(*tensors: Tensor) -> Kind:
    return tuple((t.shape, t.dtype, t.device) for t in tensors)


def _for_each(rows: Tensor, group: Group) -> Tensor:
    """The same rows for every layer of a group."""
    return rows.expand(len(group), *rows.shape).flatten(0, 1)  # a view of a single row


def _fold_inputs(group: Group, path: AcceptedPath) -> None:
    """Update the last inputs of convolutions of one shape with those of the accepted path."""
    stored = torch.cat([layer.conv[index] for layer, index in group])
    x = torch.cat([layer.inputs[index] for layer, index in group])
    kept = _for_each(path.inputs(stored.shape[-1], x.device), group)
    for (layer, index), inputs in zip(group, ops.conv_fold(x, stored, kept).chunk(len(group)), strict=True):
        layer.conv[index] = inputs
