"""MAR drawn several tokens a pass: the exact rule, in rounds of draft, verify, accept and redraw."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby

import torch
from torch import Tensor

from mmspec import paths
from mmspec.pipelines.mar_cspd import aligned
from mmspec.pipelines.mar_drafts import Drafted, Other, Own, by_steps
from mmspec.pipelines.mar_loop import PATHS, Brush, Canvas, coins, normal, plain
from mmspec.pipelines.mar_plan import Speculation, Tally

AT_ONCE = 8  # trials of a refused token that run side by side


def draw(brush: Brush, drawn: Canvas, how: Speculation, scout: Brush, told: Tally) -> Iterator[Canvas]:
    """Draw all pictures; `scout` is the brush of the draft, or `brush` itself.

    Raises:
        ValueError: the law draws several tokens in an iteration.
    """
    L = drawn.order.shape[1]
    if len(brush.law.turns) != L:
        raise ValueError(
            f"speculation keeps the law of one token an iteration; pass num_inference_steps={L} (got "
            f"{len(brush.law.turns)}), or disable_speculation()"
        )
    if how.prefill:
        yield from plain(brush, drawn, min(L, math.floor(L * how.prefill) + 1))
    if how.rule == "cspd":
        yield from aligned(brush, drawn, how, scout, told)
    else:
        kind = Own if scout is brush else Other
        yield from exact(brush, drawn, how, kind(scout, how.ahead), told)


def exact(brush: Brush, drawn: Canvas, how: Speculation, scout: Own | Other, told: Tally) -> Iterator[Canvas]:
    """Draw all pictures by the law of `plain` with one token an iteration; every picture goes its own way.

    A round drafts tokens, reads every picture with none, one, two ... of them, and keeps a draft if all before it were
    kept and the whole path of its denoising is likely enough under the model (`mmspec.paths`). A refused one is drawn
    anew from what the model has left over, and what was drafted after it is forgotten.
    """
    scout.start(drawn)
    L = drawn.order.shape[1]
    while min(drawn.counts) < L:
        draft = scout.propose(drawn)
        z, source, at = _verify(brush, drawn, draft, scout)
        ratio = _ratios(brush, draft, z)
        eta = torch.tensor([1.0 if sure else how.eta for sure in draft.certain], device=z.device)
        chance = paths.chance(ratio, eta)
        kept = coins(drawn.seeds[draft.cells.of], L, draft.cells.at, 0) < chance
        told.rounds += 1
        refused = _stand(drawn, draft, torch.stack([kept, chance, -ratio], 1).tolist(), source, at, scout, told)
        if refused:
            _redraw(brush, drawn, draft, z, eta, refused, scout, told)
        yield drawn


def _verify(
    brush: Brush, drawn: Canvas, draft: Drafted, scout: Own | Other
) -> tuple[Tensor, Tensor, dict[tuple[int, int], int]]:
    """The model's conditioning [streams, R, D] of every drafted token, knowing those before it.

    And that [streams, M, L, D] of all places that there is, with a table from picture and number of tokens known to
    one of the M.
    """
    L, here = drawn.order.shape[1], draft.cells
    drafted = list(zip(here.rows, here.turns, strict=True))
    asked = [cell for cell, certain in zip(drafted, draft.certain, strict=True) if not certain]
    if isinstance(scout, Own):  # one more, to draft the next tokens from
        asked += [(b, n) for b, n in {b: turn + 1 for b, turn in drafted}.items() if n < L]
    at, parts = {cell: i for i, cell in enumerate(asked)}, []
    if asked:
        seen = replace(drawn, tokens=drawn.tokens.clone())
        seen.put(here.of, here.at, draft.x)
        b = torch.tensor([b for b, _ in asked], device=here.of.device)
        parts.append(brush.read(seen.tokens[b], drawn.order[b], [n for _, n in asked], drawn.labels[b]))
    if isinstance(scout, Own):
        known, current = scout.known()
        at |= {(b, drawn.counts[b]): len(asked) + b for b in current}
        parts.append(known)
    source = torch.cat(parts, 1)
    return source[:, [at[cell] for cell in drafted], drawn.order[here.of, here.at]], source, at


def _ratios(brush: Brush, draft: Drafted, z: Tensor) -> Tensor:
    """log P/Q [R] of the drafted paths; 0 where nothing is to be tested."""
    ratio = torch.zeros(len(draft.cells), device=z.device)
    for steps, index, path in draft.parts:
        inside = [i for i, at in enumerate(index) if not draft.certain[at]]
        if inside:
            some, chain = [index[i] for i in inside], brush.chain(steps)
            brush.evaluations += len(some) * len(chain) * (1 + brush.law.guided)
            net = brush.net(z[:, some], draft.cells.at[some], steps)
            ratio[some] = paths.log_ratio(path.take(inside), net, chain, brush.law.temperature)
    return ratio


def _stand(
    drawn: Canvas, draft: Drafted, facts: list[list[float]], source: Tensor, at: dict[tuple[int, int], int],
    scout: Own | Other, told: Tally,
) -> list[int]:  # fmt: skip
    """Write the drafts that stand, count them, and tell the drafter what is known of every picture.

    Args:
        facts: of every draft whether it is kept by itself, the chance for that, and log Q/P.
        source, at: see `_verify`.

    Returns:
        Which drafts were the first of their picture to be refused, which are counted, too.
    """
    stand: list[int] = []
    refused: list[int] = []
    found: dict[int, int] = {}
    whole, begin = [], 0
    for b, some in groupby(draft.cells.rows):
        end = begin + len(list(some))
        first = next((i for i in range(begin, end) if not facts[i][0]), end)
        stand += range(begin, first)
        for i in range(begin, min(first + 1, end)):
            if not draft.certain[i]:
                told.note(draft.cells.turns[i], *facts[i][1:])
        n = drawn.counts[b] + first - begin
        if (b, n) in at:
            found[b] = at[b, n]
        if first < end:
            refused.append(first)
        else:
            whole.append(b)
        drawn.counts[b], begin = n + (first < end), end
    drawn.put(draft.cells.of[stand], draft.cells.at[stand], draft.x[stand])
    if isinstance(scout, Own):
        scout.learn(source, found, whole)
    return refused


def _redraw(
    brush: Brush, drawn: Canvas, draft: Drafted, z: Tensor, eta: Tensor, refused: list[int], scout: Own | Other,
    told: Tally,
) -> None:  # fmt: skip
    """Draw refused tokens anew, from what the model's law has left over."""
    L, C = drawn.order.shape[1], drawn.tokens.shape[2]
    for steps, index in by_steps(brush, [draft.cells.turns[i] for i in refused]):
        some = [refused[i] for i in index]
        of, at, chain = draft.cells.of[some], draft.cells.at[some], brush.chain(steps)
        seeds = drawn.seeds[of]

        def again(
            rows: Tensor, trial: int, at: Tensor = at, chain: paths.Chain = chain, seeds: Tensor = seeds
        ) -> tuple[Tensor, Tensor]:
            noise = normal(seeds[rows], PATHS, L, at[rows], trial, len(chain), C)
            return noise, coins(seeds[rows], L, at[rows], trial + 1)

        p, q = brush.net(z[:, some], at, steps), scout.brush.net(draft.z[:, some], at, steps)
        x, trials = paths.leftover(p, q, chain, again, eta[some], brush.law.temperature, AT_ONCE, brush.draw)
        drawn.put(of, at, x)
        told.refused, told.trials = told.refused + len(some), told.trials + sum(trials)
        asked = sum(-(-n // AT_ONCE) for n in trials) * AT_ONCE * len(chain) * (1 + brush.law.guided)
        brush.evaluations += asked
        scout.brush.evaluations += asked
