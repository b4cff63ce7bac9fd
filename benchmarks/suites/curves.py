"""Plots for the vlm suite: tokens per call by depth, and speed-up by visual tokens, one line per method."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.suites.plots import check_plot
from mmspec.app.bench.report import Record

Condition = tuple[float, int]  # temperature and batch


def draw(records: Sequence[Record], path: Path, title: str) -> None:
    """Draw two panels for each temperature and batch size, from the records that are not variants.

    Raises:
        BenchError: matplotlib is missing, or the path does not end in .png, .svg or .pdf.
    """
    check_plot(path)
    from matplotlib.figure import Figure

    shown = [r for r in records if r["n"] and r["category"] == "all" and not r["variant_of"]]
    conditions = sorted({(r["temperature"], r["batch"]) for r in shown})
    colours = {name: f"C{i % 10}" for i, name in enumerate(dict.fromkeys(r["method"] for r in shown))}
    figure = Figure(figsize=(11, 0.6 + 3.1 * max(1, len(conditions))), layout="constrained")
    panels = figure.subplots(max(1, len(conditions)), 2, squeeze=False)
    for (depths, speeds), condition in zip(panels, conditions, strict=False):
        here = [r for r in shown if (r["temperature"], r["batch"]) == condition]
        _by_depth(depths, here, colours)
        _by_visual_tokens(speeds, here, colours)
        for panel in (depths, speeds):
            rows = f"{condition[1]} row{'s' * (condition[1] > 1)}, temperature {condition[0]:g}"
            panel.set_title(f"{panel.get_title()}{rows}", fontsize=9)
            panel.grid(alpha=0.3)
    figure.legend(*panels[0, 1].get_legend_handles_labels(), fontsize=8, loc="outside right center")
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=150)


def _by_depth(panel: Any, records: list[Record], colours: dict[str, str]) -> None:
    """For the cell with the most visual tokens: τ if drafts were limited to depth 1, 2, …; starts at plain decoding."""
    most = max(r["visual_tokens"] for r in records)
    for r in records:
        if r["visual_tokens"] == most and r["tau_by_depth"]:
            taus = [1.0, *r["tau_by_depth"]]
            panel.plot(range(len(taus)), taus, "o-", color=colours[r["method"]], markersize=3)
    panel.set_title(f"{most:.0f} visual tokens, ")
    panel.xaxis.get_major_locator().set_params(integer=True)
    panel.set_xlabel("depth of the draft", fontsize=9)
    panel.set_ylabel("tokens per call", fontsize=9)


def _by_visual_tokens(panel: Any, records: list[Record], colours: dict[str, str]) -> None:
    """Medians with quartiles: of clips if they have several lengths, otherwise of all media."""
    clips = [r for r in records if r["kind"] == "clip"]
    some = clips if len({r["visual_tokens"] for r in clips}) > 1 else records
    for name in dict.fromkeys(r["method"] for r in some if not r["stock_path"]):
        line = sorted((r for r in some if r["method"] == name), key=lambda r: r["visual_tokens"])
        middle = [r["speedup_e2e"] for r in line]
        whiskers = [[abs(m - r[f"speedup_e2e_{end}"]) for m, r in zip(middle, line, strict=True)]
                    for end in ("p25", "p75")]  # fmt: skip
        panel.errorbar(
            [r["visual_tokens"] for r in line], middle, whiskers, fmt="o-", color=colours[name], label=name,
            markersize=3, capsize=2, linewidth=1.2, elinewidth=0.6,
        )  # fmt: skip
    ticks = sorted({r["visual_tokens"] for r in some})
    panel.set_xscale("symlog" if min(ticks) == 0 else "log", base=2)
    panel.set_xticks(ticks, [f"{tick:.0f}" for tick in ticks])
    panel.minorticks_off()
    panel.axhline(1.0, color="#333333", linewidth=0.8)
    panel.set_xlabel("visual tokens", fontsize=9)
    panel.set_ylabel("speed-up over stock, end to end", fontsize=9)
