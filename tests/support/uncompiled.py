"""Captures without a compiler: their pieces run as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import pytest
from torch import Tensor

from mmspec.compile import capture, capture_cache
from mmspec.pipelines.target import captures


def as_it_is(piece: Any, examples: list[Tensor]) -> Any:
    """In the place of a compiler."""
    return piece


def pieces(
    monkeypatch: pytest.MonkeyPatch, compiler: Callable[[Any, list[Tensor]], Any] = as_it_is, drafts_alone: bool = False
) -> None:
    """Forwards are captured and their pieces run as the `compiler` leaves them; prompts are not captured, which
    test_compiled_prompt does. With `drafts_alone` the target's forwards are not captured either."""
    monkeypatch.setattr(capture, "inductor", compiler)
    monkeypatch.setattr(capture_cache, "_OF", WeakKeyDictionary())
    monkeypatch.setattr("mmspec.pipelines.target.captured_prompt.MOST", 0)
    if drafts_alone:
        monkeypatch.setattr(captures.Forward, "read", lambda self, target, *told: target.read(*told))
