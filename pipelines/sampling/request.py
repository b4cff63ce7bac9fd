"""From logits to the distribution of a token: processors, then argmax, a draw, or noise fixed beforehand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from mmspec.kernels import dispatch
from mmspec.kernels import reference as ops
from mmspec.pipelines.sampling.processors import POINTWISE, Processors
from mmspec.session import Group
from mmspec.types import Categorical, Draft, Scores

Process = Callable[[Tensor, Group, Draft], Tensor]  # of logits, rows and draft


class Noise(Protocol):
    """What turns a distribution into one token per node, by noise that depends on the token's absolute position
    only."""

    def draw(self, logits: Tensor, session: Group, draft: Draft) -> Tensor:
        """Tokens [B, N] from processed logits [B, N, V]."""


class Sampler:
    """Logits to the distribution that a round is judged by.

    Args:
        processors: temperature, top-k and the like: a LogitsProcessorList, or a function of (logits, session, draft).
        sample: draw; otherwise take the likeliest token.
        noise: realise the distribution as the point mass on the token that this noise chooses (seed-exact). What is
            drawn after a node then depends on its path and position alone, so that any draft gives the same tokens.
            CounterNoise for rows with seeds of their own, TorchNoise for what a stock loop would have drawn; None: keep
            the distribution.
    """

    def __init__(
        self,
        processors: LogitsProcessorList | Process,
        sample: bool = True,
        noise: Noise | None = None,
    ) -> None:
        stock = isinstance(processors, LogitsProcessorList)
        self.process: Process = Processors(processors) if stock else processors  # type: ignore[arg-type, assignment]
        self.sample = sample
        self.noise: Noise | None = noise if sample else None

    def realised(self, processed: Tensor, session: Group, draft: Draft) -> Categorical:
        """p after each node, from logits that the processors have seen."""
        if not self.sample:
            return Categorical(ids=processed.argmax(-1))
        if self.noise is None:
            return Categorical(processed)
        return Categorical(ids=self.noise.draw(processed, session, draft))

    def weighed(self, logits: Tensor, session: Group, position: Tensor) -> Tensor:
        """A drafter's logits [B, n, V] of the tokens at `position` [B, n] after the prompt, as `distribution` weighs
        its own.

        Point-wise processors, then, in seed-exact drawing, the noise that the target's own draw will meet.
        """
        if not self.sample:
            return logits
        chosen: Any = LogitsProcessorList(p for p in getattr(self.process, "processors", []) if type(p) in POINTWISE)
        warped = chosen(position.reshape(-1, 1), logits.float().flatten(0, 1)).view_as(logits)
        if not isinstance(self.noise, CounterNoise):
            return warped
        drawn: Tensor = warped + self.noise.at(session, position, logits.shape[-1])
        return drawn


@dataclass(frozen=True, eq=False)
class Request:
    """What a call asks of the logits of its rows, which carry it.

    Attributes:
        sampler: processors, and how to draw.
        keep: hand processed and raw logits back with the scores.
        widen: process logits in float32, as `_sample` does.
        allowed: what the model itself lets through, before any processor: a function of logits [B, N, V] and of the
            numbers [B, N] of the new tokens that they are for; None: everything.
    """

    sampler: Sampler
    keep: bool = False
    widen: bool = True
    allowed: Callable[[Tensor, Tensor], Tensor] | None = None

    @property
    def bare(self) -> bool:
        """Whether the call takes the likeliest token of unprocessed logits."""
        return not (self.sampler.sample or self.keep or getattr(self.sampler.process, "processors", True))

    def scores(self, logits: Tensor, raw: Tensor, rows: Group, draft: Draft, hidden: Tensor | None) -> Scores:
        """The distribution that stock `generate` would draw from.

        Args:
            logits: [B, N, V], guided.
            raw: [B, N, V], of the conditional stream.
        """
        wide = logits.to(torch.float32) if self.widen and not self.bare else logits
        if self.allowed is not None:
            wide = self.allowed(wide, rows.emitted[:, None] + draft.tree.depth)
        if self.bare:
            return Scores(Categorical(ids=wide.argmax(-1)), hidden)
        processed = self.sampler.process(wide, rows, draft)
        kept = (processed, raw.to(torch.float32)) if self.keep else (None, None)
        return Scores(self.sampler.realised(processed, rows, draft), hidden, *kept)


@dataclass(frozen=True)
class CounterNoise:
    """Gumbel noise hashed from (row seed, absolute position): a row alone draws what it draws in any batch."""

    def draw(self, logits: Tensor, session: Group, draft: Draft) -> Tensor:
        position = session.emitted[:, None] + draft.tree.depth
        return dispatch.draw(logits, (session.seeds, position))

    def at(self, session: Group, position: Tensor, vocab: int) -> Tensor:
        """[B, N, V] for the tokens at `position` [B, N]."""
        return ops.gumbel(session.seeds, position, vocab)


class TorchNoise:
    """The exponential noise of `torch.multinomial(probs, 1)`, as a loop that draws once per step would meet it.

    That function returns argmax(probs / q) with q ~ Exp(1) of the shape of `probs`. Here q of step t is drawn once, in
    order, for all rows that the call began with, and kept until every row is past t. `close` puts the generator where
    the loop would have left it.

    Args:
        generator: None for torch's global one.
    """

    def __init__(self, generator: torch.Generator | None = None) -> None:
        self.generator = generator
        self._rows = 0  # of the call, known at the first draw
        self._q: Tensor | None = None  # [T, rows, V], of the steps from `_begin` on
        self._begin = 0
        self._after: list[Tensor] = []  # the generator's state before step `_begin`, and after each of the T

    def draw(self, logits: Tensor, session: Group, draft: Draft) -> Tensor:
        rows = session.rows
        self._rows = self._rows or len(rows)
        begin = min(row.generated for row in rows)
        last = max(row.limit - row.start for row in rows) - 1
        end = min(max(row.generated for row in rows) + logits.shape[1] - 1, last)
        q = self._through(begin, end, logits)
        index = torch.tensor([row.index for row in rows], device=logits.device)
        step = (session.emitted[:, None] + draft.tree.depth).clamp(max=end) - self._begin
        p = logits.softmax(-1)
        return torch.where(p[..., 0].isnan(), ops.NOTHING, (p / q[step, index[:, None]]).argmax(-1))

    def _through(self, begin: int, end: int, like: Tensor) -> Tensor:
        """q of the steps begin … end, [T, rows, V]; what lies before `begin` is let go."""
        if self._q is None:
            self._begin, self._after = begin, [self._generator(like).get_state()]
            self._q = like.new_empty(0, self._rows, like.shape[-1])
        fresh = []
        for _ in range(self._begin + len(self._q), end + 1):
            q = like.new_empty(self._rows, like.shape[-1]).exponential_(1, generator=self.generator)
            fresh.append(q[None])
            self._after.append(self._generator(like).get_state())
        passed = begin - self._begin
        if fresh or passed:
            self._q = torch.cat([self._q[passed:], *fresh])
            self._after, self._begin = self._after[passed:], begin
        return self._q

    def close(self, steps: int) -> None:
        """Leave the generator as after `steps` steps: the longest row of the finished call."""
        if self._q is not None:
            self._generator(self._q).set_state(self._after[steps - self._begin])
            self._q = None

    def _generator(self, like: Tensor) -> Any:
        if self.generator is not None:
            return self.generator
        if like.is_mps:
            return torch.mps._get_default_mps_generator()
        return torch.cuda.default_generators[like.device.index] if like.is_cuda else torch.default_generator


def warpers(how: dict[str, Any]) -> LogitsProcessorList:
    """Temperature, then top-k, then top-p."""
    chosen = LogitsProcessorList()
    if how["temperature"] not in (0, 1):
        chosen.append(TemperatureLogitsWarper(float(how["temperature"])))
    if how["top_k"]:
        chosen.append(TopKLogitsWarper(how["top_k"]))
    if how["top_p"] < 1:
        chosen.append(TopPLogitsWarper(how["top_p"]))
    return chosen
