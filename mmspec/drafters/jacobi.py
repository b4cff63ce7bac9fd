"""Speculative Jacobi decoding: a window of guesses, redrawn each round from the target's distributions. No weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmspec.config import Options, chosen
from mmspec.drafters.window import ALONE, NEAR, SHARES, USUAL, WindowLayout, WindowMemory, WindowOptions, layout
from mmspec.kernels import reference as ops
from mmspec.protocols import SessionView, Target, TargetInfo
from mmspec.tree import lone
from mmspec.types import NO_TOKEN, Categorical, Draft, Prompt


@dataclass(frozen=True)
class JacobiDrafter:
    """Speculative Jacobi decoding, lossless with every init and every coupling (Teng et al. 2024, SJD, §3).

    Proof: let F be everything that was drawn at earlier positions, in all rounds. Given F, a guess has exactly the
    distribution q that its draft states: a first guess by its init; a later one because the coupling makes it a draw
    from p by the noise of its own position, so that q := p even if the guess did not change. When a guess is tested, p
    is the target's distribution and the uniform number is new, so the result has the distribution p. Therefore the
    distribution used at a position may depend only on F, for example on the number of accepted guesses, or on timing,
    since an untested draft has no effect.

    Attributes:
        vocab: tokens of the target's head; the uniform part of a first guess covers all of them.
        copy: chance that a first guess copies a neighbour, if `init` allows it; the rest is uniform.
    """

    vocab: int = 0
    options: WindowOptions = USUAL
    copy: float = 0.3
    features: tuple[int, ...] = ()

    @property
    def nodes(self) -> int:
        """Nodes of a draft, the root included: one per position of the window, plus the branches of the tree."""
        K, D = self.options.proactive
        return self.options.window + sum(K**level - 1 for level in range(1, D))

    def fit(self, target: TargetInfo, given: Options) -> JacobiDrafter:
        """Fits any target. Raises ValueError: an option of another drafter, or a wrong value."""
        return replace(self, vocab=target.vocab, options=chosen(USUAL, given, "the jacobi drafter"))

    def start(self, session: SessionView[Window], target: Target, prompt: Prompt) -> WindowMemory:
        """The memory of these rows.

        Raises ValueError: an init that copies the token above, with a target without a grid.
        """
        grid, init = prompt.grid, self.options.init
        init = ("mixture" if grid else "horizontal") if init == NEAR else init
        if grid is None and SHARES[init][1]:
            raise ValueError(
                f"init={init!r} copies the token above, but {type(target).__name__} has no grid; "
                "choose init='uniform' or 'horizontal'"
            )
        device, B = session.pending.device, len(session.rows)
        ends = torch.tensor([row.limit - row.start for row in session.rows], device=device)
        decided = torch.full((B, grid[1] if grid else 1), NO_TOKEN, device=device)
        return WindowMemory(decided, ends, init)

    def propose(self, session: SessionView[Window], target: Target) -> Draft:
        if self.options.window == 1:
            return lone(session.pending[:, None])
        session.memory.append(session.last)
        return self._guess(session)

    @torch.no_grad()
    def _guess(self, session: SessionView[Window]) -> Draft:
        memory, distribution, pending = session.memory, session.last.scores.p, session.pending
        shape = layout(self.options.window, self.options.proactive, pending.device)
        tree = shape.tree.expand(len(pending))
        column = torch.arange(self.options.window - 1, device=pending.device)
        position = session.emitted[:, None] + column  # [B, C], after the prompt
        vocab = self.vocab if distribution.logits is None else distribution.logits.shape[-1]

        def noise(columns: int) -> Tensor:  # [B, columns, V], the same in every round
            return ops.gumbel(session.seeds, position[:, :columns], vocab)

        coins = None
        if not distribution.is_point or shape.levels or self.options.init not in (NEAR, "horizontal"):
            counter = (session.emitted[:, None] << 32) + column
            coins = ops.uniform(ops.stream(session.seeds, ops.COUPLE)[:, None], counter)  # new in each round
        scored, token, log_p = self._carried(session, column, coins, noise)
        first, prior = self._first(session, scored, token, coins, vocab)
        token = torch.where(scored, token, first)
        token = torch.where(position < memory.ends[:, None], token, NO_TOKEN)
        if distribution.is_point and not shape.levels:
            return Draft(torch.cat([pending[:, None], token], 1), tree)
        log_q = prior() if log_p is None else torch.where(scored[..., None], log_p, prior())
        memory.q = None if distribution.is_point else log_q
        logits = log_q
        if shape.levels:
            token, logits = _branched(token, log_q, noise(shape.levels), shape)
        tokens = torch.cat([pending[:, None], token], 1)[:, shape.entry]
        if distribution.is_point:
            return Draft(tokens, tree)
        logits = torch.cat([logits[:, :1], logits], 1)  # the root's entry is not read
        return Draft(tokens, tree, Categorical(logits if tree.is_chain else logits[:, shape.entry]))

    def _carried(
        self, session: SessionView[Window], column: Tensor, coins: Tensor | None, noise: Noise
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The positions that the target scored in the last round, a prefix of each row: mask, new guesses and log p."""
        last, distribution = session.last, session.last.scores.p
        B, C = len(session.rows), len(column)
        if last.draft.tree.size == 1:  # the round of the prefill, or one without a draft
            token = torch.full((B, C), NO_TOKEN, device=column.device)
            return torch.zeros_like(token, dtype=torch.bool), token, None
        level = last.acceptance.count[:, None] + column  # the level of the last draft with its distribution
        nodes = level.clamp(max=C)
        if self.options.proactive != ALONE:
            line = layout(C + 1, self.options.proactive, column.device).line[last.acceptance.last]
            nodes = line.gather(1, nodes)
        scored = (level <= C) & (last.draft.tokens.gather(1, nodes) != NO_TOKEN)
        if distribution.ids is not None:
            return scored, distribution.ids.gather(1, nodes), None
        assert coins is not None and distribution.logits is not None
        rows = torch.arange(B, device=column.device)[:, None]
        log_p = distribution.logits[rows, nodes].float().log_softmax(-1)
        if self.options.coupling == "gumbel":
            return scored, (log_p + noise(C)).argmax(-1), log_p
        if self.options.coupling == "none":
            return scored, ops.categorical(log_p.exp(), coins).clamp(min=0), log_p
        below = (level + 1).clamp(max=C)
        x = last.draft.tokens.gather(1, below if self.options.proactive == ALONE else line.gather(1, below))
        x = torch.where(scored & (level < C), x, NO_TOKEN)
        assert session.memory.q is not None
        q = session.memory.q[rows, level.clamp(max=C - 1)].exp() * (x != NO_TOKEN)[..., None]
        return scored, _keep_or_redraw(log_p.exp(), q, x, coins), log_p

    def _first(
        self, session: SessionView[Window], scored: Tensor, token: Tensor, coins: Tensor | None, vocab: int
    ) -> tuple[Tensor, Callable[[], Tensor]]:
        """First guesses [B, C], with chance `copy` a neighbour's token and otherwise uniform, and a function that
        computes their log q [B, C, V].

        The neighbours are the last decided or redrawn token to the left, and the decided token directly above; in the
        first row both are the left one. If the target's distribution is a point mass, the chance is 1. Without coins
        the neighbour is always the left one.
        """
        memory, C = session.memory, token.shape[1]
        left = torch.cat([session.pending[:, None], token], 1).gather(1, scored.sum(1, keepdim=True)).expand(-1, C)
        if coins is None:
            return left, partial(torch.empty, 0)
        above = memory.decided[:, torch.arange(C, device=coins.device) % memory.decided.shape[1]]
        near = torch.stack([left, torch.where(above == NO_TOKEN, left, above)], -1)
        share = coins.new_tensor(SHARES[memory.init]) * (1.0 if session.last.scores.p.is_point else self.copy)
        copied = share.sum()
        flat = ((coins - copied) / (1 - copied) * vocab).nan_to_num().clamp(0, vocab - 1).long()
        token = torch.where(coins < share[0], near[..., 0], near[..., 1])

        def prior() -> Tensor:
            rest = ((1 - copied) / vocab).float().expand(*coins.shape, vocab)
            return rest.scatter_add(2, near, share.float().expand_as(near)).log_()

        return torch.where(coins < copied, token, flat), prior


Noise = Callable[[int], Tensor]
Window = TypeVar("Window", bound=WindowMemory)


def _keep_or_redraw(p: Tensor, q: Tensor, x: Tensor, u: Tensor) -> Tensor:
    """Maximal coupling: a draw from p that equals x ~ q as often as possible (coupled SJD, 2025; SJD-PAC, 2026).

    Args:
        p, q: probabilities [B, C, V]; q = 0 where there is no guess.
        x: guesses [B, C], NO_TOKEN where there is none.
        u: uniform noise [B, C].
    """
    at = x.clamp(min=0)[..., None]
    f = ops.exact_ratio(p.gather(-1, at), q.gather(-1, at))[..., 0].to(u.dtype) * (x != NO_TOKEN)
    other = ops.categorical(ops.positive_residual(p, q), ops.remaining(u, f)).clamp(min=0)
    return torch.where(u < f, x, other)


def _branched(token: Tensor, log_q: Tensor, noise: Tensor, shape: WindowLayout) -> tuple[Tensor, Tensor]:
    """Add guesses on the tree's levels, drawn without replacement, to those [B, C]: K·R + C − R tokens, and log q.

    Each one's distribution excludes the earlier ones. The noise [B, R, V] belongs to the positions and is used for no
    other draw but the one that it would repeat, so the first guess may come from any source. NO_TOKEN where the
    distribution has no more tokens.
    """
    R, K, V = shape.levels, shape.ranks, log_q.shape[-1]
    first, distribution = token[:, :R, None], log_q[:, :R]
    best, tokens = (distribution + noise).scatter(2, first.clamp(min=0), math.inf).topk(min(K, V), -1)
    tokens = torch.where((best == -math.inf) | (first == NO_TOKEN), NO_TOKEN, tokens)
    tokens = pad(tokens, (0, K - min(K, V)), value=NO_TOKEN)
    distributions = [distribution]
    for rank in range(K - 1):
        distributions.append(distributions[-1].scatter(2, tokens[..., rank, None].clamp(min=0), -math.inf))
    logits = torch.where(tokens[..., None] == NO_TOKEN, 0.0, torch.stack(distributions, 2))
    return torch.cat([tokens.flatten(1), token[:, R:]], 1), torch.cat([logits.flatten(1, 2), log_q[:, R:]], 1)
