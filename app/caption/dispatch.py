"""Hands out the items of a run; what a killed worker had in hand goes to the others."""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mmspec.app.caption.journal import FAILED, Ledger, time_of
from mmspec.app.caption.model import FatalError
from mmspec.app.caption.outputs import STATE, Writer
from mmspec.app.caption.plan import Task
from mmspec.app.caption.run import Job, Result, failed


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
