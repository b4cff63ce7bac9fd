"""Checkpoint layouts of EAGLE-1 and -2: those of SafeAILab, NVIDIA's NeMo AutoModel, and FLASH's trainer."""

from __future__ import annotations

from mmspec.checkpoints import llama
from mmspec.checkpoints.files import Settings
from mmspec.checkpoints.layout import Keys, Layout, Published, has, made_by
from mmspec.checkpoints.llama import Needs
from mmspec.drafters.eagle import EagleConfig
from mmspec.types import FINAL

PLAIN: Keys = {"fc.weight": ("fc.weight",), "fc.bias": ("fc.bias",), **llama.block("layers.0")}
# EAGLE's layer 0 has no input norm, but other drafters with the same names may have one.
NORMED: Keys = {**PLAIN, "input_norm.weight": ("layers.0.input_layernorm.weight",)}
NEMO: Keys = {**NORMED, "out_norm.weight": ("norm.weight",)}
BIASES = frozenset({"fc.bias", "block.qkv.bias"})
NORMS = frozenset({"input_norm.weight", "out_norm.weight"})
FINAL_ONLY = {"features": (FINAL,), "parallel_norm": False, "norm_residual": False, "embed_norm": False, "rope": "1d"}
BARE = {**FINAL_ONLY, "out_norm": False, "head_dim": 0}
_SWITCHES = {  # flag: the tensor whose presence sets it, in layouts where that tensor is optional
    "fc_bias": "fc.bias",
    "qkv_bias": "block.qkv.bias",
    "input_norm": "input_norm.weight",
    "out_norm": "out_norm.weight",
    "fc_norm": "fc_norm.0.weight",
    "norm_before_fc": "fused_norm.weight",
    "parallel": "mask_hidden",
}
_LATER: Needs = {  # settings that EAGLE-3 or later versions added
    "num_hidden_layers": ((None, 1), "more than one decoder layer"),
    "norm_before_fc": ((None, False), "a norm of the target's features before fc"),
    "fc_norm": ((None, False), "a norm of each of the target's features before fc"),
    "norm_output": ((None, False), "output features that are normed before they are fed back"),
}
_LATER_KEYS = {  # part of a key: its meaning
    "layers.1.": "more than one decoder layer",
    "fc_norm.": "a norm of each of the target's features before fc",
}
_QWEN_KEYS = {  # keys that block drafters have
    "q_norm.weight": "norms of the queries and keys",
    "o_proj.bias": "a bias of the attention's output projection",
}
_LANTERN = ("caption_dim", "input_type")  # in config.json


def switches(layout: Layout, files: Published) -> dict[str, bool]:
    """The flags that follow from the presence of optional tensors."""
    return {key: layout.present(files, ours) for key, ours in _SWITCHES.items() if ours in layout.optional}


def read(layout: Layout, files: Published) -> Settings:
    """The settings of a drafter that reads the target's final feature."""
    values = {**switches(layout, files), **llama.read(layout, files), **llama.read_rope(files.flat, False)}
    wide = files.shapes[layout.fc][1] - values["hidden"]
    return {**values, "target_hidden": 0 if wide == values["hidden"] else max(wide, 0)}


def layer(c: EagleConfig) -> Settings:
    return {**llama.write(c), "mlp_bias": False}


def write(c: EagleConfig) -> Settings:
    return {"architectures": ["LlamaForCausalLM"], **layer(c), "bias": c.fc_bias, "qkv_bias": c.qkv_bias}


def nemo(architecture: str, c: EagleConfig) -> Settings:
    """config.json as NeMo writes it."""
    return {
        "architectures": [architecture], **layer(c), "draft_num_hidden_layers": 1,
        "fc_bias": c.fc_bias, "qkv_bias": c.qkv_bias,
        "draft_skip_first_input_norm": not c.input_norm, "draft_apply_final_norm": c.out_norm,
    }  # fmt: skip


def alike(files: Published, keys: dict[str, str] | None = None) -> list[str]:
    """What no layer of EAGLE's kind here computes, and what the parts `keys` of tensors' names mean."""
    reasons = llama.needs(files, ("eagle3", "peagle"))
    wanted = {**_QWEN_KEYS, **(keys or {})}
    reasons += [f"{why} ({part}*)" for part, why in wanted.items() if any(part in key for key in files.shapes)]
    kinds = files.flat.get("layer_types")
    sliding = isinstance(kinds, list) and llama.SLIDING in kinds
    return [*reasons, "attention within a sliding window"] if sliding else reasons


def needs(layout: Layout, files: Published) -> list[str]:
    return llama.needed(files.flat, _LATER) + alike(files, _LATER_KEYS)


def _needs(layout: Layout, files: Published) -> list[str]:
    reasons, lantern = needs(layout, files), [key for key in _LANTERN if key in files.config]
    if lantern:
        reasons.append(
            f"the network of LANTERN's drafters for LlamaGen ({', '.join(lantern)}): positions by row and column in "
            "interleaved pairs, and its own embeddings, with a single one before the picture"
        )
    return reasons


BY_NEMO = Layout(
    "EAGLE-1 and -2, as NVIDIA's NeMo AutoModel writes them", made_by("LlamaEagleDraftModel"), read,
    lambda c: nemo("LlamaEagleDraftModel", c), needs, keys=NEMO, optional=BIASES | NORMS, fixed=FINAL_ONLY,
    one_axis=True,
)  # fmt: skip
BY_AUTHORS = Layout(
    "EAGLE-1 and -2, as SafeAILab writes them; the drafters that FLASH trains",
    lambda config, keys: "fc.weight" in keys and has("layers.0.")(config, keys), read, write, _needs, keys=NORMED,
    optional=BIASES | {"input_norm.weight"}, fixed=BARE,
    usual={"depth": 6, "width": 8, "size": 63},  # the authors' tree, if a file names none
)  # fmt: skip
