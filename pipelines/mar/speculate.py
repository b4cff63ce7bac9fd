"""MAR drawn several tokens a pass: the exact rule, in rounds of draft, verify, accept and redraw."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby

import torch
from torch import Tensor

from mmspec.continuous import denoising
from mmspec.pipelines.mar.cspd import cspd_rounds
from mmspec.pipelines.mar.drafts import Cells, MarDraft, SelfDrafter, SmallerDrafter, by_steps, indices, places
from mmspec.pipelines.mar.loop import DRAFTS, PATHS, MarRunner, MarState, coins, normal, plain
from mmspec.pipelines.mar.plan import MarStats, Speculation

AT_ONCE = 4  # trials of a refused token that run side by side
Refused = tuple[MarDraft, Tensor]  # and what the model knew before it, z [streams, D]


def draw(
    runner: MarRunner, drawn: MarState, how: Speculation, draft_runner: MarRunner, stats: MarStats
) -> Iterator[MarState]:
    """Draw all pictures; `draft_runner` is the runner of the draft, or `runner` itself.

    Raises:
        ValueError: the distribution draws several tokens in an iteration, and the rule is the exact one.
    """
    L, turns = drawn.order.shape[1], runner.distribution.turns
    if how.rule != "cspd" and len(turns) != L:
        raise ValueError(
            f"the exact rule keeps the distribution of one token an iteration; pass num_inference_steps={L} (got "
            f"{len(turns)}), or disable_speculation()"
        )
    if how.prefill:
        yield from plain(runner, drawn, turns[min(len(turns) - 1, math.floor(len(turns) * how.prefill))][1])
    if how.rule == "cspd":
        yield from cspd_rounds(runner, drawn, how, draft_runner, stats)
    else:
        kind = SelfDrafter if draft_runner is runner else SmallerDrafter
        yield from exact(runner, drawn, how, kind(draft_runner, how.ahead), stats)


def exact(
    runner: MarRunner, drawn: MarState, how: Speculation, drafter: SelfDrafter | SmallerDrafter, stats: MarStats
) -> Iterator[MarState]:
    """Draw all pictures by the distribution of `plain` with one token an iteration; every picture goes its own way.

    A round reads every picture with none, one, two ... of its drafts, and keeps a draft if all before it were kept and
    the whole path of its denoising is likely enough under the model (`mmspec.continuous.denoising`). Then the refused
    ones are drawn anew from what the model has left over, and beside them the model's next drafts.
    """
    L, refused = drawn.order.shape[1], list[Refused]()
    drafter.start(drawn)
    drafts = drafter.wanted(drawn)
    while True:
        _chains(runner, drawn, refused, drafts, how.eta, drafter, stats)
        if stats.rounds:
            yield drawn
        if min(drawn.counts) == L:
            return
        drafts = drafter.propose(drawn, drafts)
        here, x = places(drafts, drawn.order.device), torch.cat([draft.drawn.x for draft in drafts])
        z, source, at = _verify(runner, drawn, drafts, here, x, drafter)
        ratio = _ratios(runner, drafts, here, z)
        eta = torch.tensor([1.0 if draft.certain else how.eta for draft in drafts], device=z.device)
        chance = denoising.chance(ratio, eta)
        kept = coins(drawn.seeds[here.of], L, here.at, 0) < chance
        stats.rounds += 1
        facts = torch.stack([kept, chance, -ratio], 1).tolist()
        stand, first, source_of, whole = _stand(drawn, drafts, facts, at, stats)
        (stood,) = indices(x.device, stand)
        drawn.put(here.of[stood], here.at[stood], x[stood])
        if isinstance(drafter, SelfDrafter):
            drafter.learn(source, source_of, whole)
        refused = [(drafts[i], z[:, i]) for i in first]
        drafts = drafter.wanted(drawn)


def _verify(
    runner: MarRunner, drawn: MarState, drafts: list[MarDraft], here: Cells, x: Tensor,
    drafter: SelfDrafter | SmallerDrafter,
) -> tuple[Tensor, Tensor, dict[tuple[int, int], int]]:  # fmt: skip
    """The model's conditioning [streams, R, D] of every drafted token, knowing those before it.

    And that [streams, M, L, D] of all places that there is, with a table from picture and number of tokens known to
    one of the M.
    """
    L, drafted = drawn.order.shape[1], list(zip(here.rows, here.turns, strict=True))
    cells = [cell for cell, draft in zip(drafted, drafts, strict=True) if not draft.certain]
    if isinstance(drafter, SelfDrafter):  # one more, to draft the next tokens from
        cells += [(b, n) for b, n in {b: turn + 1 for b, turn in drafted}.items() if n < L]
    at, parts = {cell: i for i, cell in enumerate(cells)}, []
    if cells:
        seen = replace(drawn, tokens=drawn.tokens.clone())
        seen.put(here.of, here.at, x)
        (b,) = indices(here.of.device, [b for b, _ in cells])
        parts.append(runner.read(seen.tokens[b], drawn.order[b], [n for _, n in cells], drawn.labels[b]))
    if isinstance(drafter, SelfDrafter):
        known, current = drafter.known()
        at |= {(b, drawn.counts[b]): len(cells) + b for b in current}
        parts.append(known)
    source = torch.cat(parts, 1)
    (known_by,) = indices(source.device, [at[cell] for cell in drafted])
    return source[:, known_by, drawn.order[here.of, here.at]], source, at


def _ratios(runner: MarRunner, drafts: list[MarDraft], here: Cells, z: Tensor) -> Tensor:
    """log P/Q [R] of the drafted paths; 0 where nothing is to be tested."""
    ratio, tested = torch.zeros(len(drafts), device=z.device), [i for i, d in enumerate(drafts) if not d.certain]
    alike = [(steps, [tested[i] for i in index]) for steps, index in by_steps(runner, [here.turns[i] for i in tested])]
    for (steps, some), these in zip(alike, indices(z.device, *(some for _, some in alike)), strict=True):
        chain, drawn = runner.chain(steps), denoising.joined([drafts[i].drawn for i in some])
        runner.evaluations += len(some) * len(chain) * (1 + runner.distribution.guided)
        ratio[these] = denoising.log_ratio(
            drawn, runner.net(z[:, these], here.at[these], steps), chain, runner.distribution.temperature
        )
    return ratio


def _stand(
    drawn: MarState, drafts: list[MarDraft], facts: list[list[float]], at: dict[tuple[int, int], int], stats: MarStats
) -> tuple[list[int], list[int], dict[int, int], list[int]]:
    """Which drafts stand, and which were the first of their picture to be refused; both are counted.

    And what is now known of every picture: a number as in `at` (see `_verify`), and the pictures of which it knows all.

    Args:
        facts: of every draft whether it is kept by itself, the chance for that, and log Q/P.
    """
    stand: list[int] = []
    refused: list[int] = []
    known: dict[int, int] = {}
    whole, begin = [], 0
    for b, some in groupby(draft.row for draft in drafts):
        end = begin + len(list(some))
        first = next((i for i in range(begin, end) if not facts[i][0]), end)
        stand += range(begin, first)
        for i in range(begin, min(first + 1, end)):
            if not drafts[i].certain:
                stats.note(drafts[i].turn, *facts[i][1:])
        n = drawn.counts[b] + first - begin
        if (b, n) in at:
            known[b] = at[b, n]
        if first < end:
            refused.append(first)
        else:
            whole.append(b)
        drawn.counts[b], begin = n + (first < end), end
    return stand, refused, known, whole


def _chains(
    runner: MarRunner, drawn: MarState, refused: list[Refused], drafts: list[MarDraft], eta: float,
    drafter: SelfDrafter | SmallerDrafter, stats: MarStats,
) -> None:  # fmt: skip
    """Draw refused tokens anew, from what the model's distribution has left over, and the paths of drafts that have
    none yet.

    Side by side in one chain, where they have as many steps.
    """
    L, C, device = drawn.order.shape[1], drawn.tokens.shape[2], drawn.order.device
    every = [*((draft, z) for draft, z in refused), *((draft, draft.z) for draft in drafts)]
    for steps, index in by_steps(runner, [draft.turn for draft, _ in every]):
        some, chain, R = [every[i] for i in index], runner.chain(steps), sum(i < len(refused) for i in index)
        here = places([draft for draft, _ in some], device)
        seeds = drawn.seeds[here.of]

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
            drawn.put(here.of[:R], here.at[:R], x)
        else:
            others = runner.draw(p, chain, beside, tau)
        for i, (draft, _) in enumerate(some[R:]):
            draft.path = others.take(slice(i, i + 1))
        stats.refused, stats.trials = stats.refused + R, stats.trials + sum(trials)
        tried = sum(-(-n // AT_ONCE) for n in trials) * AT_ONCE
        runner.evaluations += (tried + len(some) - R) * len(chain) * (1 + runner.distribution.guided)
        drafter.runner.evaluations += tried * len(chain) * (1 + runner.distribution.guided)
