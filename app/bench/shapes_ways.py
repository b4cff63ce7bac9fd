"""What is timed at the published shapes: rounds of stock paths and of mmspec, on models with random weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice, product
from typing import Any

import torch
from torch import Tensor

from mmspec.app import painter
from mmspec.app.bench import image_methods, vlm_methods
from mmspec.app.bench.answers import VlmBench
from mmspec.app.bench.command import seeds_of
from mmspec.app.bench.image_plain import ImageBench
from mmspec.app.bench.shapes_models import Chat, Codes, Latents, Shape
from mmspec.app.engine import wait
from mmspec.models.llamagen_vq import LlamaGenVQ
from mmspec.models.mar_scheduler import MARScheduler
from mmspec.pipelines.llamagen.pipeline import LlamaGenPipeline
from mmspec.pipelines.mar.loop import MarRunner, MarState, canvas, distribution, plain
from mmspec.pipelines.mar.plan import Speculation, tally
from mmspec.pipelines.mar.speculate import draw
from mmspec.pipelines.targets.tree_attention import NAME as TREE
from mmspec.statistics import Stats

STOCK, COMPILED = "stock", "stock compiled"
SDPA = "sdpa"
ROWS = 32768  # of a larger head that drafts read, where they do not read all
PASSES = 12  # of MAR that are timed at most: a round may draw `ahead` tokens, and half a picture is left


@dataclass(frozen=True)
class Cost:
    """What a round of one call took and gave, on average.

    Attributes:
        seconds: of the whole round, or of a plain step.
        tokens: that a row gains.
        parts: seconds by part, by the host's clock.
    """

    seconds: float
    tokens: float = 1.0
    parts: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, seconds: float, stats: Stats | None) -> Cost:
        if stats is None:
            return cls(seconds)
        parts = {name: spent / stats.rounds for name, spent in stats.seconds.items() if name != "prefill"}
        return cls(seconds, stats.tokens_per_target_call, parts)


@dataclass(frozen=True)
class ShapeMethod:
    """One way to generate; a call of it has a prefill and some rounds. Plain: nothing is drafted."""

    name: str
    call: Callable[[], Cost]
    setting: str = ""
    plain: bool = False


class ChatWays:
    """Stock `generate`, eager and compiled on a static cache, and mmspec with each drafter, by sdpa or as a tree."""

    def __init__(self, shape: Chat, sizes: str, parts: dict[str, Any], tokens: int, seed: int) -> None:
        model = parts.pop("target")
        model.generation_config.pad_token_id = 0
        self.shape, self.sizes, self.drafters = shape, sizes, parts
        self.bench = VlmBench(model, None, tokens, seed)

    def ways(self, context: int, batch: int, compile: bool) -> Iterator[ShapeMethod]:
        inputs = self.shape.prompt(self.bench.model, self.sizes, context - self.bench.max_new_tokens, batch)
        plain, static = vlm_methods.stock(self.bench.model.device)
        found = [(plain, SDPA), *([(replace(static, name=COMPILED), SDPA)] if compile else [])]
        hows: dict[str, dict[str, Any]] = {"": {}, " compiled": {"compile": True}} if compile else {"": {}}
        if self.shape.text[self.sizes]["vocab_size"] > ROWS:  # of such a head, drafts may read a part
            how, most = list(hows.items())[-1]
            hows[f"{how} {ROWS} rows"] = most | {"draft_vocab": ROWS}
        for (name, drafter), attend, (how, more) in product(self.drafters.items(), (SDPA, TREE), hows.items()):
            c, title = drafter.config, f"{name}{' tree attention' if attend == TREE else ''}{how}"
            options = {"depth": c.depth, "width": c.width, "size": c.size, **more}
            found.append((vlm_methods.VlmMethod(title, drafter=drafter, options=options), attend))
        for method, attend in found:
            call = partial(self._call, method, attend, inputs)
            yield ShapeMethod(method.name, call, method.setting, plain=method.drafter is None)

    def _call(self, method: vlm_methods.VlmMethod, attend: str, inputs: dict[str, Tensor]) -> Cost:
        self.bench.model.set_attn_implementation(attend)
        call = self.bench.call(method, 0.0, inputs, self.bench.seed)
        if call.per_step is None:
            raise RuntimeError("the call ended with its first token")
        return Cost.of(call.per_step, call.stats)


class Featured(LlamaGenPipeline):
    """Draws from random features in place of a text's, as wide and as many: the text encoder is no part of a round."""

    def encode_prompt(self, prompts: list[str], clean_caption: bool = True) -> tuple[Tensor, Tensor]:
        c, model = self.transformer.config, self.transformer
        features = torch.randn(len(prompts), c.prefix, c.caption_width, device=model.device, dtype=model.dtype)
        return features, torch.ones(features.shape[:2], dtype=torch.bool, device=model.device)


class CodesWays:
    """Plain drawing, eager and compiled with fixed shapes, and a Jacobi window; whole pictures, guided."""

    def __init__(self, shape: Codes, sizes: str, parts: dict[str, Any], tokens: int, seed: int) -> None:
        model, self.shape = parts["target"], shape
        small = LlamaGenVQ(base=32, multipliers=(1, 1), latent=32, codes=model.config.vocab, blocks=1)  # is not asked
        self.bench = ImageBench(
            painter.ImageSubject(Featured(model, small.to(model.device)), output_type="latent"), seed
        )

    def ways(self, context: int, batch: int, compile: bool) -> Iterator[ShapeMethod]:
        options = {"window": self.shape.window, "coupling": "maximal"}
        name = f"jacobi {self.shape.window}"
        found = [
            image_methods.ImageMethod(STOCK),
            image_methods.ImageMethod(name, painter.DrawingMethod("jacobi", options)),
        ]
        if compile:
            found.insert(1, image_methods.ImageMethod(COMPILED, plain="compiled"))
            compiled = painter.DrawingMethod("jacobi", {**options, "compile": True})
            found.append(image_methods.ImageMethod(f"{name} compiled", compiled))
        group = [("a picture", seed) for seed in seeds_of(1, batch, self.bench.seed)]
        for method in found:
            plain = method.way.drafter == painter.PLAIN
            yield ShapeMethod(method.name, partial(self._call, method, group), method.setting, plain)

    def _call(self, method: image_methods.ImageMethod, group: list[tuple[str, int]]) -> Cost:
        painting = self.bench.call(method, group)
        return Cost.of(painting.round_seconds, painting.stats)


class LatentsWays:
    """MAR's plain passes, with the head as it is defined and with the fast one, and rounds that draft with that."""

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
        next(rounds)  # the first drafts, or the first step, are no part of it
        wait(model.device)
        before, began = sum(drawn.counts), time.perf_counter()
        count = sum(1 for _ in islice(rounds, self.passes))
        wait(model.device)
        return Cost((time.perf_counter() - began) / count, (sum(drawn.counts) - before) / count / batch)

    def _half(self, batch: int) -> MarState:
        """Pictures that know half of their tokens."""
        model, seeds = self.model, seeds_of(1, batch, self.seed)
        drawn = canvas(model, torch.arange(batch, device=model.device) % model.config.classes, seeds)
        half = model.tokens // 2
        known = drawn.order[:, :half, None].expand(-1, -1, drawn.tokens.shape[2])
        drawn.tokens.scatter_(1, known, torch.randn(known.shape, device=model.device))
        drawn.counts = [half] * batch
        return drawn


KINDS: dict[type[Shape], Callable[..., ChatWays | CodesWays | LatentsWays]] = {
    Chat: ChatWays,
    Codes: CodesWays,
    Latents: LatentsWays,
}


def load(
    shape: Shape, sizes: str, device: torch.device, dtype: torch.dtype, tokens: int, seed: int
) -> ChatWays | CodesWays | LatentsWays:
    """The model and its drafters with random weights, made where they are to run."""
    torch.manual_seed(seed)
    with torch.device(device):
        parts = {name: part.eval() for name, part in shape.parts(sizes, dtype).items()}
    return KINDS[type(shape)](shape, sizes, parts, tokens, seed)
