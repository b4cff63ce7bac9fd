"""The plan of a captioning run: compares the items of its inputs with what earlier runs recorded."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from typing import Any

from mmspec.app.caption.journal import Record, digest, key
from mmspec.app.caption.options import AUTO, ENGINE, Options
from mmspec.app.caption.outputs import OutputError, Outputs, Sidecars
from mmspec.app.media.inputs import Inputs
from mmspec.app.media.items import VIDEO, Item
from mmspec.app.media.video import MAX_FRAMES, FramePolicy
from mmspec.app.prompt import PromptChoice, Prompts
from mmspec.media import MediaError


@dataclass(frozen=True)
class Task:
    """One item to caption, with its prompt and caption file; it is pickled and sent to worker processes."""

    item: Item
    choice: PromptChoice
    ask: str  # hash of everything that shapes the answer except the content
    stamp: str | None  # size and modification time of its file
    existing: str | None = None  # the caption that the item had before mmspec wrote one
    sidecar: str | None = None  # caption file to write
    failed: bool = False  # in an earlier run


@dataclass
class Plan:
    """The tasks of a run, and counts of what needs no work."""

    pending: list[Task] = field(default_factory=list)
    items: int = 0  # of this run's shard
    done: int = 0
    kept: int = 0
    failed_before: int = 0
    bare: int = 0  # pending items without a caption for the {existing} of a prompt
    again: int = 0  # pending items that have a caption by mmspec, with another prompt or other settings
    restored: int = 0
    unwritable: list[str] = field(default_factory=list)

    def frames(self, policy: FramePolicy) -> int:
        """Maximum number of pictures of an item."""
        return policy.most if any(task.item.kind == VIDEO for task in self.pending) else 1

    def __str__(self) -> str:
        parts = {
            "to caption": len(self.pending),
            "of them again (since the prompt or a setting has changed, or by --no-resume)": self.again,
            "of them without a caption for {existing}, which stays empty (of a table: --column-text)": self.bare,
            "done before": self.done,
            "kept (they have a caption that mmspec did not write; see --on-existing)": self.kept,
            "failed before (--retry-failed retries them)": self.failed_before,
            "missing caption files restored": self.restored,
        }
        return ", ".join(f"{count} {what}" for what, count in parts.items() if count or what == "to caption")


class Planner:
    """Decides item by item what to do; it reads a file only if its item has a record and the file's stamp changed."""

    def __init__(self, options: Options, shaping: dict[str, Any], prompts: Prompts, outputs: Outputs):
        self.options, self.shaping, self.prompts, self.outputs = options, shaping, prompts, outputs
        self.overwrite = options.on_existing == "overwrite"
        self.reads_existing = any("{existing}" in prompt for prompt in prompts.texts)

    def plan(self, inputs: Inputs) -> Plan:
        """Sort all items of this run's shard. OutputError if the output folder belongs to another data set."""
        mine, sidecars = [], Sidecars()
        for item in inputs.items():
            sidecars.add(item.name)
            if self._of_this_shard(item.name):
                mine.append(item)
        todo = Plan(items=len(mine))
        for item in mine:
            kinds = self.options.format  # by default, items that are separate files get a caption file
            beside = item.source.path is not None if kinds is None else "txt" in kinds.split(",")
            self._sort(item, sidecars if beside else None, todo)
        return todo

    def _sort(self, item: Item, sidecars: Sidecars | None, todo: Plan) -> None:
        options, outputs, name = self.options, self.outputs, item.name
        record, failure = outputs.ledger.get(name), outputs.ledger.failure(name)
        sidecar = sidecars.of(name, record) if sidecars else None
        stamp = item.source.stamp
        same = record is not None and self._unchanged(record, item, stamp)
        original = item.existing or (record or {}).get("existing")  # the caption before mmspec wrote one
        if record and same and options.resume and record.get("ask") == self._choice(item, original)[1]:
            todo.done += 1
            self._restore(record, sidecar, todo)
            return
        edited = outputs.existing(name, sidecar)
        if not self.overwrite and (edited or (item.existing and not record and not self.reads_existing)):
            todo.kept += 1
            return
        existing = edited or original
        choice, ask = self._choice(item, existing)
        if failure and failure.get("ask") == ask and failure.get("stamp") == stamp and not options.retry_failed:
            todo.failed_before += 1
            return
        if record and not same and record.get("folder") != outputs.origin and not self.overwrite:
            raise OutputError(
                f"{outputs.folder} already holds a caption of {name}, from another folder; "
                "choose another --out, or --on-existing overwrite"
            )
        todo.again += same
        todo.bare += self.reads_existing and not existing
        todo.pending.append(Task(item, choice, ask, stamp, existing, sidecar, failure is not None))

    def _choice(self, item: Item, existing: str | None) -> tuple[PromptChoice, str]:
        """The prompt for an item, and the hash of everything that shapes the answer except the item's content."""
        choice, policy = self.prompts.of(replace(item, existing=existing)), self.options.policy
        more: Record = {}
        if item.kind == VIDEO:
            more = {"frames": policy.named}
            if policy.kind != "uniform":  # its name already includes the limit
                more["max_frames"] = self.options.max_frames
        return choice, ask_key(self.shaping | vars(choice) | more)

    def _unchanged(self, record: Record, item: Item, stamp: str | None) -> bool:
        if stamp and record.get("stamp") == stamp and record.get("folder") == self.outputs.origin:
            return True
        try:
            return record.get("content") == digest(item.source.read(self.options.max_bytes))
        except MediaError:
            return False

    def _restore(self, record: Record, sidecar: str | None, todo: Plan) -> None:
        if sidecar is None or self.options.dry_run:
            return
        try:
            todo.restored += self.outputs.restore(record, sidecar, self.overwrite)
        except OSError as error:
            todo.unwritable.append(str(error))

    def _of_this_shard(self, name: str) -> bool:
        shard, shards = map(int, (self.options.shard or "0/1").split("/"))
        return int.from_bytes(hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest()[:8]) % shards == shard


def ask_key(facts: Record) -> str:
    """A hash of everything that shapes an answer except the content.

    Only what differs from its default counts, so that a newly added option does not invalidate recorded captions.
    """
    usual = {"further": (), "max_frames": MAX_FRAMES, "engine": ENGINE}
    usual |= dict.fromkeys(("dtype", "max_pixels_per_image"), AUTO)
    return key(**{name: value for name, value in facts.items() if value not in ("", usual.get(name, ""))})
