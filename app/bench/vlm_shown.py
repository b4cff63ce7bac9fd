"""What the vlm suite asks: drawn pictures that no training draws, or questions of one's own."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from mmspec.app.bench.command import BenchError, refuse
from mmspec.app.bench.protocols import PROTOCOLS
from mmspec.app.bench.questions import Question, read_questions
from mmspec.app.media.clips import HELP, USUAL, VideoReader, policy
from mmspec.app.options import count
from mmspec.zoo import PROMPTS, scenes

HELD_OUT, TUNING = 7001, 7002  # first number of the seeds, which no training, no evaluation and no other suite draws


@dataclass(frozen=True)
class Shown:
    """What the questions of a cell have in common.

    Attributes:
        kind: "picture", "pair", "clip", "data", or of several data sets the name of one.
        pictures: per question; 0: they differ.
        prompt: label of the prompts; empty where the kind has prompts of its own.
    """

    kind: str = "data"
    pictures: int = 0
    prompt: str = ""

    def __str__(self) -> str:
        what = {"clip": f"clip of {self.pictures}", "picture": "", "data": "data"}.get(self.kind, self.kind)
        return ", ".join(part for part in (what, f"{self.prompt} prompt" if self.prompt else "") if part)


Questions = dict[Shown, list[Question]]


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    own = (
        "questions: a folder of pictures, a .jsonl, .json or .parquet list, a folder of MMSpec's, "
        f"hf:owner/name[:split], or one of {', '.join(PROTOCOLS)}"
    )
    add("--data", type=Path, nargs="+", metavar="PATH", help=f"{own}; of several also a table, a column each")
    add("--video-frames", type=policy, metavar="POLICY", default=USUAL, help=HELP)
    add("--prompt", nargs="+", help="short, long, or texts of your own, a cell for each; default: short and long")
    add("--images", type=_some, default=20, help="questions of a cell at batch 1, or all (default: %(default)s)")
    add("--seed", type=int, default=0)


def _some(text: str) -> int | None:
    return None if text == "all" else count(text)


def tuned_on(args: argparse.Namespace) -> int:
    """How many further questions the methods are tuned on."""
    if args.images is None and args.data is None:
        raise BenchError("--images all takes all of --data; of drawn pictures name a number")
    if not args.tune:
        refuse(args, "nothing is tuned without --tune", tune_images=4)
    return args.tune_images if args.tune else 0


def questions(args: argparse.Namespace, pictures: bool = True) -> tuple[Questions, Questions]:
    """By cell: what is measured, and what is tuned on.

    Args:
        pictures: whether the model sees some; one that reads text alone is asked what a list has.
    """
    others = tuned_on(args)
    if args.data is None and not pictures:
        raise BenchError(f"{args.model} reads text alone; name a list of prompts without pictures with --data")
    if args.data is None:
        drawn = [[Question((scenes.render(scenes.draw(np.random.default_rng([first, args.seed, i]))),))
                  for i in range(count)] for first, count in ((HELD_OUT, args.images), (TUNING, others))]  # fmt: skip
        return asking(Shown("picture", 1), drawn[0], drawn[1], args.prompt)
    measured: Questions = {}
    tuning: Questions = {}
    for path in args.data:
        with VideoReader(args.video_frames) as clips:
            some, further = read_questions(path, args.images, others, pictures, clips)
        if some[0].prompt:
            refuse(args, f"the questions of {path} have prompts of their own", prompt=None)
        shown = Shown() if len(args.data) == 1 else Shown(str(path))
        now, later = asking(shown, some, further, args.prompt)
        measured, tuning = measured | now, tuning | later
    return measured, tuning


def asking(
    shown: Shown, some: list[Question], others: list[Question], labels: list[str] | None
) -> tuple[Questions, Questions]:
    """The questions with the prompts of each label, or with their own."""
    if labels is None and some[0].prompt:
        return {shown: some}, {shown: others}
    texts = {label: PROMPTS.get(label, label) for label in labels or ("short", "long")}
    now, later = ({replace(shown, prompt=label): [replace(q, prompt=text) for q in asked]
                   for label, text in texts.items()} for asked in (some, others))  # fmt: skip
    return now, later
