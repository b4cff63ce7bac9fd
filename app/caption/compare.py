"""Measures the speed-up after a run: a few of its items are captioned again, by stock generate and by mmspec."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from PIL import Image

from mmspec.app.captioner import Captioner
from mmspec.app.devices import first_line
from mmspec.app.engine import Engine
from mmspec.app.prompt import PromptChoice
from mmspec.pipelines.serving.batcher import StaticBatcher

SAMPLE, WARM_UP = 6, 8  # items; new tokens of the warm-up
Shown = tuple[Sequence[Image.Image], PromptChoice]


class Sampled:
    """Keeps some requests of a run, and times both paths on them, each after a warm-up.

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
        """Caption the kept requests on both paths, `rows` at once."""
        try:
            own, seconds = _timed(engine, rows, self.kept)
            with engine.stock():
                stock, of_stock = _timed(engine, rows, self.kept, stock=True)
        except Exception as error:  # the captions are saved; only the measurement fails
            self.facts = {"trouble": first_line(error)}
        else:
            identical = sum(one == other for one, other in zip(own, stock, strict=True))
            times = {"stock_seconds": of_stock, "own_seconds": seconds, "speedup": of_stock / seconds}
            self.facts = {name: round(value, 4) for name, value in times.items()}
            self.facts |= {"items": len(self.kept), "identical": identical, "sampled": engine.sampling}

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


def _timed(engine: Engine, rows: int, shown: list[Shown], stock: bool = False) -> tuple[list[str], float]:
    """The texts in order, and the wall time, after a warm-up on pictures of the same sizes, for what is compiled."""
    texts: dict[Any, str] = {}
    other = [([frame.transpose(Image.Transpose.ROTATE_180) for frame in frames], choice) for frames, choice in shown]
    for requests, most in ((other, WARM_UP), (shown, engine.settings["max_new_tokens"])):
        settings = engine.settings | {"max_new_tokens": most}
        batcher = StaticBatcher(engine.model, engine.processor, rows, **settings) if stock else None
        captioner = Captioner(batcher or engine.batcher(rows, max_new_tokens=most), engine.threads)
        begun = time.perf_counter()
        for number, (frames, choice) in enumerate(requests):
            captioner.add(number, frames, choice)
        while captioner.busy:
            for answer in captioner.step():
                if answer.error is not None and answer.finish != "length":  # JSON that is cut off took its time too
                    raise answer.error
                texts[answer.ticket] = answer.text
    return [texts[number] for number in range(len(shown))], time.perf_counter() - begun
