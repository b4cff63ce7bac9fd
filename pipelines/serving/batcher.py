"""Batcher, the base class with a queue of prompts, and StaticBatcher, which runs one stock batch after the other."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmspec.pipelines.host import readable, wrappers
from mmspec.pipelines.host.assisted import setting
from mmspec.pipelines.host.call import TYPES
from mmspec.pipelines.host.kinds import GenerativeModel, Processor
from mmspec.pipelines.host.processors.stopping import at_strings, string_end
from mmspec.statistics import Stats

TOGETHER = 8192  # the maximum number of prompt tokens in one prefill, including padding
_TEXT = ("input_ids", "attention_mask", *TYPES)  # inputs with one column per token; all others are stacked images


@dataclass(frozen=True)
class FinishedPrompt:
    """The result for one prompt.

    Attributes:
        tokens: the generated tokens, including the end-of-sequence token.
        cut: whether the answer was cut off at the maximum number of tokens.
        stats: the statistics of its rounds only; empty if mmspec was not used.
        logprob: the natural log-probability of these tokens by the model's raw logits; None unless requested.
        seconds: the time since the prompt was first read; rows that run at the same time share it.
        error: why there is no answer; None: there is one.
    """

    ticket: Hashable
    tokens: list[int] = field(default_factory=list)
    seconds: float = 0.0
    error: Exception | None = None
    stats: Stats = field(default_factory=Stats)
    logprob: float | None = None
    cut: bool = False


@dataclass(eq=False)
class QueuedPrompt:
    """A prompt, kept until it is answered, so that it can be repeated."""

    ticket: Hashable
    inputs: dict[str, Any]
    seed: int
    settings: dict[str, Any] = field(default_factory=dict)  # of `generate`, for this prompt only
    begun: float = 0.0  # when it was first read
    apart: bool = False  # whether it has to run alone, since it was in a round that raised an error
    rows: int = 0  # the batch size when it first ran out of memory

    @property
    def length(self) -> int:
        return int(self.inputs["input_ids"].shape[1])

    @property
    def shape(self) -> Any:
        """Prompts of the same shape can be read in one batch; None: it can only be read alone."""
        others = {name: value for name, value in self.inputs.items() if name not in _TEXT}
        if self.apart or not all(isinstance(value, Tensor) and value.dim() for value in others.values()):
            return None
        texts = frozenset(self.inputs.keys() - others.keys())
        return self.settings, texts, tuple(sorted((name, tuple(value.shape[1:])) for name, value in others.items()))


class Batcher:
    """Takes prompts one by one and runs several at the same time; a subclass defines how, in `_work`.

    Attributes:
        rows: how many may run at the same time; halved when memory runs out.
        most: `rows` at first.
        stats: the statistics of all rounds so far, if mmspec is used.
    """

    def __init__(
        self, model: GenerativeModel, processor: Processor, rows: int, scored: bool = False, **generation: Any
    ) -> None:
        """
        Args:
            model: a transformers model, or a wrapper of one.
            processor: its processor, for the padding token and `stop_strings`.
            rows: ≥ 1.
            scored: compute the log-probability of each answer.
            **generation: as for `model.generate`.

        Raises:
            ValueError: `rows` below 1, or several answers to a prompt.
        """
        if not isinstance(rows, int) or rows < 1:
            raise ValueError(f"rows must be a whole number of at least 1; got {rows!r}")
        self.model, self.stats, self.scored = wrappers.unwrap(model), Stats(), scored
        self.rows = self.most = rows
        self._outer = wrappers.outer(model)
        self.generation = generation
        self._one_answer()
        self._tokenizer: Any = getattr(processor, "tokenizer", processor)
        self._criteria: dict[tuple[str, ...], Any] = {}  # `stop_strings` → their criterion
        self._waiting: list[QueuedPrompt] = []
        self._finished: list[FinishedPrompt] = []

    @property
    def running(self) -> list[QueuedPrompt]:
        """The prompts that are being answered."""
        return []

    @property
    def free(self) -> int:
        """How many prompts can be added without having to wait."""
        return max(0, self.rows - len(self.running) - len(self._waiting))

    @property
    def busy(self) -> bool:
        """Whether there are prompts whose result was not returned yet."""
        return bool(self._waiting or self.running or self._finished)

    def add(self, ticket: Hashable, inputs: Any, seed: int = 0, ahead: bool = False, **settings: Any) -> None:
        """Add one prompt to the queue; it is read once a row is free.

        Args:
            ticket: is returned with the answer.
            inputs: the output of a processor for one prompt, unpadded; on any device.
            seed: of its noise, ≥ 0; has no effect in greedy decoding.
            ahead: put it first in the queue, for example since it shares a prefix with a text just answered.
            **settings: as for `model.generate`, for this prompt; they override those for all.

        Raises:
            ValueError: not exactly one prompt, or several answers to it.
        """
        require_one_row(inputs, "add")
        prompt = QueuedPrompt(ticket, dict(inputs), seed, settings)
        self._one_answer(prompt)
        self._waiting.insert(0 if ahead else len(self._waiting), prompt)

    def cancel(self, ticket: Hashable) -> None:
        """Cancel a prompt: it leaves the queue, or its row leaves before the next round; there is no result for it."""
        self._waiting = [one for one in self._waiting if one.ticket != ticket]
        self._finished = [one for one in self._finished if one.ticket != ticket]

    def written(self) -> Iterator[tuple[Hashable, list[int], Stats]]:
        """The ticket of each prompt that is being answered, its tokens so far, and its statistics."""
        yield from ()

    def step(self) -> list[FinishedPrompt]:
        """Do a part of the work; returns what has finished.

        If it is interrupted, for example from the keyboard, prompts without an answer return to the queue.
        """
        before = [*self.running, *self._waiting]
        try:
            self._work()
        except BaseException:  # the state may be inconsistent
            ended = {end.ticket for end in self._finished}
            self._restart()
            self._waiting = [one for one in before if one.ticket not in ended]
            raise
        finished, self._finished = self._finished, []
        return finished

    def _work(self) -> None:
        """The work of one `step`; results go to `_finished`."""
        raise NotImplementedError

    def _restart(self) -> None:
        """Drop the prompts that are being answered."""

    def _take(self, together: bool) -> list[QueuedPrompt]:
        """The prompts to read next, in one batch: the one that has waited longest, and others of its shape."""
        running = self.running
        room = self.rows - len(running)
        if room < 1 or not self._waiting:
            return []
        first = self._waiting[0]
        if running and (first.apart or running[0].apart):
            return []
        group = [first]
        if together and (shape := first.shape) is not None:
            group = list(islice((one for one in self._waiting if one is first or alike(one.shape, shape)), room))
            group = group[: max(1, TOGETHER // max(one.length for one in group))]
        chosen = {id(one) for one in group}
        self._waiting = [one for one in self._waiting if id(one) not in chosen]
        for one in group:
            one.begun = one.begun or time.perf_counter()
        return group

    def _one_answer(self, prompt: QueuedPrompt | None = None) -> None:
        if (answers := self._setting("num_return_sequences", prompt) or 1) > 1:
            raise ValueError(
                f"a prompt gets one answer here; got num_return_sequences={answers}, so add it several times"
            )

    def _setting(self, name: str, prompt: QueuedPrompt | None = None) -> Any:
        """A setting of `generate`: from the keyword arguments, else from their generation_config, else the model's."""
        given = self.generation | (prompt.settings if prompt else {})
        value = given.get(name)
        own = (given.get("generation_config"), self.model.generation_config)
        return setting(name, *own) if value is None else value

    def _generate(self, group: list[QueuedPrompt], **overrides: Any) -> Any:
        own = self.model.generation_config.pad_token_id
        pads = [x for x in (own, getattr(self._tokenizer, "pad_token_id", None)) if x is not None]
        inputs = _padded([one.inputs for one in group], pads[0] if pads else 0)
        inputs = {k: v.to(self.model.device) if isinstance(v, Tensor) else v for k, v in inputs.items()}
        settings = self.generation | group[0].settings
        if (strings := self._strings(group[0])) is not None:
            criteria = [*(settings.get("stopping_criteria") or ()), strings]
            settings |= {"stop_strings": None, "stopping_criteria": criteria}
        return self._outer.generate(**inputs, **(settings | overrides))

    def _answer(self, group: list[QueuedPrompt]) -> None:
        """Answer prompts in one whole call of `generate`."""
        named = self.scored or self._setting("return_dict_in_generate", group[0])
        more = {"return_dict_in_generate": self.scored, "output_logits": self.scored} if named else {}
        with seeded(group[0].seed, self.model):
            out = self._generate(group, **more)
        logits = torch.stack(out.logits, 1) if self.scored else None  # [B, T, V]
        out = out.sequences if self.scored else out
        if not readable.encoder_decoder(self.model):
            out = out[:, max(one.length for one in group) :]
        now = time.perf_counter()
        for b, (one, row) in enumerate(zip(group, out.tolist(), strict=True)):
            tokens = self._ended(one, row)
            logprob = None
            if logits is not None:  # the start token in the answers of encoder-decoder models is not generated
                logprob = float(logprobs(logits[b : b + 1], [tokens[len(row) - logits.shape[1] :]]))
            cut = self._cut(one, tokens)
            self._finished.append(FinishedPrompt(one.ticket, tokens, now - one.begun, logprob=logprob, cut=cut))

    def _ended(self, prompt: QueuedPrompt, row: list[int]) -> list[int]:
        """The tokens of a row up to its end; the batch continues until all rows have ended."""
        tokens, strings = row[: answer_length(row, self._setting("eos_token_id", prompt))], self._strings(prompt)
        if strings is None or not tokens:
            return tokens
        before = prompt.inputs["input_ids"][0].tolist()
        end = string_end(strings, [*before, *tokens], len(before) + 1)
        return tokens if end is None else tokens[: end - len(before)]

    def _cut(self, prompt: QueuedPrompt, tokens: list[int]) -> bool:
        most = self._setting("max_new_tokens", prompt)
        return most is not None and cut_off(tokens, self._setting("eos_token_id", prompt), most)

    def _strings(self, prompt: QueuedPrompt) -> Any:
        """The stopping criterion for `stop_strings`; None: there are none."""
        if (strings := self._setting("stop_strings", prompt)) is None:
            return None
        key = (strings,) if isinstance(strings, str) else tuple(strings)
        if key not in self._criteria:  # building one reads the whole vocabulary
            self._criteria[key] = at_strings([*key], self._tokenizer)
        return self._criteria[key]

    def _again(self, group: list[QueuedPrompt], error: Exception) -> None:
        """Queue prompts again, with fewer rows, or each to run alone; a prompt that already ran alone has failed."""
        if len(group) == 1 and not self.running:
            self.rows = max(self.rows, group[0].rows)  # only this prompt was too large
            self._fail(group[0], error)
            return
        if out_of_memory(error):
            for one in group:
                one.rows = one.rows or self.rows
            self.rows = max(1, self.rows // 2)
            if self.model.device.type != "cpu":
                torch.accelerator.empty_cache()
        else:
            for one in group:
                one.apart = True
        self._waiting = [*group, *self._waiting]

    def _fail(self, prompt: QueuedPrompt, error: Exception) -> None:
        error.__traceback__ = None  # its frames keep the tensors of the failed call alive
        self._finished.append(FinishedPrompt(prompt.ticket, [], time.perf_counter() - prompt.begun, error))


class StaticBatcher(Batcher):
    """Runs one batch of `generate` after the other; every batch lasts as long as its longest answer.

    With sampling, the rows of a batch share its noise, so the tokens of a row depend on the other rows.
    """

    def _work(self) -> None:
        """Run a whole batch."""
        if group := self._take(together=True):
            try:
                self._answer(group)
            except Exception as error:  # such as out of memory, or an image that the model refuses; others continue
                self._again(group, error)


@contextlib.contextmanager
def seeded(seed: int, model: torch.nn.Module) -> Iterator[None]:
    """A context with this torch seed; restores the random state of the CPU and of the model's devices at its end."""
    devices = {p.device for p in model.parameters() if p.device.type == model.device.type != "cpu"}
    kind = {"device_type": model.device.type} if devices else {}
    with torch.random.fork_rng(sorted(devices, key=str), **kind):
        torch.manual_seed(seed)
        yield


def logprobs(logits: Tensor, tokens: Sequence[Sequence[int]]) -> Tensor:
    """[B], float32: the log-probability of each row's tokens; logits [B, T, V] at i are those of token i."""
    most = max(map(len, tokens))
    padded = torch.tensor([[*row, *[-1] * (most - len(row))] for row in tokens], device=logits.device)
    each = logits[:, :most].float().log_softmax(-1).gather(2, padded.clamp(min=0)[..., None])[..., 0]
    return torch.where(padded >= 0, each, 0.0).sum(1)


def answer_length(row: list[int], eos: int | list[int] | Tensor | None) -> int:
    """The number of a row's tokens up to and including its end-of-sequence token; the rest is padding."""
    ends = () if eos is None else torch.as_tensor(eos).flatten().tolist()
    return next((place + 1 for place, token in enumerate(row) if token in ends), len(row))


def cut_off(row: list[int], eos: int | list[int] | Tensor | None, most: int) -> bool:
    """Whether an answer has the maximum length and no end-of-sequence token."""
    return len(row) >= most and answer_length([*row, -1], eos) > len(row)


def require_one_row(inputs: Any, name: str) -> None:
    """Check that these are the inputs of one prompt, as a processor returns them.

    Raises:
        ValueError: they are not; `name` is the function in the message.
    """
    ids = inputs.get("input_ids") if hasattr(inputs, "get") else None
    if not isinstance(ids, Tensor) or ids.dim() != 2 or len(ids) != 1:
        got = list(ids.shape) if isinstance(ids, Tensor) else type(inputs if ids is None else ids).__name__
        raise ValueError(
            f"{name} takes the inputs of one prompt, as a processor returns them, with a tensor input_ids [1, T]; "
            f"got {got}"
        )


def _padded(prompts: list[dict[str, Any]], fill: int) -> dict[str, Any]:
    """Collate prompts of the same shape into one left-padded batch."""
    if len(prompts) == 1:
        return prompts[0]
    lengths = [prompt["input_ids"].shape[1] for prompt in prompts]
    longest = max(lengths)
    if min(lengths) < longest:  # transformers infers a mask only if the padding token is not an end of sequence
        prompts = [{"attention_mask": torch.ones_like(prompt["input_ids"]), **prompt} for prompt in prompts]

    def one(name: str) -> Tensor:
        parts = [prompt[name] for prompt in prompts]
        if name in _TEXT:
            parts = [pad(t, (longest - t.shape[1], 0), value=fill if name == "input_ids" else 0) for t in parts]
        return torch.cat(parts)

    return {name: one(name) for name in prompts[0]}


def alike(a: Any, b: Any) -> bool:
    """Whether these are equal; tensors and arrays, whose == is no single bool, have to be the same object."""
    try:
        return bool(a == b)
    except (RuntimeError, ValueError):
        return False


def out_of_memory(error: Exception) -> bool:
    """Whether a device or the host ran out of memory; the allocators of the CPU and MPS raise a plain RuntimeError."""
    named = "allocate memory" in str(error) or "out of memory" in str(error)
    return named or isinstance(error, (torch.OutOfMemoryError, MemoryError))
