"""Where items are captioned: in this process, or in one process per device to which a parent sends items."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from typing import Any

from tqdm import tqdm

from mmspec.app.caption.journal import STATE, Ledger, Record, time_of
from mmspec.app.caption.options import AUTO
from mmspec.app.caption.outputs import Writer
from mmspec.app.caption.plan import Task
from mmspec.app.caption.run import FatalError, Job, Worker, about
from mmspec.app.cli import quiet
from mmspec.app.extras import cores, end_process, start_process

STOP_SECONDS = 30.0  # seconds that a process has for its last round after it was told to stop
STARTS = 2  # starts of a worker in a row without a finished item, after which its device is given up
Report = Callable[[Record], None]


class KilledWorkerError(Exception):
    """The process died while this item was the only one it worked on."""


class SingleWorker:
    """One worker in this process, and the comparison with stock generate if there is a drafter to compare."""

    def __init__(self, job: Job, places: Sequence[str], slots: str):
        self.worker = Worker(job, places[0], f"{slots}worker-0")
        print_notes(self.worker.notes)
        self.summaries: list[dict[str, Any]] = []
        self.comparison: Any = None
        if job.options.compare and self.worker.engine.drafter is not None:
            from mmspec.app.caption.compare import Sampled

            self.comparison = Sampled(job.items)
            self.worker.sampler = self.comparison.show

    def run(self, tasks: Sequence[Task], report: Report) -> None:
        """Do all tasks, and measure the comparison; `report` is called for each record once it is on the disk."""
        rest, worker = deque(tasks), self.worker
        while rest or worker.in_hand:
            room = max(0, worker.window - worker.in_hand)
            worker.give([rest.popleft() for _ in range(min(room, len(rest)))])
            for record in worker.step():
                report(record)
        if self.comparison is not None and self.comparison.kept:
            tqdm.write("comparing with stock generate on a few of them (--no-compare skips this)")
            self.comparison.measure(worker.engine, worker.flow.rows)

    def close(self) -> None:
        self.summaries.append(self.worker.summary())
        self.worker.close()


def serve(pipe: Connection, job: Job, place: str, slot: str) -> None:
    """The main function of a worker process: works on the tasks it is sent until the parent stops it or is gone.

    It sends a message with `records` and `window`, and the parent answers with more tasks (None: stop) once it has
    some, or at once if the process is busy. The last message has a `summary`, or the `trouble` that ended the work.
    """
    quiet()
    for number in (signal.SIGINT, signal.SIGTERM):  # may be sent to all processes; the parent decides when to stop
        signal.signal(number, signal.SIG_IGN)
    if place.startswith("cpu"):  # must be set before torch is imported
        share = max(1, cores() // job.workers)
        os.environ["OMP_NUM_THREADS"] = str(min(share, int(os.environ.get("OMP_NUM_THREADS") or share)))
    with contextlib.suppress(EOFError, ConnectionError):  # the parent has gone
        try:
            with contextlib.closing(Worker(job, place, slot)) as worker:
                records: list[Record] = []
                while True:
                    window = worker.window
                    pipe.send({"notes": worker.notes, "records": records, "window": min(window, job.items)})
                    if (tasks := pipe.recv()) is None:
                        break
                    worker.give(tasks)
                    records = []
                    while worker.in_hand and not records and worker.window == window and not pipe.poll():
                        records = worker.step()
                pipe.send({"summary": worker.summary()})
        except ConnectionError:
            raise
        except (FatalError, OSError) as error:
            pipe.send({"trouble": f"{slot} on {place}: {error}"})


@dataclass(eq=False)
class WorkerProcess:
    """A worker process as its parent sees it."""

    process: Any
    pipe: Connection
    slot: str
    place: str
    starts: int  # starts in a row without a finished item, this one included
    tasks: dict[str, Task] = field(default_factory=dict)  # its unfinished tasks by name
    window: int = 0  # maximum number of unfinished tasks; 0 until its model is loaded
    waiting: bool = False  # whether it waits for an answer to its last message
    alone: bool = False  # whether its only task is one that a killed worker had
    trouble: str = ""  # why it cannot go on, if it reported an error

    def end(self) -> str:
        """End the process, and return how it ended."""
        self.pipe.close()
        return end_process(self.process, 1)  # a process that ended by itself may need a moment to exit


class WorkerPool:
    """One process per device, each with its own model, decoder and journal; used like `SingleWorker`, but not compared.

    A process that dies is restarted, unless it never finishes anything. The items that a killed one had are given out
    one at a time; an item during which a second process dies, with no other item, is recorded as a failure.
    """

    comparison = None

    def __init__(self, job: Job, places: Sequence[str], slots: str) -> None:
        count = len(places)
        self.job = replace(job, folder=job.folder.resolve(), workers=count, items=max(1, -(-job.items // count)))
        self.workers: list[WorkerProcess] = []
        self.summaries: list[dict[str, Any]] = []
        self._rest, self._suspects, self._unfinished = deque[Task](), deque[Task](), set[str]()
        self._notes, self._begun, self._why = set[str](), time.time(), ""
        for number, place in enumerate(places):
            self._start(f"{slots}worker-{number}", place)
        try:
            while not any(worker.window for worker in self.workers):  # until a model is loaded
                self._receive(lambda record: None)
        except BaseException:
            self.close()
            raise

    def run(self, tasks: Sequence[Task], report: Report) -> None:
        """Do all tasks. FatalError if no worker is left."""
        self._rest.extend(tasks)
        self._unfinished = {task.item.name for task in tasks}
        while self._unfinished:
            for worker in self.workers:
                self._give(worker)
            self._receive(report)

    def _receive(self, report: Report) -> None:
        """Wait for messages of workers; FatalError if no worker is left."""
        if not self.workers:
            raise FatalError(f"all workers have ended ({self._why}); finished captions are saved, run the same "
                "command again to resume")  # fmt: skip
        ready = wait([worker.pipe for worker in self.workers])
        for worker in [worker for worker in self.workers if worker.pipe in ready]:
            try:
                message = worker.pipe.recv()
            except (EOFError, OSError):
                self._replace(worker, report)
                continue
            self._note(worker, message)
            self._finish(worker, message.get("records", ()), report)

    def close(self) -> None:
        deadline = time.monotonic() + STOP_SECONDS
        try:
            for worker in self.workers:
                with contextlib.suppress(OSError):
                    worker.pipe.send(None)
            for worker in self.workers:
                with contextlib.suppress(EOFError, OSError):
                    while worker.window and worker.pipe.poll(max(0.0, deadline - time.monotonic())):
                        self._note(worker, worker.pipe.recv())
        finally:
            for worker in self.workers:
                worker.end()

    def _note(self, worker: WorkerProcess, message: dict[str, Any]) -> None:
        notes = message.get("notes", ())
        print_notes([note for note in notes if note not in self._notes])
        self._notes |= {*notes}
        self.summaries += [message["summary"]] if "summary" in message else []
        worker.window, worker.waiting = message.get("window", worker.window), True
        worker.trouble = message.get("trouble", worker.trouble)

    def _finish(self, worker: WorkerProcess, records: Sequence[Record], report: Report) -> None:
        for record in records:
            worker.starts = 0
            worker.tasks.pop(record["file_name"], None)
            if record["file_name"] in self._unfinished:
                self._unfinished.remove(record["file_name"])
                report(record)

    def _give(self, worker: WorkerProcess) -> None:
        """Answer a worker with as many tasks as it has room for; those of killed workers come last, each alone."""
        if not worker.waiting:
            return
        tasks: list[Task] = []
        if not worker.tasks or not worker.alone:
            room = max(0, worker.window - len(worker.tasks))
            tasks = [self._rest.popleft() for _ in range(min(room, len(self._rest)))]
            worker.alone = not tasks and not worker.tasks and bool(self._suspects)
            if worker.alone:
                tasks = [self._suspects.popleft()]
        worker.tasks |= {task.item.name: task for task in tasks}
        if worker.tasks:
            worker.waiting = False
            with contextlib.suppress(OSError):  # it has just died, and the next `recv` raises EOFError
                worker.pipe.send(tasks)

    def _start(self, slot: str, place: str, starts: int = 1) -> None:
        process, pipe = start_process(serve, self.job, place, slot)
        self.workers.append(WorkerProcess(process, pipe, slot, place, starts))

    def _replace(self, worker: WorkerProcess, report: Report) -> None:
        """Give the tasks of a dead worker to the others, and restart it where that may help."""
        self.workers.remove(worker)
        how = worker.end()
        self._finish(worker, self._recorded(worker), report)
        for task in worker.tasks.values():
            if worker.trouble:  # it reported an error of its own: no item is the cause
                self._rest.append(task)
            elif not worker.alone:
                self._suspects.append(task)
            else:
                self._unfinished.remove(task.item.name)
                report(self._blame(worker.slot, task))
        self._why = worker.trouble or f"{worker.slot} on {worker.place} has ended ({how})"
        if again := worker.starts < (1 if worker.trouble else STARTS):
            self._start(worker.slot, worker.place, worker.starts + 1)
        then = "it is restarted" if again else "the other workers go on" if self.workers else "no worker is left"
        print(f"{' '.join(self._why.split())}; {then}", file=sys.stderr)

    def _recorded(self, worker: WorkerProcess) -> list[Record]:
        """Records that a dead worker wrote but did not send."""
        path = self.job.folder / STATE / f"{worker.slot}.jsonl"
        with contextlib.closing(Ledger([path] if path.exists() else [])) as ledger:
            found = [ledger.failure(name) or ledger.get(name) or {} for name in worker.tasks]
        return [record for record in found if record and time_of(record) >= self._begun]

    def _blame(self, slot: str, task: Task) -> Record:
        """Record, in the journal of the dead worker, that workers die on an item."""
        error = KilledWorkerError(
            "a worker was killed while it worked on this item among others, and another one on this item alone; "
            "it may need more memory than there is. --retry-failed retries it"
        )
        with contextlib.closing(Writer(self.job.folder, slot)) as writer:
            return writer.fail(task.item.name, error, about(task, "", self.job))


def print_notes(notes: Sequence[str]) -> None:
    """Print notes for the user."""
    for note in notes:
        print(f"note: {' '.join(note.split())}", file=sys.stderr, flush=True)


def places(devices: str) -> list[str]:
    """One device name per worker: those of --devices, or all CUDA devices, or `auto` for the fastest device."""
    if devices != AUTO:
        names = [name.strip() for name in devices.split(",")]
        return [f"cuda:{name}" if name.isdecimal() else name for name in names]
    import torch

    count = torch.cuda.device_count()
    return [f"cuda:{number}" for number in range(count)] if count > 1 else [AUTO]
