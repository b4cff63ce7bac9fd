"""Shared by the published layouts: a decoder layer with Llama's tensor names, a config.json like Llama's, its rope."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from reprlib import repr as briefly
from typing import Any

from mmspec.checkpoints.files import Json, Settings
from mmspec.checkpoints.layout import Keys, Layout, Published
from mmspec.checkpoints.values import LARGEST, MANY, checked, is_count, part
from mmspec.drafters.blocks import ROPE_KINDS, Rope
from mmspec.drafters.trained import TrainedConfig

NO_LIMIT = 131072  # max_position_embeddings: rotary tables are computed as needed, so only the target has a limit
SLIDING = "sliding_attention"
Needs = dict[str, tuple[tuple[object, ...], str]]  # setting: (values that mmspec supports, meaning of other values)
_NEEDS: Needs = {
    "hidden_act": ((None, "silu"), "another activation than silu"),
    "embed_requires_grad": ((None, False), "its own embeddings, which differ from the target's"),
}
_ROPE_KEYS = {"rope_factor": "factor", "rope_trained": "original_max_position_embeddings"}
_BOUNDS = {
    "llama3": ("low_freq_factor", "high_freq_factor", 1.0, 4.0),
    "yarn": ("beta_slow", "beta_fast", 1.0, 32.0),
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
    """The number of layers in config.json. Raises ValueError: an invalid number."""
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
    rope = kind_of(scaling(files.flat))
    return reasons if rope in ROPE_KINDS else [*reasons, f"rotary positions scaled by {rope!r}"]


def read(layout: Layout, files: Published) -> Settings:
    """The settings from a Llama-like config.json and the decoder layer's tensors, without rotary scaling.

    Raises ValueError: shapes that do not fit such a layer.
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
        "rope_theta": theta(flat) or TrainedConfig.rope_theta,
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
        **write_rope(c), "max_position_embeddings": NO_LIMIT,
        "attention_bias": False, "tie_word_embeddings": False,
    }  # fmt: skip


# -- rotary positions, in the format of transformers: `rope_theta` and `rope_scaling`, or combined ---------------------


def scaling(flat: Json) -> Json:
    """The object with the scaling of positions, empty if there is none.

    Raises ValueError: it is not an object, or differs between the layers.
    """
    for key in ("rope_scaling", "rope_parameters"):
        if given := part(flat, key):
            return _of_all_layers(key, given, flat.get("layer_types"))
    return {}


def _of_all_layers(key: str, part: Json, layer_types: Iterable[str] | None) -> Json:
    """The values for all layers; Gemma-3 and others have an object for each type of layer."""
    typed = {kind: values for kind, values in part.items() if isinstance(values, Mapping)}
    used = [typed.get(kind) for kind in layer_types or typed]
    if not typed:
        return part
    if used[0] is None or any(values != used[0] for values in used):
        raise ValueError(
            f"{key} in config.json has values for each type of layer ({', '.join(typed)}); mmspec's drafters need the "
            "same for all of their layers (layer_types)"
        )
    return used[0]


def theta(flat: Json) -> Any:
    """The base of the frequencies, None if there is none; as in transformers, that beside the scaling comes first."""
    return scaling(flat).get("rope_theta") or flat.get("rope_theta")


def kind_of(rope: Json) -> object:
    """The kind of frequency scaling; M-RoPE only assigns frequencies to axes, and is "default"."""
    kind = rope.get("rope_type") or rope.get("type") or "default"
    return "default" if kind == "mrope" else kind


def read_rope(flat: Json, axes: bool) -> Settings:
    """The values of a Rope, except its theta, from a flat config.json; with its M-RoPE sections if the network uses
    three `axes`."""
    rope = scaling(flat)
    kind = kind_of(rope)
    values: Settings = {"rope_kind": kind} if kind in ROPE_KINDS and kind != "default" else {}
    share = rope.get("partial_rotary_factor", flat.get("partial_rotary_factor"))
    if share not in (None, 1):
        values["rope_share"] = share
    if axes and "mrope_section" in rope:
        values["mrope"] = rope["mrope_section"]
        if isinstance(values["mrope"], list):
            values["mrope"] = tuple(values["mrope"])
        values["mrope_interleaved"] = bool(rope.get("mrope_interleaved"))
    if not values.get("rope_kind"):
        return values
    values |= {ours: rope[theirs] for ours, theirs in _ROPE_KEYS.items() if rope.get(theirs) is not None}
    if kind in _BOUNDS:
        low, high, *defaults = _BOUNDS[kind]
        values |= {"rope_low": rope.get(low) or defaults[0], "rope_high": rope.get(high) or defaults[1]}
        values.setdefault("rope_trained", flat.get("max_position_embeddings") or 0)
    if kind == "yarn":
        values |= {"rope_gain": _gain(rope), "rope_truncate": bool(rope.get("truncate", True))}
    return values


def _gain(rope: Json) -> float:
    """YaRN's factor of cosine and sine, computed as in transformers if the file has none."""
    factor, given = rope.get("factor", 1.0), rope.get("attention_factor")
    if given is not None or not isinstance(factor, int | float):
        return given or 1.0
    scales = [rope.get(name) for name in ("mscale", "mscale_all_dim")]

    def gain(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if all(isinstance(scale, int | float) and scale for scale in scales):
        return gain(scales[0]) / gain(scales[1])  # type: ignore[arg-type]
    return gain(1.0)


def write_rope(c: Rope) -> Settings:
    """`rope_theta`, `rope_scaling` and `partial_rotary_factor` of a drafter's config.

    Raises ValueError: positions on a grid, which only mmspec's own layout supports.
    """
    if c.rope != "1d":
        raise ValueError("this layout cannot store positions on a grid. Use layout 'mmspec'")
    rope: Settings = {}
    if c.rope_kind != "default":
        rope = {"rope_type": c.rope_kind, "factor": c.rope_factor}
        if c.rope_kind in _BOUNDS:
            low, high, *_ = _BOUNDS[c.rope_kind]
            rope |= {low: c.rope_low, high: c.rope_high, "original_max_position_embeddings": c.rope_trained}
        if c.rope_kind == "yarn":
            rope |= {"attention_factor": c.rope_gain, "truncate": c.rope_truncate}
    if c.mrope:
        rope = {"rope_type": "default", **rope, "mrope_section": list(c.mrope)}
        rope |= {"mrope_interleaved": True} if c.mrope_interleaved else {}
    part = {"partial_rotary_factor": c.rope_share} if c.rope_share != 1 else {}
    return {"rope_theta": c.rope_theta, "rope_scaling": rope or None, **part}
