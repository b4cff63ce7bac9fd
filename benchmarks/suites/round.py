"""The round suite: the time of a round by part, relative to a plain decoding step, and to a roofline of its forward."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from benchmarks.suites import drawn, subject
from mmspec.app.bench import report, vlm
from mmspec.app.bench.answers import VlmBench
from mmspec.app.bench.command import Outcome, batches, matching
from mmspec.app.compare import Method
from mmspec.app.devices import wait
from mmspec.drafters.plain import Plain
from mmspec.functional import linear
from mmspec.pipelines.host.decoder import decoder, head
from mmspec.pipelines.host.kinds import BatchFeature, GenerativeModel

PARTS = ("draft", "verify", "accept", "commit")
TOP = 12  # operations that --profile lists


class Reads(TorchFunctionMode):
    """Counts how often Python reads values of a tensor; on a GPU each read waits for the device."""

    READING = {"item", "tolist", "__bool__", "__int__", "__index__", "__float__", "cpu", "nonzero"}

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += getattr(func, "__name__", "") in self.READING
        return func(*args, **(kwargs or {}))


def configure(parser: argparse.ArgumentParser) -> None:
    vlm.conditions(parser, [1], [0.0], 128)
    drawn.configure(parser)
    add = parser.add_argument
    add("--compile", action=argparse.BooleanOptionalAction, default=True, help="also with compile=True (default)")
    add("--auto", action="store_true", help="also with auto=True; also, with and without it, each drafter's "
        "architecture with random weights, which is almost always wrong")  # fmt: skip
    add("--methods", nargs="+", metavar="PATTERN", help="only these methods besides stock, such as plain 'hostile*'")
    add("--static", action="store_true", help="also stock generate, compiled on a static cache")
    add("--profile", action="store_true", help="count operations and list those that take longest")


def measure(args: argparse.Namespace, outcome: Outcome) -> Iterator[None]:
    bench = subject.timed(args, outcome)
    weights = sum(p.numel() * p.element_size() for p in bench.model.parameters()) / 2**20
    most = roofline(bench.model)
    outcome.provenance |= {"weights_mb": round(weights, 1)} | most.facts()
    args.without = [*args.without, "hf-*", "ngram", *([] if args.static else ["stock-static"])]
    chosen, asked = matching(list(methods(bench.model, args)), args.methods), drawn.asked(args)
    for batch, heat in [(batch, heat) for batch in args.batch for heat in args.temperature]:
        for shown, some in asked.items():
            cell, first = vlm.VlmCell(batch, heat, shown), bench.inputs(batches(some, batch)[0])
            begun = {m.name: bench.call(m, heat, first, bench.seed).seconds for m in chosen}
            records = {r["method"]: r for r in vlm.measure_cell(bench, cell, chosen, some) if r["category"] == "all"}
            for method in chosen:
                record = records[method.name] | {"suite": "round", "first_call_s": begun[method.name]}
                held, stock = record["peak_mb"], records["stock"]["peak_mb"]
                record["least_ms"] = most.least_ms(batch * record["nodes_per_call"])
                forward = record["parts_ms"].get("verify", record["step_ms"])
                record["share_of_limit"] = record["least_ms"] / forward if forward else None
                record["above_stock"] = None if held is None else (held - stock) / (weights + stock)
                outcome.records.append(record | watched(bench, method, heat, first, args.profile))
            yield


def methods(model: GenerativeModel, args: argparse.Namespace) -> Iterator[Method]:
    """Stock steps, then the loop without a drafter and with each drafter: eager, compiled, and with auto=True."""
    ways: dict[str, dict[str, bool]] = {"": {}}
    ways |= {" compiled": {"compile": True}} if args.compile else {}
    ways |= {f"{name} auto": options | {"auto": True} for name, options in ways.items()} if args.auto else {}
    stock, *drafted = vlm.methods(model, args)
    yield stock
    drafted += [hostile(method, args.seed) for method in drafted if args.auto and method.drafter is not None]
    for method in (Method("plain", Plain()), *drafted):
        for name, options in ways.items() if method.drafter is not None else ((("", {})),):
            if not (method.name == "plain" and "auto" in options):
                yield replace(method, name=method.name + name, options={**method.options, **options})


def hostile(method: Method, seed: int) -> Method:
    """The same with a drafter of the same architecture and random weights: as slow, and almost always wrong."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        drafter = type(method.drafter)(method.drafter.config).eval()
    return replace(method, name=f"hostile {method.name}", drafter=drafter)


def watched(bench: VlmBench, method: Method, heat: float, inputs: BatchFeature, profile: bool) -> report.Record:
    """Host reads and torch operations per round: a long call minus a short one, over the rounds between."""
    short, long = (replace(bench, max_new_tokens=n) for n in (max(2, bench.max_new_tokens // 4), bench.max_new_tokens))
    seen: list[tuple[int, int, Counter[str], Counter[str]]] = []
    for one in (short, long):
        with Reads() as reads:
            call = one.call(method, heat, inputs, bench.seed)
        took, many = _profiled(partial(one.call, method, heat, inputs, bench.seed)) if profile else ({}, {})
        seen.append((call.steps, reads.count, Counter(took), Counter(many)))
    (steps, asked, times, counts), (all_steps, all_asked, all_times, all_counts) = seen
    rounds = all_steps - steps
    if rounds <= 0:
        return {"reads": None, "ops": None, "top": []}
    all_times.subtract(times)
    all_counts.subtract(counts)
    longest = all_times.most_common(TOP)
    top = [{"op": op, "ms": us / 1e3 / rounds, "calls": all_counts[op] / rounds} for op, us in longest]
    return {"reads": (all_asked - asked) / rounds, "ops": sum(all_counts.values()) / rounds or None, "top": top}


def _profiled(call: Callable[[], object]) -> tuple[dict[str, float], dict[str, int]]:
    """Microseconds of each operation, without the operations that it calls, and the number of calls."""
    from torch.profiler import ProfilerActivity, profile

    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with profile(activities=kinds) as seen:
        call()
    rows = [row for row in seen.key_averages() if not row.key.startswith(("cuda", "Activity"))]
    return {r.key: r.self_cpu_time_total for r in rows}, {r.key: r.count for r in rows}


_SIDE, _TURNS = 1024, 20  # size of the square matrices whose product is timed, and its repetitions


@dataclass(frozen=True)
class Roofline:
    """The roofline of a decoder on this machine, without attention, norms and sampling.

    Attributes:
        bytes: of the matrices that every token is multiplied with.
        products: multiplications and additions of one token with them.
        bytes_per_s: read by a product of as many matrices of the same shapes with one vector.
        products_per_s: of two square matrices.
    """

    bytes: int
    products: int
    bytes_per_s: float
    products_per_s: float

    def least_ms(self, nodes: float) -> float:
        """The least time of a forward over this many nodes, of all rows together."""
        return 1e3 * max(self.bytes / self.bytes_per_s, nodes * self.products / self.products_per_s)

    def facts(self) -> dict[str, float]:
        """The facts for a result's provenance."""
        return {
            "matrices_mb": round(self.bytes / 2**20, 1),
            "memory_gb_per_s": round(self.bytes_per_s / 1e9, 1),
            "gflops": round(self.products_per_s / 1e9, 1),
        }


@torch.inference_mode()
def roofline(model: Any) -> Roofline:
    """The roofline of a model's text layers and head, from timed products of its shapes, the best of several runs."""
    weights = [m.weight for m in decoder(model).modules() if isinstance(m, nn.Linear)]
    last = head(model)
    matrices = [*weights, *([] if last is None else [last.weight])]
    count = sum(w.numel() for w in matrices)
    vectors = {w.shape[1]: w.new_ones(1, w.shape[1]) for w in matrices}
    square = torch.ones(_SIDE, _SIDE, dtype=model.dtype, device=model.device)

    def read() -> None:
        for weight in matrices:
            linear(vectors[weight.shape[1]], weight)

    held = sum(w.numel() * w.element_size() for w in matrices)
    return Roofline(held, 2 * count, held / _best(read, square), 2 * _SIDE**3 / _best(lambda: square @ square, square))


def _best(call: Callable[[], Any], where: Tensor) -> float:
    """Seconds of the fastest of several calls."""
    taken = []
    for _ in range(_TURNS):
        wait(where.device)
        began = time.perf_counter()
        call()
        wait(where.device)
        taken.append(time.perf_counter() - began)
    return min(taken)
