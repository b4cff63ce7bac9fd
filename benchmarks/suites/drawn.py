"""Drawn pairs of pictures and drawn clips, the media of the vision-language suites in addition to single pictures."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np

from benchmarks.suites.subject import refuse
from benchmarks.zoo import clips, language
from benchmarks.zoo.recipes.vlm import Mix
from mmspec.app.bench import questions
from mmspec.app.bench.questions import HELD_OUT, TUNING, Question, Questions, Shown
from mmspec.app.options import count
from mmspec.zoo import scenes


def _pair(seeds: list[int], count: int) -> Question:
    """Two pictures and a prompt to describe one of them."""
    rng = np.random.default_rng([*seeds, 2])
    pair = (scenes.draw(rng), scenes.draw(rng))
    asked = language.pair_question(rng, pair, Mix())
    while asked.kind != "pair-short":
        asked = language.pair_question(rng, pair, Mix())
    return Question(tuple(scenes.render(scene) for scene in pair), asked.prompt)


def _clip(seeds: list[int], count: int) -> Question:
    """A clip and a prompt to describe it; the clip depends on the seeds, not on the number of frames."""
    rng = np.random.default_rng([*seeds, 3])
    clip = clips.draw(rng)
    return Question(tuple(clips.frames(clip, count)), clips.describe(rng, clip).prompt)


KINDS: dict[str, Callable[[list[int], int], Question]] = {"pair": _pair, "clip": _clip}


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    shown = ("picture", *KINDS)
    add("--shown", nargs="+", choices=shown, default=["picture"], help="drawn pictures, pairs of pictures, clips")
    add("--frames", type=count, nargs="+", default=[8], help="numbers of frames of clips, one cell each (default: 8)")


def asked(args: argparse.Namespace, pictures: bool = True, tuning: int = 0) -> Questions:
    """The questions to measure, by cell; pairs and clips have their own prompts. For the arguments see
    `mmspec.app.bench.questions.asked`."""
    if "clip" not in args.shown:
        refuse(args, "only clips have frames (--shown clip)", frames=[8])
    if args.data is not None:
        refuse(args, "--data shows your own pictures, and nothing drawn", shown=["picture"])
        return questions.asked(args, pictures, tuning)
    found: Questions = {}
    for kind in args.shown:
        for frames in args.frames if kind == "clip" else [2]:
            if kind == "picture":
                found |= questions.asked(args, pictures, tuning)
                continue
            first = TUNING if tuning else HELD_OUT
            some = [KINDS[kind]([first, args.seed, i], frames) for i in range(tuning or args.images)]
            found |= questions.labelled(Shown(kind, frames), some, args.prompt)
    return found
