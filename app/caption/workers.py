"""Where items are captioned: in this process, or in one process per device, which requests items from its parent."""

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
    """One worker in this process, and the comparison with stock generate if there is a drafter to compare."""

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
        """Do all tasks; calls `report` for each result once it is on the disk, `started` when the model begins."""
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
        """Measure the comparison with stock generate; `ready` is called before the first line is printed."""
        if self.comparison is not None:
            if self.comparison.kept:
                ready()
                kept = len(self.comparison.kept)
                print(f"comparing with stock generate on {kept} of them (--no-compare skips this)", flush=True)
            self.comparison.measure(self.worker.engine, getattr(self.worker.flow, "rows", 1))
        return self.comparison

    def stop(self) -> None:
        self.summaries.append(self.worker.summary())
        self.worker.close()


def serve(job: Job, place: str, slot: str, pipe: Connection) -> None:
    """The main function of a worker process: requests items and sends results until the parent stops it or is gone."""
    quiet()
    for number in (signal.SIGINT, signal.SIGTERM):  # may be sent to all processes; the parent decides when to stop
        signal.signal(number, signal.SIG_IGN)
    if place.startswith("cpu"):  # must be set before torch is imported
        share = max(1, cores() // job.workers)
        os.environ["OMP_NUM_THREADS"] = str(min(share, int(os.environ.get("OMP_NUM_THREADS") or share)))
    with contextlib.suppress(EOFError, ConnectionError):  # the parent has gone
        try:
            with contextlib.closing(Worker(job, place, slot)) as worker:
                pipe.send({"notes": worker.notes})
                results, opened = list[Result](), False
                while True:
                    room = max(0, min(worker.window, job.items) - worker.in_hand)
                    if results or room or opened != (worker.flow is not None):
                        opened = worker.flow is not None
                        pipe.send({"results": results, "room": room, "opened": opened})
                        tasks = pipe.recv()  # the parent answers every such message
                        if tasks is None:
                            break
                        worker.give(tasks)
                    elif pipe.poll() and pipe.recv() is None:  # the parent stops the run, or is gone: EOFError
                        break
                    if not worker.busy:  # another worker may still die, and its items come here
                        time.sleep(POLL)
                    results = worker.step()
                pipe.send({"summary": worker.summary()})
        except ConnectionError:
            raise
        except (FatalError, OSError) as error:
            pipe.send({"trouble": f"{slot} on {place}: {error}"})


def say(notes: Sequence[str]) -> None:
    """Print notes for the user."""
    for note in notes:
        print(f"note: {' '.join(note.split())}", file=sys.stderr, flush=True)


def places(devices: str) -> list[str]:
    """One device name per worker: those of --devices, or all CUDA devices, or `auto` for the fastest device."""
    if devices != AUTO:
        names = [name.strip() for name in devices.split(",") if name.strip()]
        return [f"cuda:{name}" if name.isdecimal() else name for name in names]
    import torch

    count = torch.cuda.device_count()
    return [f"cuda:{number}" for number in range(count)] if count > 1 else [AUTO]
