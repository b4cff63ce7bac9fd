"""MSD's checkpoint layouts: its authors' for LLaVA and Qwen2-VL, and that of NVIDIA's NeMo AutoModel."""

from __future__ import annotations

from collections.abc import Collection

from mmspec.checkpoints import eagle
from mmspec.checkpoints.eagle import BARE, BIASES, FINAL_ONLY, NEMO, NORMED, NORMS
from mmspec.checkpoints.files import Json, Settings
from mmspec.checkpoints.layout import Layout, made_by
from mmspec.drafters.msd import MsdConfig


def _seen(config: Json, keys: Collection[str]) -> bool:
    """The tensors have EAGLE's names, but config.json is the target's: LLaVA's with its mm_* fields, or Qwen2-VL's."""
    kind, authors = config.get("model_type"), any(field.startswith("mm_") for field in config)
    normed = "layers.0.input_layernorm.weight" in keys  # MSD's layer for Qwen2-VL is Qwen2's; EAGLE's has no such norm
    return "fc.weight" in keys and ((kind == "qwen2_vl" and normed) or (kind == "llava" and authors))


def _write(c: MsdConfig) -> Settings:
    """The authors' code chooses the layer by model type: Qwen2-VL's has biases and an input norm, LLaVA's neither."""
    if c.input_norm is not c.qkv_bias:
        raise ValueError("the layout 'msd' has input_norm and qkv_bias both or neither. Use layout 'mmspec'")
    if not c.input_norm:
        return {**eagle.write(c), "architectures": ["LlavaLlamaForCausalLM"], "model_type": "llava"}
    half = (c.head_dim or c.hidden // c.heads) // 2
    sections = [half // 4, (half - half // 4) // 2, half - half // 4 - (half - half // 4) // 2]
    scaling = {"type": "mrope", "mrope_section": sections}  # without effect, since all three positions are equal
    qwen = {"architectures": ["Qwen2VLForConditionalGeneration"], "model_type": "qwen2_vl", "rope_scaling": scaling}
    return {**eagle.write(c), **qwen}


LAYOUTS = {
    "nemo-msd": Layout(
        "MSD, as NVIDIA's NeMo AutoModel writes it", made_by("MultimodalEagleDraftModel"), eagle.read,
        lambda c: eagle.nemo("MultimodalEagleDraftModel", c), eagle.needs, method="msd", keys=NEMO,
        optional=BIASES | NORMS, fixed=FINAL_ONLY, one_axis=True,
    ),
    "msd": Layout(
        "MSD, as its authors write it for LLaVA and Qwen2-VL", _seen, eagle.read, _write, eagle.needs,
        method="msd", keys=NORMED, optional=BIASES | {"input_norm.weight"}, fixed=BARE,
        usual={"depth": 6, "width": 10, "size": 59},  # the defaults of the authors' loader
        one_axis=True,
    ),
}  # fmt: skip
