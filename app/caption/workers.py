"""Who does the work: this process, or one process per device, each of which asks its parent for items."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from mmspec.app.caption.model import FatalError
from mmspec.app.caption.options import AUTO
from mmspec.app.caption.plan import Task
from mmspec.app.caption.run import Job, Result, Worker
from mmspec.app.cli import quiet
from mmspec.app.extras import cores

POLL = 0.03  # seconds
Report = Callable[[Result], None]


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

    def run(self, tasks: Sequence[Task], report: Report, started: Callable[[], object] | None = None) -> None:
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

    def compared(self, ready: Callable[[], None]) -> Any:
        """The comparison with stock generate, measured now; `ready` is called before it says so."""
        if self.comparison is not None:
            if self.comparison.kept:
                ready()
                kept = len(self.comparison.kept)
                print(f"comparing with stock generate on {kept} of them (--no-compare spares it)", flush=True)
            self.comparison.measure(self.worker.engine, getattr(self.worker.flow, "rows", 1))
        return self.comparison

    def stop(self) -> None:
        self.summaries.append(self.worker.summary())
        self.worker.close()


def serve(job: Job, place: str, slot: str, line: Connection) -> None:
    """What a worker process does: ask its parent for items and tell it of results, until that says or has gone."""
    quiet()
    for number in (signal.SIGINT, signal.SIGTERM):  # which may reach all processes; the parent decides what ends
        signal.signal(number, signal.SIG_IGN)
    if place.startswith("cpu"):  # threads for torch, which is not imported yet
        share = max(1, cores() // job.workers)
        os.environ["OMP_NUM_THREADS"] = str(min(share, int(os.environ.get("OMP_NUM_THREADS") or share)))
    with contextlib.suppress(EOFError, ConnectionError):  # the parent has gone
        try:
            with contextlib.closing(Worker(job, place, slot)) as worker:
                line.send({"notes": worker.notes})
                results, opened = list[Result](), False
                while True:
                    room = max(0, min(worker.window, job.items) - worker.in_hand)
                    if results or room or opened != (worker.flow is not None):
                        opened = worker.flow is not None
                        line.send({"results": results, "room": room, "opened": opened})
                        tasks = line.recv()  # every such message has an answer
                        if tasks is None:
                            break
                        worker.give(tasks)
                    elif line.poll():  # nothing comes unasked: the parent has gone
                        line.recv()
                    if not worker.busy:  # another worker may end yet, and leave us its items
                        time.sleep(POLL)
                    results = worker.step()
                line.send({"summary": worker.summary()})
        except ConnectionError:
            raise
        except (FatalError, OSError) as error:
            line.send({"trouble": f"{slot} on {place}: {error}"})


def say(notes: Sequence[str]) -> None:
    """Lines for people, as soon as they are known."""
    for note in notes:
        print(f"note: {' '.join(note.split())}", file=sys.stderr, flush=True)


def places(devices: str) -> list[str]:
    """One name per worker: of --devices, or every CUDA device there is, or the fastest device."""
    if devices != AUTO:
        names = [name.strip() for name in devices.split(",") if name.strip()]
        return [f"cuda:{name}" if name.isdecimal() else name for name in names]
    import torch

    count = torch.cuda.device_count()
    return [f"cuda:{number}" for number in range(count)] if count > 1 else [AUTO]
