"""Several workers: all work, and what a killed one had in hand is done by the others."""

from __future__ import annotations

import argparse
import json
import os
import signal
from pathlib import Path

import pytest

from mmspec.app import cli
from mmspec.app.caption import options as settings
from mmspec.app.caption.journal import STATE
from mmspec.app.caption.outputs import Outputs
from mmspec.app.caption.plan import Planner
from mmspec.app.caption.run import FatalError, Job
from mmspec.app.caption.workers import STARTS, WorkerPool, places
from mmspec.app.media.inputs import open_inputs
from mmspec.app.prompt import Prompts
from tests.app.test_kill import photos  # noqa: F401 - a fixture

OK, FATAL = 0, 1
ITEMS = 60


@pytest.fixture
def few(photos: Path, tmp_path: Path) -> Path:  # noqa: F811
    folder = tmp_path / "few"
    folder.mkdir()
    for path in sorted(photos.iterdir())[:ITEMS]:
        os.link(path, folder / path.name)
    return folder


def prepared(few: Path, out: Path, *words: str) -> tuple[Job, list]:
    """The job and the tasks of a run with the quick engine."""
    parser = argparse.ArgumentParser()
    settings.configure(parser)
    words = ("--engine", "quick_engine:load", "--model", "quick", "--max-new-tokens", "10", *words)
    options = settings.resolve(parser.parse_args([str(few), *words]))
    options = options.fitted()
    outputs, shaping = Outputs(out, str(few)), options.shaping
    todo = Planner(options, shaping, Prompts(*options.prompt), outputs).plan(open_inputs([few]))
    outputs.close()
    return Job(options, shaping, out, outputs.origin, items=len(todo.pending)), todo.pending


def recorded(out: Path) -> dict[str, list[str]]:
    """Which items each journal holds; a killed worker may have left half a line behind."""
    whole = {path.stem: path.read_bytes().split(b"\n")[:-1] for path in out.glob(f"{STATE}/*.jsonl")}
    return {slot: [json.loads(line)["file_name"] for line in lines] for slot, lines in whole.items()}


def everything(out: Path) -> list[str]:
    return sorted(name for names in recorded(out).values() for name in names)


def test_a_killed_worker_loses_nothing(few: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    job, tasks = prepared(few, tmp_path / "out")
    told: list[str] = []
    pool = WorkerPool(job, ["cpu", "cpu"], "")

    victims: list[str] = []

    def report(result) -> None:
        """Kills the worker with the most behind it: on a busy machine the other one may not have begun."""
        told.append(result["file_name"])
        if len(told) == 10:
            lines = {path.stem: path.read_bytes().count(b"\n") for path in (tmp_path / "out").glob(f"{STATE}/*.jsonl")}
            victim = max(pool.workers, key=lambda worker: lines.get(worker.slot, 0))
            victims.append(victim.slot)
            os.kill(victim.process.pid, signal.SIGKILL)

    try:
        pool.run(tasks, report)
        assert len(pool.workers) == 2  # it was started again
    finally:
        pool.close()
    names = sorted(path.name for path in few.iterdir())
    assert sorted(told) == names and everything(tmp_path / "out") == names
    assert all(recorded(tmp_path / "out").values())  # both had a part
    assert f"{victims[0]} on cpu has ended (SIGKILL); it is restarted" in capsys.readouterr().err
    assert {"worker-0", "worker-1"} - {*victims} <= {summary["worker"] for summary in pool.summaries}


@pytest.mark.parametrize("workers", [1, 2])
def test_an_item_that_kills_its_workers_ends_as_a_failure(workers: int, few: Path, tmp_path: Path):
    """The first worker dies with other items in hand, another start alone with it; then it is given to nobody."""
    poison = sorted(few.iterdir())[7].name
    job, tasks = prepared(few, tmp_path / "out", "--model", f"deadly:{poison}")
    pool, told = WorkerPool(job, ["cpu"] * workers, ""), {}
    try:
        pool.run(tasks, lambda result: told.update({result["file_name"]: result.get("error")}))
        assert len(pool.workers) == workers
    finally:
        pool.close()
    assert {name: error for name, error in told.items() if error} == {poison: "KilledWorkerError"}
    assert len(told) == ITEMS and everything(tmp_path / "out") == sorted(told)
    left = prepared(few, tmp_path / "out", "--model", f"deadly:{poison}")[1]
    assert poison not in [task.item.name for task in left], "the next run leaves it alone"


def test_without_workers_the_run_ends_and_says_so(few: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    job, _ = prepared(few, tmp_path / "out", "--model", "stillborn")
    with pytest.raises(FatalError, match=r"all workers have ended \(worker-0 on cpu has ended \(SIGKILL\)\)"):
        WorkerPool(job, ["cpu"], "")
    assert capsys.readouterr().err.count("has ended") == STARTS


def test_workers_stop_when_the_disk_is_full(few: Path, tmp_path: Path):
    """A limit on the size of files stands for it: each worker's journal holds a few lines."""
    resource = pytest.importorskip("resource")
    job, tasks = prepared(few, tmp_path / "out")
    told: list[str] = []
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, before[1]))
    try:
        pool = WorkerPool(job, ["cpu", "cpu"], "")
        with pytest.raises(FatalError, match=r"all workers have ended \(worker-. on cpu: .*captions are saved"):
            pool.run(tasks, lambda record: told.append(record["file_name"]))
        pool.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert 0 < len(told) < ITEMS and sorted(told) == everything(tmp_path / "out")


@pytest.mark.parametrize("trouble", ["unloadable", "lost"])
def test_one_device_that_fails_does_not_end_the_run(trouble: str, few: Path, tmp_path: Path, capsys):
    out = tmp_path / "out"
    words = ["caption", str(few), "--out", str(out), "--engine", "quick_engine:load", "--max-new-tokens", "10"]
    code = cli.main([*words, "--quiet", "--model", f"{trouble}:cpu:1", "--devices", "cpu,cpu:1"])
    said = capsys.readouterr().err
    assert "worker-1 on cpu:1: " in said
    done = [json.loads(line)["file_name"] for line in (out / "metadata.jsonl").read_text().splitlines()]
    failures = out / "failed.jsonl"
    failed = [json.loads(line) for line in failures.read_text().splitlines()] if failures.exists() else []
    assert sorted(done + [line["file_name"] for line in failed]) == sorted(path.name for path in few.iterdir())
    if trouble == "unloadable":
        assert code == OK and not failed and "no memory on cpu:1; the other workers go on" in said
    else:  # the item on which it showed is named, all others are captioned
        assert {line["error"] for line in failed} == {"AcceleratorError"} and len(done) > ITEMS / 2
        assert "the device no longer works" in said and "it is restarted" in said


def test_a_model_that_cannot_be_loaded_ends_the_run(few: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    words = ["caption", str(few), "--out", str(tmp_path / "out"), "--engine", "quick_engine:nothing"]
    assert cli.main([*words, "--devices", "cpu,cpu"]) == FATAL
    said = capsys.readouterr().err
    assert "on cpu: AttributeError: module 'quick_engine' has no attribute 'nothing'" in said and "item" not in said


def test_names_of_devices():
    assert places("0,1") == ["cuda:0", "cuda:1"] and places("cpu, cpu") == ["cpu", "cpu"] and places("mps") == ["mps"]
