"""Runs that are killed at random moments and begun again: nothing is lost, nothing is done twice, nothing is half."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).parents[2]
ITEMS, KILLS = 200, 10
MOST = (ITEMS - 20) // KILLS  # answers between two kills, so that no run ends by itself, however late it is killed
PATIENCE = 300  # seconds, for what a busy machine may delay


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(6)
    for number in range(ITEMS):
        Image.fromarray(rng.integers(0, 256, (4, 4, 3), dtype=np.uint8)).save(folder / f"{number:03}.png")
    return folder


def start(photos: Path, out: Path, model: str, *options: str) -> subprocess.Popen:
    words = ["caption", str(photos), "--out", str(out), "--engine", "quick_engine:load", "--model", model]
    return subprocess.Popen(
        [sys.executable, "-m", "mmspec.app.cli", *words, "--quiet", "--max-new-tokens", "12", *options],
        env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests' / 'support'}"},
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )


def whole_lines(out: Path) -> list[dict]:
    """All lines that a run has finished, of all journals."""
    journals = sorted((out / ".mmspec").glob("*.jsonl"))
    return [json.loads(line) for path in journals for line in path.read_bytes().split(b"\n")[:-1]]


@pytest.mark.parametrize("devices", [pytest.param("cpu", marks=pytest.mark.full), "cpu,cpu"])
def test_200_items_and_10_kills(devices: str, photos: Path, tmp_path: Path):
    out, held, rng = tmp_path / "out", tmp_path / "held", np.random.default_rng(200)
    held.write_text(str(MOST // len(devices.split(","))))
    run_again = partial(start, photos, out, f"held:{held}", "--devices", devices)
    before: list[str] = []
    for kill in range(KILLS):
        run = run_again()
        aim = len(before) + int(rng.integers(0, MOST))  # so many lines, then some ms more
        patience = time.monotonic() + PATIENCE
        while len(whole_lines(out)) < aim:
            assert run.poll() is None, f"kill {kill}: the run ended by itself"
            assert time.monotonic() < patience, f"kill {kill}: {len(whole_lines(out))} lines, {aim} are to come"
            time.sleep(0.002)
        time.sleep(float(rng.uniform(0, 0.03)))
        assert run.poll() is None, f"kill {kill}: the run ended by itself"
        run.send_signal(signal.SIGKILL)
        run.wait()
        for path in out.glob("*.txt"):
            assert len(path.read_text().split()) >= 4 and path.read_text().endswith("\n"), path  # never half
        names = [line["file_name"] for line in whole_lines(out)]
        assert set(before) <= set(names)
        before = names
    assert 0 < len(before) < ITEMS
    held.unlink()
    assert run_again().wait(PATIENCE) == 0
    names = sorted(line["file_name"] for line in whole_lines(out))
    assert names == [f"{number:03}.png" for number in range(ITEMS)]  # none lost, and the model answered for none twice
    records = [json.loads(line) for line in (out / "metadata.jsonl").read_text().splitlines()]
    assert [record["file_name"] for record in records] == names
    for record in records:
        assert (out / record["file_name"]).with_suffix(".txt").read_text() == record["text"] + "\n"
    assert len({record["text"] for record in records}) == ITEMS
    assert not list(out.rglob("*partial*"))


@pytest.mark.parametrize("devices", ("cpu", "cpu,cpu"))
@pytest.mark.parametrize("group", (False, True), ids=("one", "all"))
@pytest.mark.every(2)
def test_sigterm_winds_up(devices: str, group: bool, photos: Path, tmp_path: Path):
    """As Ctrl-C does, whether it goes to the run alone (containers) or to all its processes (SLURM)."""
    out, held = tmp_path / "out", tmp_path / "held"
    held.write_text("20")
    run = start(photos, out, f"held:{held}", "--devices", devices)
    patience = time.monotonic() + PATIENCE
    while len(whole_lines(out)) < 10:
        assert run.poll() is None and time.monotonic() < patience
        time.sleep(0.01)
    (os.killpg if group else os.kill)(run.pid, signal.SIGTERM)
    assert run.wait(PATIENCE) == 130
    names = [json.loads(line)["file_name"] for line in (out / "metadata.jsonl").read_text().splitlines()]
    assert names and sorted(names) == sorted(line["file_name"] for line in whole_lines(out))
    assert not (out / "failed.jsonl").exists() and not list(out.rglob("*partial*"))
