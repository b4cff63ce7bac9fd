"""The final files of `mmspec caption`: nobody else's is replaced, ours are, also after a kill."""

# ruff: noqa: F811 - fixtures
from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from mmspec.app.caption.outputs import Finals
from tests.app.test_caption import FATAL, OK, SENSELESS, SOME_FAILED, caption, captions, journal, paint, photos, spoil  # noqa: F401

FINALS = ("captions.parquet", "metadata.jsonl", "failed.jsonl", "webdataset/00000.tar")
ALL = ("--format", "parquet,webdataset,metadata")
NOTES = Path("captions/.mmspec/finals.log")


class KilledError(BaseException):
    pass


@pytest.mark.parametrize("name", FINALS)
def test_files_of_others_are_never_replaced(name: str, caption, capsys: pytest.CaptureFixture):
    from pyarrow import parquet, table

    path = Path("photos", name)
    path.parent.mkdir(exist_ok=True)
    if path.suffix == ".parquet":
        parquet.write_table(table({"file_name": ["a.png"], "text": ["by hand"]}), path)
    else:
        path.write_text("by hand")
    before = path.read_bytes()
    for options in (ALL, (*ALL, "--dry-run")):
        assert caption("--out", "beside", *options) == FATAL
        said = capsys.readouterr().err
        assert str(Path(name).with_suffix("")) in said and "would be replaced" in said
        assert path.read_bytes() == before and not journal("photos")  # before any work
    if name != "failed.jsonl":
        assert caption("--out", "beside", "--format", "txt") == OK and path.read_bytes() == before  # in nobody's way


def test_final_files_of_ours_are_made_anew(caption, photos: Path):
    spoil(photos)
    assert caption(*ALL) == SOME_FAILED and not list(Path("captions").glob("*.txt"))
    paint(photos / "new.png")
    Path("captions/metadata.jsonl").write_text("edited")
    assert caption(*ALL) == SOME_FAILED and len(captions()) == 5


@pytest.mark.parametrize("kills", range(4))
def test_final_files_are_still_ours_after_a_kill(kills: int, caption, photos: Path, monkeypatch: pytest.MonkeyPatch):
    """Whichever of the four was the last that got its name: parquet, a tar and both jsonl."""
    spoil(photos)
    assert caption(*ALL) == SOME_FAILED
    paint(photos / "new.png")
    named, real = [], os.replace

    def replace(source: Path, target: Path) -> None:
        real(source, target)
        named.append(target.name)
        if len(named) == kills + 2:  # run.yaml comes first
            raise KilledError

    with monkeypatch.context() as patch, pytest.raises(KilledError):
        patch.setattr(os, "replace", replace)
        caption(*ALL)
    assert named[0] == "run.yaml" and (kills < 3 or named[-1] == "failed.jsonl")
    assert caption(*ALL) == SOME_FAILED and len(captions()) == 5


def test_tars_that_are_too_many_go_and_those_of_others_stay(tmp_path: Path):
    finals, folder = Finals(tmp_path), tmp_path / "webdataset"
    folder.mkdir()
    for number in range(4):
        (folder / f"{number:05}.tar").touch()
    for number in range(3):
        finals.note(folder / f"{number:05}.tar")
    finals.drop_shards([folder / "00000.tar"])
    assert sorted(path.name for path in folder.iterdir()) == ["00000.tar", "00003.tar"]


def test_what_a_run_reads_it_does_not_replace(caption, photos: Path, capsys: pytest.CaptureFixture):
    assert caption(*ALL, "--out", "beside") == OK
    before = {path: path.read_bytes() for path in photos.iterdir() if path.is_file()}
    for path in ("photos/metadata.jsonl", "photos/captions.parquet", "photos/webdataset/00000.tar"):
        assert caption(*ALL, "--out", "photos", folder=path) == FATAL
        assert f"{path} is read by this run and would be replaced" in capsys.readouterr().err
    assert before == {path: path.read_bytes() for path in before}


def test_without_notes_no_file_is_ours(caption, capsys: pytest.CaptureFixture):
    assert caption(*ALL) == OK
    made = {name: Path("captions", name).read_bytes() for name in FINALS if Path("captions", name).exists()}
    NOTES.unlink()
    assert caption(*ALL) == FATAL and "would be replaced" in capsys.readouterr().err
    assert made == {name: Path("captions", name).read_bytes() for name in made}


def test_a_report_replaces_nothing_but_what_a_run_made(caption, photos: Path, capsys: pytest.CaptureFixture):
    Path("other.json").write_text('{"counts": 1}')
    Path("folder.json").mkdir()
    for name in ("other.json", "folder.json"):
        assert caption("--report", name) == FATAL and not journal()
        assert f"{name} would be replaced, but no run wrote it" in capsys.readouterr().err
    assert Path("other.json").read_text() == '{"counts": 1}'
    before = (photos / "a.png").read_bytes()
    with pytest.raises(SystemExit) as stopped:  # as the shell makes of photos/*.png
        caption("photos/b.jpg", "--report", "photos/a.png")
    assert stopped.value.code == SENSELESS and (photos / "a.png").read_bytes() == before
    for _ in range(2):
        assert caption("--report", "r.json") == OK and "workers" in json.loads(Path("r.json").read_text())
