"""What a captioning run has still to do: the images of a folder against what earlier runs recorded."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path

from mmspec.app import media
from mmspec.app.journal import Record, digest, key
from mmspec.app.outputs import OutputError, Outputs, UnwritableTextError


@dataclass(frozen=True)
class Settings:
    """Everything that shapes a caption, besides the image."""

    prompt: str
    model: str
    drafter: str
    max_new_tokens: int
    temperature: float
    seed: int | None  # None when nothing is drawn

    def key(self, content: str) -> str:
        """What a caption of this content under these settings is filed under."""
        return key(content, **asdict(self))


@dataclass
class Plan:
    """What a run has to do, and what earlier runs or other people did."""

    pending: list[Path]
    done: int = 0
    kept: int = 0
    failed_before: int = 0
    restored: int = 0
    unwritable: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        parts = {
            "to caption": len(self.pending),
            "done before": self.done,
            "kept (they have a caption of another origin)": self.kept,
            "failed before (--retry-failed tries them again)": self.failed_before,
            "lost .txt made again": self.restored,
        }
        return ", ".join(f"{count} {what}" for what, count in parts.items() if count or what == "to caption")


def plan(outputs: Outputs, images: list[Path], settings: Settings, on_existing: str, retry_failed: bool) -> Plan:
    """Sort the images; only those of which an earlier run left a line are read for it."""
    todo = Plan([])
    for image in images:
        record, failure = outputs.captions.get(outputs.name(image)), outputs.failures.get(outputs.name(image))
        content = _content(image) if record or failure else ""
        known = settings.key(content)
        if on_existing == "overwrite":
            todo.pending.append(image)
        elif record and record.get("key") == known:
            todo.done += 1
            try:
                todo.restored += outputs.restore(image)
            except UnwritableTextError as error:
                todo.unwritable.append(str(error))
        elif outputs.foreign(image):
            todo.kept += 1
        elif failure and failure.get("key") == known and not retry_failed:
            todo.failed_before += 1
        else:
            _refuse_clash(outputs, image, record, content)
            todo.pending.append(image)
    return todo


def _refuse_clash(outputs: Outputs, image: Path, record: Record | None, content: str) -> None:
    """Two folders may each hold an x.jpg; the second must not silently take the place of the first."""
    if record and record.get("sha256") != content and record.get("folder") != outputs.origin:
        raise OutputError(
            f"{outputs.folder} already holds the caption of an {outputs.name(image)} from another folder; "
            "choose another --out, or --on-existing overwrite"
        )


def _content(image: Path) -> str:
    try:
        return digest(media.read(image))
    except media.MediaError:
        return ""
