"""PiecewiseFunction drafts: chains and trees of feature drafters, compiled, are what the drafters propose by
themselves."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import published_mtp
import pytest
import tiny_image_models
import tiny_vlms
import torch
import torch._inductor
import uncompiled
from hostile_drafters import DRAFTERS, Oracle, eagle, feature_drafter
from torch import Tensor

import mmspec
from mmspec import rules
from mmspec.compile import capture, inductor
from mmspec.compile import draft as captured
from mmspec.compile.capture import PiecewiseFunction
from mmspec.compile.draft import CapturedDraft
from mmspec.drafters.block_config import BlockConfig
from mmspec.drafters.dflash import BlockDrafter
from mmspec.drafters.eagle import EagleDrafter
from mmspec.pipelines.target import captures
from mmspec.types import Draft

FULL = pytest.mark.full
TREE = {"depth": 3, "width": 3, "size": 10}
STATIC = {"tree": "reverse_balanced_25"}
CHAIN, DRAWN = {"tree": "chain", "depth": 3}, STATIC | {"draws": True}
Model = Any


@pytest.fixture(autouse=True)
def drafts_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only drafts are captured, and their pieces run as they are; whatever falls back fails."""
    uncompiled.pieces(monkeypatch, uncompiled.strictly, forwards=False)


def flat(model: Model, **options: Any) -> EagleDrafter:
    """A drafter whose distributions are nearly flat, so that some of what it draws stands where the target's are flat,
    too."""
    made = eagle(model, **options)
    with torch.no_grad():
        for weight in made.parameters():
            weight.mul_(0.1)
    return made


def held(model: Model) -> list[PiecewiseFunction]:
    """All drafts that are captured for a model."""
    return [captured for one in captures.of(model).drafts.values() for captured in one._captures.values()]


class Beside:
    """In the place of `CapturedDraft.propose`: proposes both ways, and compares.

    With an oracle the tokens of some paths are then replaced by the right ones, so that rows keep more or fewer.
    """

    def __init__(self, oracle: Oracle | None) -> None:
        self.oracle, self.captured = oracle, CapturedDraft.propose
        self.counts: list[tuple[int, ...]] = []
        self.noise = torch.Generator().manual_seed(5)

    def __call__(self, drafter: CapturedDraft, session: Any, target: Any) -> Draft:
        memory, before = session.memory, vars(session.memory).copy()
        plain = drafter.drafter.propose(session, target)
        after = memory.lengths, memory.positions
        vars(memory).update(before)
        mine = self.captured(drafter, session, target)
        assert memory.lengths.host == after[0].host and torch.equal(memory.lengths.device, after[0].device)
        assert torch.equal(memory.positions, after[1])
        for name in ("parents", "depth", "ancestors"):
            assert torch.equal(getattr(mine.tree, name), getattr(plain.tree, name))
        assert torch.equal(mine.tokens, plain.tokens) and mine.tree.is_chain == plain.tree.is_chain
        assert (mine.q is None) == (plain.q is None)
        if mine.q is not None:
            distributions = [draft.q.logits.softmax(-1) for draft in (mine, plain)]
            torch.testing.assert_close(*distributions, rtol=1e-3, atol=1e-4)
        self.counts.append(session.last.counts)
        return mine if self.oracle is None else self._righted(mine, session)

    def _righted(self, draft: Draft, session: Any) -> Draft:
        tokens = draft.tokens.clone()
        rows = zip(session.rows, tokens, draft.tree.depth, draft.tree.ancestors, strict=True)
        for row, line, depth, ancestors in rows:
            path = ancestors[depth.argmax()].nonzero()[1:, 0]
            right = int(torch.randint(len(path) + 1, (), generator=self.noise))
            line[path[:right]] = torch.tensor(self.oracle.after(row, right), dtype=torch.long)
        return Draft(tokens, draft.tree)


def block(model: Model, **config: Any) -> BlockDrafter:
    """Of random weights, whose distributions are nearly flat."""
    sizes = {"hidden": 64, "intermediate": 48, "heads": 4, "kv_heads": 2, "vocab": tiny_vlms.VOCAB, "layers": 2}
    drafter = BlockDrafter(BlockConfig.of({**sizes, "features": (1, -1), "block": 5, "mask_token": 5, **config}))
    with torch.no_grad():
        for weight in drafter.parameters():
            weight.copy_(0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(2)))
    return drafter.eval()


CASES: dict[str, tuple[Callable[[Model], Any], dict[str, Any]]] = {
    **{name: (lambda model, name=name: DRAFTERS[name](model, None), {}) for name in
       ("eagle chain", "eagle tree", "eagle NaN", "eagle-3", "vispec", "msd", "flash", "specvlm")},
    "eagle static": (eagle, STATIC),
    "eagle-3 static": (lambda model: eagle(model, draft_vocab=50), STATIC),
    "flash by steps": (lambda model: feature_drafter("flash", model, tokens=1, latents=3, least=1), TREE),
    "flash chain": (lambda model: feature_drafter("flash", model, latents=3, least=1), {"tree": "chain", "depth": 4}),
    "block": (block, {}),
    "block, anchored, with heads": (lambda model: block(model, anchored=True, markov_rank=8, taps=2, group=8), {}),
    "sliding block": (lambda model: block(model, windows=(0, 6), causal=(1, 0)), {}),
    "block tree": (lambda model: block(model, markov_rank=8, markov="rnn"), TREE),
    "block static": (lambda model: block(model, draft_vocab=50, block=7), STATIC | {"draws": False}),
    "drawn block": (lambda model: block(model, markov_rank=8), {"depth": 4, "draws": True}),
    "drawn from few tokens": (lambda model: block(model, markov_rank=8, draft_vocab=50), {"depth": 4, "draws": True}),
    "a tree one deep": (eagle, {"depth": 1, "width": 4, "size": 4}),
    "drawn tree": (flat, DRAWN),
    "drawn chain": (flat, {"tree": "chain", "depth": 4, "draws": True}),
}  # fmt: skip
RAGGED = ("eagle chain", "eagle tree", "block", "block tree", "sliding block")
ALONE = ("block, anchored, with heads", "block static", "drawn block", "drawn from few tokens")
ALONE += ("eagle static", "eagle-3", "vispec", "msd", "flash", "specvlm", "drawn chain", "drawn tree")
DEFAULT = {*((name, "ragged") for name in RAGGED), *((name, "image first") for name in ALONE)}


@pytest.mark.parametrize(
    "name, kind",
    [
        pytest.param(name, kind, marks=() if (name, kind) in DEFAULT else FULL)
        for name in CASES
        for kind in ("ragged", "image first")
    ],
)
@pytest.mark.every(18)
def test_captured_drafts_are_what_the_drafter_proposes(name: str, kind: str, monkeypatch: pytest.MonkeyPatch):
    model, inputs = tiny_vlms.model("llava"), tiny_vlms.prompt("llava", kind)
    make, options = CASES[name]
    proposed_both_ways(model, inputs, make(model), options, monkeypatch)


@pytest.mark.parametrize("rows", [0, 50])
@pytest.mark.parametrize("compile", [False, True])
def test_a_block_draws_for_a_resized_model(rows: int, compile: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    uncompiled.pieces(monkeypatch)
    model, inputs = copy.deepcopy(tiny_vlms.model("llava")), tiny_vlms.prompt("llava", "text only")
    with mmspec.enable(model, block(model, draft_vocab=rows), depth=4, draws=True, compile=compile):
        tiny_vlms.generate(model, inputs, do_sample=True)
        model.resize_token_embeddings(tiny_vlms.VOCAB + 16, mean_resizing=False)
        assert tiny_vlms.generate(model, inputs, do_sample=True).shape[1] > inputs["input_ids"].shape[1]


HEADS = {"heads": {}, "tree of heads": {"depth": 3, "width": 3, "size": 10}, "few tokens": {"draft_vocab": 90},
         "drawn by heads": DRAWN}  # fmt: skip


@pytest.mark.parametrize("kind", ["ragged video", "image first"])
@pytest.mark.parametrize("name", HEADS)
@pytest.mark.every(12)
def test_captured_heads_are_what_the_heads_propose(
    name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = copy.deepcopy(tiny_vlms.model("qwen3_5"))
    published_mtp.shipped(model, tmp_path, published_mtp.qwen_heads(model))
    proposed_both_ways(model, tiny_vlms.prompt("qwen3_5", kind), "mtp", HEADS[name], monkeypatch)


def proposed_both_ways(
    model: Model, inputs: dict[str, Tensor], drafter: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every draft of a call as the drafter makes it, and as it was captured: they are the same."""
    drawn, deepest = bool(options.get("draws")), options.get("depth", 4)
    how = {"do_sample": True, "temperature": 30.0, "top_k": 0} if drawn else {}
    wanted = tiny_vlms.generate(model, inputs)
    beside = Beside(None if drawn else Oracle.of(inputs["input_ids"], wanted))
    monkeypatch.setattr(CapturedDraft, "propose", lambda *told: beside(*told))
    with mmspec.enable(model, drafter, compile=True, **options):
        out = tiny_vlms.generate(model, inputs, **how)
        assert held(model) and all(held(model))
    assert drawn or torch.equal(out, wanted)
    assert len({*beside.counts}) > 1 and max(map(max, beside.counts)) > min(deepest, 2)
    assert len(inputs["input_ids"]) == 1 or any(len({*counts}) > 1 for counts in beside.counts)


@FULL
@pytest.mark.parametrize("name", ["eagle tree", "eagle-3 static", "drawn tree"])
def test_by_the_compiler_too(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.undo()
    uncompiled.pieces(monkeypatch, None, forwards=False)
    test_captured_drafts_are_what_the_drafter_proposes(name, "image first", monkeypatch)


@pytest.mark.full
def test_what_grows_alike_is_captured_once():
    model, inputs = tiny_vlms.model("llava"), tiny_vlms.prompt("llava", "text only")
    drafter, counts = eagle(model), []
    for size in (10, 10, 8):
        before, rule = PiecewiseFunction.made, rules.typical(epsilon=0.3, delta=0.1)  # a new one each time
        with mmspec.enable(model, drafter, compile=True, **TREE | {"size": size, "rule": rule}):
            tiny_vlms.generate(model, inputs, do_sample=True)
        counts.append(PiecewiseFunction.made - before)
    assert counts == [1, 0, 1]


class Branching(EagleDrafter):
    """Looks at the value of a tensor."""

    def carry(self, z: Tensor) -> Tensor:
        return super().carry(z) if z.isfinite().all() else z


@pytest.mark.parametrize("what, why", [("a branch", "reads the value"), ("no compiler", "ZeroDivisionError")])
@pytest.mark.parametrize("options", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.every(3)
def test_what_cannot_be_captured_is_drafted_as_it_is(
    what: str, why: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    model, inputs = tiny_vlms.model("llava"), tiny_vlms.prompt("llava", "image first")
    wanted, drafter = tiny_vlms.generate(model, inputs), eagle(model)
    if what == "a branch":
        drafter.__class__ = Branching
    else:
        monkeypatch.setattr(capture, "inductor", lambda *told: 1 / 0)
    with mmspec.enable(model, drafter, **options) as handle:
        tiny_vlms.generate(model, inputs)
        eager = handle.stats
    with mmspec.enable(model, drafter, compile=True, **options) as handle:
        with pytest.warns(UserWarning, match=f"runs {type(drafter).__name__} uncompiled: .*{why}") as told:
            assert torch.equal(tiny_vlms.generate(model, inputs), wanted)
        assert torch.equal(tiny_vlms.generate(model, inputs), wanted)
    assert len(told) == 1 and handle.stats.drafted == 2 * eager.drafted and held(model) == [None]


class Off(PiecewiseFunction):
    """Changes one of the tensors that a captured draft gives: tokens, parents, depth, ancestors, and a distribution if
    drawn."""

    which, change = 0, staticmethod(lambda t: t)

    def __call__(self, attend: Any, *inputs: Tensor) -> list[Tensor]:
        found = super().__call__(attend, *inputs)
        found[self.which] = self.change(found[self.which].clone())
        return found


def below(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A change of all nodes but the root."""
    return lambda t: torch.cat([t[:, :1], change(t[:, 1:])], 1)


OTHER = below(lambda tokens: (tokens + 1) % tiny_vlms.VOCAB)


@pytest.mark.parametrize(
    "options, which, change, why",
    [
        (CHAIN, 1, lambda parents: parents * 0, "not be a tree"),
        (TREE, 1, lambda parents: parents + 100, "not be a tree"),
        (TREE, 2, lambda depth: depth + 1, "not be a tree"),
        (TREE, 3, lambda ancestors: ~ancestors, "not be a tree"),
        (CHAIN, 0, lambda tokens: (tokens + 1) % tiny_vlms.VOCAB, "not be a tree"),
        (TREE, 0, below(lambda tokens: tokens + tiny_vlms.VOCAB), "not be a tree"),
        (TREE, 0, OTHER, None),
        (CHAIN | {"draws": True}, 0, OTHER, "not be drawn"),
        (CHAIN | {"draws": True}, 4, lambda distribution: distribution.flip(-1), "not be drawn"),
        (CHAIN | {"draws": True}, 4, lambda distribution: distribution * torch.nan, "not be drawn"),
        (CHAIN | {"draws": True}, 4, lambda distribution: distribution + 1e-5, None),
    ],
)  # fmt: skip
@pytest.mark.every(24)
def test_a_captured_draft_is_used_if_it_keeps_the_law(
    options: dict[str, Any], which: int, change: Any, why: str | None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Off, "which", which)
    monkeypatch.setattr(Off, "change", staticmethod(change))
    monkeypatch.setattr(captured, "PiecewiseFunction", Off)
    model, inputs = tiny_vlms.model("llava"), tiny_vlms.prompt("llava", "text only")
    how = {"do_sample": True, "temperature": 30.0, "top_k": 0} if "draws" in options else {}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", UserWarning)
        with mmspec.enable(model, eagle(model), compile=True, **options):
            tiny_vlms.generate(model, inputs, max_new_tokens=6, **how)
            assert [why is None] == [one is not None for one in held(model)]
    assert why is None or any(why in str(one.message) for one in told)


def test_what_uses_other_weights_is_captured_anew(monkeypatch: pytest.MonkeyPatch):
    model, inputs = tiny_vlms.model("llava"), tiny_vlms.prompt("llava", "text only")
    drafter, beside = eagle(model), Beside(None)
    monkeypatch.setattr(CapturedDraft, "propose", lambda *told: beside(*told))
    for _ in range(2):
        with mmspec.enable(model, drafter, compile=True, **TREE):
            tiny_vlms.generate(model, inputs, max_new_tokens=6)
            drafter.load_state_dict({name: -t for name, t in drafter.state_dict().items()}, assign=True)
            tiny_vlms.generate(model, inputs, max_new_tokens=6)


@pytest.mark.full
def test_guided_drafts_follow_the_scale(monkeypatch: pytest.MonkeyPatch):
    model, call, beside = tiny_image_models.model("emu3"), tiny_image_models.PAINTERS["emu3"].call(2), Beside(None)
    call["max_new_tokens"] = 6
    monkeypatch.setattr(CapturedDraft, "propose", lambda *told: beside(*told))
    with mmspec.enable(model, eagle(model), compile=True, **TREE):
        for scale in (2.0, 5.0):
            tiny_image_models.draw(model, {**call, "guidance_scale": scale})
        assert len(held(model)) == 2 and all(held(model))


def test_nothing_is_captured_where_nothing_is_drafted():
    model = tiny_vlms.model("llava")
    with mmspec.enable(model, eagle(model), compile=True, size=1) as handle:
        tiny_vlms.generate(model, tiny_vlms.prompt("llava", "text only"), max_new_tokens=6)
    assert not held(model) and handle.stats.drafted == 0


def test_a_library_that_a_killed_process_left_unfinished_is_built_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "piece.main.so"
    library.touch()

    def compile(piece: Any, *_: Any) -> Any:
        if library.exists():
            raise ImportError(f"{library}: file too short")
        return piece

    monkeypatch.setattr(torch._inductor, "compile", compile)
    monkeypatch.setattr(inductor, "_WRITTEN", 0)
    piece = torch.fx.symbolic_trace(torch.nn.Identity())
    assert inductor.inductor(piece, []) is piece and not library.exists()
    monkeypatch.setattr(torch._inductor, "compile", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        inductor.inductor(piece, [])
