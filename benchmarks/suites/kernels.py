"""The kernels suite: times kernels, their reference definitions and torch's own, relative to the copy bandwidth."""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from benchmarks.suites import kernel_cases as cases
from mmspec.app.bench import report
from mmspec.app.bench.command import Outcome, say
from mmspec.app.devices import find_device, wait
from mmspec.app.options import count
from mmspec.app.provenance import provenance
from mmspec.kernels import dispatch, reference

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
COPIED = 2**30  # bytes of the copy that measures the bandwidth
NO_GPU = "unmeasured: needs a GPU"
Call = Callable[[], cases.Result]
Prepare = Callable[[], Call]  # does what a caller would do once, and returns the call to time
Judged = tuple[list[float], report.Record]  # seconds of each timed call; `checks`: is the result right; a `note`


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--only", nargs="+", choices=list(cases.CASES), metavar="KERNEL", help=f"some of {', '.join(cases.CASES)}")
    add("--dtype", choices=DTYPES, default="bf16", help="of caches, logits and network outputs (default: %(default)s)")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: %(default)s")
    add("--sizes", choices=("toy", "real"), help="default: real on a GPU, toy elsewhere")
    add("--repeats", type=count, default=20, help="timed calls (default: %(default)s)")
    add("--compile", action=argparse.BooleanOptionalAction, help="torch.compile of the definitions (default: on a GPU)")


def measure(args: argparse.Namespace, outcome: Outcome) -> Iterator[None]:
    device, dtype = find_device(args.device), DTYPES[args.dtype]
    kind = args.sizes or ("real" if device.type == "cuda" else "toy")
    bandwidth = copy_bandwidth(device, args.repeats)
    outcome.provenance = provenance(device, dtype) | {
        "model": "kernels",
        "copy_gb_s": "unmeasured" if bandwidth is None else round(bandwidth / 1e9, 1),
        "environment": {name: os.environ[name] for name in ("TRITON_INTERPRET",) if name in os.environ},
    }
    compiled = device.type == "cuda" if args.compile is None else args.compile
    for name in args.only or cases.CASES:
        case, known = cases.CASES[name], cases.TOLERANCES[name]
        own = dtype if dtype in known else next(iter(known))
        sizes = getattr(case, kind)
        cell = {"suite": "kernels", "kernel": name, "dtype": str(own).removeprefix("torch."), "sizes": sizes}
        judgements, moved = competed(name, sizes, device, own, compiled, args.repeats)
        records = _records(judgements, moved, bandwidth)
        outcome.records += [cell | {"tolerance": list(known[own])} | record for record in records]
        yield


def competed(
    name: str, sizes: cases.Sizes, device: torch.device, dtype: torch.dtype, compiled: bool, repeats: int
) -> tuple[dict[str, Judged], int | None]:
    """The outcome of each contender, and the least number of bytes that the operation moves."""
    torch.manual_seed(0)
    try:
        given = cases.CASES[name].make(sizes, device, dtype)
        wanted = cases.apply(name, getattr(reference, name), given)
    except Exception as error:  # most likely out of memory; the other kernels are still measured
        unknown = {"checks": "not run", "note": "not run: the definition gave nothing to check it by"}
        return {"triton": ([], unknown), "definition": ([], {"checks": "failed", "note": failure(error)})}, None
    judgements = {}
    for contender, prepare in contenders(name, given, compiled):
        say(f"{name}: {contender}")
        judgements[contender] = judged(name, dtype, contender, prepare, wanted, device, repeats)
    return judgements, cases.CASES[name].moved(given, wanted)


def judged(
    name: str,
    dtype: torch.dtype,
    contender: str,
    prepare: Prepare,
    wanted: cases.Result,
    device: torch.device,
    repeats: int,
) -> Judged:
    """Check and time one contender: a wrong result is not timed, and an error does not end the run."""
    acceptance = "failed"
    try:
        if contender == "triton" and not _runnable(device):
            return [], {"checks": "not run", "note": f"{NO_GPU}; TRITON_INTERPRET=1 checks its arithmetic here"}
        run = prepare()
        wrong = cases.distance(name, dtype, run(), wanted)
        if wrong is not None:
            return [], {"checks": "refused", "note": f"refused: {wrong}"}
        if contender == "triton" and device.type != "cuda":
            return [], {"checks": "passed in the interpreter", "note": NO_GPU}
        acceptance = "passed"
        return timed(run, device, repeats), {"checks": acceptance}
    except Exception as error:  # compilers, launches and allocations fail in many ways; the others are still measured
        return [], {"checks": acceptance, "note": failure(error)}


def failure(error: Exception) -> str:
    """An error as a note: its class and the first line of its message."""
    return ": ".join(["failed", type(error).__name__, *str(error).strip().splitlines()[:1]])


def _runnable(device: torch.device) -> bool:
    if device.type == "cuda":
        return True
    from mmspec.kernels import checks

    return checks.INTERPRETED


def timed(run: Callable[[], object], device: torch.device, repeats: int) -> list[float]:
    """Seconds of successive warm calls; on a GPU by CUDA events, with a cleared L2 cache before each."""
    if device.type == "cuda":
        from triton.testing import do_bench

        return [ms / 1e3 for ms in do_bench(run, warmup=50, rep=10 * repeats, return_mode="all")]
    run()
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        wait(device)
        seconds.append(time.perf_counter() - began)
    return seconds


def copy_bandwidth(device: torch.device, repeats: int) -> float | None:
    """Bytes per second, read and written, of a large copy; None where there is no GPU."""
    if device.type != "cuda":
        return None
    source = torch.zeros(COPIED, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * COPIED / statistics.median(timed(lambda: target.copy_(source), device, repeats))


def _records(judgements: dict[str, Judged], moved: int | None, bandwidth: float | None) -> Iterator[report.Record]:
    """The records: the times of each contender, relative to the definition."""
    eager = [1e3 * t for t in judgements["definition"][0]]
    for contender, (times, said) in judgements.items():
        shown = report.spread("ms", [1e3 * t for t in times])
        speed = moved / statistics.median(times) if moved and times else None
        ratios = [
            statistics.median(eager) / shown[key] if eager and times else None for key in ("ms", "ms_p75", "ms_p25")
        ]
        shown |= dict(zip(("speedup_e2e", "speedup_e2e_p25", "speedup_e2e_p75"), ratios, strict=True))
        shown |= {"bytes": moved, "gb_s": speed and speed / 1e9, "roofline": speed and bandwidth and speed / bandwidth}
        yield {"method": contender, **shown, "n": len(times), "stock_path": contender != "triton", **said}


# -- the contenders ---------------------------------------------------------------------------------------------------


def contenders(name: str, given: cases.Arguments, compiled: bool) -> Iterator[tuple[str, Prepare]]:
    """The contenders for an operation, by name; each has its own copy of the arguments."""
    definition = getattr(reference, name)
    yield "triton", lambda: cases.bound(name, dispatch.chosen(name, "cuda", "triton"), given)
    yield "definition", lambda: cases.bound(name, definition, given)
    if compiled:
        yield "compiled", lambda: cases.bound(name, torch.compile(definition, dynamic=False), given)
    if name == "tree_attention":
        yield "sdpa", lambda: _sdpa(given)
        if given["q"].is_cuda:
            yield "flex", lambda: _flex(given)


def _mask(given: cases.Arguments) -> Tensor:
    """Bool [B, n, T], which slots each query sees: the cache, and its ancestors by the tree's bits."""
    sizes = (len(given["q"]), given["q"].shape[2], given["keys"].shape[2])
    index = (torch.arange(size, device=given["q"].device) for size in sizes)
    b, i, slot = torch.meshgrid(*index, indexing="ij")
    node, words = slot - given["lengths"][b], given["bits"].shape[2]
    word = given["bits"][b, i, (node.clamp(min=0) // 64).clamp(max=words - 1)]
    return (node < 0) | ((node < 64 * words) & (((word >> (node & 63)) & 1) == 1))


def _finite(given: cases.Arguments) -> list[Tensor]:
    """Queries, keys and values; torch needs finite values even where no query looks."""
    return [given["q"], given["keys"].nan_to_num(), given["values"].nan_to_num()]


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """An additive mask whose rows are aligned to 16 bytes, as fused kernels require."""
    width = -(-mask.shape[-1] // 16) * 16
    numbers = torch.zeros(*mask.shape[:-1], width, dtype=dtype, device=mask.device)
    return numbers[..., : mask.shape[-1]].masked_fill_(~mask, -torch.inf)


def _sdpa(given: cases.Arguments) -> Call:
    """SDPA with torch's own grouping and an added mask, its fastest way on an H100."""
    (q, k, v), mask = _finite(given), _added(_mask(given)[:, None], given["q"].dtype)
    return lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def _flex(given: cases.Arguments) -> Call:
    """Flex attention with a prepared block mask, and inside a block a mask in memory, its fastest way on an H100."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    (q, k, v), seen = _finite(given), _mask(given)

    def sees(b: Tensor, h: Tensor, i: Tensor, slot: Tensor) -> Tensor:
        return seen[b, i, slot]

    mask = create_block_mask(sees, q.shape[0], None, q.shape[2], k.shape[2], device=str(q.device))
    attend = torch.compile(flex_attention, dynamic=False)
    return lambda: attend(q, k, v, block_mask=mask, enable_gqa=True)
