"""Turns pictures and prompts into texts: prepares them in threads, batches them, and decodes the answers."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import cast

from PIL import Image

from mmspec.app.prompt import PromptChoice
from mmspec.pipelines.host.kinds import BatchFeature, Processor
from mmspec.pipelines.prompts import chat_inputs
from mmspec.pipelines.serving.batcher import Batcher, FinishedPrompt
from mmspec.pipelines.serving.threads import THREADS, ProcessorThreads
from mmspec.statistics import Stats


@dataclass(frozen=True)
class CaptionResult:
    """The result of one item.

    Attributes:
        tokens: number of generated tokens.
        seconds: since the prefill of its prompt; answers of one batch share the time.
        finish: "stop" if the model ended the answer, "length" if it, or another of several answers, was cut off at
            `max_new_tokens`.
        further: the answers to the further prompts.
        scores: mean log-probability per token for each answer, in the order of the prompts; empty unless requested.
        error: why there is no caption; None if there is one. JSON that was cut off is none, but keeps its text.
    """

    ticket: Hashable
    text: str = ""
    tokens: int = 0
    seconds: float = 0.0
    error: Exception | None = None
    finish: str = ""
    further: tuple[str, ...] = ()
    scores: tuple[float, ...] = ()


@dataclass(eq=False)
class _Item:
    """The prompts of one item, and the answers so far; a ticket of the batcher is an item and a prompt's number."""

    ticket: Hashable
    seed: int
    inputs: list[BatchFeature | None]  # by prompt; None once it was added to the batcher
    results: list[CaptionResult | None]


class Captioner:
    """Takes pictures and prompts one by one, and returns answers as they finish; a failure affects only its item."""

    def __init__(self, batches: Batcher, threads: ProcessorThreads) -> None:
        self._batches, self._threads = batches, threads
        self._prepared = deque[tuple[Hashable, Future[_Item]]]()

    @property
    def rows(self) -> int:
        """The maximum batch size; it is halved when memory runs out."""
        return self._batches.rows

    @property
    def free(self) -> int:
        """How many items can be added; some are prepared ahead, so that an ended row is replaced at once."""
        return max(0, self._batches.free + max(THREADS, self.rows // 4) - len(self._prepared))

    @property
    def busy(self) -> bool:
        """Whether any item has not been returned yet."""
        return self._batches.busy or bool(self._prepared)

    @property
    def stats(self) -> Stats:
        """Statistics of the accelerated path so far."""
        return self._batches.stats

    def add(self, ticket: Hashable, frames: Sequence[Image.Image], choice: PromptChoice, seed: int = 0) -> None:
        """Add one picture, or the frames of one clip, and its prompts; `seed` is used for sampling.

        Further prompts join once the first is answered, so that they can use the prefix cache of the picture.
        """

        def job(processor: Processor) -> _Item:
            each = [chat_inputs(processor, [text], [frames], choice.system, clips=True) for text in choice.texts]
            return _Item(ticket, seed, [one.to(self._batches.model.dtype) for one in each], [None] * len(each))

        self._prepared.append((ticket, self._threads.submit(job)))

    def _add(self, item: _Item, number: int, ahead: bool = False) -> None:
        self._batches.add((item, number), item.inputs[number], item.seed + number, ahead=ahead)
        item.inputs[number] = None

    def _enter(self) -> list[CaptionResult]:
        """Add prepared items to the batcher; returns results for those that the processor or the batcher refuses."""
        refused, wait = [], 0 if self._batches.busy else self._batches.free
        while self._prepared and (wait > 0 or self._prepared[0][1].done()):
            ticket, future = self._prepared.popleft()
            wait -= 1
            try:
                self._add(future.result(), 0)
            except Exception as error:  # the picture or prompt cannot be processed
                refused.append(CaptionResult(ticket, error=error))
        return refused

    def step(self) -> list[CaptionResult]:
        """Do a part of the work, such as one forward of the model, and return the finished results."""
        results = self._enter()
        for one in self._batches.step():
            item, number = cast(tuple[_Item, int], one.ticket)
            item.results[number] = result = self._result(item, one)
            if number == 0 and result.error is None:
                for other in reversed(range(1, len(item.results))):
                    self._add(item, other, ahead=True)
            done = [each for each in item.results if each is not None]
            if len(done) == len(item.results) or (number == 0 and result.error is not None):
                results.append(_joined(done))
        return results

    def _result(self, item: _Item, end: FinishedPrompt) -> CaptionResult:
        """The answer to one prompt."""
        scores = () if end.logprob is None else (round(end.logprob / max(1, len(end.tokens)), 6),)
        result = CaptionResult(item.ticket, "", len(end.tokens), end.seconds, end.error, scores=scores)
        if end.error:
            return result
        [text] = self._threads.processor.batch_decode([end.tokens], skip_special_tokens=True)
        result = replace(result, text=text.strip(), finish="length" if end.cut else "stop")
        if end.cut and "logits_processor" in self._batches.generation:
            error = ValueError(f"no complete JSON in {len(end.tokens)} tokens; raise --max-new-tokens")
            return replace(result, error=error)
        return result


def _joined(results: list[CaptionResult]) -> CaptionResult:
    """The result of an item from those of its prompts; if one fails, the item fails."""
    return replace(
        results[0],
        tokens=sum(one.tokens for one in results),
        seconds=sum(one.seconds for one in results),
        error=next((one.error for one in results if one.error is not None), None),
        finish="length" if any(one.finish == "length" for one in results) else results[0].finish,
        further=tuple(one.text for one in results[1:]),
        scores=tuple(score for one in results for score in one.scores),
    )
