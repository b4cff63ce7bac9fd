"""A feature drafter's chain, captured and compiled: catching up and all levels are one function of tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmspec import capture
from mmspec.capture import Captured
from mmspec.drafters.blocks import Attend, path_after
from mmspec.drafters.feature import FeatureDrafter, _embed
from mmspec.rows import gather_rows
from mmspec.slots import Lengths
from mmspec.tree import chain
from mmspec.types import Draft, Prompt, Target


class CapturedChain:
    """Proposes what its drafter proposes; the drafter itself does where the target weighs its logits.

    Args:
        drafter: fitted to the target; drafts chains by rank.
        weights: of the target, whose embedding and head the drafter uses.
        held: what was captured before, with this drafter's layer and these weights.
    """

    def __init__(
        self, drafter: FeatureDrafter, weights: Callable[[], Iterable[Tensor]], held: dict[Any, Captured]
    ) -> None:
        self.drafter, self.weights = drafter, weights
        self.features, self.nodes = drafter.features, drafter.nodes
        self._held = held

    def start(self, session: Any, target: Target, prompt: Prompt) -> Any:
        return self.drafter.start(session, target, prompt)

    @torch.no_grad()
    def propose(self, session: Any, target: Target) -> Draft:
        weighed = hasattr(target, "weigh") and not self.drafter.own_head
        longer = session.last.kept.shape[1] > self.nodes  # what rounds without a draft have handed over
        if weighed or longer:
            return self.drafter.propose(session, target)
        memory, N = session.memory, self.nodes
        hidden, follow, count = path_after(session)
        missing = N - follow.shape[1]  # rows past `count` mean nothing, and are written over
        inputs = [pad(hidden, (0, 0, 0, missing)), pad(follow, (0, missing)), count, memory.positions]
        inputs += [] if memory.context is None else [memory.context]
        key = (self.drafter.options, *(t.shape for t in inputs))
        captured = self._held.get(key)
        if captured is None:
            captured = self._held[key] = self._capture(target, inputs)
        before, after = memory.lengths, memory.lengths.plus(session.last.counts, count)
        seen = chain(N, follow.device).ancestors.expand(len(follow), N, N)

        def attend(level: int, scale: float, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            memory.lengths = after if level else before
            further = level - 1
            at = before if not level else Lengths(tuple(n + further for n in after.host), after.device + further)
            out = memory.attend(at, None if level else seen)(q, k, v)
            return out.transpose(1, 2).contiguous().transpose(1, 2)

        (below,) = captured(attend, *inputs)
        memory.lengths, memory.positions = after, memory.positions + count
        return Draft(torch.cat([session.pending[:, None], below], 1), chain(N, below.device).expand(len(below)))

    def _capture(self, target: Target, inputs: list[Tensor]) -> Captured:
        drafter = self.drafter

        def run(hidden: Tensor, follow: Tensor, count: Tensor, positions: Tensor, *context: Tensor) -> list[Tensor]:
            memory = _Passing(positions, *context)
            out = drafter._read(memory, _embed(target, follow), hidden, memory.lengths, 0, None)  # type: ignore[arg-type]
            memory.positions = positions + count
            return [drafter._chain(SimpleNamespace(memory=memory), target, gather_rows(out, count[:, None] - 1))[0]]

        own = [*drafter.parameters(), *drafter.buffers(), *self.weights()]
        with torch.inference_mode(False), torch.no_grad():
            return Captured(run, [t.clone() for t in inputs], own)


class _Passing:
    """A memory whose attentions are cuts, numbered in order."""

    def __init__(self, positions: Tensor, context: Tensor | None = None) -> None:
        self.positions, self.context = positions, context
        self.lengths = Lengths.of([0] * len(positions), positions.device)
        self.level = -1

    def attend(self, at: Lengths, ancestors: Tensor | None) -> Attend:
        self.level += 1
        level = self.level
        return lambda q, k, v: capture.attend(level, q.shape[-1] ** -0.5, q, k, v)
