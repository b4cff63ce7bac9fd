"""Methods to time at published shapes: stock paths and mmspec, on models with random weights."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any, Protocol

import torch
from torch import Tensor

from benchmarks.suites.shapes_models import Chat, Codes, Latents, Shape
from benchmarks.suites.subject import sharing
from mmspec.app.bench import vlm
from mmspec.app.bench.answers import VlmBench
from mmspec.app.compare import Method
from mmspec.drafters.plain import Plain
from mmspec.pipelines.host.tree_attention import NAME as TREE
from mmspec.statistics import Stats

STOCK, COMPILED = "stock", "stock compiled"
SDPA = "sdpa"
ROWS = 32768  # rows of a larger head that a drafter reads, if not all


@dataclass(frozen=True)
class Cost:
    """Averages over the rounds of one call.

    Attributes:
        seconds: time of the whole round, or of a plain step.
        tokens: tokens that a row gains.
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
    """One way to generate, by calls with a prefill and some rounds; plain means without drafts."""

    name: str
    call: Callable[[], Cost]
    setting: str = ""
    plain: bool = False


class ChatWays:
    """Stock `generate`, eager and compiled on a static cache, and mmspec without and with each drafter, by sdpa or as a
    tree."""

    def __init__(self, shape: Chat, sizes: str, parts: dict[str, Any], tokens: int, seed: int) -> None:
        model = parts.pop("target")
        model.generation_config.pad_token_id = 0
        self.shape, self.sizes, self.drafters = shape, sizes, parts
        self.bench = VlmBench(model, None, tokens, seed)
        # of the same weights: captures hold for one implementation of attention
        twin = sharing(model)
        twin.set_attn_implementation(TREE)
        self.benches = {SDPA: self.bench, TREE: VlmBench(twin, None, tokens, seed)}

    def ways(self, context: int, batch: int, compile: bool) -> Iterator[ShapeMethod]:
        inputs = self.shape.prompt(self.bench.model, self.sizes, context - self.bench.max_new_tokens, batch)
        plain, static = vlm.stock(self.bench.model.device)
        methods = [(plain, SDPA), *([(replace(static, name=COMPILED), SDPA)] if compile else [])]
        hows: dict[str, dict[str, Any]] = {"": {}, " compiled": {"compile": True}} if compile else {"": {}}
        methods += [(Method(f"plain{how}", Plain(), more), SDPA) for how, more in hows.items()]
        if self.shape.text[self.sizes]["vocab_size"] > ROWS:  # a drafter may read part of such a head
            how, most = list(hows.items())[-1]
            hows[f"{how} {ROWS} rows"] = most | {"draft_vocab": ROWS}
        for (name, drafter), attend, (how, more) in product(self.drafters.items(), (SDPA, TREE), hows.items()):
            c, title = drafter.config.shape, f"{name}{' tree attention' if attend == TREE else ''}{how}"
            if c.width == 1 and attend == TREE:
                continue  # a chain needs no tree attention
            options = {"depth": c.depth, "width": c.width, "size": c.size, **more}
            methods.append((Method(title, drafter, options), attend))
        for method, attend in methods:
            call = partial(self._call, method, attend, inputs)
            yield ShapeMethod(method.name, call, method.setting, plain=method.drafter is None)

    def _call(self, method: Method, attend: str, inputs: dict[str, Tensor]) -> Cost:
        call = self.benches[attend].call(method, 0.0, inputs, self.bench.seed)
        if call.per_step is None:
            raise RuntimeError("the call ended with its first token")
        return Cost.of(call.per_step, call.stats)


KINDS: dict[type[Shape], str] = {  # the class with the methods of each kind; those of image models need diffusers
    Chat: "shapes_ways:ChatWays",
    Codes: "shapes_drawn:CodesWays",
    Latents: "shapes_drawn:LatentsWays",
}


class Ways(Protocol):
    """A model and its drafters, with random weights."""

    def ways(self, context: int, batch: int, compile: bool) -> Iterator[ShapeMethod]:
        """All ways to generate under one condition."""


def load(shape: Shape, sizes: str, device: torch.device, dtype: torch.dtype, tokens: int, seed: int) -> Ways:
    """The model and its drafters with random weights, created on their device."""
    torch.manual_seed(seed)
    module, _, name = KINDS[type(shape)].partition(":")
    kind: Any = getattr(importlib.import_module(f"benchmarks.suites.{module}"), name)
    with torch.device(device):
        parts = {name: part.eval() for name, part in shape.parts(sizes, dtype).items()}
    made: Ways = kind(shape, sizes, parts, tokens, seed)
    return made
