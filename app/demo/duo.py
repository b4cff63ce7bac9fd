"""Answers one question twice on one model: first by stock generate, then accelerated."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Iterator, Sequence

import torch
from huggingface_hub import try_to_load_from_cache
from PIL import Image

import mmspec
from mmspec.app import embedded
from mmspec.app.demo.answer import VIDEO, Ask, ChatTurn, ShownAnswer, cut
from mmspec.app.demo.desk import RefusedError
from mmspec.app.demo.race import DONE, TIME_LIMIT, Limits, Race
from mmspec.app.demo.sight import look_at
from mmspec.app.devices import EngineError, first_line, wait
from mmspec.app.engine import Engine
from mmspec.app.media.decoder import Decoder
from mmspec.config import SpecConfig, option_names
from mmspec.pipelines.host.kinds import BatchFeature, GenerativeModel
from mmspec.pipelines.prompts import chat_inputs
from mmspec.pipelines.serving.batcher import answer_length
from mmspec.pipelines.serving.stream import stream
from mmspec.registry import OF_TEXT, PUBLISHED, name_of

WARM_UP = 2  # new tokens of a discarded warm-up for each side


def fitting(engine: Engine, model: str, named: Sequence[str] = ()) -> dict[str, object]:
    """All drafters that fit a loaded model, by method; the engine's own is first.

    These are the named ones, those of an embedded model, one that is published for the model, if it is in the Hub's
    cache, the MTP heads in the model's own files, and those without weights. Only named drafters are downloaded.

    Raises EngineError: a named drafter does not fit.
    """
    titled = {name_of(engine.drafter): engine.drafter}
    published = PUBLISHED.get(model.rpartition("/")[2].lower(), "")
    cached = [published] if published and isinstance(try_to_load_from_cache(published, "config.json"), str) else []
    for name in (*named, *embedded.drafters(model), *cached, "mtp", *OF_TEXT):
        try:
            drafter = mmspec.enable(engine.model, drafter=embedded.resolve(embedded.fitting(name, model))).drafter
        except (ValueError, TypeError, OSError) as error:
            if name in named:
                raise EngineError(f"cannot use the drafter {name!r}: {first_line(error)}") from error
            continue
        title = name_of(drafter)
        titled.setdefault(f"{title} of {name}" if name in named and title in titled else title, drafter)
    mmspec.disable(engine.model)
    return titled


class Duo(Race[Ask, ChatTurn, BatchFeature]):
    """Stock generate and mmspec on one loaded model; one run at a time."""

    def __init__(
        self, engine: Engine, decoder: Decoder, time_limit: float = TIME_LIMIT,
        drafters: dict[str, object] | None = None,
    ) -> None:  # fmt: skip
        self.decoder = decoder
        self.model, self.processor, self.time_limit = engine.model, engine.processor, time_limit
        self.enabled = engine.options  # of the command line; the page's controls override them
        self.options = {k: v for k, v in engine.options.items() if k not in Ask.__dataclass_fields__}
        self.name = name_of(engine.drafter)  # the initially chosen drafter
        self.drafters = {self.name: engine.drafter, **(drafters or {})}
        mmspec.disable(self.model)

    def begin(self, ask: Ask, stop: threading.Event) -> tuple[ChatTurn, BatchFeature]:
        ask.check()
        if ask.drafter not in self.drafters:
            raise RefusedError(f"No drafter {ask.drafter!r} here; choose from {', '.join(self.drafters)}.")
        began = time.perf_counter()
        frames = look_at(ask, self.decoder, stop)
        inputs = self._inputs(ask, frames)
        shown = frames if ask.kind == VIDEO else ()
        both = ShownAnswer(), ShownAnswer(accelerated=True)
        return ChatTurn(*both, ask, time.perf_counter() - began, shown), inputs

    def side(self, both: ChatTurn, fast: bool, request: BatchFeature, limits: Limits) -> None:
        if not fast:
            for cold in (ShownAnswer(accelerated=True), ShownAnswer()):  # one-time costs of this shape are not timed
                self._answer(cold, dataclasses.replace(both.ask, max_new_tokens=WARM_UP), request, limits)
        self._answer(both.fast if fast else both.plain, both.ask, request, limits)

    def end(self, both: ChatTurn, request: BatchFeature, limits: Limits) -> ChatTurn:
        return dataclasses.replace(both, over=True, difference=self._difference(both, request))

    def rest(self) -> None:
        mmspec.disable(self.model)

    def warm_up(self, image: str, prompt: str) -> None:
        """A short run, so that one-time costs do not fall on the first visitor."""
        self.whole(Ask("image", image, None, prompt, self.name, max_new_tokens=8))

    def _inputs(self, ask: Ask, frames: tuple[Image.Image, ...]) -> BatchFeature:
        inputs = chat_inputs(self.processor, [ask.prompt.strip()], [frames], clips=True, before=ask.before)
        length = inputs["input_ids"].shape[1]
        room = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        if room is not None and length + ask.max_new_tokens > room:
            raise RefusedError(
                f"The {ask.noun} and the prompts take {length} tokens and the answer up to {ask.max_new_tokens}; this "
                f"model has room for {room} in total. Shorten the prompt or the answer, or use fewer frames."
            )
        return inputs.to(self.model.device, self.model.dtype)

    def _answer(self, answer: ShownAnswer, ask: Ask, inputs: BatchFeature, limits: Limits) -> None:
        if limits.over:
            return
        mmspec.disable(self.model)
        if answer.accelerated:
            try:
                mmspec.enable(self.model, drafter=self.drafters[ask.drafter], **{**self._options(ask), **ask.options})
            except ValueError as error:  # a shape that this drafter does not support
                raise RefusedError(f"{error}.") from error
        torch.manual_seed(ask.seed)
        steps = stream(self.model, inputs, limits.stop, max_time=limits.left, **ask.settings)
        with _vision_timed(self.model, answer), contextlib.closing(steps):
            for step in steps:
                answer.take(step)
        cut(answer.tokens, lambda ids: self.processor.decode(ids, skip_special_tokens=True))
        answer.state = limits.state if limits.over else DONE
        ends = self.model.generation_config.eos_token_id
        full = len(answer.tokens) >= ask.max_new_tokens
        answer.cut = full and answer_length([*answer.ids, -1], ends) > len(answer.tokens)

    def _options(self, ask: Ask) -> dict[str, object]:
        """The options of --enable that the chosen drafter takes."""
        own = option_names(getattr(self.drafters[ask.drafter], "options", None))
        shared = option_names(SpecConfig())
        return {k: v for k, v in self.options.items() if k in shared or (k in own and ask.drafter == self.name)}

    def _difference(self, turn: ChatTurn, inputs: BatchFeature) -> tuple[int, float | None] | None:
        """The first different token and the gap of the two best stock logits there; None if there is none."""
        mmspec.disable(self.model)
        plain, fast, n = turn.plain.ids, turn.fast.ids, turn.compared
        longer = n if turn.ended and len(plain) != len(fast) else None
        where = next((i for i in range(n) if plain[i] != fast[i]), longer)
        if not turn.ask.comparable or where is None:
            return None
        torch.manual_seed(turn.ask.seed)
        again = {**turn.ask.settings, "max_new_tokens": where + 1, "max_time": self.time_limit}
        stock = self.model.generate(**inputs, **again, return_dict_in_generate=True, output_scores=True)
        best = stock.scores[where][0].topk(2).values if len(stock.scores) > where else None
        return where, None if best is None else float(best[0] - best[1])


@contextlib.contextmanager
def _vision_timed(model: GenerativeModel, answer: ShownAnswer) -> Iterator[None]:
    """Inside the block, record the time of the model's vision tower, if it has one, in the answer."""
    tower = model.get_encoder(modality="image")
    if tower is model:
        yield
        return

    def now() -> float:
        wait(model.device)
        return time.perf_counter()

    def enter(*_: object) -> None:
        answer.vision -= now()

    def leave(*_: object) -> None:
        answer.vision += now()

    hooks = tower.register_forward_pre_hook(enter), tower.register_forward_hook(leave)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
