"""Where training prompts come from: pictures with questions, in a folder, a list, a dataset, or drawn; or texts."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

_SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif"}
_PROMPTS = ("Describe this image in detail.", "What is shown in this picture? Please answer with at least 1000 words.")


class UnreadableError(ValueError):
    """A picture that is not there, or cannot be decoded; the message says which and why."""


@dataclass(frozen=True)
class Sample:
    """One prompt, about some images or for one; the target itself writes or draws the answer."""

    load: Callable[[], list[Image.Image]]  # upright RGB; may raise UnreadableError
    prompt: str
    images: int = 1  # how many `load` gives


def read(source: str, limit: int | None = None, seed: int = 0) -> Sequence[Sample]:
    """Samples of a source.

    Args:
        source: one of
            - a folder of images;
            - a `.jsonl` file with `prompt` (or `question`) and `image` or `images` per line, paths relative to it;
              lines without images are text alone;
            - `hf:owner/name[:split]`, a dataset with the same columns, or with `conversations`, of which the first
              turn is asked;
            - `scenes:N`, `clips:N`, `zoo:N`: drawn pictures, drawn clips of eight frames, and the mixture for the
              embedded models: a third single pictures, a sixth pairs, half clips of four to eight frames;
            - `prompts:FILE`, one per line, without images; `pictures:N`, prompts of the zoo's picture generator.
        limit: use at most so many.
        seed: of what is drawn.

    Raises:
        ValueError: a source of another form, or one without samples.
    """
    kind, _, rest = source.partition(":")
    if kind in _DRAWN and rest.isdecimal():
        samples: Sequence[Sample] = [_DRAWN[kind](index, seed) for index in range(int(rest))]
    elif kind == "prompts" and Path(rest).is_file():
        samples = [Sample(list, line.strip(), 0) for line in Path(rest).read_text().splitlines() if line.strip()]
    elif kind == "hf":
        samples = _dataset(rest)
    elif Path(source).is_dir():
        samples = _folder(Path(source))
    elif Path(source).suffix == ".jsonl" and Path(source).is_file():
        samples = list(_lines(Path(source)))
    else:
        raise ValueError(
            f"unknown data source {source!r}; give a folder of images, a .jsonl file, hf:owner/name[:split], "
            "scenes:N, clips:N, zoo:N or, without images, prompts:FILE or pictures:N"
        )
    if not samples:
        raise ValueError(f"{source} holds no samples; a folder needs images ({', '.join(sorted(_SUFFIXES))})")
    return samples[:limit]


@contextlib.contextmanager
def _reading(name: str) -> Iterator[None]:
    """What goes wrong inside is the fault of the picture of that name."""
    try:
        yield
    except Exception as error:  # a decoder fed with damaged bytes may raise anything at all
        raise UnreadableError(f"{name}: {type(error).__name__}: {error}") from error


def _upright(image: Image.Image) -> Image.Image:
    """As RGB, turned as its EXIF orientation says."""
    return ImageOps.exif_transpose(image).convert("RGB")


def _open(*paths: Path) -> Callable[[], list[Image.Image]]:
    def one(path: Path) -> Image.Image:
        with _reading(str(path)), Image.open(path) as image:
            return _upright(image)

    return lambda: [one(path) for path in paths]


def _folder(folder: Path) -> list[Sample]:
    paths = sorted(p for p in folder.rglob("*") if p.suffix.lower() in _SUFFIXES)
    return [Sample(_open(path), _PROMPTS[i % len(_PROMPTS)]) for i, path in enumerate(paths)]


def _lines(path: Path) -> Iterator[Sample]:
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
            images = item.get("images") or ([item["image"]] if "image" in item else [])
            prompt = item.get("prompt") or item["question"]
        except (json.JSONDecodeError, KeyError, AttributeError) as error:
            raise ValueError(
                f"{path}, line {number}: a sample needs 'prompt' or 'question', and 'image' or 'images' unless it is "
                f"text alone; {error!r}"
            ) from error
        yield Sample(_open(*(path.parent / name for name in images)), prompt, len(images))


def _dataset(name: str) -> list[Sample]:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ValueError("a data set hf:owner/name needs the library datasets; pip install datasets") from error
    repo, _, split = name.partition(":")
    table = load_dataset(repo, split=split or "train")
    columns = set(table.column_names)
    pictures = next((k for k in ("images", "image") if k in columns), None)
    words = next((k for k in ("prompt", "question", "conversations") if k in columns), None)
    if pictures is None and words is None:
        raise ValueError(f"{name} needs 'image', 'images', 'prompt', 'question' or 'conversations'; it has {columns}")

    def load(index: int, column: str) -> list[Image.Image]:
        with _reading(f"hf:{name}, row {index}"):
            found = table[index][column]
            return [_upright(image) for image in (found if isinstance(found, list) else [found])]

    def sample(index: int) -> Sample:
        prompt = _asked(texts[index]) if texts is not None else ""
        count = 0 if pictures is None else len(bare[index][pictures][0]) if pictures == "images" else 1
        return Sample(
            partial(load, index, pictures) if count and pictures else list,
            prompt or _PROMPTS[index % len(_PROMPTS)],
            count,
        )

    texts = table[words] if words else None
    bare = table.with_format("arrow")  # counts images without decoding them
    return [sample(index) for index in range(len(table))]


def _asked(words: Any) -> str:
    """The question of a cell: itself, or the first turn of a conversation (LLaVA's and ShareGPT's form)."""
    if isinstance(words, list):
        first = words[0] if words else {}
        words = first.get("value") or first.get("content") or ""
    return str(words or "").replace("<image>", "").strip()


def _scene(index: int, seed: int) -> Sample:
    from mmspec.zoo import language, scenes

    def draw() -> list[Image.Image]:
        return [scenes.render(scenes.draw(np.random.default_rng([seed, 77, index])))]

    prompts = tuple(language.PROMPTS.values())
    return Sample(draw, prompts[index % len(prompts)])


def _pair(index: int, seed: int) -> Sample:
    """Two pictures, one of which is to be told."""
    from mmspec.zoo import language, scenes
    from mmspec.zoo.recipes import Mix

    rng = np.random.default_rng([seed, 79, index])
    pair = (scenes.draw(rng), scenes.draw(rng))
    told = language.pair_question(rng, pair, Mix())
    while told.kind not in ("pair-short", "pair-names"):
        told = language.pair_question(rng, pair, Mix())
    return Sample(lambda: [scenes.render(scene) for scene in pair], told.prompt, 2)


def _clip(index: int, seed: int, frames: int = 8) -> Sample:
    """The frames of a clip, in which something moves."""
    from mmspec.zoo import clips

    rng = np.random.default_rng([seed, 80, index])
    clip = clips.draw(rng)
    return Sample(lambda: clips.frames(clip, frames), clips.describe(rng, clip).prompt, frames)


def _mixed(index: int, seed: int) -> Sample:
    turn = ("picture", "clip", "pair", "clip", "picture", "clip")[index % 6]
    if turn == "clip":
        return _clip(index, seed, int(np.random.default_rng([seed, 81, index]).integers(4, 9)))
    return _pair(index, seed) if turn == "pair" else _scene(index // 2, seed)  # so that all its prompts come


def _picture(index: int, seed: int) -> Sample:
    """A prompt of the picture generator."""
    from mmspec.zoo import pictures

    rng = np.random.default_rng([seed, 78, index])
    return Sample(list, pictures.caption(pictures.draw(rng), rng), 0)


_DRAWN: dict[str, Callable[[int, int], Sample]] = {
    "scenes": _scene, "clips": _clip, "zoo": _mixed, "pictures": _picture,
}  # fmt: skip


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


def lengths_sorted(lengths: Sequence[Any], size: int) -> list[list[int]]:
    """Indices grouped into batches of similar length, so that padding is small."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    return [order[i : i + size] for i in range(0, len(order), size)]
