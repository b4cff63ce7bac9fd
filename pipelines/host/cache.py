"""The target's KV cache as a `transformers.Cache`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from mmspec.kernels import dispatch
from mmspec.pipelines.host.forward import now
from mmspec.pipelines.host.recurrent_state import AcceptedPath, RecurrentLayer, RecurrentLayers
from mmspec.prefix_store import LayerTensors
from mmspec.ragged_cache import Lengths, RaggedBuffer
from mmspec.steady import AddressTable
from mmspec.types import stacked

_FEATURES = -1  # the layer index under which `held` returns the drafter's features
_POSITIONS = -1  # the layer index under which positions are stored among the indexers' keys


class RaggedCache(Cache):
    """A KV cache for rows of unequal length. A forward appends its tokens to every row; `commit` keeps the accepted.

    Sliding-window layers are stored in full, and the window is applied by the mask: a window of slots would drop keys
    that a shorter row still needs.
    """

    is_compileable = False

    def __init__(self, batch: int, device: torch.device, reserve: int, crossed: Iterable[int] = ()) -> None:
        super().__init__(layers=[])
        self.slots: list[RaggedBuffer] = []
        self.indexed: dict[int, RaggedBuffer] = {}  # layer → the keys of its indexer
        self.recurrent = RecurrentLayers()  # layers with a recurrent or convolutional state
        self.pictures: dict[int, tuple[Tensor, Tensor]] = {}  # cross-attention layer → keys and values of images
        self.features: RaggedBuffer | None = None  # a drafter's inputs for each token: features, and embedding
        self.crossed = frozenset(crossed)
        self.end = 0  # slots in use, including those of the current forward
        self.lengths = Lengths.of([0] * batch, device)
        self.reserve = reserve
        self._table = AddressTable()

    def addresses(self, n: int, open_slots: Tensor | None) -> tuple[Tensor, torch.dtype, bool] | None:
        """Where the layers' keys and values are, with room for n more slots, which a graph will write; None: they are
        not laid out as `kernels.attention.addressed_attention` needs them. See `AddressTable`."""
        table = self._table.tensor(self.slots, self.lengths, n, open_slots)
        if table is None:
            return None
        self.end = self.lengths.longest + n
        return table, self._table.dtype, self._table.aligned

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        while len(self.slots) <= layer_idx:
            self.slots.append(RaggedBuffer(self.reserve))
        if layer_idx in self.crossed:
            self.pictures[layer_idx] = key_states, value_states
            return self.pictures[layer_idx]
        keys, values = self.slots[layer_idx].append(key_states, value_states, self.lengths)
        self.end = keys.shape[2]
        return keys, values

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        """Append new keys [B, n, D] of a layer's indexer and return all of them, [B, T, D], as stock does."""
        new = indexer_key_states[:, None]
        buffer = self.indexed.setdefault(layer_idx, RaggedBuffer(self.reserve))
        return buffer.append(new, new[..., :0], self.lengths)[0][:, 0]

    @property  # type: ignore[override]
    def layers(self) -> Layers:
        return Layers(self)

    @layers.setter
    def layers(self, _: object) -> None:
        """Ignore the empty list that transformers sets."""

    def _recurrent(self, layer_idx: int) -> RecurrentLayer:
        """A layer's state; also makes it the current layer of the draft that is being read."""
        layer, draft = self.recurrent.setdefault(layer_idx, RecurrentLayer()), now().draft
        if draft is not None:
            draft.layer = layer
        return layer

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self._recurrent(layer_idx).conv.get(state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self._recurrent(layer_idx).state.get(state_idx)

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: object
    ) -> Tensor:
        layer, draft = self._recurrent(layer_idx), now().draft
        if draft is None:
            return layer.extend(conv_states, state_idx, conv_kernel_size)
        draft.index = state_idx
        layer.inputs[state_idx] = conv_states
        return conv_states

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: object
    ) -> Tensor:
        if now().draft is None:  # a draft's writes are applied by `commit`
            self._recurrent(layer_idx).replace(recurrent_states, state_idx)
        return recurrent_states

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        layers = self.recurrent.values() if layer_idx is None else [self.recurrent.get(layer_idx, RecurrentLayer())]
        return any(layer.conv or layer.state for layer in layers)

    def is_recording_past(self, layer_idx: int) -> bool:
        return now().draft is not None

    def get_seq_length(self, layer_idx: int = 0, *_: object) -> int:
        return self.lengths.longest

    def get_mask_sizes(self, query_length: int | Tensor, layer_idx: int = 0) -> tuple[int, int]:
        n = query_length if isinstance(query_length, int) else int(query_length.shape[0])
        return self.lengths.longest + n, 0

    def get_max_length(self, *_: object) -> int:
        return -1

    def _buffers(self) -> list[RaggedBuffer]:
        return [*self.slots, *self.indexed.values(), *([] if self.features is None else [self.features])]

    @property
    def is_initialized(self) -> bool:
        return bool(self.slots)

    @property
    def is_sliding(self) -> list[bool]:
        return [False] * max(1, len(self.slots))

    def advance(self, count: int) -> None:
        """Keep all `count` tokens of the last forward, in every row."""
        self.lengths = Lengths(tuple(n + count for n in self.lengths.host), self.lengths.device + count)

    def keep_features(self, features: Tensor, embeds: Tensor) -> None:
        """Store a drafter's inputs for the current forward's tokens: features [B, n, F] and embeddings [B, n, H]."""
        self.features = RaggedBuffer(self.reserve) if self.features is None else self.features
        self.features.append(features[:, None], embeds[:, None], self.lengths)

    def held(self, row: int, begin: int, end: int) -> LayerTensors:
        """Views of a row's tensors in some slots."""
        buffers = [*enumerate(self.slots), *([] if self.features is None else [(_FEATURES, self.features)])]
        both = ((index, name, getattr(layer, name)) for index, layer in buffers for name in ("keys", "values"))
        return {(index, name): t[row, :, begin:end] for index, name, t in both if t is not None}

    def states(self, row: int) -> RecurrentLayers | None:
        """A copy of a row's recurrent states; None: the model has none."""
        return self.recurrent.copied(slice(row, row + 1)) or None

    def resume(self, held: LayerTensors, states: RecurrentLayers | None) -> None:
        """Fill an empty cache of one row from the results of another cache's `held` and `states`."""
        for index in {index for index, _ in held}:
            keys, values = held[index, "keys"][None], held[index, "values"][None]
            self.keep_features(keys[:, 0], values[:, 0]) if index == _FEATURES else self.update(keys, values, index)
        self.recurrent = (states or self.recurrent).copied(slice(None))
        self.advance(next(iter(held.values())).shape[1])

    def commit(self, kept: Tensor, counts: tuple[int, ...], device_counts: Tensor, in_place: bool) -> None:
        """Of the nodes appended last, keep `kept[b, : counts[b]]` in row b; `in_place`: they are already in place."""
        if self.recurrent:
            self.recurrent.commit(AcceptedPath(kept, device_counts))
        if not in_place:
            groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}  # autocast may leave only keys in float32
            tensors = (t for layer in self._buffers() for t in (layer.keys, layer.values))
            for buffer in (t for t in tensors if t is not None and t.shape[-1]):
                groups.setdefault((buffer.device, buffer.dtype), []).append(buffer)
            for (home, _), buffers in groups.items():
                start = self.lengths.on(home)
                dispatch.compact_rows(buffers, start[:, None] + kept.to(home), start)
        self.lengths = self.lengths.plus(counts, device_counts)

    def keep(self, order: Tensor) -> None:
        """Keep only the slots at `order` [B, n], which every row has filled."""
        for layer in self.slots:
            layer.keep(order)
        self.lengths = Lengths.of([order.shape[1]] * len(order), self.lengths.device.device)

    def select(self, rows: Tensor) -> RaggedCache:
        order = rows.tolist()
        for layer in self._buffers():
            layer.select(rows, order, self.lengths.longest)
        self.recurrent.select(rows)
        self.pictures = {i: (k[rows.to(k.device)], v[rows.to(v.device)]) for i, (k, v) in self.pictures.items()}
        self.lengths = self.lengths.select(rows, order)
        return self

    def join(self, other: RaggedCache) -> RaggedCache:
        for mine, theirs in zip(self._buffers(), other._buffers(), strict=True):
            mine.join(theirs, self.lengths.longest)
        self.recurrent.join(other.recurrent)
        for index in self.pictures.keys() | other.pictures.keys():  # zeros for a row without a picture
            pairs = zip(self._pictures_of(index, other), other._pictures_of(index, self), strict=True)
            self.pictures[index] = tuple(stacked(*pair) for pair in pairs)  # type: ignore[assignment]
        self.lengths = self.lengths.join(other.lengths)
        return self

    def _pictures_of(self, index: int, other: RaggedCache) -> tuple[Tensor, ...]:
        """A layer's keys and values of images; zeros in the shape of the other's if the rows have none."""
        rows = len(self.lengths.host)
        own = self.pictures.get(index)
        return tuple(t.new_zeros(rows, *t.shape[1:]) for t in other.pictures[index]) if own is None else own


class PassThroughCache(RaggedCache):
    """Returns the new keys and values as if nothing were cached, and records their layer."""

    is_initialized = True

    def __init__(self, past: int) -> None:
        super().__init__(1, torch.device("cpu"), 0)
        self.advance(past)
        self.fresh: tuple[int, Tensor, Tensor, None] | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        self.fresh = (layer_idx, key_states, value_states, None)
        return key_states, value_states


class Layers:
    """`cache.layers` for models that read it; its length counts the stored layers, any other index is an empty one."""

    def __init__(self, cache: RaggedCache) -> None:
        self.cache = cache

    def __len__(self) -> int:
        return len(self.cache.slots)

    def __getitem__(self, index: int) -> CacheLayer:
        return CacheLayer(self.cache, index)

    def __iter__(self) -> Iterator[CacheLayer]:
        return map(self.__getitem__, range(len(self)))


class CacheLayer:
    """A view of one layer, with the attributes of transformers."""

    _layer_type = "full_attention"

    def __init__(self, cache: RaggedCache, index: int) -> None:
        self.cache, self.index = cache, index

    @property
    def keys(self) -> Tensor | None:
        return self._tensor("keys")

    @property
    def values(self) -> Tensor | None:
        return self._tensor("values")

    def _tensor(self, name: str) -> Tensor | None:
        if self.index in self.cache.pictures:
            return self.cache.pictures[self.index][name == "values"]
        slots = self.cache.slots
        tensor: Tensor | None = getattr(slots[self.index], name) if self.index < len(slots) else None
        return None if tensor is None else tensor[:, :, : self.cache.end]

    @property
    def is_initialized(self) -> bool:
        return self.keys is not None

    def get_seq_length(self) -> int:
        """The length including the tokens of the current forward."""
        return self.cache.end

    def update_index(self, new: Tensor) -> Tensor:
        """MiniMax-M3's name for `update_indexer`, with keys [B, 1, n, D]."""
        return self.cache.update_indexer(new[:, 0], self.index)[:, None]

    @property
    def indexer_position_ids(self) -> Tensor | None:
        """Positions [axes, B, T] of the cached tokens, which Qwen4-Exp stores with its first indexer, or None."""
        keys = None if (buffer := self.cache.indexed.get(_POSITIONS)) is None else buffer.keys
        return None if keys is None else keys[:, 0, : self.cache.lengths.longest].permute(2, 0, 1)

    @indexer_position_ids.setter
    def indexer_position_ids(self, positions: Tensor) -> None:
        new = positions if self.indexer_position_ids is None else positions[..., self.cache.lengths.longest :]
        self.cache.update_indexer(new.permute(1, 2, 0), _POSITIONS)
