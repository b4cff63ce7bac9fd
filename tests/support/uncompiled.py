"""Captures without a compiler: their pieces run as they are."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import pytest
from torch import Tensor

from mmspec.compile import capture, capture_cache
from mmspec.pipelines.target import captured_tower, captures

Compiler = Callable[[Any, list[Tensor]], Any]


def as_it_is(piece: Any, examples: list[Tensor]) -> Any:
    """In the place of a compiler."""
    return piece


def strictly(piece: Any, examples: list[Tensor]) -> Any:
    """In the place of a compiler, and as strict about how what comes in lies in memory."""

    def run(*given: Any) -> Any:
        for t, example in zip(given, examples, strict=True):
            assert all(n == 1 or a == b for n, a, b in zip(t.shape, t.stride(), example.stride(), strict=True))
        return piece(*given)

    return run


def pieces(
    monkeypatch: pytest.MonkeyPatch, compiler: Compiler | None = as_it_is, forwards: bool = True, prompts: bool = False
) -> None:
    """What is captured runs as the `compiler` leaves it; None: torch's own. Nothing is known of any model, and what
    falls back to the stock forward fails. Drafts are always captured, prompts and towers only where they are meant."""
    if compiler is not None:
        monkeypatch.setattr(capture, "inductor", compiler)
    for module in (capture_cache, captured_tower):
        monkeypatch.setattr(module, "_OF", WeakKeyDictionary())
    if not prompts:
        monkeypatch.setattr("mmspec.pipelines.target.captured_prompt.MOST", 0)
    if not forwards:
        monkeypatch.setattr(captures.Forward, "read", lambda self, target, *told: target.read(*told))
    warnings.simplefilter("error", UserWarning)


def encodings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """An entry for each time that a capture will have read pictures."""
    found: list[int] = []
    replayed = captured_tower._replayed

    def told(*given: Any) -> Any:
        found.append(1)
        return replayed(*given)

    monkeypatch.setattr(captured_tower, "_replayed", told)
    return found
