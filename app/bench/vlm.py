"""The vlm suite: stock paths and drafters answer the same questions in turn, and every call is timed."""

from __future__ import annotations

import argparse
import contextlib
import gc
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

import mmspec
from mmspec.app import embedded
from mmspec.app.bench import report, vlm_curves, vlm_methods, vlm_shown
from mmspec.app.bench.command import Clock, Outcome, TimedCall, batches, compiled_graphs, in_turn, peak_mb, say, settle
from mmspec.app.bench.questions import Question
from mmspec.app.bench.vlm_methods import GRIDS, VlmMethod, methods
from mmspec.app.bench.vlm_shown import Asked, Shown, questions
from mmspec.app.engine import STOCK, load, wait
from mmspec.app.options import where
from mmspec.app.provenance import provenance
from mmspec.pipelines.prompts import chat_inputs
from mmspec.pipelines.serving.batcher import answer_length
from mmspec.pipelines.targets.image_tokens import placeholders

SWITCHED = "; what stands after a comma has the same weights, with a switch thrown when it drafts"


@dataclass(frozen=True)
class VlmCell:
    """One condition under which all methods are compared."""

    batch: int
    temperature: float
    shown: Shown | None = None  # None: all that is shown

    def __str__(self) -> str:
        what = f", {self.shown}" if self.shown else ""
        return f"batch {self.batch}, temperature {self.temperature:g}{what}"


@dataclass
class VlmBench:
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

    def call(self, method: VlmMethod, cell: VlmCell, inputs: Any, seed: int) -> TimedCall:
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
        return TimedCall(seconds, clock.first_at - began, answers, steps, later, stats)

    def takes(self, method: VlmMethod) -> bool:
        """Whether the method's drafter can draft as it is told to."""
        try:
            with self._ready(method):
                return True
        except ValueError:
            return False

    def visual_tokens(self, inputs: Any) -> float:
        """Tokens of pictures in a prompt, on average."""
        ids = inputs["input_ids"]
        return sum(int((ids == token).sum()) for token in placeholders(self.model.config)) / len(ids)

    @contextlib.contextmanager
    def _ready(self, method: VlmMethod) -> Iterator[Any]:
        mmspec.disable(self.model)
        if method.drafter is None:
            yield None
        else:
            with mmspec.enable(self.model, drafter=method.drafter, **method.options) as handle:
                yield handle


def configure(parser: argparse.ArgumentParser) -> None:
    """What is asked, of whom, and by which methods."""
    conditions(parser, [1, 4], [0.0, 1.0], 256)
    parser.add_argument("--curves", type=Path, metavar="FILE", help="tokens per call by depth, and speed-up by visual "
        "tokens, as .png, .svg or .pdf (needs matplotlib)")  # fmt: skip


def conditions(parser: argparse.ArgumentParser, batch: list[int], temperature: list[float], tokens: int) -> None:
    """Of which model, with which drafters, what is asked, and how; the last three are what is usual."""
    add = parser.add_argument
    add("--model", default=embedded.MODEL, help="folder, name on the Hub, or an embedded one: %(default)s, "
        "scenes-hybrid")  # fmt: skip
    vlm_methods.configure(parser)
    vlm_shown.configure(parser)
    add("--batch", type=int, nargs="+", default=batch)
    add("--temperature", type=float, nargs="+", default=temperature)
    add("--max-new-tokens", type=int, default=tokens)
    where(parser)


def measure(args: argparse.Namespace, outcome: Outcome) -> Iterator[None]:
    """All cells, one after the other; yields whenever the outcome has grown."""
    if args.curves:
        report.check_plot(args.curves)
    engine = load(args.model, STOCK, args.device, args.dtype, args.max_new_tokens, 0)
    bench = VlmBench(engine.model, engine.processor, args.max_new_tokens, args.seed)
    chosen = methods(bench.model, args)
    outcome.provenance = provenance(bench.model.device, bench.model.dtype) | {"model": args.model}
    asked, others = questions(args)
    best: dict[str, Any] = {}
    for batch, heat in [(batch, heat) for batch in args.batch for heat in args.temperature]:
        if args.tune:
            best = tune(bench, chosen, VlmCell(batch, heat), others)
            outcome.tuned[str(VlmCell(batch, heat))] = best
            yield
        ready = [m.tuned(best[m.name]["chosen"]) if m.name in best else m for m in chosen]
        for shown, some in asked.items():
            cell = VlmCell(batch, heat, shown)
            found = measure_cell(bench, cell, ready, some)
            outcome.records += found
            told = [f"{r['method']} {r['speedup_e2e']:.2f}x" for r in found if r["n"] and r["category"] == "all"]
            say(f"{cell}: {'; '.join(told)}")
            yield
    if args.curves:
        vlm_curves.draw(outcome.records, args.curves, f"{args.model} on {outcome.provenance['device']}")


def tune(bench: VlmBench, chosen: list[VlmMethod], cell: VlmCell, asked: Asked) -> dict[str, Any]:
    """For each method with a grid, the setting with the least time per token, and all that was tried."""
    tried = [(m.name, setting, m.tuned(setting)) for m in chosen for setting in GRIDS.get(m.grid, ())
             if (cell.batch == 1 or not m.single) and bench.takes(m.tuned(setting))]  # fmt: skip
    calls: list[list[TimedCall]] = [[] for _ in tried]
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


def measure_cell(bench: VlmBench, cell: VlmCell, chosen: list[VlmMethod], some: list[Question]) -> list[report.Record]:
    """Warm each method up, measure its memory, then time all of them in turn on each batch."""
    groups = batches(some, cell.batch)
    torch.compiler.reset()  # what was compiled for other lengths counts against the limit of recompilations
    longest = bench.inputs(max(groups, key=lambda group: max(len(q.prompt) for q in group)))
    notes: dict[str, str] = {}
    peaks: dict[str, float | None] = {}
    for method in chosen:
        if method.single and cell.batch > 1:
            notes[method.name] = "not measured: transformers refuses assisted decoding at batch > 1"
            continue
        try:
            warm_up(bench, method, cell, longest)
            peaks[method.name] = peak_mb(bench.model.device, partial(bench.call, method, cell, longest, bench.seed))
        except Exception as error:  # a method that fails is a result, and the others still count
            if method.name == "stock":
                raise
            reason = " ".join(str(error).split())[:200]
            notes[method.name] = f"failed: {type(error).__name__}: {reason}"
    able, seen = [m for m in chosen if m.name in peaks], 0.0
    calls: dict[str, list[TimedCall]] = {m.name: [None] * len(groups) for m in able}  # type: ignore[list-item]
    for turn, group in enumerate(groups):
        inputs = bench.inputs(group)
        seen += bench.visual_tokens(inputs) / len(groups)
        for method in (able[place] for place in in_turn(len(able), turn)):
            graphs = compiled_graphs()
            calls[method.name][turn] = bench.call(method, cell, inputs, bench.seed + turn)
            if compiled_graphs() != graphs:
                notes[method.name] = "compiled during a timed call: its time is overstated"
    found = _records(cell, chosen, groups, calls, peaks, notes)
    return [record | {"visual_tokens": seen} for record in found]


def warm_up(bench: VlmBench, method: VlmMethod, cell: VlmCell, inputs: Any) -> None:
    """As many calls as it takes until nothing is compiled any more."""
    settle(lambda: bench.call(method, cell, inputs, bench.seed))


def _records(
    cell: VlmCell, chosen: list[VlmMethod], groups: list[list[Question]], calls: dict[str, list[TimedCall]],
    peaks: dict[str, float | None], notes: dict[str, str],
) -> list[report.Record]:  # fmt: skip
    """One record a method, and at batch 1 one more for each category of the questions."""
    title = str(cell) + (SWITCHED if any(m.of for m in chosen) else "")
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
                facts = {"suite": "vlm", "cell": title, "method": method.name, "variant_of": method.of,
                         "batch": cell.batch, "temperature": cell.temperature, **asdict(cell.shown or Shown()),
                         "category": category, "setting": method.setting}  # fmt: skip
                figures = report.figures(method.name, made, best, greedy=cell.temperature == 0, assisted=method.single)
                told = notes.get(method.name, slower.get(method.name, ""))
                found.append(facts | figures | {"peak_mb": peaks.get(method.name), "note": told})
    return found
