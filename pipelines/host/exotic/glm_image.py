"""GLM-Image: its prefill computes the positions of all image tokens in advance, and stores them on the model."""

from __future__ import annotations

import threading

from mmspec.pipelines.host.forward import now
from mmspec.pipelines.host.hooks import stock

_one_at_a_time = threading.Lock()


class Listing:
    """Mixin for the inner model: each call records its own positions, in any thread."""

    def get_rope_index(self, *args: object, **kwargs: object) -> object:
        with _one_at_a_time:
            index = stock(self).get_rope_index(self, *args, **kwargs)
            if (read := now().read) is not None:
                read.listed = self._cached_decode_position_ids  # type: ignore[attr-defined]
        return index
