"""One layer of a RaggedCache, for the models that look into `cache.layers` themselves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor


class Layers:
    """The layers, made as they are looked at: as many as hold something, and any other one, empty."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache

    def __len__(self) -> int:
        return len(self.cache.slots)

    def __getitem__(self, index: int) -> CacheLayer:
        return CacheLayer(self.cache, index)

    def __iter__(self) -> Iterator[CacheLayer]:
        return map(self.__getitem__, range(len(self)))


class CacheLayer:
    """A view of what one layer keeps, under the names of transformers."""

    _layer_type = "full_attention"

    def __init__(self, cache: Any, index: int) -> None:
        self.cache, self.index = cache, index

    @property
    def keys(self) -> Tensor | None:
        return self._held(0)

    @property
    def values(self) -> Tensor | None:
        return self._held(1)

    def _held(self, which: int) -> Tensor | None:
        if self.index in self.cache.pictures:
            return self.cache.pictures[self.index][which]  # type: ignore[no-any-return]
        held = self.cache.slots[self.index] if self.index < len(self.cache.slots) else None
        found = None if held is None else (held.keys, held.values)[which]
        return None if found is None else found[:, :, : self.get_seq_length()]

    @property
    def is_initialized(self) -> bool:
        return self.keys is not None

    def get_seq_length(self) -> int:
        """With what the forward under way has appended."""
        return self.cache.end  # type: ignore[no-any-return]

    def update_index(self, new: Tensor) -> Tensor:
        """MiniMax-M3's name for `update_indexer`, with keys [B, 1, n, D]."""
        return self.cache.update_indexer(new[:, 0], self.index)[:, None]  # type: ignore[no-any-return]

    @property
    def indexer_position_ids(self) -> Tensor | None:
        """Positions [axes, B, T] of what is cached, which Qwen4-Exp keeps with its first indexer; None: nothing is."""
        held = self.cache.indexed.get(_POSITIONS)
        return None if held is None else held.keys[:, 0, : self.cache.lengths.longest].permute(2, 0, 1)

    @indexer_position_ids.setter
    def indexer_position_ids(self, told: Tensor) -> None:
        new = told if self.indexer_position_ids is None else told[..., self.cache.lengths.longest :]
        self.cache.update_indexer(new.permute(1, 2, 0), _POSITIONS)


_POSITIONS = -1  # under which the positions are held among the keys of indexers
