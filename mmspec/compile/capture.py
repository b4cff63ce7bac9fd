"""Piecewise capture: a function of tensors is traced for fixed shapes, cut at its attentions, compiled in pieces."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor, fx
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.fx.passes.split_module import split_module
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from mmspec.compile import graphs, opaque, products
from mmspec.compile.inductor import inductor
from mmspec.compile.recording import Function
from mmspec.compile.unread import Uncapturable, unread
from mmspec.functional import LayerAttention, attend, cut
from mmspec.modes import uncast

Compile = Callable[[fx.GraphModule, list[Tensor]], Function]  # a graph and example inputs → a function, as `inductor`
Place = Callable[[fx.GraphModule, Function], Function]  # a piece and its compiled function → the function to run

_ATTEND = torch.ops.mmspec.attend.default
_making = threading.RLock()  # torch traces and compiles by patching global state
# Largest deviation from the module's own result, relative to its largest number: room for another summation order only.
_NEAR = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


def compare(mine: Sequence[Tensor], stock: Sequence[Tensor], dtype: torch.dtype) -> None:
    """Check a capture's outputs against the module's own, to the precision of this dtype.

    Raises Uncapturable: they deviate more.
    """
    errors = [float((a - b).abs().max() / a.abs().max()) for a, b in zip(stock, mine, strict=True)]
    if not all(error <= _NEAR.get(dtype, 1e-4) for error in errors):  # also if one is NaN
        raise Uncapturable(f"its outputs would be {max(errors):.1e} away from the uncompiled ones")


class Cut(TorchFunctionMode):
    """Inside this mode, torch's attention over keys and values that were just appended is replaced by `attend`.

    Args:
        appended: records new keys and values: its `fresh` is the layer, k, v and their mask, for `attend`; None:
            nothing was appended.
        masked: whether the attention must get a mask, which each call replaces by its own.
    """

    def __init__(self, appended: Any, masked: bool) -> None:
        self.appended, self.masked = appended, masked

    def __torch_function__(
        self, func: Callable[..., object], types: object, args: Any = (), kwargs: Any = None
    ) -> object:
        if func is F.scaled_dot_product_attention and self.appended.fresh is not None:
            return self._attend(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        (layer, k, v, seen), self.appended.fresh = self.appended.fresh, None
        if (self.masked and attn_mask is None) or dropout_p or is_causal:
            raise Uncapturable(f"the attention of layer {layer} does not take the mask as it is given")
        query = query.reshape(len(query), -1, k.shape[2], query.shape[3])  # for one node, transformers packs groups
        return cut(layer, query.shape[-1] ** -0.5 if scale is None else scale, query, k, v, seen)


class PiecewiseFunction:
    """A captured function: computes `function` for other tensors of the same shapes, without running its Python code.

    Between two attentions nothing depends on the length of the cached prefix, so the pieces have fixed shapes and are
    compiled once; pieces with the same code, such as those between two layers of a model, share one compiled function.
    Each call passes its own attention. On CUDA each piece except the last is a CUDA graph at each of its places, or the
    whole function is one, if the attention is steady (`mmspec/compile/graphs.py`). An attention must not keep its
    arguments.

    Args:
        function: of tensors, returning a list of tensors; its attentions are `attend`.
        inputs: example inputs.
        own: all other tensors that it may use, such as weights; their contents may change, but not their shapes.
        compile: default `inductor`.
        variants: values of an additional first argument of `function` that must not change its code.
        graphed: whether its pieces may become CUDA graphs, which keep their intermediate results allocated.

    Raises:
        Uncapturable: it reads the value of a tensor, or uses a tensor that is neither an input nor in `own`, so that
            its code may change from call to call.
    """

    made: ClassVar[int] = 0  # number of captures in this process

    def __init__(
        self, function: Function, inputs: Sequence[Tensor], own: Iterable[Tensor], compile: Compile | None = None,
        variants: Sequence[int] = (), graphed: bool = True,
    ) -> None:  # fmt: skip
        given, self._device, inputs = list(own), inputs[0].device, [t.contiguous() for t in inputs]
        kind = self._device.type
        self._cast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        with _making:
            graph, weights = _traced(partial(function, variants[0]) if variants else function, inputs, given)
            for other in variants[1:]:
                if _traced(partial(function, other), inputs, given)[0].code != graph.code:
                    raise Uncapturable("what it computes depends on the length of the cached prefix")
            recorded = graphed and graphs.wanted([*inputs, *weights])
            if not recorded:
                places = graph.graph.find_nodes(op="placeholder")[len(inputs) :]
                products.replace(graph.graph, dict(zip(places, weights, strict=True)))
            self._weights = weights  # only here, so that they are freed with the model
            self._graphs = graphs.Graphs(inputs, attend, compare) if recorded else None
            place = None if self._graphs is None else self._graphs.place
            with uncast(self._device):
                self._run, self.pieces = _cut(graph, compile or inductor, place)
            if self._graphs is not None:
                self(attend, *inputs)  # records the graphs: the first real call, which may be checked, is a replay
            PiecewiseFunction.made += 1

    def __call__(self, attend: LayerAttention, *inputs: Tensor) -> Sequence[Tensor]:
        inputs = tuple(t.contiguous() for t in inputs)  # the pieces are compiled for such, and do not check it
        if self._cast is None:
            return self._replay(attend, *inputs)
        with uncast(self._device):  # the pieces already contain autocast's casts
            return self._replay(partial(_cast, attend, self._device.type, self._cast), *inputs)

    def _replay(self, attend: LayerAttention, *inputs: Tensor) -> Sequence[Tensor]:
        if self._graphs is not None:
            return self._graphs.run(self._run, inputs, self._weights, attend)
        return self._run(*inputs, *self._weights, attend)


def _cast(attend: LayerAttention, kind: str, dtype: torch.dtype, *args: Tensor | float | None) -> Tensor:
    """The attention under autocast; as such it is not steady, so that the function runs in pieces."""
    with torch.autocast(kind, dtype):
        return attend(*args)


@contextmanager
def _own_casts() -> Iterator[None]:
    """Turn off autocast's cache of cast weights, whose tensors are not the function's own."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def _one_mode() -> AbstractContextManager[TracingContext | None]:
    """One FakeTensorMode for all fake tensors of a trace: otherwise torch creates one each, a third of the time."""
    return tracing(TracingContext(FakeTensorMode(allow_fallback_kernels=True)))


def _traced(function: Function, inputs: Sequence[Tensor], own: Iterable[Tensor]) -> tuple[fx.GraphModule, list[Tensor]]:
    """The graph of `function` with the weights that it uses as additional inputs, and these weights."""
    mine, modules = {id(t): t for t in own}, list[torch.nn.Module]()

    def checked(*inputs: Tensor) -> Sequence[Tensor]:
        modules.append(get_proxy_mode().tracer.root)  # type: ignore[union-attr]
        with unread(mine.values()):
            return function(*inputs)

    try:
        with _own_casts(), _one_mode():
            graph = make_fx(checked)(*inputs)
        modules.append(graph)
        graph.graph.eliminate_dead_code()
        weights = _as_inputs(graph, mine)
    except RuntimeError as error:  # a branch on the value of a tensor, an operation that cannot be recorded
        raise Uncapturable(str(error).strip().splitlines()[0]) from error
    finally:
        _release(modules, mine)
    graph.graph.set_codegen(fx.graph.CodeGen())  # flat arguments and results
    graph.recompile()
    return graph, weights


def _as_inputs(graph: fx.GraphModule, mine: dict[int, Tensor]) -> list[Tensor]:
    """Replace weights, which are attributes of the graph, by additional inputs; these weights in their order."""
    weights: dict[int, tuple[Tensor, fx.Node]] = {}
    fake = FakeTensorMode()
    *_, last = (n for n in graph.graph.nodes if n.op == "placeholder")
    for node in [n for n in graph.graph.nodes if n.op == "get_attr"]:
        t = getattr(graph, node.target)
        if id(t) not in mine:
            if all(user.target is torch.ops.aten.lift_fresh_copy.default for user in node.users):
                continue  # a literal
            raise Uncapturable(f"it uses a tensor {list(t.shape)} that is neither an input nor a weight")
        if id(t) not in weights:
            with graph.graph.inserting_after(last):
                last = graph.graph.placeholder(f"weight_{len(weights)}")
            with fake:  # not the weight itself, since a graph refers to itself
                last.meta["val"] = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)
            weights[id(t)] = (t, last)
        node.replace_all_uses_with(weights[id(t)][1])
        graph.graph.erase_node(node)
    return [t for t, _ in weights.values()]


def _release(modules: Iterable[torch.nn.Module], weights: dict[int, Tensor]) -> None:
    """Remove the weights from what torch has traced: tracers and graphs refer to themselves, so that what they hold
    stays until the garbage collector comes."""
    for module in modules:
        for name in [*module._parameters, *module._buffers, *vars(module)]:
            if id(getattr(module, name)) in weights:
                delattr(module, name)


def _cut(graph: fx.GraphModule, compile: Compile, place: Place | None) -> tuple[Function, int]:
    """The pieces as one function, whose last argument computes attentions; and the number of distinct pieces.

    `place` maps a piece and its compiled function to the function to run, such as a CUDA graph. It is not called for
    the last of several pieces: its outputs (logits) are large, and each of its graphs would keep them allocated.
    """
    part, parts = 0, dict[fx.Node, int]()
    for node in graph.graph.nodes:
        if (call := opaque.call_of(node)) is not None:
            parts[node] = parts[call]
            continue
        alone = node.target is _ATTEND or opaque.is_opaque(node)
        part += alone
        parts[node] = part
        part += alone
    whole = split_module(graph, torch.nn.Module(), parts.__getitem__, keep_original_order=True)
    *_, last = whole.graph.find_nodes(op="placeholder")
    with whole.graph.inserting_after(last):
        attention = whole.graph.placeholder("attention")
    ready: dict[str, Function] = {}
    literals = whole.graph.find_nodes(op="get_attr")
    # What runs: without `whole`, which refers to itself, so that it is freed at once.
    own = SimpleNamespace(**{node.target: getattr(whole, node.target) for node in literals})
    nodes = whole.graph.find_nodes(op="call_module")
    for node in nodes:
        piece = getattr(whole, node.target)
        if opaque.resolve(piece):
            setattr(own, node.target, piece)
            continue
        cut = next((n for n in piece.graph.nodes if n.target is _ATTEND), None)
        if cut is None:
            _in_a_tuple(whole, node, piece)
            function = _ready(piece, ready, compile)
            is_last = node is nodes[-1] and part > 0
            setattr(own, node.target, function if place is None or is_last else place(piece, function))
            continue
        outer = dict(zip(piece.graph.find_nodes(op="placeholder"), node.args, strict=True))
        with whole.graph.inserting_before(node):
            new = whole.graph.call_function(_attended, (attention, *(outer.get(a, a) for a in cut.args)))
        node.replace_all_uses_with(new)
        whole.graph.erase_node(node)
    whole.recompile()
    return partial(type(whole).forward, own), len(ready)


def _in_a_tuple(whole: fx.GraphModule, node: fx.Node, piece: fx.GraphModule) -> None:
    """Make a piece with one output return a tuple, as inductor requires; torch 2.11 has no option for that."""
    output = piece.graph.output_node()
    if not isinstance(output.args[0], fx.Node):
        return
    output.args = ((output.args[0],),)
    piece.recompile()
    with whole.graph.inserting_after(node):
        only = whole.graph.call_function(operator.getitem, (node, 0))
    node.replace_all_uses_with(only, delete_user_cb=lambda user: user is not only)


def _attended(attention: LayerAttention, *args: Tensor | float | None) -> Tensor:
    return attention(*args)


def _ready(piece: fx.GraphModule, ready: dict[str, Function], compile: Compile) -> Function:
    """The compiled function of a piece, or that of an earlier piece with the same code and shapes."""
    for number, node in enumerate(piece.graph.nodes):
        node.name = f"n{number}"
        if node.op == "placeholder":
            node.target = node.name
    piece.recompile()
    values = [node.meta["val"] for node in piece.graph.find_nodes(op="placeholder")]
    literals = [getattr(piece, node.target).tolist() for node in piece.graph.find_nodes(op="get_attr")]
    key = piece.code + str([literals, *((tuple(t.shape), t.stride(), t.dtype, t.device) for t in values)])
    if key not in ready:
        examples = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).zero_() for t in values]
        ready[key] = compile(piece, examples)
    return ready[key]
