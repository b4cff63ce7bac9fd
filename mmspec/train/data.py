"""Sources of training prompts: pictures with questions from a folder, list or dataset, drawn pictures, or texts."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from PIL import Image

from mmspec import media
from mmspec.media import MediaError

VIDEOS = ("video", "videos", "video_path", "video_paths")
_PROMPTS = ("Describe this image in detail.", "What is shown in this picture? Please answer with at least 1000 words.")


class UnreadableError(ValueError):
    """A picture that is missing or cannot be decoded; the message says which and why."""


class VideoError(ValueError):
    """A row with more than one video, or with a video where videos are not read; the message says what to do."""


class Clips(Protocol):
    """Decodes videos; the decoder belongs to the application, which runs it in a separate process."""

    @property
    def count(self) -> int:
        """The largest number of frames of a video."""

    def __call__(self, cell: object, folders: Sequence[Path], where: str, /) -> list[Image.Image]:
        """The frames of a cell's video, or of the file below these folders that it names; raises MediaError."""


@dataclass(frozen=True)
class TrainingSample:
    """One prompt with images, or for image generation; the target itself generates the answer."""

    load: Callable[[], list[Image.Image]]  # upright RGB; may raise UnreadableError
    prompt: str
    images: int = 1  # number of images of `load`, of a video the largest
    clip: bool = False  # the images are the frames of a video
    name: str = ""  # by which `hold_out` chooses: its file, pictures, prompt or row; none if it was drawn at random
    files: tuple[Path, ...] = ()  # of its pictures or video, as far as they are files of their own
    key: str = ""  # under which the target's answer is stored; Distillation gives it

    def stamp(self) -> str:
        """Size and modification time of its files, which change when one of them does; empty without files."""
        facts = []
        for path in self.files:
            with contextlib.suppress(OSError, ValueError):  # ValueError: a zero byte in a name from a list
                status = path.stat()
                facts.append(f"{status.st_size}-{status.st_mtime_ns}")
        return ",".join(facts)


def hold_out(samples: Sequence[TrainingSample], count: int, seed: int) -> list[int]:
    """Indices of the samples to measure on: those whose names have the smallest hashes, so that they are a sample of
    all and stay the same if others are added; of samples drawn at random the first ones, which are one, too. They are
    `count`, and others that belong to the last: all questions about a picture stand on one side."""
    ranks = sorted(zip(_ranks(samples, seed), range(len(samples)), strict=True))
    last = ranks[count - 1 : count]
    return [index for place, (name, index) in enumerate(ranks) if place < count or (name and name == last[0][0])]


def _ranks(samples: Sequence[TrainingSample], seed: int) -> list[str]:
    """The hash of each sample's name, or of the first name of those that share a name or a file with it, also by way of
    others; empty for samples drawn at random."""
    above: dict[str, str] = {}  # names and files, as trees; what is in one tree belongs together

    def root(what: str) -> str:
        while (up := above.setdefault(what, what)) != what:
            above[what], what = above[up], up
        return what

    for sample in samples:
        for path in sample.files:
            above[root(os.path.abspath(path))] = root(sample.name)
    first: dict[str, str] = {}
    for name in sorted({sample.name for sample in samples}):
        first.setdefault(root(name), name)
    names = [first[root(sample.name)] for sample in samples]
    hashes = (hashlib.sha256(f"{seed} {name}".encode("utf-8", "surrogatepass")) for name in names)
    return [h.hexdigest() if name else "" for name, h in zip(names, hashes, strict=True)]


def read(source: str, limit: int | None = None, seed: int = 0, clips: Clips | None = None) -> Sequence[TrainingSample]:
    """Samples of a source.

    Args:
        source: one of
            - a folder of images, with its subfolders, without hidden files;
            - a `.jsonl` file with `prompt` (or `question`) and `image`, `images` or `video` per line; paths are
              relative to its folder and must be inside it; lines without images or video are text only;
            - `hf:owner/name[:split]`, a dataset with the same columns, or with `conversations`, whose first turn is the
              prompt;
            - `scenes:N`, drawn pictures, and the other names of DRAWN;
            - `prompts:FILE`, one per line, without images; `pictures:N`, prompts of the zoo's picture generator.
        limit: largest number of samples.
        seed: of drawn samples.
        clips: decodes videos; None: rows with videos raise an error.

    Raises:
        ValueError: an unknown source, or one without samples.
    """
    kind, _, rest = source.partition(":")
    if kind in DRAWN and rest.isdecimal():
        samples: Sequence[TrainingSample] = [DRAWN[kind](index, seed) for index in range(int(rest))]
    elif kind == "prompts" and Path(rest).is_file():
        lines = map(str.strip, Path(rest).read_text(encoding="utf-8-sig").split("\n"))
        samples = [TrainingSample(list, line, 0, name=line) for line in lines if line]
    elif kind == "hf":
        samples = _dataset(rest, clips, limit)
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
        images = f"a folder of images: {', '.join(sorted(media.EXTENSIONS))}"
        needs = "one prompt per line" if kind == "prompts" else images
        raise ValueError(f"{source} holds no samples; it needs {needs}")
    return samples[:limit]


def _shown(read: Callable[[], bytes], name: str) -> Image.Image:
    """A picture from bytes, upright in RGB, within the formats and limits of `mmspec.media`."""
    try:
        return media.decode(read(), name)
    except MediaError as error:
        raise UnreadableError(f"{error.path}: {error.reason}") from error


def _open(*paths: Path) -> Callable[[], list[Image.Image]]:
    return lambda: [_shown(partial(media.read, path), str(path)) for path in paths]


def _open_cells(cells: Sequence[object], folders: list[Path], where: str) -> Callable[[], list[Image.Image]]:
    """Loads the pictures of a row's cells, or of the files below these folders that they name."""
    named = [(cell, f"{where} ({cell[:200]})" if isinstance(cell, str) else where) for cell in cells]
    return lambda: [_shown(partial(media.cell, cell, folders, name), name) for cell, name in named]


def _open_clip(cell: object, folders: list[Path], where: str, clips: Clips) -> Callable[[], list[Image.Image]]:
    """Loads the frames of a cell's video, or of the file below these folders that it names."""

    def frames() -> list[Image.Image]:
        try:
            return clips(cell, folders, where)
        except MediaError as error:
            raise UnreadableError(f"{where}: {error.reason}") from error

    return frames


def _folder(folder: Path) -> list[TrainingSample]:
    files = [p for p in folder.rglob("*") if not any(part.startswith(".") for part in p.relative_to(folder).parts)]
    paths = sorted(p for p in files if p.suffix.lower() in media.EXTENSIONS)
    others = [p for p in files if p.suffix.lower() not in media.EXTENSIONS and p.is_file()]
    if others:
        films = sum(p.suffix.lower() in media.FILMS for p in others)
        how = " (a .jsonl can name them, with prompts)" if films else ""
        warnings.warn(
            f"left out of {folder}, no pictures: videos: {films}{how}, others: {len(others) - films}", stacklevel=3
        )
    names = [path.relative_to(folder).as_posix() for path in paths]
    prompts = [_PROMPTS[zlib.crc32(name.encode(errors="surrogateescape")) % len(_PROMPTS)] for name in names]
    return [
        TrainingSample(_open(path), prompt, name=name, files=(path,))
        for name, prompt, path in zip(names, prompts, paths, strict=True)
    ]


def _lines(path: Path, clips: Clips | None) -> Iterator[TrainingSample]:
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
            video = video_of(item, clips is not None)
            images = item.get("images") or ([item["image"]] if "image" in item else [])
            prompt = item.get("prompt") or item.get("question")
            if not isinstance(prompt, str) or not prompt.strip() or not isinstance(images, list):
                raise TypeError("the prompt must be a string that is not empty, and 'images' a list")
        except VideoError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise ValueError(
                f"{path}, line {number}: a sample needs 'prompt' or 'question', and 'image' or 'images' unless it is "
                f"text alone; {error!r}"
            ) from error
        where = f"{path}, line {number}"
        name = str(video or images or prompt)  # the same for all questions about a picture
        files = tuple(path.parent / cell for cell in (video, *images) if isinstance(cell, str))
        if video is not None and clips is not None:
            yield TrainingSample(_open_clip(video, [path.parent], where, clips), prompt, clips.count, True, name, files)
        else:
            yield TrainingSample(_open_cells(images, [path.parent], where), prompt, len(images), False, name, files)


def video_of(row: Mapping[str, object], allowed: bool) -> object:
    """The video of a row: a path or the value of a video column; None: it has none.

    Raises VideoError: it has one, and none is `allowed`; it has several, or pictures as well.
    """
    videos = {name: row[name] for name in VIDEOS if row.get(name)}
    if not videos:
        return None
    (name, value), *others = videos.items()
    if not allowed:
        raise VideoError(
            f"{name!r} holds a video, and only pictures are read here; give its frames as 'images', or leave it out"
        )
    values = value if isinstance(value, list) else [value]
    more = [other for other in ("image", "images") if row.get(other)] + [other for other, _ in others]
    if len(values) > 1 or more:
        what = f"{len(values)} videos" if len(values) > 1 else f"a video beside {more[0]!r}"
        raise VideoError(f"a sample shows pictures or one video; this one shows {what}")
    return values[0]


def _dataset(name: str, clips: Clips | None, limit: int | None) -> list[TrainingSample]:
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
        video_of(dict.fromkeys(columns, True), clips is not None)  # raises for columns that are wrong in every row
    questions = next((k for k in ("prompt", "question", "conversations") if k in columns), None)
    if pictures is None and videos is None and questions is None:
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

    def sample(index: int, cell: Any) -> TrainingSample:
        own = _question(texts[index]) if texts is not None else ""
        prompt, name = own or _PROMPTS[index % len(_PROMPTS)], _mark(cell) or own or str(index)
        if videos is not None and clips is not None:
            return TrainingSample(partial(frames, index), prompt, clips.count, True, name)
        count = 0 if pictures is None else len(cell.values or ()) if pictures == "images" else 1
        opened = partial(load, index, pictures) if count and pictures else list
        return TrainingSample(opened, prompt, count, name=name)

    texts = table.select_columns([questions]).with_format("arrow")[:][questions].to_pylist() if questions else None
    bare = table.with_format("arrow")  # so that the library decodes no media, and opens no file that a row names
    shown = pictures if videos is None else videos
    parts = (part[shown] for part in bare.select_columns([shown]).iter(1000)) if shown else [itertools.repeat(None)]
    cells = itertools.chain.from_iterable(parts)
    return [sample(index, cell) for index, cell in zip(range(len(table))[:limit], cells, strict=False)]


def _mark(cell: Any) -> str:
    """A name of the pictures or the video in an Arrow cell, the same in every row that shows them; empty if there are
    none. Of bytes it takes their number and 4 KiB from the middle, so that a large data set is not read as a whole."""
    if cell is None or not cell.is_valid:
        return ""
    if isinstance(cell, Mapping):
        return _mark(cell.get("bytes")) or _mark(cell.get("path"))
    if isinstance(cell, Sequence):
        return " ".join(filter(None, map(_mark, cell)))
    content = memoryview(cell.as_buffer()) if hasattr(cell, "as_buffer") else memoryview(str(cell).encode())
    middle = content[max(0, len(content) // 2 - 2048) :][:4096]
    return f"{len(content)}-{hashlib.sha256(middle).hexdigest()}" if len(content) else ""


def _question(cell: object) -> str:
    """The question in a cell: its text, or the first turn of a conversation (in LLaVA's and ShareGPT's format)."""
    if isinstance(cell, list):
        first = cell[0] if cell else ""
        cell = (first.get("value") or first.get("content")) if isinstance(first, dict) else first
    return str(cell or "").replace("<image>", "").strip()


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


# Name → function of an index and a seed. `benchmarks/zoo/sources.py` adds those of the embedded models' training.
DRAWN: dict[str, Callable[[int, int], TrainingSample]] = {"scenes": _scene, "pictures": _picture}


def batches(
    lengths: Sequence[tuple[int, ...]], size: int, seed: int, start: int, process: int = 0, processes: int = 1
) -> Iterator[list[int]]:
    """Endless batches of indices from step `start` on; a step's batch is the same in a resumed run.

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
