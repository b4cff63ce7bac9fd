"""The parent of the worker processes: it hands out items, collects results, and recovers items of dead workers."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from typing import Any

from mmspec.app.caption.journal import FAILED, Ledger, time_of
from mmspec.app.caption.model import FatalError
from mmspec.app.caption.outputs import STATE, Writer
from mmspec.app.caption.plan import Task
from mmspec.app.caption.run import Job, Result, failed
from mmspec.app.caption.workers import POLL, Report, say, serve

GOODBYE = 30.0  # seconds that a process has for its last round after it was told to stop
STARTS = 2  # starts of a worker in a row without a finished item, after which its device is given up


class KilledWorkerError(Exception):
    """The process died while this item was the only one it worked on."""


@dataclass(eq=False)
class WorkerProcess:
    """A worker process as its parent sees it."""

    process: Any
    pipe: Connection
    slot: str
    place: str
    failed_starts: int  # starts in a row before this one in which no item was finished
    tasks: dict[str, Task] = field(default_factory=dict)  # its unfinished tasks by name
    alone: bool = False  # whether its only task is one that a killed worker had
    loaded: bool = False
    worked: bool = False
    trouble: str = ""  # why it cannot go on, if it reported an error


class Crew:
    """One process per device, each with its own model, decoder and journal.

    A process that dies is restarted, unless it never finishes anything. The items that a killed one had are given out
    one at a time; an item during which a second process dies, with no other item, is recorded as a failure.
    """

    def __init__(self, job: Job, places: Sequence[str], slots: str) -> None:
        count = len(places)
        self.job = replace(job, folder=job.folder.resolve(), workers=count, items=max(1, -(-job.items // count)))
        self.workers: list[WorkerProcess] = []
        self.summaries: list[dict[str, Any]] = []
        self._rest, self._suspects, self._unfinished = deque[Task](), deque[Task](), set[str]()
        self._notes, self._begun, self._why = set[str](), time.time(), ""
        for number, place in enumerate(places):
            self._start(f"{slots}worker-{number}", place)

    def run(self, tasks: Sequence[Task], report: Report, started: Callable[[], object] | None = None) -> None:
        """Do all tasks, with the interface of `Alone.run`. FatalError if no worker is left."""
        self._rest.extend(tasks)
        self._unfinished = {task.item.name for task in tasks}
        while self._unfinished:
            if not self.workers:
                raise FatalError(f"all workers have ended ({self._why}); finished captions are saved, run the same "
                    "command again to resume")  # fmt: skip
            ready = wait([worker.pipe for worker in self.workers], POLL)
            for worker in [worker for worker in self.workers if worker.pipe in ready]:
                try:
                    message = worker.pipe.recv()
                except (EOFError, OSError):
                    self._replace(worker, report)
                    continue
                self._note(worker, message)
                if started is not None and message.get("opened"):
                    started()
                    started = None
                self._finish(worker, message.get("results", ()), report)
                if "room" in message:
                    with contextlib.suppress(OSError):  # it has just died, and the next `recv` raises EOFError
                        worker.pipe.send(self._next(worker, message["room"]))

    def compared(self, ready: Callable[[], None]) -> None:
        """Several workers are not compared with stock generate."""

    def stop(self) -> None:
        give_up = time.monotonic() + GOODBYE
        try:
            for worker in self.workers:
                with contextlib.suppress(OSError):
                    worker.pipe.send(None)
            for worker in self.workers:
                with contextlib.suppress(EOFError, OSError):
                    while worker.loaded and worker.pipe.poll(max(0.0, give_up - time.monotonic())):
                        self._note(worker, worker.pipe.recv())
        finally:
            for worker in self.workers:
                self._end(worker)

    def _note(self, worker: WorkerProcess, message: dict[str, Any]) -> None:
        worker.loaded |= "notes" in message
        notes = message.get("notes", ())
        say([note for note in notes if note not in self._notes])
        self._notes |= {*notes}
        self.summaries += [message["summary"]] if "summary" in message else []
        worker.trouble = message.get("trouble", worker.trouble)

    def _finish(self, worker: WorkerProcess, results: Sequence[Result], report: Report) -> None:
        for result in results:
            worker.worked, worker.failed_starts = True, 0
            worker.tasks.pop(result.name, None)
            if result.name in self._unfinished:
                self._unfinished.remove(result.name)
                report(result)

    def _next(self, worker: WorkerProcess, room: int) -> list[Task]:
        """Up to `room` tasks; the tasks of killed workers come last, each for a worker that has no other task."""
        if worker.alone and worker.tasks:
            return []
        tasks = [self._rest.popleft() for _ in range(min(room, len(self._rest)))]
        worker.alone = not tasks and not worker.tasks and bool(self._suspects)
        if worker.alone:
            tasks = [self._suspects.popleft()]
        worker.tasks |= {task.item.name: task for task in tasks}
        return tasks

    def _start(self, slot: str, place: str, failed_starts: int = 0) -> None:
        pipe, theirs = multiprocessing.Pipe()
        process = multiprocessing.get_context("spawn").Process(target=serve, args=(self.job, place, slot, theirs))
        process.start()
        theirs.close()  # so that `recv` raises EOFError when the process ends
        self.workers.append(WorkerProcess(process, pipe, slot, place, failed_starts))

    @staticmethod
    def _end(worker: WorkerProcess) -> str:
        """End a process, and return how it ended."""
        worker.pipe.close()
        worker.process.join(1)  # a process that ended by itself may need a moment to exit
        worker.process.kill()
        worker.process.join()
        code = worker.process.exitcode
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"

    def _replace(self, worker: WorkerProcess, report: Report) -> None:
        """Give the tasks of a dead worker to the others, and restart it where that may help."""
        self.workers.remove(worker)
        how = self._end(worker)
        self._finish(worker, [*self._recorded(worker.slot, self._unfinished.intersection(worker.tasks))], report)
        for task in worker.tasks.values():
            if worker.alone and not worker.trouble:
                self._unfinished.remove(task.item.name)
                report(self._blamed(worker.slot, task))
            elif worker.trouble and not worker.alone:  # it reported an error of its own: no item is the cause
                self._rest.append(task)
            else:
                self._suspects.append(task)
        self._why = worker.trouble or f"{worker.slot} on {worker.place} has ended ({how})"
        again = worker.worked or (not worker.trouble and worker.failed_starts + 1 < STARTS)
        if again:
            self._start(worker.slot, worker.place, 0 if worker.worked else worker.failed_starts + 1)
        then = "it is restarted" if again else "the other workers go on" if self.workers else "no worker is left"
        print(f"{' '.join(self._why.split())}; {then}", file=sys.stderr)

    def _recorded(self, slot: str, names: set[str]) -> Iterator[Result]:
        """Results that a dead worker recorded but did not send."""
        path = self.job.folder / STATE / f"{slot}.jsonl"
        with contextlib.closing(Ledger([path] if path.exists() else [])) as ledger:
            for name in sorted(names.intersection([*ledger.captions, *ledger.failures])):
                record = ledger.failure(name) or ledger.get(name) or {}
                if time_of(record) < self._begun:
                    continue
                if record.get("status") == FAILED:
                    yield Result(name, error=str(record["error"]), message=str(record["message"]))
                else:
                    texts = record.get("captions") or [str(record["text"])]
                    yield Result(name, " | ".join(texts), len(texts), int(record.get("tokens", 0)))

    def _blamed(self, slot: str, task: Task) -> Result:
        """Record, in a journal beside that of the dead worker, that workers die on an item."""
        error = KilledWorkerError(
            "a worker was killed while it worked on this item among others, and another one on this item alone; "
            "it may need more memory than there is. --retry-failed retries it"
        )
        with contextlib.closing(Writer(self.job.folder, f"{slot}-lost")) as writer:
            return failed(task, "", error, writer, self.job)
