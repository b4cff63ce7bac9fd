"""Layers with a recurrent state: a tree read in one go is every path read step by step, and a commit is its end."""

from __future__ import annotations

import pytest
import targets
import torch
from torch import Tensor
from torch.nn import functional as F

import mmspec
from mmspec.kernels import reference_recurrent as ops
from mmspec.pipelines.targets import recurrent
from mmspec.tree import from_parents

B, H, K, V = 3, 2, 8, 6
PARENTS = torch.tensor([[0, 0, 0, 1, 1, 2, 3, 3, 5], [0, 0, 1, 2, 3, 4, 5, 6, 7], [0, 0, 0, 0, 1, 1, 2, 2, 2]])
TREE = from_parents(PARENTS, 9)
KEPT, COUNT = torch.tensor([[0, 1, 4], [0, 1, 2], [0, 2, 7]]), torch.tensor([3, 2, 3])  # of row 1 the last is not kept


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def stepwise(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, state: Tensor) -> tuple[Tensor, Tensor]:
    """What each node reads, and the state after each, by the recurrence from its parent's state."""
    states, out = torch.zeros(B, PARENTS.shape[1], H, K, V, dtype=q.dtype), torch.zeros_like(v)
    for b in range(B):
        for i, parent in enumerate(PARENTS[b].tolist()):
            before = state[b] if i == 0 else states[b, parent]
            before = before * g[b, :, i].exp().reshape(H, -1, 1)
            told = v[b, :, i]
            if beta is not None:
                told = (told - (before * k[b, :, i, :, None]).sum(1)) * beta[b, :, i, None]
            states[b, i] = before + k[b, :, i, :, None] * told[:, None]
            out[b, :, i] = (states[b, i] * q[b, :, i, :, None]).sum(1)
    return out, states


@pytest.mark.parametrize("channels", [False, True], ids=["one decay", "a decay for each channel"])
@pytest.mark.parametrize("delta", [False, True], ids=["ssd", "delta rule"])
def test_a_tree_is_read_as_every_path(channels: bool, delta: bool) -> None:
    n = PARENTS.shape[1]
    q, k = (F.normalize(drawn(B, H, n, K) + bias, dim=-1) for bias in (0, 0.3))
    v, state = drawn(B, H, n, V), drawn(B, H, K, V)
    g = -drawn(*((B, H, n, K) if channels else (B, H, n))).abs()
    beta = drawn(B, H, n + 1)[..., 1:].sigmoid() if delta else None
    out, states = stepwise(q, k, v, g, beta, state)
    G = ops.path_decay(g, TREE.ancestors)
    u = v if beta is None else ops.delta_writes(k, v, beta, G, state, TREE.ancestors)
    assert torch.allclose(ops.recurrent_read(q, k, u, G, state, TREE.ancestors), out, rtol=0, atol=1e-12)
    last = KEPT.gather(1, COUNT[:, None] - 1)[:, 0]
    folded = ops.recurrent_fold(k, u, G, state, KEPT, COUNT)
    assert torch.allclose(folded, states[torch.arange(B), last], rtol=0, atol=1e-12)


def test_a_long_path_of_strong_decay_does_not_overflow() -> None:
    n = PARENTS.shape[1]
    k, v, state = F.normalize(drawn(B, H, n, K), dim=-1).float(), drawn(B, H, n, V).float(), drawn(B, H, K, V).float()
    G = ops.path_decay(torch.full((B, H, n), -300.0), TREE.ancestors)
    u = ops.delta_writes(k, v, torch.full((B, H, n), 0.5), G, state, TREE.ancestors)
    assert ops.recurrent_read(k, k, u, G, state, TREE.ancestors).isfinite().all()
    assert ops.recurrent_fold(k, u, G, state, KEPT, COUNT).isfinite().all()


@pytest.mark.parametrize(("width", "kernel"), [(3, 3), (4, 4), (4, 3)])
def test_a_convolution_reads_its_own_ancestors(width: int, kernel: int) -> None:
    n, C = PARENTS.shape[1], 5
    x, state, weight, bias = drawn(B, C, n), drawn(B, C, width), drawn(C, kernel), drawn(C)
    windows = ops.conv_windows(TREE.parents, TREE.depth, width)
    out = ops.tree_conv(x, state, weight, bias, windows)
    for b in range(B):
        for i in range(n):
            line = TREE.ancestors[b, i].nonzero()[:, 0]
            whole = torch.cat([state[b], x[b][:, line]], 1)
            assert torch.allclose(out[b, :, i], (whole[:, -kernel:] * weight).sum(1) + bias, rtol=0, atol=1e-12)
    after = ops.conv_fold(x, state, KEPT, COUNT)
    for b in range(B):
        line = KEPT[b, : COUNT[b]]
        assert torch.equal(after[b], torch.cat([state[b], x[b][:, line]], 1)[:, -width:])


@pytest.mark.parametrize("name", ["qwen3_5", "lfm2_vl"])
def test_disable_puts_every_layer_back(name: str) -> None:
    model = targets.model(name)
    before = {id(module): type(module) for module in model.modules()}
    with mmspec.enable(model):
        swapped = [module for module in model.modules() if type(module) is not before[id(module)]]
        assert any(module in swapped for module in recurrent.modules(model.get_decoder()))
    assert all(type(module) is before[id(module)] for module in model.modules())


def test_outside_of_a_draft_a_layer_is_stock() -> None:
    model, inputs = targets.model("qwen3_5"), targets.prompt("qwen3_5", "ragged")
    with torch.no_grad():
        stock = model(**inputs).logits
        with mmspec.enable(model):
            assert torch.equal(model(**inputs).logits, stock)


def test_a_state_that_nobody_knows_is_refused_by_name() -> None:
    class Odd(torch.nn.Module):
        def forward(self, x: Tensor, cache: object) -> Tensor:
            return cache.update_recurrent_state(x, 0)  # type: ignore[attr-defined]

    assert recurrent.unknown(torch.nn.Sequential(Odd())) == "Odd"
