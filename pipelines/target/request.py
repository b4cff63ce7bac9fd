"""From logits to a token's distribution: logits processors, then argmax, sampling, or noise fixed beforehand."""

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

Process = Callable[[Tensor, Group, Draft], Tensor]  # (logits, rows, draft) → logits


class Sampler:
    """Turns logits into the distribution p that drafts are verified against.

    Args:
        processors: temperature, top-k and the like: a LogitsProcessorList, or a function of (logits, session, draft).
        sample: draw tokens; otherwise take the likeliest.
        noise: replace the distribution by a point mass on the token that this noise chooses (seed-exact). The token
            after a node then depends only on its path and position, so that any draft gives the same tokens.
            CounterNoise for rows with seeds of their own, TorchNoise for the tokens that a stock loop would have drawn;
            None: keep the distribution.
    """

    def __init__(
        self, processors: LogitsProcessorList | Process, sample: bool = True, noise: Noise | None = None
    ) -> None:
        stock = isinstance(processors, list)
        self.process: Process = Processors(processors) if stock else processors  # type: ignore[arg-type, assignment]
        self.sample = sample
        self.noise: Noise | None = noise if sample else None

    def realised(self, processed: Tensor, session: Group, draft: Draft, relaxed: bool) -> Categorical:
        """p after each node, from processed logits.

        Args:
            relaxed: whether the rule reads the logits of a greedy call.
        """
        if not self.sample:
            return Categorical(processed if relaxed else None, ops.likeliest(processed))
        if self.noise is None:
            return Categorical(processed)
        return Categorical(ids=self.noise.draw(processed, session, draft))

    def weighed(self, logits: Tensor, session: Group, position: Tensor) -> Tensor:
        """A drafter's logits [B, n, V] for the tokens at `position` [B, n] after the prompt, processed as the target's.

        Point-wise processors are applied, and for seed-exact sampling the noise of the target's own draw is added.
        """
        if not self.sample:
            return logits
        processors: Any = pointwise(getattr(self.process, "processors", []))
        warped = processors(position.reshape(-1, 1), logits.float().flatten(0, 1)).view_as(logits)
        if not isinstance(self.noise, CounterNoise):
            return warped
        noisy: Tensor = warped + self.noise.at(session, position, logits.shape[-1])
        return noisy


@dataclass(frozen=True, eq=False)
class Request:
    """How a call processes the logits of its rows; each row has a reference to it."""

    sampler: Sampler  # processors and sampling
    keep: bool = False  # return processed and raw logits with the scores
    widen: bool = True  # process logits in float32, as `_sample` does
    # masks tokens that the model itself does not allow, before any processor: a function of logits [B, N, V] and of the
    # numbers [B, N] of the new tokens that they are for; None: all are allowed
    allowed: Callable[[Tensor, Tensor], Tensor] | None = None

    @property
    def bare(self) -> bool:
        """Whether the call is greedy without logits processors, and keeps no logits."""
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
