"""`mmspec bench caption`: static and continuous batches of the same captions, on a tiny model."""

from __future__ import annotations

import argparse
import json

import pytest
import tiny_llava
from PIL import Image

from mmspec.app import cli, compare
from mmspec.app.bench import caption


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, str]:
    folder = tmp_path_factory.mktemp("bench")
    rows = []
    for number in range(5):
        Image.new("RGB", (28, 28), (50 * number, 90, 200)).save(folder / f"{number}.png")
        rows.append({"image": f"{number}.png", "prompt": f"w{5 + number}"})
    (folder / "asked.jsonl").write_text("\n".join(map(json.dumps, rows)))
    model = tiny_llava.save(folder / "model")
    out, page = folder / "out.json", folder / "out.md"
    words = ["bench", "caption", "--model", str(model), "--data", str(folder / "asked.jsonl"), "--images", "5"]
    words += ["--rows", "1", "2", "--turns", "2", "--max-new-tokens", "6", "--device", "cpu"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compare, "PEAKS", 1)
        assert cli.main([*words, "--json", str(out), "--markdown", str(page)]) == 0
    return json.loads(out.read_text()), page.read_text()


def test_every_method_is_measured_on_the_same_captions(measured: tuple[dict, str]) -> None:
    found, page = measured
    names = ["static", "continuous", "static + ngram", "continuous + ngram"]
    assert [(r["rows"], r["method"]) for r in found["records"]] == [(rows, name) for rows in (1, 2) for name in names]
    for record in found["records"]:
        assert record["identical_rate"] == 1.0 and record["n"] == 2 and record["captions"] == 5
        assert record["captions_per_s"] > 0
        assert record["stock_path"] is (record["method"] == "static")
    assert all(r["gain"] == 1 for r in found["records"] if r["method"].startswith("static"))
    assert found["provenance"]["argv"] and found["provenance"]["device"]
    assert "## 5 captions, batches of 2" in page and "| continuous + ngram |" in page


def test_the_default_prompts_ask_for_long_and_short_answers() -> None:
    parser = argparse.ArgumentParser()
    caption.configure(parser)
    asked = caption.questions(parser.parse_args(["--images", "7"]))
    assert [q.prompt for q in asked] == [caption.PROMPTS[i % 3] for i in range(7)] and len(set(caption.PROMPTS)) == 3
    same = caption.questions(parser.parse_args(["--images", "3", "--prompt", "short"]))
    assert {q.prompt for q in same} == {caption.PROMPTS[1]}


@pytest.mark.parametrize("wrong", [["--rows", "0"], ["--turns", "0"], ["--images", "0"]])
def test_refusals(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["bench", "caption", *wrong])
    assert "'0' is not a whole number from 1 on" in capsys.readouterr().err
