"""Methods to time on image models: LlamaGen's plain loop and Jacobi windows, MAR's passes and rounds."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from benchmarks.suites.shapes_models import Codes, Latents
from benchmarks.suites.shapes_ways import COMPILED, STOCK, Cost, ShapeMethod
from benchmarks.suites.static_loop import StaticBench
from mmspec.app import painter
from mmspec.app.bench.command import seeds_of
from mmspec.app.compare import Method
from mmspec.app.devices import wait
from mmspec.models.llamagen_vq import LlamaGenVQ
from mmspec.models.mar_scheduler import MARScheduler
from mmspec.pipelines.llamagen.pipeline import LlamaGenPipeline
from mmspec.pipelines.mar.loop import MarRunner, MarState, canvas, distribution, plain
from mmspec.pipelines.mar.plan import Speculation, tally
from mmspec.pipelines.mar.speculate import draw

PASSES = 12  # maximum timed rounds of MAR: a round draws up to `ahead` tokens, and half a picture is left


class Featured(LlamaGenPipeline):
    """Draws from random text features of the same shape, since the text encoder is not part of a round."""

    def encode_prompt(self, prompts: list[str], clean_caption: bool = True) -> tuple[Tensor, Tensor]:
        c, model = self.transformer.config, self.transformer
        features = torch.randn(len(prompts), c.prefix, c.caption_width, device=model.device, dtype=model.dtype)
        return features, torch.ones(features.shape[:2], dtype=torch.bool, device=model.device)


class CodesWays:
    """Plain drawing, eager and compiled with fixed shapes, and a Jacobi window; whole pictures, guided."""

    def __init__(self, shape: Codes, sizes: str, parts: dict[str, Any], tokens: int, seed: int) -> None:
        model, self.shape = parts["target"], shape
        small = LlamaGenVQ(base=32, multipliers=(1, 1), latent=32, codes=model.config.vocab, blocks=1)  # is not asked
        self.bench = StaticBench(
            painter.ImageSubject(Featured(model, small.to(model.device)), output_type="latent"), seed
        )

    def ways(self, context: int, batch: int, compile: bool) -> Iterator[ShapeMethod]:
        options = {"window": self.shape.window, "coupling": "maximal"}
        name = f"jacobi {self.shape.window}"
        methods = [Method(STOCK), Method(name, "jacobi", options)]
        if compile:
            methods.insert(1, Method(COMPILED, arguments={"plain": "compiled"}))
            methods.append(Method(f"{name} compiled", "jacobi", {**options, "compile": True}))
        group = [("a picture", seed) for seed in seeds_of(1, batch, self.bench.seed)]
        for method in methods:
            call = partial(self._call, method, group)
            yield ShapeMethod(method.name, call, method.setting, plain=method.drafter is None)

    def _call(self, method: Method, group: list[tuple[str, int]]) -> Cost:
        painting = self.bench.call(method, group)
        return Cost.of(painting.round_seconds, painting.stats)


class LatentsWays:
    """MAR's plain passes with the reference head and with the fast one, and rounds of drafts with the fast one."""

    def __init__(self, shape: Latents, sizes: str, parts: dict[str, Any], tokens: int, seed: int) -> None:
        self.shape, self.steps = shape, shape.steps[sizes]
        self.model, self.draft = parts["target"].eval(), parts["draft"].eval()
        self.passes, self.seed = min(tokens, PASSES), seed
        self.scheduler = MARScheduler(final_noise=True, skip_terminal=True)

    def ways(self, context: int, batch: int, compile: bool) -> Iterator[ShapeMethod]:
        ahead = self.shape.ahead
        drafts = {f"self {ahead}": Speculation(ahead=ahead), f"draft {ahead}": Speculation(self.draft, ahead)}
        yield ShapeMethod(STOCK, partial(self._call, batch, None, fast=False), plain=True)
        yield ShapeMethod("fast head", partial(self._call, batch, None), plain=True)
        if compile:
            yield ShapeMethod("fast head compiled", partial(self._call, batch, None, compile=True), plain=True)
        for name, how in drafts.items():
            call, setting = partial(self._call, batch, how), f"ahead {ahead}, fast head"
            yield ShapeMethod(name, call, setting)
            if compile:
                yield ShapeMethod(f"{name} compiled", partial(call, compile=True), setting)

    @torch.no_grad()
    def _call(self, batch: int, how: Speculation | None, fast: bool = True, compile: bool = False) -> Cost:
        L, model = self.model.tokens, self.model
        one = distribution(L, L, 3.0, "linear", self.steps, "linear", 1.0)
        left = one if how is not None else replace(one, turns=one.turns[L // 2 :])
        brush, drawn, told = MarRunner(model, self.scheduler, left, fast, compile), self._half(batch), tally(L)
        rounds: Iterator[MarState] = plain(brush, drawn)
        if how is not None:
            rounds = draw(brush, drawn, how, brush if how.draft is None else replace(brush, model=how.draft), told)
        next(rounds)  # without the first drafts or the first step
        wait(model.device)
        before, began = sum(drawn.counts), time.perf_counter()
        count = sum(1 for _ in islice(rounds, self.passes))
        wait(model.device)
        return Cost((time.perf_counter() - began) / count, (sum(drawn.counts) - before) / count / batch)

    def _half(self, batch: int) -> MarState:
        """Pictures with half of their tokens drawn."""
        model, seeds = self.model, seeds_of(1, batch, self.seed)
        drawn = canvas(model, torch.arange(batch, device=model.device) % model.config.classes, seeds)
        half = model.tokens // 2
        known = drawn.order[:, :half, None].expand(-1, -1, drawn.tokens.shape[2])
        drawn.tokens.scatter_(1, known, torch.randn(known.shape, device=model.device))
        drawn.counts = [half] * batch
        return drawn
