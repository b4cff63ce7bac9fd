"""Caches of the caller's: which ones can be read and filled, and how; see `RaggedCache` for mmspec's own."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.nn.functional import pad
from transformers.cache_utils import (
    Cache,
    DummyLayer,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndStaticFullAttentionLayer,
    LinearAttentionLayer,
    QuantizedCache,
    StaticCache,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from mmspec.pipelines.host.cache import RaggedCache

_IN_ORDER = (DynamicLayer, DynamicSlidingWindowLayer, StaticLayer)
_RECURRENT = (
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndStaticFullAttentionLayer,
)
_PLAIN = (*_IN_ORDER, StaticSlidingWindowLayer, DummyLayer, *_RECURRENT)


def quantized(cache: Cache | None) -> bool:
    return isinstance(cache, QuantizedCache)


def stores_plainly(cache: Cache | None) -> bool:
    """Whether a cache keeps keys and values as they are: its classes are stock's, not subclasses."""
    if cache is None or type(cache) not in (Cache, DynamicCache, StaticCache):
        return cache is None
    return {type(layer) for layer in cache.layers} | {cache.layer_class_to_replicate} <= {None, *_PLAIN}


def keeps_states(cache: Cache | None) -> bool:
    """Whether a cache has layers for recurrent states."""
    return cache is not None and any(type(layer) in _RECURRENT for layer in cache.layers)


def can_adopt(cache: Cache | None) -> bool:
    """Whether every layer has the keys that later tokens see, in the order of its text, and none reads another's."""
    kinds = set() if cache is None else {type(layer) for layer in cache.layers}
    return kinds <= {*_IN_ORDER, *_RECURRENT, *([DummyLayer] if kinds & {*_RECURRENT} else [])}


def adopt(
    cache: Cache | None, batch: int, device: torch.device, reserve: int, crossed: Iterable[int] = ()
) -> RaggedCache:
    """An empty cache of mmspec's, or a copy of a filled one of the caller's (see `can_adopt`)."""
    mine = RaggedCache(batch, device, reserve, crossed)
    past = int(cache.get_seq_length()) if cache is not None else 0
    for index, layer in enumerate(cache.layers if cache is not None and past else []):
        if isinstance(layer, (DynamicLayer, StaticLayer)) and layer.keys is not None and layer.values is not None:
            keys, values = layer.keys[:, :, :past], layer.values[:, :, :past]
            if (lost := past - keys.shape[2]) > 0:  # behind a sliding window, where no later token sees them
                keys, values = (pad(t, (0, 0, lost, 0)) for t in (keys, values))
            mine.update(keys, values, index)
        for number in range(layer.number_of_states if isinstance(layer, LinearAttentionLayer) else 0):
            assert cache is not None
            if (conv := cache.get_conv_state(index, number)) is not None:
                mine.update_conv_state(conv, index, number)
            if (state := cache.get_recurrent_state(index, number)) is not None:
                mine.update_recurrent_state(state, index, number)
    mine.advance(past)
    return mine


def has_places(cache: Cache | None, mine: RaggedCache) -> bool:
    """Whether the caller's cache, or None for a new one, has a place for all that mmspec's stores."""
    kinds = [] if cache is None else [type(layer) for layer in cache.layers]
    states = all(index < len(kinds) and kinds[index] in _RECURRENT for index in mine.recurrent)
    return states and not (mine.indexed or mine.pictures)


def fill(cache: Cache | None, mine: RaggedCache, length: int) -> Cache:
    """Put the first `length` slots of mmspec's cache (batch 1) into the caller's, or into a new DynamicCache.

    Recurrent states are those after all tokens that were read, which must be `length`, too.
    """
    cache = DynamicCache() if cache is None else cache
    assert not mine.recurrent or mine.lengths.host == (length,), "its states have read other tokens"
    for index, layer in enumerate(mine.slots):
        if layer.keys is None or layer.values is None:  # a layer without attention
            continue
        keys, values = layer.keys[:, :, :length], layer.values[:, :, :length]
        theirs = cache.layers[index] if index < len(cache.layers) else None
        if theirs is not None:
            theirs.reset()
        if type(theirs) in (DynamicLayer, LinearAttentionAndFullAttentionLayer):
            assert isinstance(theirs, DynamicLayer)
            theirs.lazy_initialization(keys, values)
            theirs.keys, theirs.values = keys, values  # views suffice: such a layer never writes in place
        else:
            cache.update(keys, values, index)
    for index, own in mine.recurrent.items():
        theirs = cache.layers[index]
        assert isinstance(theirs, LinearAttentionLayer)
        theirs.has_previous_state = dict.fromkeys(theirs.has_previous_state, False)
        for number, conv in own.conv.items():
            cache.update_conv_state(conv, index, number)
        for number, state in own.state.items():
            cache.update_recurrent_state(state, index, number)
    return cache
