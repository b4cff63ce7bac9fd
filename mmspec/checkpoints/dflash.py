"""config.json of block drafters: DFlash, DSpark and DFlash2 as z-lab, SpecForge, speculators and others write them."""

from __future__ import annotations

from collections.abc import Mapping
from reprlib import repr as briefly
from typing import Any

from mmspec.checkpoints import rotary
from mmspec.drafters.block_config import NO_CAP, BlockConfig

Shape = tuple[int, ...]
SLIDING = "sliding_attention"
_NEEDS = {  # setting: (values that our network computes, what any other means)
    "projector_type": ((None, "dflash"), "Domino's correction head"),
    "attention_mode": ((None, "gqa", "mha"), "another attention than grouped heads"),
    "attention_modes": ((None,), "another attention than grouped heads"),
    "is_neox_style": ((None, True), "positions that turn neighbouring dimensions"),
    "shift_label": ((None, False), "rows that foretell one token further"),
}
_CODEBOOK, _W1 = "candidate_selector.predecessor_codebook", "markov_head.markov_w1.weight"


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with those of `dflash_config` laid open."""
    inner = flat.get("dflash_config")
    if inner is not None and not isinstance(inner, Mapping):
        raise ValueError(f"dflash_config in config.json must be an object; it is {briefly(inner)}")
    return {**flat, **(inner or {})}


def needs(flat: Mapping[str, Any]) -> list[str]:
    """Every reason for which our network cannot be that of such a drafter."""
    said = nested(flat)
    return [f"{why} ({k} = {said[k]!r})" for k, (fine, why) in _NEEDS.items() if said.get(k) not in fine]


def settings(name: str, flat: Mapping[str, Any], shapes: Mapping[str, Shape], found: dict[str, Any]) -> dict[str, Any]:
    """The values of a BlockConfig.

    Args:
        name: of the layout.
        flat: config.json, the decoder layer's settings laid open.
        shapes: of the tensors in the file.
        found: what a Llama-like config.json and its tensors say.

    Raises:
        ValueError: a setting that is missing or makes no sense.
    """
    said, H = nested(flat), found["hidden"]
    layers = _whole(flat, "num_hidden_layers")
    features = _features(name, said)
    wide = shapes["encoder.fc.weight" if name == "muse-glimmer" else "fc.weight"][1]
    if wide % len(features):
        raise ValueError(f"fc.weight reads {wide} columns, which are no {len(features)} features of one width")
    made = {
        **found,
        "layers": layers,
        "features": features,
        "target_hidden": 0 if wide == len(features) * H else wide // len(features),
        "block": _whole(said, "block_size", 16),
        "mask_token": _whole(said, "mask_token_id", least=0),
        "bias": "layers.0.self_attn.q_proj.bias" in shapes,
        "rope_first": name == "hunyuan-dflash",
        "bare_embeds": name == "muse-glimmer",
        "logit_scale": said.get("output_multiplier") or 1.0,
        "softcap": said.get("final_logit_softcapping") or NO_CAP,
        "draft_vocab": shapes["lm_head.weight"][0] if name == "speculators-block" and "lm_head.weight" in shapes else 0,
        **_heads(said, shapes, H),
        **_windows(name, said, layers),
        **rotary.read(flat, False),
    }
    kind = said.get("speculators_model_type") or ("dspark" if made["markov_rank"] else "dflash")
    anchored = said.get("sample_from_anchor")
    made["anchored"] = kind == "dspark" if anchored is None else bool(anchored)
    return made


def _whole(said: Mapping[str, Any], key: str, usual: int | None = None, least: int = 1) -> int:
    value = said.get(key, usual)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= 2**24:
        raise ValueError(f"config.json must give {key}, a whole number from {least} on; it gives {briefly(value)}")
    return value


def _features(name: str, said: Mapping[str, Any]) -> tuple[int, ...]:
    """Layers whose input is read. speculators counts these; the others count the layers whose output is."""
    key, ahead = ("aux_hidden_state_layer_ids", 0) if name == "speculators-block" else ("target_layer_ids", 1)
    listed: Any = said.get(key)
    fine = isinstance(listed, list) and 0 < len(listed) <= 64
    if not fine or not all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < 2**24 for i in listed):
        raise ValueError(f"{key} in config.json must list up to 64 whole numbers ≥ 0; it is {briefly(listed)}")
    return tuple(i + ahead for i in listed)


def _heads(said: Mapping[str, Any], shapes: Mapping[str, Shape], hidden: int) -> dict[str, Any]:
    """Of the heads and the convolution; where a file lacks their tensors config.json says what is missing."""
    conf, kernel = shapes.get("confidence_head.proj.weight"), shapes.get("layers.0.attention_conv.base_kernel")
    rank = shapes[_W1][-1] if _W1 in shapes else said.get("markov_rank") or 0
    taps = kernel[1] if kernel is not None and len(kernel) == 3 else said.get("conv_kernel_size") or 0
    projection = shapes.get("layers.0.attention_conv.kernel_projection.weight", (0,))[0]
    group = hidden * 2 * taps // projection if projection else said.get("conv_group_size") or 1
    return {
        "markov_rank": rank,
        "markov": said.get("markov_head_type") or "vanilla",
        "confidence": conf is not None or bool(said.get("enable_confidence_head") and "markov_rank" in said),
        "confidence_markov": conf[-1] > hidden if conf is not None else bool(said.get("confidence_head_with_markov")),
        "taps": taps,
        "group": group,
        "selector_rank": shapes[_CODEBOOK][-1] if _CODEBOOK in shapes else said.get("selector_rank") or 0,
        "selector_top": said.get("selector_top_k") or 16,
    }


def _windows(name: str, said: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """How far each layer sees, and whether rows of a block see those after them."""
    kinds: Any = said.get("layer_types")
    window: Any = said.get("sliding_window")
    sliding = [kind == SLIDING for kind in kinds] if isinstance(kinds, list) else [False] * layers
    if any(sliding) and (len(sliding) != layers or not isinstance(window, int) or window < 1):
        raise ValueError(
            f"layer_types lists {len(sliding)} layers, sliding ones among them, with sliding_window {briefly(window)}; "
            f"expected one for each of {layers}, and a window of at least 1"
        )
    if not any(sliding):
        causal = [said.get("is_causal") is True and name == "dflash"]
        return {"windows": (0,), "causal": tuple(map(int, causal))}
    extra = name == "muse-glimmer"  # its distances may be as long as the window
    if name == "speculators-block":
        causal = [one and not said.get("sliding_window_non_causal", False) for one in sliding]
    elif extra:
        causal = [False] * layers
    else:
        whole = said.get("is_causal")
        causal = sliding if whole is None else [bool(whole)] * layers
    windows = tuple((window + extra) * one for one in sliding)
    return {"windows": windows, "causal": tuple(map(int, causal)), "from_anchor": name == "speculators-block"}


# -- and back ----------------------------------------------------------------------------------------------------------


def describe(name: str, c: BlockConfig) -> dict[str, Any]:
    """config.json of a block drafter in a layout."""
    kinds = {"layer_types": [SLIDING if one else "full_attention" for one in _per_layer(c.windows, c.layers)]}
    largest = max(c.windows)
    window = (largest - (name == "muse-glimmer")) if largest else None
    llama = {
        "model_type": "qwen3", "hidden_act": "silu", "num_hidden_layers": c.layers, "vocab_size": c.vocab,
        "hidden_size": c.hidden, "intermediate_size": c.intermediate, "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads, "head_dim": c.head_dim or c.hidden // c.heads, "rms_norm_eps": c.norm_eps,
        **rotary.describe(c), "max_position_embeddings": 131072, "attention_bias": c.bias, "sliding_window": window,
        "use_sliding_window": bool(largest), **kinds, "tie_word_embeddings": False,
    }  # fmt: skip
    own: dict[str, Any] = {"mask_token_id": c.mask_token}
    if c.markov_rank:
        own |= {"markov_rank": c.markov_rank, "markov_head_type": c.markov}
        own |= {"enable_confidence_head": c.confidence, "confidence_head_with_markov": c.confidence_markov}
    if c.taps:
        own |= {"conv_kernel_size": c.taps, "conv_group_size": c.group}
    if c.selector_rank:
        own |= {"selector_rank": c.selector_rank, "selector_top_k": c.selector_top}
    if c.logit_scale != 1:
        own["output_multiplier"] = c.logit_scale
    if c.softcap < NO_CAP:
        own["final_logit_softcapping"] = c.softcap
    if name == "speculators-block":
        return _speculators(c, llama, own)
    own["target_layer_ids"] = [i - 1 for i in c.features]
    if name == "muse-glimmer":
        theta = {"rope_type": "default", "rope_theta": c.rope_theta}
        llama = {k: v for k, v in llama.items() if k not in ("rope_theta", "rope_scaling", "use_sliding_window")}
        llama |= {"model_type": "muse_glimmer_assistant", "rope_parameters": theta, "sliding_window": window or 2048}
        return {"architectures": ["MuseGlimmerAssistantModel"], **llama, **own, "block_size": c.block}
    kind = "DFlash2DraftModel" if c.taps or c.selector_rank else "DFlashDraftModel"
    causal = sorted({*_per_layer(c.causal, c.layers)})
    if causal != [0]:
        llama["is_causal"] = True if causal == [1] else None
    elif largest:
        llama["is_causal"] = False
    own["sample_from_anchor"] = c.anchored
    return {
        "architectures": ["DSparkDraftModel" if c.markov_rank else kind], **llama, "block_size": c.block,
        "dflash_config": own,
    }  # fmt: skip


def _per_layer(said: tuple[int, ...], layers: int) -> tuple[int, ...]:
    return said if len(said) == layers else said * layers


def _speculators(c: BlockConfig, llama: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    kind = "dspark" if c.markov_rank else "dflash2" if c.taps or c.selector_rank else "dflash"
    greedy = {"proposal_type": "greedy", "speculative_tokens": c.most, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    return {
        "architectures": [{"dspark": "DSparkDraftModel", "dflash2": "DFlash2DraftModel"}.get(kind, "DFlashDraftModel")],
        "speculators_model_type": kind,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [greedy],
            "verifier": {"name_or_path": c.target or None, "architectures": []},
        },
        "transformer_layer_config": llama,
        "draft_vocab_size": c.draft_vocab or c.vocab,
        "target_hidden_size": c.target_hidden or None,
        "aux_hidden_state_layer_ids": list(c.features),
        "block_size": c.block,
        "sample_from_anchor": c.anchored,
        "sliding_window_non_causal": not any(c.causal),
        **own,
    }
