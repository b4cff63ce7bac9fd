"""The gpu suite: its stages at toy size, without what is optional, and what fails or hangs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import on_device_first
import pytest
import torch
from torch import Tensor

from benchmarks.__main__ import parser as workshop
from benchmarks.suites import gpu
from mmspec.app import cli
from mmspec.kernels import reference

OPTIONAL = ("diffusers", "gradio", "timm", "av")
LACKING = """
import sys


class Lacking:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)


sys.meta_path.insert(0, Lacking())
"""


def records(out: Path) -> dict[str, dict[str, Any]]:
    found = json.loads((out / "gpu.json").read_text())
    assert found["provenance"]["note"] == gpu.UNMEASURED and found["provenance"]["argv"]
    return {record["stage"]: record for record in found["records"]}


QUICK = ["first", "bandwidth"]  # a script and a suite


@pytest.mark.parametrize("stages", [QUICK, pytest.param([*gpu.STAGES], marks=pytest.mark.full)], ids=len)
def test_stages_run_as_toys_where_optional_packages_are_absent(tmp_path: Path, stages: list[str]) -> None:
    """Each leaves its file."""
    (tmp_path / "sitecustomize.py").write_text(LACKING.format(names=OPTIONAL))
    path = f"{tmp_path}:{gpu.ROOT}"
    command = [sys.executable, "-m", "benchmarks", "gpu", "--toy", "--out", str(tmp_path / "out")]
    command += ["--stages", *stages]
    ran = subprocess.run(
        command, cwd=gpu.ROOT, env={**_environment(), "PYTHONPATH": path}, capture_output=True, text=True, timeout=1100
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    found = records(tmp_path / "out")
    assert list(found) == stages
    assert {name: r["came"] for name, r in found.items()} == dict.fromkeys(found, "passed"), found
    files = {name: json.loads((tmp_path / "out" / r["file"]).read_text()) for name, r in found.items()}
    for name in files.keys() & {"kernels", "graphs"}:
        assert files[name]["passed"] > 2 and not files[name]["failed"]
    first = {record["check"]: record for record in files["first"]["records"]}
    assert list(first) == list(on_device_first.CHECKS) and all(record["unmeasured"] for record in first.values())
    assert [name for name, record in first.items() if record["passed"] is not True] == ["work spaces"]
    if "identical" in files:
        assert files["identical"]["summary"]["float32"]["identical"] == 4
    for name in files.keys() & {"bandwidth", "shapes", "embedded", "more shapes"}:
        assert files[name]["records"] and files[name]["provenance"]["device_type"] == "cpu"


def _environment() -> dict[str, str]:
    import os

    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def test_a_stage_that_fails_or_hangs_is_recorded_and_the_next_one_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "import sys; print('why it broke'); sys.exit(3)"
    (tmp_path / "broken.py").write_text(said)
    (tmp_path / "hangs.py").write_text("import time; print('so far', flush=True); time.sleep(60)")
    (tmp_path / "test_two.py").write_text("def test_a(): pass\ndef test_b(): assert False, 'as it should'\n")
    scripts = {name: str(tmp_path / f"{name}.py") for name in ("broken", "hangs", "test_two")}
    stages = {name: gpu.GpuStage(name, 1.0, (), (script,)) for name, script in list(scripts.items())[:2]}
    stages["tests"] = gpu.GpuStage("tests", 30.0, (), ("pytest", "-p", "no:cacheprovider", scripts["test_two"]))
    stages["lacks"] = gpu.GpuStage("lacks", 1.0, (), (scripts["broken"],), ("no_such_package",))
    monkeypatch.setattr(gpu, "STAGES", stages)
    out = tmp_path / "out"
    given = ["--toy", "--stages", *stages, "--out", str(out), "--minutes", "1.2"]
    assert cli.main(["gpu", *given], workshop) == 0
    found = records(out)
    assert found["broken"]["came"] == "failed: exit code 3" and "why it broke" in found["broken"]["tail"]
    assert found["hangs"]["came"].startswith("out of time") and "so far" in found["hangs"]["tail"]
    assert found["lacks"]["came"] == "skipped: no_such_package is not installed"
    tests = json.loads((out / "tests.json").read_text())
    assert tests["passed"] == 1 and "as it should" in str(tests["failed"]) and found["tests"]["rc"] == 1


def test_a_first_check_that_fails_says_what_to_do_and_the_others_run() -> None:
    def one(wrong: Any) -> on_device_first.Check:
        return on_device_first.Check("it", wrong, "mend it", "all")

    checks = {"found": one(lambda device: "off by 3"), "raises": one(lambda device: 1 / 0), "right": one(lambda _: "")}
    found = list(on_device_first.checked(torch.device("cpu"), checks))
    assert [record["passed"] for record in found] == [False, False, True]
    assert [record.get("what to do") for record in found] == ["mend it", "mend it", None]
    assert found[0]["found"] == "off by 3" and "ZeroDivisionError" in found[1]["found"]


@pytest.mark.parametrize(("check", "operation"), [("barrier", "compact_rows"), ("shared memory", "tree_attention")])
def test_a_first_check_sees_a_kernel_that_is_wrong(check: str, operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    definition = getattr(reference, operation)

    def one_by_one(buffers: Any, source: Tensor, start: Tensor) -> None:
        for j in reversed(range(source.shape[1])):  # written before an earlier entry was read
            definition(buffers, source[:, j : j + 1], start + j)

    wrong = {"compact_rows": one_by_one, "tree_attention": lambda **given: definition(**given) + 1}
    monkeypatch.setattr(on_device_first.dispatch, "chosen", lambda name, *_: wrong[name])
    found = on_device_first.CHECKS[check].wrong(torch.device("cpu"))
    assert "entries are off" in found


def test_real_stages_name_what_there_is() -> None:
    """Tests, suites and their options: each command's words are understood, though it is not run here."""
    parser = workshop()
    for stage in gpu.STAGES.values():
        for words in (stage.real, stage.toy):
            if words[0] == "benchmarks":
                parser.parse_args(list(words[1:]))
            else:
                assert [(gpu.ROOT / word).exists() for word in words if word.endswith(".py")] == [True]
    assert sum(stage.share for stage in gpu.STAGES.values()) == pytest.approx(1.0)
