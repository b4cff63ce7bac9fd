"""`mmspec bench vlm` over several drafters: what is shown, what is read off them, their variants, and its curves."""

from __future__ import annotations

import argparse
import json
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import tiny_llava
import torch
from PIL import Image

import mmspec
from benchmarks.suites import SUITES, ablations, plots
from benchmarks.suites import drawn as suite_drawn
from benchmarks.suites import vlm as suite_vlm
from benchmarks.zoo import clips
from mmspec.app import embedded
from mmspec.app.bench import command as bench
from mmspec.app.bench import drafters as named
from mmspec.app.bench import questions, vlm
from mmspec.app.bench.answers import TimedCall
from mmspec.app.bench.command import BenchError
from mmspec.drafters.block_config import BlockConfig
from mmspec.drafters.dflash import BlockDrafter
from mmspec.pipelines.drafters.untrained import build
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
        "eagle": "eagle", "msd": "msd", "msd:twin": "msd",
    }  # fmt: skip
    assert next(iter(found)) == "ngram" and not named.read(parser.parse_args([suite, "--model", "elsewhere"]))
    with pytest.raises(
        BenchError,
        match=r"--drafters: there is no folder or file 'absent'.*; available by name: .*ngram, suffix, recycle",
    ):
        named.read(parser.parse_args([suite, option, "absent"]))


def test_methods_are_left_out_by_patterns(drafters: dict[str, Path]) -> None:
    words = ("--drafters", drafters["vispec"], "--ablate", "--without", "vispec,*", "*-*")
    assert [m.name for m in ablations.methods(tiny_llava.model(), arguments(*words))] == ["stock", "ngram", "vispec"]


def test_a_drafter_of_another_model_is_refused_before_anything_is_measured() -> None:
    with pytest.raises(BenchError, match="--drafters: this drafter was made for scenes-video and does not fit"):
        ablations.methods(tiny_llava.model(), arguments("--drafters", "scenes-video-eagle"))


@pytest.mark.parametrize("method", sorted(ablations.ABLATIONS))
def test_a_variant_has_the_same_weights_and_one_other_switch(method: str, drafters: dict[str, Path]) -> None:
    whole = mmspec.load_drafter(drafters[method])
    weights = whole.state_dict()
    for variant in ablations.ABLATIONS[method]:
        made = ablations.altered(whole, variant.config)
        assert made.state_dict().keys() <= weights.keys() and not made.training
        assert all(torch.equal(w, weights[name]) for name, w in made.state_dict().items())
        changed = {f.name for f in fields(made.config) if getattr(made.config, f.name) != getattr(whole.config, f.name)}
        assert changed <= set(variant.config)
        assert all(getattr(made.config, name) == value for name, value in variant.config.items())


def test_a_variant_that_wants_other_weights_is_refused(drafters: dict[str, Path]) -> None:
    with pytest.raises(ValueError, match="trained without out_norm"):
        ablations.altered(
            ablations.altered(mmspec.load_drafter(drafters["eagle"]), {"out_norm": False}), {"out_norm": True}
        )


# -- whole runs ----------------------------------------------------------------------------------------------------


def test_all_methods_side_by_side(model: Path, drafters: dict[str, Path], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    words = ["--drafters", *drafters.values(), "--shown", "picture", "clip", "--frames", 2, "--prompt", "short",
             "--images", 1, "--batch", 1, "--temperature", 0, "--max-new-tokens", 8,
             "--without", "stock-static", "hf-prompt-lookup", "ngram"]  # fmt: skip
    assert run("--model", model, *words, "--json", tmp_path / "o.json", "--curves", tmp_path / "c.svg") == 0
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
    assert (tmp_path / "c.svg").stat().st_size > 1000


@pytest.mark.full
def test_stocks_own_path_stands_beside_a_drafter(model: Path, tmp_path: Path) -> None:
    """The model's first layers draft, in stock's own loop and in ours; where stock refuses, the cell says so."""
    words = ["--model", model, "--drafters", "model", "recycle", "--prompt", "short", "--images", 1, "--batch", 1, 2]
    words += ["--temperature", 0, "--max-new-tokens", 8, "--without", "stock-static", "hf-prompt-lookup", "ngram"]
    assert run(*words, "--json", tmp_path / "o.json", "--markdown", tmp_path / "o.md") == 0
    found = {(r["method"], r["batch"]): r for r in json.loads((tmp_path / "o.json").read_text())["records"]}
    assert [name for name, batch in found if batch == 1] == ["stock", "hf-model", "model", "recycle"]
    assert all(r["identical_rate"] == 1 for (name, batch), r in found.items() if not r["refused"])
    assert found["hf-model", 1]["n"] == found["model", 2]["n"] == 1
    assert [key for key, r in found.items() if r["refused"]] == [("hf-model", 2)]
    assert "refuses" in found["hf-model", 2]["note"] and "| hf-model | refused |" in (tmp_path / "o.md").read_text()


def test_stock_drafts_with_the_weights_of_a_block_drafter() -> None:
    """In its own class, the same tokens; a network that is none of its kind has no row."""
    target, named_so = tiny_llava.model(), {"heads": 4, "kv_heads": 2, "features": (1, 2), "block": 4, "mask_token": 5}
    made = BlockDrafter(BlockConfig(vocab=128, hidden=64, intermediate=48, layers=1, **named_so)).eval()
    (method,) = named.stocks_own("block", made)
    assert vlm.single(method) and method.arguments["speculation_type"] == "dflash"
    other = BlockDrafter(BlockConfig(vocab=128, hidden=64, intermediate=48, layers=1, taps=2, **named_so)).eval()
    assert not [*named.stocks_own("block", other)]
    words = torch.randint(6, 100, (1, 9))
    how = {"attention_mask": torch.ones_like(words), "max_new_tokens": 9, "do_sample": False}
    full = target.generate(words, **how)
    assert torch.equal(target.generate(words, **how, **method.arguments), full)


def test_ablations_in_one_table(
    model: Path, drafters: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for method in ("eagle", "vispec"):
        monkeypatch.setitem(ablations.ABLATIONS, method, ablations.ABLATIONS[method][:2])
    words = ["--drafters", drafters["eagle"], drafters["vispec"], "--ablate", "--shown", "clip", "--frames", 2,
             "--images", 1, "--batch", 1, "--temperature", 0, "--max-new-tokens", 6,
             "--without", "stock-static", "hf-prompt-lookup", "ngram"]  # fmt: skip
    assert run("--model", model, *words, "--json", tmp_path / "o.json") == 0
    records = {r["method"]: r for r in json.loads((tmp_path / "o.json").read_text())["records"]}
    assert list(records)[:3] == ["stock", "eagle", "eagle, pruned 50%"] and len(records) == 1 + 3 + 3
    assert all(r["identical_rate"] == 1.0 for r in records.values())
    assert records["eagle, pruned 50%"]["drafter_visual_rows"] == 3  # half of seven
    assert records["vispec, no summaries"]["drafter_visual_rows"] == 0
    assert records["vispec, no summaries"]["variant_of"] == "vispec" and not records["vispec"]["variant_of"]
    assert records["vispec, no summaries"]["setting"] == "summaries=False"


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


# -- arithmetic and curves -----------------------------------------------------------------------------------------


def test_tau_by_depth_ends_at_tau() -> None:
    stats = Stats(rounds=4, row_rounds=4, gained=10, drafter={"prompts": 2, "memory bytes": 600, "visual rows": 8})
    stats.accepted_by_depth.update({1: 3, 2: 2, 3: 1})
    made = {"stock": [TimedCall(1.0, 0.1, ((1,) * 11,), 10, 10, None)],
            "eagle": [TimedCall(1.0, 0.1, ((1,) * 11,), 4, 10, stats)]}  # fmt: skip
    found = vlm.figures("eagle", made, "stock", greedy=True, assisted=False)
    assert found["tau_by_depth"] == [1.75, 2.25, 2.5] and found["tokens_per_target_call"] == 2.5
    assert found["drafter_kv_bytes"] == 300 and found["drafter_visual_rows"] == 4


def test_curves_have_a_line_for_each_method(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    figure = pytest.importorskip("matplotlib.figure")
    drawn: list[Any] = []
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, path, **_: drawn.append(self))
    base = {"n": 3, "category": "all", "variant_of": "", "batch": 1, "temperature": 0.0, "kind": "clip",
            "tau_by_depth": [1.5, 2.0], "stock_path": False}  # fmt: skip
    records = [
        {**base, "method": method, "visual_tokens": seen, "speedup_e2e": speed, "speedup_e2e_p25": speed - 0.1,
         "speedup_e2e_p75": speed + 0.1}
        for method, speed in (("eagle", 1.5), ("msd", 1.2)) for seen in (512, 128)
    ]  # fmt: skip
    records.append({**records[0], "method": "eagle, pruned", "variant_of": "eagle"})
    records.append({**records[0], "kind": "picture", "visual_tokens": 64})
    plots.draw_curves(records, tmp_path / "c.png", "title")
    depths, speeds = drawn[0].axes
    assert [list(line.get_ydata()) for line in depths.lines] == [[1.0, 1.5, 2.0]] * 2
    assert [list(c.lines[0].get_xdata()) for c in speeds.containers] == [[128, 512]] * 2
    assert [list(c.lines[0].get_ydata()) for c in speeds.containers] == [[1.5, 1.5], [1.2, 1.2]]


# -- the MMSpec benchmark ------------------------------------------------------------------------------------------


def split(folder: Path) -> Path:
    """Two samples in the layout of dataset/MMSpec/testmini."""
    lines = []
    for i, topic in enumerate(("general vqa", "multi-turn conversation")):
        name = f"{topic.replace(' ', '_')}/img_{i:06}.png"
        (folder / "images" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (28, 28), (90 * i, 60, 30)).save(folder / "images" / name)
        row = {
            "id": f"img_{i:06}",
            "image": name,
            "turns": [f"w{5 + i} w9?", "w7?"],
            "category": "A title",
            "topic": topic,
        }
        lines.append(json.dumps(row))
    (folder / "mmspec.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def test_all_of_a_split_of_mmspec_is_asked(model: Path, tmp_path: Path) -> None:
    data = split(tmp_path / "dataset" / "MMSpec" / "testmini")
    words = ["--data", data, "--images", "all", "--max-new-tokens", 4, "--batch", 1, "--temperature", 0,
             "--without", "stock-static", "hf-prompt-lookup"]  # fmt: skip
    assert run("--model", model, *words, "--json", tmp_path / "o.json") == 0
    found = json.loads((tmp_path / "o.json").read_text())
    cells = {(r["method"], r["category"]): r["n"] for r in found["records"]}
    assert cells == {(m, c): n for m in ("stock", "ngram") for c, n in
                     (("all", 2), ("general vqa", 1), ("multi-turn conversation", 1))}  # fmt: skip
    assert found["provenance"]["data"] == [str(data)]
