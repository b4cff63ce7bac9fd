"""The shapes suite: the cost of a round at published shapes with random weights; toy sizes without a GPU."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from benchmarks.suites.kernels import NO_GPU
from benchmarks.suites.round import PARTS
from benchmarks.suites.shapes_models import MODELS, REAL, TOY, Chat, on_paper
from benchmarks.suites.subject import sharing
from mmspec.app.bench import report, vlm
from mmspec.app.bench.answers import VlmBench
from mmspec.app.bench.command import BenchError, Outcome, matching, say
from mmspec.app.compare import OWN, Comparison, Method, free, over
from mmspec.app.devices import find_device, free_memory
from mmspec.app.options import DTYPES, count
from mmspec.app.provenance import provenance
from mmspec.drafters.plain import Plain
from mmspec.pipelines.host.tree_attention import NAME as TREE

STOCK, COMPILED = "stock", "stock compiled"
SDPA = "sdpa"
ROWS = 32768  # rows of a larger head that a drafter reads, if not all
GIB = 2**30
BATCHES = {REAL: (1, 4, 16), TOY: (1, 4)}
TOKENS = {REAL: 32, TOY: 6}
TOYS = {"model": "toys of published models, random weights", "real sizes": NO_GPU}
UNTAUGHT = "weights are random: what a round costs counts, what it gains does not"


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


@dataclass(frozen=True)
class Cost:
    """Averages over the rounds of one call.

    Attributes:
        seconds: time of the whole round, or of a plain step.
        tokens: tokens that a row gains.
        parts: seconds by part, by the host's clock.
    """

    seconds: float
    tokens: float = 1.0
    parts: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ShapeMethod:
    """One way to generate, by calls with a prefill and some rounds; plain means without drafts."""

    name: str
    call: Callable[[], Cost]
    setting: str = ""
    plain: bool = False


class ChatWays:
    """A model and its drafters with random weights, created on their device, and the ways to generate.

    Stock `generate`, eager and compiled on a static cache, and mmspec without and with each drafter, by sdpa or as a
    tree.
    """

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
        # of the same weights: captures hold for one implementation of attention
        twin = sharing(model)
        twin.set_attn_implementation(TREE)
        self.benches = {SDPA: self.bench, TREE: VlmBench(twin, None, tokens, seed)}

    def ways(self, context: int, batch: int, compile: bool) -> Iterator[ShapeMethod]:
        inputs = self.shape.prompt(self.bench.model, self.sizes, context - self.bench.max_new_tokens, batch)
        plain, static = vlm.stock(self.bench.model.device)
        methods = [(plain, SDPA), *([(replace(static, name=COMPILED), SDPA)] if compile else [])]
        hows: dict[str, dict[str, Any]] = {"": {}, " compiled": {"compile": True}} if compile else {"": {}}
        methods += [(Method(f"plain{how}", Plain(), more), SDPA) for how, more in hows.items()]
        if self.shape.text[self.sizes]["vocab_size"] > ROWS:  # a drafter may read part of such a head
            how, most = list(hows.items())[-1]
            hows[f"{how} {ROWS} rows"] = most | {"draft_vocab": ROWS}
        for (name, drafter), attend, (how, more) in product(self.drafters.items(), (SDPA, TREE), hows.items()):
            c, title = drafter.config.shape, f"{name}{' tree attention' if attend == TREE else ''}{how}"
            if c.width == 1 and attend == TREE:
                continue  # a chain needs no tree attention
            options = {"depth": c.depth, "width": c.width, "size": c.size, "draft_vocab": "all", **more}
            methods.append((Method(title, drafter, options), attend))
        for method, attend in methods:
            call = partial(self._call, method, attend, inputs)
            yield ShapeMethod(method.name, call, method.setting, plain=method.drafter is None)

    def _call(self, method: Method, attend: str, inputs: dict[str, Tensor]) -> Cost:
        call = self.benches[attend].call(method, 0.0, inputs, self.bench.seed)
        if call.per_step is None:
            raise RuntimeError("the call ended with its first token")
        if call.stats is None:
            return Cost(call.per_step)
        parts = {name: much / call.stats.rounds for name, much in call.stats.seconds.items() if name != "prefill"}
        return Cost(call.per_step, call.stats.tokens_per_target_call, parts)


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--models", nargs="+", choices=MODELS, default=list(MODELS), metavar="MODEL", help=f"of {', '.join(MODELS)}")
    add("--sizes", choices=(TOY, REAL), help="default: real on CUDA, toy elsewhere")
    add("--contexts", type=count, nargs="+", metavar="N", help="positions at the end of a call; default: 1024 "
        "4096 16384, of toys 64 128 256, as far as the model has positions")  # fmt: skip
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
    device = find_device(args.device or "auto")
    cuda = device.type == "cuda"
    args.compile = cuda if args.compile is None else args.compile
    sizes = args.sizes or (REAL if cuda else TOY)
    dtype = {"auto": torch.bfloat16 if cuda else torch.float32}.get(args.dtype) or getattr(torch, args.dtype)
    tokens = args.tokens or TOKENS[sizes]
    if tokens < 2 or args.repeats < 1:
        raise BenchError(f"a call needs --tokens 2 to have a round, and --repeats 1; got {tokens}, {args.repeats}")
    counts = {name: on_paper(MODELS[name], sizes) for name in args.models}
    if sizes == REAL and not cuda and args.device is None:
        wanted = ", ".join(f"{n} {dtype.itemsize * sum(c.values()) / GIB:.1f} GiB" for n, c in counts.items())
        raise BenchError(
            f"real sizes need a GPU, and there is none. In {str(dtype).removeprefix('torch.')} the weights alone want: "
            f"{wanted}. Take --sizes {TOY}, or say --device {device.type} to run them here all the same"
        )
    shown = {"model": "published shapes, random weights"} if sizes == REAL else TOYS
    outcome.provenance = (
        provenance(device, dtype)
        | shown
        | {
            "sizes": sizes,
            "parameters": counts,
            "tokens": tokens,
            "note": UNTAUGHT,
        }
    )
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
    subject, notes = None, dict[tuple[str, int], str]()
    for cell in cells:
        if why[cell]:
            outcome.records.append(_record(cell, "all", note=why[cell]))
        else:
            if subject is None:
                say(f"building {cell.model}, {cell.sizes}")
                subject = ChatWays(MODELS[cell.model], cell.sizes, device, dtype, tokens, args.seed)
            if args.compile:  # code compiled for other lengths counts towards the recompilation limit
                torch.compiler.reset()
            try:
                ways = _asked(subject.ways(cell.context, cell.batch, args.compile), args.drafters, args.methods)
            except ValueError as error:
                raise BenchError(str(error)) from error
            records = measure_cell(cell, ways, args.repeats, device, notes)
            outcome.records += records
            say(f"{cell}: " + ", ".join(f"{r['method']} {r['c']:.2f}" for r in records if r["c"] is not None))
        yield


def _asked(ways: Iterable[ShapeMethod], drafters: list[str] | None, patterns: list[str] | None) -> list[ShapeMethod]:
    """Stock, and the methods of the drafters whose names match."""
    of_drafters = [way for way in ways if way.plain or drafters is None or way.name.split()[0] in drafters]
    return list(matching(of_drafters, patterns))


def refusal(cell: ShapeCell, parameters: int, dtype: torch.dtype, free: int | None) -> str:
    """Why a cell cannot be measured; empty if it can be tried."""
    shape = MODELS[cell.model]
    beyond = shape.beyond(cell.sizes, cell.context)
    needs = dtype.itemsize * (parameters + shape.held(cell.sizes, cell.context, cell.batch))
    if not beyond and free is not None and needs > free:
        return f"not measured: needs {needs / GIB:.1f} GiB for weights and caches alone, {free / GIB:.1f} free"
    return f"not measured: {beyond}" if beyond else ""


def measure_cell(
    cell: ShapeCell, ways: list[ShapeMethod], repeats: int, device: torch.device, notes: dict[tuple[str, int], str]
) -> list[report.Record]:
    """Warm up each method, measure its memory, then time all methods in turn.

    Args:
        notes: warnings by method and batch; a shape that cannot be compiled is reported once.
    """
    comparison: Comparison[None, Cost] = Comparison(ways, lambda way, _: way.call())
    comparison.warm_up(None, device=device)
    notes |= {(name, cell.batch): note for name, note in comparison.notes.items() if note.startswith(OWN)}
    made = comparison.measure([None] * repeats)
    plain = {way.name: statistics.median(c.seconds for c in made[way.name]) for way in comparison.able if way.plain}
    best = min(plain, key=plain.__getitem__, default=STOCK)
    told = {way.name: comparison.notes.get(way.name, notes.get((way.name, cell.batch), "")) for way in ways}
    return [_figures(cell, way, made, best, comparison.peaks, told[way.name]) for way in ways]


def _figures(
    cell: ShapeCell, way: ShapeMethod, made: dict[str, list[Cost]], best: str, peaks: dict[str, float | None], note: str
) -> report.Record:
    mine, stock = made.get(way.name, []), made.get(STOCK, [])
    held, of_stock = peaks.get(way.name), peaks.get(STOCK)
    parts = {name: sum(r.parts.get(name, 0.0) for r in mine) / len(mine) for name in PARTS} if mine else {}
    return _record(cell, way.name, setting=way.setting, note=note) | {
        **report.spread("step_ms", [1e3 * r.seconds for r in mine]),
        **report.spread("c", over(mine, stock)),
        **report.spread("c_best", over(mine, made.get(best, []))),
        "stock_path": way.plain, "best_stock": best, "peak_mb": held, "n": len(mine),
        "tokens_per_target_call": report.spread("t", [r.tokens for r in mine])["t"],
        "parts_ms": {name: 1e3 * much for name, much in parts.items() if much},
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
