"""The turns suite: a second question and a second turn are timed against the first question, whole prompts beside."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny_llava

from benchmarks.__main__ import parser as workshop
from mmspec.app import cli


def test_later_questions_are_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, out = tiny_llava.save(tmp_path / "model"), tmp_path / "turns.json"
    asked = ["--images", "2", "--prompt", "w4 w5 w6 w7 w8", "--second", "w9 w10", "--max-new-tokens", "6"]
    said = ["turns", "--model", str(model), "--drafter", "ngram", *asked, "--device", "cpu"]
    assert cli.main([*said, "--json", str(out)], workshop) == 0
    records = {r["method"]: r for r in json.loads(out.read_text())["records"]}
    assert list(records) == ["stock", "whole prompts", "prefix_cache"]
    assert all(r["identical_rate"] == 1 and r["n"] == 2 and r["second_share"] > 0 for r in records.values())
    assert records["prefix_cache"]["reused"] > 0.2 and records["prefix_cache"]["kept_mb"] > 0
    assert records["whole prompts"]["reused"] == 0 == records["whole prompts"]["kept_mb"]
    assert "second/first" in capsys.readouterr().out


def test_an_option_that_there_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["turns", "--enable", "prefix_cache=much"], workshop) == 1
    assert "is not a size; write one like 512M" in capsys.readouterr().err
