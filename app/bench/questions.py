"""The questions of the vlm suite: drawn scenes that are in no training, or the user's own questions."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from PIL import Image

from mmspec.app.bench.command import BenchError, refuse
from mmspec.app.bench.sources import NAMES, QuestionSource, Row, source_of
from mmspec.app.media.clips import HELP, USUAL, VideoReader, policy
from mmspec.app.options import count
from mmspec.media import MediaError, decode, load_image
from mmspec.train.data import VIDEOS, Clips, VideoError, video_of
from mmspec.zoo import PROMPTS, scenes

HELD_OUT, TUNING = 7001, 7002  # first number of seeds whose scenes are in no training, evaluation or other suite
FIELDS = {  # possible names of a list's fields; the first one that is not empty counts
    "images": ("image", "images", "image_path", "image_paths", "image_file", "file_name", "img"),
    "prompt": ("prompt", "question", "turns", "instruction", "query", "text"),
    "category": ("topic", "category", "task", "dataset", "source"),  # MMSpec's task is `topic`; its `category` is free
}


@dataclass(frozen=True)
class Question:
    """One question: pictures and a prompt; the suite fills in an empty prompt.

    Attributes:
        clip: the pictures are the frames of a video.
    """

    images: tuple[Image.Image, ...]
    prompt: str = ""
    category: str = "all"
    clip: bool = False


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
        f"hf:owner/name[:split], or one of {', '.join(NAMES)}"
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


def asked(args: argparse.Namespace, pictures: bool = True) -> tuple[Questions, Questions]:
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
        return labelled(Shown("picture", 1), drawn[0], drawn[1], args.prompt)
    measured: Questions = {}
    tuning: Questions = {}
    for path in args.data:
        with VideoReader(args.video_frames) as clips:
            some, further = read_questions(path, args.images, others, pictures, clips)
        if some[0].prompt:
            refuse(args, f"the questions of {path} have their own prompts", prompt=None)
        shown = Shown() if len(args.data) == 1 else Shown(str(path))
        now, later = labelled(shown, some, further, args.prompt)
        measured, tuning = measured | now, tuning | later
    return measured, tuning


def labelled(
    shown: Shown, some: list[Question], others: list[Question], labels: list[str] | None
) -> tuple[Questions, Questions]:
    """The questions with the prompts of each label, or with their own."""
    if labels is None and some[0].prompt:
        return {shown: some}, {shown: others}
    texts = {label: PROMPTS.get(label, label) for label in labels or ("short", "long")}
    now, later = ({replace(shown, prompt=label): [replace(q, prompt=text) for q in each]
                   for label, text in texts.items()} for each in (some, others))  # fmt: skip
    return now, later


def read_questions(
    path: Path, count: int | None, others: int, pictures: bool = True, clips: Clips | None = None
) -> tuple[list[Question], list[Question]]:
    """`count` questions spread over the data (None: all), and `others` more for tuning.

    Args:
        path: see `source_of`; a list has the fields of FIELDS.
        pictures: whether questions have pictures; False for a model that reads text alone.
        clips: the decoder for videos in place of pictures; None: videos are refused.

    Raises:
        BenchError: no such data, too few questions, a list without pictures or prompts, or a video that cannot be read.
    """
    source = source_of(path)
    size = len(source.rows)
    count = max(1, size - others) if count is None else count
    if size < count + others:
        raise BenchError(
            f"{path} has {size} questions; {count} are needed to measure and {others} to tune. "
            f"Lower --images or --tune-images"
        )
    chosen = {i * size // count for i in range(count)}
    rest = [i for i in range(size) if i not in chosen]
    tuning = [rest[i * len(rest) // others] for i in range(others)]

    def read(number: int) -> Question:
        row, where = source.ask(source.rows[number]), f"question {number + 1}"
        try:
            video = video_of(dict(row), clips is not None and pictures)
            frames = clips(video, source.folders, where) if video is not None and clips is not None else None
        except VideoError as error:
            raise BenchError(f"{where}: {error}") from error
        except MediaError as error:
            raise BenchError(f"{where}: its video {error.reason}; {error.what_to_do}") from error
        return _question(row, source, where, pictures, frames)

    measured, tuned = ([read(i) for i in places] for places in (sorted(chosen), tuning))
    return measured, tuned


def _question(
    row: Row, source: QuestionSource, where: str, shown: bool, frames: Sequence[Image.Image] | None
) -> Question:  # fmt: skip
    """The question of a row; `frames` are those of its video, if it has one in place of pictures."""
    found = {kind: next((row[n] for n in names if row.get(n)), None) for kind, names in FIELDS.items()}
    pictures, prompt = found["images"], found["prompt"]
    if pictures is not None and not shown:
        raise BenchError(f"{where} shows a picture, and the model reads text alone; give prompts without")
    if (pictures is None and frames is None and shown) or (prompt is None and set(row) != {"image"}):
        missing = "picture" if pictures is None and frames is None else "prompt"
        raise BenchError(
            f"{where} has no {missing}: its fields are {', '.join(row)}. Pictures are looked for in "
            f"{', '.join(FIELDS['images'])}, videos in {', '.join(VIDEOS)}, prompts in {', '.join(FIELDS['prompt'])}"
        )
    pictures = pictures if isinstance(pictures, list) else [] if pictures is None else [pictures]
    prompt = prompt[0] if isinstance(prompt, list) else prompt or ""  # the first turn of a conversation
    category = str(found["category"]) if found["category"] else "all"
    seen = frames if frames is not None else [_picture(one, source.folders) for one in pictures]
    return Question(tuple(seen), str(prompt), category, frames is not None)


def _picture(one: str | Row, folders: Sequence[Path]) -> Image.Image:
    """The picture at a path below one of the folders, or in a cell: {bytes, path}."""
    if not isinstance(one, str) and one.get("bytes"):
        return decode(one["bytes"], one.get("path") or "picture in the list")
    name = one if isinstance(one, str) else one["path"]
    places = [folder / name for folder in folders] or [Path(name)]
    return load_image(next((place for place in places if place.is_file()), places[0]))
