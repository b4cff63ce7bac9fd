"""The questions of a benchmark: drawn scenes that are in no training, or the user's lists, folders and data sets."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mmspec.app.bench.command import BenchError
from mmspec.app.media.decoder import HELP, USUAL, VideoReader
from mmspec.app.media.hub import Dataset
from mmspec.app.media.inputs import images
from mmspec.app.media.tables import Columns
from mmspec.app.media.video import FramePolicy
from mmspec.app.options import count, seed_value
from mmspec.media import MediaError, cell, dataset_folders, decode, load_image
from mmspec.train.data import VIDEOS, Clips, VideoError, video_of
from mmspec.zoo import PROMPTS, scenes

Row = Mapping[str, Any]
HELD_OUT, TUNING = 7001, 7002  # first number of seeds whose scenes are in no training, evaluation or other suite
FIELDS = {  # possible names of a row's fields; the first one that is not empty counts
    "images": ("image", "images"),
    "prompt": ("prompt", "question", "turns"),
    "category": ("topic", "category", "task"),  # MMSpec's task is `topic`; its `category` is free
}


@dataclass(frozen=True)
class Question:
    """One question: pictures and a prompt; the suite fills in an empty prompt."""

    images: tuple[Image.Image, ...]
    prompt: str = ""
    category: str = "all"
    clip: bool = False  # the pictures are the frames of a video


@dataclass(frozen=True)
class Shown:
    """The properties that the questions of a cell share."""

    kind: str = "data"  # "picture", "pair", "clip", "data", or the name of one of several data sets
    pictures: int = 0  # per question; 0 if it varies
    prompt: str = ""  # label of the prompts; empty if the questions have their own

    def __str__(self) -> str:
        what = {"clip": f"clip of {self.pictures}", "picture": "", "data": "data"}.get(self.kind, self.kind)
        return ", ".join(part for part in (what, f"{self.prompt} prompt" if self.prompt else "") if part)


Questions = dict[Shown, list[Question]]


@dataclass(frozen=True)
class QuestionSource:
    """Questions as rows."""

    rows: Sequence[Row]
    folders: Sequence[Path] = ()  # where the files that a row names are looked for
    ask: Callable[[Row], Row] = lambda row: row  # a row's question, with the usual fields


FINDERS: list[Callable[[Path], QuestionSource | None]] = []  # further sources, which are asked first
NAMES: list[str] = []  # the names of data that these know
HUB = "hf:owner/name[:split]"


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--data", type=Path, nargs="+", metavar="PATH", help="questions: a folder of pictures, a .jsonl list, a "
        f"folder of MMSpec's, {', '.join([HUB, *NAMES])}")  # fmt: skip
    add("--video-frames", type=FramePolicy.parse, metavar="POLICY", default=USUAL, help=HELP)
    add("--prompt", nargs="+", help="short, long, or your own texts, a cell for each; default: short and long")
    add("--images", type=lambda text: None if text == "all" else count(text), default=20,
        help="questions per cell at batch 1, or all (default: %(default)s)")  # fmt: skip
    add("--seed", type=seed_value, default=0, help="of drawn pictures and answers (default: %(default)s)")


def asked(args: argparse.Namespace, pictures: bool = True, tuning: int = 0) -> Questions:
    """The questions to measure, by cell.

    Args:
        pictures: whether the model reads pictures; one that reads text alone needs --data.
        tuning: if not 0, as many others, which are not measured.
    """
    if args.data is None:
        if args.images is None:
            raise BenchError("--images all is for --data; for drawn pictures give a number")
        drawn = pictures_of(args, TUNING if tuning else HELD_OUT, tuning or args.images, pictures)
        return labelled(Shown("picture", 1), drawn, args.prompt)
    found: Questions = {}
    for path in args.data:
        with VideoReader(args.video_frames) as clips:
            some = read_questions(path, tuning or args.images, pictures, clips, args.images if tuning else 0)
        found |= labelled(Shown() if len(args.data) == 1 else Shown(str(path)), some, args.prompt, str(path))
    return found


def pictures_of(args: argparse.Namespace, first: int, count: int, pictures: bool = True) -> list[Question]:
    """Drawn scenes, without prompts; the seeds begin with `first`. BenchError: the model reads no pictures."""
    if not pictures:
        raise BenchError(f"{args.model} reads text alone; name a list of prompts without pictures with --data")
    drawn = (scenes.draw(np.random.default_rng([first, args.seed, i])) for i in range(count))
    return [Question((scenes.render(scene),)) for scene in drawn]


def labelled(shown: Shown, some: list[Question], labels: list[str] | None, data: str = "") -> Questions:
    """The questions with the prompts of each label, or with their own."""
    if some[0].prompt and not labels:
        return {shown: some}
    if some[0].prompt and data:
        raise BenchError(f"--prompt: the questions of {data} have their own prompts; leave it out")
    texts = {label: PROMPTS.get(label, label) for label in labels or ("short", "long")}
    return {replace(shown, prompt=label): [replace(q, prompt=text) for q in some] for label, text in texts.items()}


def read_questions(
    path: Path, count: int | None, pictures: bool = True, clips: Clips | None = None, without: int = 0
) -> list[Question]:
    """`count` questions spread over the data (None: all).

    Args:
        path: see `source_of`; a list has the fields of FIELDS.
        pictures: whether questions have pictures; False for a model that reads text alone.
        clips: the decoder for videos in place of pictures; None: videos are refused.
        without: none of those that are read with this `count`.

    Raises:
        BenchError: no such data, too few questions, a list without pictures or prompts, or a video that cannot be read.
    """
    source = source_of(path)
    size = len(source.rows)
    count = size if count is None else count
    if size < count + without:
        raise BenchError(f"{path} has {size} questions; {count + without} are needed. Add some, or lower --images")
    taken = {i * size // without for i in range(without)}
    places = [i for i in range(size) if i not in taken]
    return [_question(source, places[i * len(places) // count], pictures, clips) for i in range(count)]


def source_of(path: Path) -> QuestionSource:
    """The questions of a list, a folder, hf:owner/name[/config][:split], or what FINDERS know.

    Raises BenchError: there are none.
    """
    for find in FINDERS:
        if (source := find(path)) is not None:
            return source
    name = str(path)
    if name.startswith("hf:"):
        return QuestionSource(split_of(name.removeprefix("hf:")), dataset_folders(name[3:].partition(":")[0]))
    if path.is_dir():
        lists = sorted(path.glob("*.jsonl"))
        if len(lists) > 1:
            raise BenchError(f"{path} holds {len(lists)} lists ({', '.join(p.name for p in lists)}); name one of them")
        if not lists:
            return QuestionSource([{"image": picture} for picture in images(path)])
        path = lists[0]
    if path.suffix != ".jsonl" or not path.is_file():
        raise BenchError(f"no questions in {name!r}; give a folder, a .jsonl file or {', '.join([HUB, *NAMES])}")
    rows = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):  # str.splitlines also ends them within strings
        try:
            rows += [{**json.loads(line)}] if line.strip() else []
        except (ValueError, TypeError) as error:
            raise BenchError(f"{path}, line {number}: a question is a JSON object on one line; {error}") from error
    return QuestionSource(rows, [path.parent / sub for sub in ("", "images", "videos")])


def split_of(where: str) -> Any:
    """The rows of one split of a data set."""
    try:
        parts = Dataset(f"hf:{where}", Columns()).parts
    except MediaError as error:
        raise BenchError(str(error)) from error
    if len(parts) > 1:
        raise BenchError(f"hf:{where} has the splits {', '.join(parts)}; name one, as in owner/name:split")
    return next(iter(parts.values()))


def _question(source: QuestionSource, number: int, with_pictures: bool, clips: Clips | None) -> Question:
    """The question of a row; a video, where these are read, is in place of pictures."""
    row, where = source.ask(source.rows[number]), f"question {number + 1}"
    try:
        video = video_of(dict(row), clips is not None and with_pictures)
        frames = clips(video, [*source.folders], where) if video is not None and clips is not None else None
    except VideoError as error:
        raise BenchError(f"{where}: {error}") from error
    except MediaError as error:
        raise BenchError(f"{where}: its video {error.reason}; {error.what_to_do}") from error
    found = {kind: next((row[n] for n in names if row.get(n)), None) for kind, names in FIELDS.items()}
    pictures, prompt = found["images"], found["prompt"]
    if pictures is not None and not with_pictures:
        raise BenchError(f"{where} shows a picture, and the model reads text alone; give prompts without")
    unseen = pictures is None and frames is None and with_pictures
    if unseen or (prompt is None and set(row) != {"image"}):
        raise BenchError(
            f"{where} has no {'picture' if unseen else 'prompt'}: its fields are {', '.join(row)}. Pictures are looked "
            f"for in {', '.join(FIELDS['images'])}, videos in {', '.join(VIDEOS)}, prompts in "
            f"{', '.join(FIELDS['prompt'])}"
        )
    pictures = pictures if isinstance(pictures, list) else [] if pictures is None else [pictures]
    prompt = prompt[0] if isinstance(prompt, list) else prompt or ""  # the first turn of a conversation
    shown = frames if frames is not None else [_picture(one, source.folders, where) for one in pictures]
    return Question(tuple(shown), str(prompt), str(found["category"] or "all"), frames is not None)


def _picture(one: object, folders: Sequence[Path], where: str) -> Image.Image:
    """The picture in a cell, or at a path below one of the folders; a Path is that of a picture itself."""
    if isinstance(one, Path):
        return load_image(one)
    there = [folder for folder in folders if isinstance(one, str) and (folder / one).is_file()]
    return decode(cell(one, there or folders, where), where)
