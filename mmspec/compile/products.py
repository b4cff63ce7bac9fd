"""Replaces products of a few rows with weights in captured functions on a CPU; the same rows become one operation."""

from __future__ import annotations

import operator
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.fx.node import Argument

from mmspec.functional import ENTRIES
from mmspec.kernels import few_rows

_MM, _ADDMM, _T = torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.t.default
_VIEWS = {getattr(torch.ops.aten, name) for name in ("t", "transpose", "permute", "slice", "detach")}


def replace(graph: fx.Graph, weights: dict[fx.Node, Tensor]) -> None:
    """Replace products of up to `few_rows.ROWS` rows with large enough weights by `few_rows`.

    Args:
        weights: by their placeholders.
    """
    matrices = _matrices(graph, weights)
    groups: list[list[fx.Node]] = []
    open_groups: dict[Hashable, list[fx.Node]] = {}  # by the rows; closed at each write, which may change the rows
    for node in graph.nodes:
        if isinstance(node.target, OpOverload) and node.target._schema.is_mutable:
            open_groups = {}
        if node.target in (_MM, _ADDMM) and node.args[-1] in matrices and not node.kwargs and _gains(node):
            key = _rows(node.args[-2])
            if key not in open_groups:
                groups.append(open_groups.setdefault(key, []))
            open_groups[key].append(node)
    for group in groups:
        _put(graph, group)
    graph.eliminate_dead_code()


def _put(graph: fx.Graph, group: list[fx.Node]) -> None:
    """Replace these products of the same rows by one operation at the place of the first."""
    first, operations = group[0], few_rows.operations()
    for node in group[1:]:
        _move_before(first, node.args[-1])
    with graph.inserting_before(first):
        weights = [graph.call_function(_T, (node.args[-1],)) for node in group]
        if len(group) == 1:
            parts = [graph.call_function(operations.linear.default, (first.args[-2], weights[0]))]
        else:
            whole = graph.call_function(operations.products.default, (first.args[-2], weights))
            parts = [graph.call_function(operator.getitem, (whole, i)) for i in range(len(group))]
    for node, part in zip(group, parts, strict=True):
        part.meta["val"] = node.meta["val"]
        if node.target is _ADDMM:
            with graph.inserting_before(node):
                part = graph.call_function(torch.ops.aten.add.Tensor, (part, node.args[0]))
            part.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(part)
        graph.erase_node(node)


def _gains(node: fx.Node) -> bool:
    factors: Any = node.args[-2:]
    rows, matrix = (each.meta["val"] for each in factors)
    large = matrix.numel() >= ENTRIES and matrix.T.is_contiguous()
    return 0 < len(rows) <= few_rows.ROWS and large and few_rows.available(matrix.dtype)


def _rows(node: Argument) -> Any:
    """A key that is equal for the same rows, since each `nn.Linear` makes its own view of its input."""
    if isinstance(node, fx.Node) and node.target is torch.ops.aten.view.default:
        return node.args[0], str(node.args[1])
    return node


def _matrices(graph: fx.Graph, weights: dict[fx.Node, Tensor]) -> set[Argument]:
    """The weights on a CPU, and the views of these."""
    found: set[Argument] = {node for node, weight in weights.items() if weight.is_cpu}
    for node in graph.nodes:
        view = node.op == "call_function" and getattr(node.target, "overloadpacket", None) in _VIEWS
        if view and node.args[0] in found and not node.kwargs:
            found.add(node)
    return found


def _move_before(first: fx.Node, matrix: Any) -> None:
    """Move a view of a weight, with those that lead to it, before this node, if they are behind it."""
    if matrix > first:
        first.prepend(matrix)
        _move_before(matrix, matrix.args[0])
