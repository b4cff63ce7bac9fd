"""Compile all kernels for a GPU that need not be there: `python tests/support/compile_kernels.py 90`."""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)
sys.path.append(str(Path(__file__).resolve().parents[2]))  # where benchmarks is

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction, mangle_type

from benchmarks.suites import kernel_cases as cases
from mmspec.kernels import attention, checks, dispatch

MODEL = {"D": 128, "heads": 28, "kv_heads": 4, "T": 1000, "V": 5000, "N": 60, "k": 1000, "C": 16, "R": 2, "layers": 1}
WIDE = 256  # D of Gemma's heads
SHARED = {80: 99 * 1024, 90: 227 * 1024}  # bytes for one program; what is compiled for 8.0 also runs on 8.6 and 8.9


def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
    """Instead of a launch; as there, 1 becomes a constant, and what 16 divides is known: only then are loads early."""
    options = {key: named.pop(key) for key in list(named) if key not in self.arg_names}
    bound = dict(zip(self.arg_names, args, strict=False)) | named
    fixed = {p.name for p in self.params if p.is_constexpr}
    open_ = {p.name for p in self.params if p.do_not_specialize}
    fixed |= {name for name, value in bound.items() if isinstance(value, int) and value == 1 and name not in open_}
    signature = {p.name: "constexpr" if p.name in fixed else mangle_type(bound[p.name]) for p in self.params}
    constants = {(self.arg_names.index(name),): bound[name] for name in fixed}
    divided = [at for at, name in enumerate(self.arg_names) if name not in fixed | open_ and _divided(bound[name])]
    known = {(at,): [["tt.divisibility", 16]] for at in divided}
    key = str((self.__name__, signature, constants, known))
    if key not in compiled:
        compiled[key] = triton.compile(ASTSource(self, signature, constants, known), target=target, options=options)
        shared = compiled[key].metadata.shared
        assert shared <= SHARED[target.arch], f"{self.__name__} wants {shared} bytes of shared memory"


def _divided(value: Any) -> bool:
    at = value.data_ptr() if isinstance(value, torch.Tensor) else value
    return isinstance(at, int) and at % 16 == 0


compiled: dict[str, Any] = {}
target = GPUTarget("cuda", int(sys.argv[1]), 32)
JITFunction.run = compile_only
checks.at_home = attention.at_home = lambda tensor: nullcontext()
for name, case in cases.CASES.items():
    run, attends = dispatch.chosen(name, "cuda", "triton"), name == "tree_attention"
    dtypes = list(cases.TOLERANCES[name]) if attends else [next(iter(cases.TOLERANCES[name]))]
    for dtype, wide in product(dtypes, [{}, {"D": WIDE}] if attends else [{}]):
        sizes = {k: v for k, v in (MODEL | wide).items() if k in case.toy}
        given = case.make(case.toy | sizes, torch.device("cpu"), dtype)
        variants: list[dict[str, Any]] = [{}]
        if attends:
            B, n = given["bits"].shape[:2]
            every = {"open_slots": torch.ones(B, 9, dtype=torch.bool), "first": torch.zeros(B, n, dtype=torch.long)}
            variants = [{"splits": 8, **every}, *[{"splits": 1}] * (dtype == torch.bfloat16 and not wide)]
        if name == "verify_point_mass":
            variants += [{"ancestors": None}]
        if name == "residual_sample":
            variants += [{"q": None}]
        if name == "logit_window":
            variants += [{"size": 3}]
        for variant in variants:
            cases.apply(name, run, given | variant)
        if attends:
            q, keys, values = given["q"], *(given[part][:, :, : given["q"].shape[2]] for part in ("keys", "values"))
            places = torch.zeros(10, dtype=torch.long), given["lengths"], given["bits"]
            for first, aligned in ((None, True), (every["first"], False)):
                attention.addressed_attention(q, keys, values, *places, first, aligned=aligned)
    print(name, flush=True)
