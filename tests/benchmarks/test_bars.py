"""The bars in the documentation are those of the result files."""

from __future__ import annotations

import json
import re
from pathlib import Path

from benchmarks.bars import RESULTS, SHOWN, drawn

IMAGE = Path(__file__).parents[2] / "docs" / "images" / "speed.svg"


def test_the_picture_shows_the_results() -> None:
    said = drawn([RESULTS / name for name in SHOWN])
    assert IMAGE.read_text(encoding="utf-8") == said, "python benchmarks/bars.py docs/images/speed.svg"
    records = [one for name in SHOWN for one in json.loads((RESULTS / name).read_text())["records"]]
    assert sorted(re.findall(r">(\d+\.\d\d)×<", said)) == sorted(f"{one['speedup_e2e']:.2f}" for one in records)
