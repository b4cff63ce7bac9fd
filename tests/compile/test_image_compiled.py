"""compile=True on models that draw: the same pictures, few shapes, and what cannot be captured runs as it is."""

from __future__ import annotations

import itertools
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import tiny_image_models
import tiny_llamagen
import torch
import uncompiled
from compared import as_stock
from tiny_image_models import PAINTERS
from torch import Tensor

import mmspec
from benchmarks.suites.round import Reads
from mmspec.drafters.eagle import EagleConfig, EagleDrafter
from mmspec.drafters.shape import Shape
from mmspec.pipelines.patching import drafting
from mmspec.pipelines.target import captures
from mmspec.pipelines.target.llamagen import LlamaGenTarget
from mmspec.session import Row, Session
from mmspec.switch import RoundCosts
from tests.compile.test_round import WRONG

ASKED = {"text": {"prompt": ["a small red circle", "a blue square", "the large striped square on the left"]},
         "class": {"class_labels": [3, 8, 1]}}  # fmt: skip
FULL = pytest.mark.full


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces are run, not compiled; and nothing may fall back to the stock forward."""
    uncompiled.pieces(monkeypatch)


def draw(pipe: Any, kind: str = "text", rows: int = 3, **settings: Any) -> Tensor:
    (name, asked), *_ = ASKED[kind].items()
    seeds = [torch.Generator().manual_seed(7 + b) for b in range(rows)]
    settings = {"generator": seeds, "output_type": "latent", "clean_caption": False, **settings}
    return pipe(**{name: asked[:rows]}, **settings).tokens


def same_picture(call: dict[str, Any] | None = None, drafter: Any = "jacobi", **options: Any) -> tuple[Any, Any]:
    """Asserts that the seed gives the same picture once the pipeline is enabled; the pipeline, and its handle."""
    call = call or {}
    pipe = tiny_llamagen.pipeline(call.get("kind", "text"))
    return pipe, as_stock(pipe, {}, drafter, draw=lambda pipe, _: draw(pipe, **call), reproducible=True, **options)


def held(model: Any) -> list[Any]:
    return list(captures.of(model)._captures.values())


@pytest.mark.parametrize(
    ("kind", "scale", "window"), [("text", 3.0, 5), ("class", 1.0, 5), ("text", 3.0, 1), ("text", 3.0, 30)]
)
@pytest.mark.every(6)
def test_compiled_draws_the_picture_of_the_seed(kind: str, scale: float, window: int, quick: None) -> None:
    pipe = same_picture({"kind": kind, "guidance_scale": scale}, window=window, times=2, compile=True)[0]
    assert held(pipe.transformer) and all(held(pipe.transformer))


@pytest.mark.parametrize("options", [{"coupling": "maximal"}, {"coupling": "gumbel"}, {"proactive": (2, 3)}], ids=str)
@pytest.mark.every(8)
def test_compiled_draws_what_the_same_method_draws_uncompiled(options: dict[str, Any], quick: None) -> None:
    pipe, found = tiny_llamagen.pipeline(), []
    for compile in (False, True):
        with mmspec.enable(pipe, "jacobi", window=5, compile=compile, **options):
            found.append(draw(pipe))
    assert torch.equal(*found) and all(held(pipe.transformer))


@pytest.fixture
def restless(monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` leaves a draft out now and then, and drops the drafter late in every third call."""
    turn = itertools.count()
    monkeypatch.setattr(drafting, "_COSTS", WeakKeyDictionary())
    monkeypatch.setattr(RoundCosts, "wants_plain", lambda self, batch: next(turn) % 7 in (2, 3, 5))
    monkeypatch.setattr(RoundCosts, "pays", lambda self, batch: next(turn) % 29 != 28)
    monkeypatch.setattr(RoundCosts, "tries", lambda self, batch: True)


@pytest.mark.parametrize(
    ("rows", "options"),
    [(1, {}), (3, {}), (3, {"init": "uniform"}), (1, {"proactive": (2, 3)}), (3, {"proactive": (2, 3)}),
     (1, {"compile": True})],
    ids=str,
)  # fmt: skip
@pytest.mark.every(2)
def test_auto_draws_the_picture_of_the_seed(rows: int, options: dict[str, Any], quick: None, restless: None) -> None:
    assert same_picture({"rows": rows}, window=8, times=3, auto=True, **options)[1].stats.accepted > 0


@pytest.mark.parametrize("drafter", ["eagle chain", "eagle tree"])
def test_auto_draws_the_picture_of_the_seed_with_features(drafter: str, restless: None) -> None:
    shape = Shape.chain(4) if drafter == "eagle chain" else Shape(3, 3, 12)
    grid = {"rope": "2d", "grid": tiny_llamagen.SIZES["grid"]}
    made = EagleDrafter(EagleConfig(32, 32, 2, 2, 64, **grid, shape=shape))
    assert same_picture(drafter=made, times=3, auto=True)[1].stats.drafted > 0


@pytest.mark.parametrize("name", ["janus", "emu3", "glm_image", "chameleon guided"])
def test_auto_draws_what_other_models_draw(name: str, restless: None) -> None:
    model, call = tiny_image_models.model(name), PAINTERS[name].call(3)
    options: dict[str, Any] = {"do_sample": True, "top_k": 5}

    def drawn(**settings: Any) -> Tensor:
        with mmspec.enable(model, "jacobi", reproducible=True, **settings):
            torch.manual_seed(5)
            return tiny_image_models.draw(model, call, **options)

    plain = drawn(window=1)
    assert all(torch.equal(drawn(window=8, auto=True), plain) for _ in range(2))


def test_what_draws_pictures_beside_text_is_fitted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, call, made = tiny_image_models.model("janus"), PAINTERS["janus"].call(1), []
    propose = drafting.proposer
    monkeypatch.setattr(
        drafting, "proposer", lambda *args, **options: made.append(propose(*args, **options)) or made[-1]
    )
    with mmspec.enable(model, "jacobi", auto=True):
        for _ in range(2):
            tiny_image_models.draw(model, call, do_sample=True, top_k=5)
    assert len(made) == 2, "once for text, once for pictures"


def test_auto_turns_jacobi_off_where_it_does_not_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = tiny_llamagen.pipeline()
    monkeypatch.setattr(drafting, "_COSTS", WeakKeyDictionary())
    book = RoundCosts.book
    monkeypatch.setattr(
        RoundCosts, "book", lambda self, batch, drafted, _, gained: book(self, batch, drafted, 1 + 9 * drafted, gained)
    )
    plain = draw(pipe)
    with mmspec.enable(pipe, "jacobi", window=16, reproducible=True, auto=True) as handle:
        for _ in range(8):
            before = handle.stats.drafted
            assert torch.equal(draw(pipe), plain)
    assert handle.stats.drafted == before > 0


def test_few_shapes_are_captured_however_rows_end() -> None:
    target = LlamaGenTarget(tiny_llamagen.transformer(), (), rows=6)
    left = {rows: Session([Row([], 0, 16, b) for b in range(rows)], target.device) for rows in range(1, 7)}
    assert [rows for rows, session in left.items() if target.captures(session)] == [1, 2, 4, 6]


def test_a_round_reads_once(quick: None) -> None:
    pipe = tiny_llamagen.pipeline()
    for compile in (False, True):
        with mmspec.enable(pipe, "jacobi", window=5, reproducible=True, compile=compile) as handle:
            draw(pipe, rows=1)
            asked, rounds = [], []
            for scale in (3.0, 2.0, 1.5):
                before = handle.stats.rounds
                with Reads() as reads:
                    draw(pipe, rows=1, guidance_scale=scale)
                asked.append(reads.count)
                rounds.append(handle.stats.rounds - before)
            assert len({a - r for a, r in zip(asked, rounds, strict=True)}) == 1, "all others are once a call"


@pytest.mark.parametrize("what", ["wrong", "no compiler"])
@pytest.mark.every(2)
def test_what_cannot_be_captured_runs_as_it_is(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    uncompiled.pieces(monkeypatch, WRONG[what])
    why = {"wrong": "away from", "no compiler": "ZeroDivisionError"}[what]
    with pytest.warns(UserWarning, match=f"LlamaGenTransformer uncompiled: .*{why}"):
        same_picture(window=5, compile=True)


def test_a_model_in_another_precision_is_captured_anew(quick: None) -> None:
    pipe = tiny_llamagen.pipeline()
    with mmspec.enable(pipe, "jacobi", window=5, reproducible=True, compile=True):
        draw(pipe, rows=1)
        pipe.transformer.to(torch.bfloat16)
        fast = draw(pipe, rows=1)
    with mmspec.enable(pipe, "jacobi", window=5, reproducible=True):
        assert torch.equal(fast, draw(pipe, rows=1)) and all(held(pipe.transformer))


@pytest.mark.parametrize("name", ["emu3", "janus", "glm_image", "chameleon guided"])
@pytest.mark.every(12)
def test_other_models_that_draw_are_compiled_too(name: str, quick: None) -> None:
    model, call = tiny_image_models.model(name), PAINTERS[name].call(2)
    with mmspec.enable(model, "jacobi", window=4):
        plain = tiny_image_models.draw(model, call)
    with mmspec.enable(model, "jacobi", window=4, compile=True):
        for _ in range(2):
            assert torch.equal(tiny_image_models.draw(model, call), plain)
    assert held(model) and all(held(model))


@pytest.mark.full
def test_text_and_pictures_of_one_shape_are_not_confused(quick: None) -> None:
    model = tiny_image_models.model("janus")
    pictures, text = PAINTERS["janus"].call(1), tiny_image_models.ragged(tiny_image_models.PROMPTS[:2])
    wanted = [tiny_image_models.draw(model, pictures), tiny_image_models.draw(model, text, max_new_tokens=12)]
    with mmspec.enable(model, "jacobi", window=4, compile=True):
        found = [tiny_image_models.draw(model, pictures), tiny_image_models.draw(model, text, max_new_tokens=12)]
    assert all(map(torch.equal, found, wanted))
    shapes = [key[1:] for key in captures.of(model)._captures]
    assert len(set(shapes)) < len(shapes)


@FULL
def test_compiled_by_the_compiler_draws_the_picture_of_the_seed() -> None:
    pipe = same_picture({"rows": 1}, window=5, times=2, compile=True)[0]
    assert all(held(pipe.transformer))
