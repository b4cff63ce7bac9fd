"""The pages say what the result files say; what is expected of a GPU, and the counts it rests on."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.bars import RESULTS, SHOWN, drawn

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def expected() -> Any:
    where = importlib.util.spec_from_file_location("expected", ROOT / "benchmarks" / "expected.py")
    assert where is not None and where.loader is not None
    module = importlib.util.module_from_spec(where)
    sys.modules["expected"] = module
    where.loader.exec_module(module)
    return module


@pytest.mark.full
def test_a_captured_round_replays_a_graph_for_each_attention(expected: Any) -> None:
    """So many host launches less; and each layer adds as many, as the script takes for granted."""
    kept = json.loads((ROOT / "benchmarks/results/expected.json").read_text())["launches"]["qwen2.5-vl-7b"]
    two, three = expected.chats(2), expected.chats(3)
    for way, counts in two.items():
        compiled, drafted = way.endswith("compiled"), way.startswith("vispec")
        assert (counts["graphs"] >= 2) == compiled
        assert three[way]["graphs"] - counts["graphs"] == compiled, "one more attention to cut at"
        assert counts["operations"] < two[way.removesuffix(", compiled")]["operations"] or not compiled
        assert drafted or counts["operations"] < two["vispec round"]["operations"]
    grown = {way: {kind: n + (three[way][kind] - n) * 26 for kind, n in counts.items()} for way, counts in two.items()}
    for way, counts in grown.items():
        for kind, n in counts.items():
            assert n <= kept[way][kind] * 1.02, f"{way} launches more {kind} than benchmarks/results/expected.json has"


def test_the_page_says_what_the_result_file_says(expected: Any) -> None:
    found = json.loads((ROOT / "benchmarks/results/expected.json").read_text())
    assert found["provenance"]["commit"] and found["provenance"]["argv"] and found["provenance"]["assumed"]
    page = (ROOT / "docs/speed.md").read_text()
    for table in expected.tables(found).split("\n\n"):
        assert table in page, "run benchmarks/expected.py and put its tables into docs/speed.md"


def test_what_is_expected_follows_from_bytes(expected: Any) -> None:
    """By hand: a step of Qwen2.5-VL-7B reads 14.1 GB of weights and 0.23 GB of cache; a 4090 reads 0.86 TB a second."""
    found = json.loads((ROOT / "benchmarks/results/expected.json").read_text())["expected"]
    rows = {(r["device"], r["context"], r["batch"]): r for r in found if r["model"] == "qwen2.5-vl-7b"}
    hybrid = {(r["device"], r["context"], r["batch"]): r for r in found if r["model"] == "a hybrid of 9B"}
    assert rows["RTX 4090", 4096, 1]["step_ms"] == pytest.approx((14.14 + 0.235) / (0.85 * 1.008), rel=0.01)
    assert all(r["measured"] is None for r in rows.values())
    best = [r["c, 16384 rows"] for r in rows.values() if r["batch"] <= 4]
    assert max(best) <= 1.2 < min(r["c, all rows"] for r in rows.values()), "the goal, with a head that is cut down"
    shapes = expected.by_shape
    assert shapes.hybrid_text().per_token < shapes.text("qwen2.5-vl-7b").per_token
    assert len(hybrid) == len(rows) and all(r["measured"] is None for r in hybrid.values())
    assert all(1 < r["c, 16384 rows"] < r["c, all rows"] for r in hybrid.values())


def test_the_bars_in_the_documentation_are_those_of_the_result_files() -> None:
    said = drawn([RESULTS / name for name in SHOWN])
    picture = (ROOT / "docs" / "images" / "speed.svg").read_text(encoding="utf-8")
    assert picture == said, "python benchmarks/bars.py docs/images/speed.svg"
    records = [one for name in SHOWN for one in json.loads((RESULTS / name).read_text())["records"]]
    assert sorted(re.findall(r">(\d+\.\d\d)×<", said)) == sorted(f"{one['speedup_e2e']:.2f}" for one in records)
