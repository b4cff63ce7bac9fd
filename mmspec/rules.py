"""Rules: when to keep a drafted token, and the law of the token that replaces a refused one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from mmspec.kernels import reference as ops


@dataclass(frozen=True)
class Rule:
    """Two pure functions of probabilities: `ratio(p_x, q_x)` in [0, 1] and `residual(p, q)` as weights over V.

    `lossless` says that the output law is p itself, whatever q is. A relaxed rule carries its parameters in `name`.
    """

    name: str
    ratio: Callable[[Tensor, Tensor], Tensor]
    residual: Callable[[Tensor, Tensor], Tensor]
    lossless: bool = False


exact = Rule("exact", ops.exact_ratio, ops.positive_residual, lossless=True)
