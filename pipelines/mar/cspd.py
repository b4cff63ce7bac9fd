"""MAR drawn by the rule of CSpD as it was published; approximate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import torch
from torch import Tensor

from mmspec.continuous import cspd, denoising
from mmspec.pipelines.mar.loop import DRAFTS, PATHS, MarRunner, MarState, coins, fresh, normal
from mmspec.pipelines.mar.plan import MarStats, Speculation


def cspd_rounds(
    runner: MarRunner, drawn: MarState, how: Speculation, draft_runner: MarRunner, stats: MarStats
) -> Iterator[MarState]:
    """CSpD (Wang et al. 2024, arXiv 2411.11925) as its authors' code draws; approximate, see `mmspec.continuous.cspd`.

    After the prefill the draft draws `ahead` iterations of the schedule, each on its own tokens. The model then draws
    the same tokens all at once, from what it knew before them and with the same noise; each is kept or replaced for
    itself, and none is forgotten because one before it was not kept. So the number of passes does not depend on what is
    kept.

    Two things differ from that code. Blocks begin where the prefill ends, there at multiples of `ahead`; and without a
    prefill the first block is drafted from nothing, where that code lets the model draw one step first.
    """
    iterations = [turns for turns in runner.distribution.turns if turns[0] >= drawn.counts[0]]
    for number in range(0, len(iterations), how.ahead):
        block = iterations[number : number + how.ahead]
        begin, end, before = block[0][0], block[-1][1], drawn.tokens.clone()
        drafted = [_next(draft_runner, drawn, range(*turns)) for turns in block]
        z = runner.read(before, drawn.order, [begin] * len(before), drawn.labels)
        stats.rounds += 1
        for _, some in groupby(zip(block, drafted, strict=True), lambda one: runner.distribution.steps[one[0][0]]):
            alike, theirs = zip(*some, strict=True)
            _judge(runner, drawn, z, range(alike[0][0], alike[-1][1]), end - 1, theirs, how, stats)
        drawn.counts = [end] * len(before)
        yield drawn


def _next(draft_runner: MarRunner, drawn: MarState, turns: range) -> denoising.Path:
    """The draft's own tokens of one iteration, turn by turn those of every picture, written there."""
    B, device = len(drawn.order), drawn.order.device
    rows, at = _every(B, turns, device)
    z = draft_runner.read(drawn.tokens, drawn.order, [turns[0]] * B, drawn.labels)
    chosen, steps = z[:, rows, drawn.order[rows, at]], draft_runner.distribution.steps[turns[0]]
    path = fresh(draft_runner, chosen, drawn, rows, at, steps, DRAFTS)
    drawn.put(rows, at, path.x)
    return path


def _every(pictures: int, turns: range, device: torch.device) -> tuple[Tensor, Tensor]:
    """The pictures and turns of all these tokens, turn by turn."""
    rows = torch.arange(pictures, device=device).repeat(len(turns))
    return rows, torch.arange(turns.start, turns.stop, device=device).repeat_interleave(pictures)


def _judge(
    runner: MarRunner, drawn: MarState, z: Tensor, turns: range, last: int, drafted: Sequence[denoising.Path],
    how: Speculation, stats: MarStats,
) -> None:  # fmt: skip
    """Keep or replace each of the tokens at `turns`; the guidance is that of the turn `last`, as published."""
    B, L, device = *drawn.order.shape, drawn.order.device
    rows, at = _every(B, turns, device)
    chain, tau = runner.chain(runner.distribution.steps[turns[0]]), runner.distribution.temperature
    seeds, C = drawn.seeds[rows], drawn.tokens.shape[2]
    chosen, guided = z[:, rows, drawn.order[rows, at]], torch.full_like(at, last)
    own = fresh(runner, chosen, drawn, rows, at, runner.distribution.steps[turns[0]], DRAFTS, guided)
    theirs = denoising.joined(drafted)
    p, q = cspd.end(own, chain, tau), cspd.end(theirs, chain, tau)
    chance = cspd.log_chance(theirs.x, p, q, how.width)
    wrong = (~(coins(seeds, L, at, 0).log() < chance)).nonzero()[:, 0]  # a NaN keeps nothing
    for turn, likely in zip((turn for turn in turns for _ in range(B)), chance.exp().tolist(), strict=True):
        stats.note(turn, likely, 0.0)
    if len(wrong):
        noise = normal(seeds[wrong], PATHS, L, at[wrong], 0, cspd.ROUNDS - 1, C).transpose(0, 1)
        trial = torch.arange(1, cspd.ROUNDS + 1, device=device)[:, None]
        u = coins(seeds[wrong], L, at[wrong], trial)
        drawn.put(rows[wrong], at[wrong], cspd.leftover(p.take(wrong), q.take(wrong), noise, u))
        stats.refused += len(wrong)
