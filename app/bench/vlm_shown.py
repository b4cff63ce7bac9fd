"""The questions of the vlm suite: drawn scenes that are in no training, or the user's own questions."""

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

HELD_OUT, TUNING = 7001, 7002  # first number of seeds whose scenes are in no training, evaluation or other suite


@dataclass(frozen=True)
class Shown:
    """The properties that the questions of a cell share.

    Attributes:
        kind: "picture", "pair", "clip", "data", or the name of one of several data sets.
        pictures: number per question; 0 if it varies.
        prompt: label of the prompts; empty if the questions have their own.
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
    add("--data", type=Path, nargs="+", metavar="PATH", help=f"{own}; several also get a common table")
    add("--video-frames", type=policy, metavar="POLICY", default=USUAL, help=HELP)
    add("--prompt", nargs="+", help="short, long, or your own texts, a cell for each; default: short and long")
    add("--images", type=_some, default=20, help="questions per cell at batch 1, or all (default: %(default)s)")
    add("--seed", type=int, default=0)


def _some(text: str) -> int | None:
    return None if text == "all" else count(text)


def tuned_on(args: argparse.Namespace) -> int:
    """Number of further questions for tuning."""
    if args.images is None and args.data is None:
        raise BenchError("--images all is for --data; for drawn pictures give a number")
    if not args.tune:
        refuse(args, "nothing is tuned without --tune", tune_images=4)
    return args.tune_images if args.tune else 0


def questions(args: argparse.Namespace, pictures: bool = True) -> tuple[Questions, Questions]:
    """By cell: the questions to measure, and those to tune on.

    Args:
        pictures: whether the model reads pictures; one that reads text alone needs --data.
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
            refuse(args, f"the questions of {path} have their own prompts", prompt=None)
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
    now, later = ({replace(shown, prompt=label): [replace(q, prompt=text) for q in each]
                   for label, text in texts.items()} for each in (some, others))  # fmt: skip
    return now, later
