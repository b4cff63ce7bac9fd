"""Who does the work: this process, or one process per device; what a killed worker had in hand goes to the others."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

from mmspec.app.caption.journal import FAILED, Ledger, time_of
from mmspec.app.caption.model import FatalError
from mmspec.app.caption.outputs import STATE, Writer
from mmspec.app.caption.plan import Task
from mmspec.app.caption.run import Job, Result, Worker, cores, failed
from mmspec.app.caption.settings import AUTO

GOODBYE = 30.0  # seconds a process has for its last round once it was told to stop
STARTS = 2  # of a worker in a row, none of which finishes an item; then its device is given up


class Member(Protocol):
    """One worker as its crew sees it."""

    slot: str
    window: int  # tasks it may have in hand; 0 until it has loaded its model
    open: bool  # whether its model is at work, with what it costs to begin behind it

    def give(self, tasks: Sequence[Task]) -> None: ...


@dataclass(frozen=True)
class WorkerEnded:
    """A member that works no more."""

    killed: bool  # or it said itself that it, or its device, cannot go on


class Crew(Protocol):
    """Workers wherever they run; a context manager."""

    members: Sequence[Member]
    summaries: list[dict[str, Any]]
    troubles: list[str]  # why members have ended

    def hear(self) -> list[tuple[Any, list[Result] | WorkerEnded]]:
        """Wait for news: what a member has finished, or that it has ended. New members may have come meanwhile."""

    def stop(self) -> None:
        """Let them end and collect their summaries."""


class Alone:
    """The worker of this process, and the comparison with stock generate, where there is something to compare."""

    def __init__(self, job: Job, place: str, slots: str, items: int):
        self.worker = Worker(job, place, f"{slots}worker-0")
        self.slot = self.worker.slot
        self.members, self.troubles = [self], list[str]()
        say(self.worker.notes)
        self.summaries: list[dict[str, Any]] = []
        self.comparison = None
        engine = self.worker.engine
        if job.options.compare and engine.drafter is not None and hasattr(engine, "stock"):
            from mmspec.app.caption.compare import Sampled

            self.comparison = Sampled(items)
            self.worker.sampler = self.comparison.show

    @property
    def window(self) -> int:
        return self.worker.window

    @property
    def open(self) -> bool:
        return self.worker.flow is not None

    def give(self, tasks: Sequence[Task]) -> None:
        self.worker.give(tasks)

    def hear(self) -> list[tuple[Any, list[Result] | WorkerEnded]]:
        return [(self, self.worker.step())]

    def stop(self) -> None:
        self.summaries.append(self.worker.summary())
        self.worker.close()


@dataclass(eq=False)
class Hand:
    """A worker process and our end of the pipe to it."""

    process: Any
    pipe: Connection
    slot: str
    place: str
    barren: int = 0  # starts before this one, in a row, in which nothing was finished
    worked: bool = False
    window: int = 0
    open: bool = False

    def give(self, tasks: Sequence[Task]) -> None:
        with contextlib.suppress(OSError):  # it has just died; `hear` will say so
            self.pipe.send(tasks)


class Processes:
    """One process per device, each with a model, a decoder and a journal of its own.

    One that ends is started again, unless it never finished anything; the others go on with its items.
    """

    def __init__(self, job: Job, places: Sequence[str], slots: str):
        self.summaries: list[dict[str, Any]] = []
        self._said: list[str] = []
        self.troubles: list[str] = []
        self.members: list[Hand] = []
        self._job = job
        for number, place in enumerate(places):
            self._hire(f"{slots}worker-{number}", place)

    def hear(self) -> list[tuple[Any, list[Result] | WorkerEnded]]:
        pipes: dict[Any, Hand] = {hand.pipe: hand for hand in self.members}
        news: list[tuple[Any, list[Result] | WorkerEnded]] = []
        for pipe in wait(list(pipes)):
            hand = pipes[pipe]
            try:
                kind, said = hand.pipe.recv()
            except (EOFError, OSError):
                kind, said = "killed", ""
            if kind in ("fatal", "killed"):
                self._bury(hand, said)
                news.append((hand, WorkerEnded(kind == "killed")))
            elif kind == "ready":
                hand.window, hand.open, notes = said
                say([note for note in notes if note not in self._said])
                self._said += notes
            elif kind == "results":
                hand.worked, hand.barren = True, 0
                news.append((hand, said))
        return news

    def _hire(self, slot: str, place: str, barren: int = 0) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs, self._job, place, slot), name=slot)
        process.start()
        theirs.close()  # so that the pipe breaks when the process ends
        self.members.append(Hand(process, ours, slot, place, barren))

    def stop(self) -> None:
        for hand in self.members:
            with contextlib.suppress(OSError):
                hand.pipe.send(None)
        give_up = time.monotonic() + GOODBYE
        for hand in self.members:
            with contextlib.suppress(OSError, EOFError):
                while hand.window and hand.pipe.poll(max(0.0, give_up - time.monotonic())):  # not one that still loads
                    kind, said = hand.pipe.recv()
                    if kind == "end":
                        self.summaries.append(said)
                        break
            hand.pipe.close()
            hand.process.join(max(0.1, give_up - time.monotonic()) if hand.window else 0)
            if hand.process.is_alive():
                hand.process.kill()
                hand.process.join()

    def _bury(self, hand: Hand, said: str) -> None:
        """Leave nothing of a worker that has ended, and start it again where that may help."""
        self.members.remove(hand)
        hand.pipe.close()
        hand.process.join(5)
        if hand.process.is_alive():
            hand.process.kill()
            hand.process.join()
        code = hand.process.exitcode
        how = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
        trouble = said or f"{hand.slot} on {hand.place} has ended ({how})"
        self.troubles.append(trouble)
        again = hand.worked or (not said and hand.barren + 1 < STARTS)
        if again:
            self._hire(hand.slot, hand.place, 0 if hand.worked else hand.barren + 1)
        told = "it is started again" if again else "the others go on" if self.members else "nobody is left"
        print(f"{' '.join(trouble.split())}; {told}", file=sys.stderr)


def say(notes: Sequence[str]) -> None:
    """Lines for people, as soon as they are known."""
    for note in notes:
        print(f"note: {' '.join(note.split())}", file=sys.stderr, flush=True)


def serve(pipe: Connection, job: Job, place: str, slot: str) -> None:
    """What a worker process does: tasks off the pipe, results into it, until the other end is closed."""
    for number in (signal.SIGINT, signal.SIGTERM):  # which may reach all processes; the parent decides what ends
        signal.signal(number, signal.SIG_IGN)
    try:
        if place.startswith("cpu"):
            _share_cores(job.workers)
        worker = Worker(job, place, slot)
        with contextlib.closing(worker):
            pipe.send(("ready", (worker.window, False, worker.notes)))
            opened = False
            while True:
                if not worker.busy or pipe.poll(0):
                    tasks = pipe.recv()
                    if tasks is None:
                        pipe.send(("end", worker.summary()))
                        return
                    worker.give(tasks)
                results = worker.step()
                if not opened and worker.flow is not None:
                    opened = True
                    pipe.send(("ready", (worker.window, True, [])))
                if results:
                    pipe.send(("results", results))
    except (EOFError, ConnectionError):  # the parent has gone
        return
    except (FatalError, OSError) as error:
        with contextlib.suppress(OSError):
            pipe.send(("fatal", f"{slot} on {place}: {error}"))


def _share_cores(workers: int) -> None:
    """Threads for torch, which is not imported yet."""
    share = max(1, cores() // workers)
    os.environ["OMP_NUM_THREADS"] = str(min(share, int(os.environ.get("OMP_NUM_THREADS") or share)))


def dispatch(
    tasks: Sequence[Task],
    crew: Crew,
    job: Job,
    report: Callable[[Result], None],
    started: Callable[[], Any] | None = None,
) -> None:
    """Keep everybody's hands full until all tasks are done; `report` hears of each once, when it is on the disk.

    `started` is called when the first worker has begun to ask its model.

    Raises:
        FatalError: no worker is left, or none can work.
    """
    lots, begun = _Lots(tasks), time.time()
    hands: dict[Any, dict[str, Task]] = {}
    while lots or any(hands.values()):
        share = math.ceil((len(lots) + sum(map(len, hands.values()))) / len(crew.members))  # of all that is left
        for member in crew.members:
            held = hands.setdefault(member, {})
            lot = lots.next(held, min(member.window, share))
            if lot:
                held |= {task.item.name: task for task in lot}
                member.give(lot)
        heard = crew.hear()
        if started is not None and any(member.open for member in crew.members):
            started()
            started = None
        for member, news in heard:
            if isinstance(news, WorkerEnded):
                left = hands.pop(member, {})
                for result in _recorded(job, member.slot, left, begun):
                    del left[result.name]
                    report(result)
                if culprit := lots.back(left, news.killed):
                    report(_blamed(job, member.slot, culprit))
                continue
            for result in news:
                if hands[member].pop(result.name, None) is not None:
                    report(result)
        if not crew.members and (lots or any(hands.values())):
            why = crew.troubles[-1]
            raise FatalError(f"all workers have ended ({why}); what is finished is safe, the same command goes on")


class KilledWorkerError(Exception):
    """The process that worked on this item alone came to its end."""


class _Lots:
    """What nobody has in hand yet. What a killed worker had is given out last and one at a time: it may kill again.

    So is what a second worker had when it said that it cannot go on.
    """

    def __init__(self, tasks: Sequence[Task]):
        self._todo, self._suspects, self._suspected = deque(tasks), deque[Task](), set[str]()
        self._returned: set[str] = set()

    def __len__(self) -> int:
        return len(self._todo) + len(self._suspects)

    def next(self, held: Mapping[str, Task], most: int) -> list[Task]:
        """For a worker that has `held` in hand and may have `most`."""
        if most < 1 or self._suspected.intersection(held):
            return []
        lot = [self._todo.popleft() for _ in range(min(len(self._todo), most - len(held)))]
        return [self._suspects.popleft()] if not lot and not held and self._suspects else lot

    def back(self, left: Mapping[str, Task], killed: bool) -> Task | None:
        """Take back what a worker had that has ended; the one item that ended a second one, if it was that."""
        if len(left) == 1 and self._suspected.issuperset(left):
            return next(iter(left.values()))
        for name, task in left.items():
            if killed or name in self._returned or name in self._suspected:
                self._suspects.append(task)
                self._suspected.add(name)
            else:
                self._todo.append(task)
                self._returned.add(name)
        return None


def _blamed(job: Job, slot: str, task: Task) -> Result:
    """Record, in a journal beside that of the dead worker, that an item kills who works on it."""
    error = KilledWorkerError(
        "a worker was killed while it worked on this item among others, and another one on it alone; "
        "it may need more memory than there is. --retry-failed tries it again"
    )
    writer = Writer(job.folder, f"{slot}-lost")
    with contextlib.closing(writer):
        return failed(task, "", error, writer, job)


def _recorded(job: Job, slot: str, left: dict[str, Task], begun: float) -> list[Result]:
    """What a dead worker had written down but no longer told."""
    path = job.folder / STATE / f"{slot}.jsonl"
    if not path.exists():
        return []
    ledger, found = Ledger([path]), []
    for name, task in left.items():
        record = ledger.failure(name) or ledger.get(name)
        if record is None or record.get("ask") != task.ask or time_of(record) < begun:
            continue
        if record.get("status") == FAILED:
            found.append(Result(name, error=str(record["error"]), message=str(record["message"])))
        else:
            found.append(Result(name, str(record["text"]), int(record.get("tokens", 0))))
    ledger.close()
    return found


def places(devices: str) -> list[str]:
    """One name per worker: of --devices, or every CUDA device there is, or the fastest device."""
    if devices != AUTO:
        names = [name.strip() for name in devices.split(",") if name.strip()]
        return [f"cuda:{name}" if name.isdecimal() else name for name in names]
    import torch

    found = torch.cuda.device_count()
    return [f"cuda:{number}" for number in range(found)] if found > 1 else [AUTO]
