"""Tiny random models of nearly every image-text-to-text class that transformers has, each with a picture to read.

A class's own default config, shrunk by three tables (its text, its pictures, its special tokens), is its model, and one
of a few recipes makes its pictures; `CASES` says which, and where a class needs other sizes than the tables'.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import transformers as T
from torch import Tensor
from transformers import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as MAPPED

VOCAB, HIDDEN, WIDTH = 128, 64, 32
IMAGE, VIDEO, OPEN, CLOSE, AUDIO = 120, 121, 122, 123, 124
LAYERS = 3

TEXT: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 96, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "sliding_window": 8, "attention_dropout": 0.0,
    "dropout": 0.0, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "activation_dropout": 0.0,
    # mixtures of experts
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "shared_experts_intermediate_size": 32,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "n_group": 1, "topk_group": 1, "moe_topk": 2, "moe_k": 2, "share_expert_dim": 32, "moe_hidden_size": 32,
    # latent attention
    "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "v_head_dim": 16, "qk_nope_head_dim": 8,
    # recurrences
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12,
    # OPT, as BLIP-2 has it, and Kosmos
    "ffn_dim": 96, "word_embed_proj_dim": HIDDEN, "embed_dim": HIDDEN, "layers": LAYERS, "attention_heads": 4,
}  # fmt: skip
VISION: dict[str, Any] = {
    "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2, "depth": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "num_heads": 2, "attention_heads": 2, "head_dim": 16, "image_size": 28, "patch_size": 14,
    "out_hidden_size": HIDDEN, "projection_dim": HIDDEN, "num_position_embeddings": 16, "window_size": 56,
    "fullatt_block_indexes": [1], "deepstack_visual_indexes": [0, 1], "attention_dropout": 0.0, "dropout": 0.0,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "max_position_embeddings": 512,
    "vocab_size": VOCAB, "encoder_hidden_size": WIDTH, "text_hidden_size": HIDDEN, "projection_hidden_dim": 48,
    "num_patches": 16, "dropout_rate": 0.0,
}  # fmt: skip
TOKENS: dict[str, Any] = {
    "image_token_id": IMAGE, "image_token_index": IMAGE, "video_token_id": VIDEO, "video_token_index": VIDEO,
    "audio_token_id": AUDIO, "audio_token_index": AUDIO, "projector_hidden_size": 48, "projection_dim": HIDDEN,
    **{f"{name}_{end}": OPEN for name in ("vision_start", "image_start", "boi", "video_start") for end in ("token_id",
    "token_index")},
    **{f"{name}_{end}": CLOSE for name in ("vision_end", "image_end", "eoi", "video_end") for end in ("token_id",
    "token_index")},
    "tie_word_embeddings": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


# -- configs ----------------------------------------------------------------------------------------------------------


def shrunk(config: PretrainedConfig, table: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """What to give a config's class for a tiny one: what the tables say of the entries that it has, and `more`."""
    told = config.to_dict()
    out = {name: value for name, value in table.items() if name in told and not isinstance(told[name], list)}
    for name in ("layer_types", "mlp_layer_types", "indexer_types"):
        if told.get(name):
            kinds = list(dict.fromkeys(told[name]))
            count = out.get("num_hidden_layers", LAYERS)
            out[name] = [kinds[i % len(kinds)] for i in range(count)]
    if config.model_type:
        out["model_type"] = config.model_type
    return {**out, **more}


def _inner(config: PretrainedConfig) -> dict[str, PretrainedConfig]:
    found = {name: getattr(config, name, None) for name in config.sub_configs}
    return {name: one for name, one in found.items() if isinstance(one, PretrainedConfig)}


def tiny(config: PretrainedConfig, table: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """As `shrunk`, with the configs inside of it; `more` may hold what to change of each of these under its name."""
    own = {name: value for name, value in more.items() if name not in config.sub_configs}
    out = shrunk(config, table, own)
    for name, one in _inner(config).items():
        inside = TEXT if name in ("text_config", "decoder", "language_config") else VISION
        given = more.get(name, {})
        out[name] = given if isinstance(given, PretrainedConfig) else tiny(one, inside, given)
    return out


# -- pictures ---------------------------------------------------------------------------------------------------------


@dataclass
class Seen:
    """One picture: tensors to concatenate over all pictures, and the tokens that stand for it."""

    tensors: dict[str, Tensor]
    tokens: list[int]


Picture = Callable[[Any, torch.Generator], Seen]


def counted(model: Any, tensors: dict[str, Tensor]) -> int:
    """How many tokens the model's own vision tower makes of a picture."""
    with torch.no_grad():
        found = model.model.get_image_features(**tensors)
    found = getattr(found, "pooler_output", found)
    return sum(x.reshape(-1, x.shape[-1]).shape[0] for x in ([found] if isinstance(found, Tensor) else found))


def pixels(*shape: int, start: bool = False, **more: list[Any]) -> Picture:
    """Pictures of one shape, [1, *shape] each, with tensors beside it that are the same for all."""

    def make(model: Any, g: torch.Generator) -> Seen:
        told = {name: torch.tensor(value) for name, value in more.items()}
        tensors = {"pixel_values": torch.randn(1, *shape, generator=g), **told}
        tokens = [IMAGE] * counted(model, tensors)
        return Seen(tensors, [OPEN, *tokens, CLOSE] if start else tokens)

    return make


def grid(*size: int, h: int = 4, w: int = 4, **more: list[Any]) -> Picture:
    """As the families of Qwen have them: lists of patches, and how many there are in time, height and width."""

    def make(model: Any, g: torch.Generator) -> Seen:
        told = {name: torch.tensor(value) for name, value in more.items()}
        tensors = {"pixel_values": torch.randn(h * w, *(size or [3 * 2 * 14 * 14]), generator=g), "image_grid_thw": torch.tensor([[1, h, w]])}
        return Seen({**tensors, **told}, [OPEN, *[IMAGE] * counted(model, {**tensors, **told}), CLOSE])

    return make


# -- cases ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """How one class is made.

    Attributes:
        picture: makes its pictures; None: it is refused before it reads any.
        more: what its config has that the tables have not, the configs inside under their names.
        types: the name of the token types that its forward wants, 1 at a picture's placeholders.
        cls: the class, where the mapping does not name it.
        config: the name of its config in the library, likewise.
    """

    picture: Picture | None = None
    more: dict[str, Any] = field(default_factory=dict)
    cls: str = ""
    per_row: bool = False


SQUARE = pixels(3, 28, 28)
FLAT, FRAME = grid(), grid(3 * 14 * 14)  # patches of two frames, of one
SQUARES = grid(3, 14, 14)
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
AXES = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
HALF = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
EQUAL = {"num_key_value_heads": 4}
SAM = {"output_channels": 8, "window_size": 2, "global_attn_indexes": [1], "mlp_dim": 48, "downsample_channels": [16, 32],
       "image_size": 28, "patch_size": 7, "scale": 4, "num_pos_feats": 16}


def case(picture: Picture | None = None, cls: str = "", per_row: bool = False, **more: Any) -> Case:
    return Case(picture, more, cls, per_row)


def text(**more: Any) -> dict[str, Any]:
    return {"text_config": more}


def vision(**more: Any) -> dict[str, Any]:
    return {"vision_config": more}


CASES: dict[str, Case] = {
    # one square picture
    **{name: case(SQUARE) for name in ("aya_vision", "cohere2_vision", "deepseek_vl", "vipllava", "ovis2", "internvl_")},
    "aria": case(SQUARE, projector_patch_to_query_dict={4: 4}, max_value_projector_patch_to_query_dict=4),
    "qianfan_ocr": case(SQUARE, **vision(image_size=[28, 28], patch_size=[7, 7])),
    "got_ocr2": case(pixels(3, 64, 64), **vision(**{**SAM, "image_size": 64, "patch_size": 4})),
    "llama4": case(SQUARE, **vision(patch_size=7, vision_output_dim=32, projector_input_dim=32, projector_output_dim=32), **text(attention_chunk_size=16, intermediate_size_mlp=96, moe_layers=[0, 1, 2], no_rope_layers=[1, 0, 1])),
    "janus": case(SQUARE),
    "mistral3": case(pixels(3, 28, 28, image_sizes=[[28, 28]]), **vision(patch_size=7, num_attention_heads=2)),
    "mistral_large4": case(pixels(3, 28, 28, image_sizes=[[28, 28]]), **vision(patch_size=7), **text(**EQUAL)),
    "lighton_ocr": case(pixels(3, 28, 28, image_sizes=[[28, 28]]), **vision(patch_size=7)),
    "deepseek_vl_hybrid": case(SQUARE),
    "fast_vlm": case(SQUARE),
    "perception_lm": case(SQUARE),
    "video_llava": case(SQUARE),
    "llava_next_video": case(SQUARE),
    "llava_onevision": case(SQUARE),
    "granite4_vision": case(SQUARE),
    "granite_docling": case(SQUARE),
    "step3p7": case(SQUARE),
    "idefics2": case(SQUARE),
    "gemma3n": case(SQUARE),
    "gemma4": case(SQUARE),
    "gemma4_unified": case(SQUARE),
    # patches in a grid
    **{name: case(FLAT, **text(rope_parameters=MROPE)) for name in ("glm4v", "glm46v", "glmga", "glm_ocr", "qwen2_5_omni_thinker")},
    "glm4v_moe": case(FLAT, **text(rope_parameters=MROPE)),
    "exaone4_5": case(FLAT),
    "hyperclovax_vision_v2": case(FLAT),
    "cohere_compass": case(FLAT, **text(rope_parameters=AXES)),
    "cosmos3_edge": case(FLAT, **text(rope_parameters=MROPE)),
    "cosmos3_omni": case(FLAT, **text(rope_parameters=AXES)),
    "qwen3_vl_moe": case(FLAT, **text(rope_parameters=AXES)),
    "qwen3_omni_moe_thinker": case(FLAT, **text(rope_parameters=AXES)),
    "qwen3_5_moe": case(FLAT, **text(rope_parameters=HALF)),
    "qwen4_exp": case(FLAT, **text(rope_parameters=HALF)),
    "dots3_note": case(FLAT, **text(**EQUAL)),
    "ernie4_5_vl_moe": case(FRAME, **text(moe_intermediate_size=[32, 32], rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[3, 3, 2]))),
    "glm5_next": case(FLAT, **text(**EQUAL)),
    "kimi_k25": case(SQUARES, **text(**EQUAL)),
    "paddleocr_vl": case(SQUARES, **text(rope_parameters=MROPE)),
    "hunyuan_vl": case(FRAME),
    "lfm3_vl": case(FLAT, **text(conv_L_cache=3)),
    "minimax_m3_vl": case(FLAT),
    "muse_glimmer": case(FLAT, **text(layer_rope_theta=[1e4, 0, 1e4])),
    "muse_spark": case(FLAT, **text(layer_rope_theta=[1e4, 0, 1e4])),
    "video_llama_3": case(FRAME),
    "inkling2": case(FLAT),
    # text alone, as the mapping has it
    "mistral4": case(None, **EQUAL),
}


# -- models and prompts -----------------------------------------------------------------------------------------------


def class_of(name: str) -> type:
    return getattr(T, CASES[name].cls or MAPPED[name])


@cache
def model(name: str) -> Any:
    """The class's random model, with weights so large that prompts and pictures steer it and it repeats little."""
    one = CASES[name]
    kind = CONFIG_MAPPING[name] if name in CONFIG_MAPPING else class_of(name).config_class
    config = kind(**tiny(kind(), {**TEXT, **TOKENS}, one.more))
    torch.manual_seed(0)
    made = class_of(name)(config).eval().float()
    with torch.no_grad():
        for weight in made.parameters():
            if weight.dim() > 1:
                weight.normal_(std=2.0 / weight[0].numel() ** 0.5)
    told = made.generation_config
    told.eos_token_id, told.pad_token_id, told.bos_token_id = None, 0, 1
    return made


KINDS = CASES
ROWS: dict[str, list[list[int]]] = {"one": [[2, 7]], "ragged": [[1, 9], [3, 1], [2, 5]]}


def prompt(name: str, rows: str = "one", picture: int = 1) -> dict[str, Tensor]:
    """Inputs of `generate`, each row with a picture, left-padded where they differ; `picture` seeds the pictures."""
    one, target = CASES[name], model(name)
    words, paint = torch.Generator().manual_seed(1), torch.Generator().manual_seed(picture)
    ids, seen = [], []
    for before, after in ROWS[rows]:
        shown = one.picture(target, paint)
        text = [torch.randint(5, 100, (n,), generator=words).tolist() for n in (before, after)]
        ids.append([1, *text[0], *shown.tokens, *text[1]])
        seen.append(shown.tensors)
    longest = max(map(len, ids))
    out = {
        "input_ids": torch.tensor([[0] * (longest - len(row)) + row for row in ids]),
        "attention_mask": torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in ids]),
    }
    wanted = inspect.signature(type(target).forward).parameters
    for kind in ("mm_token_type_ids", "moe_mm_token_type_ids", "token_type_ids"):
        if kind in wanted:
            out[kind] = (out["input_ids"] == IMAGE).int()
    stack = torch.stack if one.per_row else torch.cat
    return {**out, **{key: stack([tensors[key] for tensors in seen]) for key in seen[0]}}


def generate(target: Any, inputs: dict[str, Tensor], **options: Any) -> Any:
    return target.generate(**inputs, **{"max_new_tokens": 20, "do_sample": False, **options})
