"""Checkpoint layouts of EAGLE-3, P-EAGLE and EAGLE-3.1: those of SafeAILab, SpecForge and vLLM's speculators."""

from __future__ import annotations

from reprlib import repr as briefly

from mmspec.checkpoints import eagle, llama
from mmspec.checkpoints.files import Json, Settings
from mmspec.checkpoints.layout import Keys, Layout, Published, has, verified
from mmspec.checkpoints.values import MANY, is_list, part
from mmspec.drafters.eagle import EagleConfig

_MOST_FEATURES = 8  # largest number of features, if each has its own norm
_EAGLE3: Keys = {
    "fc.weight": ("fc.weight",),
    "embed_norm.weight": ("midlayer.input_layernorm.weight",),
    "feature_norm.weight": ("midlayer.hidden_norm.weight",),
    **llama.block("midlayer"),
    "out_norm.weight": ("norm.weight",),
    "head.weight": ("lm_head.weight",),
    "head.ids": ("d2t",),  # stored as offsets: target id = row + d2t[row]
    **{f"fc_norm.{i}.weight": (f"fc_norm.{i}.weight",) for i in range(_MOST_FEATURES)},  # EAGLE-3.1
    "fused_norm.weight": ("input_norm.weight",),  # as for gpt-oss
}
_SPECULATORS: Keys = {  # the layer's name differs, and there are no biases
    ours: tuple(name.replace("midlayer.", "layers.0.") for name in theirs)
    for ours, theirs in _EAGLE3.items()
    if ours != "block.qkv.bias"
} | {
    "mask_hidden": ("mask_hidden",),  # P-EAGLE
    "more.{m}.input_norm.weight": ("layers.{m}.input_layernorm.weight",),
    **{f"more.{{m}}.{k}": theirs for k, theirs in llama.block("layers.{m}").items() if not k.endswith("bias")},
}
_NORMED = frozenset({"fused_norm.weight", *(f"fc_norm.{i}.weight" for i in range(_MOST_FEATURES))})
_THREE = {"parallel_norm": True, "input_norm": False, "fc_bias": False, "rope": "1d"}
_LISTED = "eagle_aux_hidden_state_layer_ids"


def _read(layout: Layout, files: Published) -> Settings:
    flat = files.flat
    values = {**eagle.switches(layout, files), **llama.read(layout, files), **llama.read_rope(flat, True)}
    for name in ("fc_norm", "norm_before_fc"):  # so that a tensor which only config.json mentions counts as missing
        values[name] = values.get(name) or bool(flat.get(name))
    values |= {"layers": llama.layers(flat), "norm_output": bool(flat.get("norm_output"))}
    values["draft_vocab"] = (*files.shapes["lm_head.weight"], 0)[0]
    values["norm_residual"] = bool(flat.get("norm_before_residual"))
    if values.get("parallel") or flat.get("speculators_model_type") == "peagle":
        values |= {"parallel": True, "mask_token": flat.get("mask_token_id", flat.get("ptd_token_id"))}
    features = _listed(files.config) or _default(files.target("layers"))
    if len(features) < 2:
        raise ValueError(f"an EAGLE-3 drafter reads two layers or more of its target; it lists {features}")
    wide = files.shapes[layout.fc][1] // len(features)
    return {**values, "features": features, "target_hidden": 0 if wide == values["hidden"] else wide}


def _listed(config: Json) -> tuple[int, ...]:
    """The layers whose input is read. Published files count them in two ways, see sgl-project/sglang#25454."""
    listed, nested = config.get(_LISTED), part(config, "eagle_config").get(_LISTED)
    for value in filter(None, (listed, nested)):
        if not is_list(value):
            raise ValueError(
                f"{_LISTED} in config.json must list up to {MANY} whole numbers ≥ 0; it is {briefly(value)}"
            )
    if not listed and nested:
        listed = [i + 1 for i in nested] if nested[0] == 1 else nested  # a list that begins with 1 counts outputs
    return tuple(listed or ())


def _default(layers: int | None) -> tuple[int, ...]:
    if layers is None:
        raise ValueError(
            "the file does not list the layers of the target that it reads, and the default depends on the target's "
            "number of layers; pass target=, the model or its name or folder (`mmspec convert`: --target)"
        )
    if layers < 4:
        raise ValueError(
            f"EAGLE-3 reads layers 2, L//2 and L−3 of its target; a target of {layers} layers is too small"
        )
    return 2, layers // 2, layers - 3


def _needs(layout: Layout, files: Published) -> list[str]:
    reasons, layers = eagle.alike(files), llama.layers(files.flat)
    several = layout.layer == "midlayer" and layers > 1
    return (
        [*reasons, f"more than one layer under the name midlayer (num_hidden_layers = {layers})"]
        if several
        else reasons
    )


def _later(c: EagleConfig) -> Settings:
    """The flags that were added after EAGLE-3, if they are set."""
    names = ("fc_norm", "norm_before_fc", "norm_output")
    return {name: True for name in names if getattr(c, name)}


def _write(c: EagleConfig) -> Settings:
    own = {"target_hidden_size": c.target_hidden} if c.target_hidden else {}
    return {
        "architectures": ["LlamaForCausalLMEagle3"], **eagle.layer(c), "qkv_bias": c.qkv_bias,
        **own, **_later(c), "draft_vocab_size": c.draft_vocab, _LISTED: list(c.features),
    }  # fmt: skip


def _write_speculators(c: EagleConfig) -> Settings:
    return {
        "architectures": ["Eagle3DraftModel"], "speculators_model_type": "peagle" if c.parallel else "eagle3",
        "speculators_config": verified(c, "eagle3", c.shape.depth), "transformer_layer_config": eagle.layer(c),
        "draft_vocab_size": c.draft_vocab, "target_hidden_size": c.target_hidden or None, _LISTED: list(c.features),
        "norm_before_residual": c.norm_residual, "norm_before_fc": False, **_later(c),
        **({"mask_token_id": c.mask_token} if c.parallel else {}), "embed_requires_grad": False,
        "tie_word_embeddings": False,
    }  # fmt: skip


LAYOUTS = {
    "speculators": Layout(
        "EAGLE-3, as vLLM's speculators writes it", lambda config, keys: "speculators_model_type" in config, _read,
        _write_speculators, _needs, keys=_SPECULATORS, optional=_NORMED | {"head.ids", "mask_hidden"},
        dropped=("embed_tokens.weight", "t2d", "verifier_norm.weight", "verifier_lm_head.weight"),
        fixed={**_THREE, "qkv_bias": False}, own_head=True,
    ),
    "eagle3": Layout(
        "EAGLE-3, as SafeAILab and SpecForge write it", has("midlayer."), _read, _write, _needs, layer="midlayer",
        keys=_EAGLE3, optional=_NORMED | {"block.qkv.bias", "head.ids"}, dropped=("embed_tokens.weight", "t2d"),
        fixed={**_THREE, "norm_residual": False}, own_head=True,
    ),
}  # fmt: skip
