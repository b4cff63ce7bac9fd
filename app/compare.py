"""Compares methods: each is warmed up, then all run in turn on the same requests, with peak memory."""

from __future__ import annotations

import ctypes
import gc
import statistics
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from mmspec.app.devices import first_line
from mmspec.compile.capture import PiecewiseFunction

WARM_UPS = 6  # maximum number of runs until a compiled path stops compiling
PEAKS = 3  # runs whose peak memory is measured
COMPILED = "compiled during a timed call: its time is overstated"
OWN = "mmspec runs"  # mmspec's warnings that say how a call is run begin with this


@dataclass(frozen=True)
class Method:
    """One way to do the same work.

    Attributes:
        drafter: a drafter, or the name or folder of one; None: without mmspec.
        options: of `mmspec.enable`.
        arguments: of the call itself.
        facts: further fields of the method's records.
    """

    name: str
    drafter: Any = None
    options: Mapping[str, Any] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def setting(self) -> str:
        """The options, and the numbers among the arguments, for tables."""
        shown = {**self.options, **{name: value for name, value in self.arguments.items() if isinstance(value, int)}}
        return " ".join(f"{name.removeprefix('prompt_lookup_')} {value}" for name, value in shown.items())


PLAIN = Method("plain")  # without mmspec

Q = TypeVar("Q")  # a request
R = TypeVar("R")  # the result of a run


class Comparison(Generic[Q, R]):
    """Runs several methods on the same requests; one that fails in its warm-up gets a note and is left out.

    Attributes:
        run: one timed run of a method on a request.
        able: the methods (anything with a name) that have not failed in the warm-up.
        results: by method, the results of its runs, one per request.
        notes: by method, why it failed, or a remark about its runs.
        peaks: by method, peak memory of a run in MiB; None if unknown.
    """

    def __init__(self, methods: Sequence[Any], run: Callable[[Any, Q], R]) -> None:
        self.run, self.able = run, list(methods)
        self.results: dict[str, list[R]] = {}
        self.notes: dict[str, str] = {}
        self.peaks: dict[str, float | None] = {}

    def warm_up(self, request: Q, needed: Collection[str] = (), device: torch.device | None = None) -> None:
        """Run each method until nothing compiles any more; drop those that fail, but raise errors of `needed` ones.

        Peak memory is measured on `device`.
        """
        for method in self.able[:]:
            try:
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    settle(partial(self.run, method, request))
                self._note(method.name, caught)
                if device is not None:
                    self.peaks[method.name] = peak_mb(device, partial(self.run, method, request))
            except Exception as error:
                if method.name in needed:
                    raise
                self.able.remove(method)
                self.notes[method.name] = f"failed: {first_line(error)[:200]}"
                free()

    def turns(self, requests: Iterable[Q]) -> Iterator[dict[str, R]]:
        """Yield each request's results by method; the order of the methods changes from request to request."""
        self.results = {method.name: [] for method in self.able}
        for turn, request in enumerate(requests):
            for method in (self.able[place] for place in in_turn(len(self.able), turn)):
                graphs = compiled_graphs()
                self.results[method.name].append(self.run(method, request))
                if compiled_graphs() != graphs:
                    self.notes[method.name] = COMPILED
            yield {name: runs[-1] for name, runs in self.results.items()}

    def measure(self, requests: Iterable[Q]) -> dict[str, list[R]]:
        for _ in self.turns(requests):
            pass
        return self.results

    def _note(self, name: str, caught: list[warnings.WarningMessage]) -> None:
        for one in caught:
            if str(one.message).startswith(OWN):
                self.notes[name] = str(one.message)
            else:
                warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)


def in_turn(count: int, turn: int) -> list[int]:
    """The order of methods in a turn: rotated and alternately reversed, so that none always follows the same one."""
    places = [(turn // 2 + i) % count for i in range(count)]
    return places[::-1] if turn % 2 else places


def over(base: Sequence[object], runs: Sequence[object], what: str = "seconds") -> list[float | None]:
    """For each pair of runs, `base`'s value of attribute `what` divided by the other's; None if one is unknown."""
    pairs = [(getattr(b, what), getattr(m, what)) for b, m in zip(base, runs, strict=False)]
    return [b / m if b and m else None for b, m in pairs]


def compiled_graphs() -> int:
    """How many graphs torch.compile and mmspec have compiled; a change during a call means that the call compiled."""
    dynamo = sys.modules.get("torch._dynamo.utils")  # absent until something is compiled
    return PiecewiseFunction.made + (dynamo.counters["stats"]["unique_graphs"] if dynamo else 0)


def settle(call: Callable[[], object]) -> None:
    """Repeat a call until it compiles nothing any more."""
    for _ in range(WARM_UPS):
        graphs = compiled_graphs()
        call()
        if compiled_graphs() == graphs:
            return
    raise RuntimeError(f"still compiling after {WARM_UPS} calls")


def free() -> None:
    """Free memory of ended runs, including the device's caches."""
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.memory.empty_cache()


def peak_mb(device: torch.device, call: Callable[[], object]) -> float | None:
    """Peak memory of a call in MiB above what was in use before it, as the median of several; None if unknown."""
    known = [peak for _ in range(PEAKS) if (peak := _peak_mb(device, call)) is not None]
    return statistics.median(known) if known else None


def _peak_mb(device: torch.device, call: Callable[[], object]) -> float | None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        return (torch.cuda.max_memory_allocated(device) - before) / 2**20
    try:
        ctypes.CDLL(None).malloc_trim(0)  # return freed memory to the system, so that this call's memory is counted
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before = _resident("VmRSS")
    except (OSError, AttributeError, TypeError):
        call()
        return None
    call()
    return (_resident("VmHWM") - before) / 1024


def _resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))  # KiB
