"""Many pictures of one method with their cost, kept in a folder so that a stopped run can be resumed."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image

from mmspec.app.bench.command import BenchError, seeds_of
from mmspec.app.bench.image import ImageBench
from mmspec.app.compare import Method
from mmspec.app.files import write_whole
from mmspec.app.painter import ImageResult, ImageSubject


@dataclass
class Gallery:
    """Pictures in the order of their prompts, and sums over the calls that drew them."""

    images: list[Image.Image] = field(default_factory=list)
    spent: list[float] = field(default_factory=list)
    seconds: float = 0.0
    row_rounds: int = 0
    tokens: int = 0  # of one picture

    def add(self, painting: ImageResult) -> None:
        self.images += painting.images
        self.spent += painting.spent
        self.seconds += painting.seconds
        self.row_rounds += painting.stats.row_rounds
        self.tokens = painting.tokens[0].numel()

    @property
    def forwards(self) -> float:
        """Forwards of the target per picture, including the prefill."""
        return self.row_rounds / len(self.images) + 1

    @property
    def compression(self) -> float:
        return self.tokens / self.forwards


def gallery_of(
    bench: ImageBench, method: Method, run: int, conditions: Sequence[str | int], args: argparse.Namespace
) -> Gallery:
    """The pictures of a method's run, one per prompt, drawn or read from the folder of --pictures."""
    bench.go(method)
    keep = None if args.pictures is None else args.pictures / slug(method.name, run)
    facts = {"setting": method.setting, "settings": bench.painter.settings, "model": args.model}
    seeds = seeds_of(run, len(conditions), bench.seed)
    return fill(bench.painter, conditions, seeds, args.quality_batch, keep, facts)


def slug(name: str, run: int) -> str:
    return re.sub(r"[^A-Za-z0-9.+=-]+", "_", name).strip("_") + f".{run}"


def fill(
    painter: ImageSubject, conditions: Sequence[str | int], seeds: Sequence[int], batch: int, folder: Path | None,
    facts: Mapping[str, object],
) -> Gallery:  # fmt: skip
    """Draw pictures that are not in the folder yet, `batch` at a time; each batch is written before the next begins.

    Raises BenchError: the folder has pictures of other prompts, seeds or settings.
    """
    plan = {**facts, "asked": list(conditions), "seeds": list(seeds)}
    gallery = Gallery() if folder is None else _read(folder, plan)
    for start in range(len(gallery.images), len(conditions), batch):
        painting = painter.paint(conditions[start : start + batch], seeds[start : start + batch])
        gallery.add(painting)
        if folder is not None:
            _write(folder, gallery, plan, len(painting.images))
    return gallery


def _read(folder: Path, plan: Mapping[str, Any]) -> Gallery:
    book = folder / "calls.json"
    if not book.is_file():
        return Gallery()
    sums = json.loads(book.read_text())
    earlier = sums.pop("plan")
    count = min(len(earlier["asked"]), len(plan["asked"]))
    for name, value in json.loads(json.dumps(plan)).items():
        same = earlier.get(name) == value if name not in ("asked", "seeds") else earlier[name][:count] == value[:count]
        if not same:
            raise BenchError(f"{folder} has pictures of another run: {name} differs. Name another folder")
    done = len(sums["spent"])
    if done > len(plan["asked"]):
        raise BenchError(f"{folder} has {done} pictures, more than the {len(plan['asked'])} requested")
    images = []
    for i in range(done):
        with Image.open(folder / f"{i:05d}.png") as picture:
            images.append(picture.convert("RGB"))
    return Gallery(images, **sums)


def _write(folder: Path, gallery: Gallery, plan: Mapping[str, object], fresh: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(len(gallery.images) - fresh, len(gallery.images)):
        gallery.images[i].save(folder / f"{i:05d}.png")
    sums = {name: getattr(gallery, name) for name in ("spent", "seconds", "row_rounds", "tokens")}
    write_whole(folder / "calls.json", json.dumps({"plan": plan, **sums}).encode())
