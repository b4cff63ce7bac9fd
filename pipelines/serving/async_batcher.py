"""AsyncBatcher: a Batcher in a thread of its own, for asyncio code such as a server; texts of answers as they grow."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from mmspec.pipelines.host.kinds import Processor
from mmspec.pipelines.serving.batcher import Batcher
from mmspec.statistics import Stats


@dataclass(frozen=True)
class AnswerPart:
    """A further part of an answer.

    Attributes:
        text: the new text.
        tokens: the number of tokens so far, up to and including the stop string.
        stats: the statistics of its rounds so far.
        finish: None: the answer goes on. "stop": it has ended, by the model or at a stop string. "length": it was cut
            off at the maximum number of tokens.
    """

    text: str
    tokens: int
    stats: Stats
    finish: str | None = None


class _Progress(NamedTuple):
    tokens: list[int]
    stats: Stats
    done: bool = False
    cut: bool = False
    error: Exception | None = None

    @classmethod
    def failed(cls, error: Exception) -> _Progress:
        return cls([], Stats(), True, error=error)


_Send = Callable[[_Progress], object]


class AsyncBatcher:
    """Answers prompts of many tasks in one batch; a context manager, whose thread runs the model until its end.

    A prompt may come at any time; it joins the batch before the next round. The thread has no autocast.
    """

    def __init__(self, batches: Batcher, processor: Processor) -> None:
        """
        Args:
            batches: is used by this object's thread alone.
            processor: decodes the answers.
        """
        self.batches = batches
        self._tokenizer: Any = getattr(processor, "tokenizer", processor)
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()  # between rounds; None: end the thread
        self._open: set[_Send] = set()
        self._ended: RuntimeError | None = None  # why the thread has ended
        self._refused: Exception | None = None  # the error of all prompts that come
        self._thread = threading.Thread(target=self._work, name="mmspec-model", daemon=True)

    def __enter__(self) -> AsyncBatcher:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._jobs.put(None)
        self._thread.join()

    async def stream(
        self, inputs: Any, seed: int = 0, stop: Sequence[str] = (), parts: bool = True, **settings: Any
    ) -> AsyncGenerator[AnswerPart]:
        """Answer one prompt; closing the generator frees its row before the next round.

        Args:
            inputs: the output of a processor for one prompt, unpadded; on any device.
            seed: of its noise, ≥ 0; has no effect in greedy decoding.
            stop: strings that end the answer; they are not part of its text.
            parts: False: yield the whole answer at its end.
            **settings: as for `model.generate`, for this prompt.

        Yields:
            A part after each round, perhaps with an empty text; the last one has a `finish`.

        Raises:
            ValueError: not exactly one prompt, or several answers to it.
            RuntimeError: this object's thread does not run, or has ended before the answer.
            Exception: any error of the model for this prompt.
        """
        text = AnswerText(self._tokenizer, stop)
        async with contextlib.aclosing(self._follow(inputs, seed, settings)) as rounds:
            async for now in rounds:
                if not (parts or stop or now.done):
                    continue
                piece = text.read(now.tokens, now.done)
                if now.done or text.stopped:
                    whole = piece if parts else text.text
                    finish = "length" if now.cut and not text.stopped else "stop"
                    yield AnswerPart(whole, text.used(now.tokens), now.stats, finish)
                    return
                if parts:
                    yield AnswerPart(piece, len(now.tokens), now.stats)

    async def _follow(self, inputs: Any, seed: int, settings: dict[str, Any]) -> AsyncGenerator[_Progress, None]:
        """Yield a prompt's progress after each round; raises its error."""
        loop, updates = asyncio.get_running_loop(), asyncio.Queue[_Progress]()

        def send(progress: _Progress) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(updates.put_nowait, progress)

        def begin() -> None:
            self._open.add(send)
            try:
                if self._refused is not None:
                    raise self._refused
                self.batches.add(send, inputs, seed, **settings)
            except Exception as error:
                self._open.discard(send)
                send(_Progress.failed(error))

        if not self.alive:
            why = "an AsyncBatcher answers inside its `with` block only, where its thread runs the model"
            raise self._ended or RuntimeError(why)
        self._jobs.put(begin)
        if self._ended is not None:  # the thread may not take this job
            raise self._ended
        try:
            done = False
            while not done:
                progress = await updates.get()
                done = progress.done
                if progress.error is not None:
                    raise progress.error
                yield progress
        finally:
            self._jobs.put(lambda: self._leave(send))

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def fail(self, error: Exception) -> None:
        """End all answers with this error, at once, and all later ones."""
        self._refused = error
        for send in [*self._open]:
            send(_Progress.failed(error))

    def _leave(self, send: _Send) -> None:
        self._open.discard(send)
        self.batches.cancel(send)

    def _fail(self, error: Exception) -> None:
        failed = [*self._open]
        for send in failed:  # all of them, before a row that cannot be removed raises an error
            send(_Progress.failed(error))
        for send in failed:
            self._leave(send)

    def _work(self) -> None:
        try:
            while self._turn():
                pass
            self._ended = RuntimeError("the `with` block of this AsyncBatcher has ended before the answer")
        except BaseException as error:  # of a device, such that not even a row can be removed; a panic in Rust
            self._ended = RuntimeError(f"the model's thread has ended: {type(error).__name__}: {error}")
            self._ended.__cause__ = error
        while not self._jobs.empty():
            with contextlib.suppress(BaseException):  # a device that is gone
                if (job := self._jobs.get()) is not None:
                    job()  # such as a prompt, which is then told
        with contextlib.suppress(BaseException):
            self._fail(self._ended)

    def _turn(self) -> bool:
        """Do the waiting jobs, then a step; False: it was the last one."""
        if not self.batches.busy:  # what took too much memory together has been answered
            self.batches.rows = self.batches.most
        with contextlib.suppress(Empty):
            while (job := self._jobs.get(block=not self.batches.busy)) is not None:
                job()
            return False
        try:
            finished = self.batches.step()
        except Exception as error:  # of the whole batch, since the batcher handles errors of single prompts
            self._fail(error)
            return True
        updates: list[tuple[Any, _Progress]] = [
            (end.ticket, _Progress(end.tokens, end.stats, True, end.cut, end.error)) for end in finished
        ]
        updates += [(send, _Progress(tokens, stats)) for send, tokens, stats in self.batches.written()]
        for send, progress in updates:
            send(progress)
        return True


class AnswerText:
    """The text of a growing answer, up to the first stop string; `stopped` says whether one was found."""

    def __init__(self, tokenizer: Any, stops: Sequence[str]) -> None:
        self._tokenizer, self._stops, self.stopped = tokenizer, stops, False
        self.text, self._begin, self._end, self._sent = "", 0, 0, 0

    def read(self, tokens: list[int], last: bool) -> str:
        """The new text, without an incomplete character or what may be the beginning of a stop string.

        If an answer is generated again from its beginning, there is no new text until it is as long as before.
        """
        if len(tokens) <= self._end and not last:
            return ""
        before, now = (
            self._tokenizer.decode(some, skip_special_tokens=True)
            for some in (tokens[self._begin : self._end], tokens[self._begin :])
        )
        if last or not now.endswith("\ufffd"):
            self.text += now[len(before) :]
            self._begin, self._end = self._end, len(tokens)
        places = [place for stop in self._stops if (place := self.text.find(stop)) >= 0]
        self.stopped, self.text = bool(places), self.text[: min(places, default=None)]
        begins = (n for stop in self._stops for n in range(len(stop)) if self.text.endswith(stop[:n]))
        sure = len(self.text) - (0 if last or self.stopped else max(begins, default=0))
        piece, self._sent = self.text[self._sent : sure], max(self._sent, sure)
        return piece

    def used(self, tokens: list[int]) -> int:
        """The number of tokens up to and including the stop string; without one, of all."""

        def ended(count: int) -> bool:
            text = self._tokenizer.decode(tokens[:count], skip_special_tokens=True)
            return any(stop in text for stop in self._stops)

        behind = itertools.takewhile(ended, reversed(range(len(tokens)))) if self.stopped else ()
        return min(behind, default=len(tokens))  # a few, since every round is looked at
