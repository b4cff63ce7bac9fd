"""One comparison: the same requests by every method, warmed up and run in turn; what each run gave, held and asked."""

from __future__ import annotations

import ctypes
import gc
import statistics
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch.overrides import TorchFunctionMode

from mmspec.app.devices import first_line
from mmspec.compile.capture import PiecewiseFunction

WARM_UPS = 6  # runs at most until a compiled path stops compiling
PEAKS = 3  # runs whose memory is watched
COMPILED = "compiled during a timed call: its time is overstated"
OWN = "mmspec runs"  # how warnings of ours begin that tell how a call is run


class Named(Protocol):
    @property
    def name(self) -> str: ...


@dataclass(frozen=True)
class Side:
    """One of the sides of a comparison that has no table of methods: its name, and what its runs do."""

    name: str
    how: Any


M = TypeVar("M", bound=Named)
Q = TypeVar("Q")  # a request
R = TypeVar("R")  # what a run gives


class Comparison(Generic[M, Q, R]):
    """Methods side by side on the same requests; one that fails while it warms up is a result, and the others count.

    Attributes:
        run: one timed run of a method on a request.
        able: the methods that are left after the warm-up.
        made: by method, what its runs gave, one a request.
        notes: by method, why there is nothing, or what is to be known of it.
        peaks: by method, MiB that a run holds at its peak; None where that is not told.
        reads: by method, how often a run asked a tensor for its values.
    """

    def __init__(self, methods: Sequence[M], run: Callable[[M, Q], R]) -> None:
        self.run, self.able = run, list(methods)
        self.made: dict[str, list[R]] = {}
        self.notes: dict[str, str] = {}
        self.peaks: dict[str, float | None] = {}
        self.reads: dict[str, int] = {}

    def warm_up(
        self, request: Q, needed: Collection[str] = (), device: torch.device | None = None,
        read: Callable[[M], bool] | None = None,
    ) -> None:  # fmt: skip
        """Run each method until nothing compiles any more; leave out those that fail.

        Args:
            needed: methods without which there is nothing to compare: where one fails, its error is raised.
            device: where runs are watched for their peak of memory; None: they are not.
            read: whose reads are counted.
        """
        for method in self.able[:]:
            try:
                with warnings.catch_warnings(record=True) as said:
                    warnings.simplefilter("always")
                    settle(partial(self.run, method, request))
                self._heard(method.name, said)
                if device is not None:
                    self.peaks[method.name] = peak_mb(device, partial(self.run, method, request))
                if read is not None and read(method):
                    with Reads() as reads:
                        self.run(method, request)
                    self.reads[method.name] = reads.count
            except Exception as error:
                if method.name in needed:
                    raise
                self.able.remove(method)
                self.notes[method.name] = f"failed: {first_line(error)[:200]}"
                free()

    def turns(self, requests: Iterable[Q]) -> Iterator[dict[str, R]]:
        """What each method gives for each request; in every turn another one begins."""
        self.made = {method.name: [] for method in self.able}
        for turn, request in enumerate(requests):
            for method in (self.able[place] for place in in_turn(len(self.able), turn)):
                graphs = compiled_graphs()
                self.made[method.name].append(self.run(method, request))
                if compiled_graphs() != graphs:
                    self.notes[method.name] = COMPILED
            yield {name: runs[-1] for name, runs in self.made.items()}

    def measure(self, requests: Iterable[Q]) -> dict[str, list[R]]:
        for _ in self.turns(requests):
            pass
        return self.made

    def _heard(self, name: str, said: list[warnings.WarningMessage]) -> None:
        for one in said:
            if str(one.message).startswith(OWN):
                self.notes[name] = str(one.message)
            else:
                warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)


def in_turn(count: int, turn: int) -> list[int]:
    """A new starter each turn, and every other turn backwards, so that no method always follows the same one."""
    places = [(turn // 2 + i) % count for i in range(count)]
    return places[::-1] if turn % 2 else places


def over(base: Sequence[object], made: Sequence[object], what: str = "seconds") -> list[float | None]:
    """Of each pair of runs, how often what `base` took contains what the other took; None where one is not known."""
    pairs = [(getattr(b, what), getattr(m, what)) for b, m in zip(base, made, strict=False)]
    return [b / m if b and m else None for b, m in pairs]


def compiled_graphs() -> int:
    """How many graphs torch.compile and mmspec have made; a change during a call means that the call compiled."""
    dynamo = sys.modules.get("torch._dynamo.utils")  # absent as long as nothing was compiled
    return PiecewiseFunction.made + (dynamo.counters["stats"]["unique_graphs"] if dynamo else 0)


def settle(call: Callable[[], object]) -> None:
    """One call, and as many more as it takes until nothing is compiled any more."""
    for _ in range(WARM_UPS):
        graphs = compiled_graphs()
        call()
        if compiled_graphs() == graphs:
            return
    raise RuntimeError(f"still compiling after {WARM_UPS} calls")


class Reads(TorchFunctionMode):
    """Counts how often Python asks a tensor for its values; on a GPU each of these waits for it."""

    ASKING = {"item", "tolist", "__bool__", "__int__", "__index__", "__float__", "cpu", "nonzero"}

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += getattr(func, "__name__", "") in self.ASKING
        return func(*args, **(kwargs or {}))


def free() -> None:
    """Give back what ended runs held, caches of the device included."""
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.memory.empty_cache()


def peak_mb(device: torch.device, call: Callable[[], object]) -> float | None:
    """MiB that a call holds at its peak above what was held before it, the median of several; None: it is not told."""
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
        ctypes.CDLL(None).malloc_trim(0)  # give back what earlier calls freed, so that this one has to ask for it
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
        before = _resident("VmRSS")
    except (OSError, AttributeError, TypeError):
        call()
        return None
    call()
    return (_resident("VmHWM") - before) / 1024


def _resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))  # KiB
