"""`mmspec bench vlm` over several drafters: what is shown, and what is read off them."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny_llava
import torch

import mmspec
from benchmarks.suites import SUITES
from benchmarks.suites import drawn as suite_drawn
from benchmarks.suites import vlm as suite_vlm
from benchmarks.zoo import clips
from mmspec.app import embedded
from mmspec.app.bench import command as bench
from mmspec.app.bench import drafters as named
from mmspec.app.bench import questions, vlm
from mmspec.app.bench.answers import TimedCall
from mmspec.app.bench.command import BenchError
from mmspec.drafters.plain import Plain
from mmspec.pipelines.drafters.mtp import MtpDrafter
from mmspec.pipelines.untrained import build
from mmspec.statistics import Stats

METHODS = ("eagle", "vispec", "msd", "flash", "specvlm")
SHAPES: dict[str, dict[str, Any]] = {
    "flash": {"tokens": 3, "tree": "dynamic", "least": 1, "ratio": 2.0, "depth": 3, "width": 1, "size": 4},
    "specvlm": {"gate_width": 8, "queries": 1},
}
CHAIN = {"depth": 4, "width": 1, "size": 5}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llava.save(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One untrained drafter of each method, by folder."""
    places, target = {}, tiny_llava.model()
    for method in METHODS:
        torch.manual_seed(1)
        places[method] = tmp_path_factory.mktemp(method)
        mmspec.save_drafter(
            build(method, target, **{"intermediate": 64, **CHAIN, **SHAPES.get(method, {})}), places[method]
        )
    return places


def run(*words: object, suite: str = "vlm") -> int:
    parser = argparse.ArgumentParser()
    bench.configure(parser, SUITES)
    return bench.run(parser.parse_args([suite, *map(str, words)]))


def arguments(*words: object) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.configure(parser, SUITES)
    return parser.parse_args(["vlm", *map(str, words)])


# -- what is shown -------------------------------------------------------------------------------------------------


def test_pictures_pairs_and_clips_of_several_lengths() -> None:
    asked = suite_drawn.asked(arguments("--shown", "picture", "pair", "clip", "--frames", 2, 4, "--images", 2))
    assert [(s.kind, s.pictures, s.prompt) for s in asked] == [
        ("picture", 1, "short"), ("picture", 1, "long"), ("pair", 2, ""), ("clip", 2, ""), ("clip", 4, ""),
    ]  # fmt: skip
    for shown, some in asked.items():
        assert [len(q.images) for q in some] == [shown.pictures] * 2 and all(q.prompt for q in some)
    short, long = asked[questions.Shown("clip", 2)], asked[questions.Shown("clip", 4)]
    assert [q.prompt for q in short] == [q.prompt for q in long]
    assert all(a.images[i].tobytes() == b.images[j].tobytes()  # the first and the last moment of the same clip
               for a, b in zip(short, long, strict=True) for i, j in ((0, 0), (1, 3)))  # fmt: skip
    assert {q.prompt for q in short} <= set(clips.PROMPTS)


def test_tuning_shows_other_things() -> None:
    words = ("--shown", "picture", "pair", "clip", "--frames", 2, "--images", 3)
    measured, tuning = (suite_drawn.asked(arguments(*words), tuning=n) for n in (0, 3))
    for shown in measured:
        seen = {q.images[0].tobytes() for q in measured[shown]}
        assert len(seen) == 3 and not seen & {q.images[0].tobytes() for q in tuning[shown]}


def test_every_cell_has_a_title_of_its_own() -> None:
    cells = [("data",), ("picture", 1, "short"), ("pair", 2), ("clip", 2), ("clip", 8), ("clip", 8, "long")]
    shown = [questions.Shown(*cell) for cell in cells]
    assert [str(s) for s in shown] == [
        "data",
        "short prompt",
        "pair",
        "clip of 2",
        "clip of 8",
        "clip of 8, long prompt",
    ]


# -- which drafters ------------------------------------------------------------------------------------------------


def test_all_are_those_made_for_the_model() -> None:
    assert set(embedded.drafters("scenes-video")) == {
        name
        for name in mmspec.zoo.DRAFTERS
        if name.startswith("scenes-video-") and (mmspec.zoo.weights() / name).is_dir()
    }
    with pytest.raises(BenchError, match="no drafter comes with 'elsewhere'; name the drafters"):
        named.read(arguments("--model", "elsewhere", "--drafters", "all"))


@pytest.mark.parametrize("suite", ["vlm", "round", "caption", "image"])
@pytest.mark.parametrize("option", ["--drafters", "--drafter"])
def test_every_suite_names_drafters_alike(suite: str, option: str, drafters: dict[str, Path], tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    bench.configure(parser, SUITES)
    twin = shutil.copytree(drafters["msd"], tmp_path / "twin")
    words = [suite, option, "ngram", drafters["eagle"], drafters["msd"], drafters["msd"], twin, "--model", "elsewhere"]
    found = named.read(parser.parse_args([str(word) for word in words]))
    assert {title: drafter.method for title, drafter in found.items() if title != "ngram"} == {
        "eagle": "eagle", f"msd:{drafters['msd']}": "msd", f"msd:{twin}": "msd",
    }  # fmt: skip
    assert next(iter(found)) == "ngram" and not named.read(parser.parse_args([suite, "--model", "elsewhere"]))
    with pytest.raises(
        BenchError,
        match=r"--drafters: there is no folder or file 'absent'.*; available by name: .*ngram, suffix, recycle",
    ):
        named.read(parser.parse_args([suite, option, "absent"]))


def test_methods_are_left_out_by_patterns(drafters: dict[str, Path]) -> None:
    words = ("--drafters", drafters["vispec"], "--without", "*-*")
    assert [m.name for m in vlm.methods(tiny_llava.model(), arguments(*words))] == ["stock", "ngram", "vispec"]


def test_a_drafter_of_another_model_is_refused_before_anything_is_measured() -> None:
    with pytest.raises(BenchError, match="--drafters: this drafter was made for scenes-video and does not fit"):
        vlm.methods(tiny_llava.model(), arguments("--drafters", "scenes-video-eagle"))


# -- whole runs ----------------------------------------------------------------------------------------------------


def test_all_methods_side_by_side(model: Path, drafters: dict[str, Path], tmp_path: Path) -> None:
    words = ["--drafters", *drafters.values(), "--shown", "picture", "clip", "--frames", 2, "--prompt", "short",
             "--images", 1, "--batch", 1, "--temperature", 0, "--max-new-tokens", 8,
             "--without", "stock-static", "hf-prompt-lookup", "ngram"]  # fmt: skip
    assert run("--model", model, *words, "--json", tmp_path / "o.json") == 0
    found = json.loads((tmp_path / "o.json").read_text())
    records = {(r["method"], r["kind"], r["pictures"]): r for r in found["records"]}
    assert len(records) == len(found["records"]) == 6 * 2
    for (method, _, pictures), r in records.items():
        assert r["identical_rate"] == 1.0 and r["visual_tokens"] == 4 * pictures and not r["note"]
        if method == "stock":
            assert r["drafter_kv_bytes"] is None and r["drafter"] == {} and r["tau_by_depth"] == []
            continue
        row = 2 * 4 * 16 * 4  # keys and values of 4 heads of 16, in float32
        assert r["drafter_kv_bytes"] == r["drafter"]["rows"] * row
        assert r["parts_ms"]["draft"] > 0 and 0 < r["draft_share"] < 1
        whole = 4 * pictures - 1  # the very first token of a prompt follows nothing
        held = {"eagle": whole, "msd": whole, "vispec": pictures, "flash": 2 * pictures}.get(method)
        assert held in (None, r["drafter_visual_rows"])
    told = records["specvlm", "clip", 2]["drafter"]
    assert sum(much for name, much in told.items() if name.startswith("branch")) == 1.0


def test_tuning_leaves_out_what_a_drafter_cannot_do(
    model: Path, drafters: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suite_vlm, "GRIDS", {"drafter": ({"depth": 2, "width": 1}, {"depth": 4, "width": 1})})
    words = ["--drafters", drafters["flash"], "--images", 1, "--prompt", "short", "--tune", "--tune-images", 1,
             "--batch", 1, "--temperature", 0, "--max-new-tokens", 4,
             "--without", "stock-static", "hf-prompt-lookup", "ngram"]  # fmt: skip
    assert run("--model", model, *words, "--json", tmp_path / "o.json") == 0
    tuned = json.loads((tmp_path / "o.json").read_text())["tuned"]["batch 1, temperature 0"]["flash"]
    assert [one["setting"]["depth"] for one in tuned["tried"]] == [2]


# -- arithmetic ----------------------------------------------------------------------------------------------------


def test_stocks_own_drafting_comes_with_the_same_heads() -> None:
    [own] = named.stocks_own("mtp", MtpDrafter)
    assert own.name == "hf-mtp" and own.arguments == {"use_mtp": True} and vlm.single(own)
    assert not named.stocks_own("plain", Plain())


def test_tau_by_depth_ends_at_tau() -> None:
    stats = Stats(rounds=4, row_rounds=4, gained=10, drafter={"prompts": 2, "memory bytes": 600, "visual rows": 8})
    stats.accepted_by_depth.update({1: 3, 2: 2, 3: 1})
    made = {"stock": [TimedCall(1.0, 0.1, ((1,) * 11,), 10, 10, None)],
            "eagle": [TimedCall(1.0, 0.1, ((1,) * 11,), 4, 10, stats)]}  # fmt: skip
    found = vlm.figures("eagle", made, "stock", greedy=True, assisted=False)
    assert found["tau_by_depth"] == [1.75, 2.25, 2.5] and found["tokens_per_target_call"] == 2.5
    assert found["drafter_kv_bytes"] == 300 and found["drafter_visual_rows"] == 4
