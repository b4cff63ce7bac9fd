"""Shared by the published layouts: a decoder layer with Llama's tensor names, and a config.json like Llama's."""

from __future__ import annotations

from reprlib import repr as briefly

from mmspec.checkpoints import rotary
from mmspec.checkpoints.files import Json, Settings
from mmspec.checkpoints.layout import Keys, Layout, Published
from mmspec.checkpoints.values import LARGEST, MANY, checked, is_count
from mmspec.drafters.blocks import ROPE_KINDS
from mmspec.drafters.trained import TrainedConfig

NO_LIMIT = 131072  # max_position_embeddings: rotary tables are computed as needed, so only the target has a limit
SLIDING = "sliding_attention"
Needs = dict[str, tuple[tuple[object, ...], str]]  # setting: (values that mmspec supports, meaning of other values)
_NEEDS: Needs = {
    "hidden_act": ((None, "silu"), "another activation than silu"),
    "embed_requires_grad": ((None, False), "its own embeddings, which differ from the target's"),
}


def block(at: str) -> Keys:
    """The decoder layer's tensors, with a prefix."""
    return {
        **{f"block.qkv.{part}": tuple(f"{at}.self_attn.{x}_proj.{part}" for x in "qkv") for part in ("weight", "bias")},
        "block.out.weight": (f"{at}.self_attn.o_proj.weight",),
        "block.mlp_norm.weight": (f"{at}.post_attention_layernorm.weight",),
        "block.gate_up.weight": (f"{at}.mlp.gate_proj.weight", f"{at}.mlp.up_proj.weight"),
        "block.down.weight": (f"{at}.mlp.down_proj.weight",),
    }


def layers(flat: Json) -> int:
    """The number of layers in config.json.

    Raises:
        ValueError: an invalid number.
    """
    count = flat.get("num_hidden_layers")
    if count is not None and not (is_count(count) and count <= MANY):
        raise ValueError(
            f"num_hidden_layers in config.json must be a whole number from 1 to {MANY}; it is {briefly(count)}"
        )
    return count or 1


def needed(flat: Json, needs: Needs) -> list[str]:
    """The settings that mmspec's network does not support."""
    return [f"{why} ({k} = {flat[k]!r})" for k, (supported, why) in needs.items() if flat.get(k) not in supported]


def needs(files: Published, kinds: tuple[str, ...]) -> list[str]:
    """Unsupported features in any layout; `kinds`: the methods of speculators that the layout has."""
    kind, quantised = files.config.get("speculators_model_type"), "_proj.weight_scale"
    other = f"the method {kind!r} of speculators (this layout has {', '.join(kinds)})"
    reasons = [*([] if kind in (None, *kinds) else [other]), *needed(files.flat, _NEEDS)]
    reasons += [f"quantised weights ({quantised}*)"] if any(quantised in key for key in files.shapes) else []
    rope = rotary.kind_of(rotary.scaling(files.flat))
    return reasons if rope in ROPE_KINDS else [*reasons, f"rotary positions scaled by {rope!r}"]


def read(layout: Layout, files: Published) -> Settings:
    """The settings from a Llama-like config.json and the decoder layer's tensors, without rotary scaling.

    Raises:
        ValueError: shapes that do not fit such a layer.
    """
    flat, shapes, layer, fc = files.flat, files.shapes, layout.layer, layout.fc
    matrices = [fc, *(f"{layer}.{x}_proj.weight" for x in ("self_attn.q", "self_attn.k", "mlp.gate"))]
    wrong = [f"{key} has the shape {list(shapes[key])}" for key in matrices if len(shapes[key]) != 2]
    if wrong:
        raise ValueError(f"{', '.join(wrong)}; expected matrices")
    heads = flat.get("num_attention_heads")
    if not is_count(heads):
        raise ValueError(f"config.json must give num_attention_heads, a whole number ≥ 1; it gives {briefly(heads)}")
    q, k = (shapes[f"{layer}.self_attn.{x}_proj.weight"][0] for x in "qk")
    head_dim = flat.get("head_dim") or q // heads
    if not is_count(head_dim):
        raise ValueError(
            f"head_dim in config.json must be a whole number from 1 to {LARGEST}; it is {briefly(head_dim)}"
        )
    if q != heads * head_dim or k % head_dim or heads % max(1, k // head_dim):
        raise ValueError(
            f"{layer}.self_attn.q_proj.weight has {q} rows and k_proj.weight {k}; with num_attention_heads {heads} and "
            f"head_dim {head_dim} expected {heads * head_dim}, and for k_proj whole heads whose number divides {heads}"
        )
    hidden = shapes[fc][0]
    values = {
        "hidden": hidden, "intermediate": shapes[f"{layer}.mlp.gate_proj.weight"][0], "heads": heads,
        "kv_heads": k // head_dim, "head_dim": 0 if head_dim * heads == hidden else head_dim, "vocab": _vocab(files),
        "rope_theta": rotary.theta(flat) or TrainedConfig.rope_theta,
        "norm_eps": flat.get("rms_norm_eps") or TrainedConfig.norm_eps,
    }  # fmt: skip
    return checked(TrainedConfig, values)


def _vocab(files: Published) -> int:
    for key in ("t2d", "embed_tokens.weight"):
        if key in files.shapes:
            return files.shapes[key][0]
    size = files.flat.get("vocab_size")
    if not is_count(size):
        raise ValueError(
            f"config.json must give vocab_size, as no tensor gives the vocabulary; it gives {briefly(size)}"
        )
    return size


def write(c: TrainedConfig, kind: str = "llama") -> Settings:
    """config.json of such a layer."""
    return {
        "model_type": kind, "hidden_act": "silu", "num_hidden_layers": c.layers, "vocab_size": c.vocab,
        "hidden_size": c.hidden, "intermediate_size": c.intermediate, "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads, "head_dim": c.head_dim or c.hidden // c.heads, "rms_norm_eps": c.norm_eps,
        **rotary.describe(c), "max_position_embeddings": NO_LIMIT,
        "attention_bias": False, "tie_word_embeddings": False,
    }  # fmt: skip
