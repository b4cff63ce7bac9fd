"""Trees with a distribution: all nodes at once against one child after the other; and nothing is read from the
device."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from table_targets import CPU
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mmspec import accept
from mmspec.accept import verify_tree
from mmspec.drafters import static_trees
from mmspec.kernels import reference as ops
from mmspec.rules import Masses, Rule, Trial, exact
from mmspec.tree import bounds, chain, children, from_parents, from_paths, grow
from mmspec.types import NO_TOKEN, Acceptance, Categorical, Draft, Tree, join, select
from tests.core.test_core import random_parents
from tests.core.test_rules import ALL, V, random_draft, rule_of


def one_by_one(
    draft: Draft, distribution: Categorical, rule: Rule, u: Tensor, spent: Tensor | None = None
) -> Acceptance:
    """The definition: every row by itself, every child of the current node by itself."""
    rows = [_row(draft, distribution, rule, u, spent, b) for b in range(len(u))]
    stands = torch.zeros(u.shape, dtype=torch.bool)
    for b, (path, *_) in enumerate(rows):
        stands[b, path] = True
    _, token, charged = zip(*rows, strict=True)
    last = torch.tensor([path[-1] for path, *_ in rows])
    return Acceptance(stands, stands.sum(1), last, torch.cat(token), torch.cat(charged))


def _row(
    draft: Draft, distribution: Categorical, rule: Rule, u: Tensor, spent: Tensor | None, b: int
) -> tuple[list[int], Tensor, Tensor]:
    drafted, parents, path = draft.tokens[b].tolist(), draft.tree.parents[b].tolist(), [0]
    p, noise = distribution.logits[b, 0].double().softmax(-1)[None], u[b, :1]
    charged = torch.zeros(1, dtype=torch.float64)
    for node in range(1, len(parents)):
        if parents[node] != path[-1] or drafted[node] == NO_TOKEN:
            continue
        q = torch.nn.functional.one_hot(draft.tokens[b, node], p.shape[-1]).double()[None]
        if draft.q is not None:
            q = draft.q.logits[b, node].double().softmax(-1)[None]
        trial = Trial(draft.tokens[b, node, None], draft.tree.depth[b, node, None], Masses.of(p), Masses.of(q))
        strict = f = rule.ratio(trial.p_x, trial.q_x)
        if rule.relaxed is not None:
            f = torch.where(trial.p_x > 0, rule.relaxed(trial), 0.0)
            if rule.budget is not None:
                left = (rule.budget - charged - (0.0 if spent is None else spent[b])).clamp(min=0)
                f = torch.minimum(torch.maximum(f, strict - left), strict + left)
            charged = charged + ((f - strict).abs() if rule.charge is None else rule.charge(trial))
        if noise < f:
            path.append(node)
            p, noise = distribution.logits[b, node].double().softmax(-1)[None], u[b, node, None]
        else:
            rest = rule.residual(trial)
            p, noise = rest / rest.sum(-1, keepdim=True), ops.remaining(noise, f)
    return path, ops.categorical(p, noise), charged


def trees(seed: int, batch: int, g: torch.Generator) -> Tree:
    """Shapes that differ by row, with and without a bound; published ones; one that was grown; a chain; a lone root."""
    kind, size = seed % 6, 2 + seed % 9
    if kind == 0:
        return from_parents(random_parents(batch, size, g), size)
    if kind == 1:
        tree = from_parents(random_parents(batch, size, g), size)
        return replace(tree, families=bounds(size))
    if kind == 2:
        name = list(static_trees.SHAPES)[seed % len(static_trees.SHAPES)]
        return static_trees.plan(name, 4, CPU).tree.expand(batch)
    if kind == 3:
        first = torch.randn(batch, V, generator=g).log_softmax(-1)
        return grow(first, lambda tokens, _: torch.randn(*tokens.shape, V, generator=g).log_softmax(-1), 3, 4, 12)[1]
    if kind == 4:
        return replace(chain(size, CPU).expand(batch), is_chain=False)
    return from_parents(torch.zeros(batch, 1, dtype=torch.long), 1)


def on_a_tree(seed: int, drawn: bool) -> tuple[Draft, Categorical, Tensor, Tensor]:
    return random_draft(seed, drawn, trees(seed, 12, torch.Generator().manual_seed(seed)))


@pytest.mark.parametrize("budget", [None, 0.0, 0.15, 0.6])
@pytest.mark.parametrize("spec", ALL)
@pytest.mark.every(12)
def test_a_tree_is_walked_as_one_child_after_the_other(spec: str, budget: float | None) -> None:
    """Every part of the acceptance, number for number; what was charged, to rounding once a budget has cut it short."""
    if (spec == "exact" or "grouped" in spec or "published" in spec) and budget is not None:
        pytest.skip("takes no budget")
    rule, deepest = rule_of(spec, budget), 0
    for seed, drawn in itertools.product(range(18), (True, False)):
        draft, distribution, u, spent = on_a_tree(seed, drawn)
        spent = None if budget is None else spent
        mine, wanted = verify_tree(draft, distribution, rule, u, spent), one_by_one(draft, distribution, rule, u, spent)
        for name in ("accepted", "count", "last", "next_token"):
            assert torch.equal(getattr(mine, name), getattr(wanted, name)), (name, seed)
        assert (mine.tv_cost is None) == rule.lossless
        if mine.tv_cost is not None:
            assert (torch.allclose if budget else torch.equal)(mine.tv_cost, wanted.tv_cost)
        deepest = max(deepest, int(mine.count.max()))
    assert deepest > 3


def test_a_residual_that_is_charged_for_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Tensor] = []
    stock = ops.emptied_residual
    monkeypatch.setattr(ops, "emptied_residual", lambda *given: made.append(stock(*given)) or made[-1])
    draft, distribution, u, _ = on_a_tree(1, drawn=True)
    verify_tree(draft, distribution, rule_of("lantern(k=3, lam=4.0, residual='published')"), u)
    assert draft.tree.families is not None and len(made) == len(draft.tree.families) > 1


def test_rows_that_do_not_fit_at_once_are_walked_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    for spec, seed in itertools.product(("exact", "scaled(omega=1.7)"), range(6)):
        draft, distribution, u, spent = on_a_tree(seed, drawn=True)
        whole = verify_tree(draft, distribution, rule_of(spec), u, spent)
        monkeypatch.setattr(accept, "ROOM", 5 * 8 * V * max(1, *(draft.tree.families or (draft.tree.size,)), 0))
        parts = verify_tree(draft, distribution, rule_of(spec), u, spent)
        monkeypatch.undo()
        for name in ("accepted", "count", "last", "next_token", "tv_cost"):
            a, b = getattr(whole, name), getattr(parts, name)
            assert a is b is None or torch.equal(a, b), name


def test_families_count_the_children_that_there_are() -> None:
    """Exact for a static tree, and a bound for those that grow; the table of children agrees with the parents."""
    tree, _ = from_paths([(0, 0, 0), (0, 1), (1, 0), (2,), (0, 2), (1, 1)], CPU)
    assert tree.families == (4, 3, 2)  # the root and (0,) have three, (1,) two, (0, 0) one
    assert chain(5, CPU).families == (4,) and chain(1, CPU).families == ()
    g = torch.Generator().manual_seed(0)
    for seed in range(24):
        tree = trees(seed, 5, g)
        nodes, table = children(tree)
        families = bounds(tree.size) if tree.families is None else tree.families
        for b, parents in enumerate(tree.parents.tolist()):
            below = {n: [c for c, parent in enumerate(parents) if c and parent == n] for n in range(len(parents))}
            for r, most in enumerate(families):
                assert sum(len(many) > r for many in below.values()) <= most
            assert all(len(many) <= len(families) for many in below.values())
            listed = {n: [c for c in row if c] for n, row in zip(nodes[b].tolist(), table[b].tolist(), strict=True)}
            assert {n: many for n, many in below.items() if many} == {n: many for n, many in listed.items() if many}
            lengths = [len(listed[n]) for n in nodes[b].tolist()]
            assert lengths == sorted(lengths, reverse=True)


def test_rows_of_two_shapes_claim_no_families() -> None:
    one, two = from_parents(torch.zeros(2, 4, dtype=torch.long), 1), chain(4, CPU).expand(3)
    both = join(replace(one, families=(1, 1, 1)), two, {})
    assert both.families is None and not both.is_chain
    assert join(two, two, {}).families == (3,) and select(two, torch.tensor([1])).families == (3,)


def on_meta(value: Any) -> Any:
    """The same shapes on a device that has no numbers: whoever reads one there is refused."""
    if isinstance(value, Tensor):
        return value.to("meta")
    if hasattr(value, "__dataclass_fields__"):
        return type(value)(**{name: on_meta(getattr(value, name)) for name in value.__dataclass_fields__})
    return value


@pytest.mark.parametrize("budget", [None, 0.15])
@pytest.mark.parametrize("spec", ALL)
@pytest.mark.every(6)
def test_no_walk_reads_the_device(spec: str, budget: float | None) -> None:
    if spec == "exact" or "grouped" in spec or "published" in spec:
        budget = None
    for seed, drawn in itertools.product(range(6), (True, False)):
        draft, distribution, u, spent = map(on_meta, on_a_tree(seed, drawn))
        acceptance = verify_tree(draft, distribution, rule_of(spec, budget), u, spent)
        assert acceptance.next_token.device.type == "meta"


class Calls(TorchDispatchMode):
    """Counts operations that are no views; on a GPU each is a launch or a few."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def calls(tree: Tree) -> int:
    B, N = tree.parents.shape
    draft = Draft(torch.zeros(B, N, dtype=torch.long), tree, Categorical(torch.zeros(B, N, V)))
    with Calls() as counted:
        verify_tree(draft, Categorical(torch.zeros(B, N, V)), exact, torch.rand(B, N, dtype=torch.float64))
    return counted.count


def test_work_grows_with_the_most_children_and_not_with_the_nodes() -> None:
    """Four children at most: 25 nodes take four steps, and as many calls as a tree of five nodes does."""
    published = static_trees.plan("mc_sim_7b_63", 5, CPU).tree
    small, _ = from_paths([(0,), (1,), (2,), (3,)], CPU)
    assert published.size == 26 and small.size == 5
    assert calls(published) == calls(small) < 300
