"""Noise in captured functions: a compiler never sees the products that wrap around."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from mmspec.kernels import reference as ops

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
