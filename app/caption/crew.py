"""The parent of the worker processes: it hears of their results, and gives to others what an ended one had in hand."""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import pickle
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mmspec.app.caption.journal import FAILED, Ledger, time_of
from mmspec.app.caption.model import FatalError
from mmspec.app.caption.outputs import STATE, Writer
from mmspec.app.caption.plan import Task
from mmspec.app.caption.run import Job, Result, failed
from mmspec.app.caption.workers import POLL, SUSPECT, Report, say, serve

GOODBYE = 30.0  # seconds a process has for its last round once it was told to stop
STARTS = 2  # of a worker in a row, none of which finishes an item; then its device is given up
BATCH, SHARES = 64, 8  # items of a batch at most; batches per worker at least, so that none idles at the end


class KilledWorkerError(Exception):
    """The process that worked on this item alone came to its end."""


@dataclass(eq=False)
class Hand:
    """A worker process as its parent sees it."""

    handle: Any
    slot: str
    place: str
    told: Path  # lines of JSON that it writes for us
    barren: int  # starts before this one, in a row, in which nothing was finished
    pid: int = 0
    worked: bool = False
    trouble: str = ""  # why it cannot go on, if it says so itself
    read: int = 0

    def news(self) -> Iterator[tuple[str, Any]]:
        """What it has told since the last time."""
        if not self.told.exists():
            return
        with open(self.told, "rb") as file:
            file.seek(self.read)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self.read += len(line)
                yield from json.loads(line).items()


@dataclass
class Crew:
    """One process per device, each with a model, a decoder and a journal of its own.

    A process that ends is started again, unless it never finishes anything. What a killed one had in hand is given out
    item by item; an item that kills a second process, alone with it, is recorded as a failure.
    """

    job: Job
    starter: Any  # `start(*args)` runs `serve` on one of `nodes` machines; `ended` and `kill` take what it returns
    places: Sequence[str]
    slots: str
    hands: list[Hand] = field(default_factory=list)
    summaries: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        count = len(self.places)
        self.job = replace(
            self.job, folder=self.job.folder.resolve(), workers=-(-count // self.starter.nodes),
            items=max(1, -(-self.job.items // count)),
        )  # fmt: skip
        state = self.job.folder / STATE
        state.mkdir(parents=True, exist_ok=True)
        self.claims = Path(tempfile.mkdtemp(prefix=f"{self.slots}work-", dir=state))
        self._number, self._said, self._begun = itertools.count(), set[str](), time.time()
        for number, place in enumerate(self.places):
            self._hire(f"{self.slots}worker-{number}", place)

    def run(self, tasks: Sequence[Task], report: Report, started: Callable[[], Any] | None = None) -> None:
        """Do all tasks, as `Alone.run` does. FatalError if no worker is left."""
        size = max(1, min(BATCH, len(tasks) // (SHARES * len(self.places))))
        for first in range(0, len(tasks), size):
            self._put(tasks[first : first + size])
        left = {task.item.name for task in tasks}
        while left:
            for hand in list(self.hands):
                how = self.starter.ended(hand.handle)  # asked first: what it has told before is heard now
                for kind, said in self._heard(hand):
                    if kind == "open" and started is not None:
                        started()
                        started = None
                    for result in (Result(**facts) for facts in (said if kind == "results" else ())):
                        if result.name in left:
                            left.remove(result.name)
                            report(result)
                if how:
                    self._bury(hand, how, left, report)
            if left and not self.hands:
                raise FatalError(f"all workers have ended ({self._why}); what is finished is safe, the same command "
                    "goes on")  # fmt: skip
            time.sleep(POLL)

    def stop(self) -> None:
        """Let them end and collect their summaries."""
        (self.claims / "stop").touch()
        give_up = time.monotonic() + GOODBYE
        for hand in self.hands:
            while hand.pid and not self.starter.ended(hand.handle) and time.monotonic() < give_up:
                time.sleep(POLL)
            self.starter.kill(hand.handle)
            for _ in self._heard(hand):
                pass
        shutil.rmtree(self.claims, ignore_errors=True)
        self.starter.close()

    def _heard(self, hand: Hand) -> Iterator[tuple[str, Any]]:
        for kind, said in hand.news():
            if kind == "notes":
                say([note for note in said if note not in self._said])
                self._said |= {*said}
            elif kind == "summary":
                self.summaries.append(said)
            elif kind in ("pid", "trouble"):
                setattr(hand, kind, said)
            elif kind == "results":
                hand.worked, hand.barren = True, 0
            yield kind, said

    def _put(self, tasks: Sequence[Task], mark: str = "") -> None:
        name = f"{mark}{next(self._number):09}"
        (self.claims / name).write_bytes(pickle.dumps(list(tasks)))
        (self.claims / name).rename(self.claims / f"{name}.batch")

    def _hire(self, slot: str, place: str, barren: int = 0) -> None:
        told = self.claims / f"{slot}-{next(self._number)}.told"
        handle = self.starter.start(self.job, place, slot, self.claims, told)
        self.hands.append(Hand(handle, slot, place, told, barren))

    def _bury(self, hand: Hand, how: str, left: set[str], report: Report) -> None:
        """Give what a worker had that has ended to the others, and start it again where that may help."""
        self.hands.remove(hand)
        self.starter.kill(hand.handle)
        for result in self._recorded(hand.slot, left):
            left.remove(result.name)
            report(result)
        for claim in sorted(self.claims.glob(f"*.{hand.slot}")):
            rest = [task for task in pickle.loads(claim.read_bytes()) if task.item.name in left]
            suspect = claim.name.startswith(SUSPECT)
            claim.unlink()
            if hand.trouble:  # it said so itself: no item is to blame
                self._put(rest, SUSPECT * suspect)
                continue
            for task in rest:
                if suspect:
                    left.remove(task.item.name)
                    report(self._blamed(hand.slot, task))
                else:
                    self._put([task], SUSPECT)
        self._why = hand.trouble or f"{hand.slot} on {hand.place} has ended ({how})"
        again = hand.worked or (not hand.trouble and hand.barren + 1 < STARTS)
        if again:
            self._hire(hand.slot, hand.place, 0 if hand.worked else hand.barren + 1)
        told = "it is started again" if again else "the others go on" if self.hands else "nobody is left"
        print(f"{' '.join(self._why.split())}; {told}", file=sys.stderr)

    def _recorded(self, slot: str, left: set[str]) -> Iterator[Result]:
        """What a dead worker had written down but no longer told."""
        path = self.job.folder / STATE / f"{slot}.jsonl"
        with contextlib.closing(Ledger([path] if path.exists() else [])) as ledger:
            for name in sorted(left.intersection([*ledger.captions, *ledger.failures])):
                record = ledger.failure(name) or ledger.get(name) or {}
                if time_of(record) < self._begun:
                    continue
                if record.get("status") == FAILED:
                    yield Result(name, error=str(record["error"]), message=str(record["message"]))
                else:
                    yield Result(name, str(record["text"]), int(record.get("tokens", 0)))

    def _blamed(self, slot: str, task: Task) -> Result:
        """Record, in a journal beside that of the dead worker, that an item kills who works on it."""
        error = KilledWorkerError(
            "a worker was killed while it worked on this item among others, and another one on it alone; "
            "it may need more memory than there is. --retry-failed tries it again"
        )
        with contextlib.closing(Writer(self.job.folder, f"{slot}-lost")) as writer:
            return failed(task, "", error, writer, self.job)


class Processes:
    """Starts workers as processes of this machine."""

    nodes = 1

    def start(self, *args: Any) -> Any:
        process = multiprocessing.get_context("spawn").Process(target=serve, args=args)
        process.start()
        return process

    def ended(self, process: Any) -> str:
        """How it has ended; empty while it runs."""
        code = process.exitcode
        return "" if code is None else signal.Signals(-code).name if code < 0 else f"exit code {code}"

    def kill(self, process: Any) -> None:
        process.kill()
        process.join()

    def close(self) -> None: ...
