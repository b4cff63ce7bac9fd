"""A journal loses no whole line and keeps no half one, the newest counts; a caption file has one meaning."""

from __future__ import annotations

import contextlib
import json
import os
import zlib
from pathlib import Path

import pytest

from mmspec.app.caption.journal import FAILED, Journal, Ledger, key
from mmspec.app.caption.outputs import OutputError, Outputs, Sidecars, Writer
from mmspec.app.files import replacing, write_whole

RECORDS = [{"file_name": "a", "text": "ein Hügel, 山"}, {"file_name": "b", "text": "line\nbreak"}]


def filled(path: Path, *records: dict) -> bytes:
    """A journal to which these are added."""
    with contextlib.closing(Journal(path)) as journal:
        for record in records:
            journal.append(record)
    return path.read_bytes()


def known(*paths: Path) -> dict[str, dict]:
    """The newest caption of everything."""
    ledger = Ledger(paths)
    assert not ledger.damaged
    return {record["file_name"]: record for record in ledger.all_captions()}


def test_every_line_is_readable_as_soon_as_append_returns(tmp_path: Path):
    with contextlib.closing(Journal(tmp_path / "sub" / "j.jsonl")) as journal:
        for count, record in enumerate(RECORDS, 1):
            journal.append(record)
            lines = journal.path.read_text(encoding="utf-8").splitlines()
            assert [json.loads(line) for line in lines] == RECORDS[:count]


def test_a_kill_after_any_byte_costs_at_most_the_line_being_written(tmp_path: Path):
    path = tmp_path / "j.jsonl"
    whole = filled(path, *RECORDS)
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        complete = RECORDS[: whole[: size + 1].count(b"\n")]  # a line that lacks only its end is whole
        ledger = Ledger([path])
        assert list(ledger.all_captions()) == complete, size
        filled(path, {"file_name": "c"})
        assert list(known(path).values()) == [*complete, {"file_name": "c"}], size


def test_broken_lines_in_the_middle_are_counted_and_passed_over(tmp_path: Path):
    path = tmp_path / "j.jsonl"
    first, second = filled(path, *RECORDS).splitlines(keepends=True)
    path.write_bytes(first + b"\0" * 9 + b"\n" + b"[1, 2]\n\n" + b"\xff\xfe\n" + second)
    filled(path, {"file_name": "c"})
    ledger = Ledger([path])
    assert list(ledger.all_captions()) == [*RECORDS, {"file_name": "c"}] and ledger.damaged == 3


def test_the_newest_line_counts_whichever_journal_it_is_in(tmp_path: Path):
    lines = {"one": [("x", 3), ("x", 5), ("y", 1)], "two": [("x", 4), ("y", 2), ("z", 1)]}
    for name, told in lines.items():
        records = ({"file_name": item, "text": f"{item}{time}", "time": time} for item, time in told)
        filled(tmp_path / f"{name}.jsonl", *records)
    for order in (("one", "two"), ("two", "one")):
        paths = [tmp_path / f"{name}.jsonl" for name in order]
        assert [record["text"] for record in known(*paths).values()] == ["x5", "y2", "z1"]
        assert Ledger(paths).texts("x") == {"x3", "x4", "x5"}


def test_a_failure_stands_until_a_caption_comes(tmp_path: Path):
    path = tmp_path / "j.jsonl"
    for status in (FAILED, None, FAILED):
        filled(path, {"file_name": "x", "text": "t"} | ({"status": status} if status else {}))
        ledger = Ledger([path])
        assert bool(ledger.failure("x")) == bool(status)
    assert ledger.get("x") == {"file_name": "x", "text": "t"}  # what was there before the failure is still there


def test_one_process_at_a_time_holds_a_journal(tmp_path: Path):
    with contextlib.closing(Journal(tmp_path / "j.jsonl")), pytest.raises(OSError, match="another process"):
        Journal(tmp_path / "j.jsonl")
    Journal(tmp_path / "j.jsonl").close()


def test_a_name_that_is_no_unicode_can_be_recorded(tmp_path: Path):
    record = {"file_name": b"\xff.png".decode("utf-8", "surrogateescape")}
    filled(tmp_path / "j.jsonl", record)
    assert list(known(tmp_path / "j.jsonl").values()) == [record]
    (tmp_path / "j.jsonl").read_text(encoding="utf-8")


def test_a_key_depends_on_everything():
    base = {"prompt": "p", "model": "m", "temperature": 0.0}
    keys = {key(**base)} | {key(**base | {name: "x"}) for name in base}
    assert len(keys) == 4 and key(**base) == key(**dict(reversed(base.items())))


def test_write_whole_leaves_nothing_else_behind(tmp_path: Path):
    with replacing(tmp_path / "sub" / "x.txt") as file:  # other processes, and other files, have names of their own
        file.write(b"one")
        names = [path.name for path in (tmp_path / "sub").iterdir()]
    assert names == [f".{os.getpid()}-{zlib.crc32(b'x.txt'):08x}.partial"]
    write_whole(tmp_path / "sub" / "x.txt", b"two")
    assert [path.name for path in (tmp_path / "sub").iterdir()] == ["x.txt"]
    assert (tmp_path / "sub" / "x.txt").read_bytes() == b"two"


def test_links_in_a_hostile_folder_lead_nowhere(tmp_path: Path):
    precious, folder = tmp_path / "precious", tmp_path / "photos"
    folder.mkdir()
    precious.write_text("precious")
    for name in (f".{os.getpid()}-{zlib.crc32(b'x.txt'):08x}.partial", "x.txt"):
        (folder / name).symlink_to(precious)
    write_whole(folder / "x.txt", b"caption")
    assert precious.read_text() == "precious" and (folder / "x.txt").read_bytes() == b"caption"
    (folder / "metadata.jsonl").symlink_to(precious)
    with pytest.raises(OutputError, match="would be replaced"):
        Outputs(folder, "origin").finals.claim(["metadata"])
    (folder / ".mmspec" / "worker-0.jsonl").symlink_to(precious)
    with pytest.raises(OSError, match="is a link"):
        Writer(folder, "worker-0")
    assert precious.read_text() == "precious"


def test_a_hostile_journal_deletes_nothing(tmp_path: Path):
    precious, folder = tmp_path / "precious.txt", tmp_path / "photos"
    folder.mkdir()
    precious.write_text("precious")
    os.mkfifo(folder / "y.txt")
    writer = Writer(folder, "worker-0")
    line = {"file_name": "x.png", "key": "k", "text": "precious", "sidecar": "../precious.txt", "path": 7}
    writer.journal.append(line)
    writer.close()
    outputs, sidecars = Outputs(folder, "origin"), Sidecars()
    sidecars.add("x.png")
    assert sidecars.of("x.png", line) == "x.txt"
    assert outputs.restore(line, "x.txt", force=False) and outputs.existing("y.png", "y.txt") is None
    outputs.close()
    assert precious.read_text() == "precious"


def test_sidecar_names():
    cases = {
        "alone.jpg": "alone.txt",
        "x.jpg": "x.jpg.txt",
        "x.png": "x.png.txt",
        "Y.JPG": "Y.JPG.txt",  # y and Y are one file on Windows and macOS
        "y.png": "y.png.txt",
        "z.jpg": "z.txt",
        "z.jpg.png": "z.jpg.png.txt",  # z.jpg.txt would look like the caption of z.jpg
        "sub/x.jpg": "sub/x.txt",
        "shard.tar/0007": "shard.tar/0007.txt",
    }
    sidecars = Sidecars()
    for name in cases:
        sidecars.add(name)
    assert {name: sidecars.of(name) for name in cases} == cases
    for hostile in ("../x.png", "/etc/x.png", "a/../../x.png"):
        with pytest.raises(OutputError, match="points outside"):
            sidecars.of(hostile)


def test_one_run_at_a_time(tmp_path: Path):
    for running in ([""], ["shard-0-of-2-", "shard-1-of-2-"]):  # shards may run at once
        outputs = [Outputs(tmp_path / "out", "origin", slots) for slots in running]
        for slots in ("", "shard-0-of-2-"):
            with pytest.raises(OutputError, match="another mmspec caption"):
                Outputs(tmp_path / "out", "origin", slots)
        for one in outputs:
            one.close()
    Outputs(tmp_path / "out", "origin").close()


def test_an_output_folder_that_cannot_be(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="choose another --out"):
        Outputs(tmp_path / "file", "origin")


@pytest.mark.parametrize("time", [None, "soon", [], {}, True, 1e400, 10**400])
def test_a_line_that_tells_no_time_is_the_older_one(tmp_path: Path, time):
    (tmp_path / "a.jsonl").write_text(json.dumps({"file_name": "1", "text": "new", "time": 5.0}) + "\n")
    (tmp_path / "b.jsonl").write_text(json.dumps({"file_name": "1", "text": "odd", "time": time}) + "\n")
    for order in ("ab", "ba"):
        ledger = Ledger([tmp_path / f"{name}.jsonl" for name in order])
        assert ledger.get("1")["text"] == "new"
        ledger.close()


def test_a_line_nested_too_deep_is_passed_over(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text("[" * 200_000 + '\n{"file_name": "1", "text": "x"}\n')
    ledger = Ledger([tmp_path / "a.jsonl"])
    assert ledger.damaged == 1 and ledger.get("1")["text"] == "x"
    ledger.close()
