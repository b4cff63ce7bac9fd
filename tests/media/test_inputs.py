"""Every kind of input gives items with names that stay, whose bytes a worker process finds, and clear errors."""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import pickle
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hostile_sources import what_it_reads
from PIL import Image

from mmspec.app.media.inputs import open_inputs
from mmspec.app.media.items import Item, sniff
from mmspec.app.media.tars import member_source
from mmspec.media import EXTENSIONS, FORMATS, MediaError

MP4 = b"\0\0\0\x18ftypmp42" + b"\0" * 16


def png(shade: int) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (4, 4), (shade, 0, 0)).save(out, "PNG")
    return out.getvalue()


def put(folder: Path, *names: str) -> Path:
    """Files of those names, each with content of its own."""
    for number, name in enumerate(names):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(number) if not name.endswith(".mp4") else MP4)
    return folder


def tar(path: Path, **members: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as file:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            file.addfile(info, io.BytesIO(data))
    return path


def items(*where: Path | str, **options) -> list[Item]:
    return list(open_inputs(where, **options).items())


def names(*where: Path | str, **options) -> list[str]:
    return [item.name for item in items(*where, **options)]


def trouble(item: Item) -> str:
    with pytest.raises(MediaError) as refused:
        item.source.read()
    return str(pickle.loads(pickle.dumps(refused.value)))


# files, folders, globs


def test_a_folder_gives_its_images_and_videos_and_then_those_of_its_subfolders(tmp_path: Path):
    put(tmp_path, "b/1.jpg", "a.png", "b.png", "b/c/2.MP4", ".hidden/3.png", "b/.4.png", "a/5.webp")
    (tmp_path / "notes.txt").write_text("x")
    assert names(tmp_path, recursive=True) == ["a.png", "b.png", "a/5.webp", "b/1.jpg", "b/c/2.MP4"]
    assert [item.kind for item in items(tmp_path, recursive=True)] == ["image"] * 4 + ["video"]
    assert names(tmp_path) == ["a.png", "b.png"] and open_inputs([tmp_path]).root == tmp_path


def test_a_link_that_leads_round_in_a_circle_is_not_followed(tmp_path: Path):
    put(tmp_path, "a/1.png")
    (tmp_path / "a" / "again").symlink_to(tmp_path, target_is_directory=True)
    assert names(tmp_path, recursive=True) == ["a/1.png"]


def test_several_inputs_are_named_below_the_folder_that_they_share(tmp_path: Path):
    put(tmp_path, "birds/1.png", "fish/1.png", "fish/clips/2.mp4")
    both = [tmp_path / "birds", tmp_path / "fish"]
    assert names(*both, tmp_path / "fish/clips/2.mp4") == ["birds/1.png", "fish/1.png", "fish/clips/2.mp4"]
    assert open_inputs(both).root == tmp_path
    assert names(tmp_path / "birds" / "1.png") == ["1.png"]


def test_what_is_named_twice_is_captioned_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    put(tmp_path, "birds/1.png", "birds/2.png")
    monkeypatch.chdir(tmp_path)
    assert names("birds", "birds/../birds/2.png", tmp_path / "birds") == ["1.png", "2.png"]


def test_globs(tmp_path: Path):
    put(tmp_path, "b/1.jpg", "b/1.png", "c/deep/2.jpg", "3.jpg", "b/4.mp4")
    (tmp_path / "b" / "list.txt").write_text("nothing.jpg")
    assert names(f"{tmp_path}/**/*.jpg") == ["3.jpg", "b/1.jpg", "c/deep/2.jpg"]
    assert names(f"{tmp_path}/b/*") == ["1.jpg", "1.png", "4.mp4"]  # the list there is not one that was asked for
    assert names(f"{tmp_path}/b/{{1,4}}.*") == ["1.jpg", "1.png", "4.mp4"]
    assert names(f"{tmp_path}/*", recursive=True) == ["3.jpg", "b/1.jpg", "b/1.png", "b/4.mp4", "c/deep/2.jpg"]


def test_names_of_a_glob_do_not_depend_on_what_matches(tmp_path: Path):
    put(tmp_path, "a/1.jpg")
    before = names(f"{tmp_path}/*/*.jpg")
    put(tmp_path, "b/1.jpg")
    assert before == ["a/1.jpg"] and names(f"{tmp_path}/*/*.jpg") == ["a/1.jpg", "b/1.jpg"]


def test_a_file_with_brackets_in_its_name_is_no_pattern(tmp_path: Path):
    put(tmp_path, "a[1]{2}.png", "a1.png")
    assert names(tmp_path / "a[1]{2}.png") == ["a[1]{2}.png"]


@pytest.mark.parametrize("form", [form for form in FORMATS if form != "PPM"])
def test_signatures_are_those_that_pillow_writes(form: str):
    out = io.BytesIO()
    Image.new("RGB", (4, 4)).save(out, form)
    extension = sniff(out.getvalue())
    assert extension in EXTENSIONS and extension[1:3] in form.lower().replace("jpeg", "jpg")


# lists and tables


def write(path: Path, *rows, **more) -> Path:
    """A table of these rows in the format that its extension says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(list(rows)), path, **more)
    elif path.suffix == ".csv":
        header = ",".join(rows[0])
        path.write_text("\n".join([header, *(",".join(f'"{cell}"' for cell in row.values()) for row in rows)]))
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n\n" for row in rows))
    else:
        path.write_text("".join(f"{row['path']}\n" for row in rows))
    return path


@pytest.mark.parametrize("extension", [".txt", ".lst", ".jsonl", ".csv", ".parquet"])
def test_paths_in_a_table(tmp_path: Path, extension: str):
    elsewhere = put(tmp_path / "elsewhere", "4.png") / "4.png"
    put(tmp_path / "data", "a/1.png", "2.mp4")
    paths = ["a/1.png", "2.mp4", "gone.png", str(elsewhere)]
    table = write(tmp_path / "data" / f"rows{extension}", *({"path": path} for path in paths))
    found = items(table)
    assert [item.name for item in found[:3]] == ["a/1.png", "2.mp4", "gone.png"]
    assert [item.kind for item in found] == ["image", "video", "image", "image"]
    if extension in (".txt", ".lst"):  # a list is the user's own, and may name any file
        assert found[3].name == str(elsewhere)[1:]
    else:
        assert "lies outside of" in trouble(found[3])
    assert found[0].source.path == tmp_path / "data" / "a/1.png" and found[0].source.read() == png(0)
    assert "gone.png: is missing" in trouble(found[2])


@pytest.mark.parametrize("extension", [".jsonl", ".csv", ".parquet"])
def test_captions_come_from_the_column_that_is_named(tmp_path: Path, extension: str):
    put(tmp_path, "1.png", "2.png")
    tags, none = ("red, small", "") if extension == ".csv" else (["red", " small"], [])
    rows = [{"img": "1.png", "said": "a, b", "words": tags}, {"img": "2.png", "said": "", "words": none}]
    table = write(tmp_path / f"t{extension}", *rows)
    for column, texts in (("said", ["a, b", None]), ("words", ["red, small", None]), (None, [None, None])):
        assert [item.existing for item in items(table, column_image="img", column_text=column)] == texts


@pytest.mark.parametrize("extension", [".jsonl", ".csv", ".parquet"])
def test_a_missing_column_is_named_and_those_that_are_there(tmp_path: Path, extension: str):
    table = write(tmp_path / f"t{extension}", {"url": "1.png", "said": "x"})
    for options in ({"column_image": "photo"}, {"column_image": "url", "column_text": "photo"}):
        with pytest.raises(MediaError, match=f"t{extension}: has no column 'photo'; it has 'url', 'said'"):
            open_inputs([table], **options)
    with pytest.raises(MediaError, match=r"none of the usual columns; it has 'url', 'said'; .*--column-image"):
        open_inputs([table])


DEEP = "[" * 200_000


def test_a_bad_row_is_one_failure(tmp_path: Path):
    put(tmp_path, "1.png", "2.png")
    rows = {
        '{"path": "\\u0000"}': "in place of a path",
        '{"path": "\\ud800.png"}': "in place of a path",
        "{broken": "is not JSON",
        DEEP: "is not JSON (maximum recursion depth",
        "[1]": "JSON of a list",
        '{"way": "1.png"}': "none of the usual columns",
        '{"path": ""}': "'' in place of a path",
        '{"path": "https://x/1.png"}': "download it first",
    }
    (tmp_path / "t.jsonl").write_text("\n".join(['{"path": "1.png"}', *rows, '{"path": "2.png"}']))
    first, *bad, last = items(tmp_path / "t.jsonl")
    assert (first.source.read(), last.source.read()) == (png(0), png(1))
    for row, (item, expected) in enumerate(zip(bad, rows.values(), strict=True), 1):
        assert item.name == f"t.jsonl/{row}" and expected in trouble(item) and "t.jsonl: row" in trouble(item)


@pytest.mark.parametrize("struct", [False, True], ids=["bytes", "struct"])
def test_bytes_in_a_parquet_file_are_found_in_any_order(tmp_path: Path, struct: bool):
    cells = [{"bytes": png(row), "path": None} if struct else png(row) for row in range(100)]
    rows = [{"image": cell, "text": f"t{row}"} for row, cell in enumerate(cells)]
    table = write(tmp_path / "rows.parquet", *rows, row_group_size=40)
    found = items(table, column_text="text")
    assert [item.name for item in found] == [f"rows.parquet/{row}" for row in range(100)]
    assert [item.existing for item in found] == [f"t{row}" for row in range(100)]
    for row in (0, 39, 40, 3, 99, 17, 18, 60, 50, 0):
        assert found[row].source.read() == png(row)


def test_a_parquet_struct_may_name_a_file_and_an_empty_cell_fails_alone(tmp_path: Path):
    put(tmp_path, "1.png")
    rows = [{"bytes": None, "path": "1.png"}, {"bytes": None, "path": None}, {"bytes": b"", "path": None}, None]
    good, *bad = items(write(tmp_path / "t.parquet", *({"image": row} for row in rows)))
    assert good.source.read() == png(0)
    for item in bad:
        assert "not an image or video" in trouble(item) and "t.parquet: row" in trouble(item)


def test_the_kind_of_bytes_is_what_the_column_says(tmp_path: Path):
    for column, kind in {"video": "video", "mp4": "video", "image": "image"}.items():
        table = write(tmp_path / f"{column}.parquet", {column: MP4})
        assert [item.kind for item in items(table)] == [kind]


@pytest.mark.parametrize("cell", [3, 0.5, [1], ["1.png"]])
def test_a_column_of_another_type_is_refused(tmp_path: Path, cell):
    table = write(tmp_path / "t.parquet", {"image": cell})
    with pytest.raises(MediaError, match=r"column 'image' holds .*, not paths, bytes or \{bytes, path\}"):
        open_inputs([table])


def test_damage_inside_a_parquet_file_costs_its_rows_only(tmp_path: Path):
    rows = [{"image": os.urandom(4000), "text": "x"} for _ in range(60)]
    table = write(tmp_path / "t.parquet", *rows, row_group_size=20, compression="zstd")
    data = bytearray(table.read_bytes())
    start = pq.ParquetFile(table).metadata.row_group(1).column(0).data_page_offset
    data[start : start + 40] = b"\xff" * 40
    table.write_bytes(data)
    found = items(table)
    assert len(found) == 60 and found[5].source.read() == rows[5]["image"]
    assert "t.parquet: row 4 of row group 2" in trouble(found[23])
    assert found[45].source.read() == rows[45]["image"]


# tars


def test_a_tar_has_samples_with_captions(tmp_path: Path):
    shard = tar(
        tmp_path / "shard-0.tar",
        **{
            "0007.jpg": png(7),
            "0007.txt": b"a bird\n",
            "0007.json": b'{"caption": "other"}',
            "0008.json": b'{"caption": "a fish", "label": 3}',
            "0008.mp4": MP4,
            "../in/0009.left.png": png(1),
            "../in/0009.right.png": png(2),
            "__MACOSX/._0007.jpg": b"x",
            "0010.cls": b"3",
        },
    )
    found = items(shard)
    expected = [("0007", "image", "a bird"), ("0008", "video", "a fish")]
    expected += [("in/0009.left.png", "image", None), ("in/0009.right.png", "image", None)]
    assert [(i.name, i.kind, i.existing) for i in found] == [(f"shard-0.tar/{n}", *e) for n, *e in expected]
    assert [item.source.read() for item in found] == [png(7), MP4, png(1), png(2)]
    assert [item.existing for item in items(shard, column_text="label")][:2] == [None, "3"]


def test_brace_patterns_name_shards(tmp_path: Path):
    for number in range(12):
        tar(tmp_path / f"s-{number:03}.tar", **{"0.png": png(number)})
    found = items(f"{tmp_path}/s-{{008..010}}.tar")
    assert [item.name for item in found] == ["s-008.tar/0", "s-009.tar/0", "s-010.tar/0"]
    assert found[1].source.read() == png(9) and len(names(f"{tmp_path}/*.tar")) == 12
    with pytest.raises(MediaError, match=r"s-012\.tar: matches no file; check the pattern"):
        open_inputs([f"{tmp_path}/s-{{008..012}}.tar"])


def test_a_tar_that_is_cut_off_or_empty_costs_what_is_missing(tmp_path: Path):
    whole = tar(tmp_path / "0.tar", **{f"{row}.png": png(row) for row in range(3)})
    (tmp_path / "1.tar").write_bytes(whole.read_bytes()[: 512 * 3 + 40])  # in the second picture
    tar(tmp_path / "2.tar", **{"1.txt": b"x"})
    (tmp_path / "3.tar").write_bytes(b"no tar at all" * 99)
    found = {item.name: item for item in items(f"{tmp_path}/*.tar")}
    assert list(found) == ["0.tar/0", "0.tar/1", "0.tar/2", "1.tar/0", "1.tar", "2.tar", "3.tar"]
    assert found["1.tar/0"].source.read() == png(0)
    end = whole.stat().st_size
    assert "is cut off" in trouble(replace(found["0.tar/1"], source=member_source(whole, "1.png", end - 9, 10)))
    assert "1.tar: is not a whole, uncompressed tar" in trouble(found["1.tar"])
    assert "holds no images or videos" in trouble(found["2.tar"])
    assert "3.tar: is not a whole, uncompressed tar" in trouble(found["3.tar"])


def test_the_second_of_one_name_fails_alone(tmp_path: Path):
    members = {"1.png": png(1), "2.png": png(2), "./1.png": png(3), "3.png": png(4), ".//1.png": png(5)}
    tar(tmp_path / "s.tar", **members)
    found = items(tmp_path / "s.tar")
    assert [item.name for item in found] == ["s.tar/1", "s.tar/2", "s.tar/1#2", "s.tar/3", "s.tar/1#3"]
    assert found[0].source.read() == png(1) and names(tmp_path / "s.tar") == [item.name for item in found]
    for item in found[2::2]:
        assert "has the name of another item before it, 's.tar/1'; rename" in trouble(item)


def test_a_broken_shard_costs_itself_wherever_it_stands(tmp_path: Path):
    for number in range(3):
        tar(tmp_path / f"{number}.tar", **{f"{number}.png": png(number)})
    (tmp_path / "0.tar").write_bytes(b"no tar")
    broken, *good = items(tmp_path / "{0..2}.tar")
    assert "not a whole, uncompressed tar" in trouble(broken) and [item.name for item in good] == ["1.tar/1", "2.tar/2"]
    for number in range(3):
        (tmp_path / f"{number}.tar").write_bytes(b"no tar")
    with pytest.raises(MediaError, match=r"0.tar: is not a whole"):
        items(tmp_path / "{0..2}.tar")


def test_a_tars_json_that_is_nested_too_deep_is_left_out(tmp_path: Path):
    shard = tar(tmp_path / "s.tar", **{"1.png": png(1), "1.json": DEEP.encode(), "2.png": png(2)})
    assert [(item.name, item.existing) for item in items(shard)] == [("s.tar/1", None), ("s.tar/2", None)]


def test_names_that_are_no_utf8_are_read(tmp_path: Path):
    put(tmp_path, "1.png", "2.png")
    latin = "caf\xe9.png".encode("latin-1")
    (tmp_path / os.fsdecode(latin)).write_bytes(png(7))
    for extension, lines in {
        ".txt": [b"1.png", latin, b"2.png"],
        ".csv": [b"path", b"1.png", latin, b"2.png"],
        ".jsonl": [b'{"path": "1.png"}', b'{"path": "' + latin + b'"}', b'{"path": "2.png"}'],
    }.items():
        (tmp_path / f"t{extension}").write_bytes(b"\n".join(lines))
        first, odd, last = items(tmp_path / f"t{extension}")
        assert [one.source.read() for one in (first, odd, last)] == [png(0), png(7), png(1)]


def test_a_cell_that_is_too_long_costs_its_own_row(tmp_path: Path):
    put(tmp_path, "1.png", "2.png")
    (tmp_path / "t.csv").write_text(f"path,text\n1.png,a\nx.png,{'y' * 200_000}\n2.png,b\n")
    first, odd, last = items(tmp_path / "t.csv", column_text="text")
    assert (first.existing, last.existing) == ("a", "b") and last.source.path == tmp_path / "2.png"
    assert "field larger than field limit" in trouble(odd) and "is a quote left open?" in trouble(odd)


def test_a_link_to_itself_fails_alone(tmp_path: Path):
    put(tmp_path, "1.png")
    (tmp_path / "loop.png").symlink_to("loop.png")
    good, bad = items(tmp_path, recursive=True)
    assert good.name == "1.png" and bad.name == "loop.png"
    assert "symbolic link that leads to itself" in trouble(bad)


def test_a_subfolder_that_may_not_be_listed_is_one_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    put(tmp_path, "1.png", "shut/2.png", "z.png")
    (tmp_path / "link.png").symlink_to(tmp_path / "shut" / "2.png")
    real, shut = os.scandir, str(tmp_path / "shut")

    def scandir(folder):  # the tests may run as root, whom no permission stops
        if str(folder) == shut:
            raise PermissionError(13, "Permission denied", str(folder))
        return real(folder)

    monkeypatch.setattr(os, "scandir", scandir)
    found = {item.name: item for item in items(tmp_path, recursive=True)}
    assert sorted(found) == ["1.png", "link.png", "shut", "z.png"]
    assert "shut: cannot be listed (Permission denied); check its permissions" in trouble(found["shut"])


@pytest.mark.parametrize("extension", [".jsonl", ".csv", ".parquet"])
@pytest.mark.parametrize("cell", ["../private.png", "{folder}/private.png", "a/../../private.png"])
def test_rows_choose_no_file_outside_of_their_folder(tmp_path: Path, extension: str, cell: str):
    put(tmp_path, "private.png", "set/1.png")
    rows = [{"path": "1.png"}, {"path": cell.format(folder=tmp_path)}]
    good, bad = items(write(tmp_path / "set" / f"t{extension}", *rows))
    assert good.source.read() == png(1)
    assert f"row 2: names {cell.format(folder=tmp_path)!r}, which lies outside of {tmp_path / 'set'};" in trouble(bad)
    assert "list of paths of your own" in trouble(bad)
    assert bad.name == f"t{extension}/1"


@pytest.mark.parametrize("cell", ["../private.png", "{folder}/private.png", "http://169.254.169.254/x.png"])
def test_structs_of_a_parquet_file_choose_no_file_outside_of_its_folder(tmp_path: Path, cell: str):
    put(tmp_path, "private.png", "set/1.png")
    row = {"image": {"bytes": None, "path": cell.format(folder=tmp_path)}}
    [item] = items(write(tmp_path / "set" / "t.parquet", row))
    with pytest.raises(MediaError, match=r"lies outside of|is on the web"):
        item.source.read()


def test_rows_of_a_data_set_choose_no_file(tmp_path: Path):
    datasets = pytest.importorskip("datasets")
    put(tmp_path, "private.png")
    rows = {"image": [{"bytes": png(1), "path": None}, {"bytes": None, "path": str(tmp_path / "private.png")}]}
    made = datasets.Dataset.from_dict(rows, datasets.Features({"image": datasets.Image(decode=False)}))
    made.to_parquet(tmp_path / "set" / "train.parquet")
    good, bad = items(f"hf:{tmp_path / 'set'}")
    assert good.source.read() == png(1)
    with pytest.raises(MediaError, match="lies outside of"):
        bad.source.read()


# data sets


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The address of a data set with two splits; the third picture of the first is broken."""
    folder = tmp_path_factory.mktemp("sets") / "mine"
    features = datasets.Features({"image": datasets.Image(), "text": datasets.Value("string")})
    pictures = [{"bytes": data, "path": None} for data in (png(0), png(1), b"broken")]
    part = datasets.Dataset.from_dict({"image": pictures, "text": ["a", "b", "c"]}).cast(features)
    for split, some in {"train": part, "test": part.select([1])}.items():
        some.to_parquet(folder / f"{split}.parquet")
    return f"hf:{folder}"


def test_a_data_set_is_read_undecoded(saved: str):
    found = [*items(saved, column_text="text"), *items(f"{saved}:test", column_text="text")]
    assert [item.name for item in found] == [*(f"mine/train/{row}" for row in range(3)), "mine/test/0"]
    assert [item.existing for item in found] == ["a", "b", "c", "b"]
    assert [item.source.read() for item in found] == [png(0), png(1), b"broken", png(1)]
    assert open_inputs([saved]).root is None
    assert all(len(pickle.dumps(item)) < 20_000 for item in found)


def test_what_a_data_set_lacks_is_named(saved: str, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(MediaError, match="has no column 'photo'; it has 'image', 'text'"):
        open_inputs([saved], column_image="photo")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(MediaError, match=r"hf:nobody/nothing: cannot be loaded .*check the name"):
        open_inputs(["hf:nobody/nothing"])


def test_hf_names_go_through_load_dataset(saved: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked, part = [], datasets.load_dataset(saved.removeprefix("hf:"), split="train")

    def load_dataset(*given, split=None):
        asked.append((*given, split))
        return part

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert names("hf:owner/pets:train") == [f"owner/pets/train/{row}" for row in range(3)]
    assert names("hf:owner/pets/small:train[:4]")[0] == "owner/pets/small/train[:4]/0"
    assert asked == [("owner/pets", None, "train"), ("owner/pets", "small", "train[:4]")]


# what holds for all of them


def everything(folder: Path, saved: str) -> list[Path | str]:
    put(folder, "pictures/1.png", "pictures/2.mp4")
    write(folder / "t.parquet", *({"image": png(row)} for row in range(5)), row_group_size=2)
    tar(folder / "t.tar", **{"1.png": png(1), "2.png": png(2)})
    return [folder / "pictures", folder / "t.parquet", folder / "t.tar", saved]


def test_all_kinds_in_one_run_are_read_alike_by_other_processes(tmp_path: Path, saved: str):
    found = items(*everything(tmp_path, saved))
    assert len(found) == len({item.name for item in found}) == 2 + 5 + 2 + 3
    assert names(*everything(tmp_path, saved)) == [item.name for item in found]
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.map(what_it_reads, found[::-1]) == [what_it_reads(item) for item in found[::-1]]


def test_nothing_is_read_that_is_not_asked_for(tmp_path: Path, saved: str):
    """The items of a run are made in a process that may open no picture and read little of a table or tar."""
    big = [{"image": os.urandom(1_000_000)} for _ in range(8)]
    write(tmp_path / "big.parquet", *big, row_group_size=4, compression="none")
    tar(tmp_path / "big.tar", **{f"{row}.png": os.urandom(1_000_000) for row in range(8)})
    put(tmp_path, "pictures/1.png")
    code = f"""
import sys
from mmspec.app.media.inputs import open_inputs
from mmspec import media
media.decode = media.read = lambda *_, **__: sys.exit("it is read")
found = list(open_inputs([{str(tmp_path / "pictures")!r}, {str(tmp_path / "big.parquet")!r},
                          {str(tmp_path / "big.tar")!r}]).items())
read = int(open("/proc/self/io").readline().split()[1])
before = read
found = list(open_inputs([{str(tmp_path / "big.parquet")!r}, {str(tmp_path / "big.tar")!r}]).items())
print(len(found), int(open("/proc/self/io").readline().split()[1]) - before, "torch" in sys.modules)
"""
    if not os.path.exists("/proc/self/io"):
        pytest.skip("needs Linux to count what is read")
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert out[0] == "16" and int(out[1]) < 500_000 and out[2] == "False"


def test_a_plain_folder_needs_no_library_of_the_extra(tmp_path: Path):
    put(tmp_path, "1.png", "2.mp4")
    code = f"""
import sys
for name in ("pyarrow", "datasets", "webdataset", "braceexpand", "pandas"):
    sys.modules[name] = None
from mmspec.app.media.inputs import open_inputs
print([item.source.read()[:4] for item in open_inputs([{str(tmp_path)!r}]).items()])
for where in ("{tmp_path}/{{1,2}}.png", "hf:a/b", {str(write(tmp_path / "t.parquet", {"image": "x"}))!r}):
    try:
        open_inputs([where])
    except Exception as error:
        print(error)
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    assert out[0].count("b'") == 2 and len(out) == 4
    assert all('pip install -e ".[caption]" in the clone' in line for line in out[1:])


@pytest.mark.parametrize(
    "name, content, says",
    [
        ("none.jpg", None, "no such file or folder; give images, videos"),
        ("folder", "folder", "no images or videos found; name subfolders, or caption --recursive"),
        ("*.jpg", None, "matches no file"),
        ("x.tar", b"no tar", "not a whole, uncompressed tar"),
        ("x.tar.gz", b"x", "no known kind"),
        ("0a1b2c", png(1), r"no known kind \(no extension\); give images, videos"),
        ("x.parquet", b"PAR1", "is damaged"),
        ("x.jsonl", b"", "names no files"),
        ("x.txt", b"\n \n", "names no files"),
        ("x.csv", b"path\n", "names no files"),
        ("x.json", b"{}", r"is of no known kind \(.json\)"),
        ("x.zip", b"PK", r"is of no known kind \(.zip\)"),
    ],
)
def test_what_cannot_be_captioned_is_refused_at_once(tmp_path: Path, name: str, content, says: str):
    if content == "folder":
        put(tmp_path, "folder/below/1.png")
    elif content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(MediaError, match=says):
        open_inputs([tmp_path / name])


def test_no_input_at_all_is_refused():
    with pytest.raises(MediaError, match="nothing to caption; name images, videos"):
        open_inputs([])
