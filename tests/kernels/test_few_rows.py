"""Products, attention and recurrent layers of few rows against their definitions in float64, on every instruction set
that this CPU has."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mmspec.kernels import dispatch, few_rows
from mmspec.kernels import reference_recurrent as recurrent
from mmspec.tree import from_parents

SETS = {"AVX2": "-mno-avx512f", "SSE": "-mno-avx512f -mno-avx2 -mno-avx"}
# Sums of K products of magnitude 1 in float32; bfloat16 has 8 bits.
NEAR = {torch.float32: 1e-6, torch.bfloat16: 2**-8}


@pytest.fixture(scope="module", params=["native", "AVX2", pytest.param("SSE", marks=pytest.mark.full)])
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The library as it is compiled for an instruction set."""
    if few_rows.built()[1]:
        pytest.skip(few_rows.built()[1])
    if request.param == "native":  # it is compiled already
        yield
        return
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patched.setattr(few_rows, "FLAGS", (*few_rows.FLAGS, *SETS[request.param].split()))
        forget()
        assert few_rows.built()[1] == ""
        yield
    forget()


def forget() -> None:
    few_rows.built.cache_clear()
    few_rows.operations.cache_clear()
    few_rows._dtypes.cache_clear()


def near(found: torch.Tensor, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None) -> bool:
    wanted = F.linear(x.double(), w.double(), None if b is None else b.double())
    off = (found.double() - wanted).abs() / (1 + wanted.abs())
    return found.dtype == x.dtype and float(off.max()) <= NEAR[x.dtype] * w.shape[1] ** 0.5


@pytest.mark.parametrize("dtype", NEAR)
def test_it_is_the_product(dtype: torch.dtype, compiled: None) -> None:
    for rows in (1, 2, 3, 5, 6, 7, 9, 13, 64):
        for n, k in ((1, 1), (3, 5), (7, 16), (9, 33), (64, 100), (130, 300)):
            x, w, b = (torch.randn(shape).to(dtype) for shape in ((2, rows, k), (n, k), (n,)))
            assert near(few_rows.linear(x, w), x, w) and near(few_rows.linear(x, w, b), x, w, b)
            assert few_rows.linear(x, w).shape == (2, rows, n)


@pytest.mark.parametrize("dtype", NEAR)
def test_a_row_does_not_depend_on_those_beside_it(dtype: torch.dtype, compiled: None) -> None:
    x, w = torch.randn(17, 200).to(dtype), torch.randn(70, 200).to(dtype)
    whole = few_rows.linear(x, w)
    for count in range(1, 17):
        assert torch.equal(few_rows.linear(x[:count], w), whole[:count])
    first, second = few_rows.products(x, [w[:31], w[2:]])
    assert torch.equal(first, whole[:, :31]) and torch.equal(second, whole[:, 2:])


def test_numbers_that_are_none_stay_so(compiled: None) -> None:
    for dtype in NEAR:
        x, w = torch.ones(2, 40, dtype=dtype), torch.ones(9, 40, dtype=dtype)
        x[1, 39], w[3, 2], w[4, 1] = float("nan"), float("inf"), torch.finfo(dtype).max
        torch.testing.assert_close(few_rows.linear(x, w), F.linear(x, w), equal_nan=True)


def attention(B: int, heads: int, groups: int, n: int, T: int, D: int, E: int) -> tuple[torch.Tensor, ...]:
    """q, k and v, which are views of a longer cache."""
    q = torch.randn(B, n, heads, D).transpose(1, 2)
    return q, torch.randn(B, groups, T + 9, D)[:, :, :T], torch.randn(B, groups, T + 5, E)[:, :, :T]


def masks(B: int, n: int, T: int) -> dict[str, torch.Tensor | None]:
    seen = torch.rand(B, 1, n, T) < 0.6
    seen[..., 0] = True
    added = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    return {"none": None, "bool": seen, "one for all rows": seen[:1], "added": added + torch.randn(B, 1, n, T)}


SHAPES = [(1, 1, 1, 1, 1, 16, 16), (2, 4, 2, 3, 5, 16, 32), (1, 6, 2, 9, 100, 32, 16), (3, 3, 3, 17, 64, 64, 80),
          (2, 9, 3, 1, 130, 64, 64), (1, 8, 1, 5, 77, 128, 128)]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-8)], ids=str)
@pytest.mark.parametrize("threads", [1, 3])
def test_it_is_the_attention(
    shape: tuple[int, ...], dtype: torch.dtype, near: float, threads: int, compiled: None
) -> None:
    (B, heads, groups, n, T, *_), before = shape, torch.get_num_threads()
    q, k, v = (t.to(dtype) for t in attention(*shape))  # type: ignore[arg-type]
    torch.set_num_threads(threads)
    try:
        for mask in masks(B, n, T).values():
            mask = mask if mask is None or mask.dtype == torch.bool else mask.to(dtype)
            assert few_rows.attends(q, k, v, mask)
            found = few_rows.attend(q, k, v, mask, 0.3)
            assert found.dtype == dtype
            wide = mask if mask is None or mask.dtype == torch.bool else mask.double()
            keys, values = (t.double().repeat_interleave(heads // groups, 1) for t in (k, v))
            wanted = F.scaled_dot_product_attention(q.double(), keys, values, wide, scale=0.3).transpose(1, 2)
            torch.testing.assert_close(found.double(), wanted, rtol=near, atol=1e-5)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("n", [1, 9])
def test_of_what_no_query_sees_nothing_is_read(n: int, compiled: None) -> None:
    q, k, v = attention(1, 2, 1, n, 40, 16, 16)
    seen = torch.ones(1, 1, n, 40, dtype=torch.bool)
    seen[..., 30:] = False
    wanted = few_rows.attend(q, k[:, :, :30], v[:, :, :30], None, 1.0)
    k[:, :, 30:], v[:, :, 30:] = 1e9, 1e9
    torch.testing.assert_close(few_rows.attend(q, k, v, seen, 1.0), wanted)
    assert bool((few_rows.attend(q, k, v, seen & False, 1.0) == 0).all())
    q[0, 0, 0, 3] = float("nan")
    assert bool(few_rows.attend(q, k, v, seen, 1.0)[0, 0, 0].isnan().all())


def nodes(B: int, H: int, n: int, K: int, V: int, turned: bool) -> tuple[torch.Tensor, ...]:
    """q, k, v, beta, g and the state, as a model's layer has them in memory: nodes before heads, turned for Mamba-2."""
    q, k, v = (torch.randn(B, n, H, size).transpose(1, 2) for size in (K, K, V))
    beta, g = (torch.rand(B, n, H).transpose(1, 2) for _ in range(2))
    state = torch.randn(B, H, V, K).transpose(-1, -2) if turned else torch.randn(B, H, K, V)
    return F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, beta, -g, state


def tree(B: int, n: int) -> torch.Tensor:
    parents = torch.stack([torch.cat([torch.zeros(1).long(), (torch.rand(n - 1) * torch.arange(1, n)).long()])] * B)
    parents[-1] = torch.arange(-1, n - 1).clamp(min=0)  # a chain
    return from_parents(parents, n).ancestors


@pytest.mark.parametrize(
    "shape", [(1, 2, 9, 64, 64), (2, 3, 5, 32, 16), (2, 1, 1, 16, 48), (1, 24, 9, 128, 64)], ids=str
)
@pytest.mark.parametrize("turned", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("threads", [1, 3])
def test_it_is_the_recurrent_layer(shape: tuple[int, ...], turned: bool, threads: int, compiled: None) -> None:
    (B, H, n, K, V), before = shape, torch.get_num_threads()
    q, k, v, beta, g, state = nodes(B, H, n, K, V, turned)
    ancestors = tree(B, n)
    torch.set_num_threads(threads)
    try:
        for rate in (beta, None):
            assert few_rows.scans(q, k, v, g, state)
            o, u, G = few_rows.scan(q, k, v, rate, g, state, ancestors)
            wide = [t if t is None else t.double() for t in (q, k, v, rate)]
            decay = recurrent.path_decay(g.double(), ancestors)
            wanted = recurrent.recurrent_tree(*wide, decay, state.double(), ancestors)  # type: ignore[arg-type]
            for found, right in zip((G, o.transpose(1, 2), u), (decay, *wanted), strict=True):
                torch.testing.assert_close(found.double(), right, rtol=1e-5, atol=1e-5)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("n", [1, 31, 70])
def test_it_reads_a_prompt(n: int, compiled: None) -> None:
    q, k, v, beta, g, state = nodes(2, 3, n, 32, 16, False)
    ancestors, first, every = torch.ones(2, n, n).tril().bool(), torch.zeros(2, 3, 32, 16), torch.ones(2, n).bool()
    for rate, before in ((beta, state), (None, state), (beta, None)):
        assert few_rows.chains(v, g)
        o, after = few_rows.chain(q, k, v, rate, g, before)
        wide, wanted = recurrent.path_decay(g.double(), ancestors), (first if before is None else before).double()
        given = [t if t is None else t.double() for t in (q, k, v, rate)]
        read, writes = recurrent.recurrent_tree(*given, wide, wanted, ancestors)  # type: ignore[arg-type]
        torch.testing.assert_close(o.transpose(1, 2).double(), read, rtol=1e-5, atol=1e-5)
        recurrent.recurrent_fold(wanted, k.double(), writes, wide, every, torch.tensor([n - 1] * 2))
        torch.testing.assert_close(after.double(), wanted, rtol=1e-5, atol=1e-5)
    assert not few_rows.chains(v[..., :9], g) and not few_rows.chains(v, g[..., None])
    with pytest.raises(RuntimeError):
        few_rows.chain(q, k, v, beta, g, state[:1])


def test_what_it_refuses_is_freed(compiled: None) -> None:
    """The tensors of a call, of which the compiled operations hold references of their own."""
    q, v, g, seen = torch.randn(1, 2, 3, 16), torch.randn(1, 2, 3, 16), torch.rand(1, 2, 3), torch.ones(1, 3, 3).bool()

    def used() -> int:
        return psutil.Process().memory_info().rss

    def refused(call: Callable[[Tensor], object]) -> None:
        with pytest.raises(RuntimeError):
            call(torch.ones(1, 2, 16, 16 * 1024))

    calls = (lambda s: few_rows.scan(q, q[:, :1], v, g, g, s, seen), lambda s: few_rows.chain(q, q[:, :1], v, g, g, s))
    for call in calls:
        refused(call)
    before = used()
    for _ in range(100):
        for call in calls:
            refused(call)
    assert used() - before < 100 * 2**20  # of 400 MiB


def test_a_user_without_a_home_directory_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv(dispatch.VARIABLE, raising=False)
    monkeypatch.setattr(few_rows.Path, "home", homeless)
    assert few_rows.built.__wrapped__() == (None, "Could not determine home directory.")


def test_it_commits_a_path(compiled: None) -> None:
    B, H, n, K, V = 2, 3, 6, 16, 20
    states, layers = [], []
    for _ in range(3):
        _, k, u, _, g, state = nodes(B, H, n, K, V, False)
        states.append(state)
        layers.append((k, u.contiguous(), g.cumsum(2)))
    path = torch.tensor([[True, False, True, False, True, False], [False] * n])
    last = torch.tensor([4, 0])
    wanted = [state.double() for state in states]
    for state, (k, u, G) in zip(wanted, layers, strict=True):
        recurrent.recurrent_fold(state, k.double(), u.double(), G.double(), path, last)
    assert few_rows.folds(states, *layers[0][::2])
    few_rows.fold(states, layers, path, last)
    for state, right in zip(states, wanted, strict=True):
        torch.testing.assert_close(state.double(), right, rtol=1e-5, atol=1e-5)
    with pytest.raises(RuntimeError):
        few_rows.fold(states, layers[:2] + layers[:1], path[:, :5], last)


def test_shapes_that_it_does_not_take(compiled: None) -> None:
    q, k, v = attention(2, 2, 1, 3, 10, 16, 16)
    half, odd, narrow = q.half(), q[..., :8], q.bfloat16()
    other = torch.ones(2, 2, 3, 10, dtype=torch.bool)
    refused = [(half, k, None), (narrow, k, None), (odd, k[..., :8], None), (q, k.mT.contiguous().mT, None)]
    for q_, k_, mask in (*refused, (q, k, other), (q, k, other[:, :1].bfloat16())):
        assert not few_rows.attends(q_, k_, v, mask)
    mixed = [(half, k, v, None), (narrow, k, v, None), (half, k.half(), v.half(), None)]
    for bad in (*mixed, (q, k[:1], v, None), (q, k, v[:, :, 1:], None), (q, k, v, other)):
        with pytest.raises(RuntimeError):
            few_rows.attend(*bad, 1.0)
    q, k, v, beta, g, state = nodes(1, 2, 3, 16, 16, False)
    for bad in ((q.half(), k, v, g, state), (q, k, v, g[..., None], state), (q, k, v, g, state[..., ::2]),
                (q, k, v.requires_grad_(), g, state)):  # fmt: skip
        assert not few_rows.scans(*bad)
    with pytest.raises(RuntimeError):
        few_rows.scan(q[..., :1], k[..., :1], v, beta, g, state[:, :, :1], tree(1, 3))
    for bad in ((q, k[:, :1], v, beta, g, state), (q, k, v, beta, g, state[..., :8]), (q, k, v, beta, g.half(), state)):
        with pytest.raises(RuntimeError):
            few_rows.scan(*bad, tree(1, 3))
    q, half = q[:, 0], q[:, 0].half()
    for x, w, b in ((q, torch.ones(3, 17), None), (q, torch.ones(3, 16).half(), None), (half, torch.ones(3, 16), None),
                    (q, torch.ones(16, 16), torch.ones(3))):  # fmt: skip
        with pytest.raises(RuntimeError):
            few_rows.linear(x, w, b)


@pytest.mark.parametrize("why", ["reference", "another CPU", "no compiler", "one that fails", "no place", "wrong sums"])
def test_without_it_there_is_none_and_it_says_why(why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if why != "wrong sums":  # for which what is compiled already will do
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if why == "reference":
        monkeypatch.setenv("MMSPEC_KERNELS", "reference")
    if why == "another CPU":
        monkeypatch.setattr(few_rows.platform, "machine", lambda: "arm64")
    if why == "no compiler":
        monkeypatch.setenv("CXX", "no-such-compiler")
    if why == "one that fails":
        monkeypatch.setattr(few_rows, "FLAGS", (*few_rows.FLAGS, "--no-such-flag"))
    if why == "no place":
        (tmp_path / "mmspec").write_text("")
    if why == "wrong sums":
        monkeypatch.setattr(few_rows, "_right", lambda *args: False)
    forget()
    try:
        assert not few_rows.available(torch.float32)
        assert bool(few_rows.built()[1]) == (why != "wrong sums")
        assert not list(tmp_path.glob("mmspec/tmp*"))
    finally:
        forget()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_first_call_in_any_mode_finds_it(dtype: torch.dtype) -> None:
    if few_rows.built()[1]:
        pytest.skip(few_rows.built()[1])
    few_rows._dtypes.cache_clear()
    try:
        torch.set_default_dtype(dtype)
        with torch.autocast("cpu"):
            assert few_rows.available(torch.float32) and few_rows.available(torch.bfloat16)
    finally:
        torch.set_default_dtype(torch.float32)
        few_rows._dtypes.cache_clear()


def test_it_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if few_rows.built()[1]:
        pytest.skip(few_rows.built()[1])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(few_rows, "FLAGS", (*few_rows.FLAGS, "-O0"))  # takes a third of the time
    ran, run = [], subprocess.run
    monkeypatch.setattr(few_rows.subprocess, "run", lambda words, **how: (ran.append(words), run(words, **how))[1])
    for count in (3, 1):  # the version of the compiler, and two steps
        forget()
        ran.clear()
        assert few_rows.available(torch.float32) and len(ran) == count
    forget()
