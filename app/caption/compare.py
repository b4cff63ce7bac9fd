"""Measures the speed-up after a run: a few of its items are captioned again, by stock generate and by mmspec."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from PIL import Image

from mmspec.app.compare import Comparison, Method
from mmspec.app.devices import first_line
from mmspec.app.engine import Captioner, Engine
from mmspec.app.prompt import PromptChoice
from mmspec.pipelines.serving.batcher import StaticBatcher

SAMPLE = 6  # items
WARM_UP = 8  # new tokens
Shown = tuple[Sequence[Image.Image], PromptChoice]


OWN, STOCK = Method("mmspec"), Method("stock")


class Sampled:
    """Keeps some requests of a run, and times both paths on them in alternating order, after a warm-up."""

    def __init__(self, items: int):
        count = min(items, SAMPLE)
        self._due = [(2 * place + 1) * items // (2 * count) for place in range(count)]
        self._seen = 0
        self.kept: list[Shown] = []
        self.identical = 0
        self.stock_seconds = self.own_seconds = 0.0
        self.sampling = False
        self.trouble = ""

    def show(self, frames: Sequence[Image.Image], choice: PromptChoice) -> None:
        """Called with each request; keeps those that are due, which are spread over the run."""
        if self._due and self._seen >= self._due[0]:
            del self._due[0]
            self.kept.append((frames, choice))
        self._seen += 1

    def measure(self, engine: Engine, rows: int) -> None:
        """Caption the kept requests on both paths, `rows` at once; a batch of stock runs until its longest row ends."""
        self.sampling = engine.sampling

        def run(method: Method, request: tuple[list[Shown], dict[str, int]]) -> tuple[list[str], float]:
            shown, more = request
            if method is OWN:
                return _timed(engine.flow(rows), shown)
            with engine.stock():
                batches = StaticBatcher(engine.model, engine.processor, rows, **(engine.settings | more))
                return _timed(Captioner(engine, batches), shown)

        both = Comparison([OWN, STOCK], run)
        groups = [self.kept[first : first + rows] for first in range(0, len(self.kept), rows)]
        try:
            both.warm_up((self.kept[:1], {"max_new_tokens": WARM_UP}), [OWN.name, STOCK.name])
            for outputs in both.turns((group, {}) for group in groups):
                (texts, seconds), (others, of_stock) = outputs[OWN.name], outputs[STOCK.name]
                self.own_seconds += seconds
                self.stock_seconds += of_stock
                self.identical += sum(one == other for one, other in zip(texts, others, strict=True))
        except Exception as error:  # the captions are saved; only the measurement fails
            self.trouble = first_line(error)

    def facts(self) -> dict[str, Any]:
        if self.trouble or not self.own_seconds:
            return {"trouble": self.trouble}
        return {
            "items": len(self.kept),
            "stock_seconds": round(self.stock_seconds, 4),
            "own_seconds": round(self.own_seconds, 4),
            "speedup": round(self.stock_seconds / self.own_seconds, 4),
            "identical": self.identical,
        }

    def __str__(self) -> str:
        if self.trouble:
            return f"stock generate could not be measured ({self.trouble})"
        if not self.own_seconds:
            return "no comparison with stock generate"
        ratio = self.stock_seconds / self.own_seconds
        acceptance = f"{ratio:.1f}x faster" if ratio >= 1.05 else f"no gain here ({ratio:.2f}x)"
        same = f"identical text on {self.identical} of {len(self.kept)}"
        if self.sampling:
            same = "sampled texts (temperature above 0) are not compared"
        return (
            f"on {len(self.kept)} of them stock generate took {self.stock_seconds:.1f} s, "
            f"mmspec {self.own_seconds:.1f} s: {acceptance}, {same}"
        )


def _timed(captioner: Captioner, shown: list[Shown]) -> tuple[list[str], float]:
    """The texts in order, and the wall time."""
    begun = time.perf_counter()
    texts: dict[Any, str] = {}
    for number, (frames, choice) in enumerate(shown):
        captioner.add(number, frames, choice)
    while captioner.busy:
        for answer in captioner.step():
            if answer.error is not None:
                raise answer.error
            texts[answer.ticket] = answer.text
    return [texts[number] for number in range(len(shown))], time.perf_counter() - begun
