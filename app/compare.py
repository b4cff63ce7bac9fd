"""The speed-up measured inside a run: a few of its batches are captioned by stock generate as well."""

from __future__ import annotations

import time

from PIL import Image

from mmspec.app.engine import Captions, Engine, first_line

SAMPLE = 6  # images, spread over the run
WARM_UP = 8  # new tokens


class Comparison:
    """Times both paths on the same batches in alternating order, after one warm-up of each."""

    def __init__(self, engine: Engine, batches: int, batch_size: int):
        count = min(batches, max(1, SAMPLE // batch_size))
        self.engine = engine
        self.due = [(2 * place + 1) * batches // (2 * count) for place in range(count)]
        self.images = self.identical = 0
        self.stock_seconds = self.own_seconds = 0.0
        self.extra_seconds = 0.0  # all that the comparison cost the run
        self.trouble = ""
        self._warm = False

    def caption(self, batch: int, images: list[Image.Image], prompt: str) -> Captions:
        """The run's captions of batch number `batch`; the first one from each due number on is timed on both paths."""
        if not self.due or batch < self.due[0] or self.trouble:
            return self.engine.caption(images, prompt)
        stock_first = len(self.due) % 2 == 0
        del self.due[0]
        begun = time.perf_counter()
        if not self._warm:
            self.engine.caption(images, prompt, max_new_tokens=WARM_UP)
        stock = self._stock(images, prompt) if stock_first else None
        own = self.engine.caption(images, prompt)
        if not stock_first:
            stock = self._stock(images, prompt)
        self.extra_seconds += time.perf_counter() - begun - own.seconds
        if stock is not None:
            self.images += len(images)
            self.stock_seconds += stock.seconds
            self.own_seconds += own.seconds
            self.identical += sum(one == other for one, other in zip(own.texts, stock.texts, strict=True))
        return own

    def _stock(self, images: list[Image.Image], prompt: str) -> Captions | None:
        try:
            with self.engine.stock():
                if not self._warm:
                    self.engine.caption(images, prompt, max_new_tokens=WARM_UP)
                self._warm = True
                return self.engine.caption(images, prompt)
        except Exception as error:  # the captions matter more than the measurement: go on without it
            self.trouble = first_line(error)
            return None

    def __str__(self) -> str:
        if self.trouble:
            return f"stock generate could not be measured ({self.trouble})"
        if not self.images:
            return "no comparison with stock generate"
        ratio = self.stock_seconds / self.own_seconds
        verdict = f"{ratio:.1f}x faster" if ratio >= 1.05 else f"no gain here ({ratio:.2f}x)"
        same = f"identical text on {self.identical} of {self.images}"
        if self.engine.sampling:
            same = "texts are drawn by chance (temperature) and not compared"
        return (
            f"on {self.images} of them stock generate took {self.stock_seconds:.1f} s, "
            f"mmspec {self.own_seconds:.1f} s: {verdict}, {same}"
        )
