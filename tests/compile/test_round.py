"""The cost of a round: captured forwards, drafting only where it pays, and the bench that measures it."""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_llava
import tiny_vlms
import torch
import uncompiled
from compared import alone, answers, as_stock, drain
from hostile_drafters import eagle
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as sdpa
from uncompiled import as_it_is

import mmspec
from benchmarks.suites import SUITES
from benchmarks.suites import round as bench_round
from mmspec.app import compare
from mmspec.app.bench import command as bench
from mmspec.compile import capture
from mmspec.compile.capture import PiecewiseFunction, Uncapturable
from mmspec.compile.capture_cache import CaptureCache
from mmspec.drafters.eagle import EagleConfig, EagleDrafter
from mmspec.drafters.ngram import NgramDrafter
from mmspec.drafters.plain import Plain
from mmspec.drafters.shape import Shape
from mmspec.pipelines.host.tree_attention import NAME
from mmspec.pipelines.patching import drafting
from mmspec.pipelines.serving import continuous
from mmspec.pipelines.serving.continuous import ContinuousBatcher
from mmspec.pipelines.target import captures
from mmspec.rules import typical
from mmspec.session import Session
from mmspec.statistics import Stats
from mmspec.switch import LOOK, PLAIN, Prices, RoundCosts, Switch
from mmspec.tree import lone

FULL = pytest.mark.full
FOREIGN = torch.ones(3)
CHAIN = {"depth": 3, "width": 1, "size": 4}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces are run, not compiled; and nothing may fall back to the stock forward."""
    uncompiled.pieces(monkeypatch)


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
    captured = PiecewiseFunction(layers, [torch.randn(2, 3, 16)], layers.parameters(), compile)
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
        PiecewiseFunction(function, [torch.ones(3)], [], as_it_is)


def test_what_depends_on_the_variant_is_not_captured():
    with pytest.raises(Uncapturable, match="the length of the cached prefix"):
        PiecewiseFunction(lambda past, x: [x * past], [torch.ones(3)], [], as_it_is, variants=(3, 4))
    captured = PiecewiseFunction(
        lambda past, x: [x * 2, (x * past)[:0]][:1], [torch.ones(3)], [], as_it_is, variants=(3, 4)
    )
    assert captured(attention, torch.full((3,), 2.0))[0].tolist() == [4.0] * 3


# -- compile=True ----------------------------------------------------------------------------------------------------

DEFAULT = {("llava", "eagle chain"), ("qwen2_5_vl", "eagle tree"), ("gemma3", "eagle chain")}
CASES = [
    pytest.param(name, drafter, "sdpa", marks=() if (name, drafter) in DEFAULT else FULL)
    for name in tiny_vlms.FAMILIES
    for drafter in ("eagle chain", "eagle tree")
]
CASES += [("llava", "empty", attn) for attn in ("sdpa", NAME)]  # transformers packs the heads of a lone node
CASES += [("llava", drafter, NAME) for drafter in ("eagle chain", "eagle tree")]
CASES += [pytest.param("gemma3", "eagle tree", NAME, marks=FULL)]


@pytest.mark.parametrize("name, drafter, attn", CASES)
@pytest.mark.every(12)
def test_compiled_is_stock(name: str, drafter: str, attn: str, quick: None):
    model = tiny_vlms.model(name, attn)
    as_stock(model, tiny_vlms.prompt(name, "ragged"), drafter, times=2, compile=True)
    held = captures.of(model)
    assert held._captures and all(held._captures.values())
    assert all(drafts._captures and all(drafts._captures.values()) for drafts in held.drafts.values())


@pytest.mark.full
def test_a_drafter_in_use_forgets_other_weights(quick: None):
    model, inputs = tiny_vlms.model("llava"), tiny_vlms.prompt("llava", "text only")
    old = model.lm_head.weight
    with mmspec.enable(model, eagle(model, **CHAIN), compile=True):
        tiny_vlms.generate(model, inputs)
        (held,) = captures.of(model).drafts.values()
        before = list(held._captures.values())
        try:
            model.lm_head.weight = nn.Parameter(old.detach().clone())
            tiny_vlms.generate(model, inputs)
        finally:
            model.lm_head.weight = old
    after = list(held._captures.values())
    assert before and after and not any(one is other for one in after for other in before)


def test_other_buffers_and_another_attention_are_captured_anew(quick: None):
    held, layer = CaptureCache("a layer"), nn.BatchNorm1d(2)
    held.check(layer)
    held._captures["shape"] = None
    held.check(layer)
    assert held._captures
    layer.running_mean = torch.ones(2)
    held.check(layer)
    assert not held._captures
    model, inputs = tiny_vlms.model("llava", "eager"), tiny_vlms.prompt("llava", "text only")
    try:
        with mmspec.enable(model, Plain(), compile=True):
            with pytest.warns(UserWarning, match="uncompiled: .*'eager'"):
                tiny_vlms.generate(model, inputs)
            model.set_attn_implementation("sdpa")
            tiny_vlms.generate(model, inputs)
            assert any(captures.of(model)._captures.values())
    finally:
        model.set_attn_implementation("eager")
        tiny_vlms.model("llava").set_attn_implementation("sdpa")


def test_a_shape_is_captured_once_by_all_threads():
    held, made, captured = CaptureCache("a layer"), [], SimpleNamespace()

    def built() -> Any:
        made.append(time.sleep(0.1))
        return captured

    def get(key: str, apart: float = 0.0, build: Any = built) -> Any:
        def make() -> Any:
            capture.compare([torch.ones(2) + apart], [torch.ones(2)], torch.float32)
            return build()

        return held.get(key, make)

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(get, ["shape"] * 3)) == [captured] * 3 and len(made) == 1
    with pytest.warns(UserWarning, match="a layer uncompiled: .* nan away"):
        assert get("other", float("nan")) is None
    get("late", build=lambda: held.check(nn.Linear(2, 2)) or captured)  # another thread's call finds other weights
    assert not held._captures


def test_only_full_and_lasting_batches_are_captured(quick: None, monkeypatch: pytest.MonkeyPatch):
    """At the end of a run a batch takes every size below its own, each of which would wait for a compiler."""
    model, prompt = tiny_vlms.model("llava"), tiny_vlms.prompt("llava", "image first")

    def sizes() -> set[int]:
        return {shape[0][2][0] for shape in captures.of(model)._captures}

    with mmspec.enable(model, "ngram", compile=True):
        flow = ContinuousBatcher(model, None, 2, max_new_tokens=6)
        drain(flow, [prompt] * 3)
        assert sizes() == {2}
        monkeypatch.setattr(continuous, "LASTING", 2)
        drain(flow, [prompt])
        assert sizes() == {1, 2}


WRONG = {"wrong": lambda piece, examples: lambda *a: [-t for t in piece(*a)], "no compiler": lambda *a: 1 / 0}


@pytest.mark.parametrize("what", ["eager", "adapters", "wrong", "no compiler"])
@pytest.mark.every(2)
def test_what_cannot_be_captured_runs_as_it_is(what: str, monkeypatch: pytest.MonkeyPatch):
    uncompiled.pieces(monkeypatch, WRONG.get(what, as_it_is))
    model = tiny_vlms.model("llava", "eager" if what == "eager" else "sdpa")
    if what == "adapters":
        monkeypatch.setattr(model.lm_head, "base_layer", None, raising=False)
    why = {"eager": "'eager'", "adapters": "adapters", "wrong": "away from", "no compiler": "ZeroDivisionError"}
    with pytest.warns(UserWarning, match=f"uncompiled: .*{why[what]}"):
        as_stock(model, tiny_vlms.prompt("llava", "text only"), Plain(), compile=True)
    tiny_vlms.model("llava").set_attn_implementation("sdpa")


@FULL
def test_compiled_by_the_compiler_is_stock():
    model = tiny_vlms.model("llava")
    as_stock(model, tiny_vlms.prompt("llava", "image first"), eagle(model, **CHAIN), times=2, compile=True)


# -- auto=True -------------------------------------------------------------------------------------------------------


@dataclass
class Fake:
    """A drafter whose drafts nobody looks at."""

    nodes: int = 9
    features: tuple[int, ...] = ()

    def start(self, session: Any, target: Any, prompt: Any) -> None:
        return None

    def propose(self, session: Any, target: Any) -> Any:
        return lone(torch.zeros(len(session.rows), 1).long())


class World:
    """Calls of one switch on a clock of its own: what plain and drafted rounds cost, and the gains of the latter."""

    def __init__(self, plain: float, drafted: float, grid: tuple[int, int] | None = None) -> None:
        self.plain, self.drafted, self.costs, self.noise = plain, drafted, RoundCosts(), random.Random(3)
        self.prompt: Any = SimpleNamespace(grid=grid)
        self.chosen: list[bool] = []  # of each round, whether its draft was tested

    def call(self, gains: list[int], rounds: int, rows: int = 1) -> float:
        """Seconds of a call; a probe takes as long as drafting and a plain round."""
        stats, fake = Stats(seconds={"draft": 0.0, "verify": 0.0}), Fake()
        session = SimpleNamespace(rows=[0] * rows, stats=stats, pending=torch.zeros(rows).long())
        switch = Switch(fake, self.costs)
        session.memory = switch.start(session, None, self.prompt)
        for _ in range(rounds):
            switch.propose(session, None)
            *_, drafted = session.memory.before_round
            gained = sum(self.noise.choice(gains) for _ in range(rows)) if drafted else rows
            stats.seconds["draft"] += (self.drafted - self.plain) * session.memory.on
            stats.seconds["verify"] += self.plain
            stats.rounds, stats.row_rounds = stats.rounds + 1, stats.row_rounds + rows
            stats.gained, stats.tokens = stats.gained + gained, stats.tokens + gained
            self.chosen.append(drafted)
        return sum(stats.seconds.values())

    def play(self, gains: list[int], calls: int, rounds: int = 30) -> float:
        """Seconds of some calls."""
        return sum(self.call(gains, rounds) for _ in range(calls))

    def mostly(self, rounds: int = 200) -> float:
        """The share of the last rounds whose drafts were tested."""
        return sum(self.chosen[-rounds:]) / len(self.chosen[-rounds:])


@pytest.mark.parametrize(
    "drafted, gains, share",
    [(1.8, [9], 1.0), (1.8, [2, 3], 1.0), (1.2, [1, 2, 3], 1.0), (1.8, [1], 0.0), (5.5, [5], 0.0), (2.5, [2], 0.0)],
)
def test_drafting_is_on_where_it_pays(drafted: float, gains: list[int], share: float):
    world = World(1.0, drafted)
    world.play(gains, 60)
    assert abs(world.mostly() - share) < 0.06


@pytest.mark.parametrize("rounds", [5, 30, 300])
@pytest.mark.parametrize("drafted", [1.1, 1.8, 3.8])
@pytest.mark.every(2)
def test_a_hostile_drafter_costs_less_than_three_percent(drafted: float, rounds: int):
    """Beside what learning costs, once: trials are rare, and still made."""
    world = World(1.0, drafted)
    world.play([1], max(4, 20 // rounds), rounds)
    spent = [world.call([1], rounds) for _ in range(20000 // rounds)]
    assert sum(spent) < 1.03 * len(spent) * rounds
    assert median(spent) < 1.03 * rounds
    assert any(world.chosen[-15000:])


def test_drafting_is_tried_again_and_stays_on_where_it_pays():
    world = World(1.0, 1.8)
    world.play([1], 10)
    assert world.mostly() < 0.1
    world.play([4], 60)
    assert world.mostly() > 0.9


def test_drafting_goes_off_when_it_pays_no_more():
    world = World(1.0, 1.8)
    world.play([4], 10)
    world.play([1], 4)
    assert world.mostly(60) == 0


def test_a_picture_is_judged_as_a_whole():
    """Its first rounds gain little."""
    world = World(1.0, 1.8, grid=(8, 8))
    for _ in range(20):
        gains = iter([1] * 16 + [6] * 8)
        world.noise.choice = lambda _, gains=gains: next(gains)
        world.call([], 24)
    assert world.mostly() > 0.9
    world.noise = random.Random(3)
    world.play([1], 20, rounds=64)
    assert world.mostly() == 0


@pytest.mark.parametrize("gains", [[1], [1, 2]], ids=["nothing stands", "too little stands"])
def test_a_machine_that_was_slow_at_first_misleads_no_more(gains: list[int]):
    """Rounds without a draft, timed then, seemed to take longer than those with one."""
    world = World(3.0, 3.1)
    world.play([4], 4)
    world.plain, world.drafted = 1.0, 1.8
    world.play(gains, 40)
    assert world.mostly(400) < 0.1


def test_batch_sizes_are_judged_each_for_itself():
    world = World(1.0, 1.8)
    for _ in range(3):
        world.call([3], 40)
        world.drafted = 4.0
        world.call([3], 40, rows=8)
        world.drafted = 1.8
    assert [world.costs.pays(size) for size in (1, 2, 8)] == [True, None, False]
    assert world.costs.tries(1) and not world.costs.tries(16), "the nearest size speaks for one that nobody knows"


def test_a_round_that_a_compiler_held_up_counts_as_two():
    costs = RoundCosts()
    for _ in range(PLAIN):
        costs.book(1, False, 1.0, 1.0)
    for n in range(LOOK):
        costs.book(1, True, 100.0 if n == 0 else 1.5, 3.0)
    assert costs.pays(1)


def test_what_was_learned_outlives_a_call_and_what_was_enabled():
    model, inputs, held = tiny_vlms.model("llava"), tiny_vlms.prompt("llava", "image first"), []
    drafter = eagle(model)
    for _ in range(2):
        with mmspec.enable(model, drafter, auto=True) as handle:
            held.append(handle.proposer.costs)
            tiny_vlms.generate(model, inputs)
    assert held[0] is held[1] and held[0].seconds > 0
    assert drafter.block in drafting._COSTS[model]
    before = len(drafting._COSTS[model])
    del drafter, handle
    gc.collect()
    assert len(drafting._COSTS[model]) < before


class Told(RoundCosts):
    """Leaves drafts out as it is told to; `off`: after so many rounds for good."""

    def __init__(self, plain: tuple[bool, ...], off: int = 10**6) -> None:
        super().__init__()
        self.turns, self.off, self.rounds = itertools.cycle(plain), off, 0
        self.booked: list[tuple[int, bool, float, float]] = []

    def book(self, *round_: Any) -> None:
        self.booked.append(round_)

    def pays(self, batch: int) -> bool | None:
        self.rounds += 1
        return self.rounds <= self.off

    def wants_plain(self, batch: int) -> bool:
        return next(self.turns)

    def tries(self, batch: int) -> bool:
        return True


@pytest.mark.parametrize("drafter", ["eagle chain", "eagle tree", "ngram", "jacobi", "always right"])
@pytest.mark.parametrize("kind", ["image first", "ragged"])
@pytest.mark.every(2)
def test_auto_is_stock_whatever_it_chooses(drafter: str, kind: str):
    for off in (3, 10**6):

        def chosen(handle: Any, off: int = off) -> None:
            switch = getattr(handle.proposer, "drafter", None) if drafter == "always right" else handle.proposer
            assert isinstance(switch, Switch)
            switch.costs = Told((False, True, True, False, False, True), off)

        as_stock(tiny_vlms.model("llava"), tiny_vlms.prompt("llava", kind), drafter, begun=chosen, auto=True)


def noting(handle: Any, plain: tuple[bool, ...]) -> dict[tuple[int, ...], list[int]]:
    """Makes `auto` leave these out in turn; what is then proposed after which text."""
    proposer, made = handle.proposer, {}
    proposer.costs = Told(plain)
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
@pytest.mark.every(4)
def test_a_drafter_whose_drafts_were_left_out_proposes_what_it_would_have(compile: bool, quick: None):
    model, inputs, drafts = tiny_vlms.model("llava"), tiny_vlms.prompt("llava", "ragged"), []
    drafter = eagle(model, **CHAIN)
    for plain in ((False,), (False, True, True, True), (False, *[True] * 7)):
        with mmspec.enable(model, drafter, auto=True, compile=compile) as handle:
            drafts.append(noting(handle, plain))
            tiny_vlms.generate(model, inputs)
    assert same_drafts(drafts[0], drafts[1]) > 4 and same_drafts(drafts[0], drafts[2]) > 2


def test_what_is_known_not_to_pay_is_not_even_read_for():
    model, inputs = tiny_vlms.model("llava"), tiny_vlms.prompt("llava", "ragged")
    with mmspec.enable(model, eagle(model, **CHAIN), auto=True) as handle:
        costs = handle.proposer.costs = RoundCosts()
        for _ in range(LOOK):
            costs.book(4, True, 2.0, 1.0)
            costs.book(4, False, 1.0, 1.0)
        costs.lost = 10.0
        tiny_vlms.generate(model, inputs)
        assert handle.stats.drafted == 0 and not handle.stats.drafter and handle.stats.rounds > 0


def test_auto_turns_a_hostile_drafter_off(monkeypatch: pytest.MonkeyPatch):
    """Once it has been looked at; then for the rest of the call, and for the calls after it."""
    model, inputs = tiny_vlms.model("llava"), tiny_vlms.prompt("llava", "image first")
    book = RoundCosts.book
    monkeypatch.setattr(
        RoundCosts, "book", lambda self, batch, drafted, _, gained: book(self, batch, drafted, 1.0 + drafted, gained)
    )
    with mmspec.enable(model, eagle(model, nan=True, depth=4, width=1, size=5), auto=True) as handle:
        for _ in range(3):
            tiny_vlms.generate(model, inputs, max_new_tokens=40)
    assert handle.stats.drafted == 4 * LOOK and handle.stats.rounds == 3 * 39


def test_auto_reads_nothing_more(monkeypatch: pytest.MonkeyPatch):
    model, inputs, found = tiny_vlms.model("llava"), tiny_vlms.prompt("llava", "ragged"), []
    tolist, reads = Tensor.tolist, []
    monkeypatch.setattr(Tensor, "tolist", lambda self: (reads.append(1), tolist(self))[1])
    for options in ({}, {"auto": True}):
        with mmspec.enable(model, eagle(model, depth=4, width=3, size=14), **options) as handle:
            if options:
                handle.proposer.costs = Told((False,))
            reads.clear()
            tiny_vlms.generate(model, inputs)
            found.append((len(reads), handle.stats.rounds))
    assert found[0] == found[1]


@pytest.mark.parametrize("off", [4, 10**6])
def test_rows_that_come_are_not_booked_as_rounds(off: int, monkeypatch: pytest.MonkeyPatch):
    """What reading their prompts took, and the token that it gave, are of no round; ContinuousBatcher hands stats out
    in between."""
    model, rounds = tiny_vlms.model("llava"), []
    asked = [tiny_vlms.prompt("llava", kind, seed) for seed, kind in enumerate(("image first", "text only") * 3)]
    settings = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": list(range(5, 30))}
    wanted = [alone(model, one, **settings) for one in asked]
    start, count = EagleDrafter.start, Session.count

    def slow(self: Any, session: Any, *rest: Any) -> Any:
        session.stats.seconds["draft"] = 1e6
        return start(self, session, *rest)

    def counted(self: Any, round_: Any) -> None:
        rounds.append((len(self.rows), sum(map(len, round_.new)) / len(self.rows)))
        count(self, round_)

    monkeypatch.setattr(EagleDrafter, "start", slow)
    monkeypatch.setattr(Session, "count", counted)
    with mmspec.enable(model, eagle(model, depth=3, width=3, size=9), auto=True) as handle:
        costs = handle.proposer.costs = Told((False, True), off)
        assert answers(ContinuousBatcher(model, None, 2, **settings), asked) == wanted
    assert {(batch, gained) for batch, _, _, gained in costs.booked} <= {*rounds} and len(costs.booked) > 4
    assert {drafted for _, drafted, _, _ in costs.booked} == {True, False}
    assert all(0 < seconds < 1e5 for _, _, seconds, _ in costs.booked)


def test_only_what_changes_drafting_is_known_apart():
    model, made = tiny_vlms.model("llava"), eagle(tiny_vlms.model("llava"))

    def costs(drafter: Any, **options: Any) -> RoundCosts:
        with mmspec.enable(model, drafter, auto=True, **options) as handle:
            return handle.proposer.costs

    assert costs(made) is costs(made, on_unsupported="fallback")
    relaxed = [costs(made, rule=typical(epsilon=0.3, delta=0.1), budget=budget) for budget in (None, 0.5)]
    assert relaxed[0] is relaxed[1] is not costs(made), "how much is kept is another matter"
    assert costs("ngram") is costs(NgramDrafter()) is not costs(NgramDrafter(orders=(2,)))
    assert costs("ngram") is not costs("ngram", depth=3)


@pytest.mark.parametrize("drafter", ["ngram", "eagle"])
def test_a_chain_has_depth_and_one_nodes(drafter: str):
    model = tiny_vlms.model("llava")
    made = drafter if drafter == "ngram" else eagle(model, depth=5, width=4, size=30)
    with mmspec.enable(model, made, width=1, size=4) as handle:
        assert handle.drafter.nodes == 4
        tiny_vlms.generate(model, tiny_vlms.prompt("llava", "image first"))
        assert max(handle.stats.accepted_by_depth, default=0) < 4
        assert handle.stats.drafted <= 3 * handle.stats.row_rounds
    for wrong in ({"depth": 5, "size": 4}, {"size": 1}):
        with pytest.raises(ValueError, match=r"a chain .* d \+ 1 ≥ 2 nodes; got depth=(5|None), size=(4|1)"):
            mmspec.enable(model, made, width=1, **wrong)


# -- benchmarks round -------------------------------------------------------------------------------------------------


def test_the_bench_sets_a_drafter_of_random_weights_beside_each(tmp_path: Path):
    torch.manual_seed(7)
    mine = EagleDrafter(EagleConfig(64, 32, 2, 2, 128, shape=Shape.chain(3)))
    mmspec.save_drafter(mine, tmp_path)
    parser = argparse.ArgumentParser()
    bench_round.configure(parser)
    words = ["--auto", "--no-compile", "--drafter", str(tmp_path), "--without", "stock-static", "ngram"]
    args = parser.parse_args(words)
    found = {m.name: m for m in bench_round.methods(tiny_vlms.model("llava"), args)}
    names = ["stock", "hf-prompt-lookup", "plain", "eagle", "eagle auto", "hostile eagle", "hostile eagle auto"]
    assert sorted(found) == sorted(names) and found["hostile eagle auto"].options == {"auto": True}
    other = found["hostile eagle"].drafter
    assert other.config == mine.config and not torch.equal(other.block.qkv.weight, mine.block.qkv.weight)


@pytest.mark.full
def test_the_bench_says_where_a_round_goes(tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compare, "PEAKS", 1)
    folder = tiny_llava.save(tmp_path / "model")
    mmspec.save_drafter(EagleDrafter(EagleConfig(64, 32, 2, 2, 128, shape=Shape.chain(3))), tmp_path / "drafter")
    parser = argparse.ArgumentParser()
    bench.configure(parser, SUITES)
    words = ["--images", "2", "--prompt", "short", "--max-new-tokens", "12", "--profile"]
    words += ["--auto", "--methods", "plain", "plain compiled", "eagle", "eagle compiled"]  # no others
    words += ["--model", str(folder), "--drafter", str(tmp_path / "drafter"), "--json", str(tmp_path / "found.json")]
    assert bench.run(parser.parse_args(["round", *words])) == 0
    found = {r["method"]: r for r in json.loads((tmp_path / "found.json").read_text())["records"]}
    assert list(found) == ["stock", "plain", "plain compiled", "eagle", "eagle compiled"]
    for record in found.values():
        assert record["suite"] == "round" and record["identical_rate"] == 1.0 and record["step_ms"] > 0
    eagle_ = found["eagle"]
    assert set(eagle_["parts_ms"]) == {"draft", "verify", "accept", "commit"} and not found["stock"]["parts_ms"]
    assert sum(eagle_["parts_ms"].values()) <= 1.5 * eagle_["step_ms"]
    assert eagle_["reads"] == 1.0, "one read of the accepted path"
    assert 0 < found["plain compiled"]["ops"] < found["plain"]["ops"] and len(eagle_["top"]) == 12
    nodes = {name: record["nodes_per_call"] for name, record in found.items()}
    assert nodes == {"stock": 1.0, "plain": 1.0, "plain compiled": 1.0, "eagle": 4.0, "eagle compiled": 4.0}
    assert 0 < found["plain"]["least_ms"] <= eagle_["least_ms"]
    for record in found.values():
        forward = record["parts_ms"].get("verify", record["step_ms"])
        assert record["share_of_limit"] == pytest.approx(record["least_ms"] / forward, rel=1e-5)  # six digits are kept


def test_more_nodes_take_longer_at_least_once_the_weights_are_not_what_takes_the_time():
    model = tiny_vlms.model("llava")
    found, head = bench_round.roofline(model), model.lm_head.weight
    layers = [m.weight for m in model.get_decoder().modules() if isinstance(m, nn.Linear)]
    assert found.bytes == 4 * (sum(w.numel() for w in layers) + head.numel()) and found.products == found.bytes // 2
    known = bench_round.Roofline(bytes=1000, products=500, bytes_per_s=1e6, products_per_s=2e6)
    assert [known.least_ms(n) for n in (1, 4, 8)] == [1.0, 1.0, 2.0]


# -- drafters without weights ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", ["ngram", "suffix", "recycle"])
def test_drafters_without_weights_are_switched_where_nobody_asks(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a seed draws the same whether they draft or not."""
    monkeypatch.setattr(drafting, "SWITCHED", True)
    model, inputs = tiny_vlms.model("llava"), tiny_vlms.prompt("llava", "ragged")

    def drawn(**options: object) -> tuple[list[list[int]], object, Stats]:
        torch.manual_seed(5)
        with mmspec.enable(model, drafter, **options) as handle:
            out = tiny_vlms.generate(model, inputs, max_new_tokens=30, do_sample=True, temperature=0.3)
        return out.tolist(), handle.proposer, handle.stats

    always, plain, _ = drawn(auto=False)
    assert not isinstance(plain, Switch) and not isinstance(drawn(rule="typical(epsilon=0.3, delta=0.1)")[1], Switch)
    for pays in (True, False):
        price = (lambda nodes: 1.0) if pays else (lambda nodes: nodes + 9.0)
        monkeypatch.setattr(Prices, "of", lambda self, batch, device, price=price: price)
        found, switch, stats = drawn()
        assert found == always and isinstance(switch, Switch)
        assert pays or not stats.drafted
