"""The kernels suite: each kernel beside its definition and torch's own, as a share of the device's copy bandwidth."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mmspec.app.bench import report
from mmspec.app.bench.command import BenchError, Outcome, say
from mmspec.app.engine import wait
from mmspec.app.provenance import provenance
from mmspec.kernels import cases, dispatch, reference

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
COPIED = 2**30  # bytes of the copy that measures the bandwidth
NO_GPU = "unmeasured: needs a GPU"


class Unfit(Exception):
    """A way to compute that cannot be timed here; the message says why."""


@dataclass(frozen=True)
class Contender:
    """One way to compute an operation."""

    name: str
    run: Callable[[], Any]
    again: Callable[[], Any] | None = None  # what the clock sees, where `run` does more than the work


def configure(parser: argparse.ArgumentParser) -> None:
    """Which kernels, in which sizes."""
    add = parser.add_argument
    add("--only", nargs="+", choices=list(cases.CASES), metavar="KERNEL", help=f"some of {', '.join(cases.CASES)}")
    add("--dtype", choices=DTYPES, default="bf16", help="of caches, logits and network outputs (default: %(default)s)")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: %(default)s")
    add("--sizes", choices=("toy", "real"), help="default: real on a GPU, toy elsewhere")
    add("--set", nargs="+", default=[], metavar="NAME=N", help="other sizes, such as B=16 T=16444 N=32")
    add("--repeats", type=int, default=20, help="timed calls (default: %(default)s)")
    add("--compile", action=argparse.BooleanOptionalAction, help="torch.compile of the definitions; default: on a GPU")


def measure(args: argparse.Namespace, outcome: Outcome) -> Iterator[None]:
    """One cell per kernel; nothing is timed that has not come up with the definition's result first."""
    device, dtype = torch.device(args.device), DTYPES[args.dtype]
    changed, kind = _sizes(args.set), args.sizes or ("real" if device.type == "cuda" else "toy")
    report.LAYOUTS["kernels"] = LAYOUT
    bandwidth = copy_bandwidth(device, args.repeats)
    outcome.provenance = provenance(device, dtype) | {
        "model": "kernels",
        "copy_gb_s": "unmeasured" if bandwidth is None else round(bandwidth / 1e9, 1),
    }
    for name in args.only or cases.CASES:
        case = cases.CASES[name]
        known = cases.TOLERANCES[name]
        own = dtype if dtype in known else next(iter(known))
        sizes = getattr(case, kind) | {k: v for k, v in changed.items() if k in getattr(case, kind)}
        torch.manual_seed(0)
        given = case.make(sizes, device, own)
        wanted = cases.apply(name, getattr(reference, name), given)
        compiled = device.type == "cuda" if args.compile is None else args.compile
        cell = {"suite": "kernels", "kernel": name, "dtype": str(own).removeprefix("torch."), "sizes": sizes}
        found = []
        for contender in contenders(name, given, compiled):
            say(f"{name}: {contender.name}")
            times, note = judged(name, own, contender, wanted, device, args.repeats)
            found.append(_figures(times, case.moved(given, wanted), bandwidth) | {"method": contender.name} | note)
        eager = next(r["ms"] for r in found if r["method"] == "definition")
        for record in found:
            ratios = [eager / record[key] if eager and record[key] else None for key in ("ms", "ms_p75", "ms_p25")]
            shown = dict(zip(("speedup_e2e", "speedup_e2e_p25", "speedup_e2e_p75"), ratios, strict=True))
            outcome.records.append(cell | record | shown | {"stock_path": record["method"] != "triton"})
        yield


def _sizes(pairs: list[str]) -> dict[str, int]:
    try:
        return {name: int(number) for name, number in (pair.split("=") for pair in pairs)}
    except ValueError as error:
        raise BenchError(f"--set takes sizes such as B=16 T=16444; got {' '.join(pairs)!r}") from error


def contenders(name: str, given: cases.Arguments, compiled: bool) -> Iterator[Contender]:
    """The kernel, its definition, and what torch has for it."""
    definition = getattr(reference, name)
    ways = {"triton": dispatch.chosen(name, "cuda", "triton"), "definition": definition}
    if compiled:
        ways["compiled"] = torch.compile(definition, dynamic=False)
    for way, function in ways.items():
        yield Contender(way, partial(cases.apply, name, function, given), partial(function, **given))
    if name == "tree_attention":
        yield Contender("sdpa", _once(lambda: _sdpa(given)))
        if given["q"].is_cuda:
            yield Contender("flex", _once(lambda: _flex(given)))


def _once(prepare: Callable[[], Callable[[], Any]]) -> Callable[[], Any]:
    """Masks are made at the first call, outside the clock."""
    held: list[Callable[[], Any]] = []

    def run() -> Any:
        if not held:
            held.append(prepare())
        return held[0]()

    return run


def _visible(given: cases.Arguments, b: Any, i: Any, slot: Any) -> Tensor:
    """Whether query i of row b sees a slot."""
    node, words = slot - given["lengths"][b], given["bits"].shape[2]
    word = given["bits"][b, i, (node.clamp(min=0) // 64).clamp(max=words - 1)]
    return (node < 0) | ((node < 64 * words) & (((word >> (node & 63)) & 1) == 1))


def _finite(given: cases.Arguments) -> list[Tensor]:
    """Queries, keys and values; what no query sees must be finite for sdpa."""
    return [given["q"], given["keys"].nan_to_num(), given["values"].nan_to_num()]


def _sdpa(given: cases.Arguments) -> Callable[[], Tensor]:
    q, k, v = _finite(given)
    (B, _, n, _), T = q.shape, k.shape[2]
    index = (torch.arange(size, device=q.device) for size in (B, n, T))
    mask = _visible(given, *torch.meshgrid(*index, indexing="ij"))[:, None]
    each = q.shape[1] // k.shape[1]
    attend = torch.nn.functional.scaled_dot_product_attention
    return lambda: attend(q, k.repeat_interleave(each, 1), v.repeat_interleave(each, 1), attn_mask=mask)


def _flex(given: cases.Arguments) -> Callable[[], Tensor]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, k, v = _finite(given)

    def sees(b: Tensor, h: Tensor, i: Tensor, slot: Tensor) -> Tensor:
        return _visible(given, b, i, slot)

    mask = create_block_mask(sees, q.shape[0], None, q.shape[2], k.shape[2], device=str(q.device))
    attend = torch.compile(flex_attention, dynamic=False)
    return lambda: attend(q, k, v, block_mask=mask, enable_gqa=True)


def judged(
    name: str, dtype: torch.dtype, contender: Contender, wanted: Any, device: torch.device, repeats: int
) -> tuple[list[float], dict[str, str]]:
    """Seconds of each timed call, and a note; no seconds if the result is not the definition's."""
    try:
        if contender.name == "triton":
            _runnable(device)
        wrong = cases.distance(name, dtype, contender.run(), wanted)
        if wrong is not None:
            raise Unfit(f"refused: {wrong}")
        if contender.name == "triton" and device.type != "cuda":
            raise Unfit(f"{NO_GPU}; its arithmetic has passed in the interpreter")
        return timed(contender.again or contender.run, device, repeats), {}
    except (Unfit, ImportError, NotImplementedError, *_compile_errors()) as error:
        return [], {"note": str(error).strip().splitlines()[0]}


def _runnable(device: torch.device) -> None:
    from mmspec.kernels import checks

    if device.type != "cuda" and not checks.INTERPRETED:
        raise Unfit(f"{NO_GPU}; TRITON_INTERPRET=1 checks its arithmetic here")


def _compile_errors() -> tuple[type[Exception], ...]:
    from torch._dynamo.exc import TorchDynamoException

    return (TorchDynamoException,)


def timed(run: Callable[[], Any], device: torch.device, repeats: int) -> list[float]:
    """Seconds of calls made one after the other, warm; on a GPU by its own clock, with an empty cache before each."""
    if device.type == "cuda":
        from triton.testing import do_bench

        return [ms / 1e3 for ms in do_bench(run, warmup=50, rep=10 * repeats, return_mode="all")]
    run()
    found = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        wait(device)
        found.append(time.perf_counter() - began)
    return found


def copy_bandwidth(device: torch.device, repeats: int) -> float | None:
    """Bytes per second, read and written, of a large copy; None where there is no GPU."""
    if device.type != "cuda":
        return None
    source = torch.zeros(COPIED, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * COPIED / statistics.median(timed(lambda: target.copy_(source), device, repeats))


def _figures(times: list[float], moved: int, bandwidth: float | None) -> report.Record:
    record = report.spread("ms", [1e3 * t for t in times])
    speed = moved / statistics.median(times) if times else None
    share = speed / bandwidth if speed and bandwidth else None
    return record | {"bytes": moved, "gb_s": speed and speed / 1e9, "roofline": share, "n": len(times)}


def _title(record: report.Record) -> str:
    sizes = " ".join(f"{name} {size}" for name, size in record["sizes"].items())
    return f"{record['kernel']}, {record['dtype']}: {sizes}"


def _measured(name: str, form: str) -> Callable[[report.Record], str]:
    return lambda record: "unmeasured" if record[name] is None else form.format(record[name])


LAYOUT = report.Layout(
    _title,
    (
        ("way", lambda r: r["method"]),
        ("ms", _measured("ms", "{:.4f}")),
        ("quartiles", lambda r: "-" if r["ms"] is None else f"{r['ms_p25']:.4f}-{r['ms_p75']:.4f}"),
        ("vs definition", report.figure("speedup_e2e", "{:.2f}x")),
        ("MB moved", lambda r: f"{r['bytes'] / 1e6:.3f}"),
        ("GB/s", _measured("gb_s", "{:.1f}")),
        ("of copy bandwidth", _measured("roofline", "{:.0%}")),
        ("n", lambda r: str(r["n"])),
    ),
    {
        "ms": "milliseconds of one call, median and quartiles; on a GPU with an empty L2 cache",
        "speedup_e2e": "time of the definition, eager, over that of this way",
        "bytes": "what cannot but be read or written, each byte once",
        "gb_s": "these bytes over the time",
        "roofline": "this over the bandwidth of a 1 GiB copy on the same device (copy_gb_s), read and written",
    },
)
