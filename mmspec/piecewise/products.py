"""Products of one input with several weights as one product, with a copy of the weights that lies as it is read."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor, fx
from torch.nn import Parameter

from mmspec.modes import lasting

MOST = 2 << 30  # bytes of weights that are copied for one function
_MM, _ADDMM = torch.ops.aten.mm.default, torch.ops.aten.addmm.default
_VIEWS = {getattr(torch.ops.aten, name) for name in ("t", "transpose", "permute", "slice", "detach")}


class Part(NamedTuple):
    """A matrix [K, N] of a product: a weight, and the operations of views that lead from it to the matrix."""

    weight: Tensor
    views: tuple[tuple[Any, tuple[Any, ...]], ...]

    def matrix(self) -> Tensor:
        found = self.weight
        for view, args in self.views:
            found = view(found, *args)
        return found


class Joined:
    """The matrices of several products side by side, in memory as a product of a few rows reads them fastest.

    On a CPU, a product of 4 to 36 rows with a float32 matrix that lies as [K, N] takes about two thirds of the time
    that it takes with one that lies as `nn.Linear` keeps it, and a wide product less than several narrow ones.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = parts
        with lasting():
            self.tensor = torch.cat([part.matrix() for part in parts], 1)

    def renew(self) -> None:
        """After the weights were written to, or moved."""
        with lasting():
            torch.cat([part.matrix() for part in self.parts], 1, out=self.tensor)


_HELD: WeakValueDictionary[Any, Joined] = WeakValueDictionary()  # by the weights, which it keeps; functions share them


def _of(parts: Sequence[Part]) -> Joined:
    key = tuple((id(part.weight), part.views) for part in parts)
    if (found := _HELD.get(key)) is None:
        found = _HELD[key] = Joined(parts)
    else:
        found.renew()  # who has it looks for writes at the next call only
    return found


def join(graph: fx.Graph, weights: dict[fx.Node, Tensor]) -> dict[fx.Node, Joined]:
    """Join the products in a graph; the new placeholders, after its others, and what they stand for.

    Only where it pays, on a CPU in float32, up to `MOST` bytes, and where nothing is written into what is multiplied or
    comes out.

    Args:
        weights: by the placeholders that stand for them.
    """
    parts, written = _parts(graph, weights), _Written(graph)
    groups: dict[Any, list[fx.Node]] = {}
    for target in (_MM, _ADDMM):
        for node in graph.find_nodes(op="call_function", target=target):
            if node.args[-1] in parts and not node.kwargs and not written.into(node, node.args[-2]):
                groups.setdefault(_rows(node.args[-2]), []).append(node)
    products = [[(node, parts[node.args[-1]]) for node in sorted(group)] for group in groups.values()]
    copied = {tuple((id(part.weight), part.views) for _, part in product): product for product in products}
    if sum(part.matrix().nbytes for product in copied.values() for _, part in product) > MOST:
        return {}
    *_, last = graph.find_nodes(op="placeholder")
    places: dict[Joined, fx.Node] = {}
    for product in products:
        copy = _of([part for _, part in product])
        if copy not in places:
            with graph.inserting_after(last):
                last = places[copy] = graph.placeholder(f"joined_{len(places)}")
        first, _ = product[0]
        with graph.inserting_before(first):
            whole = graph.call_function(_MM, (first.args[-2], places[copy]))
            widths = [part.matrix().shape[1] for _, part in product]
            split = graph.call_function(torch.ops.aten.split_with_sizes.default, (whole, widths, 1))
        for i, (node, _) in enumerate(product):
            with graph.inserting_before(node):
                mine = graph.call_function(operator.getitem, (split, i)) if len(product) > 1 else whole
                if node.target is _ADDMM:
                    mine = graph.call_function(torch.ops.aten.add.Tensor, (mine, node.args[0]))
            node.replace_all_uses_with(mine)
            graph.erase_node(node)
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
        node.target = torch.ops.aten.reshape.default  # parts of a product do not lie together
    graph.eliminate_dead_code()
    return {place: copy for copy, place in places.items()}


class _Written:
    """Which tensors of a graph are written into, by themselves or through a view."""

    def __init__(self, graph: fx.Graph) -> None:
        self._base: dict[Any, Any] = {}  # of a node the one of which it is a view
        self._bases: set[Any] = set()  # of what is written into
        for node in graph.nodes:
            schema = getattr(node.target, "_schema", None) if node.op == "call_function" else None
            if node.target is operator.getitem or node.target is torch.ops.aten._unsafe_view.default:
                self._base[node] = self._of(node.args[0])
            elif schema is not None:
                self._read(node, schema)

    def _read(self, node: fx.Node, schema: Any) -> None:
        given = [*zip(schema.arguments, node.args, strict=False)]
        given += [(one, node.kwargs[one.name]) for one in schema.arguments if one.name in node.kwargs]
        for one, value in given:
            if one.alias_info is not None and isinstance(value, fx.Node):
                self._base.setdefault(node, self._of(value))
                if one.alias_info.is_write:
                    self._bases.add(self._of(value))

    def _of(self, node: Any) -> Any:
        return self._base.get(node, node)

    def into(self, *nodes: Any) -> bool:
        """Whether any of these is."""
        return any(self._of(node) in self._bases for node in nodes)


def _rows(node: Any) -> Any:
    """What tells the same rows from others: every `nn.Linear` takes a view of its own of what it is given."""
    if node.target is torch.ops.aten.view.default:
        return (node.args[0], tuple(node.args[1]))
    return node


def _parts(graph: fx.Graph, weights: dict[fx.Node, Tensor]) -> dict[Any, Part]:
    """The matrices that are views of weights, by node."""
    found: dict[Any, Part] = {
        node: Part(weight, ())
        for node, weight in weights.items()
        if isinstance(weight, Parameter) and weight.device.type == "cpu" and weight.dtype is torch.float32
    }
    for node in graph.nodes:
        if node.op == "call_function" and getattr(node.target, "overloadpacket", None) in _VIEWS:
            above, *args = node.args
            if above in found and not node.kwargs:
                part = found[above]
                found[node] = Part(part.weight, (*part.views, (node.target, tuple(args))))
    return found
