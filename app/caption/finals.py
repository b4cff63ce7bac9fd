"""The final files of an output folder: what they are called, and which of those that lie there a run of ours made."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from mmspec.app.caption import formats
from mmspec.app.caption.items import need
from mmspec.app.caption.journal import Journal, Ledger, Record, line_of, parse

FAILURES = "failed.jsonl"  # made by every run in which anything failed
MERGED = "metadata.jsonl"  # the lines of others in it are kept, so it may be anybody's
FACTS = {"file_name", "error", "message", "key"}  # that each line of failed.jsonl has held in every version
SHARD = re.compile(r"webdataset/\d+\.(tar|parquet)")


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
        self, kinds: Collection[str], read: Iterable[Path], report: Path | None, ledger: Ledger, dry: bool
    ) -> None:
        """Before any work: OutputError if this run would replace a file of others, or one that it reads.

        Args:
            report: one more file that will be written.
            dry: nothing may be written, not even notes.
        """
        self._adopt(ledger, dry)
        self.refuse_strangers(kinds)
        read = {path.resolve(): path for path in read}
        for path in read.values():
            if self._made_at(path, kinds):
                raise OutputError(f"{path} would be replaced by what this run makes; move it, or choose another --out")
        if report is not None and (report.resolve() in read or self._made_at(report, kinds)):
            raise OutputError(f"--report {report} would replace a file that this run reads or makes; name another")
        said = [*read.values(), *([report] if report is not None else [])]
        self.reserved = {*map(self._name, said), *_names(kinds)}

    def refuse_strangers(self, kinds: Collection[str]) -> None:
        """OutputError if files of these kinds would replace one that no run of ours made, or that was changed since."""
        found = [_line(self.folder / name) for name in _names(kinds) if name != MERGED]
        noted = self._noted()  # read last: what another shard's run puts there meanwhile, it notes first
        strange = [str(line["file"]) for line in found if line["sha256"] is not None and line not in noted]
        strange += formats.strange_shards(self.folder) if "webdataset" in kinds else []
        if strange:
            raise OutputError(
                f"{', '.join(strange)} in {self.folder} would be replaced, but no run made it, or somebody changed it "
                "since; move it away, or choose another --out"
            )

    def note(self, path: Path, partial: Path) -> None:
        """Write down what is about to be put at `path`."""
        line = _line(partial) | {"file": path.name}
        if line not in self._noted():
            with Journal(self._log) as log:
                log.append(line)

    def _adopt(self, ledger: Ledger, dry: bool) -> None:
        """Once in every folder: note what versions made that kept no notes, if it says what the journals say."""
        if os.path.lexists(self._log):
            return
        lines = [_line(self.folder / name) for name in _recognised(self.folder, ledger)]
        self._adopted = [line for line in lines if line["sha256"]]
        if not dry:
            with contextlib.suppress(FileExistsError), open(self._log, "xb") as file:  # another shard's run has begun
                file.writelines(map(line_of, self._adopted))

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


def _recognised(folder: Path, ledger: Ledger) -> Iterator[str]:
    """Names of final files that say nothing but what these journals say; none where there are no journals."""
    if not (ledger.captions or ledger.failures):
        return
    if all((parse(line) or {}).keys() >= FACTS for line in _lines_of(folder / FAILURES)):
        yield FAILURES
    table, prompts, *lists = (name for kind in ("parquet", "pairs") for name in formats.NAMES[kind])
    if _all_said(_rows(folder / table), ledger):
        yield table
    texts = list(_lines_of(folder / prompts))
    for name in lists:
        files = [line.decode("utf-8", "surrogateescape") for line in _lines_of(folder / name)]
        if len(files) == len(texts) and _all_said(zip(files, texts, strict=True), ledger):
            yield from (name, prompts)


def _all_said(rows: Iterable[tuple[str, bytes]], ledger: Ledger) -> bool:
    """Whether there are any rows, and each is a name with a caption that it had at some time."""
    said = [text in map(formats.one_line, ledger.texts(name)) for name, text in rows]
    return bool(said) and all(said)


def _rows(table: Path) -> Iterator[tuple[str, bytes]]:
    """Names and texts of a parquet file of ours; none of any other."""
    if not table.is_file():
        return
    try:
        file = need("pyarrow.parquet", str(table)).ParquetFile(table)
        if file.schema_arrow.names == list(formats.COLUMNS):
            for batch in file.iter_batches(columns=["file_name", "text"]):
                yield from ((row["file_name"], formats.one_line(row["text"])) for row in batch.to_pylist())
    except Exception:  # no pyarrow, or a damaged file, which may raise anything: it is none of ours
        yield "", b""


def _lines_of(path: Path) -> Iterator[bytes]:
    if path.is_file():
        with open(path, "rb") as file:
            yield from (line.rstrip(b"\n") for line in file)
