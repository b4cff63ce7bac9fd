"""Prompts of asyncio tasks in one batch: each gets the text that it gets alone, errors are its own, rows are freed."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import tiny_vlms

import mmspec
from mmspec.pipelines.serving.async_batcher import AnswerPart, AnswerText, AsyncBatcher
from mmspec.pipelines.serving.continuous import ContinuousBatcher
from mmspec.pipelines.serving.threads import ProcessorThreads


class Letters:
    """A tokenizer whose tokens are bytes of UTF-8."""

    pad_token_id = 0

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        return bytes(token % 256 for token in tokens).decode(errors="replace")


@pytest.fixture
def batcher() -> Iterator[AsyncBatcher]:
    model = tiny_vlms.model("llava")
    with mmspec.enable(model, "ngram"), AsyncBatcher(ContinuousBatcher(model, Letters(), 2), Letters()) as held:
        yield held


def prompts(count: int) -> list[Any]:
    return [tiny_vlms.prompt("llava", "image first", seed) for seed in range(count)]


async def parts(batcher: AsyncBatcher, inputs: Any, **how: Any) -> list[AnswerPart]:
    return [part async for part in batcher.stream(inputs, **how)]


async def together(batcher: AsyncBatcher, count: int, **how: Any) -> list[list[AnswerPart]]:
    return list(await asyncio.gather(*(parts(batcher, inputs, **how) for inputs in prompts(count))))


def freed(batcher: AsyncBatcher) -> bool:
    for _ in range(500):
        if not batcher.batches.busy:
            return True
        time.sleep(0.01)
    return False


def test_tasks_share_a_batch_and_get_their_own_texts(batcher: AsyncBatcher) -> None:
    call = {"max_new_tokens": 12, "do_sample": False}
    answers = asyncio.run(together(batcher, 5, **call))
    model = batcher.batches.model
    with mmspec.enable(model, "plain"):
        rows = [model.generate(**one, **call)[0, one["input_ids"].shape[1] :].tolist() for one in prompts(5)]
    texts = [Letters().decode(row, True) for row in rows]
    assert ["".join(part.text for part in answer) for answer in answers] == texts and len(answers[0]) > 3
    assert [answer[-1].tokens for answer in answers] == [len(row) for row in rows]
    assert {part.finish for answer in answers for part in answer[:-1]} == {None}
    assert {answer[-1].finish for answer in answers} <= {"stop", "length"}
    whole = asyncio.run(together(batcher, 5, parts=False, **call))
    assert [[part.text for part in answer] for answer in whole] == [[text] for text in texts]
    stop = texts[0][4:6]
    short = asyncio.run(parts(batcher, prompts(1)[0], stop=[stop], **call))
    assert "".join(part.text for part in short) == texts[0][: texts[0].index(stop)] and short[-1].finish == "stop"


def test_errors_are_those_of_their_prompt_and_closing_frees_the_row(batcher: AsyncBatcher) -> None:
    async def work() -> None:
        pair = {name: tensor.repeat(2, 1) for name, tensor in tiny_vlms.prompt("llava", "text only").items()}
        with pytest.raises(ValueError, match="the inputs of one prompt"):
            await parts(batcher, pair)
        with pytest.raises(ValueError, match="num_return_sequences=2"):
            await parts(batcher, prompts(1)[0], num_return_sequences=2)
        left = batcher.stream(prompts(1)[0], max_new_tokens=100_000)
        await anext(left)
        assert len(batcher.batches.running) == 1
        await left.aclose()
        assert (await parts(batcher, prompts(1)[0], max_new_tokens=3))[-1].tokens <= 3

    asyncio.run(work())
    assert freed(batcher)


def test_outside_of_its_block_nothing_is_waited_for() -> None:
    model = tiny_vlms.model("llava")

    async def work(held: AsyncBatcher) -> None:
        with pytest.raises(RuntimeError, match="inside its `with` block only"):
            await parts(held, prompts(1)[0])
        with held:
            left = held.stream(prompts(1)[0], max_new_tokens=100_000)
            await anext(left)
        with pytest.raises(RuntimeError, match="has ended before the answer"):
            [part async for part in left]
        assert not held.batches.busy

    with mmspec.enable(model, "ngram"):
        asyncio.run(asyncio.wait_for(work(AsyncBatcher(ContinuousBatcher(model, Letters(), 2), Letters())), 60))


class PanicError(BaseException):
    """Like pyo3's, which libraries in Rust raise."""


@pytest.mark.parametrize("error", [RuntimeError("device lost"), PanicError("out of bounds")], ids=repr)
def test_a_thread_that_ends_by_an_error_leaves_nobody_waiting(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_vlms.model("llava")

    def breaks(ticket: object) -> None:
        raise error

    async def work(held: AsyncBatcher) -> None:
        with held:
            left, other = (held.stream(one, max_new_tokens=100_000) for one in prompts(2))
            await anext(left)
            await anext(other)
            monkeypatch.setattr(held.batches, "cancel", breaks)
            await left.aclose()
            with pytest.raises(RuntimeError, match=f"thread has ended: {type(error).__name__}: {error}"):
                [part async for part in other]

    with mmspec.enable(model, "ngram"):
        asyncio.run(asyncio.wait_for(work(AsyncBatcher(ContinuousBatcher(model, Letters(), 2), Letters())), 60))


def test_all_answers_can_be_ended_those_that_wait_too() -> None:
    model = tiny_vlms.model("llava")

    async def work(held: AsyncBatcher) -> None:
        with held:
            streams = [held.stream(one, max_new_tokens=100_000) for one in prompts(3)]
            waiting = [asyncio.ensure_future(anext(one)) for one in streams]
            await waiting[0]
            held.fail(ValueError("enough"))
            for one in (*waiting[1:], streams[0]):
                with pytest.raises(ValueError, match="enough"):
                    await one if isinstance(one, asyncio.Future) else [part async for part in one]
            with pytest.raises(ValueError, match="enough"):
                await anext(held.stream(prompts(1)[0]))

    with mmspec.enable(model, "ngram"):
        asyncio.run(asyncio.wait_for(work(AsyncBatcher(ContinuousBatcher(model, Letters(), 1), Letters())), 60))


@pytest.mark.parametrize("step", [1, 2, 5])
@pytest.mark.parametrize(
    ("text", "stops", "want"),
    [
        ("a é–𝄞 b", [], "a é–𝄞 b"),
        ("so END. ENDING", ["ENDI", "x"], "so END. "),
        ("so EN", ["END"], "so EN"),
        ("abab", ["bab", "ab"], ""),
    ],
)
def test_text_comes_in_whole_characters_and_without_stop_strings(
    step: int, text: str, stops: list[str], want: str
) -> None:
    writer, tokens, pieces = AnswerText(Letters(), stops), [*text.encode()], []
    for end in [*range(step, len(tokens), step), len(tokens)]:
        pieces.append(writer.read(tokens[:end], end == len(tokens)))
        assert "\ufffd" not in pieces[-1]
        if writer.stopped:
            break
    assert "".join(pieces) == want and writer.stopped == (want != text)
    stopped = min((stop for stop in stops if want + stop in text), key=len, default="")
    assert writer.used(tokens) == len((want + stopped).encode())  # whatever was drafted behind the stop string


class Processor:
    """Fails where two threads use it at once, as fast tokenizers do."""

    def __init__(self) -> None:
        self.held = False

    def __call__(self, seconds: float) -> str:
        assert not self.held, "Already borrowed"
        self.held = True
        time.sleep(seconds)
        self.held = False
        return threading.current_thread().name


def test_jobs_run_side_by_side() -> None:
    threads = ProcessorThreads(Processor())
    jobs = [threads.submit(lambda processor, seconds=seconds: processor(seconds)) for seconds in (1.0, 0.2, 0.2, 0.2)]
    failing = threads.submit(lambda processor: 1 / 0)
    names = {job.result() for job in jobs}
    assert len(names) == 2 and all("mmspec-processor" in name for name in names)
    with pytest.raises(ZeroDivisionError):
        failing.result()
