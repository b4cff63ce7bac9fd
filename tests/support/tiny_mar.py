"""Tiny random MAR pipelines, and MAR as a literal transcription of its formulas in float64, token by token."""

from __future__ import annotations

import math
from typing import Any

import torch
from tiny_llamagen import lively
from torch import Tensor

from mmspec.models.mar import MARTransformer2DModel
from mmspec.models.mar_scheduler import MARScheduler
from mmspec.pipelines.mar.files import build_vae
from mmspec.pipelines.mar.pipeline import MARPipeline

CLASSES = 5
SIZES = {"dim": 24, "layers": 2, "heads": 3, "head_layers": 2, "head_width": 20, "grid": 4, "channels": 4, "buffer": 3}


def transformer(seed: int = 0, **sizes: Any) -> Any:
    return lively(MARTransformer2DModel(**{**SIZES, "classes": CLASSES, **sizes}), seed, 0.2)


def vae(seed: int = 0, channels: tuple[int, ...] = (8, 8, 16), attention: bool = True, layers: int = 2) -> Any:
    made = build_vae(channels, SIZES["channels"], min(channels), 16, layers, attention, 0.2325)
    return lively(made, seed, 0.1)


def scheduler(**config: Any) -> MARScheduler:
    """That of exact speculation."""
    return MARScheduler(**{"final_noise": True, "skip_terminal": True, **config})


def pipeline(seed: int = 0, **config: Any) -> MARPipeline:
    """Draws its 16 tokens one by one, in 8 denoising steps."""
    defaults = {"num_inference_steps": 16, "num_diffusion_steps": 9}
    pipe = MARPipeline(transformer(seed), scheduler(**config), vae(seed), defaults, {0: "red circle", 1: "blue star"})
    pipe.set_progress_bar_config(disable=True)
    return pipe


def seeded(*seeds: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in seeds]


# -- the formulas -----------------------------------------------------------------------------------------------------


def _norm(x: Tensor, w: dict[str, Tensor], name: str) -> Tensor:
    x = x - x.mean(-1, keepdim=True)
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * w[f"{name}.weight"] + w[f"{name}.bias"]


def _linear(x: Tensor, w: dict[str, Tensor], name: str) -> Tensor:
    return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]


def _silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def _block(x: Tensor, w: dict[str, Tensor], at: str, heads: int) -> Tensor:
    D = x.shape[1]
    q, k, v = _linear(_norm(x, w, f"{at}.norm1"), w, f"{at}.attn.qkv").chunk(3, 1)
    seen = []
    for h in range(heads):
        one = slice(h * D // heads, (h + 1) * D // heads)
        scores = q[:, one] @ k[:, one].T / math.sqrt(D // heads)
        seen.append((scores - scores.max()).exp() @ v[:, one] / (scores - scores.max()).exp().sum(1, keepdim=True))
    x = x + _linear(torch.cat(seen, 1), w, f"{at}.attn.proj")
    inner = _linear(_norm(x, w, f"{at}.norm2"), w, f"{at}.mlp.fc1")
    inner = 0.5 * inner * (1 + torch.erf(inner / math.sqrt(2)))
    return x + _linear(inner, w, f"{at}.mlp.fc2")


def literal_trunk(model: Any, tokens: Tensor, known: list[int], label: int | None, wrong: str = "") -> Tensor:
    """z [L, D] of one picture that knows the places `known`; `wrong` names a trap to fall into."""
    w = {name: t.double() for name, t in model.state_dict().items()}
    c, S = model.config, model.config.buffer
    vector = w["fake_latent"][0] if label is None else w["class_emb.weight"][label]
    known = known if wrong == "generation order" else sorted(known)
    position = w["encoder_pos_embed_learned"][0]
    rows = [vector + position[i] for i in range(S)]
    places = range(len(known)) if wrong == "packed positions" else known
    rows += [
        _linear(tokens[at].double(), w, "z_proj") + position[S + place] for at, place in zip(known, places, strict=True)
    ]
    x = _norm(torch.stack(rows), w, "z_proj_ln")
    if wrong == "class past the norm":
        x = torch.cat([torch.stack(rows[:S]), x[S:]])
    for i in range(c.layers):
        x = _block(x, w, f"encoder_blocks.{i}", c.heads)
    x = _linear(_norm(x, w, "encoder_norm"), w, "decoder_embed")
    canvas = torch.cat([x[:S], w["mask_token"][0].expand(c.grid**2, -1)])
    for i, at in enumerate(known):
        canvas[S + at] = x[S + i]
    x = canvas + w["decoder_pos_embed_learned"][0]
    for i in range(c.layers):
        x = _block(x, w, f"decoder_blocks.{i}", c.heads)
    return _norm(x, w, "decoder_norm")[S:] + w["diffusion_pos_embed_learned"][0]


def literal_head(model: Any, x: Tensor, t: int, z: Tensor, wrong: str = "") -> Tensor:
    """ε, then v [2·C] of one token x [C] at training time t."""
    w = {n.removeprefix("diffloss.net."): v.double() for n, v in model.state_dict().items() if "diffloss" in n}
    angle = [t * math.exp(-math.log(1e4) * k / 128) for k in range(128)]
    cos, sin = [math.cos(a) for a in angle], [math.sin(a) for a in angle]
    wave = torch.tensor(sin + cos if wrong == "sine first" else cos + sin, dtype=torch.float64)
    y = _linear(_silu(_linear(wave, w, "time_embed.mlp.0")), w, "time_embed.mlp.2") + _linear(z, w, "cond_embed")
    h = _linear(x.double(), w, "input_proj")
    for j in range(model.config.head_layers):
        at = f"res_blocks.{j}"
        shift, scale, gate = _linear(_silu(y), w, f"{at}.adaLN_modulation.1").chunk(3)
        if wrong == "scale first":
            shift, scale = scale, shift
        u = _norm(h, w, f"{at}.in_ln") * (1 + scale) + shift
        h = h + gate * _linear(_silu(_linear(u, w, f"{at}.mlp.0")), w, f"{at}.mlp.2")
    shift, scale = _linear(_silu(y), w, "final_layer.adaLN_modulation.1").chunk(2)
    h = h - h.mean()
    h = h / (h.pow(2).mean() + 1e-6).sqrt() * (1 + scale) + shift
    return _linear(h, w, "final_layer.linear")


def literal_alpha_bar() -> list[float]:
    out, product = [], 1.0
    for i in range(1000):
        f = [math.cos((s / 1000 + 0.008) / 1.008 * math.pi / 2) ** 2 for s in (i, i + 1)]
        product *= 1 - min(1 - f[1] / f[0], 0.999)
        out.append(product)
    return out


def literal_chain(
    model: Any, z: tuple[Tensor, Tensor | None], weight: float, noise: Tensor, T: int, tau: float, final: bool,
    skip: bool, wrong: str = "",
) -> Tensor:  # fmt: skip
    """One token [C] from noise [steps + 1, C]."""
    C, bars = noise.shape[1], literal_alpha_bar()
    times = [round(k * 999 / (T - 1)) for k in range(T)]
    x = noise[0].double()
    rows = list(range(T))[::-1][skip:]
    for n, k in enumerate(rows):
        bar, before = bars[times[k]], bars[times[k - 1]] if k else 1.0
        out = literal_head(model, x, k if wrong == "spaced clock" else times[k], z[0])
        eps, v = out[:C], out[C:]
        if z[1] is not None:
            null = literal_head(model, x, times[k], z[1])
            eps = null[:C] + weight * (eps - null[:C])
            v = null[C:] + weight * (v - null[C:]) if wrong == "guided variance" else v
        beta = 1 - bar / before
        clean = (x - math.sqrt(1 - bar) * eps) / math.sqrt(bar)
        clean = clean.clamp(-1, 1) if wrong == "clipped" else clean
        mean = beta * math.sqrt(before) / (1 - bar) * clean + (1 - before) * math.sqrt(1 - beta) / (1 - bar) * x
        low = k or 1
        bar_l, before_l = bars[times[low]], bars[times[low - 1]]
        tilde = (1 - before_l) / (1 - bar_l) * (1 - bar_l / before_l)
        log_var = (v + 1) / 2 * math.log(beta) + (1 - v) / 2 * math.log(tilde)
        scale = tau if (k or final) else 0.0
        x = mean + scale * torch.exp(0.5 * log_var) * noise[n + 1].double()
    return x
