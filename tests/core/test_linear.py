"""Products of a few rows are those of `F.linear`, and the stock path keeps its own."""

from __future__ import annotations

import copy
import pickle

import pytest
import tiny_vlms
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import mmspec
from benchmarks import few_rows as bench
from mmspec import functional
from mmspec.functional import Linear, linear
from mmspec.kernels import few_rows

N, K = 384, 256


@pytest.fixture
def all_gain(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Every weight counts as large enough; the shapes that `few_rows` multiplied."""
    if not few_rows.available(torch.float32):
        pytest.skip(few_rows.built()[1])
    seen: list[tuple[int, ...]] = []
    product = few_rows.linear

    def counted(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        seen.append(tuple(x.shape))
        return product(x, weight, bias)

    monkeypatch.setattr(functional, "ENTRIES", 1)
    monkeypatch.setattr(few_rows, "linear", counted)
    return seen


@pytest.mark.parametrize("shape", [(1,), (1, 2), (2, 3), (8,), (2, 2, 2), (64,)])
@pytest.mark.parametrize("bias", [False, True])
def test_it_is_the_product(shape: tuple[int, ...], bias: bool, all_gain: list[tuple[int, ...]]) -> None:
    layer, x = Linear(K, N, bias), torch.randn(*shape, K)
    with torch.no_grad():
        found = layer(x)
    assert all_gain == [(*shape, K)] and found.is_contiguous() and found.shape == (*shape, N)
    torch.testing.assert_close(found, F.linear(x, layer.weight, layer.bias), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "what", ["many rows", "none", "bfloat16", "autocast", "gradients", "traced", "small", "turned", "subclass"]
)
def test_all_else_goes_the_usual_way(
    what: str, all_gain: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, rows = nn.Linear(K, N), {"many rows": few_rows.ROWS + 1, "none": 0}.get(what, 4)
    x = torch.randn(rows, K)
    if what == "bfloat16":
        layer, x = layer.bfloat16(), x.bfloat16()
    if what == "small":
        monkeypatch.setattr(functional, "ENTRIES", N * K + 1)
    if what == "turned":
        layer.weight.data = layer.weight.data.T.contiguous().T
    if what == "subclass":
        x = x.as_subclass(type("Other", (torch.Tensor,), {}))
    with torch.set_grad_enabled(what == "gradients"), torch.autocast("cpu", torch.bfloat16, what == "autocast"):
        if what == "traced":
            names = [
                str(node.target) for node in make_fx(lambda *given: linear(*given))(x, layer.weight.data).graph.nodes
            ]
            assert "aten.mm.default" in names
        else:
            assert torch.equal(linear(x, layer.weight, layer.bias), F.linear(x, layer.weight, layer.bias))
    assert all_gain == []


def test_a_draft_is_read_by_it_and_the_stock_path_is_not(all_gain: list[tuple[int, ...]]) -> None:
    model, inputs = copy.deepcopy(tiny_vlms.model("llava")), tiny_vlms.prompt("llava", "ragged")
    want, before = tiny_vlms.generate(model, inputs), [type(module) for module in model.modules()]
    with mmspec.enable(model, drafter="ngram") as handle:
        assert torch.equal(tiny_vlms.generate(model, inputs), want)
        read = len(all_gain)
        assert read > handle.stats.rounds and isinstance(copy.deepcopy(model).lm_head, nn.Linear)
        assert type(pickle.loads(pickle.dumps(model.lm_head))) is nn.Linear
        with torch.no_grad():
            model(**inputs)
        assert len(all_gain) == read, "a forward of the user's own is stock's"
    assert [type(module) for module in model.modules()] == before


def test_the_bench_of_few_rows_times_both_ways_behind_the_same_cache() -> None:
    c = LlamaConfig(vocab_size=9, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    model = LlamaForCausalLM(c).eval()
    cache = DynamicCache(config=c)
    ids = torch.arange(9)[None]
    with torch.inference_mode():
        model(input_ids=ids[:, :4], past_key_values=cache, use_cache=True)
        for way in bench.WAYS.values():
            assert bench.seconds(model, ids[:, 4:], cache, way) > 0
            assert cache.get_seq_length() == 4 and type(model.lm_head) is way


def test_a_compiler_reads_it_as_one_graph() -> None:
    one = Linear(K, N)
    x = torch.randn(1, 4, K)
    compiled = torch.compile(one, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x), F.linear(x, one.weight, one.bias))
    torch._dynamo.reset()
