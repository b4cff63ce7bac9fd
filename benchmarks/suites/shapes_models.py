"""Published models whose rounds are measured, with toys of the same architecture, their drafters and prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers as T
from torch import Tensor, nn

from mmspec.checkpoints.layouts import LAYOUTS
from mmspec.drafters.eagle import EagleDrafter
from mmspec.pipelines.drafters.mtp import MtpDrafter
from mmspec.registry import drafter_class

REAL, TOY = "real", "toy"
Config = Mapping[str, Any]  # arguments of one, by name
Sizes = Mapping[str, Config]  # by REAL and TOY
CONTEXTS = {REAL: (1024, 4096, 16384), TOY: (64, 128, 256)}  # of vision-language models, up to their maximum length

# The trees that the authors drafted with; EAGLE's is EAGLE-2's for targets of 7B (Li et al. 2024, §4).
TREES: dict[str, Config] = {
    "vispec": LAYOUTS["vispec"].usual,
    "msd": LAYOUTS["msd"].usual,
    "eagle": {"depth": 6, "width": 10, "size": 60},
}


@dataclass(frozen=True)
class Chat:
    """A vision-language model of transformers with one picture in its prompts, and its drafters.

    Attributes:
        build: a model of given shapes of text and vision, in a dtype, on the current device.
        text, vision: arguments of the two configs.
        picture: the tensors of B pictures, and how many tokens one has, from the vision config and `side`.
        side: patches along a side of the picture.
        drafters: by method, the values of its config that do not follow from the text model; none for "mtp".
        axes: M-RoPE: prompts have token types.
    """

    build: Callable[[Config, Config, torch.dtype], Any]
    text: Sizes
    vision: Sizes
    picture: Callable[[Config, int, int], tuple[dict[str, Tensor], int]]
    side: Mapping[str, int]
    drafters: Mapping[str, Config]
    axes: bool = False

    @property
    def contexts(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(c for c in some if not self.beyond(name, c)) for name, some in CONTEXTS.items()}

    def target(self, sizes: str, dtype: torch.dtype) -> Any:
        return self.build(self.text[sizes], self.vision[sizes], dtype)

    def feature_drafter(self, method: str, sizes: str) -> EagleDrafter:
        """The published shape: one layer of the text model, with grouped keys only where the table says so."""
        t, own = self.text[sizes], self.drafters[method]
        given = {
            "hidden": t["hidden_size"], "intermediate": t["intermediate_size"], "heads": t["num_attention_heads"],
            "kv_heads": t["num_attention_heads"], "vocab": t["vocab_size"], "norm_eps": t["rms_norm_eps"],
            "rope_theta": t["rope_parameters"]["rope_theta"], **TREES[method], **own,
        }  # fmt: skip
        if given.pop("grouped", False):
            given["kv_heads"] = t["num_key_value_heads"]
        made = drafter_class(method)
        return made(made.Config.of(given)).eval()

    def parts(self, sizes: str, dtype: torch.dtype) -> dict[str, nn.Module]:
        """The target and all drafters; multi-token-prediction heads use the model's own classes."""
        made_parts: dict[str, nn.Module] = {"target": self.target(sizes, dtype)}
        for name in self.drafters:
            own = name == MtpDrafter.method
            made = MtpDrafter.untrained(made_parts["target"]) if own else self.feature_drafter(name, sizes)
            made_parts[name] = nn.Module.to(made, dtype)  # here, so that each `enable` uses the same weights
        return made_parts

    def beyond(self, sizes: str, context: int) -> str:
        """Why the model cannot read this many tokens; empty if it can."""
        most = self.text[sizes]["max_position_embeddings"]
        return f"beyond {most} positions" if context > most else ""

    def held(self, sizes: str, context: int, batch: int) -> int:
        """Numbers that a cell needs besides the weights: keys and values of a static and of a growing cache."""
        t = self.text[sizes]
        width = t.get("head_dim", t["hidden_size"] // t["num_attention_heads"]) * t["num_key_value_heads"]
        layers = t["num_hidden_layers"] // t.get("full_attention_interval", 1)
        return 2 * 2 * layers * width * context * batch

    def prompt(self, model: Any, sizes: str, length: int, batch: int) -> dict[str, Tensor]:
        """A picture and random text, [batch, length], without padding; rows differ.

        Raises:
            ValueError: the picture alone is longer than `length`.
        """
        pictures, count = self.picture(self.vision[sizes], self.side[sizes], batch)
        if length < count + 2:
            raise ValueError(f"a prompt of {length} tokens has no room for a picture of {count}; take longer contexts")
        image = model.config.image_token_id
        ids = torch.randint(3, min(image, self.text[sizes]["vocab_size"]) - 8, (batch, length))
        ids[:, 1 : 1 + count] = image
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **pictures}
        if self.axes:
            inputs["mm_token_type_ids"] = (ids == image).long()
        return {n: t.to(model.device, model.dtype if t.is_floating_point() else None) for n, t in inputs.items()}


def parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def on_paper(shape: Chat, sizes: str) -> dict[str, int]:
    """The number of parameters of the target and of its drafters, without allocating them."""
    with torch.device("meta"):
        return {name: parameters(part) for name, part in shape.parts(sizes, torch.bfloat16).items()}


# -- published shapes, and toys of the same architecture -------------------------------------------------------------

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

MODELS: dict[str, Chat] = {
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
}  # fmt: skip
