"""Every kernel beside its definition: Triton's interpreter proves the arithmetic on a CPU, the same tests a real GPU.

How near each must come, and why, stands in `benchmarks/suites/kernel_cases.py`: what is further off is not timed.
The interpreter's `tl.dot` of bfloat16 is wrong, so the kernel multiplies in float32 there: the same products. Nor does
it know what a GPU can hold or forbids, so `full` compiles all kernels for one.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

import mmspec
from benchmarks.suites import kernel_cases as cases
from benchmarks.suites import kernels as bench_kernels
from mmspec import accept, rules
from mmspec.app.bench import report
from mmspec.app.bench.command import Outcome
from mmspec.kernels import dispatch, reference_noise, reference_rules, reference_trees, smoke
from mmspec.kernels import reference as ops
from mmspec.pipelines.host import tree_attention
from mmspec.pipelines.host.names import CACHE
from mmspec.rules import Masses, Trial
from mmspec.tree import chain, from_parents
from mmspec.types import Categorical, Draft

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
pytest.importorskip("triton")
checks = pytest.importorskip("mmspec.kernels.checks")
attention: Any = pytest.importorskip("mmspec.kernels.attention")
RUNS = torch.cuda.is_available() or checks.INTERPRETED
WHY_NOT = "Triton was imported before tests/conftest.py could ask for its interpreter: set TRITON_INTERPRET=1"
needs_triton = pytest.mark.skipif(not RUNS, reason=WHY_NOT)
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of lanes that are masked out


def triton(name: str) -> Any:
    """A kernel; whoever asks for it is skipped where none can run."""
    if not RUNS:
        pytest.skip(WHY_NOT)
    return dispatch.chosen(name, "cuda", "triton")


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that nobody has written holds NaN, or a number that cannot be an answer."""
    empty = torch.empty

    def poisoned(*shape: Any, **how: Any) -> Tensor:
        out = empty(*shape, **how)
        if out.is_floating_point():
            return out if out.requires_grad else out.fill_(torch.nan)
        return out.fill_(True) if out.dtype == torch.bool else out.fill_(torch.iinfo(out.dtype).min)

    monkeypatch.setattr(torch, "empty", poisoned)


@pytest.fixture
def many_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small blocks and a wide device, so that every loop has several turns and every row several parts."""
    monkeypatch.setattr(checks, "processors", lambda tensor: 24)
    for module in ("verify", "residual", "relaxed"):
        monkeypatch.setattr(f"mmspec.kernels.{module}._BLOCK", 64)


def agree(name: str, dtype: torch.dtype, arguments: dict[str, Any], **more: Any) -> Any:
    """Run the kernel and its definition; the result, once they agree."""
    wanted = cases.apply(name, getattr(ops, name), arguments)
    result = cases.apply(name, functools.partial(triton(name), **more), arguments)
    wrong = cases.distance(name, dtype, result, wanted)
    assert wrong is None, f"{name}: {wrong}"
    return result


def made(name: str, dtype: torch.dtype = F32, **sizes: int) -> dict[str, Any]:
    case = cases.CASES[name]
    return case.make(case.toy | sizes, DEVICE, dtype)


COMBINATIONS = [(name, dtype) for name, by in cases.TOLERANCES.items() for dtype in by]
FULL = pytest.mark.full


def _id(value: Any) -> str | None:
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else None


@pytest.mark.parametrize(
    ("name", "dtype"), [pytest.param(*c, marks=FULL if c[1] == F16 else ()) for c in COMBINATIONS], ids=_id
)
@pytest.mark.every(2)
def test_kernel_equals_its_definition(name: str, dtype: torch.dtype, many_parts: None):
    agree(name, dtype, made(name, dtype))


ODD = [
    ("uniform", {"B": 1, "N": 1}),
    ("uniform", {"B": 1, "N": 257}),
    ("tree_attention", {"B": 1, "N": 1, "T": 1, "heads": 1, "kv_heads": 1, "D": 1}),
    ("tree_attention", {"N": 33, "T": 34, "heads": 3, "kv_heads": 1, "D": 17}),
    ("compact_rows", {"B": 1, "K": 1, "D": 1, "heads": 1}),
    ("compact_rows", {"K": 7, "T": 40, "D": 130}),
    ("draw", {"B": 1, "N": 1, "V": 1}),
    ("verify_point_mass", {"B": 1, "N": 1, "V": 2}),
    ("verify_point_mass", {"B": 3, "N": 17, "V": 65}),
    ("residual_sample", {"B": 1, "V": 1}),
    ("residual_sample", {"B": 2, "V": 129}),
    ("lantern_accept", {"B": 1, "N": 1, "K": 1, "V": 7, "k": 1}),
    ("logit_window", {"V": 5, "size": 1}),
    ("logit_window", {"V": 5, "size": 2}),
    ("logit_window", {"V": 5, "size": 12, "K": 5}),
    ("gaussian_path", {"R": 1, "K": 1, "C": 1}),
    ("gaussian_path", {"R": 2, "K": 3, "C": 17}),
]

LARGE = [
    ("tree_attention", {"N": 130, "T": 300, "D": 64}),  # three words of bits
    ("tree_attention", {"T": 700, "D": 160}),
    ("compact_rows", {"K": 31, "T": 200, "D": 256}),
    ("verify_point_mass", {"N": 70, "V": 4999}),
    ("draw", {"V": 9001}),
    ("residual_sample", {"V": 9001}),
    ("lantern_accept", {"V": 2000, "k": 1000}),
    ("logit_window", {"V": 9001, "size": 50}),
    ("gaussian_path", {"R": 2, "K": 100, "C": 16}),
]


@pytest.mark.parametrize(("name", "sizes"), [*ODD, *(pytest.param(*case, marks=FULL) for case in LARGE)])
@pytest.mark.every(2)
def test_odd_and_large_sizes(name: str, sizes: dict[str, int]):
    agree(name, torch.int64 if name == "uniform" else F32, made(name, **sizes))


def test_noise_is_that_of_the_definition_bit_for_bit():
    seed = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63)], device=DEVICE)
    counter = torch.tensor([[0], [-1], [2**40], [2**63 - 1]], device=DEVICE)
    assert torch.equal(triton("uniform")(seed, counter), ops.uniform(seed, counter))


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("view", ["plain", "padded", "window", "strided", "nothing"])
@pytest.mark.every(2)
def test_attention_sees_what_it_should(splits: int, view: str):
    given = made("tree_attention", T=140 if splits > 1 else 75)
    B, n = given["bits"].shape[:2]
    if view == "padded":
        given["open_slots"] = torch.rand(B, 40, device=DEVICE) > 0.4
        given["keys"].transpose(1, 2)[:, :40][~given["open_slots"]] = torch.nan
    if view == "window":
        given["first"] = given["lengths"][:, None] - torch.randint(0, 50, (B, n), device=DEVICE)
    if view == "strided":
        q = torch.randn(B, n, 6, 30, device=DEVICE)[..., :24]
        given["q"] = q.transpose(1, 2)
        for name in ("keys", "values"):
            wide = torch.full((B + 1, 2, given[name].shape[2] + 9, 31), torch.nan, device=DEVICE)
            wide[1:, :, :-9, :24] = given[name]
            given[name] = wide[1:, :, :-9, :24]
    if view == "nothing":  # not even itself
        given["lengths"] = torch.tensor([0, 60], device=DEVICE)
        given["bits"] = torch.zeros_like(given["bits"])
        given["open_slots"] = torch.zeros(B, 60, dtype=torch.bool, device=DEVICE)
    out = agree("tree_attention", F32, given, splits=splits)
    assert bool(out.isfinite().all()) and bool(out.any()) == (view != "nothing")


@needs_triton
@pytest.mark.parametrize("view", ["plain", "padded", "window", "long", "uneven widths"])
@pytest.mark.parametrize("dtype", [F32, torch.bfloat16])
@pytest.mark.every(2)
def test_attention_by_addresses_appends_and_is_that_of_the_definition(view: str, dtype: torch.dtype):
    given = made("tree_attention", dtype, **({"T": 700} if view == "long" else {}))
    q, lengths, bits = given["q"], given["lengths"], given["bits"]
    (B, _, n, _), offset = q.shape, 2
    wide = 9 if view == "uneven widths" else q.shape[3]
    keys, values = (torch.zeros(*given[name].shape[:2], 800, given[name].shape[3], dtype=dtype, device=DEVICE)
        for name in ("keys", "values"))  # fmt: skip
    for whole, name in ((keys, "keys"), (values, "values")):
        whole[:, :, : given[name].shape[2]] = given[name]
    values = values[..., :wide].contiguous()
    new = [torch.randn(*t.shape[:2], n, t.shape[3], dtype=dtype, device=DEVICE) for t in (keys, values)]
    after = [keys.clone(), values.clone()]
    for whole, fresh in zip(after, new, strict=True):
        for b, length in enumerate(lengths.tolist()):
            whole[b, :, length + offset : length + offset + n] = fresh[b]
    seen = torch.ones(B, 30 if view == "padded" else 0, dtype=torch.bool, device=DEVICE)
    seen[:, :4] = False
    first = lengths[:, None] - torch.arange(n, device=DEVICE) - 5 if view == "window" else None
    first = first if first is None else first.expand(B, n).contiguous()
    strides = [*keys.stride()[:2], *values.stride()[:2]]
    table = [keys.data_ptr(), values.data_ptr(), *strides, seen.data_ptr(), seen.stride(0), seen.shape[1], 0]
    found = attention.addressed_attention(
        q, *new, torch.tensor(table, device=DEVICE), lengths, bits, first, 0.3, offset, aligned=view == "plain"
    )
    wanted = ops.tree_attention(q, *after, lengths, bits, seen if view == "padded" else None, first, 0.3)
    near = smoke.near(found, wanted, *smoke.TOLERANCES[dtype])
    assert bool(near.all()) and bool(found.any())
    assert torch.equal(keys.nan_to_num(), after[0].nan_to_num())
    assert torch.equal(values.nan_to_num(), after[1].nan_to_num())


def test_rows_of_any_shape_move_in_one_launch():
    given = made("compact_rows", T=64)
    given["buffers"] += [torch.randn(2, 1, 64, 3, device=DEVICE)]
    given["buffers"] += [torch.randn(2, 5, 80, 40, device=DEVICE)[:, ::2, :64, :33]]
    agree("compact_rows", F32, given)


def verifiable(shape: str) -> dict[str, Any]:
    given = made("verify_point_mass", B=6, V=130)  # rows enough for some that keep a second child
    B, N = given["tokens"].shape
    if shape == "chain":
        given |= {"parents": chain(N, DEVICE).expand(B).parents, "ancestors": None}
    return given


@pytest.mark.parametrize("shape", ["tree", "chain"])
def test_verification_equals_its_definition(shape: str, many_parts: None):
    agree("verify_point_mass", F32, verifiable(shape))


BROKEN = {"nan": torch.nan, "inf": torch.inf, "nothing possible": -torch.inf}


@pytest.mark.parametrize("run", [triton, lambda name: getattr(ops, name)], ids=["kernel", "definition"])
@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.every(12)
def test_nothing_is_drawn_from_what_is_no_law(broken: str, run: Any, many_parts: None):
    """By whatever draws; the other rows draw as before."""
    sound = torch.randn(4, 2, 300, device=DEVICE)
    logits = sound.clone()
    logits[1, :, slice(None) if broken == "nothing possible" else 170] = BROKEN[broken]
    seed, position = torch.arange(4, device=DEVICE), torch.arange(8, device=DEVICE).view(4, 2)
    u = torch.rand(4, 2, dtype=torch.float64, device=DEVICE)
    tokens, parents = torch.full((4, 2), 5, device=DEVICE), chain(2, DEVICE).expand(4).parents
    tokens[1, 1] = 170
    refused = torch.tensor([[3], [170], [5], [-1]], device=DEVICE)
    residual, coins = run("residual_sample"), u[:, 0].contiguous()
    first, drafted = (lambda x: x[:, 0].contiguous()), sound[:, 1].contiguous()
    ways = {
        "gumbel": lambda x: run("draw")(x, (seed, position)),
        "inverse": lambda x: run("verify_point_mass")(x, tokens, parents, None, u).token,
        "p": lambda x: residual(first(x), coins),
        "p - q": lambda x: residual(first(x), coins, q=drafted),
        "refused": lambda x: residual(first(x), coins, refused=refused),
    }
    others = torch.tensor([0, 2, 3], device=DEVICE)
    for way, draw in ways.items():
        got, whole = draw(logits), draw(sound)
        assert (got[1] == ops.NOTHING).all() and (whole >= 0).all() and torch.equal(got[others], whole[others]), way
    assert (residual(first(sound), coins, q=logits[:, 1].contiguous()) >= 0).all(), "a broken draft breaks nothing"


@pytest.mark.parametrize("shape", ["tree", "chain"])
@pytest.mark.parametrize("noise", ["likeliest", "gumbel", "inverse"])
def test_verification_is_the_walk(noise: str, shape: str):
    """`accept.verify_tree`, one child after the other, is what the fast path must agree with, number for number."""
    kept = 0
    for _ in range(10):
        given = verifiable(shape)
        B, N = given["tokens"].shape
        tree = chain(N, DEVICE).expand(B) if shape == "chain" else from_parents(given["parents"], N)
        distribution = Categorical(given["logits"])
        if noise != "inverse":
            seed, position = torch.randint(2**62, (B,), device=DEVICE), torch.randint(0, 99, (B, N), device=DEVICE)
            likeliest = noise == "likeliest"
            drawn = ops.likeliest(given["logits"]) if likeliest else ops.draw(given["logits"], (seed, position))
            given["tokens"] = torch.where(given["tokens"] < 0, -1, drawn.gather(1, given["parents"]))  # equal siblings
            distribution = Categorical(ids=drawn)
        draft = Draft(given["tokens"], tree)
        wanted = accept.verify_tree(draft, distribution, rules.exact, given["u"])
        found = accept.verify_point_mass(draft, distribution, given["u"])
        for name in ("accepted", "count", "last", "next_token"):
            assert torch.equal(getattr(found, name), getattr(wanted, name)), name
        kept += int(found.count.sum()) - B
    assert kept > 0, "nothing was ever kept, so nothing was tested"


def test_of_equal_logits_the_first_is_the_likeliest():
    logits = torch.zeros(1, 2, 300, device=DEVICE)
    logits[0, 0, [70, 200, 299]], logits[0, 1] = 1.0, -torch.inf
    assert ops.likeliest(logits).tolist() == [[70, 0]]


@pytest.mark.parametrize("left", ["all of p", "refused", "all refused", "some rows", "equal distributions"])
@pytest.mark.every(3)
def test_residual_equals_its_definition(left: str, many_parts: None):
    given = made("residual_sample", B=4, V=200)
    if left in ("all of p", "refused", "all refused"):
        given.pop("q")
    if left == "refused":
        given["refused"] = torch.cat([given["p"].topk(3).indices, torch.full((4, 2), -1, device=DEVICE)], 1)
    if left == "all refused":
        given["p"][:, 2:] = -torch.inf
        given["refused"] = torch.tensor([[1, 0, 1]] * 4, device=DEVICE)
    if left == "some rows":
        given["rows"] = torch.tensor([True, False, True, False], device=DEVICE)
    if left == "equal distributions":
        given["q"] = given["p"].clone()
    agree("residual_sample", F32, given)


def test_residual_at_the_ends_of_u(many_parts: None):
    given = made("residual_sample", B=2, V=200)
    given["p"][:, :5] = given["p"][:, -5:] = -torch.inf
    given["u"] = torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64, device=DEVICE)
    token = agree("residual_sample", F32, given)
    left = given["p"].double().softmax(-1) > given["q"].double().softmax(-1)
    assert token.tolist() == [int(left[0].nonzero()[0]), int(left[1].nonzero()[-1])]


@pytest.mark.parametrize("bound", [{"delta": 1e-9}, {"delta": 1.0}, {"delta": None, "lam": 1.5}])
def test_borrowed_mass_stays_within_its_bound(bound: dict[str, Any]):
    given = made("lantern_accept") | bound
    given["logits"][0, :, :50] = -torch.inf
    given["log_z"] = given["logits"].logsumexp(-1)
    agree("lantern_accept", F32, given)


@pytest.mark.parametrize("bound", [{"delta": 0.2}, {"lam": 3.0}])
def test_lantern_accept_is_the_rule(bound: dict[str, float]):
    codebook = torch.randn(60, 4, device=DEVICE)
    given = made("lantern_accept", V=60, k=9) | {"near": ops.nearest(codebook, 9), "delta": None} | bound
    given["x"] = given["x"].clamp(min=0)
    at = given["nodes"][..., None].expand(-1, -1, 60)
    p, q = (logits.double().softmax(-1).gather(1, at) for logits in (given["logits"], given["logits"].flip(-1)))
    trial = Trial(given["x"], torch.ones_like(given["x"]), Masses.of(p), Masses.of(q))
    given["q_x"] = trial.q_x
    _, wanted = accept.chances(rules.lantern(codebook, k=9, **bound), trial)
    torch.testing.assert_close(ops.lantern_accept(**given), wanted, rtol=1e-5, atol=1e-7)


def test_a_window_in_bfloat16(many_parts: None):
    agree("logit_window", F32, made("logit_window", BF16))


def test_a_window_among_equal_logits_keeps_the_nearest_ids(many_parts: None):
    logits = torch.zeros(1, 1, 200, device=DEVICE)
    logits[..., 150:], logits[..., :20] = 1.0, -torch.inf
    x = torch.tensor([[100, 149, 20, 5]], device=DEVICE)
    ids, found = triton("logit_window")(logits, torch.zeros_like(x), x, 5)
    kept = [sorted(i[f].tolist()) for i, f in zip(ids[0], found[0], strict=True)]
    assert kept == [[98, 99, 100, 101, 102], [147, 148, 149, 150, 151], [20, 21, 22], []]


def denoising(R: int, K: int = 4, C: int = 2) -> dict[str, Any]:
    """Paths that the draft took with its own means; its network's output stands in `draft`."""
    given = made("gaussian_path", R=R, K=K, C=C)
    draft = given["out"] + 0.1 * torch.randn(R, K, 2 * C, device=DEVICE)
    states = [given["states"][:, 0].double()]
    for k in range(K):
        root, rest, to_clean, to_x, log_beta, log_tilde = given["table"][k].double()
        mean = to_clean * (states[-1] - rest * draft[:, k, :C]) / root + to_x * states[-1]
        share = (draft[:, k, C:].double() + 1) / 2
        log_std = (share * log_beta + (1 - share) * log_tilde) / 2
        given["log_std_q"][:, k] = log_std
        states.append(mean + given["temperature"] * log_std.exp() * given["noise"][:, k])
    given["states"] = torch.stack(states, 1).float()
    return given | {"out_null": None, "guidance": None, "draft": draft}


def test_a_path_is_as_likely_under_its_own_kernel():
    given = denoising(50)
    given["out"] = given.pop("draft")
    assert ops.gaussian_path(**given).abs().max() < 4e-4


def test_path_ratios_have_the_mean_one():
    given = denoising(40_000)
    given.pop("draft")
    ratio = ops.gaussian_path(**given).double().exp()
    assert abs(ratio.mean().item() - 1) < 4 * (ratio.std() / 200).item() < 0.2


@pytest.mark.parametrize("guided", [False, True])
def test_path_ratio_equals_its_definition_with_and_without_guidance(guided: bool):
    given = made("gaussian_path", K=19, C=3)
    if not guided:
        given |= {"out_null": None, "guidance": None}
    wide = torch.full((3, 19, 11), torch.nan, device=DEVICE)
    wide[..., 2:8] = given["out"]
    agree("gaussian_path", F32, given | {"out": wide[..., 2:8]})


FAR = 2**31  # elements; what is never touched takes no memory on a CPU


def spread_out(t: Tensor) -> Tensor:
    """The same numbers with 2³¹ elements between the entries of the first dimension that has several."""
    axis = next(i for i, n in enumerate(t.shape) if n > 1)
    assert t.shape[axis] == 2
    stride = list(t.contiguous().stride())
    stride[axis] = FAR
    held = torch.zeros(0, dtype=t.dtype, device=t.device).resize_(FAR + t.numel())  # not poisoned: never written
    return held.as_strided(t.shape, stride).copy_(t)


@FULL
@pytest.mark.parametrize(
    ("name", "argument", "sizes"),
    [
        ("tree_attention", "keys", {"B": 2}),
        ("tree_attention", "values", {"B": 1, "kv_heads": 2}),
        ("tree_attention", "q", {"B": 1, "heads": 2, "kv_heads": 1}),
        ("draw", "logits", {"B": 2}),
        ("verify_point_mass", "logits", {"B": 1, "N": 2}),
        ("residual_sample", "q", {"B": 2}),
        ("lantern_accept", "logits", {"B": 1, "N": 2}),
        ("logit_window", "logits", {"B": 1, "N": 2}),
        ("gaussian_path", "out", {"R": 2}),
        ("compact_rows", "buffers", {"B": 2, "layers": 1}),
    ],
)
def test_addresses_beyond_32_bits(name: str, argument: str, sizes: dict[str, int], monkeypatch: pytest.MonkeyPatch):
    dtype = F32 if name == "logit_window" else BF16  # equal numbers have no order to agree on
    given = made(name, dtype, **sizes)
    wanted = cases.apply(name, getattr(ops, name), given)
    held = given[argument]
    given[argument] = [spread_out(held[0]), *held[1:]] if isinstance(held, list) else spread_out(held)
    if cases.CASES[name].in_place:
        triton(name)(**given)
        result = [t.contiguous() for t in given[argument]]
    else:
        result = triton(name)(**given)
    assert cases.distance(name, dtype, result, wanted) is None


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("tree_attention", {"keys": torch.zeros(2, 4, 75, 24)}, "6 query heads cannot share 4 kv heads|values is"),
        ("tree_attention", {"lengths": torch.zeros(2)}, "lengths is torch.float32; allowed: int64"),
        ("tree_attention", {"bits": torch.zeros(2, 6, 1, dtype=torch.long)}, r"bits is \[2, 6, 1\].*n = 7 as in q"),
        ("verify_point_mass", {"logits": torch.zeros(2, 301, 9).mT}, "last dimension of logits has stride 9"),
        ("verify_point_mass", {"tokens": torch.zeros(2, 9, dtype=torch.int32)}, "tokens is torch.int32"),
        ("residual_sample", {"refused": torch.zeros(5, 2, dtype=torch.long)}, "q, or the tokens .* not both"),
        ("residual_sample", {"u": torch.zeros(5)}, "u is torch.float32; allowed: float64"),
        ("lantern_accept", {"lam": 2.0}, "exactly one of them; got delta=0.1, lam=2.0"),
        ("gaussian_path", {"temperature": 0.0}, "temperature must be above 0"),
        ("gaussian_path", {"guidance": None}, "both or neither"),
        ("compact_rows", {"start": torch.zeros(3, dtype=torch.long)}, r"start is \[3\], expected \[B\]"),
        ("compact_rows", {"buffers": [torch.zeros(2, 1, 33, 4), torch.zeros(2, 1, 33, 4, dtype=F16)]}, "float16"),
        ("uniform", {"seed": torch.zeros(2)}, "seed is torch.float32"),
    ],
)
def test_arguments_that_do_not_fit_are_named(name: str, change: dict[str, Any], message: str):
    moved = tree_map_only(Tensor, lambda t: t.to(DEVICE), change)
    with pytest.raises((TypeError, ValueError), match=message):
        triton(name)(**(made(name) | moved))


def test_a_name_of_the_definitions_means_one_thing():
    for file in (reference_noise, reference_rules, reference_trees):
        names = [name for name in vars(file) if not name.startswith("_")]
        assert names and all(getattr(ops, name) is getattr(file, name) for name in names)


def test_dispatch_takes_triton_on_cuda_and_the_definition_elsewhere():
    for name in dispatch.KERNELS:
        assert dispatch.chosen(name, "cpu", "") is dispatch.chosen(name, "cuda", "reference") is getattr(ops, name)
        assert dispatch.chosen(name, "cuda", "").__module__ == f"mmspec.kernels.{dispatch.KERNELS[name]}"
        assert callable(getattr(dispatch, name))


def test_the_environment_forces_one(monkeypatch: pytest.MonkeyPatch):
    given = made("uniform")
    wanted = ops.uniform(**given)
    for wish in ("", "reference", *(["triton"] if checks.INTERPRETED or DEVICE.type == "cuda" else [])):
        monkeypatch.setenv(dispatch.VARIABLE, wish)
        assert torch.equal(dispatch.uniform(given["seed"], counter=given["counter"]), wanted)
    monkeypatch.setenv(dispatch.VARIABLE, "cuda")
    with pytest.raises(ValueError, match="MMSPEC_KERNELS='cuda' is not known; choose reference or triton"):
        dispatch.uniform(given["seed"], given["counter"])


@needs_triton
def test_a_tree_too_large_for_the_kernel_is_the_definitions_unless_forced(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dispatch, "_on", lambda tensor: "cuda")
    monkeypatch.delenv(dispatch.VARIABLE, raising=False)
    for module in (dispatch, importlib.import_module("mmspec.kernels.verify")):
        assert module.TREE_NODES == 256
        monkeypatch.setattr(module, "TREE_NODES", 16)  # the interpreter is slow
    asked, chosen = [], dispatch.chosen
    monkeypatch.setattr(dispatch, "chosen", lambda *how: asked.append(chosen(*how).__module__) or chosen(*how))
    for nodes in (16, 17):
        given = made("verify_point_mass", B=1, N=nodes, V=30)
        result = dispatch.verify_point_mass(*given.values())
        assert cases.distance("verify_point_mass", F32, result, ops.verify_point_mass(**given)) is None
    dispatch.verify_point_mass(*(given | {"ancestors": None}).values())  # a chain may be longer
    assert [name.removeprefix("mmspec.kernels.") for name in asked] == ["verify", "reference_trees", "verify"]
    monkeypatch.setenv(dispatch.VARIABLE, "triton")
    with pytest.raises(ValueError, match="at most 16 nodes by Triton, got 17; leave MMSPEC_KERNELS unset"):
        dispatch.verify_point_mass(*given.values())


@needs_triton
@pytest.mark.parametrize(
    "rule, operation",
    [("exact", "uniform"), ("lantern(k=10, lam=2.0)", "lantern_accept"), ("gsd(group=5)", "logit_window")],
)
@pytest.mark.every(4)
def test_pictures_are_the_same_by_kernels(rule: str, operation: str, monkeypatch: pytest.MonkeyPatch):
    """The same noise, in the same order: every token of a sampled picture, whatever rule keeps drafts."""
    pytest.importorskip("diffusers")
    from tiny_llamagen import pipeline

    pipe, made, asked, chosen = pipeline("class", grid=3).to(DEVICE), [], set(), dispatch.chosen
    monkeypatch.setattr(dispatch, "chosen", lambda name, *how: asked.add(name) or chosen(name, *how))
    for wish in ("reference", "triton"):
        monkeypatch.setenv(dispatch.VARIABLE, wish)
        with mmspec.enable(pipe, "jacobi", window=4, rule=rule, reproducible=False) as handle:
            made.append(pipe(class_labels=[3], generator=torch.Generator().manual_seed(1), output_type="latent").images)
        assert handle.stats.accepted > 0
    assert torch.equal(*made) and asked >= {"residual_sample", operation}


class Launches:
    """In the place of a kernel: notes with which constants it is launched, since each of them is compiled anew."""

    def __init__(self) -> None:
        self.constants: set[Any] = set()

    def __getitem__(self, grid: Any) -> Any:
        return lambda *given, **named: self.constants.add(tuple(sorted(named.items())))


def test_few_variants_of_a_kernel_are_compiled(monkeypatch: pytest.MonkeyPatch):
    """Whatever the batch, and however long the text: on a GPU of 132 processors, with parts as of 150,000 tokens."""
    monkeypatch.setattr(checks, "processors", lambda tensor: 132)
    names = {
        "verify": ["_scan", "_path", "_tokens"],
        "residual": ["_weigh", "_pick"],
        "attention": ["_attend", "_reduce"],
    }
    made_of = {}
    for module, kernels in {**names, "rows": ["_compact"]}.items():
        where = importlib.import_module(f"mmspec.kernels.{module}")
        if hasattr(where, "_BLOCK"):
            monkeypatch.setattr(where, "_BLOCK", 8)
        for kernel in kernels:
            made_of[kernel] = Launches()
            monkeypatch.setattr(where, kernel, made_of[kernel])
    zeros = functools.partial(torch.zeros, device=DEVICE)
    for batch in (1, 2, 3, 5, 8, 16, 48):
        logits = zeros(batch, 5, 301)
        tokens, u = zeros(batch, 5, dtype=torch.long), zeros(batch, 5, dtype=torch.float64)
        triton("draw")(logits, (tokens[:, 0].contiguous(), tokens))
        triton("verify_point_mass")(logits, tokens, tokens, None, u)
    for slots in (40, 1000, 4096, 5001, 30000):
        keys, length = zeros(1, 1, slots, 16), torch.tensor([slots - 5], device=DEVICE)
        triton("tree_attention")(keys[:, :, :5], keys, keys, length, zeros(1, 5, 1).long())
    for kept in range(1, 8):
        source = torch.arange(kept, device=DEVICE)[None]
        triton("compact_rows")([zeros(1, 1, 9, 16)], source, source[:, 0])
    found = {kernel: len(launched.constants) for kernel, launched in made_of.items()}
    assert found == {
        "_scan": 2, "_path": 2, "_tokens": 2, "_weigh": 1, "_pick": 1, "_attend": 2, "_reduce": 1, "_compact": 1,
    }  # fmt: skip


@pytest.mark.skipif(DEVICE.type == "cuda", reason="is about machines without one")
def test_triton_without_a_gpu_says_what_to_do(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(checks, "INTERPRETED", False)
    with pytest.raises(RuntimeError, match=r"cannot run on cpu; use MMSPEC_KERNELS=reference, or set TRITON_INTERPRET"):
        triton("uniform")(**made("uniform"))


@pytest.mark.parametrize("window", [None, 4])
def test_transformers_models_verify_trees_by_it(window: int | None, monkeypatch: pytest.MonkeyPatch):
    """A stock model, its own forward: prefill by sdpa, a ragged tree by the kernel, with the logits that sdpa gives."""
    from transformers import DynamicCache, MistralConfig, MistralForCausalLM

    config = MistralConfig(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, sliding_window=window,
    )  # fmt: skip
    model = MistralForCausalLM(config).eval().to(DEVICE)
    ids, padding = torch.randint(0, 50, (2, 9), device=DEVICE), torch.ones(2, 9, dtype=torch.long, device=DEVICE)
    padding[1, :3] = 0
    above = from_parents(torch.tensor([[0, 0, 0, 1, 2], [0, 0, 1, 2, 0]], device=DEVICE), 4)
    lengths, positions = torch.tensor([9, 9], device=DEVICE), padding.cumsum(1).sub(1).clamp(min=0)
    seen = torch.cat([padding.bool()[:, None].expand(-1, 5, -1), above.ancestors], 2)
    if window is not None:
        place = torch.cat([torch.arange(-9, 0, device=DEVICE).expand(2, -1), above.depth], 1)
        seen = seen & (above.depth[:, :, None] - place[:, None, :] < window)
    calls = []
    kernel = tree_attention.dispatch.tree_attention
    monkeypatch.setattr(tree_attention.dispatch, "tree_attention", lambda *a: calls.append(1) or kernel(*a))
    logits = []
    for name in ("sdpa", tree_attention.NAME):
        model.set_attn_implementation(name)
        with torch.no_grad():
            cache = DynamicCache()
            model(ids, attention_mask=padding, position_ids=positions, **{CACHE: cache})
            assert not calls
            mask = tree_attention.marked(seen[:, None], lengths, padding.bool(), above.ancestors, above.depth, window)
            where = positions[:, -1:] + 1 + above.depth
            tokens = torch.arange(10, device=DEVICE).view(2, 5)
            logits.append(model(tokens, attention_mask=mask, position_ids=where, **{CACHE: cache}).logits)
    assert len(calls) == 2, "once a layer, and not for sdpa"
    torch.testing.assert_close(*logits, rtol=1e-5, atol=1e-5)


def bench(*words: str) -> list[dict[str, Any]]:
    """Records of `python -m benchmarks kernels` with these arguments."""
    parser, outcome = argparse.ArgumentParser(), Outcome()
    bench_kernels.configure(parser)
    for _ in bench_kernels.measure(parser.parse_args(["--repeats", "2", "--sizes", "toy", *words]), outcome):
        assert report.table(outcome.records) and outcome.provenance["copy_gb_s"]
    return outcome.records


@pytest.mark.parametrize("name", cases.CASES)
def test_the_bench_has_a_verdict_on_every_kernel(name: str):
    kernel, definition, *_ = bench("--only", name, "--dtype", "fp32")
    assert (kernel["kernel"], kernel["method"], definition["method"]) == (name, "triton", "definition")
    assert kernel["bytes"] > 0 and kernel["tolerance"] and definition["ms"] > 0 and definition["checks"] == "passed"
    if DEVICE.type == "cuda":
        assert kernel["checks"] == "passed" and kernel["ms"] > 0 and kernel["roofline"] > 0
    else:
        assert kernel["checks"] == ("passed in the interpreter" if checks.INTERPRETED else "not run")
        assert kernel["ms"] is kernel["roofline"] is None and kernel["note"].startswith("unmeasured: needs a GPU")
        assert "unmeasured" in report.table([kernel])


def test_the_bench_knows_what_attention_moved():
    record = bench("--only", "tree_attention", "--dtype", "fp32")[-1]
    assert record["method"] in ("sdpa", "flex") and record["ms"] > 0 and record["n"] >= 2
    assert record["bytes"] > 2 * 40 * 2 * 24 * 4  # the longest row's keys and values


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("way", [bench_kernels._sdpa, bench_kernels._flex])
def test_the_definition_of_tree_attention_is_that_of_torch(way: Any, monkeypatch: pytest.MonkeyPatch):
    if DEVICE.type == "cpu":
        monkeypatch.setattr(torch, "compile", lambda function, **how: function)
    given = made("tree_attention", D=32)
    assert cases.distance("tree_attention", F32, way(given)(), ops.tree_attention(**given)) is None


def test_the_bench_times_on_copies_what_works_in_place(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch, "compile", lambda function, **how: function)  # checked after the definition was timed
    assert [r["checks"] for r in bench("--only", "compact_rows", "--compile")][1:] == ["passed", "passed"]


def test_the_bench_refuses_to_time_what_is_wrong(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bench_kernels, "_sdpa", lambda given: lambda: torch.zeros(2, dtype=torch.long))
    record = next(r for r in bench("--only", "tree_attention") if r["method"] == "sdpa")
    assert record["ms"] is None and record["n"] == 0 and record["checks"] == "refused"
    assert record["note"].startswith("refused: result 0 is torch.int64")


def failing(after: int) -> Any:
    """A call that goes wrong after so many times."""
    from triton.runtime.errors import OutOfResources

    calls, error = iter(range(after)), torch.OutOfMemoryError("no\nmore")

    def call(**given: Any) -> Any:
        if next(calls, None) is None:
            raise error if after else OutOfResources(300_000, 232_448, "shared memory")
        return ops.draw(**given)

    return call


@needs_triton
def test_a_kernel_that_cannot_be_launched_is_a_record_and_the_bench_goes_on(monkeypatch: pytest.MonkeyPatch):
    chosen = dispatch.chosen
    monkeypatch.setattr(dispatch, "chosen", lambda name, *how: failing(0) if name == "draw" else chosen(name, *how))
    records = {(r["kernel"], r["method"]): r for r in bench("--only", "draw", "uniform")}
    kernel, definition = records["draw", "triton"], records["draw", "definition"]
    assert kernel["ms"] is None and kernel["checks"] == "failed"
    assert kernel["note"].startswith("failed: OutOfResources: out of resource: shared memory")
    assert definition["ms"] > 0 and records["uniform", "triton"]["checks"].startswith("passed")


@pytest.mark.parametrize(("after", "checks"), [(1, "passed"), (0, "failed")])
def test_a_contender_that_fails_is_a_record(after: int, checks: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch, "compile", lambda function, **how: failing(after))
    compiled = bench("--only", "draw", "--compile")[-1]
    assert compiled["method"] == "compiled" and compiled["ms"] is None and compiled["checks"] == checks
    assert compiled["note"].startswith("failed: O") and "more" not in compiled["note"]


def test_a_definition_that_does_not_fit_is_a_record(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ops, "draw", failing(0))
    records = {(r["kernel"], r["method"]): r for r in bench("--only", "draw", "uniform")}
    kernel, definition = records["draw", "triton"], records["draw", "definition"]
    assert kernel["checks"] == "not run" and kernel["bytes"] is None and definition["checks"] == "failed"
    assert definition["note"].startswith("failed: OutOfResources") and ("uniform", "triton") in records


@FULL
@pytest.mark.parametrize("capability", [80, 90])
def test_all_kernels_compile_for_a_gpu(capability: int):
    """Down to machine code, which needs no GPU but a Triton that is not interpreted."""
    script = Path(__file__).parents[1] / "support" / "compile_kernels.py"
    done = subprocess.run([sys.executable, script, str(capability)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(dispatch.KERNELS) <= set(done.stdout.split())
