"""The gpu suite: all GPU tests and benchmarks, in stages with one result file each; toy sizes without a GPU.

Every stage is a separate process, so a crash, a hang or a broken device ends only that stage. The stages run the tests,
which use the available device, and the other suites.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import torch

import mmspec
from mmspec.app.bench import report
from mmspec.app.bench.command import BenchError, Outcome, say
from mmspec.app.devices import find_device
from mmspec.app.provenance import provenance

ROOT = Path(mmspec.__file__).resolve().parent.parent
TAIL = 3000  # characters of a stage's last output that are kept
MINUTES = 12.0
UNMEASURED = "toys on a CPU: every figure of a GPU is unmeasured"


@dataclass(frozen=True)
class GpuStage:
    """One stage of the suite.

    Attributes:
        shows: its description in the table.
        share: its share of the minutes.
        real, toy: the command with a GPU and without: arguments of `python -m`, or a script and its arguments. FILE is
            replaced by the result file; that of the tests is made from their report.
        needs: packages that the stage requires.
    """

    shows: str
    share: float
    real: tuple[str, ...]
    toy: tuple[str, ...]
    needs: tuple[str, ...] = ()


_TESTS = ("pytest", "-p", "no:cacheprovider")
_DEVICE, _FIRST = "tests/support/on_device.py", "tests/support/on_device_first.py"
_BENCH = ("benchmarks",)
_AT_ONCE = ("-n", "4")  # several processes share a GPU, because each mostly waits for its compiler
_GOAL = ("--models", "qwen2.5-vl-7b", "--drafters", "vispec", "--contexts", "1024", "--batch", "1", "--methods",
         "stock compiled", "vispec tree*")  # fmt: skip
_TOY = ("--sizes", "toy", "--device", "cpu", "--repeats", "1")
_LITTLE = ("--batch", "2", "--tokens", "3", "--no-compile")
STAGES: dict[str, GpuStage] = {
    "first": GpuStage(
        "what all else rests on and only a device can show, in small checks that say what to do", 0.07,
        (_FIRST, "--json", "FILE"), (_FIRST, "--json", "FILE"), ("triton",),
    ),
    "kernels": GpuStage(
        "every kernel gives what its definition gives, odd sizes, all dtypes", 0.14,
        (*_TESTS, *_AT_ONCE, "tests/kernels/test_kernels.py", "--full"),
        (*_TESTS, "tests/kernels/test_kernels.py", "--full", "-k",
         "equals_its_definition and (uniform or compact or gaussian)"),
        ("pytest", "xdist", "triton"),
    ),
    "identical": GpuStage(
        "families and drafters: identical in float32, agreement and logit gaps in bfloat16", 0.13,
        (_DEVICE, "--json", "FILE", "--drafters", "ngram", "eagle tree", "vispec"),
        (_DEVICE, "--json", "FILE", "--families", "llava", "--drafters", "ngram", "eagle chain"),
    ),
    "graphs": GpuStage(
        "captured pieces and CUDA graphs: the same logits, no memory kept, moved weights, two threads, two streams",
        0.08,
        (*_TESTS, *_AT_ONCE, "tests/compile/test_graphs.py"),
        (*_TESTS, "tests/compile/test_graphs.py", "-k", "leave_nothing or outlive or take_turns or recorded_anew"),
        ("pytest", "xdist"),
    ),
    "bandwidth": GpuStage(
        "each kernel as a share of the copy bandwidth, beside SDPA and FlexAttention", 0.08,
        (*_BENCH, "kernels", "--json", "FILE", "--no-compile"),
        (*_BENCH, "kernels", "--json", "FILE", "--only", "uniform", "tree_attention", *_TOY[:4], "--repeats", "2"),
        ("triton",),
    ),
    "shapes": GpuStage(
        "c of ViSpec's published tree at the shapes of Qwen2.5-VL-7B: 1.2 is the goal", 0.28,
        (*_BENCH, "shapes", "--json", "FILE", *_GOAL),
        (*_BENCH, "shapes", "--json", "FILE", "--models", "qwen2.5-vl-7b", "--drafters", "vispec", *_TOY, *_LITTLE,
         "--contexts", "64"),
    ),
    "embedded": GpuStage(
        "the embedded model end to end", 0.16, (*_BENCH, "round", "--json", "FILE", "--static"),
        (*_BENCH, "round", "--json", "FILE", "--no-compile", "--methods", "plain", "--max-new-tokens", "3",
         "--prompt", "short", "--images", "1", "--device", "cpu"),
    ),
    "more shapes": GpuStage(
        "c at the other published shapes, as far as the time goes", 0.06, (*_BENCH, "shapes", "--json", "FILE"),
        (*_BENCH, "shapes", "--json", "FILE", "--models", "smolvlm-500m", *_TOY, *_LITTLE, "--contexts", "64"),
    ),
}  # fmt: skip


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--stages", nargs="+", choices=STAGES, default=list(STAGES), metavar="STAGE", help=f"of {', '.join(STAGES)}")
    add("--out", type=Path, default=Path("benchmarks/results/gpu"), help="folder of the result files "
        "(%(default)s)")  # fmt: skip
    add("--minutes", type=float, default=MINUTES, help="for all stages; each gets a share, and time that the "
        "earlier ones left (%(default)s)")  # fmt: skip
    add("--toy", action="store_true", help="toy sizes even with a GPU")


def measure(args: argparse.Namespace, outcome: Outcome) -> Iterator[None]:
    if not (ROOT / _DEVICE).exists():
        raise BenchError(f"it runs the tests, which lie in a checkout of mmspec; {ROOT} is none. Clone the repository")
    real = torch.cuda.is_available() and not args.toy
    device = find_device("cuda" if real else "cpu")
    args.out.mkdir(parents=True, exist_ok=True)
    args.json = args.json or args.out / "gpu.json"
    facts = {"model": "the stages of the gpu suite", "sizes": "real" if real else "toy"}
    outcome.provenance = provenance(device, torch.float32) | facts | ({} if real else {"note": UNMEASURED})
    ends = time.perf_counter() + 60 * args.minutes
    whole = sum(STAGES[name].share for name in args.stages)
    for name in args.stages:
        stage, left = STAGES[name], ends - time.perf_counter()
        limit, whole = left * stage.share / whole, whole - stage.share
        say(f"{name}: {stage.shows}")
        result = staged(name, stage, real, args.out, limit)
        outcome.records.append({"suite": "gpu", "stage": name, "shows": stage.shows, "limit_s": round(limit), **result})
        say(f"{name}: {result['came']}")
        yield


def staged(name: str, stage: GpuStage, real: bool, out: Path, limit: float) -> report.Record:
    """Run one stage; returns its outcome, and writes its result file."""
    lacking = [package for package in stage.needs if _absent(package)]
    if lacking:
        return _told(f"skipped: {', '.join(lacking)} is not installed")
    file = (out / f"{name.replace(' ', '-')}.json").resolve()
    file.unlink(missing_ok=True)
    words = [str(file) if word == "FILE" else word for word in (stage.real if real else stage.toy)]
    tests = file.with_suffix(".xml") if words[0] == "pytest" else None
    words += [f"--junitxml={tests}"] if tests else []
    command = [sys.executable, *(words if words[0].endswith(".py") else ["-m", *words])]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    hidden = {} if real else {"CUDA_VISIBLE_DEVICES": ""}
    began = time.perf_counter()
    try:
        ran = subprocess.run(
            command, cwd=ROOT, timeout=max(limit, 1), text=True, errors="replace", stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", **hidden},
        )  # fmt: skip
        rc, said = ran.returncode, ran.stdout
    except subprocess.TimeoutExpired as error:
        printed = error.stdout or ""
        rc, said = None, printed.decode(errors="replace") if isinstance(printed, bytes) else printed
    seconds = round(time.perf_counter() - began, 1)
    if tests and tests.exists():
        counted = tested(tests)
        tests.unlink()
        file.write_text(json.dumps({"command": command, "rc": rc, "seconds": seconds, **counted}, indent=1))
    came = "out of time: what it has is kept" if rc is None else "passed" if rc == 0 else f"failed: exit code {rc}"
    return _told(came, file.name if file.exists() else None, seconds, rc, "" if rc == 0 else said[-TAIL:])


def _absent(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is None
    except ImportError:
        return True


def _told(
    came: str, file: str | None = None, seconds: float = 0.0, rc: int | None = None, tail: str = ""
) -> report.Record:
    return {"came": came, "file": file, "seconds": seconds, "rc": rc, "tail": tail}


def tested(xml: Path) -> report.Record:
    """How many tests passed, which failed, and why others were skipped, from pytest's report."""
    cases = list(ElementTree.parse(xml).getroot().iter("testcase"))
    failed, skipped = {}, Counter[str]()
    for case in cases:
        for kind in ("failure", "error"):
            if (element := case.find(kind)) is not None:
                failed[f"{case.get('classname')}::{case.get('name')}"] = (element.get("message") or "")[:400]
        if (element := case.find("skipped")) is not None:
            skipped[element.get("message") or ""] += 1
    return {"passed": len(cases) - len(failed) - skipped.total(), "failed": failed, "skipped": skipped}
