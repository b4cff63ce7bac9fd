"""Where training prompts come from: pictures with questions, in a folder, a list, a dataset, or drawn; or texts."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
from PIL import Image

from mmspec import media
from mmspec.media import MediaError

_SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif"}
VIDEOS = ("video", "videos", "video_path", "video_paths")
_PROMPTS = ("Describe this image in detail.", "What is shown in this picture? Please answer with at least 1000 words.")


class UnreadableError(ValueError):
    """A picture that is not there, or cannot be decoded; the message says which and why."""


class VideoError(ValueError):
    """Rows with more than one video, or with one where videos are not read; the message says what to do."""


class Clips(Protocol):
    """Decodes videos; the decoder is the application's, which keeps it in a process of its own."""

    @property
    def count(self) -> int:
        """Frames of a video, at most."""

    def __call__(self, held: object, folders: Sequence[Path], where: str, /) -> list[Image.Image]:
        """The frames of what a cell holds, or names below these folders; raises MediaError."""


@dataclass(frozen=True)
class TrainingSample:
    """One prompt, about some images or for one; the target itself writes or draws the answer."""

    load: Callable[[], list[Image.Image]]  # upright RGB; may raise UnreadableError
    prompt: str
    images: int = 1  # how many `load` gives, of a clip at most
    clip: bool = False  # they are the frames of a video


def read(source: str, limit: int | None = None, seed: int = 0, clips: Clips | None = None) -> Sequence[TrainingSample]:
    """Samples of a source.

    Args:
        source: one of
            - a folder of images, with its subfolders, but for hidden files;
            - a `.jsonl` file with `prompt` (or `question`) and `image`, `images` or `video` per line, paths relative to
              it, of files below its folder; lines without them are text alone;
            - `hf:owner/name[:split]`, a dataset with the same columns, or with `conversations`, of which the first
              turn is asked;
            - `scenes:N`, drawn pictures, and whatever else DRAWN names;
            - `prompts:FILE`, one per line, without images; `pictures:N`, prompts of the zoo's picture generator.
        limit: use at most so many.
        seed: of what is drawn.
        clips: what decodes videos; None: rows with videos are refused.

    Raises:
        ValueError: a source of another form, or one without samples.
    """
    kind, _, rest = source.partition(":")
    if kind in DRAWN and rest.isdecimal():
        samples: Sequence[TrainingSample] = [DRAWN[kind](index, seed) for index in range(int(rest))]
    elif kind == "prompts" and Path(rest).is_file():
        samples = [
            TrainingSample(list, line.strip(), 0) for line in Path(rest).read_text().splitlines() if line.strip()
        ]
    elif kind == "hf":
        samples = _dataset(rest, clips)
    elif Path(source).is_dir():
        samples = _folder(Path(source))
    elif Path(source).suffix == ".jsonl" and Path(source).is_file():
        samples = list(_lines(Path(source), clips))
    else:
        raise ValueError(
            f"unknown data source {source!r}; give a folder of images, a .jsonl file, hf:owner/name[:split], "
            f"{':N, '.join(DRAWN)}:N or, without images, prompts:FILE"
        )
    if not samples:
        needs = "a prompt a line" if kind == "prompts" else f"a folder needs images ({', '.join(sorted(_SUFFIXES))})"
        raise ValueError(f"{source} holds no samples; {needs}")
    return samples[:limit]


def _shown(read: Callable[[], bytes], name: str) -> Image.Image:
    """A picture out of bytes, upright in RGB, within the formats and limits of `mmspec.media`."""
    try:
        return media.decode(read(), name)
    except MediaError as error:
        raise UnreadableError(f"{error.path}: {error.reason}") from error


def _open(*paths: Path) -> Callable[[], list[Image.Image]]:
    return lambda: [_shown(partial(media.read, path), str(path)) for path in paths]


def _open_cells(cells: Sequence[object], folders: list[Path], where: str) -> Callable[[], list[Image.Image]]:
    """The pictures that a row holds, or names below these folders."""
    named = [(cell, f"{where} ({cell[:200]})" if isinstance(cell, str) else where) for cell in cells]
    return lambda: [_shown(partial(media.cell, cell, folders, name), name) for cell, name in named]


def _open_clip(held: object, folders: list[Path], where: str, clips: Clips) -> Callable[[], list[Image.Image]]:
    """The frames of the video that a row holds, or names below these folders."""

    def frames() -> list[Image.Image]:
        try:
            return clips(held, folders, where)
        except MediaError as error:
            raise UnreadableError(f"{where}: {error.reason}") from error

    return frames


def _folder(folder: Path) -> list[TrainingSample]:
    pictures = (p for p in folder.rglob("*") if p.suffix.lower() in _SUFFIXES)
    paths = sorted(p for p in pictures if not any(part.startswith(".") for part in p.relative_to(folder).parts))
    return [TrainingSample(_open(path), _PROMPTS[i % len(_PROMPTS)]) for i, path in enumerate(paths)]


def _lines(path: Path, clips: Clips | None) -> Iterator[TrainingSample]:
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
            video = video_of(item, clips is not None)
            images = item.get("images") or ([item["image"]] if "image" in item else [])
            prompt = item.get("prompt") or item["question"]
            if not isinstance(prompt, str) or not isinstance(images, list):
                raise TypeError("the prompt is a text, and 'images' a list")
        except VideoError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise ValueError(
                f"{path}, line {number}: a sample needs 'prompt' or 'question', and 'image' or 'images' unless it is "
                f"text alone; {error!r}"
            ) from error
        where = f"{path}, line {number}"
        if video is not None and clips is not None:
            yield TrainingSample(_open_clip(video, [path.parent], where, clips), prompt, clips.count, clip=True)
        else:
            yield TrainingSample(_open_cells(images, [path.parent], where), prompt, len(images))


def video_of(row: Mapping[str, object], allowed: bool) -> object:
    """The video that a row shows: a path or what a column of videos holds; None: it shows none.

    Raises:
        VideoError: it shows one, and none is `allowed`; it shows several, or pictures beside it.
    """
    videos = {name: row[name] for name in VIDEOS if row.get(name)}
    if not videos:
        return None
    (name, held), *others = videos.items()
    if not allowed:
        raise VideoError(
            f"{name!r} holds a video, and only pictures are read here; give its frames as 'images', or leave it out"
        )
    held = held if isinstance(held, list) else [held]
    beside = [other for other in ("image", "images") if row.get(other)] + [other for other, _ in others]
    if len(held) > 1 or beside:
        what = f"{len(held)} videos" if len(held) > 1 else f"a video beside {beside[0]!r}"
        raise VideoError(f"a sample shows pictures or one video; this one shows {what}")
    return held[0]


def _dataset(name: str, clips: Clips | None) -> list[TrainingSample]:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ValueError("a data set hf:owner/name needs the library datasets; pip install datasets") from error
    repo, _, split = name.partition(":")
    table = load_dataset(repo, split=split or "train")
    columns = set(table.column_names)
    pictures = next((k for k in ("images", "image") if k in columns), None)
    videos = next((k for k in VIDEOS if k in columns), None)
    if videos is not None:
        video_of(dict.fromkeys(columns, True), clips is not None)  # what is wrong with the columns is wrong in each row
    words = next((k for k in ("prompt", "question", "conversations") if k in columns), None)
    if pictures is None and videos is None and words is None:
        raise ValueError(
            f"{name} needs 'image', 'images', 'video', 'prompt', 'question' or 'conversations'; it has {columns}"
        )

    folders = media.dataset_folders(repo)

    def load(index: int, column: str) -> list[Image.Image]:
        cell = bare[index][column][0].as_py()
        return _open_cells(cell if isinstance(cell, list) else [cell], folders, f"hf:{name}, row {index + 1}")()

    def frames(index: int) -> list[Image.Image]:
        assert clips is not None
        where = f"hf:{name}, row {index + 1}"
        try:
            video = video_of({"video": bare[index][videos][0].as_py()}, True)
        except VideoError as error:
            raise UnreadableError(f"{where}: {error}") from error
        return _open_clip(video, folders, where, clips)()

    def sample(index: int) -> TrainingSample:
        prompt = _asked(texts[index]) if texts is not None else ""
        if videos is not None and clips is not None:
            question = prompt or _PROMPTS[index % len(_PROMPTS)]
            return TrainingSample(partial(frames, index), question, clips.count, clip=True)
        count = 0 if pictures is None else len(bare[index][pictures][0]) if pictures == "images" else 1
        return TrainingSample(
            partial(load, index, pictures) if count and pictures else list,
            prompt or _PROMPTS[index % len(_PROMPTS)],
            count,
        )

    texts = table.select_columns([words]).with_format("arrow")[:][words].to_pylist() if words else None
    bare = table.with_format("arrow")  # the library decodes nothing, and opens nothing that a row names
    return [sample(index) for index in range(len(table))]


def _asked(words: object) -> str:
    """The question of a cell: itself, or the first turn of a conversation (LLaVA's and ShareGPT's form)."""
    if isinstance(words, list):
        first = words[0] if words else ""
        words = (first.get("value") or first.get("content")) if isinstance(first, dict) else first
    return str(words or "").replace("<image>", "").strip()


def _scene(index: int, seed: int) -> TrainingSample:
    from mmspec.zoo import PROMPTS, scenes

    def draw() -> list[Image.Image]:
        return [scenes.render(scenes.draw(np.random.default_rng([seed, 77, index])))]

    prompts = tuple(PROMPTS.values())
    return TrainingSample(draw, prompts[index % len(prompts)])


def _picture(index: int, seed: int) -> TrainingSample:
    """A prompt of the picture generator."""
    from mmspec.zoo import pictures

    rng = np.random.default_rng([seed, 78, index])
    return TrainingSample(list, pictures.caption(pictures.draw(rng), rng), 0)


# By name: a sample by its index and a seed. `benchmarks/zoo/sources.py` adds those of the embedded models' training.
DRAWN: dict[str, Callable[[int, int], TrainingSample]] = {"scenes": _scene, "pictures": _picture}


def batches(
    lengths: Sequence[tuple[int, ...]], size: int, seed: int, start: int, process: int = 0, processes: int = 1
) -> Iterator[list[int]]:
    """Endless batches of indices, the same for a step number whether the run was resumed or not.

    A batch holds items of similar length, so that padding is small: every epoch is shuffled, sorted by length within
    stretches of eight batches, and its batches are shuffled.
    """
    whole = min(len(lengths), size * processes)
    count, drawn = len(lengths) // whole, -1
    order: list[list[int]] = []
    for step in itertools.count(start):
        epoch, place = divmod(step, count)
        if epoch != drawn:
            rng, drawn = np.random.default_rng([seed, epoch]), epoch
            mixed = rng.permutation(len(lengths))[: count * whole].tolist()
            for i in range(0, len(mixed), 8 * whole):
                mixed[i : i + 8 * whole] = sorted(mixed[i : i + 8 * whole], key=lengths.__getitem__)
            order = [mixed[i * whole : (i + 1) * whole] for i in rng.permutation(count)]
        yield order[place][process::processes]


def lengths_sorted(lengths: Sequence[tuple[int, int]], size: int) -> list[list[int]]:
    """Indices grouped into batches of similar length, so that padding is small."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    return [order[i : i + size] for i in range(0, len(order), size)]
