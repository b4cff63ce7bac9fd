"""Noise, draws, trees, and the proof by enumeration that the distribution of what is accepted is the target's own."""

from __future__ import annotations

import itertools
import math
from zlib import crc32

import pytest
import torch
from torch import Tensor

from mmspec.accept import along_path, verify_point_mass, verify_tree
from mmspec.kernels import reference as ops
from mmspec.rules import Masses, Rule, Trial, exact, ordinary
from mmspec.tree import chain, from_parents, from_paths, grow
from mmspec.types import NO_TOKEN, Categorical, Draft, Tree

CPU = torch.device("cpu")
ALMOST_ONE = 1 - 2.0**-53


# -- noise and draws -------------------------------------------------------------------------------------------------


def test_uniform_is_uniform_within_a_row_across_rows_and_between_neighbours() -> None:
    seeds, counters = torch.arange(400)[:, None], torch.arange(500)
    u = ops.uniform(seeds, counters)
    assert u.dtype == torch.float64 and u.min() >= 0 and u.max() < 1
    for sample in (u.flatten(), u[0], u[:, 0], torch.frac(u[1:] - u[:-1] + 1).flatten()):
        counts = torch.histc(sample, 20, 0, 1)
        expected = sample.numel() / 20
        assert ((counts - expected) ** 2 / expected).sum() < 50  # χ² with 19 degrees of freedom: p < 2e-4
    for pair in (u[:, :-1] * u[:, 1:], u[:-1] * u[1:]):
        assert abs(pair.mean() - 0.25) < 5 * 0.22 / math.sqrt(pair.numel())


def test_uniform_is_splitmix64_of_seed_and_counter_alone() -> None:
    """Against the published generator in Python's own integers."""

    def splitmix(state: int) -> int:
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB % 2**64
        return state ^ (state >> 31)

    seeds, counters = [0, 1, 3, 12345, 2**61 + 7, 2**62], [0, 1, 2, 99]
    found = ops.uniform(torch.tensor(seeds)[:, None], torch.tensor(counters)).flatten().tolist()
    for (seed, counter), u in zip(itertools.product(seeds, counters), found, strict=True):
        assert u == (splitmix((seed + (counter + 1) * 0x9E3779B97F4A7C15) % 2**64) >> 11) * 2.0**-53


def test_categorical_is_the_inverse_of_the_cumulated_weights() -> None:
    weights = torch.tensor([0.0, 2.0, 0.0, 1.0, 1.0, 0.0])
    u = (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000
    counts = torch.bincount(ops.categorical(weights.expand(4000, -1), u), minlength=6)
    assert counts.tolist() == [0, 2000, 0, 1000, 1000, 0]


def test_categorical_never_draws_weight_zero() -> None:
    torch.manual_seed(0)
    for _ in range(300):
        weights = torch.rand(1, 9, dtype=torch.float64) * 10.0 ** torch.randint(-30, 3, (1, 9))
        weights *= torch.rand(1, 9) < 0.4
        weights[0, torch.randint(9, ())] = 1e-3
        for u in (0.0, 1e-300, 0.5, ALMOST_ONE):
            drawn = ops.categorical(weights, torch.tensor([u], dtype=torch.float64))
            assert weights[0, drawn] > 0


def test_exact_ratio_and_residual_at_their_edges() -> None:
    p, q = torch.tensor([0.0, 0.0, 0.5, 0.5, 0.2]), torch.tensor([0.0, 0.5, 0.0, 0.25, 0.4])
    assert torch.equal(ops.exact_ratio(p, q), torch.tensor([0.0, 0.0, 1.0, 1.0, 0.5]))
    p, q = torch.tensor([[0.2, 0.8], [0.5, 0.5]]), torch.full((2, 2), 0.5)
    assert torch.allclose(ops.positive_residual(p, q), torch.tensor([[0, 0.3], [0.5, 0.5]]))


def test_compact_rows_keeps_what_is_named_in_order_and_touches_nothing_before() -> None:
    buffer = torch.arange(2 * 3 * 10 * 2, dtype=torch.float32).view(2, 3, 10, 2)
    before = buffer.clone()
    source, start = torch.tensor([[4, 6, 7], [2, 3, 9]]), torch.tensor([4, 2])
    ops.compact_rows([buffer], source, start)
    for b in range(2):
        at = int(start[b])
        assert torch.equal(buffer[b, :, :at], before[b, :, :at])
        assert torch.equal(buffer[b, :, at : at + 3], before[b, :, source[b]])


# -- trees -----------------------------------------------------------------------------------------------------------


def well_formed(tree: Tree) -> None:
    """Parents stand before children, depth and ancestors agree with a walk up, node by node."""
    for b, parents in enumerate(tree.parents.tolist()):
        assert parents[0] == 0 and all(p < n for n, p in enumerate(parents) if n)
        for n in range(tree.size):
            line, at = {n}, n
            while at:
                at = parents[at]
                line.add(at)
            assert tree.depth[b, n] == len(line) - 1
            assert set(tree.ancestors[b, n].nonzero()[:, 0].tolist()) == line


def random_parents(batch: int, size: int, g: torch.Generator | None = None) -> Tensor:
    limit = torch.arange(size).clamp(min=1)
    return (torch.rand(batch, size, generator=g) * limit).long()


def test_from_parents_against_a_walk_up_every_line() -> None:
    for size in (1, 2, 3, 7, 16, 33):
        well_formed(from_parents(random_parents(5, size), max(size - 1, 1)))
    for depth in range(20):  # the bound is tight on a chain, where pointer doubling has most to do
        line = chain(depth + 1, CPU)
        assert line.is_chain and line.depth.tolist() == [list(range(depth + 1))]
        well_formed(line)
        well_formed(from_parents(line.parents, max(depth, 1)))


def test_from_paths_orders_by_depth_and_completes_prefixes() -> None:
    tree, ranks = from_paths([(1,), (0, 2, 0), (0,), (0, 0)], CPU)
    well_formed(tree)
    assert tree.parents.tolist() == [[0, 0, 0, 1, 1, 4]]
    assert ranks.tolist() == [[0, 0, 1, 0, 2, 0]]
    for bad in ([], [()], [(0, -1)]):
        with pytest.raises(ValueError, match="ranks ≥ 0"):
            from_paths(bad, CPU)


def law_after(path: tuple[int, ...], vocab: int, kind: str) -> Tensor:
    """Log-probabilities [V] after a path of tokens: a fixed random function of the path."""
    g = torch.Generator().manual_seed(crc32(repr((path, kind)).encode()))
    logits = torch.randn(vocab, generator=g)
    if kind == "ties":
        return torch.full((vocab,), -math.log(vocab))
    log_p = (2 * logits).log_softmax(-1)
    if kind == "-inf":
        log_p[torch.rand(vocab, generator=g) < 0.7] = -math.inf
    if kind == "NaN":
        log_p[torch.rand(vocab, generator=g) < 0.3] = math.nan
    return log_p


def grown(kind: str, width: int, depth: int, size: int, vocab: int = 12) -> tuple[Tensor, Tree]:
    """`grow` on two rows, with a drafter that remembers the frontier's paths as a real one does."""
    frontier: list[list[tuple[int, ...]]] = [[(b,)] * width for b in range(2)]

    def expand(tokens: Tensor, came_from: Tensor) -> Tensor:
        for b in range(2):
            frontier[b] = [(*frontier[b][int(c)], int(t)) for t, c in zip(tokens[b], came_from[b], strict=True)]
        return torch.stack([torch.stack([law_after(path, vocab, kind) for path in row]) for row in frontier])

    return grow(torch.stack([law_after((b,), vocab, kind) for b in range(2)]), expand, width, depth, size)


def naive_eagle2(b: int, kind: str, width: int, depth: int, size: int, vocab: int = 12) -> set[tuple[int, ...]]:
    """EAGLE-2 by the paper: the best `width` paths of each level are expanded, then the best of all are kept."""
    pool: dict[tuple[int, ...], float] = {}
    frontier = {(b,): 0.0}
    for _ in range(depth):
        level = {}
        for path, score in frontier.items():
            log_p = law_after(path, vocab, kind)
            for token in log_p.topk(width).indices.tolist():
                level[*path, token] = score + float(log_p[token])
        pool |= level
        frontier = dict(sorted(level.items(), key=lambda item: -item[1])[:width])
    return {path[1:] for path, _ in sorted(pool.items(), key=lambda item: -item[1])[: size - 1]}


def paths_of(tokens: Tensor, tree: Tree, b: int) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = [()]
    for n in range(1, tree.size):
        paths.append((*paths[int(tree.parents[b, n])], int(tokens[b, n - 1])))
    return paths[1:]


@pytest.mark.parametrize(
    ("width", "depth", "size"), [(1, 4, 5), (2, 3, 6), (3, 4, 12), (4, 5, 30), (5, 2, 31), (3, 1, 4)]
)
def test_grow_is_eagle2(width: int, depth: int, size: int) -> None:
    tokens, tree = grown("plain", width, depth, size)
    well_formed(tree)
    for b in range(2):
        assert set(paths_of(tokens, tree, b)) == naive_eagle2(b, "plain", width, depth, size)
    few, smaller = grown("plain", width, depth, 1 + size // 2)
    for b in range(2):
        assert paths_of(few, smaller, b) == paths_of(tokens, tree, b)[: size // 2], "a smaller tree is its first nodes"


@pytest.mark.parametrize("kind", ["ties", "-inf", "NaN"])
@pytest.mark.parametrize(("width", "depth", "size"), [(2, 3, 6), (3, 4, 12), (4, 5, 30), (3, 4, 31)])
def test_grow_is_well_formed_whatever_the_drafter_says(kind: str, width: int, depth: int, size: int) -> None:
    tokens, tree = grown(kind, width, depth, size)
    well_formed(tree)
    assert tree.size == size and tokens.min() >= 0 and tokens.max() < 12
    for b in range(2):
        paths = paths_of(tokens, tree, b)
        assert len(set(paths)) == len(paths), "no path is proposed twice"
        assert int(tree.depth[b].max()) <= depth


def test_grow_says_when_the_tree_cannot_be_so_large() -> None:
    with pytest.raises(ValueError, match="which give at most"):
        grown("plain", 2, 2, 8)


# -- acceptance ------------------------------------------------------------------------------------------------------


def random_draft(batch: int, size: int, vocab: int, holes: bool) -> Draft:
    """Random trees; with few tokens siblings repeat each other often."""
    tokens = torch.randint(0, vocab, (batch, size))
    if holes:
        tokens[:, 1:][torch.rand(batch, size - 1) < 0.2] = NO_TOKEN
    return Draft(tokens, from_parents(random_parents(batch, size), max(size - 1, 1)))


@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("greedy", [False, True])
def test_descend_is_walk_on_the_same_noise(greedy: bool, holes: bool) -> None:
    """The fast path against the definition: 4000 random trees a case, every part of the acceptance.

    Stock decoding never looks at what comes after a token that it does not draw, so NaN there changes nothing.
    """
    for trial in range(40):
        torch.manual_seed(trial)
        vocab, size = 2 + trial % 6, 2 + trial % 11
        draft = random_draft(100, size, vocab, holes)
        logits = 3 * torch.randn(100, size, vocab)
        if trial % 3 == 0:  # what top-k leaves: tokens that cannot be drawn
            logits = logits.masked_fill(logits < logits.topk(2).values[..., -1:], -math.inf)
        distribution = Categorical(ids=logits.argmax(-1)) if greedy else Categorical(logits.double())
        u = torch.rand(100, size, dtype=torch.float64)
        fast = verify_point_mass(draft, distribution, u)
        others = [verify_tree(draft, distribution, exact, u)]
        if not greedy:
            broken = Categorical(logits.double().where(fast.accepted[..., None], math.nan))
            others += [verify_point_mass(draft, broken, u), verify_tree(draft, broken, exact, u)]
        for other, name in itertools.product(others, ("accepted", "count", "last", "next_token")):
            assert torch.equal(getattr(fast, name), getattr(other, name)), name
        assert (fast.next_token >= 0).all() and (fast.next_token < vocab).all()


def test_children_that_cover_the_law_leave_nothing_impossible_to_draw() -> None:
    """All that top-k allows is drafted, and the noise is as close to one as it gets."""
    for seed in range(200):
        torch.manual_seed(seed)
        logits = torch.full((1, 4, 6), -math.inf)
        logits[:, :, 1:4] = torch.randn(3)
        draft = Draft(torch.tensor([[0, 1, 2, 3]]), from_parents(torch.zeros(1, 4, dtype=torch.long), 1))
        p, u = Categorical(logits), torch.full((1, 4), ALMOST_ONE, dtype=torch.float64)
        for acceptance in (verify_point_mass(draft, p, u), verify_tree(draft, p, exact, u)):
            assert 1 <= int(acceptance.next_token) <= 3


# -- the distribution of the output ----------------------------------------------------------------------------------

GRID = 20000


def output_of(
    p: Tensor, q: Tensor | None, tokens: tuple[int, ...], rule: Rule, grid: int = GRID
) -> tuple[Tensor, Tensor]:
    """The distribution of the token after the root, [V], and the mean charge, for fixed drafted siblings: u runs over a
    fine grid. q, [V] or a line for each node, is what they were drawn from; None: they are certain."""
    n = len(tokens)
    tree = chain(2, CPU) if n == 1 else from_parents(torch.zeros(1, n + 1, dtype=torch.long), 1)
    drawn = None if q is None else Categorical(q.log().expand(grid, n + 1, -1))
    draft = Draft(torch.tensor([[0, *tokens]]).expand(grid, -1), tree.expand(grid), drawn)
    u = ((torch.arange(grid, dtype=torch.float64) + 0.5) / grid)[:, None].expand(-1, n + 1)
    acceptance = along_path(draft, Categorical(p.log().expand(grid, n + 1, -1)), rule, u)
    kept = draft.tokens.gather(1, acceptance.last[:, None])[:, 0]
    first = torch.where(acceptance.count > 1, kept, acceptance.next_token)
    charge = torch.zeros(()) if acceptance.tv_cost is None else acceptance.tv_cost.mean()
    return torch.bincount(first, minlength=len(p)) / grid, charge


def distance_of_one_position(p: Tensor, q: Tensor, rule: Rule, siblings: int) -> float:
    """Total variation between p and the distribution of the output, with `siblings` tokens drawn one by one from q."""
    distribution = torch.zeros_like(p)
    for tokens in itertools.product(range(len(p)), repeat=siblings):
        distribution += q[list(tokens)].prod() * output_of(p, q, tokens, rule)[0]
    return tv(distribution, p)


BIASED = {
    "residual is p": Rule("residual p", ops.exact_ratio, lambda trial: trial.p.all),
    "ratio too large": Rule("ratio", lambda p, q: (1.2 * p / q).clamp(max=1), ordinary),
    "ratio forgets q": Rule("ratio p", lambda p, q: p, ordinary),
    "keeps everything": Rule("always", lambda p, q: (p >= 0).to(p.dtype), ordinary),
}


def distributions(seed: int, vocab: int) -> tuple[Tensor, Tensor]:
    """p and q; every third p has tokens that it excludes, as top-k leaves it."""
    g = torch.Generator().manual_seed(seed)
    p, q = (1.5 * torch.randn(2, vocab, generator=g, dtype=torch.float64)).unbind()
    if seed % 3 == 0:
        p = p.masked_fill(p < p.topk(vocab // 2).values[-1], -math.inf)
    return p.softmax(-1), q.softmax(-1)


def tv(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().sum() / 2)


@pytest.mark.parametrize("siblings", [1, 2, 3])
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.every(4)
def test_one_verified_position_has_the_law_p(seed: int, siblings: int) -> None:
    """Σ over every draft of q(draft) · distribution(output | draft) is p; the grid's own error is left, 1/GRID a
    token."""
    p, q = distributions(seed, 4)
    assert distance_of_one_position(p, q, exact, siblings) < 4 / GRID


@pytest.mark.parametrize("rule", [exact, *BIASED.values()], ids=["exact", *BIASED])
def test_the_closed_form_says_the_same(rule: Rule) -> None:
    """Σ_x q(x)[f(x)·1_x + (1−f(x))·residual_x], the identity that every rule rests on; a planted error is seen."""
    p, q = distributions(1, 5)
    f = rule.ratio(p, q)
    rest = rule.residual(Trial(torch.zeros(()), torch.ones(()), Masses.of(p), Masses.of(q)))
    distance = tv(q * f + (q * (1 - f)).sum() * rest / rest.sum(), p)
    assert (distance < 1e-12) if rule is exact else (distance > 100 / GRID)
    assert abs(distance - distance_of_one_position(p, q, rule, 1)) < 5 / GRID


def hostile_tree(pending: Tensor, filled: Tensor) -> Draft:
    """Twins, holes, grandchildren below the less likely child; the shape changes with the row's place in the text."""
    a = (pending + filled - 1) % 3
    tokens = torch.stack([pending, a, a, (a + 1) % 3, (a + 2) % 3, torch.full_like(a, NO_TOKEN), a, (a + 1) % 3], 1)
    one, two = torch.tensor([0, 0, 0, 0, 1, 1, 3, 6]), torch.tensor([0, 0, 1, 0, 3, 3, 3, 4])
    return Draft(tokens, from_parents(torch.where((filled % 2 == 0)[:, None], one, two), 4))


def boundaries(p: Tensor) -> list[float]:
    """Every place in [0, 1) where some decision of `verify_point_mass` on the fixed tree below changes."""
    edges = {0.0, 1.0}
    for row in p:
        for order in itertools.permutations(range(3)):
            edges |= set(row[list(order)].cumsum(0).tolist())
    return sorted(edges)


def test_joint_law_by_exact_enumeration_of_the_noise() -> None:
    """One round on a hostile tree, u cut where decisions change: two tokens' joint distribution comes out to 1e-12.

    The distribution of a token depends on the token before it.
    """
    logits = 1.5 * torch.randn(3, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    p = logits.softmax(-1)
    edges = boundaries(p)
    cells = [(b - a, (a + b) / 2) for a, b in itertools.pairwise(edges) if b - a > 1e-14]
    pairs = list(itertools.product(cells, cells))
    width = torch.tensor([a[0] * b[0] for a, b in pairs], dtype=torch.float64)
    first, second = (torch.tensor([pair[i][1] for pair in pairs], dtype=torch.float64) for i in range(2))
    zero = torch.zeros(len(pairs), dtype=torch.long)
    draft = hostile_tree(zero, zero)
    u = torch.where(draft.tree.depth == 0, first[:, None], second[:, None])
    acceptance = verify_point_mass(draft, Categorical(logits[draft.tokens.clamp(min=0)]), u)
    path = (~acceptance.accepted).to(torch.uint8).argsort(dim=1, stable=True)
    kept = draft.tokens.gather(1, path).clamp(min=0)
    x, deeper = (torch.where(acceptance.count == n, acceptance.next_token, kept[:, n]) for n in (1, 2))
    joint = torch.zeros(3, 3, dtype=torch.float64)
    done = acceptance.count > 1
    joint.index_put_((x[done], deeper[done]), width[done], accumulate=True)
    joint += torch.zeros(3, dtype=torch.float64).index_add_(0, x[~done], width[~done])[:, None] * p  # the next round's
    assert (joint - p[0][:, None] * p).abs().max() < 1e-12
