"""Drafters as others publish them, written by hand: names, shapes, config.json, and the forward in plain PyTorch."""

import json
import math
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.nn.functional import silu, softmax

import mmspec
from mmspec.drafters.eagle import EagleConfig, EagleDrafter
from mmspec.types import TargetInfo

H, HEADS, KV, D, MLP, V, V_D, L = 32, 4, 2, 8, 48, 61, 20, 9  # L: decoder layers of the target
TARGET = TargetInfo("somebody/target", V, H, H, L, torch.device("cpu"), torch.float32)
LLAMA = {
    "hidden_size": H, "intermediate_size": MLP, "num_attention_heads": HEADS, "num_key_value_heads": KV,
    "num_hidden_layers": 1, "rms_norm_eps": 1e-5, "hidden_act": "silu", "vocab_size": V, "model_type": "llama",
}  # fmt: skip


def layer(prefix: str, reads: int) -> dict[str, torch.Tensor]:
    """A Llama layer's tensors as published, the attention reading `reads` columns."""
    shapes = {
        "self_attn.q_proj": (HEADS * D, reads), "self_attn.k_proj": (KV * D, reads),
        "self_attn.v_proj": (KV * D, reads), "self_attn.o_proj": (H, HEADS * D),
        "mlp.gate_proj": (MLP, H), "mlp.up_proj": (MLP, H), "mlp.down_proj": (H, MLP),
    }  # fmt: skip
    weights = {f"{prefix}.{name}.weight": torch.randn(shape) / 4 for name, shape in shapes.items()}
    return weights | {f"{prefix}.post_attention_layernorm.weight": 1 + torch.rand(H)}


def eagle() -> tuple[dict, dict]:
    tensors = {
        "fc.weight": torch.randn(H, 2 * H) / 4,
        "fc.bias": torch.randn(H),
        "embed_tokens.weight": torch.randn(V, H),
    }
    return LLAMA, tensors | layer("layers.0", H)


def eagle3(prefix: str = "midlayer") -> tuple[dict, dict]:
    tensors = {"fc.weight": torch.randn(H, 3 * H) / 4, "norm.weight": 1 + torch.rand(H)} | layer(prefix, 2 * H)
    tensors |= {f"{prefix}.{name}.weight": 1 + torch.rand(H) for name in ("input_layernorm", "hidden_norm")}
    ids = torch.randperm(V)[:V_D].sort().values
    mapping = {"d2t": ids - torch.arange(V_D), "t2d": torch.zeros(V, dtype=torch.bool).index_fill_(0, ids, True)}
    return {**LLAMA, "draft_vocab_size": V_D}, {**tensors, "lm_head.weight": torch.randn(V_D, H), **mapping}


def speculators() -> tuple[dict, dict]:
    greedy = {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    verifier = {"name_or_path": "somebody/target", "architectures": ["LlavaForConditionalGeneration"]}
    config = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": "eagle3", "default_proposal_method": "greedy",
            "proposal_methods": [greedy], "verifier": verifier,
        },
        "transformer_layer_config": {**LLAMA, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
        "draft_vocab_size": V_D, "target_hidden_size": None, "eagle_aux_hidden_state_layer_ids": [1, 4, 7],
        "norm_before_residual": False, "norm_before_fc": False, "fc_norm": False, "norm_output": False,
        "embed_requires_grad": False,
    }  # fmt: skip
    return config, {**eagle3("layers.0")[1], "embed_tokens.weight": torch.randn(V, H)}


PUBLISHED = {"eagle": eagle, "eagle3": eagle3, "speculators": speculators}


def put(folder: Path, config: dict, tensors: dict, file: str = "model.safetensors") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {key: tensor.clone() for key, tensor in tensors.items()}
    save_file(tensors, folder / file) if file.endswith("safetensors") else torch.save(tensors, folder / file)
    return folder


def load(folder: Path, **options) -> EagleDrafter:
    return mmspec.load_drafter(folder, target=TARGET, **options)


def ours(**changes) -> EagleDrafter:
    c = {
        "hidden": H,
        "intermediate": MLP,
        "heads": HEADS,
        "kv_heads": KV,
        "vocab": V,
        "depth": 4,
        "width": 3,
        "size": 17,
    }
    c |= {"target": "somebody/target", "target_revision": "abc", "norm_eps": 1e-5, "rope_theta": 1e6}
    drafter = EagleDrafter(EagleConfig(**{**c, **changes}))
    if drafter.lm_head is not None:
        drafter.draft_ids.copy_(torch.randperm(V)[: drafter.config.draft_vocab].sort().values)
    return drafter.eval()


THREE = {"features": (1, 4, 7), "parallel_norm": True, "fc_bias": False, "draft_vocab": V_D}


def norm(x, weight):
    return weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


def turn(x, theta):
    """Rotary positions 0 … n−1 for [n, heads, D], halves convention."""
    angle = torch.outer(torch.arange(len(x)).float(), 1 / theta ** (torch.arange(0, D, 2).float() / D))
    cos, sin = (torch.cat([f(angle), f(angle)], -1)[:, None] for f in (torch.cos, torch.sin))
    return x * cos + torch.cat([-x[..., D // 2 :], x[..., : D // 2]], -1) * sin


def decoder_layer(t, prefix, x, residual, theta):
    """Causal attention over rows x [n, ·] with grouped heads, then a gated MLP; `residual` [n, H] is added to."""

    def project(name, x):
        return x @ t[f"{prefix}.{name}_proj.weight"].T + t.get(f"{prefix}.{name}_proj.bias", torch.zeros(1))

    n = len(x)
    q, k, v = (project(f"self_attn.{name}", x).view(n, -1, D) for name in "qkv")
    q, k = turn(q, theta), turn(k, theta)
    heads = []
    for head in range(HEADS):
        group = head // (HEADS // KV)
        scores = (q[:, head] @ k[:, group].T / math.sqrt(D)).masked_fill(~torch.ones(n, n).tril().bool(), -math.inf)
        heads.append(softmax(scores, -1) @ v[:, group])
    x = residual + project("self_attn.o", torch.cat(heads, -1))
    y = norm(x, t[f"{prefix}.post_attention_layernorm.weight"])
    return x + project("mlp.down", silu(project("mlp.gate", y)) * project("mlp.up", y))
