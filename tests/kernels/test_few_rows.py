"""Products of few rows against `F.linear` in float64, on every instruction set that this CPU has, and without any."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from mmspec.kernels import few_rows

SETS = {"native": "", "AVX2": "-mno-avx512f", "SSE": "-mno-avx512f -mno-avx2 -mno-avx"}
# Sums of K products of magnitude 1 in float32; bfloat16 has 8 bits.
NEAR = {torch.float32: 1e-6, torch.bfloat16: 2**-8}


@pytest.fixture(scope="module", params=SETS)
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The library as it is compiled for an instruction set."""
    if few_rows.built()[1]:
        pytest.skip(few_rows.built()[1])
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


@pytest.mark.parametrize("why", ["reference", "another CPU", "no compiler", "one that fails", "no place", "wrong sums"])
def test_without_it_there_is_none_and_it_says_why(why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_it_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if few_rows.built()[1]:
        pytest.skip(few_rows.built()[1])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    ran, run = [], subprocess.run
    monkeypatch.setattr(few_rows.subprocess, "run", lambda words, **how: (ran.append(words), run(words, **how))[1])
    for count in (3, 1):  # the version of the compiler, and two steps
        forget()
        ran.clear()
        assert few_rows.available(torch.float32) and len(ran) == count
    forget()
