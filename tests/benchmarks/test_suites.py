"""The smaller suites, each run on tiny models: turns, json, and the MAR methods of image."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_llava
import tiny_mar as tiny

from benchmarks.__main__ import parser as workshop
from benchmarks.suites import json_captions, mar
from mmspec.app import cli
from mmspec.app.image_model import is_mar


def records(folder: Path, *words: Any) -> list[dict[str, Any]]:
    """What a suite writes."""
    out = folder / "out.json"
    assert cli.main([*map(str, words), "--device", "cpu", "--json", str(out)], workshop) == 0
    return json.loads(out.read_text())["records"]


def by_method(folder: Path, *words: Any) -> dict[str, dict[str, Any]]:
    return {record["method"]: record for record in records(folder, *words)}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["turns", "--enable", "prefix_cache=much"], "is not a size; write one like 512M"),
        (["kernels", "--device", "foo"], "no device 'foo' here"),
    ],
)
def test_what_makes_no_sense_is_told(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words, workshop) == 1
    assert told in capsys.readouterr().err


def test_later_questions_are_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A second question and a second turn, against the first question, whole prompts beside."""
    asked = ["--images", 2, "--prompt", "w4 w5 w6 w7 w8", "--second", "w9 w10", "--max-new-tokens", 6]
    found = by_method(tmp_path, "turns", "--model", tiny_llava.save(tmp_path / "model"), "--drafter", "ngram", *asked)
    assert list(found) == ["stock", "whole prompts", "prefix_cache"]
    assert all(r["identical_rate"] == 1 and r["n"] == 2 and r["second_share"] > 0 for r in found.values())
    assert found["prefix_cache"]["reused"] > 0.2 and found["prefix_cache"]["kept_mb"] > 0
    assert found["whole prompts"]["reused"] == 0 == found["whole prompts"]["kept_mb"]
    assert "second/first" in capsys.readouterr().out


SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}


def test_captions_of_a_schema_are_counted_and_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By a validator that mmspec does not use."""
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    asked = ["--images", 1, "--prompt", "short", "--max-new-tokens", 12]
    found = by_method(tmp_path, "json", "--schema", tmp_path / "schema.json", *asked)
    assert list(found) == ["stock", "forced tokens alone", "scenes-video-eagle"]
    assert all(r["valid_rate"] == r["identical_rate"] == 1 for r in found.values())
    assert found["stock"]["tokens_per_target_call"] == 1 < found["forced tokens alone"]["tokens_per_target_call"]
    assert "100.0% valid" in capsys.readouterr().err
    assert json_captions.valid('{"n": 2}', SCHEMA)
    assert not any(json_captions.valid(text, SCHEMA) for text in ('{"n": 3}', '{"n": 1', "one", '{"n": 1, "m": 0}'))


# -- pictures of continuous tokens -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def painter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mar") / "model"
    tiny.pipeline().save_pretrained(folder)
    return folder


def test_the_suite_measures_a_folder(painter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--images", 2, "--batch", 2, "--methods", "quarter*", "n=4", "self-2", "disa*", "--guidance", 1.5]
    found = by_method(tmp_path, "image", "--model", painter, *words)
    assert list(found) == ["all, plain head", "quarter, plain head", "n=4", "disa 9-4", "self-2"]
    assert found["all, plain head"]["speedup_e2e"] == 1.0 and found["all, plain head"]["passes"] == 8
    assert found["n=4"]["passes"] == 2 and found["n=4"]["distribution"] == "another"
    assert found["disa 9-4"]["evaluations"] < 0.8 * found["all, plain head"]["evaluations"]
    assert [name for name, r in found.items() if r["stock_path"]] == ["all, plain head", "quarter, plain head"]
    speculated = found["self-2"]
    assert speculated["distribution"] == "kept" and speculated["passes"] < 8 and 0 < speculated["acceptance"] < 1
    assert "over quarter, plain head" in capsys.readouterr().out


def test_ways_cover_both_bases_and_every_mode() -> None:
    names = {way.name: way for way in mar.ways(64, 50, {"draft": object(), "mar-b": object()})}
    ends = {name: way.facts["distribution"] for name, way in names.items()}
    assert names["quarter, plain head"].arguments["num_inference_steps"] == 16
    assert {end for name, end in ends.items() if name.startswith(("self", "draft", "all"))} == {mar.KEPT}
    assert ends["cspd-4"] == mar.BENT and ends["n=16"] == mar.OTHER
    assert names["cspd-8 mar-b n=16"].options["draft"] is names["draft-2 mar-b"].options["draft"]
    assert names["cspd-8 n=16"].arguments == {"num_inference_steps": 16} and ends["cspd-8 n=16"] == mar.BENT
    assert names["self-4, compiled"] == replace(names["self-4"], name="self-4, compiled", arguments={"compile": True})
    assert not any(name.startswith(("draft", "cspd")) for name in (way.name for way in mar.ways(64, 50, {})))


def test_drafts_of_ones_own(painter: Path, tmp_path: Path) -> None:
    tiny.transformer(2).save_pretrained(tmp_path / "small")
    words = ["--images", 1, "--batch", 1, "--guidance", 1, "--methods", "cspd-4*", "cspd-8*", "--drafters"]
    found = by_method(tmp_path, "image", "--model", painter, *words, tmp_path / "small")
    assert set(found) == {"all, plain head", "cspd-4 small", "cspd-8 small", "cspd-8 small n=4"}
    assert found["cspd-4 small"]["draft_rows"] > 0 and found["cspd-8 small n=4"]["passes"] == 2
    line = map(str, ["image", "--model", painter, *words, tmp_path / "nowhere"])
    assert cli.main([*line], workshop) == 1


@pytest.mark.full
def test_quality_of_few_pictures(painter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call, groups = mar.call, []
    monkeypatch.setattr(mar, "call", lambda *given: groups.append(given[3]) or call(*given))
    words = ["--images", 1, "--quality-images", 5, "--methods", "n=4", "--guidance", 1]
    *speeds, record = records(tmp_path, "image", "--model", painter, *words)
    assert {r["method"] for r in speeds} == {"all, plain head", "n=4"} and record["method"] == "n=4"
    assert record["fd_all"] > 0 and record["fd_real"] is None and record["noise"] > 0
    assert [len(seeds) for seeds in groups[-3:]] == [5, 5, 5], "no picture counts twice"


def test_a_folder_that_is_none_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model_index.json").write_text('{"_class_name": "MARPipeline"}')
    assert cli.main(["image", "--model", str(tmp_path)], workshop) == 1
    assert "cannot load" in capsys.readouterr().err
    assert cli.main(["bench", "image", "--model", str(tmp_path)]) == 1
    assert "generate --model" in capsys.readouterr().err
    assert [is_mar(model) for model in ("mar", "scenes-mar", "scenes-llamagen")] == [True, True, False]
