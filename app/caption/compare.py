"""Measures the speed-up after a run: a few of its items are captioned again, by stock generate and by mmspec."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from PIL import Image

from mmspec.app.captioner import Captioner
from mmspec.app.compare import Comparison, Method
from mmspec.app.devices import first_line
from mmspec.app.engine import Engine
from mmspec.app.prompt import PromptChoice
from mmspec.pipelines.serving.batcher import StaticBatcher

SAMPLE = 6  # items
WARM_UP = 8  # new tokens
Shown = tuple[Sequence[Image.Image], PromptChoice]


OWN, STOCK = Method("mmspec"), Method("stock")


class Sampled:
    """Keeps some requests of a run, and times both paths on them in alternating order, after a warm-up.

    Attributes:
        facts: the results of `measure`; only `trouble` if it failed.
    """

    def __init__(self, items: int):
        self._step, self._seen = max(1, items // SAMPLE), 0
        self.kept: list[Shown] = []
        self.facts: dict[str, Any] = {"trouble": ""}

    def show(self, frames: Sequence[Image.Image], choice: PromptChoice) -> None:
        """Called with each request; keeps a few, which are spread over the run."""
        if self._seen % self._step == 0 and len(self.kept) < SAMPLE:
            self.kept.append((frames, choice))
        self._seen += 1

    def measure(self, engine: Engine, rows: int) -> None:
        """Caption the kept requests on both paths, `rows` at once; a batch of stock runs until its longest row ends."""

        def run(method: Method, request: tuple[list[Shown], dict[str, int]]) -> tuple[list[str], float]:
            shown, more = request
            if method is OWN:
                return _timed(engine.flow(rows), shown)
            with engine.stock():
                batches = StaticBatcher(engine.model, engine.processor, rows, **(engine.settings | more))
                return _timed(Captioner(batches, engine.threads), shown)

        both = Comparison([OWN, STOCK], run)
        groups = [self.kept[first : first + rows] for first in range(0, len(self.kept), rows)]
        own = stock = 0.0
        identical = 0
        try:
            both.warm_up((self.kept[:1], {"max_new_tokens": WARM_UP}), [OWN.name, STOCK.name])
            for outputs in both.turns((group, {}) for group in groups):
                (texts, seconds), (others, of_stock) = outputs[OWN.name], outputs[STOCK.name]
                own, stock = own + seconds, stock + of_stock
                identical += sum(one == other for one, other in zip(texts, others, strict=True))
        except Exception as error:  # the captions are saved; only the measurement fails
            self.facts = {"trouble": first_line(error)}
        else:
            times = {"stock_seconds": round(stock, 4), "own_seconds": round(own, 4), "speedup": round(stock / own, 4)}
            self.facts = {"items": len(self.kept), **times, "identical": identical, "sampled": engine.sampling}

    def __str__(self) -> str:
        facts = self.facts
        if "trouble" in facts:
            return f"stock generate could not be measured ({facts['trouble']})" if self.kept else ""
        ratio, same = facts["speedup"], f"identical text on {facts['identical']} of {facts['items']}"
        gain = f"{ratio:.1f}x faster" if ratio >= 1.05 else f"no gain here ({ratio:.2f}x)"
        if facts["sampled"]:
            same = "sampled texts (temperature above 0) are not compared"
        return (
            f"on {facts['items']} of them stock generate took {facts['stock_seconds']:.1f} s, "
            f"mmspec {facts['own_seconds']:.1f} s: {gain}, {same}"
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
