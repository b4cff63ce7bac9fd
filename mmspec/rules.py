"""Acceptance rules: the chance to accept a drafted token, and the residual distribution after a rejection."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import torch
from torch import Tensor

from mmspec.kernels import dispatch
from mmspec.kernels import reference as ops
from mmspec.modes import lasting


@dataclass(frozen=True)
class Masses:
    """Probabilities, of dtype `ops.widest`, of a distribution at the tested nodes [...], computed on first use."""

    at: Callable[[Tensor], Tensor]  # tokens [..., M] → their probabilities [..., M]
    make: Callable[[], Tensor]
    lines: tuple[Tensor, Tensor, Tensor] | None = None  # logits [B, N, V], their logsumexp [B, N], the nodes tested

    @cached_property
    def all(self) -> Tensor:  # [..., V]
        return self.make()

    @classmethod
    def of(cls, weights: Tensor) -> Masses:
        return cls(partial(weights.gather, -1), lambda: weights)


@dataclass(frozen=True)
class Trial:
    """Drafted tokens under test: the input of a rule; [...] is one node per row, or many.

    Attributes:
        x: the tokens.
        depth: of each in its draft, 1 for the first one after the pending token.
        p: the target's distribution there; `p_x` [...] is its probability of x, `p.all` [..., V] the probabilities.
        q: the distribution that x was drawn from; `q_x` likewise.
    """

    x: Tensor
    depth: Tensor
    p: Masses
    q: Masses
    _results: dict[Callable[[Trial], Tensor], Tensor] = field(default_factory=dict, repr=False, compare=False)

    def once(self, part: Callable[[Trial], Tensor]) -> Tensor:
        """`part(self)`, computed once: a rule's charge may use its residual again."""
        if part not in self._results:
            self._results[part] = part(self)
        return self._results[part]

    @cached_property
    def p_x(self) -> Tensor:
        return self.p.at(self.x[..., None])[..., 0]

    @cached_property
    def q_x(self) -> Tensor:
        return self.q.at(self.x[..., None])[..., 0]


@dataclass(frozen=True)
class Rule:
    """The chance to accept a drafted token, and the distribution that replaces a rejected one: pure functions in
    `ops.widest`.

    `ratio(p_x, q_x)`, of probabilities [...], is the chance to accept x, and `residual(trial)` gives the weights
    [..., V] of its replacement. A relaxed rule accepts x with the chance `relaxed(trial)` [...] instead, at a cost of
    |relaxed − ratio| for every test; it never accepts x with p(x) = 0. At temperature 0, `greedy(trial)` [...] says
    whether x is accepted though it is not the likeliest token; None: only the likeliest token is accepted.

    Charges: with the ordinary residual (p − q)+ and relaxed ≥ ratio = min(1, p/q), the distribution of a token is, in
    total variation, exactly E[charge] away from p, and no rule that accepts as often is nearer. Summed over a row,
    charges bound its distance from the target's distribution. A rule with another residual has its own `charge`.

    Attributes:
        name: with all parameters, in a form that `resolve_rule` reads.
        lossless: the output distribution is p itself, whatever q is.
        budget: the most that a row may cost; as it runs out, tests are relaxed less, and then not at all.
        vocab: the number of tokens whose codes it compares; None: it has no codes.
    """

    name: str
    ratio: Callable[[Tensor, Tensor], Tensor]
    residual: Callable[[Trial], Tensor]
    lossless: bool = False
    relaxed: Callable[[Trial], Tensor] | None = None
    greedy: Callable[[Trial], Tensor] | None = None
    charge: Callable[[Trial], Tensor] | None = None
    budget: float | None = None
    vocab: int | None = None

    def __post_init__(self) -> None:
        if self.budget is None:
            return
        if not self.budget >= 0:
            raise ValueError(f"budget must be a distance ≥ 0, or None for no limit; got {self.budget!r}")
        if self.charge is not None:
            raise ValueError(
                f"{self.name} cannot be limited by a budget: its cost is not only the acceptance that it gains; use "
                "pooled, or a rule with the ordinary residual"
            )


def ordinary(trial: Trial) -> Tensor:
    """(p − q)+, the default residual."""
    return ops.positive_residual(trial.p.all, trial.q.all)


exact = Rule("exact", ops.exact_ratio, ordinary, lossless=True)
_relaxed = partial(Rule, ratio=ops.exact_ratio, residual=ordinary)


class _DeviceTable:
    """A rule's table, copied once to each device where rows are tested: models may move, or be offloaded."""

    def __init__(self, table: Tensor) -> None:
        self.copies = {table.device: table}

    def on(self, device: torch.device) -> Tensor:
        if device not in self.copies:
            with lasting():
                self.copies[device] = next(iter(self.copies.values())).to(device)
        return self.copies[device]


def only(rule: Rule, tokens: Tensor) -> Rule:
    """The rule for some tokens, bool [n], and `exact` for all others, which then cost nothing.

    A rule with its own `charge` cannot be restricted to some tokens; `exact` is returned in its place.
    """
    if rule.relaxed is None or rule.charge is not None:
        return exact
    table, relaxed, greedy = _DeviceTable(tokens), rule.relaxed, rule.greedy

    def among(x: Tensor) -> Tensor:
        here = table.on(x.device)
        return here[x.clamp(max=len(here) - 1)] & (x < len(here))

    def some(trial: Trial) -> Tensor:
        return torch.where(among(trial.x), relaxed(trial), rule.ratio(trial.p_x, trial.q_x))

    def some_greedy(trial: Trial) -> Tensor:
        assert greedy is not None
        return among(trial.x) & greedy(trial)

    return replace(rule, relaxed=some, greedy=None if greedy is None else some_greedy)


def lantern(
    codebook: Tensor, *, k: int, delta: float | None = None, lam: float | None = None, residual: str = "ordinary"
) -> Rule:
    """x borrows the mass of its nearest codes: of the k nearest, the longest prefix whose mass stays within a bound.

    With the bound `delta` it is LANTERN (Jang et al. 2024, §4), with (lam − 1)·p(x) LANTERN++ (Park et al. 2025, §3). A
    token is at most lam − 1 away from p, in total variation; `delta` bounds only a single draft that is not random.

    At temperature 0, x is accepted if p(x) plus the borrowed mass reaches the largest p; it costs 1 if x is not the
    likeliest token.

    The authors' code finds neighbours among the raw codes; here they are found among the normalised ones, because most
    tokenizers use nothing else. With the same neighbours the chances are the same.

    Args:
        residual: the residual after a rejection. "ordinary" is (p − q)+, so that the cost is exactly the distance of
            the token's distribution from p. "published" is that of the authors' code: where x could borrow from any
            code, its k + 1 nearest are first removed from p, if the draft was not random (dynamic trees), or from q
            (static trees). Its cost is a bound.
    """
    most = len(codebook) - 1
    _among("residual", residual, ("ordinary", "published"))
    _check("k", k, lambda k: isinstance(k, int) and 1 <= k <= most, f"a whole number from 1 to V − 1 = {most}")
    if (delta is None) == (lam is None):
        raise ValueError(f"lantern takes delta or lam, exactly one of them; got delta={delta!r}, lam={lam!r}")
    if lam is None:
        _check("delta", delta, lambda delta: 0 < delta <= 1, "in (0, 1]")
    else:
        _check("lam", lam, lambda lam: lam > 1, "above 1")
    neighbours = ops.nearest(codebook, min(k + 1, most))
    near, and_next = _DeviceTable(neighbours[:, :k].contiguous()), _DeviceTable(neighbours)

    def bound(trial: Trial) -> Tensor | float:
        return float(delta) if lam is None else (lam - 1) * trial.p_x  # type: ignore[arg-type]

    def reaches(trial: Trial) -> Tensor:
        masses = trial.p.at(near.on(trial.x.device)[trial.x].long())
        return trial.p_x + ops.borrowed(masses, bound(trial))

    def relaxed(trial: Trial) -> Tensor:
        if trial.p.lines is not None:
            here = near.on(trial.x.device)
            chance: Tensor = dispatch.lantern_accept(*trial.p.lines, trial.x, trial.q_x, here, delta, lam)
            return chance
        return ops.exact_ratio(reaches(trial), trial.q_x)

    def published(trial: Trial) -> Tensor:
        around = and_next.on(trial.x.device)[trial.x].long()
        borrows = trial.p.at(around[..., :1])[..., 0] <= bound(trial)
        return ops.emptied_residual(trial.p.all, trial.q.all, around, borrows, trial.q_x == 1)

    def charge(trial: Trial) -> Tensor:
        strict, f = ops.exact_ratio(trial.p_x, trial.q_x), torch.where(trial.p_x > 0, trial.once(relaxed), 0.0)
        a, b = trial.once(published), ordinary(trial)
        apart = (a / a.sum(-1, keepdim=True) - b / b.sum(-1, keepdim=True)).abs().sum(-1) / 2
        return f - strict + (1 - f) * apart

    limit = f"delta={delta}" if lam is None else f"lam={lam}"
    rule = _relaxed(
        f"lantern(k={k}, {limit})", relaxed=relaxed, greedy=lambda trial: reaches(trial) >= trial.p.all.amax(-1),
        vocab=len(codebook),
    )  # fmt: skip
    if residual == "ordinary":
        return rule
    return replace(rule, name=f"lantern(k={k}, {limit}, residual='published')", residual=published, charge=charge)


def scaled(*, omega: float, nu: float = 0.0) -> Rule:
    """min(1, ω·p/q) with ω = omega·exp(−nu·(i − 1)) at the i-th draft of a path (Cool-SD, 2026): no codebook needed.

    ω is never less than 1; below 1 the published schedule would reject more often than `exact` does.
    """
    _check("omega", omega, lambda omega: omega >= 1, "at least 1")
    _check("nu", nu, lambda nu: nu >= 0, "at least 0")

    def relaxed(trial: Trial) -> Tensor:
        weight = (omega * torch.exp(-nu * (trial.depth - 1).to(trial.p_x.dtype))).clamp(min=1.0)
        return ops.exact_ratio(weight * trial.p_x, trial.q_x)

    return _relaxed(f"scaled(omega={omega}, nu={nu})", relaxed=relaxed)


def typical(*, epsilon: float, delta: float) -> Rule:
    """x is accepted if it is typical of p, p(x) > min(ε, δ·exp(−H(p))), and otherwise with chance min(1, p/q).

    Medusa (Cai et al. 2024, §3.4) accepts only typical tokens; here the others keep their usual chance, and a rejected
    draft is replaced from (p − q)+, so that the cost is exactly the distance from p. Needs no codebook. A flat
    distribution, as in the texture of a background, has many typical tokens; a peaked one has one.
    """
    _check("epsilon", epsilon, lambda epsilon: 0 < epsilon <= 1, "in (0, 1]")
    _check("delta", delta, lambda delta: delta > 0, "above 0")

    def relaxed(trial: Trial) -> Tensor:
        fits = trial.p_x > ops.typical_bound(trial.p.all, epsilon, delta)
        return torch.where(fits, 1.0, ops.exact_ratio(trial.p_x, trial.q_x))

    return _relaxed(f"typical(epsilon={epsilon}, delta={delta})", relaxed=relaxed)


def gsd(
    codebook: Tensor | None = None, embeddings: Tensor | None = None, *, group: int, distance: float | None = None,
    gap: float | None = None, space: str = "codes",
) -> Rule:  # fmt: skip
    """Grouped speculative decoding as published (So et al. 2025, §4): min(1, p(C)/q(C)), C a window of ranks around x.

    Different tokens have different windows, so the chance can also be less than min(1, p/q): then x is rejected more
    often than necessary, and E[charge] is no longer the distance from p but still bounds it. `pooled` has neither flaw.
    Where the window of one of the least likely tokens extends past the last rank, the authors' code uses min(1, p/q);
    here the window is cut off at the last rank.

    Args:
        group: size of the window of ranks, x included.
        distance: leave out codes further from x than this.
        space: measure `distance` between normalised "codes", or as the authors' code does between the model's input
            "embeddings" [V, H], not normalised.
        gap: leave out tokens whose probability differs from p(x) by this or more.
    """
    _check("group", group, lambda group: isinstance(group, int) and group >= 1, "a whole number of at least 1")
    if gap is not None:
        _check("gap", gap, lambda gap: 0 < gap <= 1, "in (0, 1], or None")
    _among("space", space, ("codes", "embeddings"))
    codes, table = None, None
    if distance is not None:
        _check("distance", distance, lambda distance: distance > 0, "above 0, or None")
        table = codebook if space == "codes" else embeddings
        if table is None:
            what = "a codebook [V, c] is" if space == "codes" else "input embeddings [V, H] of the codes are"
            other = "pass one" if space == "codes" else "pass them, choose space='codes'"
            raise ValueError(f"{what} needed to measure distance; {other}, or leave distance out")
        unit = torch.nn.functional.normalize
        codes = _DeviceTable(table.detach() if space != "codes" else unit(table.float(), dim=-1))

    def relaxed(trial: Trial) -> Tensor:
        if trial.p.lines is not None:
            logits, _, nodes = trial.p.lines
            ids, member = dispatch.logit_window(logits, nodes, trial.x, group)
        else:
            ids, member = ops.rank_window(trial.p.all, trial.x, group)
        p, q = trial.p.at(ids), trial.q.at(ids)
        if codes is not None:
            here = codes.on(ids.device)
            difference = here[ids].float() - here[trial.x][..., None, :].float()
            member = member & (difference.norm(dim=-1) <= distance)
        if gap is not None:
            member = member & ((p - trial.p_x[..., None]).abs() < gap)
        return ops.exact_ratio(torch.where(member, p, 0.0).sum(-1), torch.where(member, q, 0.0).sum(-1))

    where = "" if space == "codes" else f", space={space!r}"
    vocab = None if table is None else len(table)
    return _relaxed(f"gsd(group={group}, distance={distance}, gap={gap}{where})", relaxed=relaxed, vocab=vocab)


def grouped(codebook: Tensor, *, radius: float | None = None, cells: int | None = None) -> Rule:
    """Exact for cells of near codes: chance min(1, p(C)/q(C)); the residual draws a cell by (p(C) − q(C))+, then by p.

    The token's cell has the target's own distribution; inside a cell an accepted token follows q, not p, so that
    output and target can be coupled never further apart than 2·`radius`. The cost is the distance inside the cell.
    """
    cell, name = _cells(codebook, "grouped", radius, cells)

    def charge(trial: Trial) -> Tensor:
        p, q = _in_cell(trial, cell)
        P, Q = p.sum(-1), q.sum(-1)
        apart = (p / P[..., None] - q / Q[..., None]).abs().sum(-1) / 2
        return torch.where(trial.p_x > 0, ops.exact_ratio(P, Q) * apart, 0.0)

    def residual(trial: Trial) -> Tensor:
        return ops.cell_residual(trial.p.all, trial.q.all, cell.on(trial.x.device))

    relaxed = partial(_cell_ratio, cell=cell)
    return Rule(name, ops.exact_ratio, residual, relaxed=relaxed, charge=charge, vocab=len(codebook))


def pooled(codebook: Tensor, *, radius: float | None = None, cells: int | None = None) -> Rule:
    """x is accepted by itself or with its cell of near codes: max(p/q, p(C)/q(C)), at most 1; ordinary residual."""
    cell, name = _cells(codebook, "pooled", radius, cells)

    def relaxed(trial: Trial) -> Tensor:
        return torch.maximum(ops.exact_ratio(trial.p_x, trial.q_x), _cell_ratio(trial, cell))

    return _relaxed(name, relaxed=relaxed, vocab=len(codebook))


def _in_cell(trial: Trial, cell: _DeviceTable) -> tuple[Tensor, Tensor]:
    """p and q [..., V], zero outside the cell of x and where p is zero."""
    p, here = trial.p.all, cell.on(trial.x.device)
    same = (here == here[trial.x][..., None]) & (p > 0)
    return torch.where(same, p, 0.0), torch.where(same, trial.q.all, 0.0)


def _cell_ratio(trial: Trial, cell: _DeviceTable) -> Tensor:
    p, q = _in_cell(trial, cell)
    return ops.exact_ratio(p.sum(-1), q.sum(-1))


def _cells(codebook: Tensor, rule: str, radius: float | None, cells: int | None) -> tuple[_DeviceTable, str]:
    """The cell of each code, and the rule's name with its parameter."""
    if (radius is None) == (cells is None):
        raise ValueError(f"{rule} takes radius or cells, exactly one of them; got radius={radius!r}, cells={cells!r}")
    if cells is None:
        _check("radius", radius, lambda radius: 0 <= radius <= 2, "from 0 to 2, a distance of normalised codes")
    else:
        most = len(codebook)
        _check("cells", cells, lambda n: isinstance(n, int) and 1 <= n <= most, f"a whole number from 1 to V = {most}")
    given = f"radius={radius}" if cells is None else f"cells={cells}"
    return _DeviceTable(ops.partition(codebook, radius, cells)), f"{rule}({given})"


def _among(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}; got {value!r}")


def _check(name: str, value: object, valid: Callable[[float], bool], allowed: str) -> None:
    if not isinstance(value, (int, float)) or not valid(value):
        raise ValueError(f"{name} must be {allowed}; got {value!r}")
