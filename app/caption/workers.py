"""Who does the work: this process, or one process per device, each of which claims batches of items in turn."""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from mmspec.app.caption.journal import FAILED, Ledger, time_of
from mmspec.app.caption.model import FatalError
from mmspec.app.caption.options import AUTO
from mmspec.app.caption.outputs import STATE, Writer
from mmspec.app.caption.plan import Task
from mmspec.app.caption.run import Job, Result, Worker, cores, failed
from mmspec.app.cli import quiet

GOODBYE = 30.0  # seconds a process has for its last round once it was told to stop
STARTS = 2  # of a worker in a row, none of which finishes an item; then its device is given up
BATCH, SHARES = 64, 8  # items of a batch at most; batches per worker at least, so that none idles at the end
POLL = 0.03  # seconds
SUSPECT = "~"  # begins the name of a batch of one item that a killed worker had in hand; sorts behind all others
Report = Callable[[Result], None]


class KilledWorkerError(Exception):
    """The process that worked on this item alone came to its end."""


class Alone:
    """The worker of this process, and the comparison with stock generate, where there is something to compare."""

    def __init__(self, job: Job, place: str, slots: str, items: int):
        self.worker = Worker(job, place, f"{slots}worker-0")
        say(self.worker.notes)
        self.summaries: list[dict[str, Any]] = []
        self.comparison = None
        engine = self.worker.engine
        if job.options.compare and engine.drafter is not None and hasattr(engine, "stock"):
            from mmspec.app.caption.compare import Sampled

            self.comparison = Sampled(items)
            self.worker.sampler = self.comparison.show

    def run(self, tasks: Sequence[Task], report: Report, started: Callable[[], Any] | None = None) -> None:
        """Do all tasks; `report` hears of each once it is on the disk, `started` when the model begins to answer."""
        rest, worker = deque(tasks), self.worker
        while rest or worker.busy:
            room = max(0, worker.window - worker.in_hand)
            worker.give([rest.popleft() for _ in range(min(room, len(rest)))])
            results = worker.step()
            if started is not None and worker.flow is not None:
                started()
                started = None
            for result in results:
                report(result)

    def stop(self) -> None:
        self.summaries.append(self.worker.summary())
        self.worker.close()


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
    starter: Any  # `start(*args)` runs `serve`; `ended` and `kill` take what it returns
    places: Sequence[str]
    slots: str
    hands: list[Hand] = field(default_factory=list)
    summaries: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.job = replace(self.job, folder=self.job.folder.resolve())
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


def serve(job: Job, place: str, slot: str, claims: Path, told: Path) -> None:
    """What a worker process does: claim batches and work on them until it is told to stop, or its parent has gone."""
    quiet()
    for number in (signal.SIGINT, signal.SIGTERM):  # which may reach all processes; the parent decides what ends
        signal.signal(number, signal.SIG_IGN)
    parent, alone = multiprocessing.parent_process(), False
    with open(told, "w", buffering=1) as file:

        def tell(**facts: Any) -> None:
            file.write(json.dumps(facts) + "\n")

        try:
            if place.startswith("cpu"):
                _share_cores(job.workers)
            worker = Worker(job, place, slot)
            with contextlib.closing(worker):
                tell(pid=os.getpid(), notes=worker.notes)
                opened = False
                while claims.exists() and not (claims / "stop").exists() and (parent is None or parent.is_alive()):
                    if not worker.busy or (not alone and worker.in_hand < min(worker.window, job.items)):
                        tasks, alone = _claim(claims, slot, worker.busy)
                        worker.give(tasks)
                    if not worker.busy:  # another worker may end yet, and leave us its items
                        time.sleep(POLL)
                        continue
                    results = worker.step()
                    if not opened and worker.flow is not None:
                        opened = True
                        tell(open=True)
                    if results:
                        tell(results=[asdict(result) for result in results])
                tell(summary=worker.summary())
        except (FatalError, OSError) as error:
            tell(trouble=f"{slot} on {place}: {error}")


def _claim(claims: Path, slot: str, busy: bool) -> tuple[list[Task], bool]:
    """The next batch that nobody has: whoever renames it has it. Suspects go to a worker that has nothing else."""
    for name in sorted(name for name in os.listdir(claims) if name.endswith(".batch")):
        suspect = name.startswith(SUSPECT)
        if suspect and busy:
            break
        mine = claims / f"{name.removesuffix('.batch')}.{slot}"
        with contextlib.suppress(FileNotFoundError):  # another one was faster
            (claims / name).rename(mine)
            return pickle.loads(mine.read_bytes()), suspect
    return [], False


def say(notes: Sequence[str]) -> None:
    """Lines for people, as soon as they are known."""
    for note in notes:
        print(f"note: {' '.join(note.split())}", file=sys.stderr, flush=True)


def _share_cores(workers: int) -> None:
    """Threads for torch, which is not imported yet."""
    share = max(1, cores() // workers)
    os.environ["OMP_NUM_THREADS"] = str(min(share, int(os.environ.get("OMP_NUM_THREADS") or share)))


def places(devices: str) -> list[str]:
    """One name per worker: of --devices, or every CUDA device there is, or the fastest device."""
    if devices != AUTO:
        names = [name.strip() for name in devices.split(",") if name.strip()]
        return [f"cuda:{name}" if name.isdecimal() else name for name in names]
    import torch

    found = torch.cuda.device_count()
    return [f"cuda:{number}" for number in range(found)] if found > 1 else [AUTO]
