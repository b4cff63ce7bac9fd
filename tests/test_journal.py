"""A journal loses no whole line and keeps no half one; a caption file's name never means two images."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from mmspec.app.caption.journal import Journal, key, write_whole
from mmspec.app.caption.outputs import OutputError, Outputs, sidecars

RECORDS = [{"file_name": "a", "text": "ein Hügel, 山"}, {"file_name": "b", "text": "line\nbreak"}]


def filled(path: Path) -> bytes:
    with Journal(path) as journal:
        for record in RECORDS:
            journal.append(record)
    return path.read_bytes()


def test_every_line_is_readable_as_soon_as_append_returns(tmp_path: Path):
    with Journal(tmp_path / "sub" / "j.jsonl") as journal:
        for count, record in enumerate(RECORDS, 1):
            journal.append(record)
            lines = journal.path.read_text(encoding="utf-8").splitlines()
            assert [json.loads(line) for line in lines] == RECORDS[:count]


def test_a_kill_after_any_byte_costs_at_most_the_line_being_written(tmp_path: Path):
    path = tmp_path / "j.jsonl"
    whole = filled(path)
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        with Journal(path) as journal:
            complete = whole[: size + 1].count(b"\n")  # a line that lacks only its end is whole
            assert journal.records == RECORDS[:complete], size
            journal.append({"file_name": "c"})
        with Journal(path) as journal:
            assert journal.records == [*RECORDS[:complete], {"file_name": "c"}] and not journal.damaged, size


def test_broken_lines_in_the_middle_are_counted_and_dropped(tmp_path: Path):
    path = tmp_path / "j.jsonl"
    first, second = filled(path).splitlines(keepends=True)
    path.write_bytes(first + b"\0" * 9 + b"\n" + b"[1, 2]\n\n" + b"\xff\xfe\n" + second)
    with Journal(path) as journal:
        assert journal.records == RECORDS and journal.damaged == 3
        journal.compact(journal.records)
        journal.append({"file_name": "c"})
    with Journal(path) as journal:
        assert journal.records == [*RECORDS, {"file_name": "c"}] and not journal.damaged


def test_a_name_that_is_no_unicode_can_be_recorded(tmp_path: Path):
    record = {"file_name": b"\xff.png".decode("utf-8", "surrogateescape")}
    with Journal(tmp_path / "j.jsonl") as journal:
        journal.append(record)
    with Journal(tmp_path / "j.jsonl") as journal:
        assert journal.records == [record]
    (tmp_path / "j.jsonl").read_text(encoding="utf-8")


def test_a_key_depends_on_everything():
    base = {"prompt": "p", "model": "m", "temperature": 0.0}
    keys = {key("content", **base), key("other", **base)} | {key("content", **base | {name: "x"}) for name in base}
    assert len(keys) == 5 and key("content", **base) == key("content", **dict(reversed(base.items())))


def test_write_whole_leaves_nothing_else_behind(tmp_path: Path):
    write_whole(tmp_path / "sub" / "x.txt", b"one")
    write_whole(tmp_path / "sub" / "x.txt", b"two")
    assert [path.name for path in (tmp_path / "sub").iterdir()] == ["x.txt"]
    assert (tmp_path / "sub" / "x.txt").read_bytes() == b"two"


def test_links_in_a_hostile_folder_lead_nowhere(tmp_path: Path):
    precious, folder = tmp_path / "precious", tmp_path / "photos"
    folder.mkdir()
    precious.write_text("precious")
    for name in (".mmspec.partial", "x.txt"):
        (folder / name).symlink_to(precious)
    write_whole(folder / "x.txt", b"caption")
    assert precious.read_text() == "precious" and (folder / "x.txt").read_bytes() == b"caption"
    (folder / "metadata.jsonl").symlink_to(precious)
    with pytest.raises(OutputError, match="is a link"):
        Outputs(folder, folder, [])
    assert precious.read_text() == "precious"


def test_a_hostile_journal_deletes_nothing(tmp_path: Path):
    precious, folder = tmp_path / "precious.txt", tmp_path / "photos"
    folder.mkdir()
    precious.write_text("precious")
    os.mkfifo(folder / "y.txt")
    line = {"file_name": "x.png", "key": "k", "text": "precious", "sidecar": "../precious.txt", "path": 7}
    (folder / "metadata.jsonl").write_text(json.dumps(line) + "\n")
    (folder / "failed.jsonl").write_text(json.dumps(line) + "\n")
    outputs = Outputs(folder, folder, [folder / "x.png", folder / "y.png"])
    assert outputs.restore(folder / "x.png") and not outputs.foreign(folder / "y.png")
    outputs.close()
    assert precious.read_text() == "precious"


def test_sidecar_names():
    root = Path("/r")
    cases = {
        "alone.jpg": "alone.txt",
        "x.jpg": "x.jpg.txt",
        "x.png": "x.png.txt",
        "Y.JPG": "Y.JPG.txt",  # y and Y are one file on Windows and macOS
        "y.png": "y.png.txt",
        "z.jpg": "z.txt",
        "z.jpg.png": "z.jpg.png.txt",  # z.jpg.txt would look like the caption of z.jpg
        "sub/x.jpg": "sub/x.txt",
    }
    chosen = sidecars([root / name for name in cases], root)
    assert chosen == {root / name: text for name, text in cases.items()}
    assert len({text.casefold() for text in chosen.values()}) == len(cases)


def test_one_run_at_a_time(tmp_path: Path):
    first = Outputs(tmp_path / "out", tmp_path, [])
    with pytest.raises(OutputError, match="another mmspec caption"):
        Outputs(tmp_path / "out", tmp_path, [])
    first.close()
    Outputs(tmp_path / "out", tmp_path, []).close()


def test_an_output_folder_that_cannot_be(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="choose another --out"):
        Outputs(tmp_path / "file", tmp_path, [])
