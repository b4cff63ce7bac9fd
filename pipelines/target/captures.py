"""Captures and compiles the target's forward, once for each input shape (`enable(..., compile=True)`)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from mmspec.compile import capture
from mmspec.compile.capture import PiecewiseFunction, Uncapturable, compare
from mmspec.compile.capture_cache import CaptureCache, weights
from mmspec.compile.marks import PLAIN
from mmspec.compile.version import version
from mmspec.functional import LayerAttention, sdpa
from mmspec.modes import computed_in, lasting
from mmspec.pipelines.host import adapters, recurrent, tree_attention
from mmspec.pipelines.host.cache import PassThroughCache
from mmspec.pipelines.host.forward import now
from mmspec.pipelines.host.kinds import Mask
from mmspec.pipelines.host.masks import MASKS_BY_KIND
from mmspec.pipelines.host.recurrent_state import RecurrentLayers
from mmspec.pipelines.target.model import ModelTarget
from mmspec.pipelines.target.state import State
from mmspec.steady import Steady, addressed


class Forward(CaptureCache):
    """The captured forwards of one model, by shape."""

    def read(self, target: ModelTarget, state: State, tokens: Tensor, places: Tensor, mask: Mask) -> tuple[Tensor, ...]:
        """Same as `target.read`: raw logits [S·B, N, V], and the features [S·B, N, F] if the drafter needs some."""
        shapes = tokens.shape, places.shape
        constants = tuple((name, v) for name, v in state.arguments.items() if type(v) in PLAIN)
        layers, types, device = state.cache.recurrent.values(), tuple(state.types), tokens.device
        states = tuple((t.shape, t.dtype) for layer in layers for t in layer.held())
        key = (type(target), target.eager, *shapes, states, target.features, types, device, constants)
        attend, inputs = _ByMask(target, state, mask), _inputs(state, tokens, places)
        stock = partial(target.read, state, tokens, places, mask)

        def build() -> PiecewiseFunction:
            require_capturable(target)  # before the first forward: layers with other state must not run twice
            before = version(target.model, kept=True)
            wanted = [*stock(), *(t for layer in layers for t in layer.read())]
            if version(target.model, kept=True) != before:
                raise Uncapturable("its forward changes attributes of its modules")
            captured = _capture(target, state, tokens, places)
            compare(captured(attend, *inputs), wanted, computed_in(wanted[0].dtype, device))
            return captured

        captured = self.get(key, build)
        if captured is None:
            return stock()
        outputs = iter(captured(attend, *inputs))
        logits_and_features = tuple(islice(outputs, 1 + bool(target.features)))
        for layer in layers:
            layer.put(outputs)
        return logits_and_features


of = Forward.of


def _inputs(state: State, tokens: Tensor, places: Tensor) -> list[Tensor]:
    """The inputs of a forward: nodes and types; for layers with a recurrent state also the tree and their states."""
    inputs = [tokens, places, *state.types.values()]
    tree, kept = now().draft, state.cache.recurrent.values()
    if kept and tree is not None:
        inputs += [tree.parents, tree.depth, tree.ancestors, *(t for layer in kept for t in layer.held())]
    return inputs


def require_capturable(target: ModelTarget) -> None:
    """Raise Uncapturable, with the reason, for a model whose forward cannot be captured."""
    if target.eager:
        raise Uncapturable("its attention is 'eager'; load it with attn_implementation='sdpa'")
    if target.stateful:
        raise Uncapturable("its layers keep more than keys, values and recurrent states")
    if adapters.unmerged(target.model):
        raise Uncapturable("it has adapters, which may be switched at any time; merge_and_unload() them first")


def _capture(target: ModelTarget, state: State, tokens: Tensor, places: Tensor) -> PiecewiseFunction:
    """Capture the forward over nodes of this shape, which must not depend on the length of the cache."""
    own = weights(target.model)

    def read(past: int, *inputs: Tensor) -> list[Tensor]:
        given = iter(inputs)
        tokens, places, types = next(given), next(given), {name: next(given) for name in state.types}
        cache = PassThroughCache(past)
        seen = torch.ones(len(tokens), 1, tokens.shape[1], past + tokens.shape[1], dtype=torch.bool)
        tree = (next(given), next(given), next(given)) if state.cache.recurrent else None
        cache.recurrent = RecurrentLayers((index, kept.before(given)) for index, kept in state.cache.recurrent.items())
        with capture.Cut(cache, masked=True), nullcontext() if tree is None else recurrent.reads(*tree):
            outputs = target.read(replace(state, cache=cache, types=types), tokens, places, same_mask(target, seen))
        return [*outputs, *(t for layer in cache.recurrent.values() for t in layer.read())]

    with lasting():
        inputs = [t.clone() for t in _inputs(state, tokens, places)]
        return PiecewiseFunction(read, inputs, own, variants=(37, 53))


def same_mask(target: ModelTarget, seen: Tensor) -> Mask:
    """One mask in the form in which a target's decoder takes its masks: by kind of layer, where they are mixed."""
    return {**dict.fromkeys(recurrent.KINDS), **dict.fromkeys(MASKS_BY_KIND, seen)} if target.mixed else seen


class _ByMask:
    """The attention of one forward of a capture: appends the new keys and values to the cache and applies the mask."""

    def __init__(self, target: ModelTarget, state: State, mask: Any) -> None:
        self.cache, self.tree, self.padded = state.cache, target.tree, state.padded
        self.kinds = target.kinds if isinstance(mask, dict) else None
        self.masks = mask if isinstance(mask, dict) else {None: mask}

    def __call__(self, layer: int, scale: float, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self.cache.update(k, v, layer)
        seen = self._mask(layer)
        alike = q.dtype == keys.dtype == values.dtype  # they may differ under autocast
        if self.tree and alike and tree_attention.packed_mask(seen) is not None:
            out, _ = tree_attention.attend(None, q, keys, values, seen, scaling=scale)  # type: ignore[arg-type]
            return out.transpose(1, 2)
        return sdpa(q, keys, values, seen, scale)

    def _mask(self, layer: int) -> Any:
        return self.masks[None if self.kinds is None else self.kinds[layer]]

    def steadied(self) -> Steady | None:
        """See `Graphs`; None: a mask is not a tree's, or the cache keeps more than keys and values in plain buffers."""
        attended = [n for n, layer in enumerate(self.cache.slots) if layer.keys is not None]
        packed = {layer: tree_attention.packed_mask(self._mask(layer)) for layer in attended} if self.tree else {}
        if not packed or None in packed.values() or self.cache.pictures or self.cache.indexed:
            return None
        masks = {id(one): one for one in packed.values() if one is not None}
        some, *_ = masks.values()  # they differ in windows only
        found = self.cache.addresses(some.bits.shape[1], some.open_slots if self.padded else None)
        if found is None:
            return None
        table, dtype, aligned = found
        tensors, at = [table, some.lengths], dict[int, tuple[int, int | None]]()
        for name, one in masks.items():
            at[name] = len(tensors), None if one.first is None else len(tensors) + 1
            tensors += [one.bits] if one.first is None else [one.bits, one.first]

        def within(places: Sequence[Tensor]) -> LayerAttention:
            def attend(layer: int, scale: float, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                bits, first = at[id(packed[layer])]
                held, new = self.cache.slots[layer], (*k.shape[1::2], v.shape[3])
                assert held.keys is not None and held.values is not None
                fits = new == (*held.keys.shape[1::2], held.values.shape[3])
                if not (fits and q.dtype == k.dtype == v.dtype == dtype and tree_attention.serves(q, k, v)):
                    raise RuntimeError(f"the kernel does not serve the attention of layer {layer}")
                seen = places[bits], None if first is None else places[first]
                return addressed(q, k, v, places[0][layer], places[1], *seen, scale, 0, aligned)

            return attend

        return Steady(tensors, within, dtype, (aligned, tuple(at[id(packed[layer])] for layer in attended)))
