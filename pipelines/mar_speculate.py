"""MAR drawn several tokens a pass: the exact rule, in rounds of draft, verify, accept and redraw."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
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
    while min(drawn.counts) < drawn.order.shape[1]:
        draft = scout.propose(drawn)
        z, lookup = _verify(brush, drawn, draft, scout)
        ratio, eta = _ratios(brush, draft, z), torch.full((len(draft.rows),), how.eta, device=z.device)
        eta[torch.tensor(draft.certain, device=z.device)] = 1.0
        chance = paths.chance(ratio, eta)
        of, at = draft.cells
        kept = (coins(drawn.seeds[of], drawn.order.shape[1], at, 0) < chance).tolist()
        told.rounds += 1
        refused, tested = _stand(drawn, draft, kept, lookup, scout)
        told.note([draft.turns[i] for i in tested], chance[tested], -ratio[tested])
        _redraw(brush, drawn, draft, z, eta, refused, scout, told)
        yield drawn


def _verify(
    brush: Brush, drawn: Canvas, draft: Drafted, scout: Own | Other
) -> tuple[Tensor, Callable[[int, int], Tensor | None]]:
    """The model's conditioning [streams, R, D] of every drafted token, knowing those before it.

    And a function of picture and number of tokens known: its conditioning [streams, L, D] of all places there, None
    where it was not read.
    """
    L, (of, turns) = drawn.order.shape[1], draft.cells
    drafted = zip(draft.rows, draft.turns, draft.certain, strict=True)
    cells = [(b, turn) for b, turn, certain in drafted if not certain]
    if isinstance(scout, Own):  # one more, to draft the next tokens from
        last = {b: turn + 1 for b, turn in zip(draft.rows, draft.turns, strict=True)}
        cells += [(b, n) for b, n in last.items() if n < L]
    at = {cell: i for i, cell in enumerate(cells)}
    seen = replace(drawn, tokens=drawn.tokens.clone())
    seen.put(of, turns, draft.x)
    read = torch.empty(0)
    if cells:
        b = torch.tensor([b for b, _ in cells], device=of.device)
        read = brush.read(seen.tokens[b], drawn.order[b], [n for _, n in cells], drawn.labels[b])

    def lookup(row: int, known: int) -> Tensor | None:
        return read[:, at[row, known]] if (row, known) in at else scout.known(row)

    each = [lookup(b, turn) for b, turn in zip(draft.rows, draft.turns, strict=True)]
    places = drawn.order[of, turns].tolist()
    return torch.stack([z[:, place] for z, place in zip(each, places, strict=True)], 1), lookup


def _ratios(brush: Brush, draft: Drafted, z: Tensor) -> Tensor:
    """log P/Q [R] of the drafted paths; 0 where nothing is to be tested."""
    ratio, turns = torch.zeros(len(draft.rows), device=z.device), draft.cells[1]
    tested = ~torch.tensor(draft.certain, device=z.device)
    for index, path in draft.parts:
        inside = tested[index].nonzero()[:, 0]
        if len(inside):
            some = index[inside]
            steps = brush.law.steps[int(turns[some[0]])]
            brush.evaluations += len(some) * path.noise.shape[1] * (1 + brush.law.guided)
            net = brush.net(z[:, some], turns[some], steps)
            ratio[some] = paths.log_ratio(path.take(inside), net, brush.chain(steps), brush.law.temperature)
    return ratio


def _stand(
    drawn: Canvas, draft: Drafted, kept: list[bool], lookup: Callable[[int, int], Tensor | None], scout: Own | Other
) -> tuple[list[int], list[int]]:
    """Write the drafts that stand, count them, and tell the drafter what is known of every picture.

    Returns:
        Which drafts were the first of their picture to be refused, which are counted, too; and which were tested.
    """
    stand: list[int] = []
    refused, tested, begin = [], [], 0
    for b, some in groupby(draft.rows):
        end = begin + len(list(some))
        first = next((i for i in range(begin, end) if not kept[i]), end)
        stand += range(begin, first)
        refused += [first] if first < end else []
        tested += [i for i in range(begin, min(first + 1, end)) if not draft.certain[i]]
        n = drawn.counts[b] + first - begin
        known = lookup(b, n)
        if known is not None:
            scout.learn(b, known, first == end)
        drawn.counts[b], begin = n + (first < end), end
    of, at = draft.cells
    drawn.put(of[stand], at[stand], draft.x[stand])
    return refused, tested


def _redraw(
    brush: Brush, drawn: Canvas, draft: Drafted, z: Tensor, eta: Tensor, refused: list[int], scout: Own | Other,
    told: Tally,
) -> None:  # fmt: skip
    """Draw refused tokens anew, from what the model's law has left over."""
    device, L, C = drawn.order.device, drawn.order.shape[1], drawn.tokens.shape[2]
    for index in by_steps(brush, [draft.turns[i] for i in refused], device):
        some = torch.tensor(refused, device=device)[index]
        of, at = (t[some] for t in draft.cells)
        steps = brush.law.steps[int(at[0])]
        chain, seeds = brush.chain(steps), drawn.seeds[of]

        def again(
            rows: Tensor, trial: int, at: Tensor = at, chain: paths.Chain = chain, seeds: Tensor = seeds
        ) -> tuple[Tensor, Tensor]:
            noise = normal(seeds[rows], PATHS, L, at[rows], trial, len(chain), C)
            return noise, coins(seeds[rows], L, at[rows], trial + 1)

        p, q = brush.net(z[:, some], at, steps), scout.brush.net(draft.z[:, some], at, steps)
        x, trials = paths.leftover(p, q, chain, again, eta[some], brush.law.temperature, AT_ONCE)
        drawn.put(of, at, x)
        told.refused, told.trials = told.refused + len(some), told.trials + int(trials.sum())
        asked = int((-(-trials // AT_ONCE) * AT_ONCE).sum()) * len(chain) * (1 + brush.law.guided)
        brush.evaluations += asked
        scout.brush.evaluations += asked
