"""One comparison: who runs when, what is left out, what is noted, and that no pair of runs is mixed up."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import pytest
import torch

from mmspec.app import compare
from mmspec.app.compare import COMPILED, Comparison, over


@dataclass(frozen=True)
class Way:
    name: str


@dataclass(frozen=True)
class Took:
    seconds: float
    first: float | None = None


WAYS = [Way("stock"), Way("eagle"), Way("broken")]


def test_methods_run_in_turn_on_each_request_and_a_failing_one_is_a_result():
    ran = list[tuple[str, int]]()

    def run(way: Way, request: int) -> tuple[str, int]:
        if way.name == "broken":
            raise ValueError("no such tree\nat all")
        ran.append((way.name, request))
        return way.name, request

    comparison = Comparison(WAYS, run)
    comparison.warm_up(0, ["stock"])
    assert ran == [("stock", 0), ("eagle", 0)] and comparison.notes == {"broken": "failed: ValueError: no such tree"}
    ran.clear()
    turns = list(comparison.turns([1, 2, 3, 4]))
    assert ran[:4] == [("stock", 1), ("eagle", 1), ("eagle", 2), ("stock", 2)]
    assert sorted(ran) == sorted((name, turn) for name in ("stock", "eagle") for turn in (1, 2, 3, 4))
    assert turns == [{name: (name, turn) for name in ("stock", "eagle")} for turn in (1, 2, 3, 4)]
    assert comparison.results == {name: [(name, turn) for turn in (1, 2, 3, 4)] for name in ("stock", "eagle")}


def test_where_the_base_fails_there_is_nothing_to_compare():
    def run(way: Way, request: None) -> None:
        raise ValueError(way.name)

    with pytest.raises(ValueError, match="stock"):
        Comparison(WAYS, run).warm_up(None, ["stock"])


def test_compiling_is_waited_for_and_noted_where_it_falls_into_a_timed_run(monkeypatch):
    graphs, runs = [0], list[str]()
    monkeypatch.setattr(compare, "compiled_graphs", lambda: graphs[0])

    def run(way: Way, request: int) -> None:
        runs.append(way.name)
        graphs[0] += way.name == "eagle" and runs.count("eagle") in (1, 2, 5)

    comparison = Comparison(WAYS[:2], run)
    comparison.warm_up(0)
    assert runs == ["stock", "eagle", "eagle", "eagle"] and not comparison.notes
    comparison.measure([1, 2])
    assert comparison.notes == {"eagle": COMPILED}


def test_peak_memory_is_measured_on_a_device():
    comparison = Comparison(WAYS[:2], lambda way, request: torch.ones(request))
    comparison.warm_up(8, device=torch.device("cpu"))
    assert set(comparison.peaks) == {"stock", "eagle"}


def test_a_warning_of_ours_becomes_a_note_and_others_are_passed_on():
    def run(way: Way, request: None) -> None:
        warnings.warn(f"mmspec runs {way.name} as it is", stacklevel=1)
        warnings.warn("something else", stacklevel=1)

    comparison = Comparison(WAYS[:1], run)
    with pytest.warns(UserWarning) as said:
        comparison.warm_up(None)
    assert comparison.notes == {"stock": "mmspec runs stock as it is"}
    assert [str(one.message) for one in said] == ["something else"]


def test_ratios_are_of_pairs():
    base, made = [Took(2.0, 1.0), Took(3.0, 1.0)], [Took(1.0, 0.5), Took(6.0)]
    assert over(base, made) == [2.0, 0.5] and over(base, made, "first") == [2.0, None]
    assert over([], made) == []
