"""A table of the published models to measure, with toys of the same architecture, and functions that build them."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import transformers as T
from torch import Tensor

from benchmarks.suites.shapes_models import REAL, TOY, Chat, Codes, Config, Latents, Shape
from mmspec.models.mar_head import SHAPES as MAR_SHAPES

# Lines are filled to the limit.
_NO_ENDS: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}


def _rope(theta: float, **more: object) -> dict[str, object]:
    return {"rope_type": "default", "rope_theta": theta, **more}


def _llava(text: Config, vision: Config, dtype: torch.dtype) -> Any:
    tokens: dict[str, Any] = {"image_token_id": text["vocab_size"] - 64}
    config = T.LlavaConfig(
        text_config=T.LlamaConfig(**text, **_NO_ENDS), vision_config=T.CLIPVisionConfig(**vision),
        vision_feature_layer=-2, vision_feature_select_strategy="default", **tokens,
    )  # fmt: skip
    return T.LlavaForConditionalGeneration._from_config(config, dtype=dtype)


def _qwen(config: type, model: type, tied: bool, text: Config, vision: Config, dtype: torch.dtype) -> Any:
    last = text["vocab_size"]
    marks = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    tokens = {name: last - 8 + i for i, name in enumerate(marks)}
    made = config(text_config={**text, **_NO_ENDS}, vision_config=dict(vision), tie_word_embeddings=tied, **tokens)
    return model._from_config(made, dtype=dtype)  # type: ignore[attr-defined]


def _smol(text: Config, vision: Config, dtype: torch.dtype) -> Any:
    tokens: dict[str, Any] = {"image_token_id": text["vocab_size"] - 64}
    shrunk: dict[str, Any] = {"scale_factor": _SHRINK, "pad_token_id": 0, "tie_word_embeddings": False}
    told = {"model_type": "llama", **text, **_NO_ENDS}
    config = T.SmolVLMConfig(text_config=told, vision_config=dict(vision), **shrunk, **tokens)
    return T.SmolVLMForConditionalGeneration._from_config(config, dtype=dtype)


def _one_square(vision: Config, side: int, batch: int) -> tuple[dict[str, Tensor], int]:
    """One tile per row; the connector joins its patches."""
    pixels, count = _square(vision, side, batch)
    return {"pixel_values": pixels["pixel_values"][:, None]}, count // _SHRINK**2


def _square(vision: Config, side: int, batch: int) -> tuple[dict[str, Tensor], int]:
    edge = side * vision["patch_size"]
    return {"pixel_values": torch.randn(batch, 3, edge, edge)}, side**2


def _patches(vision: Config, side: int, batch: int) -> tuple[dict[str, Tensor], int]:
    """Qwen's input: flattened patches, and their grid."""
    pixels = torch.randn(batch * side**2, 3 * vision["temporal_patch_size"] * vision["patch_size"] ** 2)
    grid = torch.tensor([[1, side, side]] * batch)
    return {"pixel_values": pixels, "image_grid_thw": grid}, (side // vision["spatial_merge_size"]) ** 2


_SMALL = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4}
_EYE = {"hidden_size": 32, "intermediate_size": 64}
_QWEN_EYE = {
    "patch_size": 14, "temporal_patch_size": 2, "spatial_merge_size": 2, "window_size": 112, "in_channels": 3,
}  # fmt: skip
_QWEN3_EYE = {"patch_size": 16, "temporal_patch_size": 2, "spatial_merge_size": 2, "in_channels": 3}

_SHRINK = 4  # SmolVLM joins this many patches along a side into one token

MODELS: dict[str, Shape] = {
    "smolvlm-500m": Chat(
        _smol,
        {
            REAL: {
                "vocab_size": 49280, "hidden_size": 960, "intermediate_size": 2560, "num_hidden_layers": 32,
                "num_attention_heads": 15, "num_key_value_heads": 5, "head_dim": 64, "max_position_embeddings": 8192,
                "rms_norm_eps": 1e-5, "rope_parameters": _rope(1e5),
            },
            TOY: {
                **_SMALL, "vocab_size": 512, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 2000,
                "rms_norm_eps": 1e-5, "rope_parameters": _rope(1e5),
            },
        },
        {
            REAL: {
                "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
                "image_size": 512, "patch_size": 16,
            },
            TOY: {**_EYE, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 64, "patch_size": 8},
        },
        _one_square,
        {REAL: 32, TOY: 8},
        {"eagle": {"grouped": True, "depth": 8, "width": 1, "size": 9}},  # none is published; chains are for CPUs
    ),
    "llava-1.5-7b": Chat(
        _llava,
        {
            REAL: {
                "vocab_size": 32064, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
                "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 4096,
                "rms_norm_eps": 1e-5, "rope_parameters": _rope(1e4),
            },
            TOY: {
                **_SMALL, "vocab_size": 512, "num_key_value_heads": 4, "max_position_embeddings": 128,
                "rms_norm_eps": 1e-5, "rope_parameters": _rope(1e4),
            },
        },
        {
            REAL: {
                "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
                "image_size": 336, "patch_size": 14, "projection_dim": 768,
            },
            TOY: {**_EYE, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 56, "patch_size": 14},
        },
        _square,
        {REAL: 24, TOY: 4},
        {"eagle": {}, "vispec": {}, "msd": {}},
    ),
    "qwen2.5-vl-7b": Chat(
        partial(_qwen, T.Qwen2_5_VLConfig, T.Qwen2_5_VLForConditionalGeneration, False),
        {
            REAL: {
                "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
                "num_attention_heads": 28, "num_key_value_heads": 4, "max_position_embeddings": 128000,
                "rms_norm_eps": 1e-6, "rope_parameters": _rope(1e6, mrope_section=[16, 24, 24]),
            },
            TOY: {
                **_SMALL, "vocab_size": 512, "num_key_value_heads": 2, "max_position_embeddings": 2000,
                "rms_norm_eps": 1e-6, "rope_parameters": _rope(1e6, mrope_section=[2, 3, 3]),
            },
        },
        {
            REAL: {
                **_QWEN_EYE, "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16,
                "out_hidden_size": 3584, "fullatt_block_indexes": [7, 15, 23, 31],
            },
            TOY: {**_QWEN_EYE, **_EYE, "depth": 2, "num_heads": 2, "out_hidden_size": 64, "fullatt_block_indexes": [1]},
        },
        _patches,
        {REAL: 48, TOY: 8},
        {
            "eagle": {"qkv_bias": True},
            "vispec": {"qkv_bias": True},
            "msd": {"qkv_bias": True, "input_norm": True, "grouped": True},  # published for Qwen2-VL-7B: the same text
        },
        axes=True,
    ),
    "qwen3.5-4b": Chat(
        partial(_qwen, T.Qwen3_5Config, T.Qwen3_5ForConditionalGeneration, True),
        {
            REAL: {
                "vocab_size": 248320, "hidden_size": 2560, "intermediate_size": 9216, "num_hidden_layers": 32,
                "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256, "full_attention_interval": 4,
                "linear_num_key_heads": 16, "linear_num_value_heads": 32, "max_position_embeddings": 262144,
                "rms_norm_eps": 1e-6,
                "rope_parameters": _rope(1e7, mrope_section=[11, 11, 10], partial_rotary_factor=0.25),
            },
            TOY: {
                **_SMALL, "vocab_size": 512, "num_hidden_layers": 4, "num_key_value_heads": 2, "head_dim": 16,
                "full_attention_interval": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
                "linear_key_head_dim": 8, "linear_value_head_dim": 8, "max_position_embeddings": 2000,
                "rms_norm_eps": 1e-6, "rope_parameters": _rope(1e7, mrope_section=[2, 1, 1], partial_rotary_factor=0.5),
            },
        },
        {
            REAL: {**_QWEN3_EYE, "depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16,
                   "out_hidden_size": 2560},
            TOY: {**_QWEN3_EYE, **_EYE, "depth": 2, "num_heads": 2, "out_hidden_size": 64},
        },
        _patches,
        {REAL: 48, TOY: 8},
        {"mtp": {}},
        axes=True,
    ),
    "llamagen-xl": Codes(
        {
            REAL: {"dim": 1280, "num_layers": 36, "heads": 20, "vocab": 16384, "grid": 16, "prefix": 120,
                   "caption_width": 2048},
            TOY: {"dim": 64, "num_layers": 2, "heads": 4, "vocab": 512, "grid": 8, "prefix": 12, "caption_width": 32,
                  "multiple_of": 16},
        }
    ),
    "mar-h": Latents(
        {
            REAL: {**MAR_SHAPES["huge"], "grid": 16, "buffer": 64},
            TOY: {"dim": 64, "layers": 2, "heads": 4, "head_layers": 3, "head_width": 64, "grid": 16, "buffer": 8},
        },
        {
            REAL: {**MAR_SHAPES["base"], "grid": 16, "buffer": 64},
            TOY: {"dim": 32, "layers": 1, "heads": 2, "head_layers": 2, "head_width": 32, "grid": 16, "buffer": 8},
        },
        {REAL: 100, TOY: 10},
    ),
}  # fmt: skip
