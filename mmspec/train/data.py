"""Where training prompts come from: images with questions, in a folder, a JSONL list, a dataset, or drawn; or texts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

_SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif"}
_PROMPTS = ("Describe this image in detail.", "What is shown in this picture? Please answer with at least 1000 words.")


@dataclass(frozen=True)
class Sample:
    """One prompt, about some images or for one; the target itself writes or draws the answer."""

    load: Callable[[], list[Image.Image]]
    prompt: str


def read(source: str, limit: int | None = None, seed: int = 0) -> Sequence[Sample]:
    """Samples of a source.

    Args:
        source: `scenes:N` (drawn on the fly), a folder of images, a `.jsonl` file with `image` (or `images`) and
            `prompt` (or `question`) per line, paths relative to it, or `hf:owner/name[:split]` with an `image` column.
            For a target that draws: `prompts:FILE`, one per line, or `pictures:N`, prompts of the zoo's generator.
        limit: use at most so many.
        seed: of drawn scenes.

    Raises:
        ValueError: a source of another form, or one without samples.
    """
    if source.startswith("scenes:"):
        samples: Sequence[Sample] = _scenes(int(source.partition(":")[2]), seed)
    elif source.startswith("prompts:") and Path(source[8:]).is_file():
        samples = [Sample(list, line.strip()) for line in Path(source[8:]).read_text().splitlines() if line.strip()]
    elif source.startswith("pictures:"):
        samples = _pictures(int(source.partition(":")[2]), seed)
    elif source.startswith("hf:"):
        samples = _dataset(source[3:])
    elif Path(source).is_dir():
        samples = _folder(Path(source))
    elif Path(source).suffix == ".jsonl" and Path(source).is_file():
        samples = list(_lines(Path(source)))
    else:
        raise ValueError(
            f"unknown data source {source!r}; give scenes:N, a folder of images, a .jsonl file, hf:owner/name[:split] "
            "or, for a model that draws, prompts:FILE or pictures:N"
        )
    if not samples:
        raise ValueError(f"{source} holds no samples; a folder needs images ({', '.join(sorted(_SUFFIXES))})")
    return samples[:limit]


def _open(*paths: Path) -> Callable[[], list[Image.Image]]:
    return lambda: [Image.open(path).convert("RGB") for path in paths]


def _folder(folder: Path) -> list[Sample]:
    paths = sorted(p for p in folder.rglob("*") if p.suffix.lower() in _SUFFIXES)
    return [Sample(_open(path), _PROMPTS[i % len(_PROMPTS)]) for i, path in enumerate(paths)]


def _lines(path: Path) -> Iterator[Sample]:
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
            images = item.get("images") or [item["image"]]
            prompt = item.get("prompt") or item["question"]
        except (json.JSONDecodeError, KeyError, AttributeError) as error:
            raise ValueError(
                f"{path}, line {number}: a sample needs 'image' or 'images', and 'prompt' or 'question'; {error!r}"
            ) from error
        yield Sample(_open(*(path.parent / name for name in images)), prompt)


def _dataset(name: str) -> list[Sample]:
    from datasets import load_dataset

    repo, _, split = name.partition(":")
    table = load_dataset(repo, split=split or "train")

    def sample(index: int) -> Sample:
        question = next((table[index][k] for k in ("prompt", "question") if k in table.column_names), None)
        return Sample(partial(image, index), question or _PROMPTS[index % len(_PROMPTS)])

    def image(index: int) -> list[Image.Image]:
        return [table[index]["image"].convert("RGB")]

    if "image" not in table.column_names:
        raise ValueError(f"{name} needs a column 'image'; it has {', '.join(table.column_names)}")
    return [sample(index) for index in range(len(table))]


def _scenes(count: int, seed: int) -> list[Sample]:
    from mmspec.zoo import language, scenes

    prompts = tuple(language.PROMPTS.values())

    def draw(index: int) -> list[Image.Image]:
        return [scenes.render(scenes.draw(np.random.default_rng([seed, 77, index])))]

    return [Sample(partial(draw, index), prompts[index % len(prompts)]) for index in range(count)]


def _pictures(count: int, seed: int) -> list[Sample]:
    from mmspec.zoo import pictures

    generators = (np.random.default_rng([seed, 78, index]) for index in range(count))
    return [Sample(list, pictures.caption(pictures.draw(rng), rng)) for rng in generators]


def batches(count: int, size: int, seed: int, start: int, process: int = 0, processes: int = 1) -> Iterator[list[int]]:
    """Endless batches of indices, the same for a step number whether the run was resumed or not."""
    step = start
    while True:
        chosen = np.random.default_rng([seed, step]).choice(count, size=min(count, size * processes), replace=False)
        yield [int(i) for i in chosen[process::processes]]
        step += 1


def lengths_sorted(items: Sequence[Any], size: int) -> list[list[int]]:
    """Indices grouped into batches of similar length, so that padding is small."""
    order = sorted(range(len(items)), key=lambda i: len(items[i]))
    return [order[i : i + size] for i in range(0, len(order), size)]
