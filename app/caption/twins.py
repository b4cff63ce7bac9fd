"""Items that are the same file, or look the same, and are asked the same: captioned once (--dedup)."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmspec.app.caption.journal import Ledger
from mmspec.app.caption.outputs import STATE
from mmspec.app.caption.plan import Task
from mmspec.media import Media

NEAR = 3  # bits of 64 in which the hashes of two pictures that look the same may differ
BANDS = NEAR + 1  # cut into so many parts, two such hashes agree in one part at least


@dataclass(eq=False)
class Twin:
    """The first of its kind: its answer once there is one, and who waits for it."""

    name: str
    phash: int | None = None
    text: str | None = None
    finish: str = ""
    followers: list[tuple[Task, Media]] = field(default_factory=list)


class Twins:
    """What one worker has seen, and what earlier runs recorded; workers do not know of each other."""

    def __init__(self, how: str, folder: Path | None):
        self.looks = how == "phash"
        self._exact: dict[Any, Twin] = {}
        self._bands: dict[Any, list[Twin]] = defaultdict(list)
        if folder is None:
            return
        ledger = Ledger(sorted((folder / STATE).glob("*.jsonl")))
        for record in ledger.all_captions():
            if "ask" in record:
                answer = str(record.get("answer", record["text"]))
                twin = Twin(str(record["file_name"]), record.get("phash"), answer, record.get("finish", ""))
                self._enter(twin, record["ask"], str(record.get("content")))
        ledger.close()

    def of(self, task: Task, media: Media) -> Twin | None:
        """The one before that this is the same as; None for the first of its kind."""
        twin = self._exact.get((task.ask, media.content))
        if twin is None and self.looks and media.phash is not None:
            near = (t for band in _bands(media.phash) for t in self._bands.get((task.ask, *band), ()))
            twin = next((t for t in near if ((t.phash or 0) ^ media.phash).bit_count() <= NEAR), None)
        if twin is None or twin.name == task.item.name:
            self._enter(Twin(task.item.name, media.phash), task.ask, media.content)
            return None
        return twin

    def settle(self, task: Task, media: Media, text: str | None, finish: str = "") -> list[tuple[Task, Media]]:
        """The answer for one of a kind (None: it failed, and is forgotten); who waited for it."""
        twin = self._exact.get((task.ask, media.content))
        if twin is None:
            return []
        twin.text, twin.finish = text, finish
        followers, twin.followers = twin.followers, []
        if text is None:
            del self._exact[task.ask, media.content]
            for band in _bands(twin.phash) if twin.phash is not None else ():
                self._bands[task.ask, *band].remove(twin)
            for follower, its in followers:
                self._enter(Twin(follower.item.name, its.phash), follower.ask, its.content)
        return followers

    def _enter(self, twin: Twin, ask: str, content: str) -> None:
        self._exact[ask, content] = twin
        if self.looks and twin.phash is not None:
            for band in _bands(twin.phash):
                self._bands[ask, *band].append(twin)


def _bands(phash: int) -> list[tuple[int, int]]:
    width = 64 // BANDS
    return [(part, phash >> part * width & (1 << width) - 1) for part in range(BANDS)]
