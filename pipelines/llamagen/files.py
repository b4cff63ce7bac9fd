"""Loads LlamaGen's published files: the authors' .pt, or those of LANTERN's repositories with Llama-like names."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from mmspec.models.llamagen import LlamaGenTransformer
from mmspec.models.llamagen_vq import LlamaGenVQ
from mmspec.pipelines.drawing.weight_files import count, filled, need, tensors_in
from mmspec.pipelines.host.loading import encoder_and_tokenizer
from mmspec.pipelines.llamagen.pipeline import LlamaGenPipeline

OF = "LlamaGen"
CONTAINERS = ("model", "module", "state_dict")  # keys of DDP, DeepSpeed, others; FSDP files have none
HEADS = {  # (dim, layers) of the published variants → heads
    (768, 12): 12, (1024, 24): 16, (1280, 36): 20, (1536, 48): 24, (2560, 48): 40,
    (2048, 22): 32, (3200, 24): 32, (4096, 32): 32,
}  # fmt: skip
STRAY = ("freqs_cis", "quantize.codebook_used")  # tables and counters, which are not weights
_WRAPPERS = ("module.", "_orig_mod.")
_LLAMA = (  # Llama-like name → the authors'; q, k and v are fused afterwards
    (r"^model\.(cls_embedding|layers|norm)\.", r"\1."),
    (r"^model\.embed_tokens\.", "tok_embeddings."),
    (r"^lm_head\.", "output."),
    (r"\.self_attn\.o_proj\.", ".attention.wo."),
    (r"\.self_attn\.", ".attention."),
    (r"\.mlp\.gate_proj\.", ".feed_forward.w1."),
    (r"\.mlp\.up_proj\.", ".feed_forward.w3."),
    (r"\.mlp\.down_proj\.", ".feed_forward.w2."),
    (r"\.input_layernorm\.", ".attention_norm."),
    (r"\.post_attention_layernorm\.", ".ffn_norm."),
)


def pipeline(
    path: str | Path, vq_path: str | Path, text_encoder: str | None = None, image_size: int | None = None,
    heads: int | None = None, allow_pickle: bool = False,
) -> LlamaGenPipeline:  # fmt: skip
    """A pipeline from LlamaGen's published files.

    Args:
        path, vq_path: the files of the transformer and of the VQ tokenizer; see `read`.
        text_encoder: T5 for a text-conditional model, a folder or a name on the hub; None: no text encoder.
        image_size: pixels along a side; None: read it from the file, if possible.
        heads: see `transformer`.
    """
    codes = vq(read(vq_path, allow_pickle))
    if image_size is not None and (image_size < 1 or image_size % codes.downsample):
        raise ValueError(
            f"image_size must be a multiple of the tokenizer's {codes.downsample} pixels; got {image_size}"
        )
    grid = None if image_size is None else image_size // codes.downsample
    encoder, tokenizer = (None, None) if text_encoder is None else encoder_and_tokenizer(text_encoder)
    return LlamaGenPipeline(transformer(read(path, allow_pickle), grid, heads), codes, encoder, tokenizer)


def read(path: str | Path, allow_pickle: bool = False) -> dict[str, Tensor]:
    """The tensors of a .pt or .safetensors file, or of a folder, without the prefixes of wrappers."""
    tensors = tensors_in(Path(path).expanduser(), CONTAINERS, OF, allow_pickle)
    for wrapper in _WRAPPERS:
        if all(key.startswith(wrapper) for key in tensors):
            tensors = {key.removeprefix(wrapper): t for key, t in tensors.items()}
    return tensors


def transformer(
    tensors: Mapping[str, Tensor], grid: int | None = None, heads: int | None = None
) -> LlamaGenTransformer:
    """The transformer with these weights, in their dtypes; its sizes are inferred from them.

    Args:
        tensors: with the authors' names or Llama-like ones.
        grid: tokens along a side of the image; None: the size of the position table in the file, if it has one.
        heads: attention heads; None: those of the published variant of this size.

    Raises:
        ValueError: a missing or unexpected tensor, a wrong shape, or a size that cannot be inferred.
    """
    tensors = _authors(tensors)
    positions = tensors.get("freqs_cis")
    tensors = {key: t for key, t in tensors.items() if key not in STRAY}
    config = _sizes(tensors, heads)
    if grid is None and positions is not None:
        grid = math.isqrt(positions.shape[0] - config["prefix"])
    if grid is None:
        raise ValueError(
            "the file does not say how large its pictures are; pass image_size (CLI: --image-size), such as 256 for "
            "t2i_XL_stage1_256.pt"
        )
    return filled(LlamaGenTransformer, {**config, "grid": grid}, tensors)


def vq(tensors: Mapping[str, Tensor]) -> LlamaGenVQ:
    """The VQ tokenizer with these weights; its sizes are inferred from them."""
    tensors = {key: t for key, t in tensors.items() if key not in STRAY}
    need(tensors, OF, "quantize.embedding.weight", "encoder.conv_in.weight", "encoder.conv_out.weight")
    base = tensors["encoder.conv_in.weight"].shape[0]
    levels = count(tensors, r"encoder\.conv_blocks\.(\d+)\.")
    need(tensors, OF, *(f"encoder.conv_blocks.{i}.res.0.conv2.weight" for i in range(levels)))
    codes, code_dim = tensors["quantize.embedding.weight"].shape
    config = {
        "base": base,
        "multipliers": [tensors[f"encoder.conv_blocks.{i}.res.0.conv2.weight"].shape[0] // base for i in range(levels)],
        "latent": tensors["encoder.conv_out.weight"].shape[0], "codes": codes, "code_dim": code_dim,
        "blocks": count(tensors, r"encoder\.conv_blocks\.0\.res\.(\d+)\."),
    }  # fmt: skip
    return filled(LlamaGenVQ, config, tensors)


def _authors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename tensors to the authors' names, and fuse q, k and v."""
    if not any(key.startswith("model.") for key in tensors):
        return dict(tensors)
    named: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        for pattern, name in _LLAMA:
            key = re.sub(pattern, name, key)
        named[key] = tensor
    for key in [key for key in named if key.endswith(".q_proj.weight")]:
        stem = key.removesuffix("q_proj.weight")
        parts = [f"{stem}{part}_proj.weight" for part in "qkv"]
        need(named, OF, *parts)
        named[f"{stem}wqkv.weight"] = torch.cat([named.pop(part) for part in parts])
    return named


def _sizes(tensors: Mapping[str, Tensor], heads: int | None) -> dict[str, int]:
    """The transformer's configuration inferred from the shapes, except for the image size."""
    first = "layers.0."
    need(tensors, OF, "tok_embeddings.weight", f"{first}attention.wqkv.weight", f"{first}feed_forward.w1.weight")
    vocab, dim = tensors["tok_embeddings.weight"].shape
    layers = count(tensors, r"layers\.(\d+)\.")
    heads = heads or HEADS.get((dim, layers))
    if heads is None:
        sizes = ", ".join(f"{d}x{n}" for d, n in HEADS)
        raise ValueError(
            f"a transformer of width {dim} and {layers} layers is none of the published ones ({sizes}); pass its "
            "number of attention heads: heads=… (CLI: --heads)"
        )
    rows, hidden = (tensors[first + name].shape[0] for name in ("attention.wqkv.weight", "feed_forward.w1.weight"))
    kv_heads, rest = divmod(rows - dim, 2 * (dim // heads))
    if dim % heads or rest or kv_heads < 1:
        raise ValueError(f"{heads} heads do not fit a width of {dim} with {rows} rows of queries, keys and values")
    config = {"dim": dim, "num_layers": layers, "heads": heads, "kv_heads": kv_heads, "vocab": vocab}
    return config | {"multiple_of": _multiple(dim, hidden)} | _condition(tensors)


def _multiple(dim: int, hidden: int) -> int:
    """The number to a multiple of which the inner width 8/3·dim was rounded up."""
    for multiple in (256, 128, 64, 32, 16, 8, 4, 2, 1):
        if -(-int(8 * dim / 3) // multiple) * multiple == hidden:
            return multiple
    raise ValueError(f"an inner width of {hidden} is not LlamaGen's for a width of {dim} (8/3 of it, rounded up)")


def _condition(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    table = tensors.get("cls_embedding.embedding_table.weight")
    if table is not None:  # the last row is the null class
        return {"prefix": 1, "classes": table.shape[0] - 1}
    need(tensors, OF, "cls_embedding.uncond_embedding")
    prefix, width = tensors["cls_embedding.uncond_embedding"].shape
    return {"prefix": prefix, "classes": 0, "caption_width": width}
