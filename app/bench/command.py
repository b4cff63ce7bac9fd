"""`mmspec bench`: measures the speed-up over stock transformers, with one suite per kind of model."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar

from mmspec.app.bench import report
from mmspec.app.devices import EngineError
from mmspec.app.enabling import EnableError
from mmspec.app.extras import say as say  # also for the suites
from mmspec.app.files import check_writable, write_whole
from mmspec.app.provenance import load_average
from mmspec.media import MediaError

T = TypeVar("T")
SUITES = {  # name: (module with configure(parser) and measure(args, outcome), one line of help)
    "vlm": ("mmspec.app.bench.vlm", "answers of a vision-language model, by stock paths and drafters"),
    "caption": ("mmspec.app.bench.caption", "many captions: static and continuous batches, with and without drafters"),
    "image": ("mmspec.app.bench.image", "pictures of an autoregressive image model, by plain decoding and drafters"),
}
BLOCK = 10**7  # seeds reserved for one run of pictures


class BenchError(Exception):
    """A benchmark cannot be run; the message says what was given, what is allowed and what to do."""


@dataclass
class Outcome:
    """The results of a run so far; filled by a suite."""

    provenance: report.Record = field(default_factory=dict)
    tuned: report.Record = field(default_factory=dict)  # cell → method → {chosen, tried}
    records: list[report.Record] = field(default_factory=list)


def configure(
    parser: argparse.ArgumentParser, table: Mapping[str, tuple[str, str]] = SUITES
) -> argparse._SubParsersAction[argparse.ArgumentParser]:
    """Add one sub-command per suite, with the shared options; returns the sub-parsers, so that more can be added."""
    parser.description = "Measure the speed-up over stock transformers on this machine."
    suites = parser.add_subparsers(dest="suite", metavar="SUITE", required=True)
    for name, (module, help_line) in table.items():
        suite = suites.add_parser(name, help=help_line, description=help_line)
        suite.set_defaults(module=module, prog=suite.prog)
        try:
            importlib.import_module(module).configure(suite)
        except ModuleNotFoundError as error:  # an optional package that the other suites do not need
            suite.set_defaults(missing=error.name)
        files = suite.add_argument_group("outputs")
        files.add_argument("--json", type=Path, metavar="FILE", help="write records with provenance, after each cell")
        files.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables as a page, with all columns")
    return suites


def run(args: argparse.Namespace, outcome: Outcome | None = None) -> int:
    """Run a suite and write its results; `outcome` is filled. Returns the exit code."""
    outcome, began = Outcome() if outcome is None else outcome, time.perf_counter()
    try:
        if getattr(args, "missing", None):
            raise BenchError(f"it needs the package {args.missing}: pip install {args.missing}")
        for path in filter(None, (args.json, args.markdown)):
            check_writable(path)
        for _ in importlib.import_module(args.module).measure(args, outcome):
            _save(args.json, outcome)
    except (BenchError, EnableError, EngineError, MediaError, OSError) as error:
        if outcome.records:
            print(report.table(outcome.records))
        print(f"{args.prog}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        if outcome.records:
            outcome.provenance["stopped"] = True
            _report(args, outcome, began)
        raise
    _report(args, outcome, began)
    return 0


def _report(args: argparse.Namespace, outcome: Outcome, began: float) -> None:
    """Print the table, and write the requested files."""
    outcome.provenance |= {"seconds": round(time.perf_counter() - began, 1), "load_average_at_end": load_average()}
    print(report.table(outcome.records))
    _save(args.json, outcome)
    if args.markdown:
        write_whole(args.markdown, report.markdown(outcome.records, outcome.provenance, outcome.tuned).encode())


def _save(path: Path | None, outcome: Outcome) -> None:
    """Write the records atomically, so that a stopped run leaves a complete file; with six digits, for small files."""
    if path is not None:
        short = json.loads(json.dumps(asdict(outcome)), parse_float=lambda text: float(f"{float(text):.6g}"))
        write_whole(path, json.dumps(short, indent=0).encode())


def matching(methods: Sequence[Any], patterns: Sequence[str] | None, without: Sequence[str] = ()) -> list[Any]:
    """The methods whose names match a pattern (all if None); the first, plain decoding, is always included.

    Raises BenchError: a pattern that matches nothing, or plain decoding left out by its name.
    """
    names = [m.name for m in methods]
    if names[0] in without:
        raise BenchError(f"{names[0]} cannot be left out: the others are compared with it")
    for pattern in (*(patterns or ()), *without):
        if not any(fnmatchcase(name, pattern) for name in names):
            raise BenchError(f"no method matches {pattern!r}; choose from {', '.join(names)}")
    wanted = [m for m in methods if not patterns or any(fnmatchcase(m.name, p) for p in patterns)]
    kept = [m for m in wanted if not any(fnmatchcase(m.name, p) for p in without)]
    return [methods[0], *(m for m in kept if m is not methods[0])]


def batches(some: Sequence[T], size: int) -> list[list[T]]:
    """Batches of `size`, which overlap by half, so that there are enough calls for quartiles."""
    starts = range(0, len(some), max(1, size // 2))
    return [[some[(start + i) % len(some)] for i in range(size)] for start in starts]


def seeds_of(run: int, count: int, seed: int) -> list[int]:
    """Seeds of `count` pictures; run 0 is the plain reference, and no two runs share seeds."""
    return [BLOCK * (1 + run) + seed * 10**5 + i for i in range(count)]
