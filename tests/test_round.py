"""The cost of a round: captured forwards and chains, drafting only where it pays, and the bench that measures it."""

from __future__ import annotations

import argparse
import gc
import json
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import targets
import tiny_llava
import torch
from drafters import DRAFTERS, eagle
from tiny_llamagen import pipeline
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as sdpa

import mmspec
from mmspec import auto, capture
from mmspec.app.bench import command as bench
from mmspec.app.bench import round as bench_round
from mmspec.auto import Auto, Known
from mmspec.capture import Captured, Uncapturable
from mmspec.drafters.captured import CapturedChain
from mmspec.drafters.eagle import EagleConfig, EagleDrafter
from mmspec.pipelines import compiled, pace, trusted
from mmspec.pipelines.batching import Plain
from mmspec.pipelines.trusted import Trusted

FULL = pytest.mark.full
FOREIGN = torch.ones(3)
CHAIN = {"depth": 3, "width": 1, "size": 4}


def as_it_is(piece: Any, examples: list[Tensor]) -> Any:
    """In the place of a compiler."""
    return piece


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces are run, not compiled; and nothing may fall back to the stock forward."""
    monkeypatch.setattr(capture, "inductor", as_it_is)
    monkeypatch.setattr(trusted, "_OF", WeakKeyDictionary())
    warnings.simplefilter("error", UserWarning)


# -- capture ---------------------------------------------------------------------------------------------------------


class Layers(nn.Module):
    """Attention layers of which all but the first and the last piece are the same code."""

    def __init__(self, depth: int = 5) -> None:
        super().__init__()
        self.qkv = nn.ModuleList(nn.Linear(16, 48, bias=False) for _ in range(depth))
        self.out = nn.ModuleList(nn.Linear(16, 16) for _ in range(depth))

    def forward(self, x: Tensor, attend: Any = capture.attend) -> list[Tensor]:
        B, n, _ = x.shape
        for layer, (qkv, out) in enumerate(zip(self.qkv, self.out, strict=True)):
            q, k, v = qkv(x * torch.tensor(3.0 if layer == 2 else 2.0)).view(B, n, 6, 8).transpose(1, 2).chunk(3, 1)
            x = x + out(attend(layer, 0.5, q, k, v).transpose(1, 2).reshape(B, n, 16)).relu()
        return [x, x.argmax(-1)]


def attention(layer: int, scale: float, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return sdpa(q, k * (1 + layer), v, scale=scale)


@torch.no_grad()
@pytest.mark.parametrize("compile", [as_it_is, pytest.param(capture.inductor, marks=FULL)])
def test_a_captured_function_gives_what_it_gave_before_from_few_pieces(compile: Any):
    layers = Layers()
    captured = Captured(layers, [torch.randn(2, 3, 16)], layers.parameters(), compile)
    x = torch.randn(2, 3, 16)
    torch.testing.assert_close(captured(attention, x), layers(x, attention), rtol=1e-5, atol=1e-6)
    assert captured.pieces == 3, "the first, those in the middle, whatever their literals, and the last"
    layers.out[1].bias += 1  # weights are held, not copied
    torch.testing.assert_close(captured(attention, x), layers(x, attention), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "function, why",
    [
        (lambda x: [x * 2 if x.sum() > 0 else x], "."),
        (lambda x: [x * FOREIGN], r"a tensor \[3\] that is neither an input nor a weight"),
    ],
)
def test_what_may_change_from_call_to_call_is_not_captured(function: Any, why: str):
    with pytest.raises(Uncapturable, match=why):
        Captured(function, [torch.ones(3)], [], as_it_is)


def test_what_depends_on_the_variant_is_not_captured():
    with pytest.raises(Uncapturable, match="how much was read before"):
        Captured(lambda past, x: [x * past], [torch.ones(3)], [], as_it_is, variants=(3, 4))
    captured = Captured(lambda past, x: [x * 2, (x * past)[:0]][:1], [torch.ones(3)], [], as_it_is, variants=(3, 4))
    assert captured(attention, torch.full((3,), 2.0))[0].tolist() == [4.0] * 3


# -- compile=True ----------------------------------------------------------------------------------------------------

DEFAULT = {("llava", "eagle chain"), ("qwen2_5_vl", "eagle tree"), ("gemma3", "eagle chain")}
CASES = [
    pytest.param(name, drafter, marks=() if (name, drafter) in DEFAULT else FULL)
    for name in targets.FAMILIES
    for drafter in ("eagle chain", "eagle tree")
]


@pytest.mark.parametrize("name, drafter", CASES)
def test_compiled_is_stock(name: str, drafter: str, quick: None, kind: str = "ragged"):
    model, inputs = targets.model(name), targets.prompt(name, kind)
    wanted = targets.generate(model, inputs)
    with mmspec.enable(model, DRAFTERS[drafter](model, None), compile=True):
        assert torch.equal(targets.generate(model, inputs), wanted)
        assert torch.equal(targets.generate(model, inputs), wanted)
    held = compiled.of(model)
    assert held._held and all(held._held.values())
    assert any(held.chains.values()) == (drafter == "eagle chain")


def test_a_captured_chain_proposes_what_its_drafter_does(quick: None, monkeypatch: pytest.MonkeyPatch):
    model, found = targets.model("llava"), []
    propose = CapturedChain.propose

    def both(self: CapturedChain, session: Any, target: Any) -> Any:
        memory = session.memory
        before = memory.lengths, memory.positions
        plain = self.drafter.propose(session, target)
        after = memory.lengths, memory.positions
        memory.lengths, memory.positions = before
        mine = propose(self, session, target)
        found.append(torch.equal(plain.tokens, mine.tokens) and mine.tree.is_chain)
        assert after[0].host == memory.lengths.host and torch.equal(after[1], memory.positions)
        return mine

    monkeypatch.setattr(CapturedChain, "propose", both)
    with mmspec.enable(model, eagle(model, **CHAIN), compile=True):
        targets.generate(model, targets.prompt("llava", "ragged"))
    assert len(found) > 5 and all(found)


def test_other_weights_are_captured_anew(quick: None):
    model, inputs = targets.model("llava"), targets.prompt("llava", "image first")
    layer = model.get_decoder().layers[1].mlp
    with mmspec.enable(model, Plain(), compile=True):
        before = targets.generate(model, inputs)
        old, layer.up_proj = layer.up_proj, nn.Linear(64, 96, bias=False)
        try:
            fast = targets.generate(model, inputs)
            mmspec.disable(model)
            assert torch.equal(fast, targets.generate(model, inputs)) and not torch.equal(fast, before)
        finally:
            layer.up_proj = old


def test_a_chain_in_use_forgets_other_weights(quick: None):
    model, inputs = targets.model("llava"), targets.prompt("llava", "text only")
    old = model.lm_head.weight
    with mmspec.enable(model, eagle(model, **CHAIN), compile=True):
        targets.generate(model, inputs)
        (held,) = compiled.of(model).chains.values()
        before = list(held.values())
        try:
            model.lm_head.weight = nn.Parameter(old.detach().clone())
            targets.generate(model, inputs)
        finally:
            model.lm_head.weight = old
    assert before and held and not any(one is other for one in held.values() for other in before)


def test_other_buffers_and_another_attention_are_captured_anew(quick: None):
    held, layer = Trusted("a layer"), nn.BatchNorm1d(2)
    held.check(layer)
    held._held["shape"] = None
    held.check(layer)
    assert held._held
    layer.running_mean = torch.ones(2)
    held.check(layer)
    assert not held._held
    model, inputs = targets.model("llava", "eager"), targets.prompt("llava", "text only")
    try:
        with mmspec.enable(model, Plain(), compile=True):
            with pytest.warns(UserWarning, match="uncompiled: .*'eager'"):
                targets.generate(model, inputs)
            model.set_attn_implementation("sdpa")
            targets.generate(model, inputs)
            assert any(compiled.of(model)._held.values())
    finally:
        model.set_attn_implementation("eager")
        targets.model("llava").set_attn_implementation("sdpa")


def test_a_shape_is_captured_once_by_all_threads():
    held, made = Trusted("a layer"), []

    def capture() -> Any:
        made.append(time.sleep(0.1))
        return "captured"

    def get(key: str, apart: float = 0.0, capture: Any = capture) -> Any:
        return held.get(key, torch.float32, capture, lambda c: [torch.ones(2) + apart], lambda: [torch.ones(2)])

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(get, ["shape"] * 3)) == ["captured"] * 3 and len(made) == 1
    with pytest.warns(UserWarning, match="a layer uncompiled: .* nan away"):
        assert get("other", float("nan")) is None
    get("late", capture=lambda: held.check(nn.Linear(2, 2)))  # another thread's call finds other weights meanwhile
    assert not held._held


@pytest.mark.parametrize("what", ["eager", "adapters", "wrong", "no compiler"])
def test_what_cannot_be_captured_runs_as_it_is(what: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(trusted, "_OF", WeakKeyDictionary())
    monkeypatch.setattr(capture, "inductor", as_it_is)
    model, inputs = targets.model("llava", "eager" if what == "eager" else "sdpa"), targets.prompt("llava", "text only")
    wanted = targets.generate(model, inputs)
    if what == "adapters":
        monkeypatch.setattr(model.lm_head, "base_layer", None, raising=False)
    if what == "wrong":
        monkeypatch.setattr(capture, "inductor", lambda piece, examples: lambda *a: [-t for t in piece(*a)])
    if what == "no compiler":
        monkeypatch.setattr(capture, "inductor", lambda *a: 1 / 0)
    why = {"eager": "'eager'", "adapters": "adapters", "wrong": "away from", "no compiler": "ZeroDivisionError"}
    with mmspec.enable(model, Plain(), compile=True), pytest.warns(UserWarning, match=f"uncompiled: .*{why[what]}"):
        assert torch.equal(targets.generate(model, inputs), wanted)
    targets.model("llava").set_attn_implementation("sdpa")


@FULL
def test_compiled_by_the_compiler_is_stock():
    model, inputs = targets.model("llava"), targets.prompt("llava", "image first")
    wanted = targets.generate(model, inputs)
    with mmspec.enable(model, eagle(model, **CHAIN), compile=True):
        assert torch.equal(targets.generate(model, inputs), wanted)
        assert torch.equal(targets.generate(model, inputs), wanted)


def test_auto_is_not_for_models_with_a_loop_of_their_own():
    with pytest.raises(ValueError, match="auto is not for LlamaGenPipeline"):
        mmspec.enable(pipeline(), "jacobi", auto=True)


# -- auto=True -------------------------------------------------------------------------------------------------------


def known(costs: dict[int, float], accepted: int, rounds: int = 20) -> Known:
    """After some rounds of these costs in which so many drafted tokens stood."""
    found = Known(tuple(sorted(costs)))
    for _ in range(rounds):
        depth = found.choose(1)
        found.book(1, depth, costs[depth], [min(accepted, depth)])
    return found


@pytest.mark.parametrize(
    "costs, accepted, depth",
    [
        ({0: 1.0, 2: 1.2, 4: 1.4, 8: 1.8}, 8, 8),  # all stands
        ({0: 1.0, 2: 1.2, 4: 1.4, 8: 1.8}, 2, 2),  # what is deeper never stands
        ({0: 1.0, 2: 1.2, 4: 1.4, 8: 1.8}, 0, 0),  # nothing stands
        ({0: 1.0, 4: 5.5}, 4, 0),  # all stands, and still it does not pay
    ],
)
def test_the_depth_that_pays_is_chosen(costs: dict[int, float], accepted: int, depth: int):
    assert known(costs, accepted).choose(1) == depth


def test_a_hostile_drafter_costs_less_than_three_percent():
    found, spent = Known((0, 8)), 0.0
    for _ in range(1000):
        depth = found.choose(1)
        cost = {0: 1.0, 8: 1.8}[depth]
        found.book(1, depth, cost, [0])
        spent += cost
    assert 1000 < spent < 1030


def test_drafting_is_tried_again_and_begins_where_it_pays():
    found = known({0: 1.0, 8: 1.8}, 0, 60)
    depths = []
    for _ in range(400):
        depths.append(found.choose(1))
        found.book(1, depths[-1], {0: 1.0, 8: 1.8}[depths[-1]], [depths[-1]])
    assert depths[0] == 0 and depths[-1] == 8


def test_deeper_drafts_are_tried_again_where_fewer_tokens_stood():
    costs, depths = {0: 1.0, 2: 1.2, 4: 1.4, 8: 1.8}, []
    found = known(costs, 2, 90)
    for _ in range(200):
        depths.append(found.choose(1))
        found.book(1, depths[-1], costs[depths[-1]], [depths[-1]])
    assert depths[0] == 2 and depths[-1] == 8


def test_a_round_that_first_read_what_was_missed_says_how_much_it_takes_at_most():
    found = known({0: 1.0, 8: 1.8}, 8)
    found.book(1, 8, 9.0, [8], late=True)
    assert found.cost(1, 8) == 1.8
    for _ in range(7):
        found.book(1, 8, 1.5, [8], late=True)
    assert found.cost(1, 8) == 1.5


def test_what_was_learned_outlives_a_call_and_what_was_enabled():
    model, inputs, held = targets.model("llava"), targets.prompt("llava", "image first"), []
    drafter = eagle(model)
    for _ in range(2):
        with mmspec.enable(model, drafter, auto=True) as handle:
            held.append(handle.proposer.known)
            targets.generate(model, inputs)
    assert held[0] is held[1] and held[0].costs
    assert drafter.block in pace._KNOWN[model]
    before = len(pace._KNOWN[model])
    del drafter, handle
    gc.collect()
    assert len(pace._KNOWN[model]) < before


class Told(Known):
    """Chooses what it is told to."""

    depths_to_come: tuple[int, ...] = ()

    def choose(self, batch: int) -> int:
        self.turn = getattr(self, "turn", -1) + 1
        return self.depths_to_come[self.turn % len(self.depths_to_come)]


@pytest.mark.parametrize("drafter", ["eagle chain", "eagle tree", "ngram"])
@pytest.mark.parametrize("kind", ["image first", "ragged"])
def test_auto_is_stock_whatever_it_chooses(drafter: str, kind: str, monkeypatch: pytest.MonkeyPatch):
    model, inputs = targets.model("llava"), targets.prompt("llava", kind)
    wanted = targets.generate(model, inputs)
    with mmspec.enable(model, DRAFTERS[drafter](model, None), auto=True) as handle:
        proposer = handle.proposer
        assert isinstance(proposer, Auto)
        proposer.known = Told(proposer.known.depths)
        proposer.known.depths_to_come = (max(proposer.drafters), 0, 0, min(proposer.drafters), 0)
        assert torch.equal(targets.generate(model, inputs), wanted)


@pytest.mark.parametrize("compile", [False, True])
def test_what_was_not_drafted_for_is_read_later(compile: bool, quick: None):
    """After rounds without a draft, however many, a drafter proposes what it would have proposed anyway."""
    model, inputs, drafts = targets.model("llava"), targets.prompt("llava", "ragged"), []
    drafter = eagle(model, **CHAIN)
    for depths in ((3,), (3, 0, 0, 0), (3, *[0] * 7)):
        made: dict[tuple[int, ...], list[int]] = {}
        with mmspec.enable(model, drafter, auto=True, compile=compile) as handle:
            proposer = handle.proposer
            proposer.known = Told(proposer.known.depths)
            proposer.known.depths_to_come = depths
            propose = proposer.propose

            def noted(session: Any, target: Any, propose: Any = propose, made: Any = made) -> Any:
                draft = propose(session, target)
                for row, line in zip(session.rows, draft.tokens.tolist(), strict=True):
                    made[tuple(row.tokens)] = line
                return draft

            proposer.propose = noted
            targets.generate(model, inputs)
        drafts.append(made)
    for later, least in zip(drafts[1:], (4, 2), strict=True):
        both = [text for text in drafts[0] if len(later.get(text, ())) == 4]
        assert len(both) > least and all(drafts[0][text] == later[text] for text in both)


def test_auto_turns_a_hostile_drafter_off(monkeypatch: pytest.MonkeyPatch):
    model, inputs = targets.model("llava"), targets.prompt("llava", "image first")
    with mmspec.enable(model, eagle(model, nan=True, depth=4, width=1, size=5), auto=True) as handle:
        monkeypatch.setattr(auto.statistics, "median", lambda held: 1.0 + (held is handle.proposer.known.costs[1, 4]))
        targets.generate(model, inputs, max_new_tokens=40)
    assert handle.stats.drafted <= 4 * (auto.SAMPLES + 1) and handle.stats.rounds == 39


def test_auto_says_what_it_cannot_do():
    with pytest.raises(ValueError, match="auto chooses depths of chains and trees"):
        mmspec.enable(targets.model("llava"), "jacobi", auto=True)


# -- mmspec bench round ----------------------------------------------------------------------------------------------


def test_the_bench_sets_a_drafter_of_random_weights_beside_each(tmp_path: Path):
    torch.manual_seed(7)
    mine = EagleDrafter(EagleConfig(64, 32, 2, 2, 128, depth=3, width=1, size=4))
    mine.save_pretrained(tmp_path)
    parser = argparse.ArgumentParser()
    bench_round.configure(parser)
    words = ["--auto", "--no-compile", "--drafter", str(tmp_path), "--without", "stock-static", "ngram"]
    args = parser.parse_args(words)
    found = {m.name: m for m in bench_round.methods(targets.model("llava"), args)}
    names = ["stock", "hf-prompt-lookup", "plain", "eagle", "eagle auto", "hostile eagle", "hostile eagle auto"]
    assert sorted(found) == sorted(names) and found["hostile eagle auto"].options == {"auto": True}
    other = found["hostile eagle"].drafter
    assert other.config == mine.config and not torch.equal(other.block.qkv.weight, mine.block.qkv.weight)


def test_the_bench_says_where_a_round_goes(tmp_path: Path, quick: None):
    folder = tiny_llava.save(tmp_path / "model")
    EagleDrafter(EagleConfig(64, 32, 2, 2, 128, depth=3, width=1, size=4)).save_pretrained(tmp_path / "drafter")
    parser = argparse.ArgumentParser()
    bench.configure(parser)
    words = ["--images", "2", "--prompt", "short", "--max-new-tokens", "12", "--profile"]
    words += ["--model", str(folder), "--drafter", str(tmp_path / "drafter"), "--json", str(tmp_path / "found.json")]
    assert bench.run(parser.parse_args(["round", *words])) == 0
    found = {r["method"]: r for r in json.loads((tmp_path / "found.json").read_text())["records"]}
    assert list(found) == [
        "stock",
        "plain",
        "plain compiled",
        "eagle",
        "eagle compiled",
    ]
    for record in found.values():
        assert record["suite"] == "round" and record["identical_rate"] == 1.0 and record["step_ms"] > 0
    eagle_ = found["eagle"]
    assert set(eagle_["parts_ms"]) == {"draft", "verify", "accept", "commit"} and not found["stock"]["parts_ms"]
    assert sum(eagle_["parts_ms"].values()) <= 1.5 * eagle_["step_ms"]
    assert eagle_["reads"] == 1.0, "one read of the accepted path"
    assert 0 < found["plain compiled"]["ops"] < found["plain"]["ops"] and len(eagle_["top"]) == 12
