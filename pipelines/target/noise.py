"""Noise that is fixed before anything is drafted: it depends only on a token's absolute position, not on the drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mmspec.kernels import dispatch
from mmspec.kernels import reference as ops
from mmspec.modes import lasting
from mmspec.session import Group
from mmspec.types import Draft

SMALL = 1 << 15  # the largest vocabulary whose noise is cached, and how many numbers are computed in advance: one call
# for many takes little longer than one for a few
_HOST = torch.device("cpu")  # the default device may be another


@dataclass(frozen=True)
class CounterNoise:
    """Gumbel noise hashed from (row seed, absolute position): a row draws the same tokens alone and in any batch.

    A Jacobi window reads a position in several rounds. On a CPU the noise is cached meanwhile if the vocabulary is
    small, as that of image models; a kernel computes it again.
    """

    _lines: dict[int, tuple[int, Tensor]] = field(default_factory=dict, repr=False, compare=False)  # by seed: the first
    # position that is cached, and the noise from there on, [T, V]

    def draw(self, logits: Tensor, session: Group, draft: Draft) -> Tensor:
        """Tokens [B, N] from processed logits [B, N, V]."""
        position = session.emitted[:, None] + draft.tree.depth
        if not self._caches(logits, logits.shape[-1]):
            return dispatch.draw(logits, (session.seeds, position))
        return ops.noisiest(logits, self.at(session, position, logits.shape[-1]))

    def at(self, session: Group, position: Tensor, vocab: int) -> Tensor:
        """The noise [B, N, V] for the tokens at `position` [B, N]."""
        if not self._caches(position, vocab):
            return ops.gumbel(session.seeds, position, vocab)
        wanted = position.expand(len(session.rows), -1).numpy().tolist()  # on a CPU, so no wait for a device
        lines = [self._line(row.seed, at, vocab) for row, at in zip(session.rows, wanted, strict=True)]
        for seed in self._lines.keys() - {row.seed for row in session.rows}:
            self._lines.pop(seed, None)
        return lines[0][None] if len(lines) == 1 else torch.stack(lines)

    def _caches(self, tensor: Tensor, vocab: int) -> bool:
        return vocab <= SMALL and tensor.device.type == "cpu" and dispatch.defined("draw", tensor)

    def _line(self, seed: int, at: Sequence[int], vocab: int) -> Tensor:
        """The noise [N, V] of one row."""
        first, end = min(at), max(at) + 1
        begin, kept = self._lines.get(seed, (first, None))
        if kept is None or first < begin or kept.shape[1] != vocab:
            begin, kept = first, torch.empty(0, vocab, dtype=ops.widest(_HOST), device=_HOST)
        if end > begin + len(kept):
            with lasting():
                new = torch.arange(max(first, begin + len(kept)), end + SMALL // vocab, device=_HOST)
                kept = torch.cat([kept[first - begin :], ops.gumbel(new.new_tensor([seed]), new[None], vocab)[0]])
            self._lines[seed] = begin, kept = first, kept
        if end - first == len(at):
            return kept[first - begin : end - begin]
        return kept[torch.tensor(at, device=_HOST) - begin]


class TorchNoise:
    """The exponential noise of `torch.multinomial(probs, 1)` in a loop that draws once per step.

    That function returns argmax(probs / q) with q ~ Exp(1) of the shape of `probs`. Here q of step t is drawn once, in
    order, for all rows that the call started with, and kept until every row is past t. `close` sets the generator to
    the state in which the loop would have left it.

    Args:
        generator: None for torch's global one.
    """

    def __init__(self, generator: torch.Generator | None = None) -> None:
        self.generator = generator
        self._rows = 0  # the call's batch size, set at the first draw
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
        """q of the steps begin … end, [T, rows, V]; q of earlier steps is dropped."""
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
        """Set the generator to its state after `steps` steps, the length of the call's longest row."""
        if self._q is not None:
            self._generator(self._q).set_state(self._after[steps - self._begin])
            self._q = None

    def _generator(self, like: Tensor) -> torch.Generator:
        if self.generator is not None:
            return self.generator
        if like.is_mps:
            return torch.mps._get_default_mps_generator()
        return torch.cuda.default_generators[like.device.index] if like.is_cuda else torch.default_generator


Noise = CounterNoise | TorchNoise
