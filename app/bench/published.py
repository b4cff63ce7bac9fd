"""The mmspec suite: the questions of the MMSpec benchmark, measured as the vlm suite measures its own."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from mmspec.app.bench import vlm
from mmspec.app.bench.command import BenchError, Outcome

LIST = "mmspec.jsonl"
ASKED = ("image", "turns", "topic")  # fields that are read; each line also has `id`, and `category`, a title


def configure(parser: argparse.ArgumentParser) -> None:
    """As for the vlm suite, on the questions of a split."""
    vlm.configure(parser)
    parser.set_defaults(images=0)
    parser.epilog = (
        "--data is one split of the benchmark (Shen et al. 2026, arXiv 2603.14989), such as dataset/MMSpec/testmini: "
        f"{LIST} beside images/. --images 0, the default, asks all of its questions. Of a conversation the first turn "
        "is asked, or with --all-turns every one; records are by topic at batch 1."
    )


def measure(args: argparse.Namespace, outcome: Outcome) -> Iterator[None]:
    """As the vlm suite.

    Raises:
        BenchError: no such split, or a list of another form.
    """
    if args.data is not None and len(args.data) > 1:
        raise BenchError(f"--data is one split of the benchmark; got {len(args.data)}")
    split = args.data[0] if args.data else None
    count = check(split)
    assert split is not None, "check() refuses this"
    args.data = [split / LIST]
    args.images = args.images or count - (args.tune_images if args.tune else 0)
    for _ in vlm.measure(args, outcome):
        outcome.provenance["data"] = str(args.data[0])
        yield


def check(split: Path | None) -> int:
    """How many questions a split holds, once its layout is found to be the benchmark's."""
    if split is None or not (split / LIST).is_file():
        inside = sorted(path.parent.name for path in split.glob(f"*/{LIST}")) if split else []
        which = f"; it holds the splits {', '.join(inside)}" if inside else ""
        raise BenchError(
            f"--data is a folder with {LIST} and images/, such as dataset/MMSpec/testmini; got {split}{which}"
        )
    lines = [line for line in (split / LIST).read_text(encoding="utf-8").splitlines() if line.strip()]
    for number, line in enumerate(lines, 1):
        row = json.loads(line)
        missing = [name for name in ASKED if not row.get(name)]
        if missing or not isinstance(row["turns"], list):
            raise BenchError(
                f"{split / LIST}, line {number}: a sample of MMSpec has id, image, turns (a list), category and topic; "
                f"this one has {', '.join(row)}"
            )
        if not (split / "images" / row["image"]).is_file():
            raise BenchError(f"{split / LIST}, line {number}: there is no picture {split / 'images' / row['image']}")
    return len(lines)
