"""Loads MAR's published files: the authors' .pth or the safetensors of mirrors, and the LDM-style VAE."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from diffusers import AutoencoderKL
from torch import Tensor

from mmspec.models.mar import MARTransformer2DModel
from mmspec.models.mar_scheduler import MARScheduler
from mmspec.pipelines.drawing.weight_files import count, filled, need, tensors_in
from mmspec.pipelines.mar.pipeline import MARPipeline

OF = "MAR"
CONTAINERS = ("model_ema", "model", "state_dict")  # the first found is used, so averaged weights if possible
HEADS = {768: 12, 1024: 16, 1280: 16}  # dim of the published variants → heads
SCALE = 0.2325  # of the published VAE's latents
GROUPS = 32  # of its group norms
STRAY = ("loss.",)  # networks that were only used in the VAE's training
_LDM = (  # LDM's names → diffusers'; the decoder counts its levels the other way round, see `_diffusers`
    (r"\.mid\.block_1\.", ".mid_block.resnets.0."),
    (r"\.mid\.block_2\.", ".mid_block.resnets.1."),
    (r"\.mid\.attn_1\.", ".mid_block.attentions.0."),
    (r"\.down\.(\d+)\.block\.", r".down_blocks.\1.resnets."),
    (r"\.down\.(\d+)\.attn\.", r".down_blocks.\1.attentions."),
    (r"\.down\.(\d+)\.downsample\.", r".down_blocks.\1.downsamplers.0."),
    (r"\.up\.(\d+)\.block\.", r".up_blocks.\1.resnets."),
    (r"\.up\.(\d+)\.upsample\.", r".up_blocks.\1.upsamplers.0."),
    (r"\.nin_shortcut\.", ".conv_shortcut."),
    (r"\.norm_out\.", ".conv_norm_out."),
)
_ATTENTION = (("norm", "group_norm"), ("q", "to_q"), ("k", "to_k"), ("v", "to_v"), ("proj_out", "to_out.0"))


def pipeline(
    path: str | Path, vae_path: str | Path, heads: int | None = None, allow_pickle: bool = False
) -> MARPipeline:
    """A pipeline from MAR's published files.

    Args:
        path, vae_path: the files of the transformer and of the VAE; see `read`.
        heads: see `transformer`.
    """
    return MARPipeline(transformer(read(path, allow_pickle), heads), MARScheduler(), vae(read(vae_path, allow_pickle)))


def read(path: str | Path, allow_pickle: bool = False) -> dict[str, Tensor]:
    """The tensors of a .pth, .ckpt or .safetensors file, or of a folder: the averaged weights if there are any."""
    path = Path(path).expanduser()
    if not path.exists():
        raise FileNotFoundError(f"there is no file or folder {path}")
    content = tensors_in(path, CONTAINERS, OF + " or of its VAE", allow_pickle)
    return {key.removeprefix("module."): tensor for key, tensor in content.items()}


def transformer(tensors: Mapping[str, Tensor], heads: int | None = None) -> MARTransformer2DModel:
    """The transformer with these weights, in their dtypes; its sizes are inferred from them.

    Args:
        tensors: with the authors' names.
        heads: attention heads; None: those of the published variant of this width.

    Raises:
        ValueError: a missing or unexpected tensor, a wrong shape, or a size that cannot be inferred.
    """
    need(
        tensors, OF, "mask_token", "class_emb.weight", "z_proj.weight", "encoder_pos_embed_learned",
        "diffusion_pos_embed_learned", "diffloss.net.cond_embed.weight",
    )  # fmt: skip
    dim, L = tensors["mask_token"].shape[-1], tensors["diffusion_pos_embed_learned"].shape[1]
    heads = heads or HEADS.get(dim)
    if heads is None:
        raise ValueError(
            f"a transformer of width {dim} is none of the published ones ({', '.join(map(str, HEADS))}); pass its "
            "number of attention heads: heads=… (CLI: --heads)"
        )
    config = {
        "dim": dim, "heads": heads, "layers": count(tensors, r"encoder_blocks\.(\d+)\."), "grid": math.isqrt(L),
        "head_layers": count(tensors, r"diffloss\.net\.res_blocks\.(\d+)\."),
        "head_width": tensors["diffloss.net.cond_embed.weight"].shape[0],
        "channels": tensors["z_proj.weight"].shape[1], "classes": tensors["class_emb.weight"].shape[0],
        "buffer": tensors["encoder_pos_embed_learned"].shape[1] - L,
    }  # fmt: skip
    return filled(MARTransformer2DModel, config, dict(tensors))


def vae(tensors: Mapping[str, Tensor], scale: float = SCALE) -> AutoencoderKL:
    """The VAE with these weights, with LDM's names; its sizes are inferred from them.

    Args:
        scale: the factor that gives its latents unit variance.
    """
    tensors = {key: t for key, t in tensors.items() if not key.startswith(STRAY)}
    levels = count(tensors, r"encoder\.down\.(\d+)\.")
    need(tensors, OF, "post_quant_conv.weight", *(f"encoder.down.{i}.block.0.conv2.weight" for i in range(levels)))
    channels = [tensors[f"encoder.down.{i}.block.0.conv2.weight"].shape[0] for i in range(levels)]
    config = _vae_config(
        channels, tensors["post_quant_conv.weight"].shape[0], min(GROUPS, *channels), 16 * 2 ** (levels - 1),
        count(tensors, r"encoder\.down\.0\.block\.(\d+)\."), f"encoder.down.{levels - 1}.attn.0.q.weight" in tensors,
        scale,
    )  # fmt: skip
    return filled(AutoencoderKL, config, _diffusers(tensors, levels))


def _diffusers(tensors: Mapping[str, Tensor], levels: int) -> dict[str, Tensor]:
    """Rename tensors to diffusers' names, and flatten the attention's 1x1 convolutions to matrices."""
    named: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        for pattern, name in _LDM:
            key = re.sub(pattern, name, key)
        key = re.sub(r"\.up_blocks\.(\d+)\.", lambda match: f".up_blocks.{levels - 1 - int(match[1])}.", key)
        if ".attentions." in key:
            stem, _, part = key.rpartition(".attentions.")
            number, layer, kind = part.split(".")
            key = f"{stem}.attentions.{number}.{dict(_ATTENTION).get(layer, layer)}.{kind}"
            tensor = tensor.flatten(1) if tensor.ndim == 4 else tensor
        named[key] = tensor
    return named


def build_vae(
    channels: Sequence[int], latent: int, groups: int, side: int, layers: int = 1, attention: bool = False,
    scaling_factor: float = 1.0,
) -> AutoencoderKL:  # fmt: skip
    """An AutoencoderKL with random weights, and one level per entry of `channels`."""
    return AutoencoderKL(**_vae_config(channels, latent, groups, side, layers, attention, scaling_factor))


def _vae_config(
    channels: Sequence[int], latent: int, groups: int, side: int, layers: int, attention: bool, scaling_factor: float
) -> dict[str, object]:
    down = ["DownEncoderBlock2D"] * len(channels)
    if attention:
        down[-1] = "AttnDownEncoderBlock2D"
    return {
        "down_block_types": tuple(down), "up_block_types": ("UpDecoderBlock2D",) * len(channels),
        "block_out_channels": tuple(channels), "layers_per_block": layers, "latent_channels": latent,
        "norm_num_groups": groups, "sample_size": side, "scaling_factor": scaling_factor,
    }  # fmt: skip
