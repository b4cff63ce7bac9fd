"""The vlm suite: stock paths and drafters answer the same questions in turn, and each call is timed."""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from tqdm import tqdm

from mmspec import registry
from mmspec.app import embedded, enabling
from mmspec.app.bench import drafters, questions, report
from mmspec.app.bench.answers import TimedCall, VlmBench
from mmspec.app.bench.command import BenchError, Outcome, batches, matching, say
from mmspec.app.bench.questions import Question, Questions, Shown
from mmspec.app.compare import Comparison, Method, over
from mmspec.app.embedded import STOCK
from mmspec.app.engine import load
from mmspec.app.options import count, from_zero, where
from mmspec.app.provenance import provenance
from mmspec.pipelines.families import table as families
from mmspec.pipelines.host.kinds import BatchFeature, GenerativeModel
from mmspec.pipelines.host.loading import CompileConfig
from mmspec.pipelines.prompts import text_alone
from mmspec.progress import bar

STOCK_PATHS = ("stock", "stock-static")
ASSISTED = {"prompt_lookup_num_tokens", "assistant_model", "use_mtp"}  # arguments of transformers' own speculation
SINGLE = "not measured: transformers refuses assisted decoding at batch > 1"
Request = tuple[BatchFeature, int]  # model inputs, and a seed


@dataclass(frozen=True)
class VlmCell:
    """One condition under which all methods are compared."""

    batch: int
    temperature: float
    shown: Shown | None = None  # None: all questions

    def __str__(self) -> str:
        what = f", {self.shown}" if self.shown else ""
        return f"batch {self.batch}, temperature {self.temperature:g}{what}"


def configure(parser: argparse.ArgumentParser) -> None:
    conditions(parser, [1, 4], [0.0, 1.0], 256)


def conditions(parser: argparse.ArgumentParser, batch: list[int], temperature: list[float], tokens: int) -> None:
    """Add the options for model, drafters, questions and settings; the last three arguments are defaults."""
    add = parser.add_argument
    add("--model", default=embedded.MODEL, help="folder, name on the Hub, or an embedded one: %(default)s, "
        "scenes-hybrid")  # fmt: skip
    drafters.configure(parser, " beside ngram")
    add("--without", nargs="+", default=[], metavar="PATTERN", help="leave these out, such as stock-static 'eagle*'")
    questions.configure(parser)
    usual = [" ".join(f"{value:g}" for value in values) for values in (batch, temperature)]
    add("--batch", type=count, nargs="+", default=batch, help="rows per call; several are measured in turn (default: "
        f"{usual[0]})")  # fmt: skip
    add("--temperature", type=from_zero, nargs="+", default=temperature, help="0 is greedy; several likewise (default: "
        f"{usual[1]})")  # fmt: skip
    add("--max-new-tokens", type=count, default=tokens, metavar="N", help="per answer (default: %(default)s)")
    where(parser)


def stock(device: torch.device) -> list[Method]:
    """Stock generate, and stock generate compiled with a static cache."""
    compiling: Any = CompileConfig(dynamic=False, mode="reduce-overhead" if device.type == "cuda" else "default")
    compiling._compile_all_devices = True  # transformers compiles by itself on some devices only
    static = {"cache_implementation": "static", "compile_config": compiling}
    return [Method("stock"), Method("stock-static", arguments=static)]


def methods(model: GenerativeModel, args: argparse.Namespace) -> list[Method]:
    """The stock paths, transformers' prompt lookup, ngram, and each drafter, after stock's equivalent, if any."""
    flags, target = enabling.given(args.enable), families.of(model).describe(model)
    ways = [*stock(model.device), Method("hf-prompt-lookup", arguments={"prompt_lookup_num_tokens": 10})]
    ngram = Method("ngram", registry.drafter_class("ngram")())
    named = drafters.read(args, model)
    ways.append(replace(ngram, options=flags) if "ngram" in named else ngram)  # naming it applies the options to it
    for title, drafter in named.items():
        try:
            drafter.fit(target, {})
        except ValueError as error:
            raise BenchError(f"--drafters: {error}") from error
        if title != "ngram":
            ways += [*drafters.stocks_own(title, drafter), Method(title, drafter, flags)]
    return matching(ways, None, args.without)


def single(method: Method) -> bool:
    """Whether the method runs at batch 1 only."""
    return not ASSISTED.isdisjoint(method.arguments)


def measure(
    args: argparse.Namespace,
    outcome: Outcome,
    asked: Callable[[argparse.Namespace, bool], Questions] = questions.asked,
    tuned: Callable[[VlmBench, list[Method], VlmCell], list[Method]] = lambda bench, chosen, cell: chosen,
) -> Iterator[None]:
    """Measure all cells in turn; yields whenever the outcome has new records."""
    engine = load(args.model, STOCK, args.device, args.dtype, args.max_new_tokens, 0, sees=False)
    bench = VlmBench(engine.model, engine.processor, args.max_new_tokens, args.seed)
    chosen = methods(bench.model, args)
    outcome.provenance = provenance(bench.model.device, bench.model.dtype) | {"model": args.model}
    outcome.provenance |= {"data": [*map(str, args.data)]} if args.data else {}
    some = asked(args, not text_alone(bench.processor))
    number, cells = itertools.count(1), len(args.batch) * len(args.temperature) * len(some)
    for batch, heat in [(batch, heat) for batch in args.batch for heat in args.temperature]:
        ready = tuned(bench, chosen, VlmCell(batch, heat))
        for shown, group in some.items():
            cell = VlmCell(batch, heat, shown)
            say(f"cell {next(number)} of {cells}: {cell}; {len(ready)} methods on {len(group)} questions")
            records = measure_cell(bench, cell, ready, group)
            outcome.records += records
            speeds = [f"{r['method']} {r['speedup_e2e']:.2f}x" for r in records if r["n"] and r["category"] == "all"]
            say(f"{cell}: {'; '.join(speeds)}")
            yield


def calling(bench: VlmBench, cell: VlmCell) -> Callable[[Method, Request], TimedCall]:
    return lambda method, request: bench.call(method, cell.temperature, *request)


def measure_cell(bench: VlmBench, cell: VlmCell, chosen: list[Method], some: list[Question]) -> list[report.Record]:
    """Warm each method up, measure its memory, then time all of them in turn on each batch."""
    groups, seen = batches(some, cell.batch), list[float]()
    torch.compiler.reset()  # code compiled for other lengths counts toward the recompilation limit
    longest = bench.inputs(max(groups, key=lambda group: max(len(q.prompt) for q in group)))
    comparison = Comparison([m for m in chosen if cell.batch == 1 or not single(m)], calling(bench, cell))
    comparison.warm_up((longest, bench.seed), ["stock"], bench.model.device)

    def requests() -> Iterator[Request]:
        for turn, group in enumerate(groups):
            inputs = bench.inputs(group)
            seen.append(bench.visual_tokens(inputs))
            yield inputs, bench.seed + turn

    comparison.measure(tqdm(requests(), "measured", len(groups), leave=False, unit="batch", **bar()))
    comparison.notes |= {m.name: SINGLE for m in chosen if cell.batch > 1 and single(m)}
    return [record | {"visual_tokens": statistics.fmean(seen)} for record in _records(cell, chosen, groups, comparison)]


def _records(
    cell: VlmCell, chosen: list[Method], groups: list[list[Question]], comparison: Comparison
) -> list[report.Record]:
    """One record per method, and at batch 1 one more for each category of questions."""
    turns: dict[str, list[int]] = {"all": list(range(len(groups)))}
    for turn, group in enumerate(groups if cell.batch == 1 else ()):
        if group[0].category != "all":
            turns.setdefault(group[0].category, []).append(turn)
    facts = {"suite": "vlm", "cell": str(cell), "batch": cell.batch, "temperature": cell.temperature}
    facts |= asdict(cell.shown or Shown())
    records = []
    for category, places in turns.items():
        calls = {name: [runs[place] for place in places] for name, runs in comparison.results.items()}
        best = report.fastest(calls, STOCK_PATHS, "per_token")
        for method in chosen:
            if method.name in calls or category == "all":
                records.append({
                    **facts, "method": method.name, "category": category, "setting": method.setting,
                    **method.facts, "refused": single(method) and cell.batch > 1,
                    **figures(method.name, calls, best, greedy=cell.temperature == 0, assisted=single(method)),
                    "peak_mb": comparison.peaks.get(method.name),
                    "note": comparison.notes.get(method.name, ""),
                })  # fmt: skip
    return records


def figures(name: str, calls: dict[str, list[TimedCall]], best: str, greedy: bool, assisted: bool) -> report.Record:
    """The figures of one method from its timed calls; None for those that do not apply.

    Args:
        calls: of every method, on the same inputs in the same order.
        best: the stock path for `speedup_vs_best_stock`.
        greedy: answers can be compared with those of stock.
        assisted: the method is transformers' own speculation, at batch 1.
    """
    own, base = calls.get(name, []), calls["stock"]
    whole = report.total(own)
    spent = sum(much for part, much in whole.seconds.items() if part != "prefill")
    row_steps = whole.row_rounds or (sum(c.steps for c in own) if assisted else 0)
    gain = sum(c.later for c in own) / row_steps if row_steps else (1.0 if own else None)
    rows = [(a, b) for m, s in zip(own, base, strict=False) for a, b in zip(m.answers, s.answers, strict=True)]
    prompts = whole.drafter.get("prompts", 0)
    by_depth = [round(whole.acceptance(depth), 4) for depth in sorted(whole.accepted_by_depth)]
    read = {name: much / prompts for name, much in whole.drafter.items() if name != "prompts"} if prompts else {}
    return {
        "best_stock": best,
        "stock_path": name in STOCK_PATHS,
        **report.spread("speedup_e2e", over(base, own, "per_token")),
        **report.spread("speedup_decode", over(base, own, "decode_per_token")),
        **report.spread("speedup_vs_best_stock", over(calls[best], own, "per_token")),
        **report.spread("c", over(own, base, "per_step")),
        **report.spread("ttft_ms", [1e3 * c.first for c in own]),
        **report.spread("tokens_per_s", [1 / c.per_token for c in own]),
        **report.spread("step_ms", [1e3 * c.per_step if c.per_step else None for c in own]),
        "tokens_per_target_call": gain,
        "acceptance_by_depth": by_depth,
        "tau_by_depth": [round(1 + kept, 4) for kept in itertools.accumulate(by_depth)],
        "parts_ms": {p: 1e3 * s / whole.rounds for p, s in whole.seconds.items() if p != "prefill" and whole.rounds},
        "draft_share": whole.seconds.get("draft", 0.0) / spent if spent else None,
        "nodes_per_call": 1 + whole.drafted / whole.row_rounds if whole.row_rounds else 1.0,
        "drafter_kv_bytes": read.get("memory bytes"),
        "drafter_visual_rows": read.get("visual rows"),
        "drafter": read,
        "identical_rate": statistics.fmean(a == b for a, b in rows) if rows and greedy else None,
        "length": statistics.fmean(len(a) for a, _ in rows) if rows else None,
        "n": len(own),
    }
