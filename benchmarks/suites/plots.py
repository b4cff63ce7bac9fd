"""`--plot` of the maintainers' suites, speed-ups as bars and curves that a suite draws itself; `--curves` of vlm."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mmspec.app.bench import command
from mmspec.app.bench.command import BenchError, Outcome
from mmspec.app.bench.report import Record, sections
from mmspec.app.extras import installing

if TYPE_CHECKING:  # an extra
    from matplotlib.axes import Axes

PLOTTED = ("vlm", "caption", "image", "round")  # the suites that measure speed-ups over plain decoding
CURVES: dict[str, Callable[[Axes, list[Record]], None]] = {}  # by suite, a function that draws its records into a panel


def run(args: argparse.Namespace) -> int:
    """Run `mmspec bench`, then plot the records."""
    path, outcome = getattr(args, "plot", None), Outcome()
    if path is None:
        return command.run(args)
    try:
        check_plot(path)
    except BenchError as error:
        print(f"{args.prog}: {error}", file=sys.stderr)
        return 1
    code = command.run(args, outcome)
    if code == 0:
        plot(outcome.records, path, f"{outcome.provenance['model']} on {outcome.provenance['device']}")
    return code


def check_plot(path: Path) -> None:
    """Check before the measurement that a plot can be written; BenchError if not."""
    if importlib.util.find_spec("matplotlib") is None:
        raise BenchError(f"a plot needs matplotlib: {installing('bench')}, or leave the plot out")
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise BenchError(f"a plot is a .png, .svg or .pdf file; got {str(path)!r}")


def plot(records: list[Record], path: Path, title: str) -> None:
    """Plot speed-ups, one panel per cell, with quartiles as whiskers; and quality against speed if it was measured."""
    from matplotlib.figure import Figure

    shown = {name: [r for r in rows if r.get("speedup_e2e") is not None] for name, rows in sections(records).items()}
    shown = {name: rows for name, rows in shown.items() if rows}
    curves = next((CURVES[r["suite"]] for r in records if r["suite"] in CURVES), None)
    count = len(shown) + (curves is not None)
    across = min(2, max(1, count))
    down = max(1, -(-count // across))
    bars = max(map(len, shown.values()), default=0)
    figure = Figure(figsize=(6.4 * across, 0.9 + max(2.3, 0.22 * bars) * down), layout="constrained")
    panels = figure.subplots(down, across, squeeze=False).ravel()
    for panel, (name, rows) in zip(panels, shown.items(), strict=False):
        _bars(panel, name, rows)
    if curves is not None:
        curves(panels[len(shown)], records)
    for panel in panels[count:]:
        panel.set_visible(False)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=150)


def _bars(panel: Axes, name: str, rows: list[Record]) -> None:
    middle = [r["speedup_e2e"] for r in rows]
    low, high = ([r[f"speedup_e2e_{end}"] for r in rows] for end in ("p25", "p75"))
    whiskers = [np.subtract(middle, low), np.subtract(high, middle)]
    colours = ["#9aa3ad" if r["stock_path"] else "#2f6fb0" for r in rows]
    panel.barh([r["method"] for r in rows], middle, xerr=whiskers, color=colours, ecolor="#333333", capsize=2)
    panel.axvline(1.0, color="#333333", linewidth=0.8)
    panel.invert_yaxis()
    panel.set_title(name, fontsize=9)
    panel.set_xlabel("speed-up over plain decoding, end to end", fontsize=9)
    for place, value in enumerate(middle):
        panel.text(0.03, place, f"{value:.2f}x", va="center", fontsize=8, color="white")


def draw_curves(records: Sequence[Record], path: Path, title: str) -> None:
    """Draw two panels for each temperature and batch size, tokens per call by depth and speed-up by visual tokens, from
    the records that are not variants."""
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
