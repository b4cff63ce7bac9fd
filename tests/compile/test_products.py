"""Products of few rows are replaced in captured functions, those of one input by one operation."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import tiny_vlms
import torch
import uncompiled
from hostile_drafters import eagle
from torch import Tensor, fx, nn

import mmspec
from mmspec.compile import capture, products
from mmspec.compile.capture import PiecewiseFunction
from mmspec.kernels import few_rows
from mmspec.pipelines.target import captures

MM, ADDMM = torch.ops.aten.mm.default, torch.ops.aten.addmm.default
OPERATIONS = few_rows.operations() if few_rows.available(torch.float32) else None
ONE, SEVERAL = (OPERATIONS.linear.default, OPERATIONS.products.default) if OPERATIONS else (None, None)


class Layer(nn.Module):
    """Three products of one input, of which one has a bias, and one of what they come to, by half a weight."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, n, bias=n == 8, dtype=dtype) for n in (12, 8, 4))
        self.out = nn.Linear(8, 10, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> list[Tensor]:
        found = self.q(x)[..., :8] * self.k(x) + self.v(x).sum(-1, keepdim=True)
        return [nn.functional.linear(found, self.out.weight[2:])]


def capturing(layer: Layer, rows: int, pieces: list[fx.GraphModule] | None = None) -> PiecewiseFunction:
    def compile(piece: fx.GraphModule, examples: list[Tensor]) -> Any:
        if pieces is not None:
            pieces.append(piece)
        return piece

    return PiecewiseFunction(layer, [torch.randn(1, rows, 16, dtype=layer.q.weight.dtype)], layer.parameters(), compile)


@pytest.fixture(autouse=True)
def all_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every weight counts as large enough."""
    if not few_rows.available(torch.float32):
        pytest.skip(few_rows.built()[1])
    monkeypatch.setattr(products, "ENTRIES", 1)


def targets(piece: fx.GraphModule) -> list[object]:
    """Of its products, in order."""
    return [node.target for node in piece.graph.nodes if node.target in (MM, ADDMM, ONE, SEVERAL)]


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inside", [False, True])
def test_products_of_one_input_are_one(inside: bool, dtype: torch.dtype) -> None:
    layer, pieces, x = Layer(dtype), [], torch.randn(1, 5, 16, dtype=dtype)
    captured = capturing(layer, 5, pieces)
    (piece,) = pieces
    assert targets(piece) == [SEVERAL, ONE]
    near = 1e-5 if dtype == torch.float32 else 2e-2  # bfloat16 rounds what is summed
    with torch.inference_mode(inside):
        torch.testing.assert_close(captured(capture.attend, x), layer(x), rtol=near, atol=near)


@torch.no_grad()
@pytest.mark.parametrize("why", ["float64", "many rows", "small", "turned"])
def test_others_stay(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, pieces = Layer(torch.float64 if why == "float64" else torch.float32), []
    if why == "small":
        monkeypatch.setattr(products, "ENTRIES", 1 << 20)
    if why == "turned":
        for one in (layer.q, layer.k, layer.v, layer.out):
            one.weight.data = one.weight.data.T.contiguous().T
    rows = few_rows.ROWS + 1 if why == "many rows" else 5
    captured, x = capturing(layer, rows, pieces), torch.randn(1, rows, 16, dtype=layer.q.weight.dtype)
    assert not {ONE, SEVERAL} & {*targets(pieces[0])}
    assert torch.equal(captured(capture.attend, x)[0], layer(x)[0])


@torch.no_grad()
def test_a_compiler_takes_them() -> None:
    layer, x = Layer(), torch.randn(1, 5, 16)
    captured = PiecewiseFunction(layer, [x], layer.parameters())
    torch.testing.assert_close(captured(capture.attend, x), layer(x))


def added(weight: Tensor) -> None:
    weight.add_(0.3)


def elsewhere(weight: Any) -> None:
    weight.data = weight.data.flip(0).contiguous()


def a_row(weight: Any) -> None:
    weight[3, 5:9] = 0.5


@pytest.mark.parametrize("write", [added, elsewhere, a_row])
@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.every(10)
def test_weights_that_are_written_to_are_read_anew(
    write: Callable[[Tensor], None], drafts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two calls weights are written to: what is generated is what stock generates with the new ones."""
    uncompiled.pieces(monkeypatch)
    warnings.simplefilter("error", UserWarning)
    model, inputs = copy.deepcopy(tiny_vlms.model("llava")), tiny_vlms.prompt("llava", "image first")
    layer, wanted = model.get_decoder().layers[1], [tiny_vlms.generate(model, inputs)]
    drafter = eagle(model, depth=3, width=1, size=4) if drafts else "plain"
    with mmspec.enable(model, drafter, compile=True):
        found, held = [tiny_vlms.generate(model, inputs)], captures.of(model)
        functions = [*held._captures.values()]
        with torch.no_grad():
            for weight in (layer.self_attn.k_proj.weight, layer.mlp.up_proj.weight, model.lm_head.weight):
                write(weight)
        found.append(tiny_vlms.generate(model, inputs))
        assert functions and [*held._captures.values()][: len(functions)] == functions, "nothing is captured anew"
    wanted.append(tiny_vlms.generate(model, inputs))
    assert all(map(torch.equal, found, wanted)) and not torch.equal(*wanted)


class Writing(Layer):
    """Writes into what a product gave, through a view, before and after the next product of the same rows."""

    def forward(self, x: Tensor) -> list[Tensor]:
        y = x + 0
        first = self.q(y)
        first.view(-1).mul_(3)
        y[..., 0] = 3
        return [first[..., :8] * self.k(y), self.v(x)]


@torch.no_grad()
def test_what_is_written_into_is_not_joined() -> None:
    layer, pieces, x = Writing(), [], torch.randn(1, 5, 16)
    captured = capturing(layer, 5, pieces)
    torch.testing.assert_close(captured(capture.attend, x), layer(x))
    assert targets(pieces[0]) == [ONE, ONE, ONE]


class Region(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(16, 8), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> list[Tensor]:
        with torch.autocast("cpu", enabled=False):
            inner = self.inner(x.float())
        return [inner, self.outer(x), inner @ inner.mT]


@torch.no_grad()
def test_regions_without_autocast_stay() -> None:
    layer, x = Region(), torch.randn(1, 5, 16)
    with torch.autocast("cpu", torch.bfloat16):
        captured = PiecewiseFunction(layer, [x], layer.parameters(), lambda piece, examples: piece)
        wanted, found = layer(x), captured(capture.attend, x)
    assert [t.dtype for t in found] == [t.dtype for t in wanted]
    torch.testing.assert_close(found, wanted)
