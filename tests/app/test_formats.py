"""The final files load where they are meant to, are the same bytes every time, and are never half there."""

from __future__ import annotations

import tarfile
from pathlib import Path

import datasets
import numpy as np
import pyarrow.parquet as pq
import pytest
import webdataset as wds
from PIL import Image

from mmspec.app.caption import formats
from mmspec.app.caption.formats import FORMATS
from mmspec.app.media.inputs import open_inputs

TEXTS = {"a.png": "a red\nbird", "b/2.jpg": 'ein "Fisch" 🐟', "b/c.webp": "", "d.png": "d"}


def record(name: str, text: str, **more) -> formats.Record:
    facts = {
        "ask": "k",
        "tokens": 3,
        "seconds": 0.5,
        "model": "m",
        "sidecar": "x.txt",
        "time": 1.0,
        "content": "0" * 64,
    }
    return {"file_name": name, "text": text, **facts, **more}


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """A folder of four pictures; the colour of each is its place."""
    for shade, name in enumerate(TEXTS):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (shade * 60, 0, 0)).save(tmp_path / name)
    return tmp_path


def records(folder: Path) -> list[formats.Record]:
    return [record(name, text, path=str(folder / name)) for name, text in TEXTS.items()]


def make(kind: str, rows: list[formats.Record], folder: Path, **options) -> list[Path]:
    return list(FORMATS[kind](iter(rows), folder, **options))


def captions_in(path: Path) -> int:
    with tarfile.open(path) as file:
        return sum(name.endswith(".txt") for name in file.getnames())


def shade(image: Image.Image) -> int:
    return round(np.asarray(image.convert("RGB"))[..., 0].mean() / 60)


def test_metadata_loads_as_an_imagefolder_beside_all_other_files(
    pictures: Path, tmp_path_factory: pytest.TempPathFactory
):
    for kind in FORMATS:
        make(kind, records(pictures), pictures)
    cache = str(tmp_path_factory.mktemp("cache"))
    loaded = datasets.load_dataset("imagefolder", data_dir=str(pictures), split="train", cache_dir=cache)
    assert loaded.column_names == ["image", "text"]
    assert [(shade(row["image"]), row["text"]) for row in loaded] == list(enumerate(TEXTS.values()))


def test_metadata_loads_as_a_videofolder(tmp_path: Path):
    (tmp_path / "1.mp4").write_bytes(b"a video")
    make("metadata", [record("1.mp4", "it moves")], tmp_path)
    loaded = datasets.load_dataset(
        "videofolder", data_dir=str(tmp_path), split="train", cache_dir=str(tmp_path / "cache")
    )
    row = loaded.cast_column("video", datasets.Video(decode=False))[0]
    assert row["text"] == "it moves" and Path(row["video"]["path"]).read_bytes() == b"a video"


def test_parquet_has_a_row_a_record(pictures: Path):
    odd = [record("\udcff.png", "no Unicode in the name", seed=None, prompts=["What is \udcff?"])]
    (path,) = make("parquet", records(pictures) + odd, pictures)
    table = pq.read_table(path)
    assert table.column_names == list(formats.COLUMNS)
    assert table["file_name"].to_pylist() == [*TEXTS, r"\udcff.png"]
    assert table["prompts"].to_pylist()[-1] == [r"What is \udcff?"]
    assert table["text"].to_pylist()[:4] == list(TEXTS.values())
    assert table["tokens"].to_pylist() == [3] * 5 and table["seconds"][0].as_py() == 0.5


def test_tables_are_written_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(formats, "CHUNK", 3)
    rows = [record(f"{row}.png", str(row)) for row in range(10)]
    (path,) = make("parquet", rows, tmp_path)
    assert pq.read_table(path)["text"].to_pylist() == [str(row) for row in range(10)]


def test_shards_load_with_webdataset_and_as_inputs(pictures: Path, tmp_path: Path):
    shards = make("webdataset", records(pictures), pictures / "out", shard_size=3)
    assert [path.name for path in shards] == ["00000.tar", "00001.tar"]
    samples = list(wds.WebDataset([str(path) for path in shards], shardshuffle=False).decode("pil"))
    assert [sample["txt"] for sample in samples] == list(TEXTS.values())
    assert [sample["json"]["file_name"] for sample in samples] == list(TEXTS)
    found = [next(sample[kind] for kind in ("png", "jpg", "webp") if kind in sample) for sample in samples]
    assert [shade(image) for image in found] == [0, 1, 2, 3]
    items = list(open_inputs([str(pictures / "out/webdataset/{00000..00001}.tar")]).items())
    assert [item.existing or "" for item in items] == list(TEXTS.values())
    assert [item.source.read() for item in items] == [(pictures / name).read_bytes() for name in TEXTS]


def test_shards_take_their_pictures_from_any_source(pictures: Path, tmp_path: Path):
    """Captions of a tar become another tar."""
    first = make("webdataset", records(pictures), tmp_path / "one")
    items = list(open_inputs(first).items())
    again = [record(item.name, f"new {row}") for row, item in enumerate(items)]
    (second,) = make("webdataset", again, tmp_path / "two", sources={item.name: item.source for item in items})
    found = list(open_inputs([second]).items())
    assert [item.existing for item in found] == ["new 0", "new 1", "new 2", "new 3"]
    assert [item.source.read() for item in found] == [item.source.read() for item in items]


def test_a_picture_that_is_gone_is_left_out_until_it_is_back(pictures: Path):
    rows, away = records(pictures), pictures / "away.png"
    (pictures / "a.png").rename(away)
    with pytest.warns(UserWarning, match=r"left out of .*00000.tar: .*a.png: is missing"):
        (path,) = make("webdataset", rows, pictures)
    assert captions_in(path) == 3
    away.rename(pictures / "a.png")
    make("webdataset", rows, pictures)
    assert captions_in(path) == 4
    with pytest.warns(UserWarning, match="is not among the inputs of this run"):
        make("webdataset", [record("unknown.png", "x")], pictures)


@pytest.mark.parametrize("kind", FORMATS)
def test_the_same_records_give_the_same_bytes(pictures: Path, kind: str):
    once = [path.read_bytes() for path in make(kind, records(pictures), pictures / "once")]
    assert once and once == [path.read_bytes() for path in make(kind, records(pictures), pictures / "again")]


@pytest.mark.parametrize("kind", ["metadata", "parquet", "webdataset"])
def test_trouble_on_the_way_leaves_the_old_file(pictures: Path, kind: str):
    (path,) = make(kind, records(pictures), pictures)
    before = path.read_bytes()

    class StoppedError(BaseException):
        pass

    def broken():
        yield from records(pictures)[:2]
        raise StoppedError

    with pytest.raises(StoppedError):
        list(FORMATS[kind](broken(), pictures))
    assert path.read_bytes() == before and not list(pictures.rglob("*.partial"))
