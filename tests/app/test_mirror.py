"""Inputs and outputs elsewhere, by their addresses; file:// and memory:// stand for s3:// and the like."""

# ruff: noqa: F811 - fixtures
from __future__ import annotations

import importlib.util
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import fsspec
import httpx
import huggingface_hub
import pytest

from mmspec.app.caption.mirror import Mirror
from mmspec.app.caption.outputs import OutputError
from mmspec.app.media.inputs import open_inputs
from mmspec.media import MediaError
from tests.app.test_caption import (  # noqa: F401  # noqa: F401
    FATAL,
    GOOD,
    INTERRUPTED,
    OK,
    SENSELESS,
    SOME_FAILED,
    caption,
    captions,
    failing,
    lines,
    paint,
    photos,
    spoil,
)


@pytest.fixture
def bucket():
    """Some files in memory://b."""
    memory = fsspec.filesystem("memory")
    for name in ("p/1.jpg", "p/2.png", "p/sub/3.png", "p/note.doc", "p/.hidden.png", "p/.git/4.png"):
        memory.pipe(f"/b/{name}", name.encode())
    yield memory
    memory.rm("/b", recursive=True)


@pytest.fixture
def away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """From now on this is another machine, which has nothing of what was written before; the address of an output."""

    def machine(name: str) -> str:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))
        return f"file://{tmp_path}/out"

    return machine


@pytest.mark.parametrize(
    ("where", "recursive", "names"),
    [
        (["memory://b/p"], False, ["1.jpg", "2.png"]),
        (["memory://b/p/"], True, ["1.jpg", "2.png", "sub/3.png"]),
        (["memory://b/p/*.png"], False, ["2.png"]),
        (["memory://b/p/**/*.png"], False, ["2.png", "sub/3.png"]),
        (["memory://b/p/1.jpg"], False, ["1.jpg"]),
        (["memory://b/p", "memory://b/p/sub"], False, ["b/p/1.jpg", "b/p/2.png", "b/p/sub/3.png"]),
    ],
)
def test_files_elsewhere_are_listed_and_read(bucket, where: list[str], recursive: bool, names: list[str]):
    found = open_inputs(where, recursive=recursive)
    items = list(found.items())
    assert [item.name for item in items] == names
    assert all(f"b/{item.source.read().decode()}".endswith(item.name) and item.source.stamp for item in items)


@pytest.mark.parametrize(
    ("where", "told"),
    [
        ("memory://b/nowhere", "no such file or folder"),
        ("memory://b/p/*.gif", "no images or videos found"),
        ("memory://b/p/a.tar", "download it first"),
        ("nothing://b/p", "Protocol not known"),
        ("s3://b/p", "Install s3fs"),
    ],
)
def test_what_cannot_be_listed_says_why(bucket, where: str, told: str):
    if where.startswith("s3") and importlib.util.find_spec("s3fs"):
        pytest.skip("it is installed")
    with pytest.raises(MediaError, match=told):
        open_inputs([where])


def test_a_file_elsewhere_that_cannot_be_read(bucket):
    one, two = open_inputs(["memory://b/p"]).items()
    with pytest.raises(MediaError, match="bytes"):
        one.source.read(3)
    bucket.rm("/b/p/1.jpg")
    bucket.pipe("/b/p/2.png", b"")
    with pytest.raises(MediaError, match="is missing"):
        one.source.read()
    with pytest.raises(MediaError, match="is empty"):
        two.source.read()


def test_both_ends_elsewhere_and_another_machine_goes_on(caption, photos: Path, away, capsys, tmp_path: Path):
    spoil(photos)
    source, out = f"file://{photos}", away("one")
    words = ("--out", out, "--format", "txt,metadata,parquet,webdataset")
    assert caption(*words, "--limit", "2", folder=source) == OK
    assert len(captions("out")) == 2 and f"all files are in {out}" in capsys.readouterr().out
    away("two")
    assert caption(*words, folder=source) == SOME_FAILED
    assert "2 done before" in capsys.readouterr().out
    assert sorted(captions("out")) == sorted(GOOD) and len(lines("out/failed.jsonl")) == 3
    assert lines("out/failed.jsonl")[1]["message"].startswith(f"{source}/empty.png: is empty (0 bytes)")
    assert len(lines("out/.mmspec/worker-0.jsonl")) == 7
    made = {path.relative_to("out").as_posix() for path in Path("out").rglob("*") if path.is_file()}
    state = {".mmspec/finals.log", ".mmspec/worker-0.jsonl"}
    assert made == state | {"captions.parquet", "failed.jsonl", "metadata.jsonl", "run.yaml", "webdataset/00000.tar",
                            *(f"{name[0]}.txt" for name in GOOD)}  # fmt: skip
    for name in ("empty.png", "text.jpg", "cut.png"):
        (photos / name).unlink()
    assert caption(*words, folder=source) == OK and not Path("out/failed.jsonl").exists()


def test_a_kill_loses_nothing_and_a_stop_is_put_there(caption, photos: Path, away, monkeypatch: pytest.MonkeyPatch):
    out = away("one")
    with monkeypatch.context() as patch:
        failing(patch, lambda number: KeyboardInterrupt() if number == 3 else None)
        assert caption("--out", out, "--batch-size", "1") == INTERRUPTED
    assert len(lines("out/.mmspec/worker-0.jsonl")) == len(captions("out")) == 2
    shutil.rmtree("out")  # as if nothing had been put there
    assert caption("--out", out) == OK and len(captions("out")) == 4
    assert len(lines("out/.mmspec/worker-0.jsonl")) == 4


def test_what_two_machines_have_written_is_joined(caption, photos: Path, away):
    for name in ("one", "two"):
        assert caption("--out", away(name), "--limit", "1") == OK
        kept = shutil.move("out", f"out-{name}")
    assert kept and caption("--out", away("one"), "--prompt", "w9", "--limit", "2") == OK
    shutil.rmtree("out")
    shutil.move("out-two", "out")
    assert caption("--out", away("one")) == OK
    assert len(captions("out")) == 4
    records = [line for path in Path("out/.mmspec").glob("*.jsonl") for line in lines(path)]
    assert len(records) == 1 + 1 + 2 + 4 and len({record["time"] for record in records}) == len(records)


def test_files_of_others_are_kept_there(caption, photos: Path, away, capsys, tmp_path: Path):
    (tmp_path / "out/webdataset").mkdir(parents=True)
    (tmp_path / "out/a.txt").write_text("by hand")
    (tmp_path / "out/z.png").write_text("large")
    assert caption("--out", away("one"), "--format", "txt") == OK
    assert Path("out/a.txt").read_text() == "by hand" and "1 kept" in capsys.readouterr().out
    assert not list((tmp_path / "one").rglob("z.png"))
    for name in ("webdataset/00000.tar", "captions.parquet"):
        Path("out", name).write_text("by hand")
        assert caption("--out", away("two"), "--format", "webdataset,parquet") == FATAL
        assert Path("out", name).read_text() == "by hand" and "no run wrote it" in capsys.readouterr().err
        assert caption("--out", away("two"), "--format", "txt") == OK and Path("out", name).read_text() == "by hand"
        Path("out", name).unlink()


def test_tars_are_kept_there_and_not_sent_again(caption, photos: Path, away, monkeypatch: pytest.MonkeyPatch):
    out, tar = away("one"), Path("out/webdataset/00000.tar")
    assert caption("--out", out, "--format", "webdataset") == OK
    before, sent = tar.read_bytes(), []
    real = Mirror.push

    def push(self) -> None:
        put = self.fs.put_file
        monkeypatch.setattr(self.fs, "put_file", lambda here, there: sent.append(there) or put(here, there))
        real(self)

    monkeypatch.setattr(Mirror, "push", push)
    paint(photos / "e.png")
    for machine in ("one", "two"):
        assert caption("--out", away(machine), "--format", "metadata") == OK
        assert tar.read_bytes() == before and not any("webdataset" in name for name in sent)
    assert len(captions("out")) == 5 and sent


def test_checkpoints_go_on_where_one_fails(away, monkeypatch: pytest.MonkeyPatch, capsys, tmp_path: Path):
    kept = Mirror(away("one"))
    tries: list[str] = []
    real = kept.fs.put_file

    def put(here: str, there: str) -> None:
        tries.append(there)
        if len(tries) == 1:
            raise PermissionError("no")
        real(here, there)

    monkeypatch.setattr(kept.fs, "put_file", put)
    (kept.folder / ".mmspec").mkdir(parents=True)
    (kept.folder / ".mmspec/worker-0.jsonl").write_text("{}\n")
    (kept.folder / ".mmspec/run.lock").touch()
    with kept.kept_up(every=0.01):
        while len(tries) < 2:
            time.sleep(0.01)
    assert "PermissionError: no" in capsys.readouterr().err and len(tries) == 2
    assert [path.name for path in (tmp_path / "out").rglob("*") if path.is_file()] == ["worker-0.jsonl"]
    (kept.folder / "new.txt").write_text("x")
    monkeypatch.setattr(kept.fs, "put_file", lambda *_: real("/nowhere", "/nowhere/else"))
    with pytest.raises(OutputError, match="all captions are in"), kept.kept_up():
        pass


def test_the_output_is_uploaded_as_a_data_set(caption, photos: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    asked: list[dict] = []

    class Hub:
        def create_repo(self, repo: str, **more) -> SimpleNamespace:
            asked.append({"repo": repo, **more})
            if repo.startswith("not-mine/"):
                raise PermissionError("401")
            if repo.startswith("offline/"):
                raise httpx.ConnectError("no such host")
            return SimpleNamespace(repo_id=repo, __str__=lambda self: repo)

        def upload_folder(self, **more) -> None:
            asked.append(more)

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    assert caption("--push-to-hub", "me/captions") == OK
    made, sent = asked
    assert made == {"repo": "me/captions", "repo_type": "dataset", "private": True, "exist_ok": True}
    names = [path.relative_to("captions").as_posix() for path in Path("captions").rglob("*") if path.is_file()]
    left = list(huggingface_hub.utils.filter_repo_objects(names, ignore_patterns=sent["ignore_patterns"]))
    assert sorted(left) == ["a.txt", "b.txt", "c.txt", "d.txt", "metadata.jsonl", "run.yaml"]
    assert sent["repo_id"] == "me/captions" and Path(sent["folder_path"]).name == "captions"
    assert caption("--push-to-hub", "not-mine/captions") == FATAL
    assert "cannot upload to not-mine/captions (401)" in capsys.readouterr().err
    assert caption("--push-to-hub", "offline/captions") == FATAL
    assert "cannot upload to offline/captions (no such host); all captions are in" in capsys.readouterr().err
    assert caption("--push-to-hub", "me/captions", "--out", "beside") == SENSELESS
    with pytest.raises(SystemExit):
        caption("--push-to-hub", "captions")
