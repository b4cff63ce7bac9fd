"""Layers with a recurrent state: a tree read in one go is every path read step by step, and a commit is its end."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import tiny_vlms
import torch
import uncompiled
import vlm_classes as zoo
from compared import as_alone, as_stock
from hostile_drafters import DRAFTERS, Oracle, Scripted
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForImageTextToText

import mmspec
from mmspec import zoo as embedded
from mmspec.compile.capture import PiecewiseFunction
from mmspec.drafters.plain import Plain
from mmspec.kernels import few_rows
from mmspec.kernels import reference_recurrent as ops
from mmspec.pipelines.host import recurrent
from mmspec.pipelines.host.recurrent_state import AcceptedPath, RecurrentLayers
from mmspec.pipelines.target import captures
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
    found, u = ops.recurrent_tree(q, k, v, beta, G, state, TREE.ancestors)
    assert torch.allclose(found, out, rtol=0, atol=1e-12)
    path, last = AcceptedPath(KEPT, COUNT).taken(n, KEPT.device)
    ops.recurrent_fold(state, k, u, G, path, last)
    assert torch.allclose(state, states[torch.arange(B), last], rtol=0, atol=1e-12)
    before = state.clone()
    ops.recurrent_fold(state, k, u, G, *AcceptedPath(KEPT, COUNT * 0).taken(n, KEPT.device))
    assert torch.equal(state, before), "no node was taken"


def test_a_long_path_of_strong_decay_does_not_overflow() -> None:
    n = PARENTS.shape[1]
    k, v, state = F.normalize(drawn(B, H, n, K), dim=-1).float(), drawn(B, H, n, V).float(), drawn(B, H, K, V).float()
    G = ops.path_decay(torch.full((B, H, n), -300.0), TREE.ancestors)
    out, u = ops.recurrent_tree(k, k, v, torch.full((B, H, n), 0.5), G, state, TREE.ancestors)
    assert out.isfinite().all() and u.isfinite().all()
    ops.recurrent_fold(state, k, u, G, *AcceptedPath(KEPT, COUNT).taken(n, KEPT.device))
    assert state.isfinite().all()


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
    after = ops.conv_fold(x, state, ops.kept_inputs(KEPT, COUNT, width))
    for b in range(B):
        line = KEPT[b, : COUNT[b]]
        assert torch.equal(after[b], torch.cat([state[b], x[b][:, line]], 1)[:, -width:])


def test_outside_of_a_draft_a_layer_is_stock() -> None:
    model, inputs = tiny_vlms.model("qwen3_5"), tiny_vlms.prompt("qwen3_5", "ragged")
    with torch.no_grad():
        stock = model(**inputs).logits
        with mmspec.enable(model):
            assert torch.equal(model(**inputs).logits, stock)


def test_prompts_drafts_and_commits_run_in_the_cpu_library(monkeypatch: pytest.MonkeyPatch) -> None:
    if not few_rows.available(torch.float32):  # which tries it once
        pytest.skip(few_rows.built()[1])
    model = AutoModelForImageTextToText.from_pretrained(embedded.path("scenes-hybrid")).eval()
    layers, calls = len(recurrent.modules(model)), dict.fromkeys(("chain", "scan", "fold"), 0)
    inputs = {"input_ids": torch.arange(5, 60)[None], "attention_mask": torch.ones(1, 55, dtype=torch.long)}
    stock = model.generate(**inputs, max_new_tokens=20, do_sample=False)
    for name in calls:
        run = getattr(few_rows, name)
        monkeypatch.setattr(
            few_rows, name, lambda *args, n=name, run=run: (calls.update({n: calls[n] + 1}), run(*args))[1]
        )
    assert torch.equal(model.generate(**inputs, max_new_tokens=20, do_sample=False), stock) and not any(calls.values())
    with mmspec.enable(model, compile=False) as handle:
        assert torch.equal(model.generate(**inputs, max_new_tokens=20, do_sample=False), stock)
    assert calls == {"chain": layers, "scan": layers * handle.stats.rounds, "fold": handle.stats.rounds}


# -- rows that come and go, memory ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3_5", "lfm2_vl"])
def test_rows_enter_and_leave_a_session(name: str) -> None:
    model, kinds = tiny_vlms.model(name), ["image first", "text only", "image last"] * 2
    asked = [tiny_vlms.prompt(name, kind, seed) for seed, kind in enumerate(kinds)]
    oracle = Oracle({})
    for inputs in asked:
        full = tiny_vlms.generate(model, inputs, max_new_tokens=14)
        oracle.answers |= Oracle.of(inputs["input_ids"], full).answers
    ends: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": list(range(5, 30))}
    as_alone(model, asked, DRAFTERS["right within"](model, oracle), 2, ends, lengths=2)


def test_a_node_costs_its_key_value_decay_and_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a layer holds of a draft, by the memory that its tensors keep alive, beyond the state of its row."""
    model, inputs, commit = tiny_vlms.model("qwen3_5"), tiny_vlms.prompt("qwen3_5", "text only"), RecurrentLayers.commit
    text = model.config.text_config
    heads, key, value = (
        text.linear_num_value_heads, text.linear_key_head_dim, text.linear_value_head_dim,
    )  # fmt: skip
    channels = 2 * text.linear_num_key_heads * key + heads * value
    held: dict[int, set[int]] = {}

    def counting(self: RecurrentLayers, path: AcceptedPath) -> None:
        for layer in self.values():
            tensors = [*layer.inputs.values(), *(t for one in layer.writes.values() for t in one)]
            stores = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
            held.setdefault(layer.inputs[0].shape[2], set()).add(sum(stores.values()))
        before = [t.shape for layer in self.values() for t in layer.held()]
        commit(self, path)
        assert [t.shape for layer in self.values() for t in layer.held()] == before
        assert not any(layer.inputs or layer.writes for layer in self.values())

    monkeypatch.setattr(RecurrentLayers, "commit", counting)
    for size in (2, 12):
        with mmspec.enable(model, Scripted(lambda row, _, n=size: ([9] * n, [0] * n))):
            tiny_vlms.generate(model, inputs, max_new_tokens=6)
    each = heads * (key + value + 1) + channels
    assert held == {3: {3 * 4 * each}, 13: {13 * 4 * each}}


# -- compiled ---------------------------------------------------------------------------------------------------------

# gated delta rule; short convolutions beside sliding windows; state space duality; and a mixture of experts
COMPILED = {"qwen3_5": tiny_vlms, "lfm2_vl": tiny_vlms, "lfm3_vl": zoo, "nemotron_h_omni": zoo, "qwen3_5_moe": zoo}


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces run as they are, and what cannot be captured fails."""
    uncompiled.pieces(monkeypatch)
    warnings.simplefilter("error", UserWarning)


def right_at_first(inputs: dict[str, Tensor], full: Tensor, chained: bool) -> Scripted:
    """Chains and trees of one shape, on which rows keep two tokens, or three."""
    oracle = Oracle.of(inputs["input_ids"], full)

    def line(row: Any, _: Any) -> tuple[list[int], list[int]]:
        first, second = oracle.after(row, 2)
        other = (first + 1) % 100
        return ([first, second, other], [0, 1, 2]) if chained else ([other, first, other, second], [0, 0, 1, 2])

    return Scripted(line, chained)


@pytest.mark.parametrize("chained", [True, False], ids=["chain", "tree"])
@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.every(24)
def test_a_captured_forward_reads_and_leaves_the_same_state(name: str, chained: bool, capturing: None) -> None:
    made = COMPILED[name]
    model, inputs = made.model(name), made.prompt(name, "ragged")
    full = made.generate(model, inputs)
    with mmspec.enable(model, right_at_first(inputs, full, chained), compile=True) as handle:
        assert torch.equal(made.generate(model, inputs), full)
        held = captures.of(model)._captures
    assert handle.stats.tokens_per_target_call > 2 and held and all(held.values())


@pytest.mark.full
def test_by_the_compiler_too(monkeypatch: pytest.MonkeyPatch) -> None:
    uncompiled.pieces(monkeypatch, None)
    test_a_captured_forward_reads_and_leaves_the_same_state("qwen3_5", False, None)


class OffState(PiecewiseFunction):
    """Gives the right logits, and something else for what the nodes wrote last."""

    def __call__(self, attend: Any, *inputs: Tensor) -> list[Tensor]:
        *found, last = super().__call__(attend, *inputs)
        return [*found, last * 1.01]


def test_a_capture_that_would_leave_another_state_is_not_used(capturing: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captures, "PiecewiseFunction", OffState)
    model, call = tiny_vlms.model("qwen3_5"), {"max_new_tokens": 6}
    with pytest.warns(UserWarning, match="away from the uncompiled"):
        as_stock(model, tiny_vlms.prompt("qwen3_5", "text only"), Plain(), call=call, compile=True)
    assert not any(captures.of(model)._captures.values())


def test_a_state_that_nobody_knows_is_refused_by_name() -> None:
    class Odd(torch.nn.Module):
        def forward(self, x: Tensor, cache: object) -> Tensor:
            return cache.update_recurrent_state(x, 0)  # type: ignore[attr-defined]

    assert recurrent.unknown(torch.nn.Sequential(Odd())) == "Odd"


SCANNED = {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 8}
NEXT = {
    **{"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8},
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 1, "linear_num_value_heads": 2},
}
TEXTS: dict[str, Callable[[], Any]] = {
    # Falcon-H1 hands the gate of a single token to its scan, and multiplies that of several by itself
    "gate in the step": lambda: tiny_vlms.text("FalconH1", **SCANNED, mamba_rms_norm=False),
    "gate in the norm": lambda: tiny_vlms.text("FalconH1", **SCANNED, mamba_rms_norm=True),
    "gated delta rule": lambda: tiny_vlms.text(
        "Qwen3Next", **NEXT, layer_types=["linear_attention", "full_attention", "linear_attention"]
    ),
    "convolution": lambda: tiny_vlms.text("Lfm2", head_dim=None, layer_types=["conv", "full_attention", "conv"]),
}


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.every(2)
def test_models_that_read_text_alone(name: str, rows: int) -> None:
    model, ids = TEXTS[name](), torch.randint(5, 100, (rows, 9), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    mask[1:, :4] = 0
    for drafter in ("empty", "random tree", "right within"):
        as_stock(model, {"input_ids": ids * mask, "attention_mask": mask}, drafter)
