"""Noise that is kept from round to round is that of its definition, whatever was asked for before, and so is noise in
captured functions: a compiler never sees the products that wrap around."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from mmspec.kernels import reference as ops
from mmspec.pipelines.target.noise import SMALL, CounterNoise
from mmspec.session import Group, Row
from mmspec.tree import chain, from_paths
from mmspec.types import Draft, Tree

V = 37


def group(seeds: list[int], emitted: list[int]) -> Group:
    rows = [Row([0], 1, 999, seed) for seed in seeds]
    return Group(rows, torch.tensor(emitted), torch.tensor(seeds))


def asked(noise: CounterNoise, rows: Group, tree: Tree, vocab: int = V) -> None:
    """What is kept, and the draw by it, are those of the definition."""
    position = rows.emitted[:, None] + tree.depth
    assert torch.equal(noise.at(rows, position, vocab), ops.gumbel(rows.seeds, position, vocab))
    logits = torch.randn(len(rows.rows), tree.size, vocab, generator=torch.Generator().manual_seed(tree.size))
    drawn = noise.draw(logits, rows, Draft(torch.zeros(len(rows.rows), tree.size, dtype=torch.long), tree))
    assert torch.equal(drawn, ops.draw(logits, (rows.seeds, position)))


def test_rows_that_go_on_each_by_their_own_length() -> None:
    noise, steps = CounterNoise(), torch.Generator().manual_seed(0)
    emitted, tree = [1, 1, 1], chain(6, torch.device("cpu"))
    for _ in range(40):
        asked(noise, group([5, 2**62, 0], emitted), tree)
        emitted = [n + int(torch.randint(1, 7, (), generator=steps)) for n in emitted]


def test_trees_rows_that_leave_and_come_and_steps_back() -> None:
    noise, cpu = CounterNoise(), torch.device("cpu")
    tree = from_paths([(0,), (1,), (0, 0), (1, 0), (0, 0, 0)], cpu)[0]
    asked(noise, group([1, 2, 3], [7, 9, 100]), tree)
    asked(noise, group([3, 2], [104, 10]), tree)
    asked(noise, group([2, 1], [10, 3]), chain(4, cpu))
    asked(noise, group([2, 2], [SMALL // V * 3, 0]), chain(1, cpu))
    asked(noise, group([2], [5]), chain(3, cpu), V + 1)


def test_rows_that_are_gone_leave_nothing_behind() -> None:
    noise, tree = CounterNoise(), chain(4, torch.device("cpu"))
    for step in range(0, 4000, 4):
        seeds = [1, 2] if step < 2000 else [2]
        asked(noise, group(seeds, [step + seed for seed in seeds]), tree)
    assert list(noise._lines) == [2]
    assert len(noise._lines[2][1]) <= SMALL // V + 8


def test_the_noise_of_a_large_vocabulary_is_not_kept() -> None:
    noise = CounterNoise()
    asked(noise, group([4, 6], [3, 8]), chain(3, torch.device("cpu")), SMALL + 1)
    assert not noise._lines


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_nothing_is_drawn_from_what_is_no_distribution(wrong: float) -> None:
    logits = torch.zeros(1, 3, V)
    logits[0, 1, 4] = wrong
    logits[0, 2] = -torch.inf
    draft = Draft(torch.zeros(1, 3, dtype=torch.long), chain(3, torch.device("cpu")))
    drawn = CounterNoise().draw(logits, group([3], [2]), draft)[0].tolist()
    assert drawn[0] >= 0 and drawn[1:] == [ops.NOTHING] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_the_likeliest_is_the_first_of_equal_ones(dtype: torch.dtype) -> None:
    logits = torch.randint(0, 3, (2, 5, 301), generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[1, 0] = -torch.inf
    logits[1, 1, 7] = torch.nan
    assert torch.equal(ops.likeliest(logits), logits.argmax(-1))


# -- in captured functions -------------------------------------------------------------------------------------------

COMPILED = """
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from mmspec.kernels import reference as ops
from mmspec.compile.capture import inductor

def draw(seed, position, logits):
    return [ops.draw(logits, (seed, position + torch.arange(2)))]

given = [torch.tensor([5]), torch.tensor([[7]]), torch.randn(1, 2, 64)]
assert torch.equal(inductor(make_fx(draw)(*given), given)(*given)[0], draw(*given)[0])
"""


def noise(seed: Tensor, position: Tensor) -> list[Tensor]:
    return [ops.gumbel(seed, position, 64), ops.uniform(ops.stream(seed, ops.FRESH)[:, None], position)]


def test_products_that_wrap_are_not_traced() -> None:
    given = torch.tensor([5, -3]), torch.arange(6).view(2, 3)
    traced = make_fx(noise)(*given)
    products = [node for node in traced.graph.nodes if "aten.mul" in str(node.target) and not _real(node)]
    assert not products and traced.graph.find_nodes(op="call_function", target=torch.ops.mmspec.splitmix.default)
    torch.testing.assert_close(traced(*given), noise(*given), rtol=0, atol=0)


def _real(node: torch.fx.Node) -> bool:
    return bool(node.meta["val"].is_floating_point())


@pytest.mark.full
def test_a_compiler_draws_from_many_tokens() -> None:
    """g++ once took the loop over them to be endless."""
    subprocess.run([sys.executable, "-c", COMPILED], check=True, timeout=120)
