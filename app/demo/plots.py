"""The bench's records as HTML that fits a laptop and a phone: bars, two measures, acceptance by depth, a table."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

MEASURES = {  # what records may hold: (label, unit)
    "speedup_e2e": ("speed-up, end to end", "×"),
    "speedup_decode": ("speed-up, decoding only", "×"),
    "speedup_vs_best_stock": ("speed-up over the best stock path", "×"),
    "speedup_vs_best_plain": ("speed-up over the best plain path", "×"),
    "tokens_per_target_call": ("tokens per model call", ""),
    "accepted_per_call": ("drafted tokens accepted per call", ""),
    "compression": ("tokens per forward", ""),
    "forwards": ("forwards a picture", ""),
    "c": ("c: time of a round, in plain steps", ""),
    "tokens_per_s": ("tokens/s", ""),
    "ttft_ms": ("time to first token", " ms"),
    "seconds_per_image": ("time of a picture", " s"),
    "peak_mb": ("peak memory", " MB"),
    "identical_rate": ("identical outputs", ""),
    "fd_over_noise": ("Fréchet distance to plain decoding, over noise", ""),
    "fd_real": ("Fréchet distance to real pictures", ""),
    "precision": ("precision", ""),
    "recall": ("recall", ""),
    "faithfulness": ("faithful to the prompt", ""),
    "spent": ("distortion charged a picture", ""),
    "spent_per_token": ("distortion charged a token", ""),
}
SETTINGS = ("model", "kernel", "batch", "rows", "context", "temperature", "prompt", "file")  # that tell records apart
MOST = 400  # records of a table, or dots
BARS = 12
_SIDES = ("right", "left")  # of a dot, where its words stand: by whether it is in the right half
LINES = 8  # of acceptance by depth
Records = Sequence[dict[str, Any]]


def bars(records: Records, measure: str) -> str:
    """One bar a record, longest first, with its quartiles; a line marks 1× where the measure is a speed-up."""
    label, unit = MEASURES[measure]
    known = [r for r in records if _value(r, measure) is not None]
    if not known:
        return _silent(measure)
    names = named(known)
    best = sorted(zip(names, known, strict=True), key=lambda pair: -pair[1][measure])[:BARS]
    known = [r for _, r in best]
    most = max(max(r.get(f"{measure}_p75") or 0.0, r[measure]) for r in known) or 1e-9
    one = f' style="--one:{100 / most:.2f}%"' if unit == "×" and most >= 1 else ""
    lines = "".join(
        f'<li class="mm-{sort(r)}"><span class="mm-who">{escape(name)}</span><span class="mm-track"{one}>'
        f'<i style="--w:{max(100 * r[measure] / most, 0):.2f}%"></i>{_quartiles(r, measure, most)}</span>'
        f"<b>{figure(r[measure])}{unit}</b></li>"
        for name, r in best
    )
    said = f"{label}; the fine line spans the quartiles" if "mm-span" in lines else label
    said += f"; the best {BARS} of {len(names)}" * (len(names) > BARS)
    return f'<figure class="mm-bars"><figcaption>{escape(said)}</figcaption>{_key(known)}<ol>{lines}</ol></figure>'


def _quartiles(record: dict[str, Any], measure: str, most: float) -> str:
    low, high = record.get(f"{measure}_p25"), record.get(f"{measure}_p75")
    if low is None or high is None or high - low < most / 200:
        return ""
    return f'<s class="mm-span" style="--a:{100 * low / most:.2f}%;--b:{100 * (high - low) / most:.2f}%"></s>'


def scatter(records: Records, across: str, up: str) -> str:
    """One dot a record at two of its measures; a dot's name shows where it is pointed at or focused."""
    known = [r for r in records if _value(r, across) is not None and _value(r, up) is not None]
    if not known:
        return _silent(across if any(_value(r, up) is not None for r in records) else up)
    x, y = Axis([r[across] for r in known]), Axis([r[up] for r in known])
    few = len(known) <= LINES
    dots = "".join(
        f'<i class="mm-dot mm-{sort(r)}" tabindex="0" style="left:{x.at(r[across]):.2f}%;bottom:{y.at(r[up]):.2f}%" '
        f'role="img" aria-label="{escape(tip)}" data-tip="{escape(tip)}" data-side="{_SIDES[x.at(r[across]) > 50]}">'
        f"{f'<em>{escape(name)}</em>' if few else ''}</i>"
        for name, r in zip(named(known), known, strict=True)
        for tip in [f"{name}: {figure(r[across])}{MEASURES[across][1]}, {figure(r[up])}{MEASURES[up][1]}"]
    )
    title = f"{MEASURES[up][0]} (upwards) and {MEASURES[across][0]} (to the right)"
    return _plot(title, x, y, dots, MEASURES[across][0]) + _key(known)


def depths(records: Records, measure: str) -> str:
    """How often a draft is right up to a depth, a line a record: those with the most of the chosen measure."""
    known = [r for r in records if r.get("acceptance_by_depth")]
    known = sorted(known, key=lambda r: -(_value(r, measure) or 0.0))[:LINES]
    if not known:
        return '<p class="mm-hint">These records say nothing about acceptance by depth.</p>'
    deepest = max(len(r["acceptance_by_depth"]) for r in known)
    x, y = Axis([1, deepest], whole=True), Axis([0.0, 1.0])
    lines = "".join(
        f'<polyline class="mm-line{n}" points="'
        + " ".join(f"{x.at(d):.2f},{100 - y.at(p):.2f}" for d, p in enumerate(r["acceptance_by_depth"], 1))
        + '"></polyline>'
        for n, r in enumerate(known)
    )
    key = "".join(f'<li><i class="mm-line{n}"></i>{escape(name)}</li>' for n, name in enumerate(named(known)))
    body = f'<svg viewBox="0 0 100 100" preserveAspectRatio="none" aria-hidden="true">{lines}</svg>'
    title = "share of the rounds in which at least so many drafted tokens were kept"
    return _plot(title, x, y, body, "depth") + f'<ul class="mm-keys">{key}</ul>'


class Axis:
    """A range of numbers on a line of 100 %, with round ticks."""

    def __init__(self, values: Iterable[float], whole: bool = False) -> None:
        values = list(values)
        low, high = min(values), max(values)
        low = 0.0 if 0 <= low < 0.6 * high and not whole else low
        high = high if high > low else low + 1.0
        rough = (high - low) / 5
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(power * s for s in (1, 2, 5, 10) if power * s >= rough)
        step = max(1.0, round(step)) if whole else step
        self.low, self.high = (low, high) if whole else (step * math.floor(low / step), step * math.ceil(high / step))
        first = math.ceil(self.low / step)
        self.ticks = [n * step for n in range(first, math.floor(self.high / step + 1e-9) + 1)]

    def at(self, value: float) -> float:
        return 100 * (value - self.low) / (self.high - self.low)


def _plot(title: str, x: Axis, y: Axis, body: str, below: str) -> str:
    ticks = "".join(f'<span class="mm-y" style="bottom:{y.at(t):.2f}%">{figure(float(t))}</span>' for t in y.ticks)
    ticks += "".join(f'<span class="mm-x" style="left:{x.at(t):.2f}%">{figure(float(t))}</span>' for t in x.ticks)
    return (
        f'<figure class="mm-plot"><figcaption>{escape(title)}</figcaption><div class="mm-field">{ticks}{body}</div>'
        f"<p>{escape(below)} →</p></figure>"
    )


def table(records: Records, measure: str) -> str:
    """All measures that the records hold, quartiles in small; the most of the chosen one first."""
    shown = [name for name in MEASURES if any(_value(r, name) is not None for r in records)]
    told = [name for name in (*SETTINGS, "setting", "n") if any(r.get(name) not in (None, "") for r in records)]
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in
                   ("method", *told, *(MEASURES[name][0] for name in shown)))  # fmt: skip
    ranked = sorted(records, key=lambda r: -(v if (v := _value(r, measure)) is not None else -math.inf))
    rows = "".join(
        f'<tr><th scope="row">{escape(str(r.get("method", "?")))}{" <em>lossy</em>" * (sort(r) == "lossy")}</th>'
        + "".join(f"<td>{escape(figure(r.get(name)))}</td>" for name in told)
        + "".join(f"<td>{_cell(r, name)}</td>" for name in shown)
        + "</tr>"
        for r in ranked
    )
    return (
        f'<div class="mm-table" tabindex="0" role="region" aria-label="records"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _cell(record: dict[str, Any], name: str) -> str:
    if _value(record, name) is None:
        return ""
    low, high = record.get(f"{name}_p25"), record.get(f"{name}_p75")
    span = "" if low is None or high is None else f"<small> {figure(low)}–{figure(high)}</small>"
    return f"{figure(record[name])}{MEASURES[name][1]}{span}"


def named(records: Records) -> list[str]:
    """The records' methods, with whatever else tells them apart."""
    telling = [name for name in SETTINGS if name == "model" or len({str(r.get(name)) for r in records}) > 1]
    words = {"batch": "batch {}", "rows": "{} rows", "context": "context {}", "temperature": "T {}"}
    said = [[words.get(t, "{}").format(figure(r[t])) for t in telling if r.get(t) is not None] for r in records]
    return [" · ".join([str(r.get("method", "?")), *rest]) for r, rest in zip(records, said, strict=True)]


def sort(record: dict[str, Any]) -> str:
    """base, lossless or lossy: what a bar or dot is coloured by."""
    if str(record.get("method", "")).split("-")[0] in ("stock", "ar", "hf"):
        return "base"
    return "lossless" if record.get("lossless", True) else "lossy"


def _key(records: Records) -> str:
    words = {"lossless": "mmspec, lossless", "lossy": "mmspec, lossy", "base": "without mmspec"}
    kinds = [kind for kind in words if kind in set(map(sort, records))]
    lines = "".join(f'<li class="mm-{kind}"><i></i>{words[kind]}</li>' for kind in kinds)
    return f'<ul class="mm-keys">{lines}</ul>' if kinds not in (["lossless"], ["base"]) else ""


def _silent(measure: str) -> str:
    return f'<p class="mm-hint">These records say nothing about {escape(MEASURES[measure][0])}.</p>'


def _value(record: dict[str, Any], name: str) -> float | None:
    value = record.get(name)
    return value if isinstance(value, (int, float)) and math.isfinite(value) else None


def figure(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
    return "" if value is None else str(value)
