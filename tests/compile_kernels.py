"""Compile all kernels for a GPU that need not be there: `python tests/compile_kernels.py 90`."""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction, mangle_type

from mmspec.kernels import cases, checks, dispatch

MODEL = {"D": 128, "heads": 28, "kv_heads": 4, "T": 1000, "V": 5000, "N": 60, "k": 1000, "C": 16, "R": 2, "layers": 1}
SHARED = 99 * 1024  # bytes that every GPU since 2020 gives to one program


def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
    """Instead of a launch; an integer argument of 1 becomes a constant, as in a real one."""
    options = {key: named.pop(key) for key in list(named) if key not in self.arg_names}
    bound = dict(zip(self.arg_names, args, strict=False)) | named
    fixed = {p.name for p in self.params if p.is_constexpr}
    fixed |= {name for name, value in bound.items() if isinstance(value, int) and value == 1}
    signature = {p.name: "constexpr" if p.name in fixed else mangle_type(bound[p.name]) for p in self.params}
    constants = {(self.arg_names.index(name),): bound[name] for name in fixed}
    key = str((self.__name__, signature, constants))
    if key not in compiled:
        compiled[key] = triton.compile(ASTSource(self, signature, constants), target=target, options=options)
        shared = compiled[key].metadata.shared
        assert shared <= SHARED, f"{self.__name__} wants {shared} bytes of shared memory"


compiled: dict[str, Any] = {}
target = GPUTarget("cuda", int(sys.argv[1]), 32)
JITFunction.run = compile_only
checks.at_home = lambda tensor: nullcontext()  # before the kernels import it
for name, case in cases.CASES.items():
    run = dispatch.chosen(name, "cuda", "triton")
    for dtype in cases.TOLERANCES[name] if name == "tree_attention" else [next(iter(cases.TOLERANCES[name]))]:
        given = case.make(case.toy | {k: v for k, v in MODEL.items() if k in case.toy}, torch.device("cpu"), dtype)
        variants: list[dict[str, Any]] = [{}]
        if name == "tree_attention":
            B, n = given["bits"].shape[:2]
            every = {"open_slots": torch.ones(B, 9, dtype=torch.bool), "first": torch.zeros(B, n, dtype=torch.long)}
            variants = [{"splits": 8, **every}, *[{"splits": 1}] * (dtype == torch.bfloat16)]
        if name == "verify_point_mass":
            pair = (given["noise"][:, 0].long(), given["tokens"])
            variants += [{"noise": pair}, {"noise": None, "ancestors": None}]
        if name == "residual_sample":
            variants += [{"q": None, "u": (given["u"].long(), given["u"].long())}]
        if name == "logit_window":
            variants += [{"size": 3}]
        for variant in variants:
            cases.apply(name, run, given | variant)
    print(name, flush=True)
