"""The nodes suite: a hybrid of Qwen3.5's class is built and its drafts of several sizes are timed beside one node."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.__main__ import parser as workshop
from benchmarks.suites.nodes import hybrid
from mmspec.app import cli

SMALL = ["--width", "128", "--depth", "4", "--context", "9", "--tokens", "4", "--repeats", "1", "--device", "cpu"]


def test_drafts_of_every_size_are_timed(tmp_path: Path) -> None:
    out = tmp_path / "nodes.json"
    assert cli.main(["nodes", *SMALL, "--nodes", "3", "6", "--no-compile", "--json", str(out)], workshop) == 0
    records = {r["method"]: r for r in json.loads(out.read_text())["records"]}
    assert list(records) == ["stock", "1 nodes", "3 nodes", "6 nodes"]
    assert records["1 nodes"]["over_one"] == 1 and all(not r["note"] for r in records.values())
    assert all(records[f"{n} nodes"]["over_one"] > 0 and records[f"{n} nodes"]["parts_ms"]["verify"] for n in (3, 6))


def test_every_fourth_layer_attends() -> None:
    kinds = hybrid(128, 8, 0).config.text_config.layer_types
    assert [i for i, kind in enumerate(kinds) if kind == "full_attention"] == [3, 7] and len(kinds) == 8


def test_sizes_that_cannot_be_built(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["nodes", "--width", "100"], workshop) == 1
    assert "--width is a multiple of 128" in capsys.readouterr().err
