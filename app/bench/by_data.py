"""Records of several data sets as papers show them: a row a method, a column a data set."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

Record = dict[str, Any]
MEAN = "mean"
KINDS = ("data", "picture", "pair", "clip")  # that are no names of data sets


def tables(records: Sequence[Record]) -> dict[str, list[list[str]]]:
    """By condition the rows of a table, its head first; a condition with fewer than two data sets has none.

    A cell holds tokens per target call and the speed-up over stock, as papers do; the last column their means, where
    all data sets were measured.
    """
    found: dict[str, dict[str, dict[str, Record]]] = {}  # condition → data set → method → record
    for record in records:
        if record["suite"] == "vlm" and record["category"] == "all" and record["kind"] not in KINDS:
            prompt = f", {record['prompt']} prompt" if record["prompt"] else ""
            title = f"batch {record['batch']}, temperature {record['temperature']:g}{prompt}"
            found.setdefault(title, {}).setdefault(record["kind"], {})[record["method"]] = record
    made = {}
    for title, sets in found.items():
        if len(sets) > 1:
            methods = dict.fromkeys(name for of in sets.values() for name in of)
            rows = []
            for name in methods:
                seen = [of.get(name) for of in sets.values()]
                rows.append([name, *(_cell([one]) for one in seen), _cell(seen)])
            made[f"tokens/call, speedup: {title}"] = [["method", *sets, MEAN], *rows]
    return made


def _cell(records: Sequence[Record | None]) -> str:
    """The means over these records; a dash where one of them has nothing."""
    measured = [r for r in records if r is not None and r["speedup_e2e"] and r["tokens_per_target_call"]]
    if len(measured) < len(records):
        return "-"
    mean = {name: statistics.fmean(r[name] for r in measured) for name in ("tokens_per_target_call", "speedup_e2e")}
    return f"{mean['tokens_per_target_call']:.2f}, {mean['speedup_e2e']:.2f}x"
