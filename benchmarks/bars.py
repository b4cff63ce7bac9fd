"""Speed-ups of result files as bars.

    python benchmarks/bars.py docs/images/speed.svg [FILE.json ...]

The bars are medians of `speedup_e2e`, the lines on them the quartiles. A test compares the picture with the results.
"""

from __future__ import annotations

import json
import sys
from html import escape
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
SHOWN = ("round-hybrid.json", "round-hybrid-long.json", "round-video.json", "round-video-long.json")
NAMES = {
    "stock": "stock generate", "stock-static": "stock, static cache, compiled", "plain": "no drafter",
    "plain compiled": "no drafter, compiled",
}  # fmt: skip
LINE, SIDE, UNIT, STOCK, OURS = 22, 230, 62, "#9aa3ad", "#2470af"  # pixels a bar, left of it, a factor of 1; colours


def cell(at: int, title: str, records: list[dict[str, Any]]) -> tuple[int, list[str]]:
    """One group of bars from `at` pixels down, and where it ends."""
    parts = [f'<text class="t" x="0" y="{at + 14}">{escape(title)}</text>']
    at += 24
    for record in sorted(records, key=lambda one: not one["stock_path"]):
        low, mid, high = (record["speedup_e2e" + end] for end in ("_p25", "", "_p75"))
        name, fill = NAMES.get(record["method"], record["method"]), STOCK if record["stock_path"] else OURS
        ends = " ".join(f"M{SIDE + UNIT * end:.1f} {at + 5}v8" for end in (low, high))
        parts += [
            f'<text x="{SIDE - 8}" y="{at + 13}" text-anchor="end">{escape(name)}</text>',
            f'<rect x="{SIDE}" y="{at + 1}" width="{UNIT * mid:.1f}" height="16" rx="2" fill="{fill}"/>',
            f'<path d="{ends}M{SIDE + UNIT * low:.1f} {at + 9}H{SIDE + UNIT * high:.1f}" stroke="#e0902f"/>',
            f'<text x="{SIDE + UNIT * max(mid, high) + 6:.1f}" y="{at + 13}">{mid:.2f}×</text>',
        ]
        at += LINE
    return at + 14, parts


def drawn(files: list[Path]) -> str:
    """An SVG of all cells of these files."""
    at, parts, most = 0, list[str](), 1.0
    for file in files:
        found = json.loads(file.read_text(encoding="utf-8"))
        records = [one for one in found["records"] if not one["refused"] and one["temperature"] == 0]
        most = max([most, *(one["speedup_e2e_p75"] for one in records)])
        for name in dict.fromkeys(one["cell"] for one in records):
            title = f"{found['provenance']['model']}, {name}"
            at, more = cell(at, title, [one for one in records if one["cell"] == name])
            parts += more
    style = "text{font:12px system-ui,sans-serif;fill:#7a828c}.t{font-weight:600}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {SIDE + UNIT * most + 56:.0f} {at}" role="img">'
        f"<title>Speed-up over stock generate, end to end</title><style>{style}</style>{''.join(parts)}</svg>\n"
    )


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    files = list(map(Path, sys.argv[2:])) or [RESULTS / name for name in SHOWN]
    Path(sys.argv[1]).write_text(drawn(files), encoding="utf-8")
