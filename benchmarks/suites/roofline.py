"""A roofline for a forward of the target: its weights read once from memory, its products at peak rate."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mmspec.app.devices import wait
from mmspec.functional import linear
from mmspec.pipelines.host.decoder import decoder, head

_SIDE, _TURNS = 1024, 20  # size of the square matrices whose product is timed, and its repetitions


@dataclass(frozen=True)
class Roofline:
    """The roofline of a decoder on this machine, without attention, norms and sampling.

    Attributes:
        bytes: of the matrices that every token is multiplied with.
        products: multiplications and additions of one token with them.
        bytes_per_s: read by a product of as many matrices of the same shapes with one vector.
        products_per_s: of two square matrices.
    """

    bytes: int
    products: int
    bytes_per_s: float
    products_per_s: float

    def least_ms(self, nodes: float) -> float:
        """The least time of a forward over this many nodes, of all rows together."""
        return 1e3 * max(self.bytes / self.bytes_per_s, nodes * self.products / self.products_per_s)

    def facts(self) -> dict[str, float]:
        """The facts for a result's provenance."""
        return {
            "matrices_mb": round(self.bytes / 2**20, 1),
            "memory_gb_per_s": round(self.bytes_per_s / 1e9, 1),
            "gflops": round(self.products_per_s / 1e9, 1),
        }


@torch.inference_mode()
def measured(model: Any) -> Roofline:
    """The roofline of a model's text layers and head, from timed products of its shapes, the best of several runs."""
    weights = [m.weight for m in decoder(model).modules() if isinstance(m, nn.Linear)]
    last = head(model)
    matrices = [*weights, *([] if last is None else [last.weight])]
    count = sum(w.numel() for w in matrices)
    vectors = {w.shape[1]: w.new_ones(1, w.shape[1]) for w in matrices}
    square = torch.ones(_SIDE, _SIDE, dtype=model.dtype, device=model.device)

    def read() -> None:
        for weight in matrices:
            linear(vectors[weight.shape[1]], weight)

    held = sum(w.numel() * w.element_size() for w in matrices)
    return Roofline(held, 2 * count, held / _best(read, square), 2 * _SIDE**3 / _best(lambda: square @ square, square))


def _best(call: Callable[[], Any], where: Tensor) -> float:
    """Seconds of the fastest of several calls."""
    taken = []
    for _ in range(_TURNS):
        wait(where.device)
        began = time.perf_counter()
        call()
        wait(where.device)
        taken.append(time.perf_counter() - began)
    return min(taken)
