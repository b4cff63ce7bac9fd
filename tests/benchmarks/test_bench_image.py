"""`mmspec bench image`: the arithmetic of its records, its methods, and whole runs on a tiny random pipeline."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import tiny_llamagen
import torch
from PIL import Image

from benchmarks.__main__ import parser as workshop
from benchmarks.suites import gallery, image_methods, static_loop
from mmspec.app.bench import command as bench
from mmspec.app.bench import image as bench_image
from mmspec.app.bench import report
from mmspec.app.bench.command import BenchError, matching
from mmspec.app.compare import Method
from mmspec.app.painter import ImageResult, ImageSubject
from mmspec.registry import resolve_rule
from mmspec.statistics import Stats

QUICK = ["--device", "cpu", "--images", 1, "--batch", 1, "--methods"]
JACOBI = "jacobi-maximal-8"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llamagen.saved("text", tmp_path_factory, prefix=24)


@pytest.fixture(scope="module")
def classes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llamagen.saved("class", tmp_path_factory)


def run(*words: object) -> int:
    args = workshop().parse_args(["image", *map(str, words)])
    return args.run(args)


def painting(
    seconds: float, rounds: int, spent: tuple[float, ...] = (0.0,), fill: int = 0, **parts: float
) -> ImageResult:
    rows = len(spent)
    stats = Stats(rounds=rounds, tokens=16 * rows, row_rounds=rounds * rows, gained=15 * rows)
    stats.seconds.update(parts)
    return ImageResult([Image.new("RGB", (8, 8))] * rows, torch.full((rows, 4, 4), fill), seconds, stats, list(spent))


# -- arithmetic ----------------------------------------------------------------------------------------------------


def test_figures_of_known_calls() -> None:
    made = {
        "ar": [painting(2.0, 15, verify=1.5, prefill=0.3)],
        "ar-static": [painting(1.6, 15, verify=1.2)],
        "jacobi": [painting(1.0, 7, verify=0.5, draft=0.1, other=0.1, prefill=0.3)],
        "jacobi+scaled": [painting(0.5, 3, spent=(0.5, 1.5), fill=1, verify=0.3)],
    }
    assert report.fastest(made, bench_image.PLAIN, "seconds") == "ar-static"
    found = bench_image.figures("jacobi", made, "ar-static")
    assert found["speedup_e2e"] == pytest.approx(2.0)
    assert found["speedup_decode"] == pytest.approx(1.5 / 0.7)
    assert found["speedup_vs_best_plain"] == pytest.approx(1.6)
    assert found["c"] == pytest.approx(1.0)  # 0.7 s for 7 rounds, 1.5 s for 15 steps
    assert found["forwards"] == 8 and found["compression"] == 2.0
    assert found["tokens_per_target_call"] == pytest.approx(15 / 7)
    assert found["shares"] == pytest.approx({"draft": 1 / 7, "verify": 5 / 7, "other": 1 / 7})
    assert found["identical_rate"] == 1.0 and found["n"] == 1 and not found["stock_path"]
    made["ar"] = [painting(2.0, 15, spent=(0.0, 0.0), verify=1.5)]
    rule = bench_image.figures("jacobi+scaled", made, "ar-static")
    assert (rule["spent"], rule["spent_max"], rule["spent_per_token"]) == (1.0, 1.5, 1.0 / 16)
    assert rule["identical_rate"] == 0.0 and rule["forwards"] == 4 and rule["compression"] == 4.0
    assert rule["seconds_per_image"] == 0.25
    failed = bench_image.figures("eagle", made, "ar-static")
    assert failed["n"] == 0 and failed["speedup_e2e"] is failed["compression"] is failed["spent"] is None


def test_a_gallery_sums_up_its_calls() -> None:
    held = gallery.Gallery()
    held.add(painting(1.0, 7, spent=(0.1, 0.2)))
    held.add(painting(0.5, 3, spent=(0.3,)))
    assert held.forwards == 1 + (2 * 7 + 3) / 3 and held.compression == 16 / held.forwards
    assert held.seconds == 1.5 and held.spent == [0.1, 0.2, 0.3] and len(held.images) == 3


# -- methods -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codes", [64, 1024, 16384])
def test_every_rule_of_the_table_is_one(codes: int) -> None:
    specs = [*image_methods.published(codes).values(), *image_methods.ours(codes).values()]
    if codes < 1000:
        codebook = torch.randn(codes, 4)
        assert not any(resolve_rule(spec, codebook).lossless for spec in specs)
    k = [int(spec.split("k=")[1].split(",")[0]) for spec in specs if "k=" in spec]
    assert max(k) == max(10, image_methods.published_k(codes)) < codes
    assert image_methods.published_k(16384) == 1000


def test_methods_are_chosen_by_pattern() -> None:
    named = [("eagle", "folder")]
    known = [*image_methods.lossless(named), *image_methods.relaxed(64, named, ["scaled(omega=9.0)"], 0.5)]
    assert len({m.name for m in known}) == len(known)
    windows = [f"jacobi-{coupling}-8" for coupling in ("none", "maximal", "gumbel")]
    assert [m.name for m in matching(known, ["jacobi-*-8"])] == ["ar", *windows]
    rules = {f"{base}+scaled" for base in ("jacobi", "eagle", "eagle-static", "eagle-chain")}
    assert {m.name for m in matching(known, ["*+scaled"])} == {"ar", *rules}
    assert "ar-compiled" not in {m.name for m in matching(known, None, ["ar-*"])}
    with pytest.raises(bench.BenchError, match=r"no method matches 'jacoby-\*'; choose from ar, ar-static"):
        matching(known, ["jacoby-*"])
    own = next(m for m in known if m.name == "jacobi+scaled(omega=9.0)")
    about = bench_image.facts(own)
    assert own.options["budget"] == 0.5 and not about["lossless"] and not about["exact_seed"]
    windows = {f"jacobi-exact-seed-{window}{how}" for window in (16, 32) for how in ("", "-compiled")}
    exact = {"ar", "ar-static", "ar-compiled", *windows, "jacobi-exact-seed-32-auto", "eagle-exact-seed"}
    exact |= {"jacobi-exact-seed-12-compiled", "jacobi-exact-seed-24-compiled"}
    assert {m.name for m in known if bench_image.facts(m)["exact_seed"]} == exact


def test_mmspec_bench_image_measures_a_few_methods_and_the_rules_that_are_named(monkeypatch) -> None:
    monkeypatch.setattr(bench_image.drafters, "read", lambda *args, **more: {"eagle": "E", "heads": "H"})
    args = argparse.Namespace(enable=["depth=2"], rule=["scaled(omega=2)"], budget=0.5)
    known = {m.name: m for m in bench_image.methods(ImageSubject(tiny_llamagen.pipeline("class")), args)}
    exact = ["jacobi-exact-seed-16", "jacobi-exact-seed-32", "jacobi-exact-seed-16-compiled"]
    drafted = ["jacobi-none-16", "jacobi-maximal-16", "eagle"]
    relaxed = [f"{name}+scaled(omega=2)" for name in drafted]
    assert list(known) == ["ar", *drafted, *exact, "eagle-exact-seed", "heads-exact-seed", *relaxed]
    assert known["eagle"].options == {"depth": 2} and known["jacobi-none-16"].options["coupling"] == "none"
    assert known[relaxed[2]].options == {"depth": 2, "rule": "scaled(omega=2)", "budget": 0.5}
    for wrong, told in (({"rule": []}, "--budget limits"), ({"rule": ["foo"]}, "unknown rule 'foo'")):
        with pytest.raises((bench.BenchError, ValueError), match=told):
            bench_image.methods(ImageSubject(tiny_llamagen.pipeline("class")), argparse.Namespace(**vars(args) | wrong))


# -- plain paths ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["text", "class"])
@pytest.mark.parametrize(
    "settings", [{}, {"guidance_scale": 1.0}, {"temperature": 0.0}, {"top_k": 3, "temperature": 0.7}], ids=str
)
def test_the_static_plain_path_draws_the_same_picture(kind: str, settings: dict[str, Any]) -> None:
    painter = ImageSubject(tiny_llamagen.pipeline(kind), **settings)
    asked = ["a red circle", "a small blue square"] if kind == "text" else [1, 2]
    stock, before = painter.paint(asked, [4, 5]), type(painter.pipe)
    static_loop.begin(painter.pipe, compiled=False)
    for _ in range(2):  # its buffers are used again
        static = painter.paint(asked, [4, 5])
        assert torch.equal(static.tokens, stock.tokens)
    assert (static.forwards, static.compression) == (16, 1.0) and static.stats.seconds["verify"] > 0
    static_loop.end(painter.pipe)
    assert type(painter.pipe) is before
    other = painter.paint(asked, [6, 7])
    assert settings.get("temperature") == 0 or not torch.equal(other.tokens, stock.tokens)


@pytest.mark.full
def test_the_compiled_plain_path_draws_the_same_picture() -> None:
    painter = ImageSubject(tiny_llamagen.pipeline("class"))
    stock = painter.paint([1, 2], [4, 5])
    static_loop.begin(painter.pipe, compiled=True)
    assert torch.equal(painter.paint([1, 2], [4, 5]).tokens, stock.tokens)
    static_loop.end(painter.pipe)


# -- galleries -----------------------------------------------------------------------------------------------------


def test_a_gallery_goes_on_where_it_was_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    painter = ImageSubject(tiny_llamagen.pipeline("class"))
    asked, seeds, told = [1, 2, 3, 4, 5], [11, 12, 13, 14, 15], {"setting": ""}
    whole = gallery.fill(painter, asked, seeds, 2, None, told)
    calls: list[list[int]] = []
    paint = painter.paint

    def stopped(some: list[int], with_seeds: list[int]) -> ImageResult:
        if len(calls) == 1:
            calls.append([])
            raise KeyboardInterrupt
        calls.append(list(some))
        return paint(some, with_seeds)

    monkeypatch.setattr(painter, "paint", stopped)
    with pytest.raises(KeyboardInterrupt):
        gallery.fill(painter, asked, seeds, 2, tmp_path / "g", told)
    again = gallery.fill(painter, asked, seeds, 2, tmp_path / "g", told)
    assert calls == [[1, 2], [], [3, 4], [5]]
    assert [i.tobytes() for i in again.images] == [i.tobytes() for i in whole.images]
    assert (again.forwards, again.spent) == (whole.forwards, whole.spent)
    assert len(gallery.fill(painter, asked, seeds, 2, tmp_path / "g", told).images) == 5 and len(calls) == 4
    with pytest.raises(BenchError, match="pictures of another run: seeds differs"):
        gallery.fill(painter, asked, [0, *seeds[1:]], 2, tmp_path / "g", told)
    with pytest.raises(BenchError, match="setting differs"):
        gallery.fill(painter, asked, seeds, 2, tmp_path / "g", {"setting": "window 4"})


# -- whole runs ----------------------------------------------------------------------------------------------------


def test_times_methods_side_by_side(classes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = {kind: tmp_path / f"out.{kind}" for kind in ("json", "markdown")}
    files = [word for kind, path in written.items() for word in (f"--{kind}", path)]
    words = ["--model", classes, "--device", "cpu", "--images", 2, "--batch", 1, 2]
    assert run(*words, "--methods", "ar-static", JACOBI, "jacobi-exact*16", "jacobi+scaled", *files) == 0
    found = json.loads(written["json"].read_text())
    cells = {(r["method"], r["batch"]): r for r in found["records"]}
    assert len(cells) == len(found["records"]) == 5 * 2
    for batch in (1, 2):
        plain, static, exact = (cells[name, batch] for name in ("ar", "ar-static", "jacobi-exact-seed-16"))
        assert plain["speedup_e2e"] == plain["compression"] == plain["c"] == 1.0 and plain["forwards"] == 16
        assert static["identical_rate"] == exact["identical_rate"] == 1.0 and exact["exact_seed"]
        assert exact["compression"] >= 1 and exact["c"] > 0 and plain["best_plain"] in ("ar", "ar-static")
        rule = cells["jacobi+scaled", batch]
        assert not rule["lossless"] and rule["spent"] >= 0 and "rule scaled(omega=1.5)" in rule["setting"]
        assert cells[JACOBI, batch]["lossless"] and cells[JACOBI, batch]["spent"] == 0
    assert found["provenance"]["seed"] == 0
    told = capsys.readouterr().out
    assert "batch 2" in told and "same image" in told
    assert "| jacobi+scaled | changed |" in written["markdown"].read_text()


@pytest.mark.full
def test_judges_pictures(text: Path, tmp_path: Path) -> None:
    words = ["--model", text, "--device", "cpu", "--images", 0, "--quality-images", 4, "--quality-batch", 3]
    words += ["--methods", "jacobi-exact*16", "jacobi+scaled", "--noise-runs", 1]
    kept = ["--pictures", tmp_path / "pictures", "--json", tmp_path / "out.json"]
    assert run(*words, *kept) == 0
    found = json.loads((tmp_path / "out.json").read_text())
    records = {r["method"]: r for r in found["records"]}
    assert set(records) == {"ar", "jacobi-exact-seed-16", "jacobi+scaled"}
    noise = records["ar"]["noise"]
    assert len(noise) == 1 and records["ar"]["fd_ar"] == noise[0] > 0 and records["ar"]["fd_over_noise"] == 1.0
    assert records["jacobi-exact-seed-16"]["fd_ar"] == pytest.approx(noise[0])  # the very same pictures
    assert records["jacobi+scaled"]["fd_ar"] > 0 and records["jacobi+scaled"]["spent"] >= 0
    for record in records.values():
        assert record["n"] == 4 and 0 <= record["precision"] <= 1 and 0 <= record["faithfulness"] < 0.7
        assert record["fd_real"] > 0 and not record["note"]
    before = (tmp_path / "out.json").read_text()
    assert run(*words, *kept) == 0  # nothing is left to draw
    again = json.loads((tmp_path / "out.json").read_text())
    assert again["records"] == json.loads(before)["records"]
    assert len(list((tmp_path / "pictures").glob("ar.*/00003.png"))) == 2


def test_pictures_of_classes_are_judged_without_real_ones(classes: Path, tmp_path: Path) -> None:
    words = ["--model", classes, "--device", "cpu", "--images", 0, "--quality-images", 6, "--methods", "jacobi+scaled*"]
    words += ["--rule", "scaled(omega=1.1)", "--noise-runs", 1, "--json", tmp_path / "out.json"]
    assert run(*words) == 0
    records = json.loads((tmp_path / "out.json").read_text())["records"]
    assert [r["method"] for r in records] == ["ar", "jacobi+scaled", "jacobi+scaled(omega=1.1)"]
    assert all(r["fd_ar"] > 0 and r["fd_real"] is None and r["faithfulness"] is None for r in records)


def test_records_outlive_a_stop(
    classes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    timed = bench_image.timed

    def stopped(bench_: Any, chosen: Any, prompts: Any, batch: int) -> Any:
        if batch == 2:
            raise KeyboardInterrupt
        return timed(bench_, chosen, prompts, batch)

    monkeypatch.setattr(bench_image, "timed", stopped)
    words = ["--model", classes, "--device", "cpu", "--images", 2, "--batch", 1, 2, "--methods", JACOBI]
    words += ["--json", tmp_path / "out.json", "--markdown", tmp_path / "out.md"]
    with pytest.raises(KeyboardInterrupt):
        run(*words)
    first = json.loads((tmp_path / "out.json").read_text())["records"]
    assert [r["batch"] for r in first] == [1, 1] and (tmp_path / "out.md").exists()
    assert "speedup" in capsys.readouterr().out  # the table of what was measured


def test_a_failing_method_is_a_result(classes: Path, tmp_path: Path) -> None:
    words = [*QUICK, "*+grouped", "*+pooled", "--budget", 0.1]  # grouped cannot be limited by a budget
    assert run("--model", classes, *words, "--json", tmp_path / "out.json") == 0
    records = {r["method"]: r for r in json.loads((tmp_path / "out.json").read_text())["records"]}
    assert records["jacobi+grouped"]["n"] == 0 and "cannot be limited by a budget" in records["jacobi+grouped"]["note"]
    assert records["jacobi+pooled"]["n"] == 1 and records["jacobi+pooled"]["spent_max"] <= 0.1


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--images", 0], "nothing to do"),
        (["--markdown", Path(__file__).parent], "is a folder; name a file in it"),
        (["--methods", "jacobi-*-8", "--rule", "scaled(omega=2)"], "--methods leaves out every rule of --rule"),
        (["--methods", "jacoby"], "no method matches 'jacoby'; choose from ar,"),
        (["--images", 0, "--quality-images", 3], "--quality-images must be more than 3"),
        (["--model", "nowhere"], "no folder 'nowhere'"),
    ],
)
def test_bad_input(classes: Path, capsys: pytest.CaptureFixture[str], words: list[object], told: str) -> None:
    assert run("--model", classes, "--device", "cpu", *words) == 1
    assert told in capsys.readouterr().err


def test_layouts_show_every_record_that_they_title() -> None:
    made = {"ar": [painting(2.0, 15, verify=1.5)]}
    facts = bench_image.facts(Method("ar"))
    record = {"suite": "image", "batch": 1, **facts, **bench_image.figures("ar", made, "ar"), "note": "a note"}
    page = report.markdown([record], {"model": "m"}, {})
    assert "## batch 1" in page and "| ar | kept | 1.00x (1.00-1.00) |" in page and "ar: a note" in page
    assert "`forwards`" in page and "`ttft_ms`" not in page
