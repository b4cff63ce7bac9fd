"""Products, attention and recurrent layers of a few rows on x86 CPUs: the folder `cpu`, compiled on first use.

torch's products take much longer for two rows than for one, and on some CPUs three times as long as the memory
bandwidth allows for one. Here the threads share a weight in the layout of `nn.Linear`, which is read once and not
copied; attention reads each key once for several queries. `F.linear`, `F.scaled_dot_product_attention` and
`kernels/reference_recurrent.py` are the definitions; sums differ in their last digits. A row of a product does not
depend on the other rows.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mmspec.kernels.dispatch import VARIABLE
from mmspec.kernels.reference_recurrent import path_decay, recurrent_fold, recurrent_tree

ROWS = 96  # upper limit; torch's products of more rows are as fast
FOLDER = Path(__file__).with_name("cpu")
TORCH = Path(torch.__file__).parent
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fPIC", "-fopenmp", f"-I{TORCH / 'include'}")
LIBRARIES = (f"-L{TORCH / 'lib'}", "-ltorch_cpu")  # not OpenMP: the threads are those that torch has loaded
_NEAR = {torch.float32: 1e-5, torch.bfloat16: 1e-2}  # allowed relative difference from torch's product
_PATIENCE = 120.0  # time limit of the compiler in seconds


def available(dtype: torch.dtype) -> bool:
    """Whether there is a product of this dtype; the first call may compile for some seconds."""
    return dtype in _dtypes()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` of x [..., K] with a contiguous weight [N, K] of the same dtype; without autograd."""
    return operations().linear(x, weight, bias)


def products(x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """x [..., K] times the transpose of each contiguous weight [N, K]: [..., N] each."""
    return operations().products(x, weights)


def attends(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> bool:
    """Whether `attend` takes these tensors: plain, of one dtype, rows of keys and of values one after the other."""
    D, E, dtype = k.shape[-1], v.shape[-1], q.dtype
    plain = all(type(t) is Tensor and t.is_cpu and t.dtype == dtype and t.stride(3) == 1 for t in (q, k, v))
    if not plain or D % 16 or E % 16 or k.stride(2) != D or v.stride(2) != E:
        return False
    fits = mask is None or (mask.dtype in (torch.bool, dtype) and mask.shape[1] == 1 and mask.stride(3) == 1)
    return fits and available(dtype)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Scaled dot-product attention with grouped query heads; without autograd.

    Args:
        q: [B, heads, n, D]; k [B, kv_heads, T, D] and v [B, kv_heads, T, E], where kv_heads divides heads; float32 or
            bfloat16, whose sums are of float32.
        mask: bool, true where visible, or additive of that dtype; [B or 1, 1, n, T]. A query that sees no key gets
            zeros.
        scale: of the scores.

    Returns:
        [B, n, heads, E].
    """
    return operations().attend(q, k, v, mask, scale)


def scans(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor) -> bool:
    """Whether `scan` takes these tensors: plain float32 without autograd, one decay for a head, rows or columns of the
    state one after the other."""
    if torch.compiler.is_compiling() or not all(_plain(t) for t in (q, k, v, g, state)) or learns(q, k, v, g, state):
        return False
    (K, V), at = state.shape[2:], state.stride()
    adjacent = (at[3] == 1 and at[2] == V and V % 16 == 0) or (at[2] == 1 and at[3] == K)
    return adjacent and K > 1 and g.dim() == 3 and available(torch.float32)


def scan(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, g: Tensor, state: Tensor, ancestors: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """`recurrent_tree`, and the `path_decay` of g [B, H, n]; see `kernels/reference_recurrent.py` for the arguments.

    Returns:
        o [B, n, H, V], u [B, H, n, V] and G [B, H, n].
    """
    found: tuple[Tensor, Tensor, Tensor] = operations().scan(q, k, v, beta, g, state, ancestors)
    return found


def chains(v: Tensor, g: Tensor) -> bool:
    """Whether `chain` takes such values [..., V] and decays in float32: on a CPU without autograd, one for a head."""
    plain = not torch.compiler.is_compiling() and type(v) is Tensor and v.is_cpu and not learns(v, g)
    return plain and v.shape[-1] % 16 == 0 and g.dim() == 3 and available(torch.float32)


def chain(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, g: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`recurrent_tree` of a chain of any length, such as a prompt, and the state at its end; without autograd.

    Args:
        state: [B, H, K, V], before the chain; None: zeros. For the others see `kernels/reference_recurrent.py`.

    Returns:
        o [B, n, H, V] and the state [B, H, K, V].
    """
    found: tuple[Tensor, Tensor] = operations().chain(q, k, v, beta, g, None if state is None else state.contiguous())
    return found


def folds(states: Sequence[Tensor], k: Tensor, G: Tensor) -> bool:
    """Whether `fold` takes these states: plain, contiguous float32, as the writes are, and one decay for a head."""
    plain = all(_plain(state) and state.is_contiguous() for state in states)
    return plain and _plain(k) and G.dim() == 3 and available(torch.float32)


def fold(states: Sequence[Tensor], writes: Sequence[tuple[Tensor, Tensor, Tensor]], path: Tensor, last: Tensor) -> None:
    """`recurrent_fold` for the states of several layers of one shape, each with the k, u and G of its nodes."""
    k, u, G = zip(*writes, strict=True)
    operations().fold(states, k, u, G, path, last)


def _plain(t: Tensor) -> bool:
    return type(t) is Tensor and t.dtype == torch.float32 and t.is_cpu


def learns(*tensors: Tensor) -> bool:
    """Whether autograd records what is done with these tensors."""
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


@lru_cache(maxsize=1)
def operations() -> Any:
    """The operations of torch; compilers can trace all but `attend` and `fold`."""
    library = built()[0]
    assert library is not None, "`available` says whether there is one"
    space = f"mmspec_{library._name.rpartition('-')[2].partition('.')[0]}"  # one for each build
    found = getattr(torch.ops, space)
    if not hasattr(found, "linear"):
        if not library.mmspec_define(space.encode()):
            raise RuntimeError("torch refused the operations of kernels/cpu")
        torch.library.register_fake(f"{space}::linear", _linear)
        torch.library.register_fake(f"{space}::products", lambda x, weights: [_linear(x, w) for w in weights])
        torch.library.register_fake(f"{space}::scan", _scan)
        torch.library.register_fake(f"{space}::chain", _chain)
    return found


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(weight))


def _scan(q: Tensor, k: Tensor, v: Tensor, *_: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    B, H, n, V = v.shape
    return v.new_empty(B, n, H, V), v.new_empty(B, H, n, V), v.new_empty(B, H, n)


def _chain(q: Tensor, k: Tensor, v: Tensor, *_: Tensor | None) -> tuple[Tensor, Tensor]:
    B, H, n, V = v.shape
    return v.new_empty(B, n, H, V), v.new_empty(B, H, k.shape[3], V)


@lru_cache(maxsize=1)
def _dtypes() -> set[torch.dtype]:
    """Those whose results agree with torch's."""
    return set() if built()[0] is None else {dtype for dtype in _NEAR if _right(dtype)}


@torch.no_grad()
def _right(dtype: torch.dtype) -> bool:
    def wave(most: float, *shape: int) -> Tensor:
        return torch.linspace(-most, most, math.prod(shape), dtype=torch.float32, device="cpu").sin().view(shape)

    with torch.autocast("cpu", enabled=False):  # a call may be the first one
        x, w, b = (wave(1, n, k).to(dtype) for n, k in ((7, 77), (9, 77), (1, 9)))
        wanted = F.linear(x, w, b[0])
        off = [linear(x, w, b[0]) - wanted, *(y - F.linear(x, w) for y in products(x, [w, w]))]
        q, k = (wave(3, 1, heads, n, 16).to(dtype) for n, heads in ((7, 4), (33, 2)))
        keys = k.repeat_interleave(2, 1)
        attended = F.scaled_dot_product_attention(q, keys, keys, scale=0.5)
        off.append(attend(q, k, k, None, 0.5).transpose(1, 2) - attended)
        if dtype == torch.float32:
            off += _recurrent(0.3 * q[:, :2], 0.3 * k[:, :, :7])
        return all(bool(one.abs().max() <= _NEAR[dtype] * wanted.abs().max()) for one in off)


def _recurrent(q: Tensor, k: Tensor) -> list[Tensor]:
    """How far the recurrent layer of a chain is from its definition; q and k are [1, H, n, K]."""
    g, state = -k[..., 0].abs(), q[:, :, :1].transpose(2, 3) * k[:, :, :1]
    seen = torch.ones(1, q.shape[2], q.shape[2], device="cpu").tril().bool()
    G, path, last = path_decay(g, seen), seen[:, -1], seen[:, -1].sum(1) - 1
    o, u = recurrent_tree(q, k, q, g.exp(), G, state, seen)
    end, after = state.clone(), state.clone()
    recurrent_fold(end, k, u, G, path, last)
    fold([after], [(k, u, G)], path, last)
    outputs, left = chain(q, k, q, g.exp(), g, state)
    read = scan(q, k, q, g.exp(), g, state, seen)[0]
    return [read.transpose(1, 2) - o, outputs.transpose(1, 2) - o, left - end, after - end]


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
    except (OSError, RuntimeError, subprocess.TimeoutExpired) as error:  # RuntimeError: there is no home directory
        return None, str(error)


def _cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(home) / "mmspec"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _fingerprint(compiler: list[str]) -> str:
    """A hash of the source, the compiler with its flags, the CPU and torch."""
    cpu = Path("/proc/cpuinfo")
    lines = cpu.read_text().splitlines() if cpu.is_file() else [platform.processor()]
    flags = next((line for line in lines if line.startswith("flags")), lines[0])
    version = subprocess.run([*compiler, "--version"], capture_output=True, check=True, timeout=_PATIENCE).stdout
    sources = b"".join(file.read_bytes() for file in sorted(FOLDER.glob("*.[hc]*")))
    parts = (compiler, FLAGS, flags, torch.__version__)
    return hashlib.sha256(sources + version + repr(parts).encode()).hexdigest()[:16]


def _compile(compiler: list[str], file: Path) -> None:
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        built = [str(Path(folder) / name) for name in ("few_rows.o", "few_rows.so")]
        for words in (
            [*FLAGS, "-c", str(FOLDER / "operations.cpp"), "-o", built[0]],
            ["-shared", built[0], "-o", built[1], *LIBRARIES],
        ):
            subprocess.run([*compiler, *words], capture_output=True, check=True, timeout=_PATIENCE)
        os.replace(built[1], file)  # atomic, since other processes may compile it, too
