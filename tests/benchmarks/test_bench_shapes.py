"""The shapes suite: published parameter counts, whole runs on toys of every model, and what cannot be measured."""

from __future__ import annotations

import json
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
import uncompiled

from benchmarks.__main__ import parser as workshop
from benchmarks.suites import shapes
from benchmarks.suites.shapes import ChatWays, Cost, ShapeCell, ShapeMethod
from benchmarks.suites.shapes_models import MODELS, REAL, TOY, on_paper
from mmspec.app import cli, compare
from mmspec.app.bench import report
from mmspec.kernels import dispatch

CPU, FULL = torch.device("cpu"), pytest.mark.full
PUBLISHED = {  # parameters in millions, as their authors count them; of drafters without the target's embeddings
    "llava-1.5-7b": {"target": 7060, "eagle": 236, "vispec": 320, "msd": 236},
    "qwen2.5-vl-7b": {"target": 8290, "eagle": 281, "vispec": 345, "msd": 259},
    "smolvlm-500m": {"target": 507, "eagle": 11.7},
    "qwen3.5-4b": {"target": 4540, "mtp": 120},
}
TREES = {"eagle": (6, 10, 60), "vispec": (4, 8, 30), "msd": (6, 10, 59)}
CHAT = [f"{name}{attention}" for name in ("eagle", "vispec", "msd") for attention in ("", " tree attention")]
DRAFTED = {
    "llava-1.5-7b": CHAT,
    "qwen2.5-vl-7b": CHAT,
    "smolvlm-500m": ["eagle"],
    "qwen3.5-4b": ["mtp"],
}
COMPILED = ["smolvlm-500m", "llava-1.5-7b"]  # by default the first


@dataclass(frozen=True)
class Measured:
    """A run over some models: its file, what it printed, and at each model built and at the end whether those before
    were gone."""

    written: dict[str, Any]
    said: str
    gone: list[bool]

    def of(self, model: str) -> list[dict[str, Any]]:
        return [r for r in self.written["records"] if r["model"] == model]


def run(out: Path, *words: str) -> Measured:
    """With the least there is to do; what compilers make of it is left out: pieces and graphs run as they are."""
    given = ["--contexts", "64", "--batch", "2", "--tokens", "3", "--repeats", "1", "--device", "cpu", *words]
    compiler, held, gone = torch.compile, list[Any](), list[bool]()

    def left() -> bool:
        return all(one() is None for one in held)

    def loaded(*given: Any) -> Any:
        gone.append(left())
        subject = ChatWays(*given)
        held.append(ref(subject.bench.model))
        return subject

    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as said:
        patch.setattr(compare, "PEAKS", 1)
        patch.setattr(torch, "compile", lambda f, **_: compiler(f, backend="eager", dynamic=False))
        uncompiled.pieces(patch)
        patch.setattr(shapes, "ChatWays", loaded)
        assert cli.main(["shapes", "--sizes", TOY, "--json", str(out), *given], workshop) == 0
    return Measured(json.loads(out.read_text()), said.getvalue(), [*gone, left()])


@pytest.fixture(scope="module")
def eager(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    return run(tmp_path_factory.mktemp("eager") / "out.json", "--no-compile")


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Measured:
    names = COMPILED[: None if request.config.getoption("--full") else 1]
    return run(tmp_path_factory.mktemp("compiled") / "out.json", "--models", *names, "--compile")


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.main(["shapes", *words], workshop) == 1
    return capsys.readouterr().err


@pytest.mark.parametrize("name", MODELS)
def test_shapes_have_the_published_parameters(name):
    counted = {part: count / 1e6 for part, count in on_paper(MODELS[name], REAL).items()}
    assert counted == pytest.approx(PUBLISHED[name], rel=0.01)


@pytest.mark.parametrize("sizes", [REAL, TOY])
def test_drafters_draft_the_published_trees(sizes):
    with torch.device("meta"):
        for name, shape in MODELS.items():
            for method in shape.drafters.keys() & TREES.keys():
                c = shape.feature_drafter(method, sizes).config.shape
                assert (c.depth, c.width, c.size) == ((8, 1, 9) if name == "smolvlm-500m" else TREES[method])


@pytest.mark.full
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.every(8)
def test_a_cell_has_c_of_every_way(name, eager):
    records = eager.of(name)
    assert [r["method"] for r in records] == ["stock", "plain", *DRAFTED[name]]
    assert [r["method"] for r in records if r["stock_path"]] == ["stock"]
    for r in records:
        assert r["c"] == pytest.approx(r["step_ms"] / records[0]["step_ms"], rel=1e-5) and r["c"] > 0 and not r["note"]
        assert r["tokens_per_target_call"] >= 1 and r["n"] == 1
    assert records[0]["c"] == 1 and all(r["parts_ms"] for r in records[1:])
    assert eager.written["provenance"]["real sizes"] == "unmeasured: needs a GPU"
    assert eager.written["provenance"]["sizes"] == TOY and f"toy of {name}" in eager.said


@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.full
def test_compiled_ways_stand_beside_the_eager_ones(name, compiled):
    records = {r["method"]: r for r in compiled.of(name)}
    known = {f"{m}{how}" for m in ("stock", "plain", *DRAFTED[name]) for how in ("", " compiled")}
    assert set(records) == known
    assert all(r["c"] > 0 and not r["note"] for r in records.values())
    best = min((r for r in records.values() if r["stock_path"]), key=lambda r: r["step_ms"])
    assert {r["best_stock"] for r in records.values()} == {best["method"]} and best["c_best"] == 1


@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=FULL)])
def test_tree_attention_runs_in_the_ways_that_say_so(compile: bool, monkeypatch):
    uncompiled.pieces(monkeypatch)
    attend, calls, served = dispatch.tree_attention, list[int](), dict[str, bool]()
    monkeypatch.setattr(dispatch, "tree_attention", lambda *a: calls.append(1) or attend(*a))
    ways = ChatWays(MODELS["qwen2.5-vl-7b"], TOY, CPU, torch.float32, 3, 0).ways(64, 1, compile)
    for way in (way for way in ways if not way.plain):
        calls.clear()
        way.call()
        served[way.name] = bool(calls)
    hows = ("", " compiled") if compile else ("",)
    assert served == {f"{m}{how}": "tree" in m for m in ("plain", *CHAT) for how in hows}


def test_drafts_read_a_part_of_a_large_head_in_the_ways_that_say_so(monkeypatch):
    monkeypatch.setattr(shapes, "ROWS", 100)
    subject = ChatWays(MODELS["qwen2.5-vl-7b"], TOY, CPU, torch.float32, 3, 0)
    ways = {way.name: way.call for way in subject.ways(64, 1, False) if not way.plain}
    found = {name: call.args[0].options.get("draft_vocab") for name, call in ways.items()}
    drafted = {f"{m}{rows}": 100 if rows else "all" for m in CHAT for rows in ("", " 100 rows")}
    assert found == {"plain": None, **drafted}
    ways["eagle 100 rows"]()


def test_the_figures_of_a_cell():
    def fails() -> Cost:
        raise RuntimeError("no room\nat all")

    seconds = {"stock": 0.2, "stock compiled": 0.1, "eagle": 0.3, "quick": 0.05}
    ways = [ShapeMethod(name, lambda s=s: Cost(s, 1.5), plain="stock" in name) for name, s in seconds.items()]
    ways.append(ShapeMethod("msd", fails))
    found = shapes.measure_cell(ShapeCell("llava-1.5-7b", TOY, 64, 1), ways, 3, CPU, {("eagle", 1): "told before"})
    stock, compiled, eagle, _, msd = found
    assert (stock["c"], compiled["c"], eagle["c"]) == pytest.approx((1, 0.5, 1.5))
    assert eagle["c_best"] == pytest.approx(3) and eagle["best_stock"] == "stock compiled"
    assert eagle["n"] == 3 and eagle["tokens_per_target_call"] == 1.5 and eagle["note"] == "told before"
    assert report.cell(eagle, report.LAYOUTS["shapes"]["columns"]["c (quartiles)"]) == "1.50 (1.50-1.50)"
    assert msd["c"] is None and msd["note"] == "failed: RuntimeError: no room"


@pytest.mark.parametrize(("how", "count"), [("eager", len(MODELS)), pytest.param("compiled", 2, marks=FULL)])
def test_a_model_goes_before_the_next_is_built(how, count, request):
    measured = request.getfixturevalue(how)
    assert measured.gone == [True] * (count + 1), "the model before is still there"


def test_contexts_end_where_a_model_does():
    assert MODELS["llava-1.5-7b"].contexts == {REAL: (1024, 4096), TOY: (64, 128)}
    assert MODELS["qwen2.5-vl-7b"].contexts == {REAL: (1024, 4096, 16384), TOY: (64, 128, 256)}


def test_what_is_too_long_or_too_large_is_told_and_not_built(tmp_path, monkeypatch):
    words = ("--models", "llava-1.5-7b", "--contexts", "64", "256")
    monkeypatch.setattr(shapes, "free_memory", lambda device: 10**6)
    told = run(tmp_path / "out.json", *words)
    (small, long), built = told.written["records"], told.gone[:-1]
    assert not built
    assert small["note"].startswith("not measured: needs 0.0 GiB for weights and caches alone") and small["c"] is None
    assert long["note"] == "not measured: beyond 128 positions"
    needs = shapes.refusal(ShapeCell("qwen2.5-vl-7b", REAL, 16384, 16), 9_000_000_000, torch.bfloat16, 40 * 2**30)
    assert needs == "not measured: needs 44.8 GiB for weights and caches alone, 40.0 free"


def test_real_sizes_want_a_gpu(capsys, monkeypatch):
    monkeypatch.setattr(shapes, "find_device", lambda name: CPU)
    said = refused(capsys, "--sizes", REAL, "--models", "llava-1.5-7b", "smolvlm-500m", "--dtype", "bfloat16")
    assert "real sizes need a GPU" in said and "--device cpu" in said
    assert "llava-1.5-7b 14.6 GiB, smolvlm-500m 1.0 GiB" in said


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--contexts", "16", "--models", "llava-1.5-7b"), "has no room for a picture of 16"),
        (("--tokens", "1"), "a call needs --tokens 2"),
        (("--device", "nowhere"), "no device 'nowhere'"),
    ],
)
def test_what_makes_no_sense_is_refused(words, why, capsys):
    given = words if "--device" in words else (*words, "--device", "cpu")
    assert why in refused(capsys, "--sizes", TOY, *given)


@pytest.mark.parametrize("name", MODELS)
def test_all_parts_come_in_the_dtype_that_is_measured(name):
    """Else every enabling would cast a drafter anew, and a compiled one would be captured anew."""
    parts = MODELS[name].parts(TOY, torch.bfloat16).values()
    assert {p.dtype for part in parts for p in part.parameters()} == {torch.bfloat16}
