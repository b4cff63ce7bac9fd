"""The pages say what the result files say, and rounds launch no more than these have."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.bars import RESULTS, SHOWN, drawn

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def counted() -> Any:
    return importlib.import_module("benchmarks.launches")


@pytest.mark.full
def test_a_captured_round_replays_a_graph_for_the_target_and_one_for_the_drafter(counted: Any) -> None:
    """So many host launches less; and each layer adds as many, as the script takes for granted."""
    kept = json.loads((ROOT / "benchmarks/results/launches.json").read_text())["launches"]["qwen2.5-vl-7b"]
    two, three = counted.chats(2), counted.chats(3)
    for way, counts in two.items():
        compiled, drafted = way.endswith("compiled"), way.startswith("vispec")
        assert counts["graphs"] == three[way]["graphs"] == compiled * (1 + drafted)
        assert counts["operations"] < two[way.removesuffix(", compiled")]["operations"] or not compiled
        assert drafted or counts["operations"] < two["vispec round"]["operations"]
    grown = {way: {kind: n + (three[way][kind] - n) * 26 for kind, n in counts.items()} for way, counts in two.items()}
    for way, counts in grown.items():
        for kind, n in counts.items():
            assert n <= kept[way][kind] * 1.02, f"{way} launches more {kind} than benchmarks/results/launches.json has"


def test_the_page_says_what_the_result_file_says(counted: Any) -> None:
    found = json.loads((ROOT / "benchmarks/results/launches.json").read_text())
    assert found["provenance"]["commit"] and any("launches" in word for word in found["provenance"]["argv"])
    page = (ROOT / "docs/speed.md").read_text()
    assert counted.table(found["launches"]) in page, "run benchmarks.launches, and put its table into docs/speed.md"


def test_the_bars_in_the_documentation_are_those_of_the_result_files() -> None:
    said = drawn([RESULTS / name for name in SHOWN])
    picture = (ROOT / "docs" / "images" / "speed.svg").read_text(encoding="utf-8")
    assert picture == said, "python benchmarks/bars.py docs/images/speed.svg"
    records = [one for name in SHOWN for one in json.loads((RESULTS / name).read_text())["records"]]
    assert sorted(re.findall(r">(\d+\.\d\d)×<", said)) == sorted(f"{one['speedup_e2e']:.2f}" for one in records)
