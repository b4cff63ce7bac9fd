"""Products of a few rows with weights in the layout of `nn.Linear` on x86 CPUs: few_rows.cpp, compiled on first use.

torch's products take about twice as long for two rows as for one, and on some CPUs three times as long as the memory
bandwidth allows for one. Here the threads share a weight, which is read once and not copied. `F.linear` is the
definition; sums differ in their last digits. The result of a row does not depend on the other rows.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from mmspec.kernels.dispatch import VARIABLE

ROWS = 64  # upper limit; torch's products of more rows are as fast
ALONE = 1 << 16  # multiplications up to which a second thread costs more than it saves
SOURCE = Path(__file__).with_name("few_rows.cpp")
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fPIC", "-fopenmp")
_NEAR = {torch.float32: 1e-5, torch.bfloat16: 1e-2}  # allowed relative difference from torch's product
_PATIENCE = 120.0  # time limit of the compiler in seconds


class Products(NamedTuple):
    """The compiled functions of a dtype: one weight, and several."""

    one: Any
    several: Any

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        N, K = weight.shape
        x = x.contiguous()
        y, M = x.new_empty((*x.shape[:-1], N)), x.numel() // K
        b = None if bias is None else bias.data_ptr()
        self.one(x.data_ptr(), weight.data_ptr(), b, y.data_ptr(), N, M, K, M * K * N <= ALONE)
        return y

    def all_of(self, x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
        (M, K), widths, count = x.shape, [len(weight) for weight in weights], len(weights)
        y = [x.new_empty(M, n) for n in widths]
        pointers, numbers = ctypes.c_void_p * count, ctypes.c_int64 * count
        self.several(
            x.data_ptr(), pointers(*[w.data_ptr() for w in weights]), pointers(),
            pointers(*[one.data_ptr() for one in y]), numbers(*widths), count, M, K, M * K * sum(widths) <= ALONE,
        )  # fmt: skip
        return y


def available(dtype: torch.dtype) -> bool:
    """Whether there is a product of this dtype; the first call may compile for some seconds."""
    return dtype in _products()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` of x [..., K] with a contiguous weight [N, K] of the same dtype; without autograd."""
    return _products()[x.dtype].linear(x, weight, bias)


def products(x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """x [M, K] times the transpose of each contiguous weight [N, K]: [M, N] each."""
    return _products()[x.dtype].all_of(x.contiguous(), weights)


@lru_cache(maxsize=1)
def _products() -> dict[torch.dtype, Products]:
    """The compiled products by dtype, if they agree with torch's."""
    library, found = built()[0], dict[torch.dtype, Products]()
    if library is None:
        return found
    for dtype in _NEAR:
        name = str(dtype).removeprefix("torch.")
        both = Products(library[f"mmspec_few_rows_one_{name}"], library[f"mmspec_few_rows_{name}"])
        both.one.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_int64] * 3 + [ctypes.c_int]
        both.several.argtypes = [ctypes.c_void_p] * 5 + [ctypes.c_int64] * 3 + [ctypes.c_int]
        both.one.restype = both.several.restype = None
        if _right(both, dtype):
            found[dtype] = both
    return found


def _right(mine: Products, dtype: torch.dtype) -> bool:
    x, w, b = (torch.linspace(-1, 1, n * k).sin().reshape(n, k).to(dtype) for n, k in ((7, 77), (9, 77), (1, 9)))
    wanted = F.linear(x, w, b[0])
    off = [mine.linear(x, w, b[0]) - wanted, *(y - F.linear(x, w) for y in mine.all_of(x, [w, w]))]
    return all(bool(one.abs().max() <= _NEAR[dtype] * wanted.abs().max()) for one in off)


@lru_cache(maxsize=1)
def built() -> tuple[ctypes.CDLL | None, str]:
    """The compiled library, or None and the reason why there is none."""
    if os.environ.get(VARIABLE) == "reference":
        return None, f"{VARIABLE}=reference"
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return None, f"it is for x86 CPUs; this is {platform.machine()}"
    words = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    if shutil.which(words[0]) is None:
        return None, f"there is no compiler {words[0]!r}"
    try:
        file = _cache() / f"few_rows-{_fingerprint(words)}.so"
        if not file.is_file():
            _compile(words, file)
        return ctypes.CDLL(str(file)), ""
    except subprocess.CalledProcessError as error:
        return None, f"{words[0]} failed: {error.stderr.decode(errors='replace').strip().partition(chr(10))[0]}"
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, str(error)


def _cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(home) / "mmspec"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _fingerprint(compiler: list[str]) -> str:
    """A hash of the source, the compiler with its flags, and the CPU."""
    cpu = Path("/proc/cpuinfo")
    lines = cpu.read_text().splitlines() if cpu.is_file() else [platform.processor()]
    flags = next((line for line in lines if line.startswith("flags")), lines[0])
    version = subprocess.run([*compiler, "--version"], capture_output=True, check=True, timeout=_PATIENCE).stdout
    return hashlib.sha256(SOURCE.read_bytes() + version + repr((compiler, FLAGS, flags)).encode()).hexdigest()[:16]


def _compile(compiler: list[str], file: Path) -> None:
    """Compile without linking OpenMP: the threads are those of the library that torch has loaded."""
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        made = [str(Path(folder) / name) for name in ("few_rows.o", "few_rows.so")]
        for words in ([*FLAGS, "-c", str(SOURCE), "-o", made[0]], ["-shared", made[0], "-o", made[1]]):
            subprocess.run([*compiler, *words], capture_output=True, check=True, timeout=_PATIENCE)
        os.replace(made[1], file)  # atomic, since other processes may compile it, too
