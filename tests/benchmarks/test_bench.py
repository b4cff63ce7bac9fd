"""`mmspec bench`: the arithmetic of its records, what it reads, and whole runs on a model of a few thousand weights."""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path
from typing import Any

import pytest
import tiny_llava
import torch
from PIL import Image

import mmspec
from benchmarks.__main__ import parser as workshop
from benchmarks.suites import published
from benchmarks.suites import vlm as suite_vlm
from mmspec.app import cli, compare
from mmspec.app.bench import command as bench
from mmspec.app.bench import report
from mmspec.app.bench import vlm as bench_vlm
from mmspec.app.bench.answers import Clock, TimedCall, VlmBench
from mmspec.app.bench.command import BenchError
from mmspec.app.bench.questions import Question, read_questions
from mmspec.app.provenance import provenance
from mmspec.drafters.eagle import EagleConfig, EagleDrafter
from mmspec.statistics import Stats

ROOT = Path(__file__).parents[2]
QUICK = ["--images", "2", "--max-new-tokens", "8", "--prompt", "short"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llava.save(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(autouse=True)
def one_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "PEAKS", 1)  # a median of several is of no use here


def run(*words: object) -> int:
    parser = argparse.ArgumentParser()
    bench.configure(parser)
    return bench.run(parser.parse_args(["vlm", *map(str, words)]))


def call(seconds: float, first: float, lengths: tuple[int, ...], steps: int, stats: Stats | None = None) -> TimedCall:
    answers = tuple(tuple(range(n)) for n in lengths)
    return TimedCall(seconds, first, answers, steps, sum(lengths) - len(lengths), stats)


# -- arithmetic ----------------------------------------------------------------------------------------------------


def test_figures_of_known_calls() -> None:
    spent = Stats(rounds=5, tokens=11, row_rounds=5)
    spent.seconds.update(draft=0.1, verify=0.3, other=0.1, prefill=9.0)
    made = {
        "stock": [call(1.1, 0.1, (11,), 10)],
        "stock-static": [call(0.9, 0.1, (11,), 10)],
        "eagle": [call(0.6, 0.1, (11,), 5, spent)],
    }
    best = report.fastest(made, bench_vlm.STOCK_PATHS, "per_token")
    found = bench_vlm.figures("eagle", made, best, greedy=True, assisted=False)
    assert best == "stock-static"
    assert found["speedup_e2e"] == pytest.approx(1.1 / 0.6)
    assert found["speedup_decode"] == pytest.approx(2.0)
    assert found["speedup_vs_best_stock"] == pytest.approx(0.9 / 0.6)
    assert found["c"] == pytest.approx(1.0)  # 0.5 s for 5 rounds, 1 s for 10 steps
    assert found["tokens_per_target_call"] == pytest.approx(2.0)
    assert found["draft_share"] == pytest.approx(0.2)  # the prefill is no part of a round
    assert found["identical_rate"] == 1.0
    assert found["tokens_per_target_call"] / found["c"] == pytest.approx(found["speedup_decode"])


def test_figures_per_token_when_lengths_differ() -> None:
    made = {"stock": [call(1.0, 0.0, (10,), 9)], "ngram": [call(2.0, 0.0, (20,), 19)]}
    found = bench_vlm.figures("ngram", made, "stock", greedy=False, assisted=False)
    assert found["speedup_e2e"] == pytest.approx(1.0)
    assert found["identical_rate"] is None
    nothing = bench_vlm.figures("eagle", made, "stock", greedy=True, assisted=False)
    assert nothing["speedup_e2e"] is None and nothing["n"] == 0


def test_spread() -> None:
    assert report.spread("x", [3.0, None, 1.0, 2.0]) == {"x": 2.0, "x_p25": 1.5, "x_p75": 2.5}
    assert report.spread("x", [4.0]) == {"x": 4.0, "x_p25": 4.0, "x_p75": 4.0}
    assert report.spread("x", [None])["x"] is None


def test_every_method_starts_as_often_and_follows_different_ones() -> None:
    orders = [compare.in_turn(4, turn) for turn in range(8)]
    assert all(sorted(order) == [0, 1, 2, 3] for order in orders)
    assert sorted(order[0] for order in orders) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert len({order[order.index(2) - 1] for order in orders if order[0] != 2}) > 1


def test_batches_overlap_by_half() -> None:
    some = [Question((), str(i)) for i in range(6)]
    assert [q.prompt for q in bench.batches(some, 1)[5]] == ["5"]
    assert [[q.prompt for q in group] for group in bench.batches(some, 4)][-1] == ["4", "5", "0", "1"]
    assert len(bench.batches(some, 4)) == 3


def test_clock_notes_the_first_tokens_only() -> None:
    clock = Clock()
    for count in (7, 2, 1):  # the prompt, then what was generated
        clock.put(torch.zeros(count))
    clock.end()
    assert clock.puts == 2 and clock.first_tokens == 2 and clock.first_at > 0


def test_peak_memory_sees_what_a_call_holds() -> None:
    found = compare.peak_mb(torch.device("cpu"), lambda: torch.ones(40 * 2**18).sum())  # 40 MiB
    assert found is None or 30 < found < 80


def test_provenance_is_plain_data() -> None:
    found = provenance(torch.device("cpu"), torch.float32)
    assert found["system"] == f"{platform.system()} {platform.machine()}"  # and not which kernel, built when
    assert json.loads(json.dumps(found)) == found
    assert found["versions"]["torch"] and found["device"] and found["dtype"] == "float32" and found["threads"] >= 1


# -- questions -----------------------------------------------------------------------------------------------------


def save_pictures(folder: Path, count: int) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(count):
        Image.new("RGB", (28, 28), (40 * i, 90, 10)).save(folder / f"{i}.png")
    return [f"{i}.png" for i in range(count)]


def test_reads_a_folder_laid_out_like_mmspec(tmp_path: Path) -> None:
    names = save_pictures(tmp_path / "images" / "general_vqa", 4)
    rows = [
        {"id": n, "image": f"general_vqa/{n}", "turns": [f"w{i}?", "more?"], "category": "free", "topic": f"t{i % 2}"}
        for i, n in enumerate(names)
    ]
    (tmp_path / "mmspec.jsonl").write_text("\n".join(map(json.dumps, rows)))
    measured, others = read_questions(tmp_path, 2), read_questions(tmp_path, 2, without=2)
    assert [q.prompt for q in measured] == ["w0?", "w2?"] and [q.prompt for q in others] == ["w1?", "w3?"]
    assert measured[0].category == "t0" and measured[0].images[0].getpixel((0, 0)) == (0, 90, 10)


def test_reads_several_pictures_and_plain_folders(tmp_path: Path) -> None:
    names = save_pictures(tmp_path / "pictures", 3)
    row = {"images": [f"pictures/{n}" for n in names], "question": "which?", "task": "pairs"}
    (tmp_path / "list.jsonl").write_text(json.dumps(row))
    (question,) = read_questions(tmp_path / "list.jsonl", 1)
    assert len(question.images) == 3 and question.prompt == "which?" and question.category == "pairs"
    assert [q.prompt for q in read_questions(tmp_path / "pictures", 3)] == ["", "", ""]


@pytest.mark.parametrize(
    ("content", "count", "told"),
    [
        ('{"image": "0.png", "question": "w?"}', 3, "has 1 questions; 3 are needed"),
        ('{"question": "w?"}', 1, "no picture: its fields are question"),
        ('{"image": "0.png", "answer": "w"}', 1, "no prompt"),
        ('{"image": "0.png", "video": "a.mp4", "question": "w?"}', 1, "question 1: 'video' holds a video, and only"),
    ],
)
def test_says_what_is_wrong_with_a_list(tmp_path: Path, content: str, count: int, told: str) -> None:
    save_pictures(tmp_path, 1)
    (tmp_path / "list.jsonl").write_text(content)
    with pytest.raises(BenchError, match=told):
        read_questions(tmp_path / "list.jsonl", count)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["vlm", "--frames", "4"], "--frames: only clips have frames (--shown clip); leave it out"),
        (["vlm", "--tune-images", "2"], "--tune-images: nothing is tuned without --tune; leave it out"),
        (["vlm", "--data", "{}", "--shown", "pair"], "--shown: --data shows your own pictures, and nothing drawn"),
        (["vlm", "--data", "{}", "--prompt", "short"], "--prompt: the questions of "),
        (["caption", "--data", "{}", "--prompt", "short"], "--prompt: the questions of "),
        (
            ["image", "--pictures", "{}"],
            "--pictures: no quality is measured without --quality-images N",
        ),
        (["image", "--model", "mar", "--rule", "x", "--prompts", "{}"], "--prompts and --rule: a MAR draws classes by"),
    ],
)
def test_flags_that_would_change_nothing_are_refused(
    words: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_pictures(tmp_path, 1)
    (tmp_path / "list.jsonl").write_text('{"image": "0.png", "question": "w?"}')
    words = [word.format(tmp_path / "list.jsonl") for word in words]
    if words[0] in ("vlm", "caption"):
        words += ["--model", str(tiny_llava.save(tmp_path / "model")), "--images", "1"]
    assert cli.main([*words, "--device", "cpu"], workshop) == 1
    assert told in capsys.readouterr().err


def test_the_screen_shows_the_columns_that_fit_there() -> None:
    records = json.loads((ROOT / "benchmarks/results/vlm.json").read_text())["records"]
    narrow, wide = report.table(records), report.markdown(records, {}, {})
    assert "vs best stock" in narrow and max(map(len, narrow.splitlines())) <= 120
    assert "TTFT ms" not in narrow and "TTFT ms" in wide


@pytest.mark.parametrize("content", ["[1, 2]", '"a text"', "{"])
def test_a_file_that_is_no_list_of_questions(tmp_path: Path, content: str) -> None:
    good = '\ufeff{"image": "0.png", "prompt": "one\u2028two"}\n'  # with a mark of UTF-8, and a separator of lines
    (tmp_path / "list.jsonl").write_text(good, encoding="utf-8")
    save_pictures(tmp_path, 1)
    assert read_questions(tmp_path / "list.jsonl", 1)[0].prompt == "one\u2028two"
    (tmp_path / "list.jsonl").write_text(good + content, encoding="utf-8")
    with pytest.raises(BenchError, match=r"list\.jsonl, line 2: a question is a JSON object on one line; "):
        read_questions(tmp_path / "list.jsonl", 1)
    (tmp_path / "more.jsonl").write_text(content)
    with pytest.raises(BenchError, match=r"holds 2 lists \(list\.jsonl, more\.jsonl\); name one of them"):
        read_questions(tmp_path, 1)


@pytest.mark.parametrize("flag", ["--json", "--markdown"])
def test_a_file_that_cannot_be_written_ends_the_run_before_it_begins(
    flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setattr(bench_vlm, "measure", lambda *_: pytest.fail("it has begun"))
    assert run(flag, tmp_path / "file" / "out") == 1
    told = capsys.readouterr().err
    assert "vlm: " in told and str(tmp_path / "file") in told and (tmp_path / "file").read_text() == "in the way"


def test_no_data(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"a \.jsonl file"):
        read_questions(tmp_path / "absent.csv", 1)


# -- whole runs ----------------------------------------------------------------------------------------------------


def test_a_run(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = {kind: tmp_path / f"out.{kind}" for kind in ("json", "markdown")}
    files = [word for kind, path in written.items() for word in (f"--{kind}", path)]
    assert run("--model", model, *QUICK, "--batch", 1, 2, "--without", "stock-static", *files) == 0
    found = json.loads(written["json"].read_text())
    cells = {(r["method"], r["batch"], r["temperature"]): r for r in found["records"]}
    assert len(cells) == len(found["records"]) == 3 * 2 * 2
    for batch in (1, 2):
        greedy, sampled = cells["ngram", batch, 0.0], cells["ngram", batch, 1.0]
        assert greedy["identical_rate"] == 1.0 and sampled["identical_rate"] is None
        assert greedy["tokens_per_target_call"] >= 1 and greedy["speedup_e2e"] > 0 and greedy["c"] > 0
        assert cells["stock", batch, 0.0]["speedup_e2e"] == 1.0 and greedy["best_stock"] == "stock"
    assert cells["hf-prompt-lookup", 1, 0.0]["n"] == 2
    assert cells["hf-prompt-lookup", 2, 0.0]["n"] == 0 and "batch > 1" in cells["hf-prompt-lookup", 2, 0.0]["note"]
    assert found["provenance"]["model"] == str(model) and found["provenance"]["seconds"] > 0
    said = capsys.readouterr()
    assert [line for line in said.err.splitlines() if line.startswith("cell ")] == [
        f"cell {number} of 4: batch {batch}, temperature {heat}, short prompt; 3 methods on 2 questions"
        for number, (batch, heat) in enumerate(((1, 0), (1, 1), (2, 0), (2, 1)), 1)
    ]
    assert "ngram" in said.out and "| ngram |" in written["markdown"].read_text()


def test_tunes_a_feature_drafter_and_survives_a_failing_path(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = EagleDrafter(EagleConfig(hidden=64, intermediate=96, heads=4, kv_heads=2, vocab=128))
    monkeypatch.setattr(mmspec, "load_drafter", lambda path: drafter, raising=False)
    grids = {"drafter": ({"depth": 2, "width": 1}, {"depth": 2, "width": 2, "size": 4})}
    monkeypatch.setattr(suite_vlm, "GRIDS", grids)
    whole = VlmBench.call

    def broken(bench_: VlmBench, method: Any, *rest: Any) -> TimedCall:
        if method.name == "stock-static":
            raise RuntimeError("no compiler here")
        return whole(bench_, method, *rest)

    monkeypatch.setattr(VlmBench, "call", broken)
    words = ["--drafter", "somewhere", "--batch", 1, "--temperature", 0, "--tune", "--tune-images", 1]
    words = ["vlm", "--model", model, *QUICK, *words, "--json", tmp_path / "out.json"]
    assert cli.main([*map(str, words)], workshop) == 0
    found = json.loads((tmp_path / "out.json").read_text())
    records = {r["method"]: r for r in found["records"]}
    chosen = found["tuned"]["batch 1, temperature 0"]["eagle"]
    assert chosen["chosen"] in [one["setting"] for one in chosen["tried"]] and len(chosen["tried"]) == 2
    assert records["eagle"]["identical_rate"] == 1.0 and "depth 2" in records["eagle"]["setting"]
    assert records["stock-static"]["n"] == 0 and records["stock-static"]["note"].endswith("no compiler here")


def test_all_questions_of_a_folder_are_grouped_by_category(model: Path, tmp_path: Path) -> None:
    names = save_pictures(tmp_path / "images" / "free", 4)
    rows = [{"image": f"free/{n}", "turns": [f"w{5 + i} w9", "w7?"], "topic": f"t{i % 2}"} for i, n in enumerate(names)]
    (tmp_path / "mmspec.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = ["--data", tmp_path, "--images", "all", "--max-new-tokens", 8, "--batch", 1, 2, "--temperature", 0]
    assert run("--model", model, *words, "--without", "stock-static", "--json", tmp_path / "out" / "o.json") == 0
    found = json.loads((tmp_path / "out" / "o.json").read_text())
    records = found["records"]
    assert {(r["batch"], r["category"]) for r in records} == {(1, "all"), (1, "t0"), (1, "t1"), (2, "all")}
    assert {r["n"] for r in records if r["category"] == "t1"} == {2} and found["provenance"]["data"] == [str(tmp_path)]


def test_several_data_sets_make_a_table(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (name,) = save_pictures(tmp_path, 1)
    for kind in ("one", "other"):
        (tmp_path / f"{kind}.jsonl").write_text(json.dumps({"image": name, "question": f"w5 w{len(kind)}"}))
    words = ["--data", *(tmp_path / f"{kind}.jsonl" for kind in ("one", "other")), "--images", 1, "--batch", 1]
    words += ["--temperature", 0, "--max-new-tokens", 6, "--without", "stock-static", "hf-*"]
    files = ["--json", tmp_path / "out.json", "--markdown", tmp_path / "out.md"]
    assert cli.main([*map(str, ["vlm", "--model", model, *words, *files])], workshop) == 0
    records = json.loads((tmp_path / "out.json").read_text())["records"]
    assert [r["kind"] for r in records] == [
        str(tmp_path / f"{kind}.jsonl") for kind in ("one", "one", "other", "other")
    ]
    ((title, (head, stock, ngram)),) = published.data_tables(records).items()
    assert title == "tokens/call, speedup: batch 1, temperature 0" and head[-1] == "mean" and len(head) == 4
    assert stock == ["stock", *["1.00, 1.00x"] * 3] and ngram[0] == "ngram" and ngram[3].endswith("x")
    assert title in capsys.readouterr().out and f"## {title}" in (tmp_path / "out.md").read_text()
    del records[3]
    assert published.data_tables(records)[title][2][2:] == ["-", "-"] and published.data_tables(records[:2]) == {}


def test_refuses_unknown_methods(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--model", model, *QUICK, "--without", "vispc") == 1
    assert "no method matches 'vispc'; choose from stock, stock-static" in capsys.readouterr().err
    assert run("--model", model, *QUICK, "--without", "stock") == 1
    assert "stock cannot be left out" in capsys.readouterr().err


@pytest.mark.parametrize("words", ["--images 0", "--batch 0", "--max-new-tokens x", "--temperature -1"])
def test_values_that_cannot_be_meant_are_refused_before_the_work(words: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as stop:
        run(*words.split())
    assert stop.value.code == 2 and "is not a" in capsys.readouterr().err
