"""Drafters as others publish them, written by hand: names, shapes, config.json, and the forward in plain PyTorch."""

import json
import math
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.nn.functional import silu, softmax

import mmspec
from mmspec.drafters.eagle import EagleConfig, EagleDrafter
from mmspec.drafters.feature import FeatureDrafter
from mmspec.protocols import TargetInfo

H, HEADS, KV, D, MLP, V, V_D, L = 32, 4, 2, 8, 48, 61, 20, 9  # L: decoder layers of the target
NUM_Q = 3  # queries of ViSpec's adaptor
VISUAL = torch.tensor([0, 0, 1, 1, 1, 1, 2, 2, 2, 0, 0, 3, 3, 3, 0, 0])  # images 1 and 2 touch
TARGET = TargetInfo("somebody/target", V, H, H, L, torch.device("cpu"), torch.float32)
LLAMA = {
    "hidden_size": H, "intermediate_size": MLP, "num_attention_heads": HEADS, "num_key_value_heads": KV,
    "num_hidden_layers": 1, "rms_norm_eps": 1e-5, "hidden_act": "silu", "vocab_size": V, "model_type": "llama",
}  # fmt: skip


def layer(prefix: str, reads: int, kv: int = KV) -> dict[str, torch.Tensor]:
    """A Llama layer's tensors as published, the attention reading `reads` columns."""
    shapes = {
        "self_attn.q_proj": (HEADS * D, reads), "self_attn.k_proj": (kv * D, reads),
        "self_attn.v_proj": (kv * D, reads), "self_attn.o_proj": (H, HEADS * D),
        "mlp.gate_proj": (MLP, H), "mlp.up_proj": (MLP, H), "mlp.down_proj": (H, MLP),
    }  # fmt: skip
    weights = {f"{prefix}.{name}.weight": torch.randn(shape) / 4 for name, shape in shapes.items()}
    return weights | {f"{prefix}.post_attention_layernorm.weight": 1 + torch.rand(H)}


def eagle() -> tuple[dict, dict]:
    tensors = {"fc.weight": torch.randn(H, 2 * H) / 4, "fc.bias": torch.randn(H)}
    return LLAMA, tensors | {"embed_tokens.weight": torch.randn(V, H)} | layer("layers.0", H)


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


def biases(prefix: str, kv: int) -> dict[str, torch.Tensor]:
    return {f"{prefix}.{x}_proj.bias": torch.randn(n * D) for x, n in (("q", HEADS), ("k", kv), ("v", kv))}


def vispec(family: str = "qwen") -> tuple[dict, dict]:
    """As JLKang/ViSpec-Qwen2.5-VL-…, or -llava-…: as many heads for keys as for queries, whatever the target has."""
    config = {**LLAMA, "num_key_value_heads": HEADS, "rope_scaling": None}
    tensors = eagle()[1] | layer("layers.0", H, HEADS)
    tensors |= {"img_fc.weight": torch.randn(H, 2 * H) / 4, "img_fc.bias": torch.randn(H)}
    tensors |= {f"imadpt.{x}_proj.weight": torch.randn(H, H) / 2 for x in "kvo"}
    tensors["imadpt.q"] = torch.randn(NUM_Q, HEADS, D)
    if family == "llava":
        return config, tensors
    tensors |= biases("layers.0.self_attn", HEADS) | {f"imadpt.{x}_proj.bias": torch.randn(H) for x in "kv"}
    return {**config, "qkv_bias": True, "rope_theta": 1e6}, tensors


def msd(family: str = "llava") -> tuple[dict, dict]:
    """As lucylyn/MSD-LLaVA1.5-…, or -Qwen2VL-…: the config.json is the target's, made shorter."""
    if family == "llava":
        own = {"model_type": "llava", "architectures": ["LlavaLlamaForCausalLM"], "mm_vision_tower": "openai/clip"}
        config = {**LLAMA, "num_key_value_heads": HEADS, "rope_scaling": None}
        return {**config, **own}, eagle()[1] | layer("layers.0", H, HEADS)
    own = {"model_type": "qwen2_vl", "architectures": ["Qwen2VLForConditionalGeneration"], "rope_theta": 1e6}
    tensors = biases("layers.0.self_attn", KV) | {"layers.0.input_layernorm.weight": 1 + torch.rand(H)}
    return {**LLAMA, **own, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}, eagle()[1] | tensors


def flash(family: str = "llava") -> tuple[dict, dict]:
    """As FlashSD trains them: EAGLE's tensors beside a config.json in the target's name, without biases of q, k, v."""
    own = {"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"]}
    if family == "qwen":
        own = {"model_type": "qwen2_5_vl", "architectures": ["Qwen2_5_VLForConditionalGeneration"], "rope_theta": 1e6}
        own |= {"sliding_window": 32768, "use_sliding_window": False, "compress_len": 64, "group_size": 4, "k": 5}
    return {**LLAMA, **own}, eagle()[1]


def nemo(architecture: str = "VispecDraftModel", normed: bool = False) -> tuple[dict, dict]:
    """As NeMo AutoModel writes them: at first with two more norms and fewer biases, later as the authors do."""
    config, tensors = eagle() if "Vispec" not in architecture else vispec("llava" if normed else "qwen")
    config = {**config, "architectures": [architecture], "num_hidden_layers": L, "draft_num_hidden_layers": 1}
    rope = {"rope_type": "default", "rope_theta": config.pop("rope_theta", 1e4), "mrope_section": [1, 1, 2]}
    config["rope_parameters"] = rope
    tensors = {key.replace("imadpt.", "img_adaptor."): tensor for key, tensor in tensors.items()}
    if "img_adaptor.q" in tensors:
        tensors["img_adaptor.query"] = tensors.pop("img_adaptor.q")
    if normed:
        tensors |= {f"{name}.weight": 1 + torch.rand(H) for name in ("norm", "layers.0.input_layernorm")}
        return config, {key: tensor for key, tensor in tensors.items() if not key.endswith("fc.bias")}
    return {**config, "fc_bias": True, "draft_skip_first_input_norm": True, "draft_apply_final_norm": False}, tensors


PUBLISHED = {
    "eagle": eagle,
    "eagle3": eagle3,
    "speculators": speculators,
    "vispec": vispec,
    "msd": msd,
    "nemo-vispec": nemo,
    "nemo-msd": lambda: nemo("MultimodalEagleDraftModel", normed=True),
    "nemo-eagle": lambda: nemo("LlamaEagleDraftModel", normed=True),
}


def put(folder: Path, config: dict, tensors: dict, file: str = "model.safetensors") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {key: tensor.clone() for key, tensor in tensors.items()}
    save_file(tensors, folder / file) if file.endswith("safetensors") else torch.save(tensors, folder / file)
    return folder


def load(folder: Path, **options) -> FeatureDrafter:
    return mmspec.load_drafter(folder, target=TARGET, **options)


def run(drafter: FeatureDrafter, embeds, features, visual=None) -> torch.Tensor:
    """The feature that it predicts at each row of one sequence; `visual` [n] as `enter` takes it."""
    visual = torch.zeros(len(embeds), dtype=torch.long) if visual is None else visual
    valid = torch.ones(1, len(embeds), dtype=torch.bool)
    return drafter(embeds[None], features[None], visual[None], valid, 1)[0][0]


def same(a: FeatureDrafter, b: FeatureDrafter) -> None:
    assert (type(a), a.config) == (type(b), b.config)
    assert a.state_dict().keys() == b.state_dict().keys()
    for key, tensor in a.state_dict().items():
        assert tensor.dtype == b.state_dict()[key].dtype
        assert torch.equal(tensor, b.state_dict()[key]), key


def ours(**changes) -> EagleDrafter:
    shapes = {"hidden": H, "intermediate": MLP, "heads": HEADS, "kv_heads": KV, "vocab": V}
    shapes |= {"depth": 4, "width": 3, "size": 17}
    shapes |= {"target": "somebody/target", "target_revision": "abc", "norm_eps": 1e-5, "rope_theta": 1e6}
    drafter = EagleDrafter(EagleConfig.of({**shapes, **changes}))
    if drafter.head.own:
        drafter.head.ids.copy_(torch.randperm(V)[: drafter.config.draft_vocab].sort().values)
    return drafter.eval()


THREE = {"features": (1, 4, 7), "parallel_norm": True, "fc_bias": False, "draft_vocab": V_D}


def norm(x, weight):
    return weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


def turn(x, theta, positions):
    """Rotary positions [n] for [n, heads, D], halves convention."""
    D = x.shape[-1]
    angle = torch.outer(positions.float(), 1 / theta ** (torch.arange(0, D, 2).float() / D))
    cos, sin = (torch.cat([f(angle), f(angle)], -1)[:, None] for f in (torch.cos, torch.sin))
    return x * cos + torch.cat([-x[..., D // 2 :], x[..., : D // 2]], -1) * sin


def decoder_layer(t, prefix, x, residual, theta, positions=None):
    """Causal attention over rows x [n, ·] with grouped heads, then a gated MLP; `residual` [n, H] is added to."""
    positions = torch.arange(len(x)) if positions is None else positions

    def project(name, x):
        return x @ t[f"{prefix}.{name}_proj.weight"].T + t.get(f"{prefix}.{name}_proj.bias", torch.zeros(1))

    n = len(x)
    q, k, v = (project(f"self_attn.{name}", x).view(n, -1, D) for name in "qkv")
    q, k = turn(q, theta, positions), turn(k, theta, positions)
    heads = []
    for head in range(HEADS):
        group = head // (HEADS // k.shape[1])
        scores = (q[:, head] @ k[:, group].T / math.sqrt(D)).masked_fill(~torch.ones(n, n).tril().bool(), -math.inf)
        heads.append(softmax(scores, -1) @ v[:, group])
    x = residual + project("self_attn.o", torch.cat(heads, -1))
    y = norm(x, t[f"{prefix}.post_attention_layernorm.weight"])
    return x + project("mlp.down", silu(project("mlp.gate", y)) * project("mlp.up", y))
