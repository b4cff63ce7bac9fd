"""One worker: it decodes items, captions them with its model and records the results; a failed item fails alone.

An engine of `--engine` has the interface of `mmspec.app.engine.Engine`; it may leave out `stock`, for a run that is not
compared with stock generate.
"""

from __future__ import annotations

import importlib
import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmspec.app.caption.journal import Record, digest, facts_of
from mmspec.app.caption.options import AUTO, NEVER, Options
from mmspec.app.caption.outputs import Writer
from mmspec.app.caption.plan import Task
from mmspec.app.embedded import SHIPPED, STOCK
from mmspec.app.extras import EngineError, cores
from mmspec.app.media.decoder import Decoder, DecoderError
from mmspec.media import Media

AHEAD = 4  # items to decode ahead, for each decoder process
SIZED = 4  # pictures to decode before the batch size is chosen by their sizes
PATIENCE = 5  # failures after which the run is given up if the model has never answered
LOST = "AcceleratorError"  # an error of torch after which the device usually fails on every call, quickly
TOKENS = 1280  # limit of visual tokens per picture, for models whose token count grows with the pixels
PAYS = 10_000  # rounds from which on compiling pays: it takes a minute or two, and saves some 10 ms a round
COMPILING = "the model is compiled first, which takes a minute or two"


class FatalError(Exception):
    """The run cannot go on: there is no model, or it fails on every item, so that the items are not the cause."""


@dataclass(frozen=True)
class Job:
    """What every worker of a run needs to know; it is pickled and sent to worker processes."""

    options: Options
    shaping: dict[str, Any]  # the options that shape the answers
    folder: Path
    origin: str
    workers: int = 1  # on this machine, to share its cores
    frames: int = 1  # maximum number of pictures of an item
    items: int = 1  # approximate number of items for a worker


class Worker:
    """Takes tasks by `give` and returns their records by `step`; in between it decodes, captions and records them."""

    def __init__(self, job: Job, place: str, slot: str):
        options, self.job, self.slot = job.options, job, slot
        self.engine = load(options, place)
        self.flow: Any = None  # opened when the first pictures are decoded, since their sizes set the batch
        self.rows = SIZED
        area, capped = area_for(options.max_pixels_per_image, self.engine)
        self._compiles, compiling = compiles(options, job.items, job.frames, self.engine)
        self.notes = [*self.engine.notes, *filter(None, (capped, compiling))]
        self._decoders = options.decoders or max(1, min(4, cores() // (2 * job.workers)))
        self.sampler: Callable[..., None] | None = None  # called with the frames and prompt of every request
        self._waiting: deque[tuple[Task, Media]] = deque()
        self._asked: dict[str, tuple[Task, Media]] = {}
        self._failures: list[tuple[Task, str, Exception]] = []  # not recorded until the model has answered once
        self._results: list[Record] = []
        self._answered = self._lost = False
        self._writer = Writer(job.folder, slot)
        self._decoder = Decoder(self._decoders, options.limits(area), options.policy)

    def close(self) -> None:
        self._decoder.close()
        self._writer.close()

    @property
    def drafter(self) -> str:
        """The drafter in use, for records; which one that is, only the engine knows if the model ships with it."""
        named = STOCK if self.engine.drafter is None else self.job.options.drafter
        if named != SHIPPED:
            return named
        from mmspec.registry import name_of  # imports torch, which must not come before its threads are set

        return name_of(self.engine.drafter)

    @property
    def window(self) -> int:
        """Maximum number of unfinished tasks."""
        return max(2 * self.rows, PATIENCE + 1) + AHEAD * self._decoders

    @property
    def in_hand(self) -> int:
        """Number of unfinished tasks."""
        return self._decoder.pending + len(self._waiting) + len(self._asked) + len(self._failures)

    def give(self, tasks: Sequence[Task]) -> None:
        for task in tasks:
            self._decoder.submit(task, task.item)

    def step(self) -> list[Record]:
        """Do a part of the work, such as one round of the model, and return the records of finished items.

        Raises FatalError: the model fails on every item, or the decoder cannot run.
        """
        self._decode()
        if self.flow is None and (len(self._waiting) >= SIZED or (self._waiting and not self._decoder.pending)):
            self._open()
        while self._waiting and self.flow is not None and self.flow.free:
            self._ask(*self._waiting.popleft())
        if self.flow is not None and self.flow.busy:
            for answer in self.flow.step():
                self._answer(answer)
        if self.in_hand == len(self._failures):
            self._record_failures()
        results, self._results = self._results, []
        return results

    def summary(self) -> dict[str, Any]:
        """Facts about this worker for the report."""
        facts: Record = {"worker": self.slot, "drafter": self.drafter}
        model = self.engine.model if self.job.options.report else None
        if model is not None:
            from mmspec.app.provenance import provenance

            facts["provenance"] = provenance(model.device, model.dtype)
        if self.flow is None:
            return facts
        stats = self.flow.stats
        facts |= {"rows": self.flow.rows} | facts_of(prefix=stats.prefix or None)
        names = ("target_calls", "row_rounds", "gained", "lossless") if stats.rounds else ()
        return facts | {name: getattr(stats, name) for name in names}

    def _decode(self) -> None:
        if not self._decoder.pending or len(self._waiting) > self.rows:
            return  # the rest stays in the decoder, which limits bytes
        idle = self.flow is None or not (self._waiting or self.flow.busy)
        try:
            decoded = self._decoder.ready(0.2 if idle else 0)
        except DecoderError as error:
            raise FatalError(str(error)) from error
        for task, media in decoded:
            if isinstance(media, Media):
                self._waiting.append((task, media))
            else:
                self._fail(task, "", media)

    def _open(self) -> None:
        """Open the model's batch, sized for the largest picture so far; compile the model first where that pays."""
        sizes = [frame.size for _, media in self._waiting for frame in media.frames]
        largest = max(sizes, key=lambda size: size[0] * size[1])
        wanted = self.job.options.batch_size
        rows = self.engine.suggest_rows(self.job.frames, largest) if wanted == AUTO else int(wanted)
        self.rows = min(rows, max(1, self.job.items))
        if self._compiles:  # the decoders go on meanwhile
            task, media = self._waiting[0]
            self.engine.warm_up(media.frames, task.choice, self.rows)
        self.flow = self.engine.flow(self.rows)

    def _ask(self, task: Task, media: Media) -> None:
        name, drawn = task.item.name, self.job.shaping["seed"]
        seed = 0 if drawn is None else int(digest(f"{drawn} {media.content}".encode())[:12], 16)
        if self.sampler is not None:
            self.sampler(media.frames, task.choice)
        self._asked[name] = (task, media)
        self.flow.add(name, media.frames, task.choice, seed)

    def _answer(self, answer: Any) -> None:
        task, media = self._asked.pop(answer.ticket)
        if answer.error is None:
            self._answered, self._lost = True, False
            self._record_failures()
            self._record(task, media, answer)
            return
        lost, self._lost = self._lost, type(answer.error).__name__ == LOST
        if lost and self._lost:  # the first item may have broken the device; the second one is not the cause
            raise FatalError(
                f"the device no longer works; run the same command again to resume. {answer.error}"
            ) from answer.error
        self._answered = self._answered or getattr(answer, "finish", "") == "length"  # as JSON that was cut off
        if task.failed:  # before, too, so that it says nothing of the model
            return self._fail(task, media.content, answer.error)
        self._failures.append((task, media.content, answer.error))
        if self._answered:
            self._record_failures()
        elif len(self._failures) == PATIENCE:
            why = f"{type(answer.error).__name__}: {answer.error}"
            raise FatalError(f"the model fails on every item. {why}") from answer.error

    def _record(self, task: Task, media: Media, answer: Any) -> None:
        choice, scores = task.choice, answer.scores
        texts = [choice.caption(text) for text in (answer.text, *answer.further)]
        facts = about(task, media.content, self.job) | self.job.shaping
        facts |= {"drafter": self.drafter, "tokens": answer.tokens}
        facts |= facts_of(
            prompt=choice.text, system=choice.system, existing=task.existing, length=media.seconds,
            seconds=round(answer.seconds, 4), finish=answer.finish, score=scores[0] if scores else None,
        )  # fmt: skip
        if choice.further:
            facts |= {"prompts": [choice.text, *choice.further], "captions": texts}
            facts |= facts_of(scores=list(scores) or None)
        self._results.append(self._writer.write(task.item.name, texts[0], task.sidecar, facts))

    def _record_failures(self) -> None:
        failures, self._failures = self._failures, []
        for task, content, error in failures:
            self._fail(task, content, error)

    def _fail(self, task: Task, content: str, error: Exception) -> None:
        self._results.append(self._writer.fail(task.item.name, error, about(task, content, self.job)))


def about(task: Task, content: str, job: Job) -> Record:
    """What the journal records of an item besides its caption; `content` is empty if the item could not be read."""
    path = task.item.source.path
    return facts_of(
        ask=task.ask, content=content, stamp=task.stamp, folder=job.origin, kind=task.item.kind,
        path=os.path.abspath(path) if path is not None else None,
    )  # fmt: skip


def load(options: Options, place: str) -> Any:
    """Load the engine; FatalError if that fails. The options of --enable are passed as keyword arguments."""
    module, _, function = options.engine.partition(":")
    try:
        loader = getattr(importlib.import_module(module), function)
        arguments = (options.model, options.drafter, place, options.dtype, options.max_new_tokens, options.temperature)
        engine = loader(*arguments, **options.enabled)
        if (schema := options.schema) is not None:
            engine.keep_to(schema)
        if options.score:
            engine.scored = True
        return engine
    except Exception as error:  # any error of a model or a user's engine while it loads ends the run
        named = isinstance(error, FatalError | EngineError)
        raise FatalError(str(error) if named else f"{type(error).__name__}: {error}") from error


def compiles(options: Options, items: int, frames: int, engine: Any) -> tuple[bool, str]:
    """Whether a worker with so many items compiles its model, and a note for the user if it does, or cannot."""
    chosen = options.enabled.get("compile", options.compile)
    if chosen is not None or not engine.compilable:
        note = COMPILING if engine.compilable else "this model cannot be compiled"
        return bool(chosen) and engine.compilable, note * bool(chosen)
    rows = engine.suggest_rows(frames) if options.batch_size == AUTO else int(options.batch_size)
    rounds = items * options.max_new_tokens / (2 * rows)
    note = f"{items} items are about {rounds:,.0f} rounds: {COMPILING} (--no-compile skips it)"
    return rounds >= PAYS, note * (rounds >= PAYS)


def area_for(wanted: int | str, engine: Any) -> tuple[int | None, str]:
    """The pixel limit of pictures for the model (None: no limit), and a note for the user if `auto` set one.

    `wanted` is the value of --max-pixels-per-image. Models that read pictures at native resolution use a token for
    every few hundred pixels; `auto` limits them to TOKENS. Other models scale pictures down by themselves.
    """
    if wanted != AUTO:
        return (None if wanted == NEVER else int(wanted)), ""
    reader = getattr(engine.processor, "image_processor", None)
    patch, merge = (getattr(reader, name, None) for name in ("patch_size", "merge_size"))
    if type(patch) is not int or type(merge) is not int:
        return None, ""
    area = TOKENS * (patch * merge) ** 2
    size: Any = getattr(reader, "size", None)
    own = getattr(reader, "max_pixels", None) or (size.get("longest_edge") if hasattr(size, "get") else None)
    if isinstance(own, int) and own <= area:
        return None, ""
    return area, (
        f"pictures of more than {area / 1e6:.1f} million pixels ({TOKENS} visual tokens) are scaled down; "
        "--max-pixels-per-image N sets another limit, or 'none'"
    )
