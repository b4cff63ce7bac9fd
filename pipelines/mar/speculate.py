"""Speculative decoding for MAR, in rounds of draft, verify, accept and redraw: by the exact rule, or by CSpD's."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

import torch
from torch import Tensor

from mmspec.continuous import cspd, denoising
from mmspec.pipelines.mar.drafts import Cells, MarDraft, SelfDrafter, SmallerDrafter, by_steps, indices, places
from mmspec.pipelines.mar.loop import DRAFTS, PATHS, MarRunner, MarState, coins, fresh, normal, plain
from mmspec.pipelines.mar.plan import MarStats, Speculation

AT_ONCE = 4  # trials of a rejected token that run in parallel
Refused = tuple[MarDraft, Tensor]  # a rejected draft, and the model's conditioning before it, z [streams, D]


def draw(
    runner: MarRunner, state: MarState, plan: Speculation, draft_runner: MarRunner, stats: MarStats
) -> Iterator[MarState]:
    """Draw all images; `draft_runner` is the runner of the draft model, or `runner` itself."""
    turns = runner.distribution.turns
    if plan.prefill:
        yield from plain(runner, state, turns[min(len(turns) - 1, math.floor(len(turns) * plan.prefill))][1])
    if plan.rule == "cspd":
        yield from cspd_rounds(runner, state, plan, draft_runner, stats)
    else:
        kind = SelfDrafter if draft_runner is runner else SmallerDrafter
        yield from exact(runner, state, plan, kind(draft_runner, plan.ahead), stats)


def exact(
    runner: MarRunner, state: MarState, plan: Speculation, drafter: SelfDrafter | SmallerDrafter, stats: MarStats
) -> Iterator[MarState]:
    """Draw all images from the distribution of `plain` with one token per iteration; each image advances on its own.

    A round reads every image with none, one, two ... of its drafts. It accepts a draft if all before it were accepted
    and its whole denoising path passes the test under the model (`mmspec.continuous.denoising`). Then the rejected ones
    are drawn again from the model's residual distribution, together with the model's next drafts.
    """
    L, refused = state.order.shape[1], list[Refused]()
    drafter.start(state)
    drafts = drafter.undrawn(state)
    while True:
        _chains(runner, state, refused, drafts, plan.eta, drafter, stats)
        if stats.rounds:
            yield state
        if min(state.counts) == L:
            return
        drafts = drafter.propose(state, drafts)
        here, x = places(drafts, state.order.device), torch.cat([draft.drawn.x for draft in drafts])
        z, source, at = _verify(runner, state, drafts, here, x, drafter)
        ratio = _ratios(runner, drafts, here, z)
        eta = torch.tensor([1.0 if draft.certain else plan.eta for draft in drafts], device=z.device)
        chance = denoising.chance(ratio, eta)
        kept = coins(state.seeds[here.of], L, here.at, 0) < chance
        stats.rounds += 1
        tests = torch.stack([kept, chance, -ratio], 1).tolist()
        accepted, first, source_of, whole = _accept(state, drafts, tests, at, stats)
        (index,) = indices(x.device, accepted)
        state.put(here.of[index], here.at[index], x[index])
        if isinstance(drafter, SelfDrafter):
            drafter.learn(source, source_of, whole)
        refused = [(drafts[i], z[:, i]) for i in first]
        drafts = drafter.undrawn(state)


def _verify(
    runner: MarRunner, state: MarState, drafts: list[MarDraft], here: Cells, x: Tensor,
    drafter: SelfDrafter | SmallerDrafter,
) -> tuple[Tensor, Tensor, dict[tuple[int, int], int]]:  # fmt: skip
    """The model's conditioning [streams, R, D] for every drafted token, given those before it.

    Also all conditioning that there is, [streams, M, L, D], with a table from an image and its number of known tokens
    to one of the M.
    """
    L, drafted = state.order.shape[1], list(zip(here.rows, here.turns, strict=True))
    cells = [cell for cell, draft in zip(drafted, drafts, strict=True) if not draft.certain]
    if isinstance(drafter, SelfDrafter):  # one more, to draft the next tokens from
        cells += [(b, n) for b, n in {b: turn + 1 for b, turn in drafted}.items() if n < L]
    at, parts = {cell: i for i, cell in enumerate(cells)}, []
    if cells:
        seen = replace(state, tokens=state.tokens.clone())
        seen.put(here.of, here.at, x)
        (b,) = indices(here.of.device, [b for b, _ in cells])
        parts.append(runner.read(seen.tokens[b], state.order[b], [n for _, n in cells], state.labels[b]))
    if isinstance(drafter, SelfDrafter):
        known, current = drafter.known()
        at |= {(b, state.counts[b]): len(cells) + b for b in current}
        parts.append(known)
    source = torch.cat(parts, 1)
    (known_by,) = indices(source.device, [at[cell] for cell in drafted])
    return source[:, known_by, state.order[here.of, here.at]], source, at


def _ratios(runner: MarRunner, drafts: list[MarDraft], here: Cells, z: Tensor) -> Tensor:
    """log P/Q [R] of the drafted paths; 0 for drafts that need no test."""
    ratio, tested = torch.zeros(len(drafts), device=z.device), [i for i, d in enumerate(drafts) if not d.certain]
    groups = [(steps, [tested[i] for i in index]) for steps, index in by_steps(runner, [here.turns[i] for i in tested])]
    for (steps, some), these in zip(groups, indices(z.device, *(some for _, some in groups)), strict=True):
        chain, path = runner.chain(steps), denoising.joined([drafts[i].drawn for i in some])
        runner.evaluations += len(some) * len(chain) * (1 + runner.distribution.guided)
        ratio[these] = denoising.log_ratio(
            path, runner.net(z[:, these], here.at[these], steps), chain, runner.distribution.temperature
        )
    return ratio


def _accept(
    state: MarState, drafts: list[MarDraft], tests: list[list[float]], at: dict[tuple[int, int], int], stats: MarStats
) -> tuple[list[int], list[int], dict[int, int], list[int]]:
    """Which drafts are accepted, and which are the first rejected ones of their images; counts both in `counts`.

    Also image → the index of its latest conditioning, as in `at` (see `_verify`), and the images for which that
    includes all tokens.

    Args:
        tests: for every draft whether it passes its own test, the probability of that, and log Q/P.
    """
    accepted: list[int] = []
    refused: list[int] = []
    known: dict[int, int] = {}
    whole, begin = [], 0
    for b, some in groupby(draft.row for draft in drafts):
        end = begin + len(list(some))
        first = next((i for i in range(begin, end) if not tests[i][0]), end)
        accepted += range(begin, first)
        for i in range(begin, min(first + 1, end)):
            if not drafts[i].certain:
                stats.note(drafts[i].turn, *tests[i][1:])
        n = state.counts[b] + first - begin
        if (b, n) in at:
            known[b] = at[b, n]
        if first < end:
            refused.append(first)
        else:
            whole.append(b)
        state.counts[b], begin = n + (first < end), end
    return accepted, refused, known, whole


def _chains(
    runner: MarRunner, state: MarState, refused: list[Refused], drafts: list[MarDraft], eta: float,
    drafter: SelfDrafter | SmallerDrafter, stats: MarStats,
) -> None:  # fmt: skip
    """Draw rejected tokens again from the model's residual distribution, and the paths of drafts that have none yet.

    Tokens with the same number of steps run in parallel, in one chain.
    """
    L, C, device = state.order.shape[1], state.tokens.shape[2], state.order.device
    every = [*((draft, z) for draft, z in refused), *((draft, draft.z) for draft in drafts)]
    for steps, index in by_steps(runner, [draft.turn for draft, _ in every]):
        some, chain, R = [every[i] for i in index], runner.chain(steps), sum(i < len(refused) for i in index)
        here = places([draft for draft, _ in some], device)
        seeds = state.seeds[here.of]

        def again(
            rows: Tensor, trial: int, at: Tensor = here.at, chain: denoising.Chain = chain, seeds: Tensor = seeds
        ) -> tuple[Tensor, Tensor]:
            noise = normal(seeds[rows], PATHS, L, at[rows], trial, len(chain), C)
            return noise, coins(seeds[rows], L, at[rows], trial + 1)

        p, tau = runner.net(torch.stack([z for _, z in some], 1), here.at, steps), runner.distribution.temperature
        trials: list[int] = []
        beside = normal(seeds[R:], DRAFTS, L, here.at[R:], 0, len(chain), C)
        if R:
            q = drafter.runner.net(torch.stack([draft.z for draft, _ in some[:R]], 1), here.at[:R], steps)
            by = torch.full((R,), eta, device=device)
            x, trials, others = denoising.leftover(p, q, chain, again, by, tau, AT_ONCE, runner.draw, beside)
            state.put(here.of[:R], here.at[:R], x)
        else:
            others = runner.draw(p, chain, beside, tau)
        for i, (draft, _) in enumerate(some[R:]):
            draft.path = others.take(slice(i, i + 1))
        stats.refused, stats.trials = stats.refused + R, stats.trials + sum(trials)
        tried = sum(-(-n // AT_ONCE) for n in trials) * AT_ONCE
        runner.evaluations += (tried + len(some) - R) * len(chain) * (1 + runner.distribution.guided)
        drafter.runner.evaluations += tried * len(chain) * (1 + runner.distribution.guided)


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
