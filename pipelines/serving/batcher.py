"""Prompts that wait for an answer: what all batchers share, and StaticBatcher, one stock batch after the other."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmspec.pipelines.families import table as families
from mmspec.pipelines.host import readable
from mmspec.pipelines.host.assisted import setting
from mmspec.pipelines.host.call import TYPES
from mmspec.pipelines.host.kinds import GenerativeModel, Processor
from mmspec.pipelines.host.processors.stopping import at_strings, string_end
from mmspec.statistics import Stats

TOGETHER = 8192  # tokens of prompts that are read at once at most, padding included
_TEXT = ("input_ids", "attention_mask", *TYPES)  # inputs with one column a token; all others are pictures, stacked


@dataclass(frozen=True)
class FinishedPrompt:
    """What became of one prompt.

    Attributes:
        tokens: what was generated, the end-of-sequence token included.
        stats: of its rounds alone; empty where mmspec took no part.
        logprob: of these tokens, natural, by the model's own logits before any processor; None unless asked for.
        seconds: since the prompt was first read; rows that run at once share the time.
        error: why there is no answer; None: there is one.
    """

    ticket: Hashable
    tokens: list[int] = field(default_factory=list)
    seconds: float = 0.0
    error: Exception | None = None
    stats: Stats = field(default_factory=Stats)
    logprob: float | None = None


@dataclass(eq=False)
class QueuedPrompt:
    """A prompt, kept until its answer is there, so that it can be asked again."""

    ticket: Hashable
    inputs: dict[str, Any]
    seed: int
    settings: dict[str, Any] = field(default_factory=dict)  # of `generate`, for this prompt alone
    begun: float = 0.0  # when it was first read
    apart: bool = False  # to run with no other beside it: it, or a neighbour, broke a round
    rows: int = 0  # how many ran at once when memory first did not suffice

    @property
    def length(self) -> int:
        return int(self.inputs["input_ids"].shape[1])

    @property
    def shape(self) -> Any:
        """Prompts of the same shape can be read in one batch; None: by itself only."""
        others = {name: value for name, value in self.inputs.items() if name not in _TEXT}
        if self.apart or not all(isinstance(value, Tensor) and value.dim() for value in others.values()):
            return None
        texts = frozenset(self.inputs.keys() - others.keys())
        return self.settings, texts, tuple(sorted((name, tuple(value.shape[1:])) for name, value in others.items()))


class Batcher:
    """Takes prompts one by one and lets some of them run at once; a subclass says how, in `step`.

    Attributes:
        rows: how many may run at once; halved when memory runs out.
        stats: what happened so far, where mmspec took part.
    """

    def __init__(
        self, model: GenerativeModel, processor: Processor, rows: int, scored: bool = False, **generation: Any
    ) -> None:
        """
        Args:
            model: a transformers model, or what wraps one.
            processor: its processor; it tells what to pad with and reads `stop_strings`.
            rows: ≥ 1.
            scored: tell the log-probability of each answer.
            **generation: as for `model.generate`.

        Raises:
            ValueError: no row at all, or several answers to a prompt.
        """
        if rows < 1:
            raise ValueError(f"rows must be at least 1; got {rows}")
        self.model, self.rows, self.stats, self.scored = families.unwrap(model), rows, Stats(), scored
        self.generation = generation
        self._one_answer()
        self._tokenizer: Any = getattr(processor, "tokenizer", processor)
        self._criteria: dict[tuple[str, ...], Any] = {}  # of `stop_strings`, by these
        self._waiting: list[QueuedPrompt] = []
        self._finished: list[FinishedPrompt] = []

    @property
    def running(self) -> list[QueuedPrompt]:
        """The prompts under way."""
        return []

    @property
    def free(self) -> int:
        """How many prompts can be added that will not have to wait."""
        return max(0, self.rows - len(self.running) - len(self._waiting))

    @property
    def busy(self) -> bool:
        """Whether there is anything that has not been handed back yet."""
        return bool(self._waiting or self.running or self._finished)

    def add(self, ticket: Hashable, inputs: Any, seed: int = 0, ahead: bool = False, **settings: Any) -> None:
        """One prompt; it is read once a row is free.

        Args:
            ticket: comes back with the answer.
            inputs: what a processor returned for one prompt, unpadded; on any device.
            seed: of its noise, ≥ 0; without effect where nothing is drawn.
            ahead: of all that wait; such as what begins like a text that has just been answered.
            **settings: as for `model.generate`, for this prompt, before those of all.

        Raises:
            ValueError: not one prompt, or several answers to it.
        """
        if len(inputs["input_ids"]) != 1:
            raise ValueError(f"add takes one prompt at a time; got {len(inputs['input_ids'])}")
        prompt = QueuedPrompt(ticket, dict(inputs), seed, settings)
        self._one_answer(prompt)
        self._waiting.insert(0 if ahead else len(self._waiting), prompt)

    def cancel(self, ticket: Hashable) -> None:
        """Give up a prompt: it is not read, or its row is free before the next round; nothing is handed back of it."""
        self._waiting = [one for one in self._waiting if one.ticket != ticket]
        self._finished = [one for one in self._finished if one.ticket != ticket]

    def written(self) -> Iterator[tuple[Hashable, list[int], Stats]]:
        """The prompts under way, each with the tokens that it has so far, and what happened."""
        yield from ()

    def step(self) -> list[FinishedPrompt]:
        """A part of the work; returns what has finished.

        Where it is interrupted, as from the keyboard, prompts without an answer wait again, from their beginning.
        """
        before = [*self.running, *self._waiting]
        try:
            self._work()
        except BaseException:  # half of the state may have been written
            ended = {end.ticket for end in self._finished}
            self._restart()
            self._waiting = [one for one in before if one.ticket not in ended]
            raise
        finished, self._finished = self._finished, []
        return finished

    def _work(self) -> None:
        """That part; what has ended goes to `_finished`."""
        raise NotImplementedError

    def _restart(self) -> None:
        """Let go of the prompts under way."""

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
        if together and first.shape is not None:
            group = [one for one in self._waiting if one is first or alike(one.shape, first.shape)][:room]
            group = group[: max(1, TOGETHER // max(one.length for one in group))]
        self._waiting = [one for one in self._waiting if one not in group]
        for one in group:
            one.begun = one.begun or time.perf_counter()
        return group

    def _one_answer(self, prompt: QueuedPrompt | None = None) -> None:
        if (answers := self._setting("num_return_sequences", prompt) or 1) > 1:
            raise ValueError(
                f"a prompt gets one answer here; got num_return_sequences={answers}, so add it several times"
            )

    def _setting(self, name: str, prompt: QueuedPrompt | None = None) -> Any:
        """A setting of `generate`, as it is given here, in a configuration given here, or in the model's own."""
        given = self.generation | (prompt.settings if prompt else {})
        value = given.get(name)
        own = (given.get("generation_config"), self.model.generation_config)
        return setting(name, *own) if value is None else value

    def _generate(self, group: list[QueuedPrompt], **how: Any) -> Any:
        own = self.model.generation_config.pad_token_id
        pads = [x for x in (own, getattr(self._tokenizer, "pad_token_id", None)) if x is not None]
        inputs = _padded([one.inputs for one in group], pads[0] if pads else 0)
        inputs = {k: v.to(self.model.device) if isinstance(v, Tensor) else v for k, v in inputs.items()}
        settings = self.generation | group[0].settings
        if (strings := self._strings(group[0])) is not None:
            criteria = [*(settings.get("stopping_criteria") or ()), strings]
            settings |= {"stop_strings": None, "stopping_criteria": criteria}
        return self.model.generate(**inputs, **(settings | how))

    def _answer(self, group: list[QueuedPrompt]) -> None:
        """One call of `generate` from beginning to end."""
        named = self.scored or self._setting("return_dict_in_generate", group[0])
        more = {"return_dict_in_generate": self.scored, "output_logits": self.scored} if named else {}
        with seeded(group[0].seed, self.model):
            out = self._generate(group, **more)
        logits = torch.stack(out.logits, 1) if self.scored else None  # [B, T, V]
        out = out.sequences if self.scored else out
        if not readable.two_parts(self.model):
            out = out[:, max(one.length for one in group) :]
        now = time.perf_counter()
        for b, (one, row) in enumerate(zip(group, out.tolist(), strict=True)):
            tokens = self._ended(one, row)
            logprob = None
            if logits is not None:  # a decoder's first token, which begins every answer, is not generated
                logprob = float(logprobs(logits[b : b + 1], [tokens[len(row) - logits.shape[1] :]]))
            self._finished.append(FinishedPrompt(one.ticket, tokens, now - one.begun, logprob=logprob))

    def _ended(self, prompt: QueuedPrompt, row: list[int]) -> list[int]:
        """What a row of a batch says until it ends; the batch goes on until all have."""
        tokens, strings = row[: answer_length(row, self._setting("eos_token_id", prompt))], self._strings(prompt)
        if strings is None or not tokens:
            return tokens
        before = prompt.inputs["input_ids"][0].tolist()
        end = string_end(strings, [*before, *tokens], len(before) + 1)
        return tokens if end is None else tokens[: end - len(before)]

    def _strings(self, prompt: QueuedPrompt) -> Any:
        """The criterion that `stop_strings` make; None: there are none."""
        if (strings := self._setting("stop_strings", prompt)) is None:
            return None
        named = (strings,) if isinstance(strings, str) else tuple(strings)
        if named not in self._criteria:  # each reads the whole vocabulary
            self._criteria[named] = at_strings([*named], self._tokenizer)
        return self._criteria[named]

    def _again(self, group: list[QueuedPrompt], error: Exception) -> None:
        """Prompts once more, with fewer rows, or each apart; one that was by itself already has failed."""
        if len(group) == 1 and not self.running:
            self.rows = max(self.rows, group[0].rows)  # it alone was too large
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
        error.__traceback__ = None  # its frames hold the tensors of the broken call
        self._finished.append(FinishedPrompt(prompt.ticket, [], time.perf_counter() - prompt.begun, error))


class StaticBatcher(Batcher):
    """One batch after the other: `generate` as it stands, and every batch waits for its longest answer.

    When sampling, the rows of a batch share its noise: what one draws depends on its neighbours.
    """

    def _work(self) -> None:
        """A whole batch."""
        if group := self._take(together=True):
            try:
                self._answer(group)
            except Exception as error:  # out of memory, a picture that the model refuses: the others go on
                self._again(group, error)


@contextlib.contextmanager
def seeded(seed: int, model: torch.nn.Module) -> Iterator[None]:
    """Inside, torch draws from this seed; afterwards, on the CPU and the model's devices, as if nothing was drawn."""
    devices = {p.device for p in model.parameters() if p.device.type == model.device.type != "cpu"}
    kind = {"device_type": model.device.type} if devices else {}
    with torch.random.fork_rng(sorted(devices, key=str), **kind):
        torch.manual_seed(seed)
        yield


def logprobs(logits: Tensor, tokens: Sequence[Sequence[int]]) -> Tensor:
    """[B], float32: log-probability of each row's tokens, the law of token i being that of logits [B, T, V] at i."""
    most = max(map(len, tokens))
    padded = torch.tensor([[*row, *[-1] * (most - len(row))] for row in tokens], device=logits.device)
    each = logits[:, :most].float().log_softmax(-1).gather(2, padded.clamp(min=0)[..., None])[..., 0]
    return torch.where(padded >= 0, each, 0.0).sum(1)


def answer_length(row: list[int], eos: int | list[int] | Tensor | None) -> int:
    """Tokens of a row up to and with its end-of-sequence token; what follows is padding."""
    ends = () if eos is None else torch.as_tensor(eos).flatten().tolist()
    return next((place + 1 for place, token in enumerate(row) if token in ends), len(row))


def _padded(prompts: list[dict[str, Any]], fill: int) -> dict[str, Any]:
    """Prompts of the same shape as one batch, padded on the left."""
    if len(prompts) == 1:
        return prompts[0]
    longest = max(prompt["input_ids"].shape[1] for prompt in prompts)

    def one(name: str) -> Tensor:
        parts = [prompt[name] for prompt in prompts]
        if name in _TEXT:
            parts = [pad(t, (longest - t.shape[1], 0), value=fill if name == "input_ids" else 0) for t in parts]
        return torch.cat(parts)

    return {name: one(name) for name in prompts[0]}


def alike(a: Any, b: Any) -> bool:
    """Whether these are equal; tensors and arrays, which do not say so in one word, are where they are one object."""
    try:
        return bool(a == b)
    except (RuntimeError, ValueError):
        return False


def out_of_memory(error: Exception) -> bool:
    """Of a device, or of the machine; its allocator and that of MPS raise a plain RuntimeError."""
    named = "allocate memory" in str(error) or "out of memory" in str(error)
    return named or isinstance(error, (torch.OutOfMemoryError, MemoryError))
