"""Who does the work: this process, or one process per device, started again where that may help."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from mmspec.app.caption.dispatch import WorkerEnded
from mmspec.app.caption.model import FatalError
from mmspec.app.caption.options import AUTO
from mmspec.app.caption.plan import Task
from mmspec.app.caption.run import Job, Result, Worker, cores
from mmspec.app.cli import quiet

GOODBYE = 30.0  # seconds a process has for its last round once it was told to stop
STARTS = 2  # of a worker in a row, none of which finishes an item; then its device is given up


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
    quiet()
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


def places(devices: str) -> list[str]:
    """One name per worker: of --devices, or every CUDA device there is, or the fastest device."""
    if devices != AUTO:
        names = [name.strip() for name in devices.split(",") if name.strip()]
        return [f"cuda:{name}" if name.isdecimal() else name for name in names]
    import torch

    found = torch.cuda.device_count()
    return [f"cuda:{number}" for number in range(found)] if found > 1 else [AUTO]
