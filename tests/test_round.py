"""The cost of a round: captured forwards, drafting only where it pays, and the bench that measures it."""

from __future__ import annotations

import argparse
import gc
import json
import random
import time
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import targets
import tiny_llava
import torch
from drafters import DRAFTERS, Oracle, eagle
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as sdpa

import mmspec
from mmspec import auto, capture
from mmspec.app.bench import command as bench
from mmspec.app.bench import round as bench_round
from mmspec.auto import Auto, Known
from mmspec.capture import Captured, Uncapturable
from mmspec.config import SpecConfig
from mmspec.drafters.eagle import EagleConfig, EagleDrafter
from mmspec.drafters.ngram import NgramDrafter
from mmspec.drafters.plain import Plain
from mmspec.pipelines import compiled, drafting, trusted
from mmspec.pipelines.attention import NAME
from mmspec.pipelines.batching import Flow
from mmspec.pipelines.trusted import Trusted
from mmspec.rules import typical
from mmspec.session import Session
from mmspec.stats import Stats

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
    pytest.param(name, drafter, "sdpa", marks=() if (name, drafter) in DEFAULT else FULL)
    for name in targets.FAMILIES
    for drafter in ("eagle chain", "eagle tree")
]
CASES += [("llava", "empty", attn) for attn in ("sdpa", NAME)]  # transformers packs the heads of a lone node
CASES += [("llava", drafter, NAME) for drafter in ("eagle chain", "eagle tree")]
CASES += [pytest.param("gemma3", "eagle tree", NAME, marks=FULL)]


@pytest.mark.parametrize("name, drafter, attn", CASES)
def test_compiled_is_stock(name: str, drafter: str, attn: str, quick: None, kind: str = "ragged"):
    model, inputs = targets.model(name, attn), targets.prompt(name, kind)
    wanted = targets.generate(targets.model(name), inputs)
    with mmspec.enable(model, DRAFTERS[drafter](model, None), compile=True):
        assert torch.equal(targets.generate(model, inputs), wanted)
        assert torch.equal(targets.generate(model, inputs), wanted)
    held = compiled.of(model)
    assert held._held and all(held._held.values())
    assert all(drafts._held and all(drafts._held.values()) for drafts in held.drafts.values())


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


def test_a_drafter_in_use_forgets_other_weights(quick: None):
    model, inputs = targets.model("llava"), targets.prompt("llava", "text only")
    old = model.lm_head.weight
    with mmspec.enable(model, eagle(model, **CHAIN), compile=True):
        targets.generate(model, inputs)
        (held,) = compiled.of(model).drafts.values()
        before = list(held._held.values())
        try:
            model.lm_head.weight = nn.Parameter(old.detach().clone())
            targets.generate(model, inputs)
        finally:
            model.lm_head.weight = old
    after = list(held._held.values())
    assert before and after and not any(one is other for one in after for other in before)


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
        def make() -> Any:
            trusted.compare([torch.ones(2) + apart], [torch.ones(2)], torch.float32)
            return capture()

        return held.get(key, make)

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


# -- auto=True -------------------------------------------------------------------------------------------------------


@dataclass
class Fake:
    """A drafter of one shape, which proposes nothing that is looked at."""

    nodes: int
    features: tuple[int, ...] = ()

    def propose(self, session: Any, target: Any) -> None:
        return None


class World:
    """Rounds of one row on a clock of their own: what each shape costs and gains.

    Gains are tokens by shape, once it has settled; or how many nodes of any draft stand, one chosen a round.
    """

    def __init__(self, costs: dict[int, float], settles: int = 0) -> None:
        self.costs, self.settles = costs, settles
        self.known = Known(sorted(costs), settles)
        self.auto = Auto(map(Fake, costs), self.known)
        stats = Stats(seconds={"verify": 0.0})
        self.session = SimpleNamespace(rows=[0], pace=None, unread=None, last=None, stats=stats)
        self.noise = random.Random(3)
        self.chosen: list[int] = []

    def play(self, gains: dict[int, float] | list[int], rounds: int) -> World:
        for _ in range(rounds):
            self.auto.propose(self.session, None)
            shape, since = self.session.pace.shape, self.session.pace.since
            if isinstance(gains, list):
                count = min(shape, self.noise.choice(gains))
            else:
                gain = gains[shape] if since > self.settles else 1.0
                count = int(gain) + (self.noise.random() < gain % 1)
            self.session.last = SimpleNamespace(path=(range(count),))
            self.session.stats.seconds["verify"] += self.costs[shape]
            self.session.pace.book(self.session.last, self.session.stats)
            self.chosen.append(shape)
        return self

    @property
    def spent(self) -> float:
        return self.session.stats.seconds["verify"]

    def mostly(self, rounds: int = 200) -> int:
        """The shape of nine in ten of the last rounds; 0: there is none."""
        shape, count = Counter(self.chosen[-rounds:]).most_common(1)[0]
        return shape if count >= 0.9 * rounds else 0


CHAINS = {1: 1.0, 3: 1.2, 5: 1.4, 9: 1.8}
WINDOWS = {1: 1.0, 4: 1.12, 8: 1.24, 16: 1.47}


@pytest.mark.parametrize(
    "costs, gains, settles, best",
    [
        (CHAINS, [9], 0, 9),  # all stands
        (CHAINS, [1, 3, 3, 3], 0, 3),  # what is deeper never stands
        (CHAINS, [1, 5, 5, 6], 0, 5),
        (CHAINS, [1], 0, 1),  # nothing stands
        ({1: 1.0, 5: 5.5}, [5], 0, 1),  # all stands, and still it does not pay
        (WINDOWS, {1: 1, 4: 1.8, 8: 2.6, 16: 4.2}, 4, 16),
        (WINDOWS, {1: 1, 4: 1.8, 8: 3.2, 16: 2.9}, 4, 8),
        (WINDOWS, {1: 1, 4: 2.1, 8: 1.6, 16: 1.5}, 4, 4),
        (WINDOWS, {1: 1, 4: 1.05, 8: 1.05, 16: 1.1}, 4, 1),
        ({1: 1.0, 4: 2.2, 8: 2.3, 16: 2.4}, {1: 1, 4: 1.8, 8: 2.0, 16: 3.2}, 4, 16),  # only the whole pays
    ],
)
def test_the_shape_that_pays_is_chosen(costs: Any, gains: Any, settles: int, best: int):
    assert World(costs, settles).play(gains, 700).mostly() == best


@pytest.mark.parametrize("costs, settles", [({1: 1.0, 9: 1.8}, 0), (CHAINS, 0), (WINDOWS, 4), ({1: 1.0, 16: 1.5}, 4)])
def test_a_hostile_drafter_costs_less_than_three_percent(costs: Any, settles: int):
    world = World(costs, settles).play([1], 1000)
    assert 1000 < world.spent < 1030


@pytest.mark.parametrize("costs", [{1: 1.0, 16: 2.0}, {1: 1.0, 16: 3.8}, {1: 1.0, 4: 1.7, 8: 2.4, 16: 3.8}], ids=str)
def test_looks_at_a_window_that_does_not_pay_cost_less_than_three_percent(costs: Any):
    """Beside what learning costs, once: 16 rounds of each window."""
    world, windows = World(costs, 4), list(costs.values())[1:]
    world.play([1], 16 * len(windows) + auto.SAMPLES)
    assert world.spent == pytest.approx(16 * sum(windows) + auto.SAMPLES)
    for _ in range(4):
        before = world.spent
        assert 1000 <= world.play([1], 1000).spent - before < 1030
    assert len(set(world.chosen[-3000:])) > 1, "looks are rare, and still taken"


@pytest.mark.parametrize("costs, settles, rounds, best", [(CHAINS, 0, 500, 5), (WINDOWS, 4, 1500, 4)])
def test_drafting_is_tried_again_and_begins_where_it_pays(costs: Any, settles: int, rounds: int, best: int):
    world = World(costs, settles).play([1], 100)
    assert world.mostly(10) == 1
    assert world.play([4], rounds).mostly() == best


@pytest.mark.parametrize("settles", [0, 4])
@pytest.mark.parametrize("gains", [[1], [1, 2]], ids=["nothing stands", "too little stands"])
def test_a_machine_that_was_slow_at_first_misleads_no_more(settles: int, gains: list[int]):
    """Rounds without a draft, timed then, seemed to take longer than those with one."""
    world = World({1: 3.0, 9: 1.8}, settles).play([9], 100)
    world.costs[1] = 1.0
    assert world.play(gains, 4000).mostly() == 1


@pytest.mark.parametrize("costs, settles, rounds", [(CHAINS, 0, 400), (WINDOWS, 4, 4000)])
def test_larger_drafts_are_tried_again_where_fewer_tokens_stood(costs: Any, settles: int, rounds: int):
    few = sorted(costs)[1]
    world = World(costs, settles).play([2, 3], 300)
    assert world.mostly(100) == few
    assert world.play([max(costs)], rounds).mostly() == max(costs)


def test_a_round_tells_what_smaller_trees_would_have_gained():
    found = Known((1, 3, 8), 0)
    found.book(2, 8, 1.0, [[0, 2, 5], [0, 4]])
    assert [found.gain(shape) for shape in found.shapes] == [1.0, 1.5, 2.5]
    found.book(2, 3, 1.0, [[0, 1], [0, 2]])
    assert found.gain(8) == 2.5 and 1.7 < found.gain(3) < 1.8


def test_a_round_that_first_read_what_was_missed_says_how_much_it_takes_at_most():
    found = World({1: 1.0, 9: 1.8}).play({1: 1, 9: 9}, 20).known
    found.book(1, 9, 9.0, [range(9)], late=True)
    assert found.cost(1, 9) == pytest.approx(1.8)
    for _ in range(7):
        found.book(1, 9, 1.5, [range(9)], late=True)
    assert found.cost(1, 9) == 1.5


def test_what_was_learned_outlives_a_call_and_what_was_enabled():
    model, inputs, held = targets.model("llava"), targets.prompt("llava", "image first"), []
    drafter = eagle(model)
    for _ in range(2):
        with mmspec.enable(model, drafter, auto=True) as handle:
            held.append(handle.proposer.known)
            targets.generate(model, inputs)
    assert held[0] is held[1] and held[0].costs
    assert drafter.block in drafting._KNOWN[model]
    before = len(drafting._KNOWN[model])
    del drafter, handle
    gc.collect()
    assert len(drafting._KNOWN[model]) < before


class Told(Known):
    """Chooses what it is told to."""

    to_come: tuple[int, ...] = ()

    def choose(self, batch: int) -> int:
        self.turn = getattr(self, "turn", -1) + 1
        return self.to_come[self.turn % len(self.to_come)]


@pytest.mark.parametrize("drafter", ["eagle chain", "eagle tree", "ngram", "jacobi"])
@pytest.mark.parametrize("kind", ["image first", "ragged"])
def test_auto_is_stock_whatever_it_chooses(drafter: str, kind: str, monkeypatch: pytest.MonkeyPatch):
    model, inputs = targets.model("llava"), targets.prompt("llava", kind)
    wanted = targets.generate(model, inputs)
    made = "jacobi" if drafter == "jacobi" else DRAFTERS[drafter](model, None)
    with mmspec.enable(model, made, auto=True) as handle:
        proposer = handle.proposer
        assert isinstance(proposer, Auto)
        none, *shapes = proposer.known.shapes
        assert none == 1 and shapes == {"eagle chain": [2, 3, 5], "eagle tree": [4, 7, 14], "ngram": [3, 4, 6],
                                        "jacobi": [4, 8, 16]}[drafter]  # fmt: skip
        proposer.known = Told(proposer.known.shapes)
        proposer.known.to_come = (shapes[2], 1, 1, shapes[0], shapes[1], 1, shapes[0])
        assert torch.equal(targets.generate(model, inputs), wanted)


def noting(handle: Any, shapes: tuple[int, ...]) -> dict[tuple[int, ...], list[int]]:
    """Makes `auto` choose these in turn; what is then proposed after which text."""
    proposer, made = handle.proposer, {}
    proposer.known = Told(proposer.known.shapes)
    proposer.known.to_come = shapes
    propose = proposer.propose

    def noted(session: Any, target: Any) -> Any:
        draft = propose(session, target)
        for row, line in zip(session.rows, draft.tokens.tolist(), strict=True):
            made[tuple(row.tokens)] = line
        return draft

    proposer.propose = noted
    return made


def same_drafts(always: dict[Any, list[int]], later: dict[Any, list[int]]) -> int:
    """For how many texts both proposed something, which must be the same."""
    both = [text for text in always if len(later.get(text, ())) == len(always[text]) > 1]
    assert all(always[text] == later[text] for text in both)
    return len(both)


@pytest.mark.parametrize("compile", [False, True])
def test_what_was_not_drafted_for_is_read_later(compile: bool, quick: None):
    """After rounds without a draft, however many, a drafter proposes what it would have proposed anyway."""
    model, inputs, drafts = targets.model("llava"), targets.prompt("llava", "ragged"), []
    drafter = eagle(model, **CHAIN)
    for shapes in ((4,), (4, 1, 1, 1), (4, *[1] * 7)):
        with mmspec.enable(model, drafter, auto=True, compile=compile) as handle:
            drafts.append(noting(handle, shapes))
            targets.generate(model, inputs)
    assert same_drafts(drafts[0], drafts[1]) > 4 and same_drafts(drafts[0], drafts[2]) > 2


def test_rows_that_come_do_not_keep_the_others_from_being_read():
    """Beside rounds that nobody drafted for: what was there is read all the same, and so are those that end."""
    model, drafts = targets.model("llava"), []
    drafter = eagle(model, **CHAIN)
    for shapes in ((4,), (4, 1, 1, 1), (4, 1)):
        with mmspec.enable(model, drafter, auto=True) as handle:
            drafts.append(noting(handle, shapes))
            flow = Flow(model, None, 3, max_new_tokens=24, do_sample=False)
            asked = [targets.prompt("llava", kind, seed) for seed, kind in enumerate(("image first", "text only") * 3)]
            while asked or flow.busy:
                while asked and flow.free:
                    flow.add(len(asked), asked.pop(0), 0)
                flow.step()
    assert same_drafts(drafts[0], drafts[1]) > 20 and same_drafts(drafts[0], drafts[2]) > 20


def test_catching_up_after_rows_came_is_no_ordinary_round(monkeypatch: pytest.MonkeyPatch):
    """It says how much a round takes at most, as any does that first reads what was missed."""
    model, admit, missed, booked = targets.model("llava"), Session.admit, [False], []

    def admitted(self: Session, other: Session) -> None:
        missed[0] = missed[0] or bool(self.rows and self.unread.rounds)
        admit(self, other)

    def noted(self: Known, batch: int, shape: int, seconds: float, stood: Any, since: int, late: bool) -> None:
        if missed[0] and shape > 1:
            booked.append(late)
            missed[0] = False

    monkeypatch.setattr(Session, "admit", admitted)
    monkeypatch.setattr(Known, "book", noted)
    with mmspec.enable(model, eagle(model, **CHAIN), auto=True) as handle:
        handle.proposer.known = Told(handle.proposer.known.shapes)
        handle.proposer.known.to_come = (1, 1, 1, 4)
        flow = Flow(model, None, 2, max_new_tokens=15, do_sample=False)
        asked = [targets.prompt("llava", "text only", seed) for seed in range(8)]
        while asked or flow.busy:
            while asked and flow.free:
                flow.add(len(asked), asked.pop(0), 0)
            flow.step()
    assert booked and all(booked)


def test_auto_turns_a_hostile_drafter_off(monkeypatch: pytest.MonkeyPatch):
    model, inputs = targets.model("llava"), targets.prompt("llava", "image first")
    with mmspec.enable(model, eagle(model, nan=True, depth=4, width=1, size=5), auto=True) as handle:
        monkeypatch.setattr(
            auto.statistics, "median", lambda held: 1.0 + (held is not handle.proposer.known.times.get((1, 1)))
        )
        targets.generate(model, inputs, max_new_tokens=40)
    assert handle.stats.drafted <= 4 * (auto.SAMPLES + 1) and handle.stats.rounds == 39


@pytest.mark.parametrize("draws", [False, True])
def test_less_of_a_chain_is_a_chain(draws: bool):
    """Whatever its checkpoint says of trees."""
    model = targets.model("llava")
    drafter = eagle(model, depth=8, width=4, size=30, tree="chain", draws=draws)
    with mmspec.enable(model, drafter, auto=True) as handle:
        each = handle.proposer.drafters
    assert list(each) == [3, 5, 9] and handle.proposer.known.shapes == (1, 3, 5, 9)
    assert {(one.options.tree, one.options.draws) for one in each.values()} == {("chain", draws)}


def test_no_shape_stands_twice_or_above_the_whole():
    class Odd(Plain):
        nodes = 6
        less = ({"depth": 9}, {"depth": 4}, {"depth": 4}, {"depth": 6})

        def fit(self, target: Any, config: Any) -> Any:
            made = Odd()
            made.nodes = config.depth
            return made

    proposer = drafting.proposer(targets.model("llava"), Odd(), SpecConfig(auto=True), None)
    assert list(proposer.drafters) == [4, 6] and proposer.known.shapes == (1, 4, 6)


def test_auto_reads_nothing_more(monkeypatch: pytest.MonkeyPatch):
    model, inputs, found = targets.model("llava"), targets.prompt("llava", "ragged"), []
    tolist, reads = Tensor.tolist, []
    monkeypatch.setattr(Tensor, "tolist", lambda self: (reads.append(1), tolist(self))[1])
    for options in ({}, {"auto": True}):
        with mmspec.enable(model, eagle(model, depth=4, width=3, size=14), **options) as handle:
            if options:
                handle.proposer.known = Told((1, 14))
                handle.proposer.known.to_come = (14,)
            reads.clear()
            targets.generate(model, inputs)
            found.append((len(reads), handle.stats.rounds))
    assert found[0] == found[1]


def test_rows_that_come_are_not_booked_as_rounds(monkeypatch: pytest.MonkeyPatch):
    """What reading their prompts took, and the token that it gave, are of no round; Flow hands stats out in between."""
    model, rounds, booked = targets.model("llava"), [], []
    asked = [targets.prompt("llava", kind, seed) for seed, kind in enumerate(("image first", "text only") * 3)]
    settings = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": list(range(5, 30))}
    alone = [targets.generate(model, one, **settings)[0, one["input_ids"].shape[1] :].tolist() for one in asked]
    start, count = EagleDrafter.start, Session.count

    def slow(self: Any, session: Any, *rest: Any) -> Any:
        session.stats.seconds["draft"] = 1e6
        return start(self, session, *rest)

    def counted(self: Any, round_: Any) -> None:
        rounds.append([*map(list, round_.path)])
        count(self, round_)

    monkeypatch.setattr(EagleDrafter, "start", slow)
    monkeypatch.setattr(Session, "count", counted)
    monkeypatch.setattr(Known, "book", lambda self, batch, shape, *told: booked.append(told[:2]))
    with mmspec.enable(model, eagle(model, depth=3, width=3, size=9), auto=True) as handle:
        handle.proposer.known = Told(handle.proposer.known.shapes)
        handle.proposer.known.to_come = (9, 1)
        flow, found = Flow(model, None, 2, **settings), {}
        while asked or flow.busy:
            while asked and flow.free:
                flow.add(6 - len(asked), asked.pop(0), 0)
            found.update((end.ticket, end.tokens) for end in flow.step())
    assert [found[n] for n in range(6)] == alone
    assert [[*map(list, stood)] for _, stood in booked] == rounds and len({len(stood) for _, stood in booked}) == 2
    assert all(0 < seconds < 1e5 for seconds, _ in booked)


def test_only_what_changes_drafting_is_known_apart():
    model, made = targets.model("llava"), eagle(targets.model("llava"))

    def known(drafter: Any, **options: Any) -> Known:
        with mmspec.enable(model, drafter, auto=True, **options) as handle:
            return handle.proposer.known

    assert known(made) is known(made, on_unsupported="fallback")
    relaxed = [known(made, rule=typical(epsilon=0.3, delta=0.1), budget=budget) for budget in (None, 0.5)]
    assert relaxed[0] is relaxed[1] is not known(made), "how much is kept is another matter"
    assert known("ngram") is known(NgramDrafter()) is not known(NgramDrafter(orders=(2,)))
    assert known("ngram") is not known("ngram", depth=3)


@pytest.mark.parametrize("drafter", ["ngram", "eagle"])
def test_a_chain_has_depth_and_one_nodes(drafter: str):
    model = targets.model("llava")
    made = drafter if drafter == "ngram" else eagle(model, depth=5, width=4, size=30)
    with mmspec.enable(model, made, width=1, size=4) as handle:
        assert handle.drafter.nodes == 4
        targets.generate(model, targets.prompt("llava", "image first"))
        assert max(handle.stats.accepted_by_depth, default=0) < 4
        assert handle.stats.drafted <= 3 * handle.stats.row_rounds
    for wrong in ({"depth": 5, "size": 4}, {"size": 1}):
        with pytest.raises(ValueError, match=r"a chain .* d \+ 1 ≥ 2 nodes; got depth=(5|None), size=(4|1)"):
            mmspec.enable(model, made, width=1, **wrong)


def test_auto_says_what_it_cannot_do():
    model = targets.model("llava")
    with pytest.raises(ValueError, match="auto chooses how much is drafted, and Scripted cannot be told to draft less"):
        mmspec.enable(model, DRAFTERS["always right"](model, Oracle({})), auto=True)


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
    words += ["--auto", "--methods", "plain", "plain compiled", "eagle", "eagle compiled"]  # no others
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
