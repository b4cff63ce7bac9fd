"""The vlm suite: stock paths and drafters answer the same questions in turn, and every call is timed."""

from __future__ import annotations

import argparse
import contextlib
import gc
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import CompileConfig

import mmspec
from mmspec import registry
from mmspec.app import embedded
from mmspec.app.bench import report
from mmspec.app.bench.command import (
    BenchError,
    Call,
    Clock,
    Outcome,
    Question,
    batches,
    compiled_graphs,
    in_turn,
    peak_mb,
    read_questions,
    say,
    settle,
    wait,
)
from mmspec.app.engine import STOCK as NO_DRAFTER
from mmspec.app.engine import load
from mmspec.app.provenance import provenance
from mmspec.pipelines.intake import answer_length
from mmspec.pipelines.prompts import chat_inputs
from mmspec.zoo import language, scenes

HELD_OUT, TUNING = 7001, 7002  # first number of the seeds of scenes that no training and no evaluation draws
GRIDS: dict[str, tuple[dict[str, int], ...]] = {  # what --tune tries
    "lookup": tuple({"prompt_lookup_num_tokens": k} for k in (3, 5, 10)),
    "text drafter": tuple({"depth": d} for d in (3, 5, 8)),
    "feature drafter": (
        *({"depth": d, "width": 1} for d in range(3, 11)),
        {"depth": 3, "width": 2, "size": 8},
        {"depth": 5, "width": 2, "size": 12},
        {"depth": 5, "width": 4, "size": 16},
        {"depth": 7, "width": 4, "size": 24},
        {"depth": 6, "width": 8, "size": 40},
    ),
}


@dataclass(frozen=True)
class Method:
    """One way to generate: arguments of `generate`, and the drafter to enable, if any."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    drafter: Any = None
    options: dict[str, Any] = field(default_factory=dict)  # of `enable`
    grid: str = ""  # row of GRIDS
    single: bool = False  # batch 1 only

    def tuned(self, setting: dict[str, int]) -> Method:
        if self.drafter is None:
            return replace(self, arguments=self.arguments | setting)
        return replace(self, options=self.options | setting)

    @property
    def setting(self) -> str:
        held = {k: v for k, v in (self.options or self.arguments).items() if isinstance(v, int)}
        return " ".join(f"{k.removeprefix('prompt_lookup_')} {v}" for k, v in held.items())


@dataclass(frozen=True)
class Cell:
    """One condition under which all methods are compared."""

    batch: int
    temperature: float
    prompt: str  # its label

    def __str__(self) -> str:
        return f"batch {self.batch}, temperature {self.temperature:g}"


@dataclass
class Bench:
    """What stays the same over a whole run."""

    model: Any
    processor: Any
    max_new_tokens: int
    seed: int

    def inputs(self, asked: Sequence[Question]) -> Any:
        """Model inputs, one question a row, on the model's device."""
        marker = str(getattr(self.processor, "image_token", "") or "")
        prompts = [q.prompt.replace(marker, "").strip() if marker else q.prompt for q in asked]
        return chat_inputs(self.processor, prompts, [q.images for q in asked]).to(self.model.device, self.model.dtype)

    def call(self, method: Method, cell: Cell, inputs: Any, seed: int) -> Call:
        """One timed call; garbage is collected and the drafter enabled before the clock starts."""
        warmth = {"do_sample": True, "temperature": cell.temperature, "top_k": 0, "top_p": 1.0}
        arguments = (warmth if cell.temperature > 0 else {"do_sample": False}) | method.arguments
        clock = Clock()
        with self._ready(method) as handle:
            torch.manual_seed(seed)
            gc.collect()
            wait(self.model.device)
            began = time.perf_counter()
            out = self.model.generate(
                **inputs, num_beams=1, max_new_tokens=self.max_new_tokens, streamer=clock, **arguments
            )
            wait(self.model.device)
            seconds = time.perf_counter() - began
        end = self.model.generation_config.eos_token_id
        rows = out[:, inputs["input_ids"].shape[1] :].tolist()
        answers = tuple(tuple(row[: answer_length(row, end)]) for row in rows)
        stats = handle.stats if handle is not None else None
        steps = stats.rounds if stats is not None else clock.puts - 1
        later = sum(map(len, answers)) - clock.first_tokens
        return Call(seconds, clock.first_at - began, answers, steps, later, stats)

    @contextlib.contextmanager
    def _ready(self, method: Method) -> Iterator[Any]:
        mmspec.disable(self.model)
        if method.drafter is None:
            yield None
        else:
            with mmspec.enable(self.model, drafter=method.drafter, **method.options) as handle:
                yield handle


def configure(parser: argparse.ArgumentParser) -> None:
    """What is asked, of whom, and by which methods."""
    add = parser.add_argument
    add("--model", default=embedded.MODEL, help="folder, name on the Hub, or scenes-vlm, the embedded one (default)")
    add("--drafter", nargs="+", help="feature drafters to measure beside ngram; default: the embedded one, if it fits")
    add("--data", type=Path, metavar="PATH", help="questions of your own: see read_questions (MMSpec's folders work)")
    add("--prompt", nargs="+", default=["short", "long"], help="short, long, or texts of your own; one cell for each")
    add("--images", type=int, default=20, help="questions measured at batch 1 (default: %(default)s)")
    add("--batch", type=int, nargs="+", default=[1, 4])
    add("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    add("--max-new-tokens", type=int, default=256)
    add("--tune", action="store_true", help="choose each method's depth and tree on other images first")
    add("--tune-images", type=int, default=4)
    add("--depth", type=int, help="of the feature drafters, without --tune")
    add("--width", type=int, help="branches per node; 1 drafts a chain")
    add("--size", type=int, help="nodes per round, the root included")
    add("--without", nargs="+", default=[], metavar="METHOD", help="leave out, such as stock-static")
    add("--device", default="auto")
    add("--dtype", default="auto")
    add("--seed", type=int, default=0)


def measure(args: argparse.Namespace, outcome: Outcome) -> Iterator[None]:
    """All cells, one after the other; yields whenever the outcome has grown."""
    engine = load(args.model, NO_DRAFTER, args.device, args.dtype, args.max_new_tokens, 0)
    bench = Bench(engine.model, engine.processor, args.max_new_tokens, args.seed)
    chosen = methods(bench.model, args)
    outcome.provenance = provenance(bench.model.device, bench.model.dtype) | {"model": args.model}
    asked, others = questions(args)
    best: dict[str, Any] = {}
    for batch, heat in [(batch, heat) for batch in args.batch for heat in args.temperature]:
        if args.tune:
            best = tune(bench, chosen, Cell(batch, heat, "all"), others)
            outcome.tuned[str(Cell(batch, heat, "all"))] = best
            yield
        ready = [m.tuned(best[m.name]["chosen"]) if m.name in best else m for m in chosen]
        for label, some in asked.items():
            cell = Cell(batch, heat, label)
            found = measure_cell(bench, cell, ready, some)
            outcome.records += found
            told = [f"{r['method']} {r['speedup_e2e']:.2f}x" for r in found if r["n"] and r["category"] == "all"]
            say(f"{cell}, {label}: {', '.join(told)}")
            yield


def methods(model: Any, args: argparse.Namespace) -> list[Method]:
    """The stock paths, prompt lookup as transformers has it, and mmspec with each drafter."""
    compiling = CompileConfig(dynamic=False, mode="reduce-overhead" if model.device.type == "cuda" else "default")
    compiling._compile_all_devices = True  # transformers compiles by itself on some devices only
    found = [
        Method("stock"),
        Method("stock-static", {"cache_implementation": "static", "compile_config": compiling}),
        Method("hf-prompt-lookup", {"prompt_lookup_num_tokens": 10}, grid="lookup", single=True),
        Method("ngram", drafter=registry.drafter_class("ngram")(), grid="text drafter"),
    ]
    flags = {k: v for k in ("depth", "width", "size") if (v := getattr(args, k)) is not None}
    for name in _drafter_names(args):
        drafter = mmspec.load_drafter(embedded.resolve(name))
        title = getattr(drafter, "method", type(drafter).__name__)
        title = title if title not in [m.name for m in found] else f"{title}:{Path(name).name}"
        found.append(Method(title, drafter=drafter, options=flags, grid="feature drafter"))
    unknown = sorted(set(args.without) - {m.name for m in found})
    if unknown or "stock" in args.without:
        wrong = unknown[0] if unknown else "stock"
        raise BenchError(f"--without {wrong} is not possible; choose from {', '.join(m.name for m in found[1:])}")
    return [m for m in found if m.name not in args.without]


def _drafter_names(args: argparse.Namespace) -> list[str]:
    if args.drafter is not None or args.model != embedded.MODEL:
        return [name for name in args.drafter or [] if name != "ngram"]
    try:
        embedded.resolve(embedded.DRAFTER)
    except FileNotFoundError as error:
        say(f"without the embedded drafter: {error}")
        return []
    return [embedded.DRAFTER]


def questions(args: argparse.Namespace) -> tuple[dict[str, list[Question]], dict[str, list[Question]]]:
    """By prompt label: what is measured, and what is tuned on."""
    others = args.tune_images if args.tune else 0
    if args.data is not None:
        held = read_questions(args.data, args.images, others)
    else:
        drawn = [[scenes.draw(np.random.default_rng([first, args.seed, i])) for i in range(count)]
                 for first, count in ((HELD_OUT, args.images), (TUNING, others))]  # fmt: skip
        held = tuple([Question((scenes.render(scene),)) for scene in some] for some in drawn)
    if held[0][0].prompt:
        return {"data": held[0]}, {"data": held[1]}
    texts = {label: language.PROMPTS.get(label, label) for label in args.prompt}
    measured, tuning = ({label: [replace(q, prompt=t) for q in some] for label, t in texts.items()} for some in held)
    return measured, tuning


def tune(bench: Bench, chosen: list[Method], cell: Cell, asked: dict[str, list[Question]]) -> dict[str, Any]:
    """For each method with a grid, the setting with the least time per token, and all that was tried."""
    tried = [(m.name, setting, m.tuned(setting)) for m in chosen for setting in GRIDS.get(m.grid, ())
             if cell.batch == 1 or not m.single]  # fmt: skip
    calls: list[list[Call]] = [[] for _ in tried]
    groups = [group for some in asked.values() for group in batches(some, cell.batch)]
    for turn, group in enumerate([groups[0], *groups]):
        inputs = bench.inputs(group)
        for place in in_turn(len(tried), turn):
            call = bench.call(tried[place][2], cell, inputs, bench.seed + turn)
            calls[place] += [call] if turn else []  # the first turn warms up
    found: dict[str, Any] = {}
    for (name, setting, _), made in zip(tried, calls, strict=True):
        cost = 1e3 * sum(c.seconds for c in made) / sum(c.tokens for c in made)
        found.setdefault(name, {"tried": []})["tried"].append({"setting": setting, "ms_per_token": cost})
    for name, entry in found.items():
        entry["chosen"] = min(entry["tried"], key=lambda one: one["ms_per_token"])["setting"]
        say(f"tuned {cell}: {name} {entry['chosen']}")
    return found


def measure_cell(bench: Bench, cell: Cell, chosen: list[Method], some: list[Question]) -> list[report.Record]:
    """Warm each method up, measure its memory, then time all of them in turn on each batch."""
    groups = batches(some, cell.batch)
    longest = bench.inputs(max(groups, key=lambda group: max(len(q.prompt) for q in group)))
    notes: dict[str, str] = {}
    peaks: dict[str, float | None] = {}
    for method in chosen:
        if method.single and cell.batch > 1:
            notes[method.name] = "not measured: transformers refuses assisted decoding at batch > 1"
            continue
        try:
            warm_up(bench, method, cell, longest)
            peaks[method.name] = peak_mb(bench.model.device, lambda m=method: bench.call(m, cell, longest, bench.seed))
        except Exception as error:  # a method that fails is a result, and the others still count
            if method.name == "stock":
                raise
            reason = " ".join(str(error).split())[:200]
            notes[method.name] = f"failed: {type(error).__name__}: {reason}"
    able = [m for m in chosen if m.name in peaks]
    calls: dict[str, list[Call]] = {m.name: [None] * len(groups) for m in able}  # type: ignore[list-item]
    for turn, group in enumerate(groups):
        inputs = bench.inputs(group)
        for method in (able[place] for place in in_turn(len(able), turn)):
            graphs = compiled_graphs()
            calls[method.name][turn] = bench.call(method, cell, inputs, bench.seed + turn)
            if compiled_graphs() != graphs:
                notes[method.name] = "compiled during a timed call: its time is overstated"
    return _records(cell, chosen, groups, calls, peaks, notes)


def warm_up(bench: Bench, method: Method, cell: Cell, inputs: Any) -> None:
    """As many calls as it takes until nothing is compiled any more."""
    settle(lambda: bench.call(method, cell, inputs, bench.seed))


def _records(
    cell: Cell, chosen: list[Method], groups: list[list[Question]], calls: dict[str, list[Call]],
    peaks: dict[str, float | None], notes: dict[str, str],
) -> list[report.Record]:  # fmt: skip
    """One record a method, and at batch 1 one more for each category of the questions."""
    turns: dict[str, list[int]] = {"all": list(range(len(groups)))}
    for turn, group in enumerate(groups if cell.batch == 1 else ()):
        if group[0].category != "all":
            turns.setdefault(group[0].category, []).append(turn)
    found = []
    for category, places in turns.items():
        made = {name: [some[place] for place in places] for name, some in calls.items()}
        best = report.fastest(made)
        slower = {name: f"slower than {best} here" for name in report.STOCK_PATHS if name in made and name != best}
        for method in chosen:
            if method.name in made or category == "all":
                facts = {"suite": "vlm", "method": method.name, "batch": cell.batch, "temperature": cell.temperature,
                         "prompt": cell.prompt, "category": category, "setting": method.setting}  # fmt: skip
                figures = report.figures(method.name, made, best, greedy=cell.temperature == 0, assisted=method.single)
                told = notes.get(method.name, slower.get(method.name, ""))
                found.append(facts | figures | {"peak_mb": peaks.get(method.name), "note": told})
    return found
