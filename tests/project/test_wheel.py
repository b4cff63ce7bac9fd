"""The wheel, installed elsewhere, captions a picture: no file that the package needs was left out of it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from mmspec import zoo
from mmspec.app import embedded

ROOT = Path(__file__).parents[2]
PARTS = ("mmspec", "pipelines", "kernels", "app", "pyproject.toml", "README.md", "LICENSE")


def run(*words: str | Path, **options) -> str:
    done = subprocess.run([sys.executable, *map(str, words)], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def linked(source: str, copy: str) -> None:
    """The weights take a while to copy."""
    try:
        os.link(source, copy)
    except OSError:  # another disk
        shutil.copy2(source, copy)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with nothing but the installed wheel, built from a copy so that the checkout stays clean."""
    if int(importlib.metadata.version("setuptools").split(".")[0]) < 77:
        pytest.skip("building needs setuptools >= 77 (pip install -U setuptools)")
    work = tmp_path_factory.mktemp("wheel")
    for part in PARTS:
        source, copy = ROOT / part, work / "source" / part
        copy.parent.mkdir(exist_ok=True)
        if source.is_dir():
            left_out = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(source, copy, ignore=left_out, copy_function=linked)
        else:
            shutil.copy(source, copy)
    pip = ["-m", "pip", "--disable-pip-version-check"]
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", work, work / "source")
    (wheel,) = work.glob("mmspec-*.whl")
    zipfile.ZipFile(wheel).extractall(work / "installed")  # no file of it is compiled, nor moved
    return work / "installed"


def test_the_installed_wheel_captions_a_sample(installed: Path, tmp_path: Path):
    for name in (embedded.MODEL, embedded.DRAFTER):
        try:
            zoo.path(name)
        except FileNotFoundError as error:
            pytest.skip(f"{error}")
    environment = os.environ | {"PYTHONPATH": str(installed), "HF_HUB_OFFLINE": "1"}
    code = "import mmspec; print(mmspec.__file__); from mmspec.app.cli import main; main(['caption', '--limit', '1'])"
    said = run("-c", code, cwd=tmp_path, env=environment)
    assert Path(said.splitlines()[0]).is_relative_to(installed)  # not the checkout's copy
    assert len((tmp_path / "captions" / "metadata.jsonl").read_text().splitlines()) == 1
    (line,) = (tmp_path / "captions" / ".mmspec" / "worker-0.jsonl").read_text().splitlines()
    record = json.loads(line)
    assert record["text"] and record["model"] == embedded.MODEL and record["drafter"] == embedded.DRAFTER
    assert "identical text on 1 of 1" in said.splitlines()[-1]


def test_no_file_was_left_out(installed: Path):
    for part in ("mmspec", "pipelines", "kernels", "app"):
        inside = installed if part == "mmspec" else installed / "mmspec"
        files = [path.relative_to(ROOT) for path in ROOT.glob(f"{part}/**/*") if path.is_file()]
        files = [path for path in files if "__pycache__" not in path.parts]
        missing = [str(path) for path in files if not (inside / path).exists()]
        assert not missing, f"not in the wheel: {missing}; see package-data in pyproject.toml"
    assert not [*installed.rglob("benchmarks")], "the workshop is for developers"


def test_the_command_is_declared(installed: Path):
    (entry_points,) = installed.glob("mmspec-*.dist-info/entry_points.txt")
    assert "mmspec = mmspec.app.cli:main" in entry_points.read_text()
