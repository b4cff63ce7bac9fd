"""The log-ratio of whole denoising paths: guidance, posterior mean, learned variance and the sum in one kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmspec.kernels.checks import FLOATS, REAL, at_home, sizes


@triton.jit
def _path_ratio(
    STATES, NOISE, STD, OUT, NULL, TABLE, GUIDANCE, RATIO, steps, C, sharpness,
    s_r, s_k, n_r, n_k, l_r, l_k, o_r, o_k, z_r, z_k, table_k,
    GUIDED: tl.constexpr, STEPS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One path; float32 sums, kept per step of a tile and per channel, and added up once at the end."""
    r = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, WIDE)[None, :]
    weight = 1.0
    if GUIDED:
        weight = tl.load(GUIDANCE + r)
    total = tl.zeros([STEPS, WIDE], tl.float32)
    for start in range(0, steps, STEPS):
        k = start + tl.arange(0, STEPS).to(tl.int64)[:, None]
        inside = (k < steps) & (c < C)
        x = tl.load(STATES + r * s_r + k * s_k + c, mask=inside, other=0.0).to(tl.float32)
        after = tl.load(STATES + r * s_r + (k + 1) * s_k + c, mask=inside, other=0.0).to(tl.float32)
        noise = tl.load(NOISE + r * n_r + k * n_k + c, mask=inside, other=0.0).to(tl.float32)
        log_q = tl.load(STD + r * l_r + k * l_k + c, mask=inside, other=0.0).to(tl.float32)
        eps = tl.load(OUT + r * o_r + k * o_k + c, mask=inside, other=0.0).to(tl.float32)
        share = (tl.load(OUT + r * o_r + k * o_k + C + c, mask=inside, other=0.0).to(tl.float32) + 1.0) / 2.0
        if GUIDED:
            null = tl.load(NULL + r * z_r + k * z_k + c, mask=inside, other=0.0).to(tl.float32)
            eps = null + weight * (eps - null)
        row = TABLE + k * table_k
        root = tl.load(row, mask=k < steps, other=1.0)
        rest = tl.load(row + 1, mask=k < steps, other=0.0)
        to_clean = tl.load(row + 2, mask=k < steps, other=0.0)
        to_x = tl.load(row + 3, mask=k < steps, other=0.0)
        log_beta = tl.load(row + 4, mask=k < steps, other=0.0)
        log_tilde = tl.load(row + 5, mask=k < steps, other=0.0)
        mean = to_clean * (x - rest * eps) / root + to_x * x
        log_p = (share * log_beta + (1.0 - share) * log_tilde) / 2.0
        z = (after - mean) * tl.exp(-log_p) * sharpness
        total += tl.where(inside, 0.5 * (noise * noise - z * z) + log_q - log_p, 0.0)
    tl.store(RATIO + r, tl.sum(tl.sum(total, 1), 0))


def gaussian_path(
    states: Tensor,
    noise: Tensor,
    log_std_q: Tensor,
    out: Tensor,
    table: Tensor,
    out_null: Tensor | None = None,
    guidance: Tensor | None = None,
    temperature: float = 1.0,
) -> Tensor:
    """See `reference.gaussian_path`."""
    dim = sizes(
        "gaussian_path",
        states=(states, "R K+1 C", FLOATS),
        noise=(noise, "R K C", FLOATS),
        log_std_q=(log_std_q, "R K C", FLOATS),
        out=(out, "R K 2·C", FLOATS),
        table=(table, "K six", REAL),
        out_null=(out_null, "R K wide", FLOATS),
        guidance=(guidance, "R", REAL),
    )
    R, K, C = dim["R"], dim["K"], dim["C"]
    for name, came, want in (("states", dim["K+1"], K + 1), ("out", dim["2·C"], 2 * C), ("table", dim["six"], 6)):
        if came != want:
            raise ValueError(f"gaussian_path: {name} has a dimension of {came}, expected {want} (K = {K}, C = {C})")
    if (out_null is None) != (guidance is None) or (out_null is not None and dim["wide"] < C):
        raise ValueError("gaussian_path: guidance needs out_null [R, K, ≥ C] and guidance [R], both or neither")
    if not temperature > 0:
        raise ValueError(
            f"gaussian_path: temperature must be above 0, got {temperature!r}; without noise no ratio exists"
        )
    ratio = torch.empty(R, dtype=torch.float32, device=states.device)
    null = out if out_null is None else out_null
    wide = triton.next_power_of_2(C)
    if R:
        with at_home(states):
            _path_ratio[(R,)](
                states, noise, log_std_q, out, null, table, ratio if guidance is None else guidance, ratio,
                K, C, 1.0 / temperature, *states.stride()[:2], *noise.stride()[:2], *log_std_q.stride()[:2],
                *out.stride()[:2], *null.stride()[:2], table.stride(0),
                GUIDED=out_null is not None, STEPS=max(1, min(triton.next_power_of_2(K), 2048 // wide)), WIDE=wide,
            )  # fmt: skip
    return ratio
