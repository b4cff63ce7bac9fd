"""The Jacobi drafter: the joint distribution of all tokens by enumeration, planted errors, seed-exact runs, options."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import tiny_vlms
import torch
from table_targets import TableModel, excess
from torch import Tensor

import mmspec
from mmspec.drafters.jacobi import JacobiDrafter, _branched, _keep_or_redraw
from mmspec.drafters.plain import Plain
from mmspec.drafters.window import WindowOptions, layout
from mmspec.kernels import reference as ops
from mmspec.loop import decode, start
from mmspec.protocols import TargetInfo
from mmspec.session import Row, Session
from mmspec.switch import RoundCosts, Switch
from mmspec.tree import chain
from mmspec.types import NO_TOKEN, Categorical, Draft

CPU = torch.device("cpu")
FULL = pytest.mark.full


# -- a target that a hash defines ------------------------------------------------------------------------------------


@dataclass
class Toy(TableModel):
    """The distribution of a token depends on its position and on the `reach` tokens before it, through a hash.

    `kind` makes it hostile: two tokens only, every third position forced, nothing but ties. `mode` realises the
    distribution: as it is, by its argmax, or by the noise of the position.
    """

    vocab: int = 4
    grid: tuple[int, int] | None = (2, 2)
    reach: int = 9
    scale: float = 1.0
    kind: str = "plain"
    mode: str = "distribution"

    def logits(self, code: Tensor, position: Tensor) -> Tensor:
        logits = self.scale * ops.gumbel(code.flatten(), position.flatten()[:, None], self.vocab)
        logits = logits.view(*code.shape, self.vocab)
        if self.kind == "ties":
            return torch.zeros_like(logits)
        left = 2 if self.kind == "two" else 1
        cut = logits.masked_fill(logits < logits.topk(left).values[..., -1:], -math.inf)
        where = {"plain": position < 0, "two": position >= 0, "forced": position % 3 == 1}[self.kind]
        return torch.where(where[..., None], cut, logits)

    def after(self, code: Tensor, token: Tensor) -> Tensor:
        return (code * (self.vocab + 1) + token + 1) % (self.vocab + 1) ** self.reach

    def distribution(self, code: Tensor, session: Any, draft: Draft) -> Categorical:
        position = session.emitted[:, None] + draft.tree.depth
        logits = self.logits(code, position)
        if self.mode == "distribution":
            return Categorical(logits)
        noise = ops.gumbel(session.seeds, position, self.vocab) if self.mode == "seed" else 0.0
        return Categorical(ids=(logits + noise).argmax(-1))

    def joint(self, length: int) -> Tensor:
        """Probabilities [V ** length] of all outputs, the first token slowest."""
        codes, p = torch.zeros(1, dtype=torch.long), torch.ones(1, dtype=torch.float64)
        for position in range(length):
            distribution = self.logits(codes, torch.full_like(codes, position)).softmax(-1)
            p = (p[:, None] * distribution).flatten()
            codes = self.after(codes[:, None], torch.arange(self.vocab)).flatten()
        return p


def jacobi(toy: Toy, cls: type[JacobiDrafter] = JacobiDrafter, **options: Any) -> JacobiDrafter:
    info = TargetInfo("toy", toy.vocab, 1, 1, 1, CPU, torch.float32)
    return cls().fit(info, {name: value for name, value in options.items() if value is not None})


def opened(toy: Toy, drafter: Any, seeds: list[int], lengths: list[int]) -> Session:
    rows = [Row([0], 1, 1 + n, seed, index=i) for i, (seed, n) in enumerate(zip(seeds, lengths, strict=True))]
    return start(toy, drafter, rows, None)[0]


def drawn(toy: Toy, drafter: Any, seeds: list[int], lengths: list[int]) -> tuple[list[list[int]], Session]:
    """Outputs in the order of the seeds, and the session that made them."""
    session = opened(toy, drafter, seeds, lengths)
    rows = session.rows
    for _ in decode(session, toy, drafter):
        pass
    return [row.tokens[1:] for row in rows], session


# -- the distribution of the output ----------------------------------------------------------------------------------


def surprise(toy: Toy, drafter: Any, length: int, rows: int = 10000) -> float:
    """χ² of the joint distribution of all tokens of `rows` outputs, in standard deviations; ∞ where the impossible
    happened."""
    return far(toy, drawn(toy, drafter, [7 + 13 * i for i in range(rows)], [length] * rows)[0])


def far(toy: Toy, tokens: list[list[int]]) -> float:
    """`surprise` of these outputs."""
    samples, joint = torch.tensor(tokens), toy.joint(len(tokens[0]))
    place = samples @ toy.vocab ** torch.arange(samples.shape[1] - 1, -1, -1)
    return math.inf if (joint[place] == 0).any() else excess(samples, joint, toy.vocab)


LOSSLESS = 5.5  # standard deviations

WEAK = {"grid": (3, 2), "reach": 1, "scale": 0.7}  # a context that matters little: guesses often stay
CASES = [
    *((coupling, "uniform", window) for coupling in ("none", "maximal", "gumbel") for window in (3, 5)),
    *(("maximal", init, 4) for init in ("horizontal", "vertical", "mixture")),
    ("gumbel", "mixture", 4), ("gumbel", "vertical", 9), ("none", "horizontal", 3), ("maximal", "uniform", 2),
]  # fmt: skip


@pytest.mark.parametrize(("coupling", "init", "window"), CASES)
@pytest.mark.every(4)
def test_every_coupling_and_init_keeps_the_joint_law(coupling: str, init: str, window: int) -> None:
    toy = Toy(**WEAK)
    assert surprise(toy, jacobi(toy, window=window, init=init, coupling=coupling), 5) < LOSSLESS


@pytest.mark.full
@pytest.mark.parametrize("coupling", ["none", "maximal", "gumbel"])
@pytest.mark.parametrize("init", ["uniform", "horizontal", "vertical", "mixture"])
@pytest.mark.parametrize("window", [3, 5, 9])
@pytest.mark.parametrize("proactive", [None, (3, 2), (2, 3)])
def test_all_of_them_keep_the_joint_law(coupling: str, init: str, window: int, proactive: Any) -> None:
    toy = Toy(vocab=3, grid=(2, 3))
    assert surprise(toy, jacobi(toy, window=window, init=init, coupling=coupling, proactive=proactive), 6) < LOSSLESS


@pytest.mark.parametrize("coupling", ["none", "maximal", "gumbel"])
@pytest.mark.parametrize(
    ("proactive", "window", "vocab"), [((2, 2), 2, 4), ((2, 3), 5, 4), ((3, 3), 4, 3), ((3, 2), 4, 2)]
)
@pytest.mark.every(2)
def test_a_proactive_tree_keeps_the_joint_law(coupling: str, proactive: Any, window: int, vocab: int) -> None:
    toy = Toy(vocab=vocab)
    length = {2: 7, 3: 5, 4: 4}[vocab]
    assert surprise(toy, jacobi(toy, window=window, coupling=coupling, proactive=proactive), length) < LOSSLESS


@pytest.mark.parametrize("kind", ["two", "forced", "ties"])
@pytest.mark.parametrize("coupling", ["none", "maximal", "gumbel"])
@pytest.mark.parametrize("proactive", [None, (3, 2)])
@pytest.mark.every(6)
def test_hostile_laws_are_kept(kind: str, coupling: str, proactive: Any) -> None:
    """Laws with −inf entries, forced tokens, and p = q everywhere, which leaves no residual."""
    toy = Toy(vocab=3, kind=kind)
    assert surprise(toy, jacobi(toy, window=4, coupling=coupling, proactive=proactive), 5) < LOSSLESS


class Restless(RoundCosts):
    """Goes by how many guesses stood, whatever pays: by chance a draft is left out, though it was made."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = 0.0

    def book(self, batch: int, drafted: bool, seconds: float, gained: float) -> None:
        self.turn += gained

    def pays(self, batch: int) -> bool | None:
        return None

    def wants_plain(self, batch: int) -> bool:
        return round(7 * self.turn) % 3 == 1


def restless(toy: Toy, cls: type[JacobiDrafter] = JacobiDrafter, **options: Any) -> Switch:
    """Windows, and now and then none."""
    return Switch(jacobi(toy, cls, **options), Restless())


CHANGING = [("none", None, 10000), ("maximal", None, 10000), ("gumbel", None, 10000), ("maximal", (2, 3), 10000),
            ("maximal", None, 1), ("gumbel", (2, 3), 1)]  # fmt: skip


@pytest.mark.parametrize(
    ("coupling", "proactive", "together"), [pytest.param(*c, marks=FULL if c[2] == 1 else ()) for c in CHANGING]
)
def test_leaving_drafts_out_keeps_the_joint_law(coupling: str, proactive: Any, together: int) -> None:
    """Of a row by itself, what stood in it before decides which."""
    toy, options = Toy(**WEAK), {"window": 5, "coupling": coupling, "proactive": proactive}
    if together > 1:
        assert surprise(toy, restless(toy, **options), 5) < LOSSLESS
    else:
        assert far(toy, [drawn(toy, restless(toy, **options), [7 + 13 * i], [5])[0][0] for i in range(2000)]) < LOSSLESS


class KeepsOldLaw(JacobiDrafter):
    """Coupled SJD as released: a guess that stayed is held against its old distribution, not against the one it has
    now."""

    def _carried(self, session: Any, column: Tensor, coins: Any, noise: Any) -> Any:
        known, token, log_p = super()._carried(session, column, coins, noise)
        if log_p is None:
            return known, token, log_p
        level = session.last.acceptance.count[:, None] + column
        old = session.last.draft.tokens.gather(1, (level + 1).clamp(max=len(column)))
        stayed = known & (level < len(column)) & (old == token)
        log_q = session.memory.q[torch.arange(len(level))[:, None], level.clamp(max=len(column) - 1)]
        return known, token, torch.where(stayed[..., None], log_q, log_p)


class SaysUniform(JacobiDrafter):
    """Copies a neighbour and says that it drew from the uniform distribution."""

    def _first(self, *args: Any) -> Any:
        token, prior = super()._first(*args)
        return token, lambda: torch.zeros_like(prior())


class KnowsTheCoin(JacobiDrafter):
    """Redraws its guesses with the very numbers that will test them."""

    def _carried(self, session: Any, column: Tensor, coins: Any, noise: Any) -> Any:
        position = session.emitted[:, None] + column
        return super()._carried(session, column, ops.uniform(session.seeds[:, None], position), noise)


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (KeepsOldLaw, {"coupling": "maximal", "init": "uniform"}),
        (SaysUniform, {"coupling": "maximal", "init": "horizontal"}),
        (KnowsTheCoin, {"coupling": "none", "init": "uniform"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_planted_error_is_seen(cls: type[JacobiDrafter], options: Any) -> None:
    toy = Toy(**WEAK)
    assert surprise(toy, jacobi(toy, cls, window=5, **options), 5) > 2 * LOSSLESS


class OneHot(JacobiDrafter):
    """SJD as released: a uniform first guess that is called certain."""

    def _first(self, *args: Any) -> Any:
        token, prior = super()._first(*args)
        return token, lambda: torch.full_like(prior(), -math.inf).scatter(2, token[..., None], 0.0)


def test_a_first_guess_called_certain_is_lossless_and_accepted_less() -> None:
    toy = Toy(grid=(3, 2))
    assert surprise(toy, jacobi(toy, OneHot, window=4, init="uniform"), 5) < LOSSLESS
    toy = Toy(vocab=64, grid=(4, 8), reach=1)
    tau = [
        drawn(toy, jacobi(toy, cls, window=8, init="uniform"), list(range(100)), [32] * 100)[1].stats
        for cls in (OneHot, JacobiDrafter)
    ]
    assert tau[0].tokens_per_target_call < 0.97 * tau[1].tokens_per_target_call


# -- couplings, first guesses, trees ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["random", "equal", "disjoint", "point"])
def test_the_maximal_coupling_gives_p_and_keeps_as_often_as_can_be(kind: str) -> None:
    """Σ over the old guess and a fine grid of coins."""
    V, n = 5, 20000
    p, q = torch.rand(2, V, dtype=torch.float64).softmax(-1).pow(3)
    if kind == "equal":
        p = q
    if kind == "disjoint":
        p, q = p * (torch.arange(V) < 2), q * (torch.arange(V) >= 2)
    if kind == "point":
        p = torch.eye(V, dtype=torch.float64)[3]
    p, q = p / p.sum(), q / q.sum()
    u = (torch.arange(n, dtype=torch.float64)[None] + 0.5) / n
    distribution, kept = torch.zeros(V, dtype=torch.float64), 0.0
    for x in range(V):
        if q[x] > 0:
            y = _keep_or_redraw(p.expand(1, n, V), q.expand(1, n, V), torch.full((1, n), x), u)
            distribution += q[x] * torch.bincount(y[0], minlength=V) / n
            kept += float(q[x] * (y == x).double().mean())
    assert (distribution - p).abs().max() < V / n
    assert abs(kept - (1 - (p - q).abs().sum() / 2)) < V / n


def test_without_a_guess_the_coupling_draws_from_p() -> None:
    p, n = torch.tensor([0.5, 0.0, 0.25, 0.25], dtype=torch.float64), 8000
    u = (torch.arange(n, dtype=torch.float64)[None] + 0.5) / n
    y = _keep_or_redraw(p.expand(1, n, 4), torch.zeros(1, n, 4).double(), torch.full((1, n), NO_TOKEN), u)
    assert torch.bincount(y[0], minlength=4).tolist() == [4000, 0, 2000, 2000]


@pytest.mark.parametrize("init", ["uniform", "horizontal", "vertical", "mixture"])
def test_first_guesses_have_the_law_that_they_state(init: str) -> None:
    """One row, some coins: the tokens' frequencies are exp(log q), whose sum is one."""
    toy = Toy(vocab=6, grid=(3, 3))
    drafter = jacobi(toy, window=8, init=init)
    session = opened(toy, drafter, [5], [9])
    for round_ in decode(session, toy, drafter):
        if len(round_.new[0]) and session.rows[0].generated > 4:
            break
    n = 60000
    known = torch.zeros(1, 7, dtype=torch.bool)
    coins = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    guess = [
        drafter._first(session, known, torch.zeros(1, 7).long(), coins[i].expand(1, 7), 6) for i in range(0, n, 150)
    ]
    log_q = guess[0][1]()
    counts = torch.nn.functional.one_hot(torch.cat([token for token, _ in guess]), 6).double().mean(0)
    assert torch.allclose(log_q.exp().sum(-1), torch.ones(1, 7), atol=1e-5)
    assert (counts - log_q[0].exp()).abs().max() < 0.03


@pytest.mark.parametrize("init", ["horizontal", "vertical", "mixture"])
def test_first_guesses_copy_the_left_and_the_upper_neighbour(init: str) -> None:
    """Under certain distributions nothing is left to chance: 4 columns, the tokens 0 … 3 of the first row are
    decided."""
    toy = Toy(vocab=50, grid=(4, 4), mode="greedy")
    drafter = jacobi(toy, window=9, init=init)
    session = opened(toy, drafter, [3], [16])
    session.memory.decided = torch.tensor([[NO_TOKEN, 10, 11, 12]])
    session.last = replace(session.last, acceptance=replace(session.last.acceptance, next_token=torch.tensor([13])))
    session.pending = torch.tensor([13])
    tokens = drafter.propose(session, toy).tokens[0]
    left, above = [13] * 8, [10, 11, 12, 13] * 2
    for guess, allowed in zip(tokens[1:].tolist(), zip(left, above, strict=True), strict=True):
        assert guess in {"horizontal": allowed[:1], "vertical": allowed[1:], "mixture": allowed}[init]


def test_the_row_above_the_first_one_is_the_left_neighbour() -> None:
    toy = Toy(vocab=50, grid=(4, 4), mode="greedy")
    drafter = jacobi(toy, window=4, init="vertical")
    session = opened(toy, drafter, [3], [16])
    first = int(session.pending[0])
    assert drafter.propose(session, toy).tokens[0].tolist() == [first] * 4


@pytest.mark.parametrize(("window", "proactive"), [(6, (1, 1)), (2, (3, 2)), (7, (3, 3)), (9, (2, 4))])
def test_the_layout_is_a_tree_and_then_a_chain(window: int, proactive: Any) -> None:
    shape = layout(window, proactive, CPU)
    K, D = proactive
    paths: list[tuple[int, ...]] = [()]
    children: dict[int, int] = {}
    for parent in shape.tree.parents[0].tolist()[1:]:
        paths.append((*paths[parent], children.setdefault(parent, 0)))
        children[parent] += 1
    assert {p for p in paths if len(p) < D} == {p for p in paths if max(p, default=0) < K and len(p) < D}
    assert sum(len(p) < D for p in paths) == (K**D - 1) // (K - 1) if K > 1 else True
    assert sorted(len(p) for p in paths if len(p) >= D) == list(range(D, window))
    assert len(paths) == JacobiDrafter(options=WindowOptions(window=window, proactive=proactive)).nodes
    main = [paths.index((0,) * d) for d in range(window)]
    for n, path in enumerate(paths):
        for d in range(len(path) + 1, window):
            down = (*path, *(0,) * (d - len(path)))
            assert shape.line[n, d] == (paths.index(down) if down in paths else main[d])
        if n:
            level, rank = len(path), path[-1]
            assert shape.entry[n] == ((level - 1) * K + rank + 1 if level < D else (D - 1) * K + level - D + 1)


def test_branches_are_drawn_without_replacement_and_say_so() -> None:
    shape = layout(3, (3, 2), CPU)
    log_q = torch.tensor([[0.5, 0.3, 0.2, 0.0], [0.6, 0.4, 0.0, 0.0]]).log().expand(5000, 2, 4)
    token = torch.zeros(5000, 2, dtype=torch.long)
    noise = ops.gumbel(torch.arange(5000), torch.zeros(5000, 1).long(), 4)
    tokens, logits = _branched(token, log_q, noise, shape)
    assert tokens.shape == (5000, 4) and logits.shape == (5000, 4, 4)
    assert (tokens[:, 0] == 0).all() and torch.equal(
        tokens[:, 1:3].sort(1).values, torch.tensor([[1, 2]]).expand(5000, 2)
    )
    assert abs((tokens[:, 1] == 1).double().mean() - 0.6) < 0.03
    assert torch.allclose(logits[:, 1].softmax(-1), torch.tensor([0.0, 0.6, 0.4, 0.0]))
    two = _branched(token, log_q.flip(1), noise, shape)[0]
    assert (two[:, 1] == 1).all() and (two[:, 2] == NO_TOKEN).all(), "a distribution of two tokens has no third branch"


# -- the same for every window, batch and neighbour ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "options"), [("seed", {}), ("seed", {"proactive": (3, 3)}), ("seed", {"init": "uniform"}), ("greedy", {})]
)
def test_seed_exact_rows_are_plain_decoding_whatever_the_window_and_the_batch(mode: str, options: Any) -> None:
    toy = Toy(vocab=8, grid=(6, 4), reach=1, mode=mode)
    seeds = [11, 22, 33, 44]
    plain, session = drawn(toy, jacobi(toy, window=1), seeds, [24] * 4)
    assert session.stats.rounds == 23 and (mode == "greedy" or len(set(map(tuple, plain))) == 4)
    for window in (8, 64):
        drafter = jacobi(toy, window=window, **options)
        together, session = drawn(toy, drafter, seeds, [24] * 4)
        assert together == plain and session.stats.accepted > 0
        for seed, row in zip(seeds, plain, strict=True):
            assert drawn(toy, drafter, [seed], [24])[0] == [row]


@pytest.mark.parametrize("mode", ["seed", "greedy"])
@pytest.mark.parametrize("options", [{}, {"init": "uniform"}, {"proactive": (3, 3)}], ids=str)
def test_seed_exact_rows_are_plain_decoding_when_drafts_are_left_out(mode: str, options: Any) -> None:
    toy = Toy(vocab=8, grid=(6, 4), reach=1, mode=mode)
    seeds, lengths = [11, 22, 33], [24, 17, 9]
    plain, _ = drawn(toy, jacobi(toy, window=1), seeds, lengths)
    together, session = drawn(toy, restless(toy, window=16, **options), seeds, lengths)
    assert together == plain and session.stats.accepted > 0
    for seed, length, row in zip(seeds, lengths, plain, strict=True):
        assert drawn(toy, restless(toy, window=16, **options), [seed], [length])[0] == [row]


def test_a_window_of_one_is_plain_decoding_and_so_is_none() -> None:
    toy = Toy(vocab=8, grid=(6, 4), reach=1)
    seeds = [11, 22, 33]
    tokens, session = drawn(toy, jacobi(toy, window=1), seeds, [24] * 3)
    assert tokens == drawn(toy, Plain(), seeds, [24] * 3)[0]
    assert session.stats.drafted == 0 and session.stats.rounds == 23
    assert torch.equal(chain(1, CPU).parents, layout(1, (1, 1), CPU).tree.parents)


def drafts_of(toy: Toy, drafter: JacobiDrafter, seeds: list[int], lengths: list[int]) -> dict[int, list[Any]]:
    """What was proposed to each row, round by round: the tokens, and their distribution."""
    session, seen = opened(toy, drafter, seeds, lengths), {}
    for round_ in decode(session, toy, drafter):
        distribution = round_.draft.q
        for b, row in enumerate(session.rows):
            seen.setdefault(row.seed, []).append(
                (round_.draft.tokens[b].tolist(), distribution and distribution.logits[b])
            )
    return seen


@pytest.mark.parametrize("mode", ["distribution", "seed"])
@pytest.mark.parametrize(
    "options", [{"coupling": c} for c in ("none", "maximal", "gumbel")] + [{"proactive": (2, 3)}], ids=str
)
def test_a_row_alone_is_drafted_as_in_a_batch(mode: str, options: Any) -> None:
    """Rows of different lengths, ragged from the first round on; the neighbours end and leave."""
    toy = Toy(vocab=7, grid=(5, 4), reach=2, mode=mode)
    drafter = jacobi(toy, window=6, **options)
    seeds, lengths = [3, 1, 4, 15], [20, 9, 14, 2]
    together = drafts_of(toy, drafter, seeds, lengths)
    for seed, length in zip(seeds, lengths, strict=True):
        alone = drafts_of(toy, drafter, [seed], [length])[seed]
        assert [tokens for tokens, _ in alone] == [tokens for tokens, _ in together[seed]]
        for (_, a), (_, b) in zip(alone, together[seed], strict=True):
            assert (a is None and b is None) or torch.allclose(a[1:].softmax(-1), b[1:].softmax(-1), atol=1e-6)


@pytest.mark.parametrize("mode", ["distribution", "seed"])
@pytest.mark.parametrize("proactive", [None, (2, 3)])
def test_rows_that_join_under_way_are_drawn_as_alone(mode: str, proactive: Any) -> None:
    toy = Toy(vocab=7, grid=(5, 4), reach=2, mode=mode)
    drafter = jacobi(toy, window=6, proactive=proactive)
    alone = [drawn(toy, drafter, [seed], [20])[0][0] for seed in (5, 6, 7)]
    for late in (0, 1):
        session, other = opened(toy, drafter, [5, 6], [20, 20]), opened(toy, drafter, [7], [20])
        rows = [*session.rows, *other.rows]
        rounds = decode(session, toy, drafter)
        next(rounds)
        for _, _ in zip(range(late), decode(other, toy, drafter), strict=False):
            pass
        session.admit(other)
        for _ in rounds:
            pass
        assert [row.tokens[1:] for row in rows] == alone


@pytest.mark.parametrize("proactive", [None, (3, 3)])
def test_nothing_is_drafted_past_the_end(proactive: Any) -> None:
    toy = Toy(vocab=5, grid=(3, 3), reach=1)
    drafter = jacobi(toy, window=16, proactive=proactive)
    session = opened(toy, drafter, [1, 2, 3], [9, 5, 1])
    for round_ in decode(session, toy, drafter):
        for b, row in enumerate(session.rows):
            index = row.generated - len(round_.new[b]) - 1 + round_.draft.tree.depth[b]
            assert ((round_.draft.tokens[b] == NO_TOKEN) | (index < row.limit - row.start)).all()
        assert (round_.draft.tokens[:, 1:] < 5).all()


def test_couplings_save_calls_and_a_tree_saves_more() -> None:
    toy = Toy(vocab=16, grid=(6, 8), reach=1, scale=0.5)
    tau = {}
    for name, options in {
        "none": {"coupling": "none"}, "maximal": {"coupling": "maximal"}, "gumbel": {"coupling": "gumbel"},
        "tree": {"coupling": "maximal", "proactive": (3, 3)},
    }.items():  # fmt: skip
        _, session = drawn(toy, jacobi(toy, window=16, **options), list(range(60)), [48] * 60)
        tau[name] = session.stats.tokens_per_target_call
    assert tau["none"] > 1.2
    assert tau["maximal"] > 1.05 * tau["none"] and tau["gumbel"] > 1.02 * tau["none"]
    assert tau["tree"] > 1.02 * tau["maximal"]


# -- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("init", ["vertical", "mixture"])
def test_the_token_above_needs_a_grid(init: str) -> None:
    toy = Toy(grid=None)
    with pytest.raises(ValueError, match="Toy has no grid; choose init='uniform' or 'horizontal'"):
        opened(toy, jacobi(toy, init=init), [1], [4])
    assert surprise(toy, jacobi(toy, window=3), 3, rows=4000) < LOSSLESS  # left to itself it looks to the left


@pytest.mark.parametrize("options", [{"window": 6}, {"window": 9, "coupling": "gumbel", "proactive": (2, 3)}], ids=str)
def test_text_is_drafted_too(options: Any) -> None:
    """A VLM without a grid: some guesses stand. Greedy text is compared in test_every.py."""
    model = tiny_vlms.model("llava")
    with mmspec.enable(model, drafter="jacobi", **options) as handle:
        for how in ({}, {"do_sample": True, "top_k": 5}):
            torch.manual_seed(1)
            tiny_vlms.generate(model, tiny_vlms.prompt("llava", "image first"), **how)
        assert handle.stats.accepted > 0
