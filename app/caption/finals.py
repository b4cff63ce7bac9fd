"""The final files of an output folder: what they are called, and which of those that lie there a run of ours made."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from mmspec.app.caption import formats
from mmspec.app.caption.items import need
from mmspec.app.caption.journal import Journal, Ledger, Record, hold, line_of, parse, write_whole

FAILURES = "failed.jsonl"  # made by every run in which anything failed
MERGED = formats.METADATA  # the lines of others in it are kept, so it may be anybody's
FACTS = {"file_name", "error", "message", "key"}  # that each line of failed.jsonl has held in every version
SHARD = re.compile(r"webdataset/\d+\.(tar|parquet)")
ADOPTING = 600.0  # seconds for which another shard's run may be looking through the folder


class OutputError(Exception):
    """The output folder cannot be used."""


class Finals:
    """What runs have put into a folder: a line in `finals.log`, with the file's sha256, before it gets its name.

    So a file is ours as long as it says what we wrote, wherever a kill came. A shard of tars tells by itself.
    """

    def __init__(self, folder: Path, state: Path):
        self.folder, self._log = folder, state / "finals.log"
        self._adopted: list[Record] = []
        self.reserved: set[str] = set()  # names in the folder that no caption file may have

    def claim(
        self, kinds: Collection[str], names: Iterable[str], read: Iterable[Path], report: Path | None, ledger: Ledger,
        dry: bool,
    ) -> None:  # fmt: skip
        """Before any work: OutputError if this run would replace a file of others, or one that it reads.

        Args:
            names: of the items.
            report: one more file that will be written.
            dry: nothing may be written, not even notes.
        """
        self._adopt(ledger, dry)
        self.refuse_strangers(kinds, ledger, names)
        read = {path.resolve(): path for path in read}
        for path in read.values():
            if self._made_at(path, kinds):
                raise OutputError(f"{path} would be replaced by what this run makes; move it, or choose another --out")
        if report is not None and (report.resolve() in read or self._made_at(report, kinds)):
            raise OutputError(f"--report {report} would replace a file that this run reads or makes; name another")
        said = [*read.values(), *([report] if report is not None else [])]
        self.reserved = {*map(self._name, said), *_names(kinds)}

    def refuse_strangers(self, kinds: Collection[str], ledger: Ledger, more: Iterable[str] = ()) -> None:
        """OutputError if files of these kinds would replace one that no run of ours made, or that was changed since.

        The files are those of the captions in the ledger and of items of `more` names.
        """
        left = {MERGED}
        if "pairs" in kinds:  # of the two lists it makes one
            listed = formats.list_of(itertools.chain(ledger.captions, more))
            left |= {formats.VIDEOS, formats.IMAGES} - {listed}
        found = [_line(self.folder / name) for name in _names(kinds) if name not in left]
        noted = self._noted()  # read last: what another shard's run puts there meanwhile, it notes first
        strange = [str(line["file"]) for line in found if line["sha256"] is not None and line not in noted]
        if "webdataset" in kinds:
            strange += formats.strange_shards(self.folder, lambda name, text: text.strip() in ledger.texts(name))
        if strange:
            raise OutputError(
                f"{', '.join(strange)} in {self.folder} would be replaced, but no run made it, or somebody changed it "
                "since (runs of older versions kept no note of what they made); move it away, or choose another --out"
            )

    def note(self, path: Path, partial: Path) -> None:
        """Write down what is about to be put at `path`."""
        line = _line(partial) | {"file": path.name}
        with self._alone():
            if line not in self._noted():
                with Journal(self._log) as log:
                    log.append(line)

    def _adopt(self, ledger: Ledger, dry: bool) -> None:
        """Where nothing is noted yet: note what versions made that kept no notes, if it says what the journals say."""
        if dry:
            self._adopted = [] if self._noted() else _recognised(self.folder, ledger)
            return
        with self._alone():
            if not self._noted():
                lines = b"".join(map(line_of, _recognised(self.folder, ledger)))
                write_whole(self._log, lines, self._log.with_suffix(".partial"))

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep the runs of other shards from the notes."""
        with open(self._log.with_suffix(".lock"), "ab") as lock:
            if not hold(lock.fileno(), patience=ADOPTING):
                raise OutputError(f"another run still looks through {self.folder}; run the command again")
            yield

    def _made_at(self, path: Path, kinds: Collection[str]) -> bool:
        """Whether a run that makes files of these kinds may put one there."""
        name = self._name(path)
        return name in _names(kinds) or ("webdataset" in kinds and SHARD.fullmatch(name) is not None)

    def _name(self, path: Path) -> str:
        """Path in the output folder, as caption files have it; empty for what lies elsewhere."""
        place, folder = path.resolve(), self.folder.resolve()
        return place.relative_to(folder).as_posix() if place.is_relative_to(folder) else ""

    def _noted(self) -> list[Record]:
        lines = map(parse, _lines_of(self._log))
        return self._adopted + [line for line in lines if line is not None]


def _names(kinds: Iterable[str]) -> list[str]:
    """Files that a run may make or remove, but for those of webdataset."""
    return [name for kind in kinds for name in formats.NAMES.get(kind, ())] + [FAILURES]


def _line(path: Path) -> Record:
    """Name and sha256 of a file: None where nothing is, empty for what cannot be read as one."""
    sha256 = None
    with contextlib.suppress(OSError):
        if path.is_file():
            with open(path, "rb") as file:
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    if sha256 is None and os.path.lexists(path):
        sha256 = ""
    return {"file": path.name, "sha256": sha256}


def _recognised(folder: Path, ledger: Ledger) -> list[Record]:
    """Lines of the final files that say nothing but what these journals say; none where there are no journals."""
    if not (ledger.captions or ledger.failures):
        return []
    names = []
    if all((parse(line) or {}).keys() >= FACTS for line in _lines_of(folder / FAILURES)):
        names.append(FAILURES)
    table, lists = folder / formats.TABLE, [folder / formats.VIDEOS, folder / formats.IMAGES]
    if table.is_file() and _all_said(_rows(table), ledger, _cell):
        names.append(formats.TABLE)
    texts = [_listed(line) for line in _lines_of(folder / formats.PROMPTS)]
    for path in filter(Path.is_file, lists):
        files = [_listed(line) for line in _lines_of(path)]
        if files and set(map(_listed, ledger.captions)).issuperset(files):
            names.append(path.name)  # whose prompts may be gone, or be those of the other list
        if len(files) == len(texts) and _all_said(zip(files, texts, strict=True), ledger, _listed):
            names.append(formats.PROMPTS)
    return [line for line in map(_line, (folder / name for name in names)) if line["sha256"]]


def _all_said(rows: Iterable[tuple[str, str]], ledger: Ledger, written: Callable[[str], str]) -> bool:
    """Whether there are any rows, and each is a name with a caption that it had at some time, both as `written`."""
    names = {form: name for name in ledger.captions if (form := written(name)) != name}
    said = [text in map(written, ledger.texts(names.get(name, name))) for name, text in rows]
    return bool(said) and all(said)


def _cell(value: Any) -> str:
    """A name or a text as it stands in a table."""
    return formats.cell(value, "string").strip()


def _listed(value: str | bytes) -> str:
    """A name or a text as it stands in a list."""
    line = value if isinstance(value, bytes) else formats.one_line(value)
    return line.decode("utf-8", "surrogateescape")


def _rows(table: Path) -> Iterator[tuple[str, str]]:
    """Names and texts of a parquet file of ours; none of any other."""
    try:
        file = need("pyarrow.parquet", str(table)).ParquetFile(table)
        if file.schema_arrow.names == list(formats.COLUMNS):
            for batch in file.iter_batches(columns=["file_name", "text"]):
                yield from ((_cell(row["file_name"]), _cell(row["text"])) for row in batch.to_pylist())
    except Exception:  # no pyarrow, or a damaged file, which may raise anything: it is none of ours
        yield "", ""


def _lines_of(path: Path) -> Iterator[bytes]:
    if path.is_file():
        with open(path, "rb") as file:
            yield from (line.rstrip(b"\n") for line in file)
