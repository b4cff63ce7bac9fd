"""Reads the questions of a benchmark from the user's lists and folders, or from published data sets."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from mmspec.app.bench.command import BenchError
from mmspec.app.bench.protocols import PROTOCOLS, HubQuestions, questions_of
from mmspec.app.media.inputs import images
from mmspec.media import MediaError, decode, load_image
from mmspec.pipelines.prompts import Turns
from mmspec.train.data import VIDEOS, Clips, VideoError, video_of

LISTS = (".jsonl", ".json", ".parquet")
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
        later: the later prompts of a conversation.
        before: the earlier prompts with their answers.
    """

    images: tuple[Image.Image, ...]
    prompt: str = ""
    category: str = "all"
    clip: bool = False
    later: tuple[str, ...] = ()
    before: Turns = ()


def read_questions(
    path: Path, count: int | None, others: int, pictures: bool = True, clips: Clips | None = None
) -> tuple[list[Question], list[Question]]:
    """`count` questions spread over the data (None: all), and `others` more for tuning.

    Args:
        path: a .jsonl, .json or .parquet list with the fields of FIELDS, or a folder: of one such list (as in
            killthefullmoon/MMSpec, with its `images/`), or just of pictures; or hf:owner/name[/config][:split] with
            these fields, a name of PROTOCOLS, or a folder with a copy of MVBench.
        pictures: whether questions have pictures; False for a model that reads text alone.
        clips: the decoder for videos in place of pictures; None: videos are refused.

    Raises:
        BenchError: no such data, too few questions, a list without pictures or prompts, or a video that cannot be read.
    """
    folder = path if path.is_dir() else path.parent
    rows = _rows(path)
    videos = rows.folders if isinstance(rows, HubQuestions) else [folder, folder / "videos"]
    count = max(1, len(rows) - others) if count is None else count
    if len(rows) < count + others:
        raise BenchError(
            f"{path} has {len(rows)} questions; {count} are needed to measure and {others} to tune. "
            f"Lower --images or --tune-images"
        )
    chosen = {i * len(rows) // count for i in range(count)}
    rest = [i for i in range(len(rows)) if i not in chosen]
    tuning = [rest[i * len(rest) // others] for i in range(others)]

    def ask(number: int) -> Question:
        try:
            video = video_of(dict(rows[number]), clips is not None and pictures)
            frames = clips(video, videos, f"question {number + 1}") if video is not None and clips is not None else None
        except VideoError as error:
            raise BenchError(f"question {number + 1}: {error}") from error
        except MediaError as error:
            raise BenchError(f"question {number + 1}: its video {error.reason}; {error.what_to_do}") from error
        return _question(rows[number], folder, number, pictures, frames)

    measured, tuned = ([ask(i) for i in places] for places in (sorted(chosen), tuning))
    return measured, tuned


def _rows(path: Path) -> Sequence[Mapping[str, Any]]:
    if (published := questions_of(path)) is not None:
        return published
    if path.is_dir():
        lists = sorted(p for p in path.iterdir() if p.suffix in LISTS)
        if len(lists) > 1:
            raise BenchError(f"{path} holds {len(lists)} lists ({', '.join(p.name for p in lists)}); name one of them")
        if not lists:
            return [{"image": str(picture.resolve())} for picture in images(path)]
        path = lists[0]
    if path.suffix not in LISTS or not path.is_file():
        raise BenchError(
            f"no questions in {str(path)!r}; give a folder, a file ending in {', '.join(LISTS)}, "
            f"hf:owner/name[:split], or one of {', '.join(PROTOCOLS)}"
        )
    try:
        return _listed(path)
    except (OSError, ValueError) as error:  # pyarrow's are among these
        raise BenchError(f"{path} cannot be read as a list of questions: {error}") from error


def _listed(path: Path) -> list[dict[str, Any]]:
    """The rows of a file. ValueError: it is no list of objects."""
    if path.suffix == ".parquet":
        try:
            import pyarrow.parquet
        except ImportError as error:
            raise BenchError("a parquet list needs pyarrow: pip install pyarrow, or convert it to .jsonl") from error
        return pyarrow.parquet.read_table(path).to_pylist()  # type: ignore[no-any-return]
    text = path.read_text(encoding="utf-8")
    rows: Any
    if path.suffix == ".jsonl":
        rows = [json.loads(line) for line in text.splitlines() if line.strip()]
    else:
        data = json.loads(text)
        lists = [value for value in data.values() if isinstance(value, list)] if isinstance(data, dict) else [data]
        rows = lists[0] if lists else None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError("it must have an object for each question")
    return rows


def _question(
    row: Mapping[str, Any], folder: Path, number: int, shown: bool, frames: list[Image.Image] | None = None
) -> Question:
    """The question of a row; `frames` are those of its video, if it has one in place of pictures."""
    found = {kind: next((row[n] for n in names if row.get(n)), None) for kind, names in FIELDS.items()}
    pictures, prompt = found["images"], found["prompt"]
    if pictures is not None and not shown:
        raise BenchError(f"question {number + 1} shows a picture, and the model reads text alone; give prompts without")
    if (pictures is None and frames is None and shown) or (prompt is None and set(row) != {"image"}):
        missing = "picture" if pictures is None and frames is None else "prompt"
        raise BenchError(
            f"question {number + 1} has no {missing}: its fields are {', '.join(row)}. Pictures are looked for in "
            f"{', '.join(FIELDS['images'])}, videos in {', '.join(VIDEOS)}, prompts in {', '.join(FIELDS['prompt'])}"
        )
    pictures = pictures if isinstance(pictures, list) else [] if pictures is None else [pictures]
    first, *later = prompt if isinstance(prompt, list) else [prompt or ""]
    category = str(found["category"]) if found["category"] else "all"
    seen = frames if frames is not None else [_picture(one, folder) for one in pictures]
    return Question(tuple(seen), str(first), category, frames is not None, tuple(map(str, later)))


def _picture(one: str | Mapping[str, Any], folder: Path) -> Image.Image:
    """The picture at a path (beside the list or in its `images/`), or in a parquet cell: {bytes, path}."""
    if not isinstance(one, str) and one.get("bytes"):
        return decode(one["bytes"], one.get("path") or "picture in the list")
    name = one if isinstance(one, str) else one["path"]
    places = [folder / name, folder / "images" / name]
    return load_image(next((place for place in places if place.is_file()), places[0]))
