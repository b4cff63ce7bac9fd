"""`compile="auto"`: nothing waits for a compiler before rounds have taken ten times as long, and nothing is lost."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import targets
import torch
from drafters import eagle
from torch import nn

import mmspec
from mmspec.compile import capture, patience
from mmspec.compile import held as trusted
from mmspec.compile.capture import PiecewiseFunction
from mmspec.compile.held import CompiledCache
from mmspec.compile.patience import FIRST, OFTEN, SHARE, Patience
from mmspec.pipelines.target import captures


class Clock:
    """In the place of `time`: stands still until it is told."""

    def __init__(self) -> None:
        self.now, self.step = 0.0, 0.0

    def perf_counter(self) -> float:
        self.now += self.step
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(patience, "time", clock)
    monkeypatch.setattr(trusted, "time", clock)
    return clock


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces run as they are, and nothing is known of any model."""
    monkeypatch.setattr(capture, "inductor", lambda piece, examples: piece)
    monkeypatch.setattr(trusted, "_OF", WeakKeyDictionary())


class Rounds:
    """Asks a cache for one shape, as the rounds of calls do."""

    def __init__(self, clock: Clock, compiling: float = FIRST) -> None:
        self.clock, self.compiling, self.tries = clock, compiling, 0
        self.held = CompiledCache("a layer")
        self.held.wait(Patience())

    def make(self) -> Any:
        self.clock.now += self.compiling
        self.tries += 1
        return SimpleNamespace(copies=[])

    def run(self, count: int, seconds: float, key: str = "shape", make: Callable[[], Any] | None = None) -> list[bool]:
        """Whether each round was captured."""
        found = []
        for _ in range(count):
            found.append(self.held.get(key, make or self.make) is not None)
            self.clock.now += seconds
        return found


def test_a_capture_takes_a_tenth_of_the_rounds_before_it(clock: Clock):
    rounds = Rounds(clock, compiling=2 * FIRST)
    seconds = FIRST / SHARE / 100
    found = rounds.run(110, seconds)
    assert found == [False] * 100 + [True] * 10
    # It took twice as long as was thought: the next shape waits until that is a tenth, with its own.
    more = rounds.run(400, seconds, "other")
    assert more.index(True) == 400 - 109 and rounds.tries == 2  # the round with the capture is not counted


def test_a_shape_that_seldom_comes_up_is_not_worth_it(clock: Clock):
    rounds = Rounds(clock)
    assert rounds.run(OFTEN, 1000.0) == [False] * OFTEN
    assert rounds.run(1, 1000.0) == [True] and rounds.run(OFTEN, 1000.0, "seldom") == [False] * OFTEN


def test_time_between_calls_is_no_round(clock: Clock):
    rounds = Rounds(clock)
    for _ in range(3 * OFTEN):
        assert rounds.run(1, 1000.0) == [False]
        rounds.held.wait(rounds.held.patience)  # the next call
    assert not rounds.tries


def test_a_capture_that_is_slower_is_let_go(clock: Clock):
    rounds = Rounds(clock)
    assert rounds.run(OFTEN + 1, 4.0)[-1]
    rounds.clock.now = 0.0
    found = rounds.run(OFTEN + 10, 5.0)
    assert found == [True] * OFTEN + [False] * 10 and not rounds.held._held
    rounds.held.wait(None)  # compile=True is told to
    assert rounds.run(1, 1.0) == [True]


def test_what_cannot_be_captured_is_tried_once_without_a_word(clock: Clock):
    rounds = Rounds(clock)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not any(rounds.run(3 * OFTEN, 1000.0, make=lambda: rounds.make() and 1 / 0))
        rounds.held._why = "it has a hook"
        assert not any(rounds.run(3, 1.0))
    assert rounds.tries == 1


def test_other_threads_go_on_meanwhile(clock: Clock):
    rounds, begun, go_on = Rounds(clock), threading.Event(), threading.Event()
    rounds.run(OFTEN, 1000.0)

    def make() -> Any:
        begun.set()
        assert go_on.wait(10)
        return rounds.make()

    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.extend(rounds.run(1, 1.0, make=make)))
    thread.start()
    assert begun.wait(10)
    assert rounds.run(1, 1.0) == [False]  # would never come back if it waited
    go_on.set()
    thread.join()
    assert found == [True] and rounds.run(1, 1.0) == [True] and rounds.tries == 1


def test_other_weights_are_worth_it_anew(clock: Clock):
    rounds, layer = Rounds(clock), nn.Linear(2, 2)
    rounds.held.check(layer)
    assert rounds.run(OFTEN + 1, 1000.0)[-1]
    layer.weight = nn.Parameter(torch.ones(2, 2))
    rounds.held.check(layer)
    assert rounds.run(1, 1.0) == [True] and rounds.tries == 2  # the rounds before have long paid for it


def test_answers_stay_and_drafts_are_captured_too(clock: Clock, quick: None):
    model, inputs = targets.model("llava"), targets.prompt("llava", "image first")
    wanted = targets.generate(model, inputs, max_new_tokens=24)
    before = PiecewiseFunction.made
    with mmspec.enable(model, eagle(model), compile="auto", depth=3, width=3, size=10):
        clock.step = 0.01
        assert torch.equal(targets.generate(model, inputs, max_new_tokens=24), wanted)
        assert PiecewiseFunction.made == before
        clock.step = 100.0
        while PiecewiseFunction.made < before + 2:
            assert torch.equal(targets.generate(model, inputs, max_new_tokens=24), wanted)
        held = captures.of(model, "auto")
        assert any(held._held.values())
        [draft] = held.drafts.values()
        assert any(draft._held.values()) and draft.patience.spent is held.patience.spent
        assert torch.equal(targets.generate(model, inputs, max_new_tokens=24), wanted)


def test_wishes_that_are_none(quick: None):
    model = targets.model("llava")
    assert captures.of(model, False) is None
    with pytest.raises(ValueError, match="compile must be one of True, False, auto, all; got 'sometimes'"):
        mmspec.enable(model, "ngram", compile="sometimes")


class Copy:
    """Of a weight, as a captured function reads it."""

    def __init__(self, weight: nn.Parameter) -> None:
        self.parts = [SimpleNamespace(weight=weight)]

    def renew(self) -> None:
        pass


def test_copies_of_weights_go_with_what_read_them(clock: Clock):
    rounds, layer = Rounds(clock), nn.Linear(2, 2)
    copy = Copy(layer.weight)
    rounds.held.check(layer)

    def make() -> Any:
        return SimpleNamespace(copies=[copy])

    rounds.run(OFTEN + 1, 1000.0, make=make)
    assert list(rounds.held._copies) == [copy]
    rounds.run(OFTEN + 1, 2000.0, make=make)
    assert not rounds.held._copies
