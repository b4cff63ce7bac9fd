"""Products of one input are one product in captured functions, and their copies of weights follow the weights."""

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
from mmspec.compile import held as trusted
from mmspec.compile.capture import PiecewiseFunction
from mmspec.pipelines.target import captures

MM, ADDMM = torch.ops.aten.mm.default, torch.ops.aten.addmm.default


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


@torch.no_grad()
@pytest.mark.parametrize("inside", [False, True])
def test_products_of_one_input_are_one(inside: bool) -> None:
    layer, pieces, x = Layer(), [], torch.randn(1, 5, 16)
    captured = capturing(layer, 5, pieces)
    (piece,) = pieces
    assert len(piece.graph.find_nodes(op="call_function", target=MM)) == 2
    assert not piece.graph.find_nodes(op="call_function", target=ADDMM)
    with torch.inference_mode(inside):
        torch.testing.assert_close(captured(capture.attend, x), layer(x))
    assert [copy.tensor.shape for copy in captured.copies] == [(16, 24), (8, 8)]
    assert all(copy.tensor.is_contiguous() for copy in captured.copies)


@torch.no_grad()
def test_functions_share_their_copies_and_let_them_go() -> None:
    layer, before = Layer(), len(products._HELD)
    two = [capturing(layer, rows) for rows in (1, 5)]
    assert len(products._HELD) - before == 2
    assert [*map(id, two[0].copies)] == [*map(id, two[1].copies)]
    del two
    assert len(products._HELD) == before


@torch.no_grad()
@pytest.mark.parametrize("why", ["bfloat16, small", "bfloat16, one row", "bfloat16, many rows", "no room"])
def test_nothing_is_copied_where_it_does_not_pay(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {"bfloat16, one row": 1, "bfloat16, many rows": products.FEW + 1}.get(why, 5)
    layer = Layer(torch.bfloat16 if "bfloat16" in why else torch.float32)
    if why != "bfloat16, small":
        monkeypatch.setattr(products, "WIDE", 1)
    if why == "no room":
        monkeypatch.setattr(products, "spare_memory", lambda: 2 * 8 * 8 * 4 - 1)
    captured, x = capturing(layer, rows), torch.randn(1, rows, 16).to(layer.q.weight.dtype)
    assert not captured.copies and torch.equal(captured(capture.attend, x)[0], layer(x)[0])


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_large_matrices_are_packed(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    if not products.packs(dtype):
        pytest.skip(f"oneDNN does not multiply {dtype} on this CPU")
    monkeypatch.setattr(products, "WIDE", 12 * 16)  # those that are joined have more entries, and the last one fewer
    layer, pieces, x = Layer(dtype), [], torch.randn(1, 5, 16).to(dtype)
    captured = capturing(layer, 5, pieces)
    assert [copy.packed for copy in captured.copies] == ([True, False] if dtype == torch.float32 else [True])
    (piece,) = pieces
    assert len(piece.graph.find_nodes(op="call_function", target=products._TIMES)) == 1
    torch.testing.assert_close(captured(capture.attend, x), layer(x), rtol=0.02, atol=0.02)
    layer.k.weight.data += 1
    captured.copies[0].renew()
    torch.testing.assert_close(captured(capture.attend, x), layer(x), rtol=0.02, atol=0.02)


def test_memory_for_copies_is_given_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What another function has copied needs none; of several products those are copied that there is room for."""
    monkeypatch.setattr(products, "spare_memory", lambda: 2 * 16 * 24 * 4)
    layer = Layer()
    (first,) = capturing(layer, 5).copies
    assert first.tensor.shape == (16, 24)
    again = capturing(layer, 5).copies
    assert again[0] is first and [copy.tensor.shape for copy in again] == [(16, 24), (8, 8)]


@pytest.mark.parametrize("error", [AttributeError, RuntimeError])
def test_a_build_without_onednn_packs_nothing(error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any) -> Tensor:
        raise error("no such operator")

    monkeypatch.setattr(products, "_pack", missing)
    assert not products.packs.__wrapped__(torch.float32)
    assert not products.packs(torch.int8)


def added(weight: Tensor) -> None:
    weight.add_(0.3)


def elsewhere(weight: Any) -> None:
    weight.data = weight.data.flip(0).contiguous()


def a_row(weight: Any) -> None:
    weight[3, 5:9] = 0.5


@pytest.mark.parametrize("write", [added, elsewhere, a_row])
@pytest.mark.parametrize(("drafts", "packed"), [(False, False), (True, False), (True, True)])
@pytest.mark.every(10)
def test_copies_follow_the_weights(
    write: Callable[[Tensor], None], drafts: bool, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two calls weights are written to: what is generated is what stock generates with the new ones."""
    uncompiled.pieces(monkeypatch)
    monkeypatch.setattr(products, "WIDE", 1 if packed else products.WIDE)
    warnings.simplefilter("error", UserWarning)
    model, inputs = copy.deepcopy(tiny_vlms.model("llava")), tiny_vlms.prompt("llava", "image first")
    layer, wanted = model.get_decoder().layers[1], [tiny_vlms.generate(model, inputs)]
    drafter = eagle(model, depth=3, width=1, size=4) if drafts else "plain"
    with mmspec.enable(model, drafter, compile=True):
        found, held = [tiny_vlms.generate(model, inputs)], captures.of(model)
        functions = [*held._held.values()]
        assert functions and all(one is not None and one.copies for one in functions)
        assert any(copy.packed for one in functions for copy in one.copies) == packed
        with torch.no_grad():
            for weight in (layer.self_attn.k_proj.weight, layer.mlp.up_proj.weight, model.lm_head.weight):
                write(weight)
        found.append(tiny_vlms.generate(model, inputs))
        assert [*held._held.values()][: len(functions)] == functions, "nothing is captured anew"
        heads = [copy for one in held.drafts.values() for copy in copies(one) for part in copy.parts
                 if part.weight is model.lm_head.weight]  # fmt: skip
        assert bool(heads) == drafts
        assert all(one.packed or torch.equal(one.tensor, model.lm_head.weight.T) for one in heads)
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
    layer, x = Writing(), torch.randn(1, 5, 16)
    captured = capturing(layer, 5)
    torch.testing.assert_close(captured(capture.attend, x), layer(x))
    assert [copy.tensor.shape for copy in captured.copies] == [(16, 4)]  # of the one whose input stays


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
    assert captured.copies and [t.dtype for t in found] == [t.dtype for t in wanted]
    torch.testing.assert_close(found, wanted)


def copies(held: trusted.Held) -> list[products.Joined]:
    return [copy for one in held._held.values() if one is not None for copy in one.copies]


def fresh(held: trusted.Held) -> bool:
    return all(torch.equal(one.tensor, torch.cat([part.matrix() for part in one.parts], 1)) for one in copies(held))


def test_a_renewal_that_is_interrupted_is_begun_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, held = Layer(), trusted.Held("a layer")
    held.check(layer)
    held.get("shape", lambda: capturing(layer, 5))
    renew, broken = products.Joined.renew, iter([KeyboardInterrupt()])

    def interrupted(self: Any) -> None:
        for error in broken:
            raise error
        renew(self)

    monkeypatch.setattr(products.Joined, "renew", interrupted)
    added(layer.q.weight.detach()), added(layer.out.weight.detach())
    with pytest.raises(KeyboardInterrupt):
        held.check(layer)
    assert not fresh(held)
    held.check(layer)
    assert copies(held) and fresh(held)


def test_a_write_while_another_shape_is_captured_is_followed_by_the_next_call() -> None:
    layer, held = Layer(), trusted.Held("a layer")
    held.check(layer)
    held.get("shape", lambda: capturing(layer, 5))

    def written() -> Any:
        added(layer.q.weight.detach())
        return capturing(Layer(), 5)

    held.get("other", written)
    held.check(layer)
    assert fresh(held)


def test_copies_that_another_holds_are_renewed_before_they_are_taken() -> None:
    layer = Layer()
    first = capturing(layer, 5)
    added(layer.q.weight.detach())
    second = capturing(layer, 1)
    assert first.copies[0] is second.copies[0]
    assert torch.equal(first.copies[0].tensor[:, :12], layer.q.weight.T)
