"""MAR with the acceptance rule of CSpD as it was published; approximate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import torch
from torch import Tensor

from mmspec.continuous import cspd, denoising
from mmspec.pipelines.mar.loop import DRAFTS, PATHS, MarRunner, MarState, coins, fresh, normal
from mmspec.pipelines.mar.plan import MarStats, Speculation


def cspd_rounds(
    runner: MarRunner, state: MarState, plan: Speculation, draft_runner: MarRunner, stats: MarStats
) -> Iterator[MarState]:
    """CSpD (Wang et al. 2024, arXiv 2411.11925) as in its authors' code; approximate, see `mmspec.continuous.cspd`.

    After the prefill the draft model draws `ahead` iterations of the schedule, each after its own tokens. The model
    then draws the same tokens all at once, conditioned on the tokens before the block and with the same noise. Each
    token is accepted or replaced independently, also after a rejected one, so the number of passes does not depend on
    the acceptance.

    There are two differences. Blocks start where the prefill ends; in the authors' code they start at multiples of
    `ahead`. Without a prefill the first block is drafted from nothing; there the model draws one step first.
    """
    iterations = [turns for turns in runner.distribution.turns if turns[0] >= state.counts[0]]
    for number in range(0, len(iterations), plan.ahead):
        block = iterations[number : number + plan.ahead]
        begin, end, before = block[0][0], block[-1][1], state.tokens.clone()
        drafted = [_next(draft_runner, state, range(*turns)) for turns in block]
        z = runner.read(before, state.order, [begin] * len(before), state.labels)
        stats.rounds += 1
        for _, some in groupby(zip(block, drafted, strict=True), lambda one: runner.distribution.steps[one[0][0]]):
            alike, theirs = zip(*some, strict=True)
            _judge(runner, state, z, range(alike[0][0], alike[-1][1]), end - 1, theirs, plan, stats)
        state.counts = [end] * len(before)
        yield state


def _next(draft_runner: MarRunner, state: MarState, turns: range) -> denoising.Path:
    """Draw one iteration by the draft model and write its tokens; in order of turn, then image."""
    B, device = len(state.order), state.order.device
    rows, at = _every(B, turns, device)
    z = draft_runner.read(state.tokens, state.order, [turns[0]] * B, state.labels)
    chosen, steps = z[:, rows, state.order[rows, at]], draft_runner.distribution.steps[turns[0]]
    path = fresh(draft_runner, chosen, state, rows, at, steps, DRAFTS)
    state.put(rows, at, path.x)
    return path


def _every(pictures: int, turns: range, device: torch.device) -> tuple[Tensor, Tensor]:
    """The images and turns of all these tokens, in order of turn."""
    rows = torch.arange(pictures, device=device).repeat(len(turns))
    return rows, torch.arange(turns.start, turns.stop, device=device).repeat_interleave(pictures)


def _judge(
    runner: MarRunner, state: MarState, z: Tensor, turns: range, last: int, drafted: Sequence[denoising.Path],
    plan: Speculation, stats: MarStats,
) -> None:  # fmt: skip
    """Accept or replace each of the tokens at `turns`; the guidance is that of the turn `last`, as published."""
    B, L, device = *state.order.shape, state.order.device
    rows, at = _every(B, turns, device)
    chain, tau = runner.chain(runner.distribution.steps[turns[0]]), runner.distribution.temperature
    seeds, C = state.seeds[rows], state.tokens.shape[2]
    chosen, guided = z[:, rows, state.order[rows, at]], torch.full_like(at, last)
    own = fresh(runner, chosen, state, rows, at, runner.distribution.steps[turns[0]], DRAFTS, guided)
    theirs = denoising.joined(drafted)
    p, q = cspd.end(own, chain, tau), cspd.end(theirs, chain, tau)
    chance = cspd.log_chance(theirs.x, p, q, plan.width)
    wrong = (~(coins(seeds, L, at, 0).log() < chance)).nonzero()[:, 0]  # a NaN is rejected
    for turn, likely in zip((turn for turn in turns for _ in range(B)), chance.exp().tolist(), strict=True):
        stats.note(turn, likely, 0.0)
    if len(wrong):
        noise = normal(seeds[wrong], PATHS, L, at[wrong], 0, cspd.ROUNDS - 1, C).transpose(0, 1)
        trial = torch.arange(1, cspd.ROUNDS + 1, device=device)[:, None]
        u = coins(seeds[wrong], L, at[wrong], trial)
        state.put(rows[wrong], at[wrong], cspd.leftover(p.take(wrong), q.take(wrong), noise, u))
        stats.refused += len(wrong)
