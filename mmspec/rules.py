"""Rules: when to keep a drafted token, and the law of the token that replaces a refused one."""

from __future__ import annotations

from mmspec.kernels import reference as ops
from mmspec.types import Rule

exact = Rule("exact", ops.exact_ratio, ops.positive_residual, lossless=True)
