"""Checkpoint layouts of block drafters (DFlash, DSpark, DFlash2): of z-lab, DeepSpec, SpecForge and speculators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from reprlib import repr as briefly

from mmspec.checkpoints import llama
from mmspec.checkpoints.files import Json, Settings
from mmspec.checkpoints.layout import Keys, Layout, Published, has, verified
from mmspec.checkpoints.llama import SLIDING, Needs
from mmspec.checkpoints.values import LARGEST, MANY, is_list, part
from mmspec.drafters.block_config import NO_CAP, BlockConfig

_NEEDS: Needs = {
    "projector_type": ((None, "dflash"), "Domino's correction head"),
    "attention_mode": ((None, "gqa", "mha"), "another attention than grouped heads"),
    "attention_modes": ((None,), "another attention than grouped heads"),
    "is_neox_style": ((None, True), "rotary positions on neighbouring dimensions"),
    "shift_label": ((None, False), "rows that predict one token further"),
}
_CODEBOOK, _W1 = "candidate_selector.predecessor_codebook", "markov_head.markov_w1.weight"
_KINDS = ("dflash", "dspark", "dflash2")
_CLASSES = {"dflash": "DFlashDraftModel", "dspark": "DSparkDraftModel", "dflash2": "DFlash2DraftModel"}


def _denoiser(q: str = "q_norm", fc: str = "fc", norm: str = "hidden_norm") -> Keys:
    """The tensors of a block drafter with Qwen3's names; {n} is the number of a layer."""
    at, head, choice = "layers.{n}", "markov_head", "candidate_selector"
    mixed = [f"{at}.{x}_conv.{y}" for x in ("attention", "mlp") for y in ("base_kernel", "kernel_projection.weight")]
    attention = {key.replace("block", at): theirs for key, theirs in llama.block(at).items()}
    return {
        "fc.weight": (f"{fc}.weight",),
        "hidden_norm.weight": (f"{norm}.weight",),
        **attention,
        f"{at}.out.bias": (f"{at}.self_attn.o_proj.bias",),
        f"{at}.input_norm.weight": (f"{at}.input_layernorm.weight",),
        f"{at}.q_norm.weight": (f"{at}.self_attn.{q}.weight",),
        f"{at}.k_norm.weight": (f"{at}.self_attn.{'key_layernorm' if q.startswith('query') else 'k_norm'}.weight",),
        **{key: (key,) for key in mixed},
        "out_norm.weight": ("norm.weight",),
        **{f"markov.{w}.weight": (f"{head}.markov_{w}.weight",) for w in ("w1", "w2")},
        **{f"markov.{x}_proj.{y}": (f"{head}.{x}_proj.{y}",) for x in ("gate", "joint") for y in ("weight", "bias")},
        **{f"confidence.proj.{y}": (f"confidence_head.proj.{y}",) for y in ("weight", "bias")},
        **{f"selector.{end}": (f"{choice}.{end}_codebook",) for end in ("predecessor", "successor")},
        "selector.hidden.weight": (f"{choice}.hidden_projection.weight",),
    }


_DFLASH = _denoiser()
_MUSE = {k: v for k, v in _denoiser(fc="encoder.fc", norm="encoder.output_norm_enc").items() if k.startswith(
    ("fc", "hidden_norm", "out_norm", "layers.")) and not k.endswith("bias") and "_conv" not in k}  # fmt: skip
_PARTS = frozenset(
    key for key in _DFLASH if key.endswith("bias") or "_conv." in key or key.startswith(("markov", "conf", "selector"))
)


def _nested(files: Published) -> Settings:
    """The settings with those of `dflash_config` merged into the top level."""
    return {**files.flat, **part(files.flat, "dflash_config")}


def _needs(layout: Layout, files: Published) -> list[str]:
    return llama.needs(files, _KINDS) + llama.needed(_nested(files), _NEEDS)


Causal = Callable[[Json, list[bool]], list[bool]]  # of the settings, and which layers have a window


def _read(
    layout: Layout, files: Published, listed: str = "target_layer_ids", ahead: int = 1, extra: int = 0,
    causal: Causal = lambda flat, sliding: sliding,
) -> Settings:  # fmt: skip
    """The values of a BlockConfig.

    Args:
        listed: name of the list of layers that are read.
        ahead: offset of the list: 1 if it counts layers whose output is read, 0 if it counts inputs.
        extra: added to the windows.
        causal: for each layer, or for all, whether attention within the block is causal.

    Raises:
        ValueError: a setting that is missing or invalid.
    """
    if files.flat.get("vocab_size") is None and "t2d" not in files.shapes:
        files = replace(files, flat={**files.flat, "vocab_size": files.target("vocab")})
    flat, values = _nested(files), llama.read(layout, files)
    H, shapes, features = values["hidden"], files.shapes, flat.get(listed)
    if not is_list(features, 1):
        raise ValueError(f"{listed} in config.json must list up to {MANY} whole numbers ≥ 0; it is {briefly(features)}")
    wide, layers = shapes[layout.fc][1], _whole(files.flat, "num_hidden_layers")
    if wide % len(features):
        raise ValueError(f"fc.weight reads {wide} columns, which are not {len(features)} features of one width")
    own_head = "head.weight" in layout.optional and layout.present(files, "head.weight")
    settings = {
        **values,
        "layers": layers,
        "features": tuple(i + ahead for i in features),
        "target_hidden": 0 if wide == len(features) * H else wide // len(features),
        "block": _whole(flat, "block_size", 16),
        "mask_token": _whole(flat, "mask_token_id", least=0),
        "bias": "layers.0.self_attn.q_proj.bias" in shapes,
        "logit_scale": flat.get("output_multiplier") or 1.0,
        "softcap": flat.get("final_logit_softcapping") or NO_CAP,
        "draft_vocab": shapes["lm_head.weight"][0] if own_head else 0,
        **_heads(flat, files, H),
        **_windows(flat, layers, extra, causal),
        **llama.read_rope(files.flat, False),
    }
    kind = flat.get("speculators_model_type") or ("dspark" if settings["markov_rank"] else "dflash")
    anchored = flat.get("sample_from_anchor")
    return {**settings, "anchored": kind == "dspark" if anchored is None else bool(anchored)}


def _whole(flat: Json, key: str, usual: int | None = None, least: int = 1) -> int:
    value = flat.get(key, usual)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= LARGEST:
        raise ValueError(f"config.json must give {key}, a whole number from {least} on; it gives {briefly(value)}")
    return value


def _heads(flat: Json, files: Published, hidden: int) -> Settings:
    """The settings of the heads and the convolution; if a file lacks their tensors, config.json has the values."""
    shapes = files.shapes
    conf, kernel = shapes.get("confidence_head.proj.weight"), shapes.get("layers.0.attention_conv.base_kernel")
    rank = shapes[_W1][-1] if _W1 in shapes else flat.get("markov_rank") or 0
    taps = kernel[1] if kernel is not None and len(kernel) == 3 else flat.get("conv_kernel_size") or 0
    projection = shapes.get("layers.0.attention_conv.kernel_projection.weight", (0,))[0]
    group = hidden * 2 * taps // projection if projection else flat.get("conv_group_size") or 1
    return {
        "markov_rank": rank, "markov": flat.get("markov_head_type") or "vanilla", "taps": taps, "group": group,
        "confidence": conf is not None or bool(flat.get("enable_confidence_head") and "markov_rank" in flat),
        "confidence_markov": conf[-1] > hidden if conf is not None else bool(flat.get("confidence_head_with_markov")),
        "selector_rank": shapes[_CODEBOOK][-1] if _CODEBOOK in shapes else flat.get("selector_rank") or 0,
        "selector_top": flat.get("selector_top_k") or 16,
    }  # fmt: skip


def _windows(flat: Json, layers: int, extra: int, causal: Causal) -> Settings:
    """The window of each layer, and whether its attention within a block is causal."""
    kinds, window = flat.get("layer_types"), flat.get("sliding_window")
    sliding = [kind == SLIDING for kind in kinds] if isinstance(kinds, list) else [False] * layers
    windows: tuple[int, ...] = (0,)
    if any(sliding):
        if len(sliding) != layers or not isinstance(window, int) or window < 1:
            raise ValueError(
                f"layer_types lists {len(sliding)} layers, sliding ones among them, with sliding_window "
                f"{briefly(window)}; expected one for each of {layers}, and a window of at least 1"
            )
        windows = tuple((window + extra) * one for one in sliding)
    rows = causal(flat, sliding)
    return {"windows": windows, "causal": tuple(map(int, rows)) if any(rows) else (0,)}


def _is_causal(flat: Json, sliding: list[bool]) -> list[bool]:
    """`is_causal` of HunyuanOCR, which has an effect only on layers with windows."""
    whole = flat.get("is_causal")
    return sliding if whole is None or not any(sliding) else [bool(whole)] * len(sliding)


def _or_true(flat: Json, sliding: list[bool]) -> list[bool]:
    """As `_is_causal`; if no layer has a window, only `is_causal: true` makes them causal."""
    return _is_causal(flat, sliding) if any(sliding) else [flat.get("is_causal") is True]


def _read_speculators(layout: Layout, files: Published) -> Settings:
    """In speculators, features are counted by the layers' inputs, and windows begin at the anchor."""

    def causal(flat: Json, sliding: list[bool]) -> list[bool]:
        return [one and not flat.get("sliding_window_non_causal", False) for one in sliding]

    values = _read(layout, files, "aux_hidden_state_layer_ids", 0, causal=causal)
    return {**values, "from_anchor": any(values["windows"])}


# -- writing -----------------------------------------------------------------------------------------------------------


def _layer(c: BlockConfig) -> Settings:
    """The settings of the layers in a Qwen3-like config.json."""
    windows = c.each(c.windows)
    return {
        **llama.write(c, "qwen3"), "attention_bias": c.bias, "sliding_window": max(windows) or None,
        "use_sliding_window": any(windows), "layer_types": [SLIDING if one else "full_attention" for one in windows],
    }  # fmt: skip


def _own(c: BlockConfig) -> Settings:
    """The settings that only block drafters have."""
    own: Settings = {"mask_token_id": c.mask_token}
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
    return own


def _kind(c: BlockConfig) -> str:
    return "dspark" if c.markov_rank else "dflash2" if c.taps or c.selector_rank else "dflash"


def _write(c: BlockConfig) -> Settings:
    own, causal, more = _own(c), sorted({*c.each(c.causal)}), {}
    own |= {"target_layer_ids": [i - 1 for i in c.features], "sample_from_anchor": c.anchored}
    if causal != [0]:
        more["is_causal"] = True if causal == [1] else None
    elif any(c.windows):
        more["is_causal"] = False
    return {
        "architectures": [_CLASSES[_kind(c)]], **_layer(c), **more, "block_size": c.block, "dflash_config": own,
    }  # fmt: skip


def _write_muse(c: BlockConfig) -> Settings:
    layer = {k: v for k, v in _layer(c).items() if k not in ("rope_theta", "rope_scaling", "use_sliding_window")}
    layer["rope_parameters"] = {"rope_type": "default", "rope_theta": c.rope_theta}
    layer["sliding_window"] = max(c.windows) - 1 if any(c.windows) else 2048
    own = {**_own(c), "target_layer_ids": [i - 1 for i in c.features], "block_size": c.block}
    return {"architectures": ["MuseGlimmerAssistantModel"], **layer, "model_type": "muse_glimmer_assistant", **own}


def _write_speculators(c: BlockConfig) -> Settings:
    kind = _kind(c)
    return {
        "architectures": [_CLASSES[kind]], "speculators_model_type": kind,
        "speculators_config": verified(c, kind, c.most), "transformer_layer_config": _layer(c),
        "draft_vocab_size": c.draft_vocab or c.vocab, "target_hidden_size": c.target_hidden or None,
        "aux_hidden_state_layer_ids": list(c.features), "block_size": c.block, "sample_from_anchor": c.anchored,
        "sliding_window_non_causal": not any(c.causal), **_own(c),
    }  # fmt: skip


_PLAIN = {"rope_first": False, "bare_embeds": False}
LAYOUTS = {
    "speculators-block": Layout(
        "DFlash, DSpark and DFlash2, as vLLM's speculators writes them",
        lambda config, keys: config.get("speculators_model_type") in _KINDS, _read_speculators, _write_speculators,
        _needs, method="block", keys={**_DFLASH, "head.weight": ("lm_head.weight",), "head.ids": ("d2t",)},
        optional=_PARTS | {"head.weight", "head.ids"},
        dropped=("embed_tokens.weight", "t2d", "verifier_norm.weight", "verifier_lm_head.weight"), fixed=_PLAIN,
        own_head=None, one_axis=True,
    ),
    "muse-glimmer": Layout(
        "Muse-Glimmer's assistant, a DFlash drafter, as transformers has it", has("encoder.fc."),
        partial(_read, extra=1, causal=lambda flat, sliding: [False] * len(sliding)),  # distances as long as the window
        _write_muse, _needs, method="block", fc="encoder.fc.weight", keys=_MUSE, dropped=(),
        fixed={
            **_PLAIN,
            **dict.fromkeys(("bias", "confidence", "anchored", "from_anchor"), False),
            **dict.fromkeys(("markov_rank", "taps", "selector_rank", "target_hidden"), 0),
            "bare_embeds": True,
            "rope_kind": "default",
        },
        one_axis=True,
    ),
    "hunyuan-dflash": Layout(
        "DFlash, as HunyuanOCR brings it",
        lambda config, keys: "hidden_norm.weight" in keys and any(k.endswith(".query_layernorm.weight") for k in keys),
        partial(_read, causal=_is_causal), _write, _needs, method="block", keys=_denoiser("query_layernorm"),
        optional=_PARTS, dropped=("embed_tokens.weight", "lm_head.weight"),
        fixed={"rope_first": True, "bare_embeds": False, "from_anchor": False}, one_axis=True,
    ),
    "dflash": Layout(
        "DFlash, DSpark and DFlash2, as z-lab, DeepSpec and SpecForge write them",
        lambda config, keys: "hidden_norm.weight" in keys and "fc.weight" in keys, partial(_read, causal=_or_true),
        _write, _needs, method="block", keys=_DFLASH, optional=_PARTS,
        dropped=("embed_tokens.weight", "lm_head.weight"), fixed={**_PLAIN, "from_anchor": False}, one_axis=True,
    ),
}  # fmt: skip
