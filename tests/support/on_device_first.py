"""What only a device can show, in small direct checks: the first stage of the gpu suite, since all others rest on it.

`python tests/support/on_device_first.py --json FILE`. Each check leaves a record that says whether it passed and, where
it did not, what to do. On a CPU they run as toys, kernels in Triton's interpreter and graphs on `pretend_graphs.py`; a
record then says what that leaves unmeasured.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

sys.path.append(str(Path(__file__).resolve().parents[2]))  # where benchmarks is
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton, as transformers does

import pretend_graphs
import quick_interpreter
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right

from benchmarks.suites import kernel_cases as cases
from mmspec.app.provenance import provenance
from mmspec.compile import capture, graphs, recording
from mmspec.compile.capture import PiecewiseFunction
from mmspec.kernels import dispatch
from mmspec.kernels import reference as ops
from mmspec.pipelines.host import tree_attention


@dataclass(frozen=True)
class Check:
    """One thing to look at.

    Attributes:
        shows: what, for the record.
        wrong: what is wrong on a device; empty: nothing.
        otherwise: what to do where something is.
        unmeasured: what a toy on a CPU cannot show.
        toy: whether there is one.
    """

    shows: str
    wrong: Callable[[torch.device], str]
    otherwise: str
    unmeasured: str
    toy: bool = True


# -- kernels -----------------------------------------------------------------------------------------------------------


@triton.jit
def _count(X, OUT, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(X + i, mask=i < n, other=0)  # what is left out has a value too
    tl.store(OUT + tl.arange(0, 256), tl.histogram(x, 256, mask=(i < n) & (x % 3 == 1)))


def histogram(device: torch.device) -> str:
    for n in (1, 100, 4095, 4096):
        x = torch.randint(0, 256, (n,), dtype=torch.int32)
        given, out = x.to(device), torch.empty(256, dtype=torch.int32, device=device)
        _count[(1,)](given, out, n, BLOCK=4096)
        wanted = torch.bincount(x[x % 3 == 1], minlength=256)
        if not torch.equal(out.cpu().long(), wanted):
            return f"of {n} values {int((out.cpu() - wanted).abs().sum())} are counted where they do not belong"
    return ""


def barrier(device: torch.device) -> str:
    """Every slot but the ends is one entry's source and another's target."""
    size = {"B": 8, "K": 60, "T": 300, "heads": 4, "layers": 8} if device.type == "cuda" else {"B": 2, "K": 9, "T": 40}
    for width, dtype in ((128, torch.bfloat16), (256, torch.float32)):
        given = cases.CASES["compact_rows"].make(cases.CASES["compact_rows"].toy | size | {"D": width}, device, dtype)
        entry = torch.arange(size["K"], device=device)
        for step in (1, 2):
            given |= {"source": given["start"][:, None] + entry + step}
            wanted = cases.apply("compact_rows", ops.compact_rows, given)
            for _ in range(20 if device.type == "cuda" else 1):
                found = cases.apply("compact_rows", dispatch.chosen("compact_rows", "cuda", "triton"), given)
                if wrong := cases.distance("compact_rows", dtype, found, wanted):
                    return f"{width} numbers in {dtype}, moved by {step}: {wrong}"
    return ""


def shared_memory(device: torch.device) -> str:
    kernel, wrong = dispatch.chosen("tree_attention", "cuda", "triton"), []
    for dtype in cases.TOLERANCES["tree_attention"]:
        for width in (128, 256):
            sizes = {"B": 2, "N": 31, "T": 150, "heads": 7, "kv_heads": 1, "D": width}
            given = cases.CASES["tree_attention"].make(sizes, device, dtype)
            try:
                found = cases.distance("tree_attention", dtype, kernel(**given), ops.tree_attention(**given))
            except Exception as error:  # the others may fit
                found = f"{type(error).__name__}: {error}"
            wrong += [f"{width} numbers in {dtype}: {found}"] if found else []
    return "; ".join(wrong)


def flash(device: torch.device) -> str:
    """A chain of one row behind its text, with the groups of heads of Qwen2.5-VL-7B."""
    dtype, n, T = torch.bfloat16, 9, 75
    q, (k, v) = torch.randn(1, 28, n, 128), torch.randn(2, 1, 4, T, 128)
    q, k, v = (t.to(device, dtype) for t in (q, k, v))
    if device.type == "cuda" and not tree_attention.flash_serves(q, k, v):
        return "torch has no flash attention for it"
    out = F.scaled_dot_product_attention(q, k, v, causal_lower_right(n, T), enable_gqa=True)
    chain = torch.ones(1, n, n, dtype=torch.bool, device=device).tril()
    wanted = ops.tree_attention(q, k, v, torch.tensor([T - n], device=device), ops.bit_rows(chain))
    return cases.distance("tree_attention", dtype, out, wanted) or ""


# -- captures ----------------------------------------------------------------------------------------------------------


def addresses(device: torch.device) -> str:
    """Keys and values found by their addresses, after new ones were appended; twice, since a text grows."""
    from mmspec.kernels.attention import addressed_attention

    B, heads, groups, n, D, slots = 2, 6, 2, 7, 128 if device.type == "cuda" else 16, 640
    bits = ops.bit_rows(cases.ancestors(cases.parents(B, n)).to(device))
    for dtype in cases.TOLERANCES["tree_attention"]:
        keys, values = torch.randn(2, B, groups, slots, D, device=device).to(dtype)
        for lengths in (torch.tensor([300, 5], device=device), torch.tensor([601, 9], device=device)):
            q = torch.randn(B, heads, n, D, device=device).to(dtype)
            k, v = torch.randn(2, B, groups, n, D, device=device).to(dtype)
            table = [keys.data_ptr(), values.data_ptr(), *keys.stride()[:2], *values.stride()[:2], 0, 0, 0, 0]
            found = addressed_attention(
                q, k, v, torch.tensor(table, device=device), lengths, bits, aligned=device.type == "cuda"
            )
            for b, length in enumerate(lengths.tolist()):
                if not torch.equal(keys[b, :, length : length + n], k[b]):
                    return f"{dtype}: new keys are not where they should be"
            off = cases.distance("tree_attention", dtype, found, ops.tree_attention(q, keys, values, lengths, bits))
            if off is not None:
                return f"{dtype}: {off}"
    return ""


class Layers(nn.Module):
    """What decoder layers are made of: products, norms, a choice of tokens, attentions."""

    def __init__(self, width: int = 256, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(512, width)
        self.norm = nn.ModuleList(nn.RMSNorm(width) for _ in range(depth))
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(depth))
        self.out = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(depth))

    def forward(self, ids: Tensor, attend: Any = capture.attend) -> list[Tensor]:
        x = self.embed(ids)
        B, n, width = x.shape
        for layer, (norm, qkv, out) in enumerate(zip(self.norm, self.qkv, self.out, strict=True)):
            q, k, v = qkv(norm(x)).view(B, n, 12, width // 4).transpose(1, 2).chunk(3, 1)
            x = x + F.silu(out(attend(layer, 0.125, q, k, v).transpose(1, 2).reshape(B, n, width)))
        scores = x @ self.embed.weight.T
        return [scores, scores.topk(4).indices, scores.softmax(-1).cumsum(-1)]


def attention(layer: int, scale: float, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = F.scaled_dot_product_attention(q, k, v, scale=scale)
    return out.transpose(1, 2).contiguous().transpose(1, 2)


def pieces(device: torch.device) -> str:
    layers = Layers().to(device)
    with ExitStack() as stack, torch.no_grad():
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("error", UserWarning)  # what runs without a graph says so
        if device.type != "cuda":
            stack.enter_context(patch.object(graphs, "wanted", lambda tensors: True))
            stack.enter_context(patch.object(graphs, "Recorder", pretend_graphs.Tape))
            stack.enter_context(patch.object(capture, "inductor", lambda piece, examples: piece))
        elif graphs.setting() == "off":
            return f"{graphs.VARIABLE} is off"
        captured = PiecewiseFunction(layers, [torch.zeros(2, 9, dtype=torch.long, device=device)], layers.parameters())
        if captured._graphs is None:
            return "nothing is recorded"
        for _ in range(5):
            ids = torch.randint(0, 512, (2, 9), device=device)
            (scores, best, _), (wanted, *_) = captured(attention, ids), layers(ids, attention)
            if not torch.allclose(scores, wanted, rtol=1e-3, atol=1e-3):
                return f"replayed, the scores are off by {(scores - wanted).abs().max().item():.2g}"
            if not torch.equal(scores.gather(-1, best), scores.topk(4).values):
                return "what is chosen is not the best"
    return ""


CHECKS: dict[str, Check] = {
    "histogram": Check(
        "tl.histogram under a mask counts what the mask leaves, also where it leaves little",
        histogram,
        "in kernels/relaxed.py give what is masked out a bin of its own (of 512), and count without a mask",
        "Triton's code for it",
    ),
    "barrier": Check(
        "compact_rows reads all entries of a row before it writes any",
        barrier,
        "in kernels/rows.py launch `_compact` with num_warps=1; until then MMSPEC_KERNELS=reference",
        "the barrier between the warps of a program",
    ),
    "shared memory": Check(
        "tree attention finds its shared memory at 128 and 256 numbers a head, in every dtype",
        shared_memory,
        "in kernels/attention.py halve the 2**14 of `block_n`; until then drafts attend by sdpa, with a warning",
        "what a program of the device may hold",
    ),
    "addresses": Check(
        "attention finds keys and values by addresses in a tensor, as it does inside a graph",
        addresses,
        "MMSPEC_GRAPHS=pieces; first try `aligned=False` in mmspec/steady.py",
        "pointers that a kernel has loaded",
    ),
    "flash": Check(
        "a chain of one row attends by flash attention, heads in groups, and sees what it should",
        flash,
        "in pipelines/host/tree_attention.py let `flash_serves` say no: the kernel serves chains as well",
        "flash attention",
    ),
    "work spaces": Check(
        "a graph computes the same once other graphs, streams and threads have come and gone",
        lambda device: recording._wrong(device, recording.Recorder),
        "nothing: `enable` finds it out by itself and records no graphs; tell us the version of torch and the driver",
        "cuBLAS's work spaces",
        toy=False,
    ),
    "pieces": Check(
        "what inductor makes of a piece can be recorded, and replays to the same",
        pieces,
        "MMSPEC_GRAPHS=off; the message names the operation, which mmspec/compile/capture.py has to leave outside",
        "inductor, and the recording of what it makes",
    ),
}


def checked(device: torch.device, checks: dict[str, Check]) -> Iterator[dict[str, Any]]:
    """A record for each; where one leaves the device broken, the others are not run."""
    broken = ""
    for name, check in checks.items():
        record: dict[str, Any] = {"check": name, "shows": check.shows, "passed": None}
        if device.type != "cuda":
            record["unmeasured"] = check.unmeasured
        if broken:
            yield record | {"found": f"not run: {broken} left the device broken; run it with --only {name!r}"}
            continue
        if device.type != "cuda" and not check.toy:
            yield record | {"found": "not run: it needs a GPU"}
            continue
        try:
            found = check.wrong(device)
        except Exception as error:  # the others go on
            found = f"{type(error).__name__}: {error}"[:800]
        try:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        except RuntimeError as error:
            broken, found = name, f"{found}; afterwards {error}"[:1200]
        yield record | {"passed": not found, "found": found} | ({"what to do": check.otherwise} if found else {})


def main() -> int:
    """0 if nothing failed, else 1."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", nargs="+", choices=CHECKS, default=list(CHECKS))
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    torch.manual_seed(0)
    quick_interpreter.install()
    device = torch.device(args.device)
    out: dict[str, Any] = {"provenance": provenance(device, torch.float32), "records": []}
    for record in checked(device, {name: CHECKS[name] for name in args.only}):
        out["records"].append(record)
        args.json.write_text(json.dumps(out, indent=1))
        print(json.dumps(record), flush=True)
    return int(any(record["passed"] is False for record in out["records"]))


if __name__ == "__main__":
    sys.exit(main())
