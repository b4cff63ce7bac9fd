"""Decoder layers with a recurrent or convolutional state: they read a draft tree in one forward of stock's own code.

A module with such a state calls one of the functions in SCANS in the middle of its forward. `reader` builds a mixin for
the module's class, whose forward is stock's code with these functions replaced, only in that forward. While a draft is
read, the replacements follow its tree and record what every node adds to the state; otherwise they call stock's, or
for the gated delta rule on a CPU `few_rows.chain`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn import functional as F
from transformers.activations import ACT2FN

from mmspec.functional import scan
from mmspec.kernels import few_rows
from mmspec.kernels import reference_recurrent as ops
from mmspec.modes import each_module, uncast
from mmspec.pipelines.host.forward import during, now
from mmspec.pipelines.host.hooks import stock
from mmspec.pipelines.host.recurrent_state import RecurrentLayer, Writes

Scan = Callable[..., tuple[Tensor, Tensor | None]]  # returns the tokens' outputs, and the state after them


@dataclass
class Reading:
    """A draft that is being read, and the layer that reads it now."""

    parents: Tensor  # [B, n]
    depth: Tensor  # [B, n]
    ancestors: Tensor  # bool [B, n, n]
    layer: RecurrentLayer | None = None
    index: int = 0  # the `state_idx` of the convolution that stock will call next
    _windows: dict[int, Tensor] = field(default_factory=dict)

    def windows(self, width: int, device: torch.device) -> Tensor:
        """See `ops.conv_windows`; computed once for all layers."""
        if width not in self._windows:
            self._windows[width] = ops.conv_windows(self.parents, self.depth, width)
        return self._windows[width].to(device)

    def read(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor, beta: Tensor | None, turned: bool
    ) -> Tensor:
        """The nodes' outputs, [B, H, n, V] in float32, from their queries, keys and values [B, H, n, …]; their writes
        are stored in the layer.

        Args:
            beta: of the delta rule, [B, H, n].
            turned: whether stock keeps the state as [B, H, V, K]; then the two factors of a write are swapped.
        """
        assert self.layer is not None
        ancestors = self.ancestors.to(k.device)
        state = state.float().transpose(-1, -2) if turned else state.float()
        with uncast(k.device):
            out, u, G = scan(q, k, v, beta, g, state, ancestors)
        self.layer.writes[0] = Writes(u, k, G) if turned else Writes(k, u, G)
        return out


@contextmanager
def reads(parents: Tensor, depth: Tensor, ancestors: Tensor) -> Iterator[None]:
    """A context in which forwards read this tree."""
    with during(draft=Reading(parents, depth, ancestors)):
        yield


def _conv(stock: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def causal_conv1d(
        x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **more: object
    ) -> Tensor:
        tree = now().draft
        if tree is None or tree.layer is None:
            return stock(x, weight, bias, activation=activation, **more)
        state = tree.layer.conv[tree.index]
        out = ops.tree_conv(x, state, weight, bias, tree.windows(state.shape[-1], x.device))
        return (out if activation is None else ACT2FN[activation](out)).to(x.dtype)

    return causal_conv1d


def _delta(stock: Scan) -> Scan:
    """The gated delta rule; with a decay for each channel, Kimi's."""

    def gated_delta_rule(
        query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, *,
        initial_state: Tensor | None = None, use_qk_l2norm_in_kernel: bool = False, **more: object,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        tree = None if initial_state is None else now().draft
        packed = more.get("cu_seqlens") is not None
        if tree is None and (packed or now().read is None or not few_rows.chains(value, g)):
            return stock(
                query, key, value, g=g, beta=beta, initial_state=initial_state,
                use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, **more,
            )  # fmt: skip
        groups = value.shape[2] // key.shape[2]
        q, k = (t.repeat_interleave(groups, 2) if groups > 1 else t for t in (query, key))
        q, k, v, b, decay = (t.transpose(1, 2).float() for t in (q, k, value, beta, g))
        if use_qk_l2norm_in_kernel:
            q, k = (t * torch.rsqrt((t * t).sum(-1, keepdim=True) + 1e-6) for t in (q, k))
        q = q * q.shape[-1] ** -0.5
        if tree is not None:
            out, state = tree.read(q, k, v, decay, initial_state, b, False).transpose(1, 2), initial_state
        else:
            out, state = few_rows.chain(q, k, v, b, decay, None if initial_state is None else initial_state.float())
        return out.to(query.dtype), state

    return gated_delta_rule


def _ssd(stock: Callable[..., Any]) -> Scan:
    """State space duality, as in Mamba-2."""

    def mamba2_scan(
        x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, D: Tensor | None = None,
        dt_bias: Tensor | None = None, initial_states: Tensor | None = None, dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")), **more: object,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        tree = now().draft
        if tree is None or initial_states is None:
            return stock(
                x, dt, A, B, C, chunk_size, D=D, dt_bias=dt_bias, initial_states=initial_states,
                dt_softplus=dt_softplus, dt_limit=dt_limit, **more,
            )  # fmt: skip
        step = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
        # stock decodes without the `dt_limit` of its prefills
        step = (F.softplus(step) if dt_softplus else step).float()
        groups, wide = x.shape[2] // B.shape[2], x.float()
        q, k = (t.float().repeat_interleave(groups, 2).transpose(1, 2) for t in (C, B))
        v, g = (wide * step[..., None]).transpose(1, 2), (A * step).transpose(1, 2)
        out = tree.read(q, k, v, g, initial_states, None, True).transpose(1, 2)
        return (out if D is None else out + D[..., None] * wide).contiguous(), initial_states

    return mamba2_scan


def _ssd_step(stock: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`_ssd` for one token; stock passes every argument expanded to the state's [H, V, K]."""

    def selective_state_update(
        state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None,
        z: Tensor | None = None, dt_bias: Tensor | None = None, dt_softplus: bool = False, **more: object,
    ) -> Tensor:  # fmt: skip
        if now().draft is None:
            return stock(state, x, dt, A, B, C, D, z=z, dt_bias=dt_bias, dt_softplus=dt_softplus, **more)
        one = [t if t is None else t[..., 0] for t in (D, dt_bias)]
        scan = _ssd(stock)
        out, _ = scan(
            x[:, None], dt[:, None, :, 0], A[:, 0, 0], B[:, None], C[:, None], 1, D=one[0], dt_bias=one[1],
            initial_states=state, dt_softplus=dt_softplus,
        )  # fmt: skip
        gated = out[:, 0] if z is None else out[:, 0] * F.silu(z.float())
        return gated.to(x.dtype)

    return selective_state_update


# function that a stock forward calls → what builds its replacement; stock's variants of a function from different
# packages have one replacement
SCANS: dict[str, Callable[..., Callable[..., object]]] = {
    "causal_conv1d_fn": _conv,
    "torch_chunk_gated_delta_rule": _delta,
    "torch_recurrent_gated_delta_rule": _delta,
    "chunk_kimi_delta_attention": _delta,
    "recurrent_kimi_delta_attention": _delta,
    "mamba2_chunk_scan": _ssd,
    "mamba2_selective_state_update": _ssd_step,
}
KINDS = {"linear_attention", "conv", "mamba", "hybrid", "hybrid_sliding", "moe", "mlp"}  # in `config.layer_types`
_NO_LIMIT = (0.0, float("inf"))
_WRITES = {"update_conv_state": {"causal_conv1d_fn"}, "update_recurrent_state": set(SCANS) - {"causal_conv1d_fn"}}


def modules(decoder: Module) -> list[Module]:
    """The modules of a decoder with a state other than keys and values."""
    return [module for module in each_module(decoder) if _keeps(stock(module))]


def limited(module: Module) -> bool:
    """Whether a state space layer limits the time steps of prompts; stock decodes without these limits."""
    return tuple(getattr(module, "time_step_limit", _NO_LIMIT)) != _NO_LIMIT


@cache
def _keeps(cls: type) -> bool:
    return not _WRITES.keys().isdisjoint(names(cls))


def unknown(decoder: Module, known: Collection[str] = ()) -> str | None:
    """The class of a module that cannot read a tree, or None; the classes in `known` can, by other code."""
    for module in modules(decoder):
        if type(module).__name__ in known:
            continue
        for function in _functions(type(module)):
            called = set(function.__code__.co_names)
            if any(write in called and not called & scans for write, scans in _WRITES.items()):
                return type(module).__name__
    return None


def reader(cls: type) -> type:
    """A mixin for modules of this class, with a forward that reads draft trees."""
    return type("TreeReader", (), {"forward": _rebound(cls.forward)})  # type: ignore[attr-defined]


def _functions(cls: type) -> list[FunctionType]:
    own = [f for one in cls.__mro__ if one not in Module.__mro__ for f in vars(one).values()]
    plain = [inspect.unwrap(f) for f in own if isinstance(f, FunctionType)]
    return [f for f in plain if isinstance(f, FunctionType)]


def names(cls: type, helpers: bool = False) -> set[str]:
    """The names that a class's functions use; with `helpers` also those that functions they call in its file use."""
    own = _functions(cls)
    if helpers:
        called = (function.__globals__.get(name) for function in own for name in function.__code__.co_names)
        own = [*own, *(f for f in called if isinstance(f, FunctionType) and f.__module__ == cls.__module__)]
    return {name for function in own for name in inspect.unwrap(function).__code__.co_names}


def _rebound(function: FunctionType) -> FunctionType:
    """The same function, including its decorators, with the functions of SCANS replaced."""
    inner = getattr(function, "__wrapped__", None)
    if inner is None:
        own = function.__globals__
        ours = {
            name: make(_in_context(own[name])) for name, make in SCANS.items() if name in function.__code__.co_names
        }
        return _with(function, {**own, **ours}, function.__closure__)
    cells = tuple(CellType(_rebound(inner)) if c.cell_contents is inner else c for c in function.__closure__ or ())
    return _with(function, function.__globals__, cells)


def _in_context(scan: Callable[..., Any]) -> Callable[..., Any]:
    """The same scan, called by the `scan` of the ForwardContext if that is set."""

    def called(*args: Any, **kwargs: Any) -> Any:
        call = now().scan
        return scan(*args, **kwargs) if call is None else call(scan, *args, **kwargs)

    return called


def _with(function: FunctionType, names: dict[str, object], closure: tuple[CellType, ...] | None) -> FunctionType:
    copied = FunctionType(function.__code__, names, function.__name__, function.__defaults__, closure)
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied
