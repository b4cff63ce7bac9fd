"""The shapes suite: the cost of a round at published shapes with random weights; toy sizes without a GPU."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from benchmarks.suites import subject
from benchmarks.suites.kernels import NO_GPU
from benchmarks.suites.round import PARTS
from benchmarks.suites.shapes_models import MODELS, REAL, TOY, Chat, on_paper
from mmspec.app.bench import report, vlm
from mmspec.app.bench.answers import TimedCall, VlmBench
from mmspec.app.bench.command import BenchError, Outcome, matching, say
from mmspec.app.compare import OWN, Comparison, Method, free, over
from mmspec.app.devices import free_memory
from mmspec.app.options import DTYPES, count
from mmspec.app.provenance import provenance
from mmspec.drafters.plain import Plain
from mmspec.pipelines.host.tree_attention import NAME as TREE

GIB = 2**30
BATCHES = {REAL: (1, 4, 16), TOY: (1, 4)}
TOKENS = {REAL: 32, TOY: 6}
TOYS = {"model": "toys of published models, random weights", "real sizes": NO_GPU}
UNTAUGHT = "weights are random: what a round costs counts, what it gains does not"
STOCK, COMPILED = "stock", "stock compiled"
SDPA = {"attention": "sdpa"}
ROWS = 32768  # rows of a larger head that a drafter reads, if not all
Inputs = Mapping[str, Tensor]


@dataclass(frozen=True)
class ShapeCell:
    """One condition under which all methods are compared."""

    model: str
    sizes: str
    context: int  # positions at the end of a call
    batch: int

    def __str__(self) -> str:
        toy = "toy of " if self.sizes == TOY else ""
        return f"{toy}{self.model}, context {self.context}, batch {self.batch}"


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--models", nargs="+", choices=MODELS, default=list(MODELS), metavar="MODEL", help=f"of {', '.join(MODELS)}")
    add("--sizes", choices=(TOY, REAL), help="default: real on CUDA, toy elsewhere")
    add("--contexts", type=count, nargs="+", metavar="N", help="positions at the end of a call; default: 1024 4096 "
        "16384, of toys 64 128 256, as far as the model has positions")  # fmt: skip
    add("--batch", type=count, nargs="+", metavar="N", help="default: 1 4 16, of toys 1 4")
    add("--drafters", nargs="+", metavar="NAME", help="only these drafters of eagle, vispec, msd (default: all)")
    add("--methods", nargs="+", metavar="PATTERN", help="only these besides stock, such as 'vispec tree*compiled'")
    add("--tokens", type=count, help="new tokens of a call, the first included; default: 32, of toys 6")
    add("--repeats", type=count, default=3, help="timed calls (default: %(default)s)")
    add("--compile", action=argparse.BooleanOptionalAction, help="also compiled, which takes most of a toy's time "
        "(default: on CUDA)")  # fmt: skip
    add("--device", help="default: the fastest device; for real sizes without CUDA it must be named")
    add("--dtype", choices=DTYPES, default="auto", help="default: bfloat16 on CUDA, float32 elsewhere")
    add("--seed", type=int, default=0)


def measure(args: argparse.Namespace, outcome: Outcome) -> Iterator[None]:
    device = subject.device(args.device or "auto")
    cuda = device.type == "cuda"
    args.compile = cuda if args.compile is None else args.compile
    sizes = args.sizes or (REAL if cuda else TOY)
    dtype = {"auto": torch.bfloat16 if cuda else torch.float32}.get(args.dtype) or getattr(torch, args.dtype)
    tokens = args.tokens or TOKENS[sizes]
    if tokens < 2:
        raise BenchError(f"a call needs --tokens 2 to have a round; got {tokens}")
    counts = {name: on_paper(MODELS[name], sizes) for name in args.models}
    if sizes == REAL and not cuda and args.device is None:
        wanted = ", ".join(f"{n} {dtype.itemsize * sum(c.values()) / GIB:.1f} GiB" for n, c in counts.items())
        raise BenchError(
            f"real sizes need a GPU, and there is none. In {str(dtype).removeprefix('torch.')} the weights alone want: "
            f"{wanted}. Take --sizes {TOY}, or say --device {device.type} to run them here all the same"
        )
    shown = {"model": "published shapes, random weights"} if sizes == REAL else TOYS
    about = {"sizes": sizes, "parameters": counts, "tokens": tokens, "note": UNTAUGHT}
    outcome.provenance = provenance(device, dtype) | shown | about
    for name in args.models:
        contexts = args.contexts or MODELS[name].contexts[sizes]
        cells = [ShapeCell(name, sizes, c, b) for c in contexts for b in args.batch or BATCHES[sizes]]
        yield from _model(cells, counts[name], device, dtype, tokens, args, outcome)
        free()  # the model has been freed with its last cell


def _model(
    cells: list[ShapeCell], counts: dict[str, int], device: torch.device, dtype: torch.dtype, tokens: int,
    args: argparse.Namespace, outcome: Outcome,
) -> Iterator[None]:  # fmt: skip
    """The cells of one model; it is built once, and only if a cell can be measured."""
    free = free_memory(device)
    why = {cell: refusal(cell, sum(counts.values()), dtype, free) for cell in cells}
    built, notes = None, dict[tuple[str, int], str]()
    for cell in cells:
        if why[cell]:
            outcome.records.append(_record(cell, "all", note=why[cell]))
        else:
            if built is None:
                say(f"building {cell.model}, {cell.sizes}")
                built = ShapeBench(MODELS[cell.model], cell.sizes, device, dtype, tokens, args.seed)
            if args.compile:  # code compiled for other lengths counts towards the recompilation limit
                torch.compiler.reset()
            try:
                inputs = built.inputs(cell.context, cell.batch)
            except ValueError as error:
                raise BenchError(str(error)) from error
            named = [m for m in built.methods(args.compile)
                     if plain(m) or args.drafters is None or m.name.split()[0] in args.drafters]  # fmt: skip
            records = measure_cell(cell, built, list(matching(named, args.methods)), inputs, args.repeats, notes)
            outcome.records += records
            say(f"{cell}: " + ", ".join(f"{r['method']} {r['c']:.2f}" for r in records if r["c"] is not None))
        yield


def refusal(cell: ShapeCell, parameters: int, dtype: torch.dtype, free: int | None) -> str:
    """Why a cell cannot be measured; empty if it can be tried."""
    shape = MODELS[cell.model]
    beyond = shape.beyond(cell.sizes, cell.context)
    needs = dtype.itemsize * (parameters + shape.held(cell.sizes, cell.context, cell.batch))
    if not beyond and free is not None and needs > free:
        return f"not measured: needs {needs / GIB:.1f} GiB for weights and caches alone, {free / GIB:.1f} free"
    return f"not measured: {beyond}" if beyond else ""


def plain(method: Method) -> bool:
    """Whether it is a path of stock `generate`."""
    return method.drafter is None


class ShapeBench:
    """A model and its drafters with random weights, created on their device."""

    def __init__(
        self, shape: Chat, sizes: str, device: torch.device, dtype: torch.dtype, tokens: int, seed: int
    ) -> None:
        torch.manual_seed(seed)
        with torch.device(device):
            parts: dict[str, Any] = {name: part.eval() for name, part in shape.parts(sizes, dtype).items()}
        model = parts.pop("target")
        model.generation_config.pad_token_id = 0
        self.shape, self.sizes, self.drafters = shape, sizes, parts
        self.bench = VlmBench(model, None, tokens, seed)

    def inputs(self, context: int, batch: int) -> Inputs:
        return self.shape.prompt(self.bench.model, self.sizes, context - self.bench.max_new_tokens, batch)

    def methods(self, compile: bool) -> Iterator[Method]:
        """Stock `generate`, eager and compiled on a static cache, and mmspec without and with each drafter, by sdpa or
        as a tree."""
        stock, static = vlm.stock(self.bench.model.device)
        yield replace(stock, facts=SDPA)
        if compile:
            yield replace(static, name=COMPILED, facts=SDPA)
        hows: dict[str, dict[str, Any]] = {"": {}, " compiled": {"compile": True}} if compile else {"": {}}
        yield from (Method(f"plain{how}", Plain(), more, facts=SDPA) for how, more in hows.items())
        if self.shape.text[self.sizes]["vocab_size"] > ROWS:  # a drafter may read part of such a head
            how, most = list(hows.items())[-1]
            hows[f"{how} {ROWS} rows"] = most | {"draft_vocab": ROWS}
        attentions = {"": SDPA, " tree attention": {"attention": TREE}}
        for (name, drafter), (title, facts), (how, more) in product(
            self.drafters.items(), attentions.items(), hows.items()
        ):
            c = drafter.config.shape
            if c.width == 1 and title:
                continue  # a chain needs no tree attention
            options = {"depth": c.depth, "width": c.width, "size": c.size, **more}
            yield Method(f"{name}{title}{how}", drafter, options, facts=facts)

    def call(self, method: Method, inputs: Inputs) -> TimedCall:
        self.bench.model.set_attn_implementation(method.facts["attention"])
        call = self.bench.call(method, 0.0, inputs, self.bench.seed)
        if call.per_step is None:
            raise RuntimeError("the call ended with its first token")
        return call


def measure_cell(
    cell: ShapeCell, bench: ShapeBench, methods: list[Method], inputs: Inputs, repeats: int,
    notes: dict[tuple[str, int], str],
) -> list[report.Record]:  # fmt: skip
    """Warm up each method, measure its memory, then time all methods in turn.

    Args:
        notes: warnings by method and batch; a shape that cannot be compiled is reported once.
    """
    comparison: Comparison[Inputs, TimedCall] = Comparison(methods, bench.call)
    comparison.warm_up(inputs, device=bench.bench.model.device)
    notes |= {(name, cell.batch): note for name, note in comparison.notes.items() if note.startswith(OWN)}
    calls = comparison.measure([inputs] * repeats)
    steps = {m.name: statistics.median(c.per_step or 0.0 for c in calls[m.name]) for m in comparison.able if plain(m)}
    best = min(steps, key=steps.__getitem__, default=STOCK)
    told = {m.name: comparison.notes.get(m.name, notes.get((m.name, cell.batch), "")) for m in methods}
    return [_figures(cell, method, calls, best, comparison.peaks, told[method.name]) for method in methods]


def _figures(
    cell: ShapeCell, method: Method, calls: dict[str, list[TimedCall]], best: str, peaks: dict[str, float | None],
    note: str,
) -> report.Record:  # fmt: skip
    own, stock = calls.get(method.name, []), calls.get(STOCK, [])
    held, of_stock = peaks.get(method.name), peaks.get(STOCK)
    whole = report.total(own)
    gain = whole.tokens_per_target_call if whole.row_rounds else 1.0
    return _record(cell, method.name, method.setting, note) | {
        **report.spread("step_ms", [1e3 * c.per_step if c.per_step else None for c in own]),
        **report.spread("c", over(own, stock, "per_step")),
        **report.spread("c_best", over(own, calls.get(best, []), "per_step")),
        "stock_path": plain(method), "best_stock": best, "peak_mb": held, "n": len(own),
        "tokens_per_target_call": gain if own else None,
        "parts_ms": {p: 1e3 * whole.seconds[p] / whole.rounds for p in PARTS if whole.seconds.get(p)},
        "above_stock_mb": None if held is None or of_stock is None else held - of_stock,
    }  # fmt: skip


def _record(cell: ShapeCell, method: str, setting: str = "", note: str = "") -> report.Record:
    """A record in which nothing was measured."""
    nothing = {key: None for name in ("step_ms", "c", "c_best") for key in report.spread(name, [])}
    return {
        "suite": "shapes", "cell": str(cell), "model": cell.model, "sizes": cell.sizes, "context": cell.context,
        "batch": cell.batch, "method": method, "setting": setting, "stock_path": False, **nothing, "best_stock": STOCK,
        "tokens_per_target_call": None, "parts_ms": {}, "peak_mb": None, "above_stock_mb": None, "n": 0, "note": note,
    }  # fmt: skip
