"""The published layouts of drafters as tables: which tensor is called what, and how a file shows its layout."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from mmspec.types import FINAL

_EAGLE = {  # SafeAILab/EAGLE, EAGLE-1 and -2; layer 0 has no input norm, unless somebody gave it one
    "fc.weight": ("fc.weight",),
    "fc.bias": ("fc.bias",),
    "input_norm.weight": ("layers.0.input_layernorm.weight",),
    "block.qkv.weight": (
        "layers.0.self_attn.q_proj.weight", "layers.0.self_attn.k_proj.weight", "layers.0.self_attn.v_proj.weight",
    ),
    "block.qkv.bias": (
        "layers.0.self_attn.q_proj.bias", "layers.0.self_attn.k_proj.bias", "layers.0.self_attn.v_proj.bias",
    ),
    "block.out.weight": ("layers.0.self_attn.o_proj.weight",),
    "block.mlp_norm.weight": ("layers.0.post_attention_layernorm.weight",),
    "block.gate_up.weight": ("layers.0.mlp.gate_proj.weight", "layers.0.mlp.up_proj.weight"),
    "block.down.weight": ("layers.0.mlp.down_proj.weight",),
}  # fmt: skip
_EAGLE3 = {  # SafeAILab/EAGLE, EAGLE-3; SpecForge writes the same
    "fc.weight": ("fc.weight",),
    "embed_norm.weight": ("midlayer.input_layernorm.weight",),
    "feature_norm.weight": ("midlayer.hidden_norm.weight",),
    "block.qkv.weight": (
        "midlayer.self_attn.q_proj.weight", "midlayer.self_attn.k_proj.weight", "midlayer.self_attn.v_proj.weight",
    ),
    "block.qkv.bias": (
        "midlayer.self_attn.q_proj.bias", "midlayer.self_attn.k_proj.bias", "midlayer.self_attn.v_proj.bias",
    ),
    "block.out.weight": ("midlayer.self_attn.o_proj.weight",),
    "block.mlp_norm.weight": ("midlayer.post_attention_layernorm.weight",),
    "block.gate_up.weight": ("midlayer.mlp.gate_proj.weight", "midlayer.mlp.up_proj.weight"),
    "block.down.weight": ("midlayer.mlp.down_proj.weight",),
    "out_norm.weight": ("norm.weight",),
    "lm_head.weight": ("lm_head.weight",),
    "draft_ids": ("d2t",),  # as an offset: target id = row + d2t[row]
}  # fmt: skip
_SPECULATORS = {  # vllm-project/speculators 0.9, `Eagle3DraftModel`: the layer's name differs, no biases
    ours: tuple(name.replace("midlayer.", "layers.0.") for name in theirs)
    for ours, theirs in _EAGLE3.items()
    if ours != "block.qkv.bias"
}


@dataclass(frozen=True)
class Layout:
    """One way of writing a drafter down.

    Attributes:
        about: one line for people.
        layer: prefix of the decoder layer's tensors.
        keys: our tensor: theirs, stacked along the first axis in this order. What is not listed has our own name.
        optional: our tensors that a file may lack.
        dropped: their tensors that are passed over: copies of the target's, or derived from others.
        fixed: settings that the layout can write no other value of (see EagleConfig).
        own_head: whether it brings an output head; None: either.
    """

    about: str
    layer: str = ""
    keys: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    optional: frozenset[str] = frozenset()
    dropped: tuple[str, ...] = ()
    fixed: Mapping[str, Any] = field(default_factory=dict)
    own_head: bool | None = None

    def theirs(self, ours: str) -> tuple[str, ...]:
        return self.keys.get(ours, (ours,))

    def drops(self, key: str) -> bool:
        return key in self.dropped or (bool(self.keys) and key.endswith("rotary_emb.inv_freq"))


LAYOUTS = {
    "mmspec": Layout("our own: the module's tensors by their names, fused projections"),
    "eagle": Layout(
        "EAGLE-1 and EAGLE-2",
        layer="layers.0",
        keys=_EAGLE,
        optional=frozenset({"fc.bias", "block.qkv.bias", "input_norm.weight"}),
        dropped=("embed_tokens.weight",),
        fixed={"features": (FINAL,), "parallel_norm": False, "embed_norm": False, "out_norm": False, "rope": "1d"},
        own_head=False,
    ),
    "eagle3": Layout(
        "EAGLE-3, as SafeAILab and SpecForge write it",
        layer="midlayer",
        keys=_EAGLE3,
        optional=frozenset({"block.qkv.bias", "draft_ids"}),
        dropped=("embed_tokens.weight", "t2d"),
        fixed={"parallel_norm": True, "norm_residual": False, "input_norm": False, "fc_bias": False, "rope": "1d"},
        own_head=True,
    ),
    "speculators": Layout(
        "EAGLE-3, as vLLM's speculators writes it",
        layer="layers.0",
        keys=_SPECULATORS,
        optional=frozenset({"draft_ids"}),
        dropped=("embed_tokens.weight", "t2d", "verifier_norm.weight", "verifier_lm_head.weight"),
        fixed={"parallel_norm": True, "input_norm": False, "fc_bias": False, "qkv_bias": False, "rope": "1d"},
        own_head=True,
    ),
}

NOT_YET = {  # layouts that are known but have no table above yet: what gave them away
    "vispec": "its keys hold a vision adaptor (imadpt.q or img_adaptor.query)",
    "msd": "its config.json has the model_type of a vision-language model",
}

Seen = Callable[[Mapping[str, Any], Collection[str]], bool]
_SIGNS: tuple[tuple[str, Seen], ...] = (  # the first that fits config.json and the keys
    ("mmspec", lambda config, keys: _marked(config) == "mmspec"),
    ("speculators", lambda config, keys: "speculators_model_type" in config),
    ("vispec", lambda config, keys: any(key.startswith(("imadpt.", "img_adaptor.")) for key in keys)),
    ("eagle3", lambda config, keys: any(key.startswith("midlayer.") for key in keys)),
    ("msd", lambda config, keys: config.get("model_type") in ("llava", "qwen2_vl") and "fc.weight" in keys),
    ("eagle", lambda config, keys: "fc.weight" in keys and any(key.startswith("layers.0.") for key in keys)),
)


def _marked(config: Mapping[str, Any]) -> str | None:
    """The layout that our own writer noted in config.json."""
    marker = config.get("mmspec")
    return marker.get("layout", "mmspec") if isinstance(marker, Mapping) else None


def layout_named(name: str) -> Layout:
    """The table of a layout.

    Raises:
        ValueError: an unknown name; the message lists the known ones.
    """
    if name not in LAYOUTS:
        raise ValueError(f"unknown layout {name!r}; choose from {', '.join(LAYOUTS)}")
    return LAYOUTS[name]


def detect(config: Mapping[str, Any], keys: Collection[str]) -> str:
    """Which layout a file has.

    Args:
        config: config.json as it is.
        keys: the names of the tensors.

    Raises:
        ValueError: none that is known, or one of a method that cannot be loaded yet.
    """
    name = next((name for name, fits in _SIGNS if fits(config, keys)), None)
    if name in NOT_YET:
        raise ValueError(
            f"this is a {name} drafter ({NOT_YET[name]}); the method {name} is not available yet. "
            f"Layouts that can be read: {', '.join(LAYOUTS)}; pass layout= to read it as one of them all the same"
        )
    if name is None:
        shown = ", ".join(sorted(keys)[:6]) or "none"
        raise ValueError(
            f"no known drafter layout fits these tensors ({shown}{', …' if len(keys) > 6 else ''}); "
            f"known: {', '.join(f'{n} ({layout.about})' for n, layout in LAYOUTS.items())}. "
            "If it is one of them, pass layout="
        )
    return name
