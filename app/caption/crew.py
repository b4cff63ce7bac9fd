"""The parent of the worker processes: it hands out items, hears of results, and saves what an ended worker had."""

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

GOODBYE = 30.0  # seconds a process has for its last round once it was told to stop
STARTS = 2  # of a worker in a row, none of which finishes an item; then its device is given up


class KilledWorkerError(Exception):
    """The process that worked on this item alone came to its end."""


@dataclass(eq=False)
class Hand:
    """A worker process as its parent sees it."""

    process: Any
    line: Connection
    slot: str
    place: str
    barren: int  # starts before this one, in a row, in which nothing was finished
    tasks: dict[str, Task] = field(default_factory=dict)  # that it has in hand, by name
    alone: bool = False  # with one item that a killed worker had in hand
    loaded: bool = False
    worked: bool = False
    trouble: str = ""  # why it cannot go on, if it says so itself


class Crew:
    """One process per device, each with a model, a decoder and a journal of its own.

    A process that ends is started again, unless it never finishes anything. What a killed one had in hand is given out
    item by item; an item that kills a second process, alone with it, is recorded as a failure.
    """

    def __init__(self, job: Job, places: Sequence[str], slots: str) -> None:
        count = len(places)
        self.job = replace(job, folder=job.folder.resolve(), workers=count, items=max(1, -(-job.items // count)))
        self.hands: list[Hand] = []
        self.summaries: list[dict[str, Any]] = []
        self._rest, self._suspects, self._left = deque[Task](), deque[Task](), set[str]()
        self._said, self._begun, self._why = set[str](), time.time(), ""
        for number, place in enumerate(places):
            self._hire(f"{slots}worker-{number}", place)

    def run(self, tasks: Sequence[Task], report: Report, started: Callable[[], object] | None = None) -> None:
        """Do all tasks, as `Alone.run` does. FatalError if no worker is left."""
        self._rest.extend(tasks)
        self._left = {task.item.name for task in tasks}
        while self._left:
            if not self.hands:
                raise FatalError(f"all workers have ended ({self._why}); what is finished is safe, the same command "
                    "goes on")  # fmt: skip
            ready = wait([hand.line for hand in self.hands], POLL)
            for hand in [hand for hand in self.hands if hand.line in ready]:
                try:
                    said = hand.line.recv()
                except (EOFError, OSError):
                    self._bury(hand, report)
                    continue
                self._hear(hand, said)
                if started is not None and said.get("opened"):
                    started()
                    started = None
                self._book(hand, said.get("results", ()), report)
                if "room" in said:
                    with contextlib.suppress(OSError):  # it has just ended, which is heard of next
                        hand.line.send(self._next(hand, said["room"]))

    def compared(self, ready: Callable[[], None]) -> None:
        """Each worker has a model of its own, and none is compared."""

    def stop(self) -> None:
        give_up = time.monotonic() + GOODBYE
        try:
            for hand in self.hands:
                with contextlib.suppress(OSError):
                    hand.line.send(None)
            for hand in self.hands:
                with contextlib.suppress(EOFError, OSError):
                    while hand.loaded and hand.line.poll(max(0.0, give_up - time.monotonic())):
                        self._hear(hand, hand.line.recv())
        finally:
            for hand in self.hands:
                self._end(hand)

    def _hear(self, hand: Hand, said: dict[str, Any]) -> None:
        hand.loaded |= "notes" in said
        notes = said.get("notes", ())
        say([note for note in notes if note not in self._said])
        self._said |= {*notes}
        self.summaries += [said["summary"]] if "summary" in said else []
        hand.trouble = said.get("trouble", hand.trouble)

    def _book(self, hand: Hand, results: Sequence[Result], report: Report) -> None:
        for result in results:
            hand.worked, hand.barren = True, 0
            hand.tasks.pop(result.name, None)
            if result.name in self._left:
                self._left.remove(result.name)
                report(result)

    def _next(self, hand: Hand, room: int) -> list[Task]:
        """So many items more; one that a killed worker had goes to a worker that has nothing else, after all others."""
        if hand.alone and hand.tasks:
            return []
        tasks = [self._rest.popleft() for _ in range(min(room, len(self._rest)))]
        hand.alone = not tasks and not hand.tasks and bool(self._suspects)
        if hand.alone:
            tasks = [self._suspects.popleft()]
        hand.tasks |= {task.item.name: task for task in tasks}
        return tasks

    def _hire(self, slot: str, place: str, barren: int = 0) -> None:
        line, theirs = multiprocessing.Pipe()
        process = multiprocessing.get_context("spawn").Process(target=serve, args=(self.job, place, slot, theirs))
        process.start()
        theirs.close()  # so that the line breaks when the process ends
        self.hands.append(Hand(process, line, slot, place, barren))

    @staticmethod
    def _end(hand: Hand) -> str:
        """End a process that need not go on; how it ended."""
        hand.line.close()
        hand.process.join(1)  # its line is broken already where it ended by itself
        hand.process.kill()
        hand.process.join()
        code = hand.process.exitcode
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"

    def _bury(self, hand: Hand, report: Report) -> None:
        """Give what a worker had that has ended to the others, and start it again where that may help."""
        self.hands.remove(hand)
        how = self._end(hand)
        self._book(hand, [*self._recorded(hand.slot, self._left.intersection(hand.tasks))], report)
        for task in hand.tasks.values():
            if hand.alone and not hand.trouble:
                self._left.remove(task.item.name)
                report(self._blamed(hand.slot, task))
            elif hand.trouble and not hand.alone:  # it said so itself: no item is to blame
                self._rest.append(task)
            else:
                self._suspects.append(task)
        self._why = hand.trouble or f"{hand.slot} on {hand.place} has ended ({how})"
        again = hand.worked or (not hand.trouble and hand.barren + 1 < STARTS)
        if again:
            self._hire(hand.slot, hand.place, 0 if hand.worked else hand.barren + 1)
        then = "it is started again" if again else "the others go on" if self.hands else "nobody is left"
        print(f"{' '.join(self._why.split())}; {then}", file=sys.stderr)

    def _recorded(self, slot: str, names: set[str]) -> Iterator[Result]:
        """What a dead worker had written down but no longer told."""
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
        """Record, in a journal beside that of the dead worker, that an item kills who works on it."""
        error = KilledWorkerError(
            "a worker was killed while it worked on this item among others, and another one on it alone; "
            "it may need more memory than there is. --retry-failed tries it again"
        )
        with contextlib.closing(Writer(self.job.folder, f"{slot}-lost")) as writer:
            return failed(task, "", error, writer, self.job)
