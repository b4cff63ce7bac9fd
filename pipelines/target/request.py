"""From logits to the distribution of a token: processors, then argmax, a draw, or noise fixed beforehand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmspec.kernels import reference as ops
from mmspec.pipelines.host.processors.table import LogitsProcessorList, Processors, pointwise
from mmspec.pipelines.target.noise import CounterNoise, Noise
from mmspec.session import Group
from mmspec.types import Categorical, Draft, Scores

Process = Callable[[Tensor, Group, Draft], Tensor]  # of logits, rows and draft


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
        self, processors: LogitsProcessorList | Process, sample: bool = True, noise: Noise | None = None
    ) -> None:
        stock = isinstance(processors, list)
        self.process: Process = Processors(processors) if stock else processors  # type: ignore[arg-type, assignment]
        self.sample = sample
        self.noise: Noise | None = noise if sample else None

    def realised(self, processed: Tensor, session: Group, draft: Draft, relaxed: bool) -> Categorical:
        """p after each node, from logits that the processors have seen.

        Args:
            relaxed: whether the rule looks at the logits of what takes the likeliest token.
        """
        if not self.sample:
            return Categorical(processed if relaxed else None, ops.likeliest(processed))
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
        chosen: Any = pointwise(getattr(self.process, "processors", []))
        warped = chosen(position.reshape(-1, 1), logits.float().flatten(0, 1)).view_as(logits)
        if not isinstance(self.noise, CounterNoise):
            return warped
        drawn: Tensor = warped + self.noise.at(session, position, logits.shape[-1])
        return drawn


@dataclass(frozen=True, eq=False)
class Request:
    """What a call asks of the logits of its rows, which carry it."""

    sampler: Sampler  # processors, and how to draw
    keep: bool = False  # hand processed and raw logits back with the scores
    widen: bool = True  # process logits in float32, as `_sample` does
    # what the model itself lets through, before any processor: a function of logits [B, N, V] and of the numbers [B, N]
    # of the new tokens that they are for; None: everything
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
        relaxed = rows.rows[0].rule.greedy is not None
        bare = self.bare and not relaxed
        wide = logits.to(torch.float32) if self.widen and not bare else logits
        if self.allowed is not None:
            wide = self.allowed(wide, rows.emitted[:, None] + draft.tree.depth)
        if bare:
            return Scores(Categorical(ids=ops.likeliest(wide)), hidden)
        processed = self.sampler.process(wide, rows, draft)
        kept = (processed, raw.to(torch.float32)) if self.keep else (None, None)
        return Scores(self.sampler.realised(processed, rows, draft, relaxed), hidden, *kept)
