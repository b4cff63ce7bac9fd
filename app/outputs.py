"""What a captioning run leaves in its output folder, and what an earlier run already left there."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

from mmspec.app.journal import Journal, Record, digest, write_whole

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


LONGEST = 2**20  # bytes of a caption file that are looked at; a longer one is not ours


class OutputError(Exception):
    """The output folder cannot be used."""


class UnwritableTextError(Exception):
    """A caption is in the journal, but its `.txt` cannot be written."""


def sidecars(images: list[Path], root: Path) -> dict[Path, str]:
    """Caption file per image, relative to the output folder: `x.txt`, or `x.jpg.txt` where that could mean two images.

    Letter case does not count, because folders move to systems where it does not.
    """
    stems = Counter((image.parent, image.stem.casefold()) for image in images)
    names = {(image.parent, image.name.casefold()) for image in images}
    chosen = {}
    for image in images:
        here = (image.parent, image.stem.casefold())
        alone = stems[here] == 1 and here not in names
        chosen[image] = image.relative_to(root).with_name(f"{image.stem if alone else image.name}.txt").as_posix()
    return chosen


class Outputs:
    """The folder of one run: metadata.jsonl (the truth), a `.txt` beside it per image, failed.jsonl.

    The journal's line is written before the `.txt`; a `.txt` lost in a kill between the two is made again by `restore`.
    Held open by one process at a time.
    """

    def __init__(self, folder: Path, root: Path, images: list[Path]):
        self.folder, self.root = folder, root
        self.sidecar = sidecars(images, root)
        self._taken = set(self.sidecar.values())
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = _lock(folder)
            self._captions, self._failures = Journal(folder / "metadata.jsonl"), Journal(folder / "failed.jsonl")
        except OSError as error:
            raise OutputError(f"cannot write to {folder}: {error.strerror or error}; choose another --out") from error
        self.captions = _latest(self._captions.records)
        self.failures = {
            name: record
            for name, record in _latest(self._failures.records).items()
            if self.captions.get(name, {}).get("key") != record.get("key") and os.path.lexists(str(record.get("path")))
        }
        self._texts: dict[str, set[str]] = {}
        for record in self._captions.records:
            self._texts.setdefault(str(record.get("file_name")), set()).add(str(record.get("text")).strip())

    @property
    def origin(self) -> str:
        """Name of the folder of the images, unreadable because metadata.jsonl may be published."""
        return digest(os.fsencode(self.root.resolve()))[:16]

    @property
    def damaged(self) -> int:
        """Broken lines found in the two journals."""
        return self._captions.damaged + self._failures.damaged

    def name(self, image: Path) -> str:
        """The image's `file_name`: its path below the folder it was found in."""
        return image.relative_to(self.root).as_posix()

    def foreign(self, image: Path) -> bool:
        """Whether the image has a caption that is not ours (a `.txt` or a line), or one that was edited since."""
        if "key" not in self.captions.get(self.name(image), {"key": ""}):
            return True
        text = self._text_of(self.sidecar[image])
        return bool(text) and text not in self._texts.get(self.name(image), set())

    def write(self, image: Path, text: str, facts: Record) -> None:
        """Record one caption: first the journal, then the `.txt`."""
        name = self.name(image)
        record = {"file_name": name, "text": text, "sidecar": self.sidecar[image], **facts}
        self._captions.append(record)
        self._drop_old_sidecar(image)
        self.captions[name] = record
        self._texts.setdefault(name, set()).add(text.strip())
        self._write_text(image, text)
        self.failures.pop(name, None)

    def fail(self, image: Path, error: Exception, facts: Record) -> None:
        """Record that an image got no caption, and why."""
        name = self.name(image)
        said: Record = {"file_name": name, "path": os.path.abspath(image)}
        self.failures[name] = said | {"error": type(error).__name__, "message": str(error)} | facts
        self._failures.append(self.failures[name])

    def restore(self, image: Path) -> bool:
        """Make the `.txt` of a recorded caption if it is missing, old, or moved to a longer name; true if it was."""
        record = self.captions[self.name(image)]
        self._drop_old_sidecar(image)
        if self.foreign(image) or self._text_of(self.sidecar[image]) == str(record["text"]).strip():
            return False
        self._write_text(image, str(record["text"]))
        return True

    def tidy(self) -> None:
        """At the end of a run: one line per image, and in failed.jsonl only what has still failed."""
        others = [record for record in self._captions.records if "file_name" not in record]
        self._captions.compact([*others, *self.captions.values()])
        self._failures.compact(list(self.failures.values()))

    def close(self) -> None:
        """Let go of the folder."""
        self._captions.close()
        self._failures.close()
        if not self.failures:
            self._failures.path.unlink(missing_ok=True)
        if self._lock is not None:
            os.close(self._lock)

    def _write_text(self, image: Path, text: str) -> None:
        path = self.folder / self.sidecar[image]
        try:
            write_whole(path, f"{text}\n".encode())
        except OSError as error:
            reason = f"cannot write {path}: {error.strerror or error}"
            raise UnwritableTextError(f"{reason}; the caption itself is in {self._captions.path}") from error

    def _text_of(self, sidecar: str) -> str | None:
        path = self.folder / sidecar
        try:
            if not path.is_file():  # missing, or a folder, pipe or device of that name
                return None
            with open(path, "rb") as file:
                return file.read(LONGEST).decode("utf-8", "replace").strip()
        except OSError:
            return None

    def _drop_old_sidecar(self, image: Path) -> None:
        """Remove the `x.txt` of a time when no `x.png` stood beside `x.jpg`, unless somebody edited it."""
        record = self.captions.get(self.name(image), {})
        before = record.get("sidecar")
        own = {image.relative_to(self.root).with_name(f"{name}.txt").as_posix() for name in (image.stem, image.name)}
        if before in own - self._taken and self._text_of(before) == str(record.get("text")).strip():
            (self.folder / before).unlink()


def _latest(records: list[Record]) -> dict[str, Record]:
    """The last line of every image."""
    return {str(record["file_name"]): record for record in records if "file_name" in record}


def _lock(folder: Path) -> int | None:
    """Hold the folder until the process ends, however it ends; a second run is refused."""
    if fcntl is None:
        return None
    held = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(held)
        raise OutputError(f"another mmspec caption writes to {folder}; wait for it or choose another --out") from None
    except OSError:  # a network disk without locks
        os.close(held)
        return None
    return held
