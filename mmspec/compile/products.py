"""Products of one input with several weights as one product, with a copy of the weights that lies as it is read."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Sequence
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.fx.node import Argument
from torch.nn import Parameter

from mmspec.modes import lasting

MOST = 2 << 30  # bytes of weights that are copied for a function where the machine does not tell how many are free
WIDE = 1 << 18  # entries of a matrix from which oneDNN's form pays for its call
FEW = 64  # rows up to which it gains; one row alone it does not read faster
_MM, _ADDMM = torch.ops.aten.mm.default, torch.ops.aten.addmm.default
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_VIEWS = {getattr(torch.ops.aten, name) for name in ("t", "transpose", "permute", "slice", "detach")}


class Part(NamedTuple):
    """A matrix [K, N] of a product: a weight, and the operations of views that lead from it to the matrix."""

    weight: Tensor
    views: tuple[tuple[OpOverload, tuple[int, ...]], ...]

    def matrix(self) -> Tensor:
        matrix = self.weight
        for view, args in self.views:
            matrix = view(matrix, *args)
        return matrix


class Joined:
    """The matrices of several products side by side, in memory as a product of a few rows reads them fastest.

    A wide product takes less time than several narrow ones. Small float32 matrices lie as [K, N], and not as
    `nn.Linear` keeps them; a product of 4 to 36 rows takes about two thirds of the time then. Large matrices are packed
    in oneDNN's own form, which a product of a few rows reads faster still, above all in 16 bits.
    """

    def __init__(self, parts: Sequence[Part], packed: bool) -> None:
        self.parts, self.packed = parts, packed
        with lasting():
            self.tensor = self._copied()
            self.handle = torch.tensor(next(_NUMBERS))  # by which a graph calls what it cannot take as an input
        if packed:
            _PACKED[int(self.handle.numpy())] = self

    @property
    def given(self) -> Tensor:
        """What a graph takes."""
        return self.handle if self.packed else self.tensor

    def renew(self) -> None:
        """After the weights were written to, or moved."""
        with lasting():
            if self.packed:
                self.tensor = self._copied()
            else:
                torch.cat([part.matrix() for part in self.parts], 1, out=self.tensor)

    def _copied(self) -> Tensor:
        if not self.packed:
            return torch.cat([part.matrix() for part in self.parts], 1)
        return _pack(torch.cat([part.matrix().T for part in self.parts]))


_NUMBERS = count()
_PACKED: WeakValueDictionary[int, Joined] = WeakValueDictionary()
# By the weights, which it keeps; functions share them.
_HELD: WeakValueDictionary[Hashable, Joined] = WeakValueDictionary()


@torch.library.custom_op("mmspec::times_packed", mutates_args=())
def times_packed(rows: Tensor, handle: Tensor, width: int) -> Tensor:
    """Rows [M, K] times the packed matrix [K, width] of this handle."""
    return _times(rows, _PACKED[int(handle.numpy())].tensor)


@times_packed.register_fake
def _(rows: Tensor, handle: Tensor, width: int) -> Tensor:
    return rows.new_empty(len(rows), width)


def _pack(weight: Tensor) -> Tensor:
    """A weight [N, K] in the form in which oneDNN reads it."""
    form: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 16)
    return form


def _times(rows: Tensor, weight: Tensor) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(rows.contiguous(), weight, None, "none", [], "")
    return product


@lru_cache(maxsize=8)
@lasting()
def packs(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies packed matrices of this dtype on this CPU; tried once."""
    if not torch.backends.mkldnn.is_available() or dtype not in _DTYPES:
        return False
    try:
        if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return False
        if dtype == torch.float16 and not torch.ops.mkldnn._is_mkldnn_fp16_supported():
            return False
        x, w = (torch.linspace(-1, 1, n * 64).reshape(n, 64).to(dtype) for n in (5, 48))
        return torch.allclose(_times(x, _pack(w)).float(), (x @ w.T).float(), rtol=0.02, atol=0.02)
    except (AttributeError, RuntimeError):  # another build
        return False


def spare_memory() -> int | None:
    """Bytes of this machine's memory that can still be taken; None where it does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable")), None)


def _key(parts: Sequence[Part], packed: bool) -> Hashable:
    return (packed, *((id(part.weight), part.views) for part in parts))


def _of(parts: Sequence[Part], packed: bool) -> Joined:
    if (copy := _HELD.get(_key(parts, packed))) is None:
        copy = _HELD[_key(parts, packed)] = Joined(parts, packed)
    else:
        copy.renew()  # who has it looks for writes at the next call only
    return copy


def _form(parts: Sequence[Part], rows: int) -> bool | None:
    """Whether these matrices are packed for a product of so many rows; None: they stay as they are."""
    matrices = [part.matrix() for part in parts]
    if 1 < rows <= FEW and sum(m.numel() for m in matrices) >= WIDE and packs(matrices[0].dtype):
        return True
    return False if matrices[0].dtype is torch.float32 else None


_TIMES = torch.ops.mmspec.times_packed.default


def join(graph: fx.Graph, weights: dict[fx.Node, Tensor]) -> dict[fx.Node, Joined]:
    """Join the products in a graph; the new placeholders, after its others, and what they stand for.

    Only where it pays, on a CPU, as far as the memory for copies goes, and where nothing is written into what is
    multiplied or comes out.

    Args:
        weights: by the placeholders that stand for them.
    """
    parts, written = _parts(graph, weights), _Written(graph)
    groups: dict[object, list[fx.Node]] = {}
    for target in (_MM, _ADDMM):
        for node in graph.find_nodes(op="call_function", target=target):
            if node.args[-1] in parts and not node.kwargs and not written.into(node, node.args[-2]):
                groups.setdefault(_rows(node.args[-2]), []).append(node)
    *_, last = graph.find_nodes(op="placeholder")
    places: dict[Joined, fx.Node] = {}
    spare = spare_memory()
    room = MOST if spare is None else spare // 2
    for group in groups.values():
        product = [(node, parts[node.args[-1]]) for node in sorted(group)]
        mine = [part for _, part in product]
        form = _form(mine, product[0][0].meta["val"].shape[0])
        need = 0 if _key(mine, bool(form)) in _HELD else sum(part.matrix().nbytes for part in mine)
        if form is None or need > room:
            continue
        room -= need
        copy = _of(mine, form)
        if copy not in places:
            with graph.inserting_after(last):
                last = places[copy] = graph.placeholder(f"joined_{len(places)}")
        first, _ = product[0]
        with graph.inserting_before(first):
            widths = [part.matrix().shape[1] for part in mine]
            if form:
                whole = graph.call_function(_TIMES, (first.args[-2], places[copy], sum(widths)))
            else:
                whole = graph.call_function(_MM, (first.args[-2], places[copy]))
            split = graph.call_function(torch.ops.aten.split_with_sizes.default, (whole, widths, 1))
        for i, (node, _) in enumerate(product):
            with graph.inserting_before(node):
                part = graph.call_function(operator.getitem, (split, i)) if len(product) > 1 else whole
                if node.target is _ADDMM:
                    part = graph.call_function(torch.ops.aten.add.Tensor, (part, node.args[0]))
            node.replace_all_uses_with(part)
            graph.erase_node(node)
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
        node.target = torch.ops.aten.reshape.default  # parts of a product do not lie together
    graph.eliminate_dead_code()
    return {place: copy for copy, place in places.items()}


class _Written:
    """Which tensors of a graph are written into, by themselves or through a view."""

    def __init__(self, graph: fx.Graph) -> None:
        self._base: dict[Argument, Argument] = {}  # of a node the one of which it is a view
        self._bases: set[Argument] = set()  # of what is written into
        for node in graph.nodes:
            schema = getattr(node.target, "_schema", None) if node.op == "call_function" else None
            if node.target is operator.getitem or node.target is torch.ops.aten._unsafe_view.default:
                self._base[node] = self._of(node.args[0])
            elif schema is not None:
                self._read(node, schema)

    def _read(self, node: fx.Node, schema: torch.FunctionSchema) -> None:
        given = [*zip(schema.arguments, node.args, strict=False)]
        given += [(one, node.kwargs[one.name]) for one in schema.arguments if one.name in node.kwargs]
        for one, value in given:
            if one.alias_info is not None and isinstance(value, fx.Node):
                self._base.setdefault(node, self._of(value))
                if one.alias_info.is_write:
                    self._bases.add(self._of(value))

    def _of(self, node: Argument) -> Argument:
        return self._base.get(node, node)

    def into(self, *nodes: Argument) -> bool:
        """Whether any of these is."""
        return any(self._of(node) in self._bases for node in nodes)


def _rows(node: Argument) -> object:
    """What tells the same rows from others: every `nn.Linear` takes a view of its own of what it is given."""
    if isinstance(node, fx.Node) and node.target is torch.ops.aten.view.default:
        return node.args[0], str(node.args[1])
    return node


def _parts(graph: fx.Graph, weights: dict[fx.Node, Tensor]) -> dict[Argument, Part]:
    """The matrices that are views of weights, by node."""
    parts: dict[Argument, Part] = {
        node: Part(weight, ())
        for node, weight in weights.items()
        if isinstance(weight, Parameter) and weight.device.type == "cpu" and weight.dtype in _DTYPES
    }
    for node in graph.nodes:
        if node.op == "call_function" and getattr(node.target, "overloadpacket", None) in _VIEWS:
            above, *args = node.args
            if above in parts and not node.kwargs:
                part = parts[above]
                parts[node] = Part(part.weight, (*part.views, (node.target, tuple(args))))
    return parts
