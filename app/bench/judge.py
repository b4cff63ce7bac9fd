"""Judges methods by many pictures of each: against plain decoding, against real pictures, and against the prompts."""

from __future__ import annotations

import statistics
from itertools import combinations
from typing import Any

from mmspec.app.bench import gallery, quality, report_image
from mmspec.app.bench.command import BenchError, say, seeds_of
from mmspec.app.bench.gallery import Gallery
from mmspec.app.bench.image_bench import ImageBench, ImagePrompts
from mmspec.app.bench.image_methods import ImageMethod
from mmspec.app.bench.quality import QualityError
from mmspec.app.bench.report import Record
from mmspec.app.engine import EngineError

_UNKNOWN = ("fd_ar", "fd_over_noise", "fd_real", "precision", "recall", "faithfulness", "all_right", "compression",
            "spent", "spent_max")  # fmt: skip


class Judge:
    """Draws the same prompts by each method: run 0 of ar is the reference, what is judged has run 1's seeds."""

    def __init__(self, bench: ImageBench, asked: ImagePrompts, args: Any) -> None:
        self.bench, self.asked, self.args = bench, asked, args
        try:
            self.features = quality.backbone(args.backbone, bench.painter.device)
        except QualityError as error:
            raise BenchError(str(error)) from error
        if len(asked.prompts) <= quality.NEIGHBOURS:
            raise BenchError(f"--quality-images must be more than {quality.NEIGHBOURS}; got {len(asked.prompts)}")
        if asked.real and len(asked.real) < len(asked.prompts):
            raise BenchError(
                f"{len(asked.real)} real pictures for {len(asked.prompts)} drawn ones; only sets of equal size can be "
                f"compared. Lower --quality-images or give more"
            )
        self.reader = None
        if asked.scenes:
            from mmspec.app.bench.faithful import Reader

            self.reader = Reader(str(bench.painter.device))
        plain = ImageMethod("ar")
        self.runs = [self.draw(plain, run) for run in range(1 + max(1, args.noise_runs))]
        seen = [self.features(run.images) for run in self.runs]
        self.reference, self.real = seen[0], self.features(asked.real) if asked.real else None
        self.noise = [quality.frechet(a, b) for a, b in combinations(seen, 2)]

    def draw(self, method: ImageMethod, run: int) -> Gallery:
        count = len(self.asked.prompts)
        self.bench.go(method)
        seeds, size = seeds_of(run, count, self.bench.seed), self.args.quality_batch
        keep = None if self.args.pictures is None else self.args.pictures / gallery.slug(method.name, run)
        told = {"setting": method.setting, "settings": self.bench.painter.settings, "model": self.args.model}
        try:
            return gallery.fill(self.bench.painter, self.asked.prompts, seeds, size, keep, told)
        except gallery.GalleryError as error:
            raise BenchError(str(error)) from error

    def record(self, method: ImageMethod) -> Record:
        """The quality record of one method; one that fails says why."""
        facts: Record = {"suite": report_image.QUALITY, "backbone": self.args.backbone, "n": len(self.asked.prompts)}
        facts |= {**method.facts, "noise": self.noise, **dict.fromkeys(_UNKNOWN), "note": ""}
        try:
            drawn = self.runs[1] if method.name == "ar" else self.draw(method, 1)
        except EngineError as error:
            return facts | {"note": f"failed: {str(error)[:200]}"}
        seen = self.features(drawn.images)
        distance = quality.frechet(self.reference, seen)
        facts |= {
            "fd_ar": distance,
            "fd_over_noise": distance / statistics.fmean(self.noise) if any(self.noise) else None,
            "compression": drawn.compression,
            "forwards": drawn.forwards,
            "seconds_per_image": drawn.seconds / len(drawn.images),
            **report_image.charges(drawn.spent, drawn.tokens),
        }
        against = self.reference if self.real is None else self.real
        facts["precision"], facts["recall"] = quality.precision_recall(against, seen)
        if self.real is not None:
            facts["fd_real"] = quality.frechet(self.real, seen)
        if self.reader is not None:
            facts |= {k: v for k, v in self.reader.score(drawn.images, self.asked.scenes).items() if k != "n"}
        noise = statistics.fmean(self.noise)
        say(f"{method.name}: {drawn.compression:.2f} tokens per forward, FD {distance:.4g} to ar (noise {noise:.4g})")
        return facts
