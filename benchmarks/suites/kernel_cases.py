"""Test cases for the kernels: their inputs, the allowed difference from the reference, and the bytes that they move."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from mmspec.kernels import reference, smoke
from mmspec.kernels.smoke import Arguments, Sizes, ancestors, parents

Result = Tensor | Sequence[Tensor]
# Tolerances (relative, absolute) against the reference definition, by operation and dtype of its input.
Tolerance = dict[torch.dtype, tuple[float, float]]


def _alike(relative: float, absolute: float) -> Tolerance:
    return dict.fromkeys((torch.float32, torch.bfloat16, torch.float16), (relative, absolute))


TOLERANCES: dict[str, Tolerance] = {
    "tree_attention": smoke.TOLERANCES,
    # integers and one exact conversion; copies
    "uniform": {torch.int64: (0.0, 0.0)},
    "compact_rows": _alike(0.0, 0.0),
    # tokens: equal. They could differ only where two float64 scores are equal to the last bits (2⁻⁵⁰ of all draws)
    "draw": _alike(0.0, 0.0),
    # tokens and paths: equal, unless u lies within 10⁻⁶ of a border
    "verify_point_mass": _alike(0.0, 0.0),
    # tokens: equal, unless u lies within 10⁻¹³ of a border, since all sums are float64
    "residual_sample": _alike(0.0, 0.0),
    # float64 throughout, from the same float32 differences; exponentials of two libraries differ by a last bit
    "lantern_accept": _alike(1e-12, 1e-14),
    # ids: equal. Logits of fewer bits are not listed, since equal ones have no order to agree on
    "logit_window": {torch.float32: (0.0, 0.0)},
    # float32 sum of steps × channels terms of magnitude 1 that cancel: 10⁻⁷ per term at most, 10⁻⁵ of the whole
    "gaussian_path": _alike(1e-5, 1e-3),
}


@dataclass(frozen=True)
class Case:
    """A test case of one operation.

    Attributes:
        make: arguments from sizes, device and dtype, drawn from torch's global generator.
        moved: the least number of bytes that are read or written, given the arguments and the result.
        toy: sizes for Triton's interpreter.
        real: sizes of a 7B model at a context of 4k, or of LlamaGen and MAR.
        in_place: the argument that is modified in place; it is the result.
        as_sets: results are ids and a mask of the valid ones; their order does not matter.
    """

    make: Callable[[Sizes, torch.device, torch.dtype], Arguments]
    moved: Callable[[Arguments, Result], int]
    toy: Sizes
    real: Sizes
    in_place: str | None = None
    as_sets: bool = False


def _noise(n: Sizes, device: torch.device, dtype: torch.dtype) -> Arguments:
    shape = (n["B"], n["N"])
    return {"seed": torch.randint(2**62, (n["B"], 1)).to(device), "counter": torch.randint(2**40, shape).to(device)}


def _rows(n: Sizes, device: torch.device, dtype: torch.dtype) -> Arguments:
    B, K, T = n["B"], n["K"], n["T"]
    start = torch.randint(0, T - 4 * K, (B,))
    kept = torch.stack([torch.randperm(4 * K)[:K].sort().values for _ in range(B)])
    buffers = [torch.randn(B, n["heads"], T, n["D"], dtype=dtype, device=device) for _ in range(2 * n["layers"])]
    return {"buffers": buffers, "source": (start[:, None] + kept).to(device), "start": start.to(device)}


def _logits(n: Sizes, device: torch.device, dtype: torch.dtype) -> Tensor:
    return (3 * torch.randn(n["B"], n["N"], n["V"])).to(dtype).to(device)


def _draw(n: Sizes, device: torch.device, dtype: torch.dtype) -> Arguments:
    position, logits = torch.randint(0, 999, (n["B"], n["N"])).to(device), _logits(n, device, dtype)
    return {"logits": logits, "noise": (torch.randint(2**62, (n["B"],)).to(device), position)}


def _verify(n: Sizes, device: torch.device, dtype: torch.dtype) -> Arguments:
    """Likely tokens with some duplicates and holes, and noise that selects one of a node's children."""
    B, N = n["B"], n["N"]
    logits, above = _logits(n, device, dtype), parents(B, N).to(device)
    rows, node = torch.arange(B, device=device)[:, None], torch.arange(N, device=device)
    best = logits[rows, above].topk(min(4, n["V"]), -1).indices
    tokens = best.gather(-1, torch.randint(0, best.shape[-1], (B, N, 1)).to(device))[..., 0]
    tokens[torch.rand(B, N).to(device) < 0.1] = -1
    siblings = (above[:, :, None] == above[:, None, :]) & (node < node[:, None]) & (node > 0)
    repeated = (siblings & (tokens[:, :, None] == tokens[:, None, :])).any(-1)
    mass = reference.token_mass(logits, logits.float().logsumexp(-1), above, tokens) * ~repeated
    u = torch.rand(B, N, dtype=torch.float64).to(device)
    middle = torch.where(mass > 0, reference.sibling_mass(mass, siblings) + mass / 2, u.gather(1, above))
    noise, seen = u.scatter(1, above[:, 1:], middle[:, 1:]), ancestors(above.cpu()).to(device)
    return {"logits": logits, "tokens": tokens, "parents": above, "ancestors": seen, "u": noise}


def _residual(n: Sizes, device: torch.device, dtype: torch.dtype) -> Arguments:
    p, u = 3 * torch.randn(n["B"], n["V"]), torch.rand(n["B"], dtype=torch.float64)
    q = (p + torch.randn_like(p)).to(dtype)
    return {"p": p.to(dtype).to(device), "u": u.to(device), "q": q.to(device)}


def _tested(n: Sizes, device: torch.device) -> tuple[Tensor, Tensor]:
    shape = (n["B"], n["K"])
    return torch.randint(0, n["N"], shape).to(device), torch.randint(-1, n["V"], shape).to(device)


def _lantern(n: Sizes, device: torch.device, dtype: torch.dtype) -> Arguments:
    logits, (nodes, x) = _logits(n, device, dtype), _tested(n, device)
    near = torch.randint(0, n["V"], (n["V"], n["k"]), dtype=torch.int32).to(device)
    q_x, log_z = torch.rand(nodes.shape, dtype=torch.float64).to(device), logits.float().logsumexp(-1)
    return {"logits": logits, "log_z": log_z, "nodes": nodes, "x": x, "q_x": q_x, "near": near, "delta": 0.1}


def _window(n: Sizes, device: torch.device, dtype: torch.dtype) -> Arguments:
    """Logits without ties, because the reference may choose either of two equal ones."""
    order = torch.rand(n["B"], n["N"], n["V"]).argsort(-1)
    logits = (order.float() - n["V"] / 2) / 2**7  # exact in float32; in bfloat16 up to V = 256
    nodes, x = _tested(n, device)
    return {"logits": logits.to(dtype).to(device), "nodes": nodes, "x": x.clamp(min=0), "size": n["size"]}


def _gaussian(n: Sizes, device: torch.device, dtype: torch.dtype) -> Arguments:
    R, K, C = n["R"], n["K"], n["C"]
    beta = torch.linspace(0.01, 0.2, K)
    kept = torch.cumprod(1 - beta, 0)
    before = torch.cat([torch.ones(1), kept[:-1]])
    tilde = ((1 - before) / (1 - kept) * beta).clamp(min=1e-3)
    columns = (kept**0.5, (1 - kept) ** 0.5, beta * before**0.5 / (1 - kept), (1 - before) * (1 - beta) ** 0.5)
    table = torch.stack([*columns[:3], columns[3] / (1 - kept), beta.log(), tilde.log()], 1).flip(0)
    made = [torch.randn(shape).to(dtype).to(device) for shape in ((R, K + 1, C), (R, K, C), (R, K, 2 * C), (R, K, C))]
    return {
        "states": made[0],
        "noise": made[1],
        "log_std_q": (tilde.log().flip(0)[:, None] / 2).expand(R, K, C).contiguous().to(dtype).to(device),
        "out": made[2],
        "table": table.contiguous().to(device),
        "out_null": made[3],
        "guidance": (1 + 2 * torch.rand(R)).to(device),
        "temperature": 0.9,
    }


def tensors(some: object) -> list[Tensor]:
    """All tensors in nested arguments."""
    return [leaf for leaf in tree_leaves(some) if isinstance(leaf, Tensor)]


def size_of(*some: object) -> int:
    """Bytes of all tensors in nested arguments."""
    return sum(t.nbytes for t in tensors(some))


def _attended(a: Arguments, out: Result) -> int:
    """Bytes of the rows' part of the cache, read once, of the queries and of the results."""
    slots = int(a["lengths"].sum()) + a["q"].shape[0] * a["q"].shape[2]
    each = sum(a[name].shape[1] * a[name].shape[3] * a[name].element_size() for name in ("keys", "values"))
    return slots * each + size_of(a["q"], out, a["bits"])


def _entries(a: Arguments, out: Result) -> int:
    """Bytes of the accepted entries, read and written."""
    return 2 * a["source"].numel() * sum(t.shape[1] * t.shape[3] * t.element_size() for t in a["buffers"])


def _last_again(a: Arguments, out: Result) -> int:
    """Bytes of the logits, plus those of each row's last node a second time."""
    return size_of(a, out) + size_of(a["logits"][:, 0])


def _gathered(a: Arguments, out: Result) -> int:
    """Bytes of the rows of logits and neighbours that are looked up."""
    lines, k = a["x"].numel(), a["near"].shape[1]
    return lines * (k + 1) * (4 + a["logits"].element_size()) + size_of(a["nodes"], a["x"], a["q_x"], out)


def _lines(a: Arguments, out: Result) -> int:
    """Bytes of the logits of every tested node."""
    return a["x"].numel() * a["logits"].shape[-1] * a["logits"].element_size() + size_of(out)


CASES: dict[str, Case] = {
    "uniform": Case(_noise, size_of, {"B": 3, "N": 37}, {"B": 16, "N": 64}),
    "tree_attention": Case(
        smoke.attention, _attended, {"B": 2, "N": 7, "T": 75, "heads": 6, "kv_heads": 2, "D": 24},
        {"B": 1, "N": 60, "T": 4156, "heads": 28, "kv_heads": 4, "D": 128},
    ),
    "compact_rows": Case(
        _rows, _entries, {"B": 2, "K": 5, "T": 33, "heads": 3, "D": 12, "layers": 2},
        {"B": 4, "K": 6, "T": 4156, "heads": 4, "D": 128, "layers": 28}, in_place="buffers",
    ),
    "draw": Case(_draw, size_of, {"B": 2, "N": 3, "V": 301}, {"B": 1, "N": 60, "V": 152064}),
    "verify_point_mass": Case(_verify, _last_again, {"B": 2, "N": 9, "V": 301}, {"B": 1, "N": 60, "V": 152064}),
    "residual_sample": Case(_residual, size_of, {"B": 5, "V": 301}, {"B": 16, "V": 152064}),
    "lantern_accept": Case(
        _lantern, _gathered, {"B": 2, "N": 3, "K": 4, "V": 301, "k": 100},
        {"B": 4, "N": 32, "K": 32, "V": 16384, "k": 1000},
    ),
    "logit_window": Case(
        _window, _lines, {"B": 2, "N": 2, "K": 2, "V": 255, "size": 9},
        {"B": 4, "N": 32, "K": 32, "V": 16384, "size": 50}, as_sets=True,
    ),
    "gaussian_path": Case(_gaussian, size_of, {"R": 3, "K": 11, "C": 5}, {"R": 64, "K": 100, "C": 16}),
}  # fmt: skip


def bound(name: str, function: Callable[..., Result], arguments: Arguments) -> Callable[[], Result]:
    """A call with these arguments; it modifies copies of its own in place and returns them."""
    changed = CASES[name].in_place
    if changed is None:
        return partial(function, **arguments)
    own = arguments | {changed: [t.clone() for t in arguments[changed]]}

    def call() -> Result:
        function(**own)
        changed_now: Result = own[changed]
        return changed_now

    return call


def apply(name: str, function: Callable[..., Result], arguments: Arguments) -> Result:
    """The function's result; for an in-place function, the modified copies."""
    return bound(name, function, arguments)()


def distance(name: str, dtype: torch.dtype, result: Result, wanted: Result) -> str | None:
    """How a result differs from the reference, or None if every entry is within the tolerance."""
    if CASES[name].as_sets:
        result, wanted = (torch.where(counts, ids, -1).sort(-1).values for ids, counts in (result, wanted))
    relative, absolute = TOLERANCES[name][dtype]
    for place, (a, b) in enumerate(zip(tensors(result), tensors(wanted), strict=True)):
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"result {place} is {a.dtype} {list(a.shape)}, wanted {b.dtype} {list(b.shape)}"
        near = smoke.near(a, b, relative, absolute)
        if not bool(near.all()):
            worst = (a.double() - b.double()).abs().nan_to_num(nan=torch.inf).max().item()
            return f"result {place}: {int((~near).sum())} of {near.numel()} entries are off, the worst by {worst:.2g}"
    return None
