"""Writes the final files of a run from its records: atomically, in the order given, with reproducible bytes.

Each function yields the path of a file before the file is put there.
"""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from mmspec.app.caption.journal import Record, line_of
from mmspec.app.files import replacing
from mmspec.app.media.items import HEAD, Source, file_source, need, sniff
from mmspec.media import MAX_BYTES, MediaError

COLUMNS = {  # columns of the parquet file; other fields of a record are not published
    **dict.fromkeys(("file_name", "text", "kind", "existing", "prompt", "system", "model"), "string"),
    **dict.fromkeys(("drafter", "finish"), "string"),
    **dict.fromkeys(("tokens", "seed"), "int64"),
    **dict.fromkeys(("prompts", "captions"), "list_string"),  # only with several prompts
    "scores": "list_float64",  # only with several prompts
    **dict.fromkeys(("temperature", "seconds", "length", "score"), "float64"),
    "content": "string",  # sha256 of the item
}
SHOWN = ("file_name", "text", "captions", "score", "scores")  # fields of metadata.jsonl
CHUNK = 4096  # records per write
SHARD_SIZE = 1000  # samples per tar
NAMES = {"metadata": "metadata.jsonl", "parquet": "captions.parquet"}  # by kind; tars are numbered
LIBRARIES = {"parquet": "pyarrow", "webdataset": "webdataset"}  # by kind


def metadata(records: Iterable[Record], folder: Path) -> Iterator[Path]:
    """Write `metadata.jsonl`, which `load_dataset("imagefolder")` reads if it is in the folder of the images."""
    path = folder / NAMES["metadata"]
    with replacing(path) as file:
        for record in records:
            file.write(line_of({name: record[name] for name in SHOWN if name in record}))
        yield path


def parquet(records: Iterable[Record], folder: Path) -> Iterator[Path]:
    """Write `captions.parquet`; not metadata.parquet, since `imagefolder` refuses a folder with two metadata files."""
    path, rest = folder / NAMES["parquet"], iter(records)
    arrow, writers = need("pyarrow", str(path)), need("pyarrow.parquet", str(path))
    types = {"list_string": arrow.list_(arrow.string()), "list_float64": arrow.list_(arrow.float64())}
    schema = arrow.schema([(name, types.get(kind) or getattr(arrow, kind)()) for name, kind in COLUMNS.items()])
    with replacing(path) as file:
        with writers.ParquetWriter(file, schema) as writer:
            while part := list(itertools.islice(rest, CHUNK)):
                rows = [{name: _unicode(record.get(name)) for name in COLUMNS} for record in part]
                writer.write_table(arrow.Table.from_pylist(rows, schema))
        yield path


def webdataset(
    records: Iterable[Record], folder: Path, sources: Mapping[str, Source] | None = None, shard_size: int = SHARD_SIZE,
    max_bytes: int = MAX_BYTES,
) -> Iterator[Path]:  # fmt: skip
    """Write `webdataset/00000.tar` and so on, with .jpg (.mp4 ...), .txt and .json of each record.

    A record is left out, with a warning, if its item cannot be read, or if it is not in `sources` (by `file_name`) and
    the record has no `path`.
    """
    writers = need("webdataset", str(folder))
    for shard, part in itertools.groupby(enumerate(records), lambda pair: pair[0] // shard_size):
        path = folder / "webdataset" / f"{shard:05}.tar"
        with replacing(path) as file:
            with writers.TarWriter(file, encoder=False, mtime=0) as tar:
                for number, record in part:
                    try:
                        data = _source(record, sources or {}).read(max_bytes)
                    except MediaError as error:
                        warnings.warn(f"left out of {path}: {error}", stacklevel=2)
                    else:
                        tar.write({"__key__": f"{number:09}", **_sample(record, data)})
            yield path


FORMATS: dict[str, Callable[..., Iterator[Path]]] = {"metadata": metadata, "parquet": parquet, "webdataset": webdataset}


def _sample(record: Record, data: bytes) -> dict[str, bytes]:
    """The files of one sample by extension."""
    extension = sniff(data[:HEAD]) or Path(record["file_name"]).suffix.lower() or ".bin"
    facts = {name: record[name] for name in COLUMNS if record.get(name) is not None}
    return {
        extension[1:]: data, "txt": str(record["text"]).encode("utf-8", "replace"), "json": json.dumps(facts).encode()
    }  # fmt: skip


def _source(record: Record, sources: Mapping[str, Source]) -> Source:
    name = record["file_name"]
    if name in sources:
        return sources[name]
    if "path" in record:
        return file_source(Path(record["path"]))
    raise MediaError(name, "is not among the inputs of this run", "name all inputs whose captions belong in the tars")


def _unicode(value: object) -> object:
    """A value without the characters of file names that are not valid Unicode."""
    if isinstance(value, list):
        return [_unicode(one) for one in value]
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value
