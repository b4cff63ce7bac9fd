"""Tiny random models of nearly every image-text-to-text class that transformers has, each with a picture to read.

A class's own default config, shrunk by three tables (its text, its pictures, its special tokens), is its model, and one
of a few recipes makes its pictures; `CASES` says which, and where a class needs other sizes than the tables'.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import tiny_vlms
import torch
import transformers as T
from tiny_image_models import CHAMELEON_VQ, CNN, EMU3_CODES, chameleon_codes
from tiny_vlms import CLOSE, HIDDEN, IMAGE, OPEN, VIDEO, VOCAB, ragged, rope
from torch import Tensor
from transformers import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as MAPPED

WIDTH, AUDIO, LAYERS = 32, 124, 3

TEXT: dict[str, Any] = {
    **tiny_vlms.TEXT, "unpadded_vocab_size": VOCAB, "num_hidden_layers": LAYERS, "sliding_window": 8,
    "attention_dropout": 0.0, "dropout": 0.0, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    "activation_dropout": 0.0,
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
_START = ("vision_start_token_id", "image_start_token_id", "boi_token_id", "boi_token_index")
_END = ("vision_end_token_id", "image_end_token_id", "eoi_token_id", "eoi_token_index")
TOKENS: dict[str, Any] = {
    "image_token_id": IMAGE, "image_token_index": IMAGE, "video_token_id": VIDEO, "video_token_index": VIDEO,
    "audio_token_id": AUDIO, "audio_token_index": AUDIO, **dict.fromkeys(_START, OPEN), **dict.fromkeys(_END, CLOSE),
    "video_start_token_id": 125, "video_end_token_id": 126, "projector_hidden_size": 48, "projection_dim": HIDDEN,
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
    out.update({name: given for name, given in more.items() if name in config.sub_configs})
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


def counted(model: Any, tensors: dict[str, Any]) -> int:
    """How many tokens the model's own vision tower makes of a picture."""
    inner = getattr(model, "thinker", getattr(model, "model", model))
    tower = inner if hasattr(inner, "get_image_features") else model
    wanted = inspect.signature(tower.get_image_features).parameters
    with torch.no_grad():
        found = tower.get_image_features(**{k: v for k, v in tensors.items() if k in wanted or "args" in wanted})
    found = getattr(found, "pooler_output", found)
    return sum(x.reshape(-1, x.shape[-1]).shape[0] for x in ([found] if isinstance(found, Tensor) else found))


def shown(*pixels: int, around: bool = False, count: int | None = None, **beside: Any) -> Picture:
    """Pictures of one shape.

    Args:
        pixels: the shape of `pixel_values` for one picture; none: it is in `beside`.
        around: whether tokens stand before and after it.
        count: its tokens; None: as many as the model's vision tower says.
        beside: other tensors: the shape of noise, a tuple, or what the tensor holds, a list.
    """

    def make(model: Any, g: torch.Generator) -> Seen:
        tensors = {"pixel_values": torch.randn(pixels, generator=g)} if pixels else {}
        for name, what in beside.items():
            tensors[name] = torch.randn(what, generator=g) if isinstance(what, tuple) else torch.tensor(what)
        tokens = [IMAGE] * (counted(model, tensors) if count is None else count)
        return Seen(tensors, [OPEN, *tokens, CLOSE] if around else tokens)

    return make


def grid(*size: int, side: int = 4, **more: Any) -> Picture:
    """As the families of Qwen have them: a list of patches of `size`, and how many in time, height and width."""
    return shown(side * side, *size, around=True, image_grid_thw=[[1, side, side]], **more)


def flattened(model: Any, g: torch.Generator) -> Seen:
    """As Kosmos-2.5 has them: patches in one list, each with its row and column before it."""
    where = torch.cartesian_prod(torch.arange(1, 4), torch.arange(1, 4))
    patches = torch.cat([where, torch.randn(9, 12, generator=g)], 1)
    return Seen({"flattened_patches": patches[None]}, [IMAGE] * 4)


# -- cases ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """How one class is made.

    Attributes:
        picture: makes its pictures; None: it is refused, or its prompts are text alone.
        more: what its config has that the tables have not, the configs inside under their names.
        cls: the class, where the mapping does not name it.
        axis: along which `pixel_values` of several pictures are put together.
        around: the case of the model inside, where the class hands its `generate` on to that.
        asks: what its `generate` is asked besides.
    """

    picture: Picture | None = None
    more: dict[str, Any] = field(default_factory=dict)
    cls: str = ""
    axis: int = 0
    around: str = ""
    asks: dict[str, Any] = field(default_factory=dict)


SQUARE, SIZED = shown(1, 3, 28, 28), shown(1, 3, 28, 28, image_sizes=[[28, 28]])
TILES = shown(1, 3, 3, 28, 28, image_sizes=[[28, 56]])
FLAT, FRAME, SQUARES = grid(3 * 2 * 14 * 14), grid(3 * 14 * 14), grid(3, 14, 14)  # patches of two frames, of one
SHEET = shown(1, 1, 3, 28, 28)  # pictures of a row together
STRIP = shown(1, 3, 14, 14 * 16, target_sizes=[[4, 4]])
PINPOINTS = {"image_grid_pinpoints": [[28, 56], [56, 28], [56, 56]]}
MROPE, AXES = rope(mrope_section=[2, 3, 3]), rope(mrope_section=[4, 2, 2], mrope_interleaved=True)
PARTIAL = rope(mrope_section=[2, 1, 1], partial_rotary_factor=0.5)
EQUAL, INDEXED = {"num_key_value_heads": 4}, {"index_topk": 8, "index_head_dim": 16, "index_n_heads": 2}
LAYERED = {"vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 16}
PLACES = [[[i % 4, i // 4] for i in range(16)]]
SAM = {"output_channels": 8, "window_size": 2, "global_attn_indexes": [1], "mlp_dim": 48, "image_size": 64,
       "patch_size": 4, "num_pos_feats": 16}  # fmt: skip
OCR = {**SAM, "downsample_channels": [16, WIDTH], "hidden_size": WIDTH}
TIMM = {"architecture": "resnet10t", "hidden_size": 512, "do_pooling": False}
GEMMA4 = {
    "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 16, "patch_size": 14, "model_type": "gemma4_vision",
    "pooling_kernel_size": 2, "position_embedding_size": 64,
}  # fmt: skip
SLIDING = {"sliding_window_size": 8, "rel_extent": 12}
HEARING = {"d_model": WIDTH, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 48,
           "num_hidden_layers": 1, "output_dim": HIDDEN}  # fmt: skip
OPENED = {"vision_start_token_id": OPEN, "vision_end_token_id": CLOSE, "audio_config": HEARING}


def case(picture: Picture | None = None, cls: str = "", axis: int = 0, **more: Any) -> Case:
    return Case(picture, more, cls, axis)


def text(**more: Any) -> dict[str, Any]:
    return {"text_config": more}


def vision(**more: Any) -> dict[str, Any]:
    return {"vision_config": more}


CASES: dict[str, Case] = {
    # one square picture
    **dict.fromkeys(("aya_vision", "cohere2_vision", "deepseek_vl", "ovis2", "step3p7", "video_llava"), case(SQUARE)),
    "aria": case(SQUARE, projector_patch_to_query_dict={4: 4}, max_value_projector_patch_to_query_dict=4),
    "vipllava": case(SQUARE, vision_feature_layer=[-2, -1]),
    "qianfan_ocr": case(SQUARE, **vision(image_size=[28, 28], patch_size=[7, 7])),
    **dict.fromkeys(("got_ocr2", "pp_chart2table"), case(shown(1, 3, 64, 64), **vision(**SAM))),
    "llama4": case(
        shown(1, 3, 28, 28, count=4),
        **vision(patch_size=7, intermediate_size=128, vision_output_dim=32, projector_input_dim=32,
                 projector_output_dim=32),
        **text(attention_chunk_size=16, intermediate_size_mlp=96, moe_layers=[0, 1, 2], no_rope_layers=[1, 0, 1]),
    ),
    **dict.fromkeys(("mistral3", "lighton_ocr"), case(SIZED, **vision(patch_size=7))),
    "mistral_large4": case(SIZED, **vision(patch_size=7), **text(**EQUAL, **INDEXED)),
    "deepseek_vl_hybrid": case(
        shown(1, 3, 28, 28, high_res_pixel_values=(1, 3, 64, 64)),
        high_res_vision_config={**SAM, "hidden_size": WIDTH, "scale": 4},
    ),
    "deepseek_ocr2": case(
        shown(1, 3, 64, 64), **text(mlp_layer_types=["dense", "sparse", "sparse"]),
        **vision(sam_config=OCR, encoder_config={**TEXT, "hidden_size": WIDTH, "num_hidden_layers": 2}),
    ),
    "unlimited_ocr": case(shown(1, 3, 64, 64), **vision(sam_config=OCR, encoder_config={"image_size": 28})),
    "fast_vlm": case(SQUARE, **vision(**TIMM)),
    "perception_lm": case(
        shown(1, 1, 3, 32, 32),
        **vision(architecture="vit_tiny_patch16_224", do_pooling=False,
                 model_args={"embed_dim": 192, "img_size": [32, 32], "global_pool": ""}),
    ),
    "gemma3n": case(
        shown(1, 3, 64, 64), vision_soft_tokens_per_image=4, **vision(**TIMM),
        **text(num_hidden_layers=4, num_kv_shared_layers=2, layer_types=["sliding_attention", "full_attention"] * 2,
               intermediate_size=[96] * 4, activation_sparsity_pattern=[0.5, 0.0, 0.0, 0.0], **LAYERED,
               laurel_rank=8),
    ),
    # tiles, and pictures by row
    **dict.fromkeys(("llava_next_video", "llava_onevision"), case(TILES, **PINPOINTS)),
    "granite4_vision": case(
        shown(1, 3, 3, 56, 56, image_sizes=[[56, 112]], count=14), image_grid_pinpoints=[[56, 112], [112, 56]],
        downsample_rate="1/2", deepstack_layer_map=[[-1, 0]], spatial_target_layers=[1, 2],
        **vision(hidden_size=64, image_size=56), qformer_config={"hidden_size": 64, "encoder_hidden_size": 64},
    ),
    "idefics2": case(SHEET),
    "granite_docling": case(
        shown(1, 1, 3, 32, 32, pixel_attention_mask=[[True]]), **vision(image_size=32, patch_size=8, scale_factor=2)
    ),
    # patches
    "gemma4": case(shown(1, 16, 3 * 14 * 14, image_position_ids=PLACES), **vision(**GEMMA4), **text(**LAYERED)),
    "gemma4_unified": case(
        shown(1, 16, 3 * 28 * 28, image_position_ids=PLACES),
        **vision(**{**GEMMA4, "model_type": "gemma4_unified_vision"}),
    ),
    **dict.fromkeys(
        ("minicpmv4_6", "minicpmv4_7", "minicpm_ocr"),
        case(STRIP, axis=-1, **vision(insert_layer_id=0), insert_layer_id=0, **text(rope_parameters=PARTIAL)),
    ),
    # patches in a grid
    **dict.fromkeys(("glm4v", "glm46v", "glmga", "glm_ocr"), case(FLAT, **text(rope_parameters=MROPE))),
    "glm4v_moe": case(FLAT, **text(rope_parameters=PARTIAL)),
    "qwen2_5_omni_thinker": case(FLAT, **text(rope_parameters=MROPE), **OPENED),
    **dict.fromkeys(("exaone4_5", "hyperclovax_vision_v2"), case(FLAT)),
    "cohere_compass": case(
        FLAT,
        **text(layer_types=["sliding_attention", "full_attention", "sliding_attention"],
               rope_parameters={"sliding_attention": AXES, "full_attention": None}),
    ),
    "cosmos3_edge": case(FRAME, **text(rope_parameters=MROPE)),
    **dict.fromkeys(("cosmos3_omni", "qwen3_vl_moe"), case(FLAT, **text(rope_parameters=AXES))),
    "qwen3_omni_moe_thinker": case(FLAT, **text(rope_parameters=AXES), **OPENED),
    "qwen3_5_moe": case(FLAT, **text(rope_parameters=PARTIAL)),
    "qwen4_exp": case(
        FLAT,
        **text(rope_parameters=MROPE, indexer_n_heads=2, indexer_kv_heads=1, indexer_head_dim=16, indexer_budget=8,
               indexer_compress_ratio=2, hc_lowrank=8, ple_layer_ids=[1, 3], ple_embed_dim=32, heads_per_ngram=2,
               ngram_vocab_size_base=200, make_ngram_vocab_size_divisible_by=8),
    ),
    "dots3_note": case(
        FRAME, **text(**EQUAL, **INDEXED), **vision(adapter_in_dim=WIDTH, adapter_out_dim=HIDDEN),
        audio_config={"adapter_input_size": WIDTH, "adapter_out_dim": HIDDEN},
    ),
    "ernie4_5_vl_moe": case(
        FRAME, **text(moe_intermediate_size=[32, 32], rope_parameters=rope(mrope_section=[3, 3, 2]))
    ),
    "glm5_next": case(
        FLAT,
        **text(**EQUAL, **INDEXED, qk_rope_head_dim=0, head_dim=0, index_kpool=4, linear_head_dim=8,
               linear_num_heads=4),
    ),
    "kimi_k25": case(SQUARES, **text(**EQUAL, head_dim=8), projection_hidden_size=WIDTH),
    "paddleocr_vl": case(SQUARES, **text(rope_parameters=MROPE)),
    "hunyuan_vl": case(FRAME, **text(rope_parameters=MROPE)),
    "lfm3_vl": case(FLAT, **text(conv_L_cache=3)),
    "minimax_m3_vl": case(  # its blocks are longer than any prompt's padding
        FLAT,
        **text(layer_types=["minimax_m3_sparse", "full_attention", "minimax_m3_sparse"], rotary_dim=16,
               index_n_heads=2, index_head_dim=16, index_block_size=8, index_topk_blocks=2),
    ),
    "muse_glimmer": case(FLAT, out_hidden_size=128, **text(layer_rope_theta=[1e4, 0, 1e4])),
    "muse_spark": case(
        FLAT, out_hidden_size=128, **text(layer_rope_theta=[1e4, 0, 1e4]),
        audio_config={"num_hidden_layers": 4, "hidden_sizes": [8] * 4, "depths": [1] * 4, "out_hidden_size": HIDDEN},
    ),
    "video_llama_3": case(grid(3 * 14 * 14, image_merge_sizes=[2])),
    "inkling2": case(grid(28, 28, 3), **text(**SLIDING)),
    "inkling_mm_model": case(shown(4, 2, 8, 8, 3), **vision(patch_size=8, num_hidden_layers=5), **text(**SLIDING)),
    "nemotron_h_omni": case(
        shown(16, 3 * 14 * 14, image_grid_hw=[[4, 4]]), vision_hidden_size=WIDTH,
        **vision(video_temporal_patch_size=2),
        **text(sliding_window=None, mamba_num_heads=4, mamba_head_dim=32, n_groups=2, ssm_state_size=16),
    ),
    "molmo2": case(
        shown(1, 4, 3 * 14 * 14, image_token_pooling=[[0, 1], [2, 3]], image_grids=[[2, 1, 0, 0]],
              image_num_crops=[1]),
        **vision(image_size=[28, 28], num_position_embeddings=4), image_patch_id=IMAGE,
        adapter_config={"text_hidden_size": HIDDEN, "vision_feature_layer": [1, 0]},
    ),
    # wrappers with an inner model, cross-attention, and doors of their own
    "blip-2": case(shown(1, 3, 28, 28, count=4), num_query_tokens=4),
    "instructblip": case(shown(1, 3, 28, 28, count=4, qformer_input_ids=[[1, 5, 6]]), num_query_tokens=4),
    "instructblipvideo": case(
        shown(1, 1, 3, 28, 28, count=4, qformer_input_ids=[[1, 5, 6]]), num_query_tokens=4, video_token_index=IMAGE
    ),
    "git": case(shown(1, 3, 28, 28, count=0)),
    "kosmos-2.5": case(flattened, latent_query_num=4, **vision(patch_embed_hidden_size=12)),
    **dict.fromkeys(("kosmos-2", "evolla", "blip"), case()),
    "idefics": case(shown(1, 1, 3, 28, 28, count=1, image_attention_mask=[[[1]]]), **vision(embed_dim=WIDTH)),
    "mllama": case(
        shown(1, 1, 2, 3, 28, 28, count=1, aspect_ratio_ids=[[3]], aspect_ratio_mask=[[[1, 1]]]),
        **vision(num_global_layers=1, vision_output_dim=64, intermediate_layers_indices=[0], max_num_tiles=2,
                 supported_aspect_ratios=[[1, 1], [1, 2], [2, 1]]),
        **text(cross_attention_layers=[1]),
    ),
    "janus": case(SQUARE, vq_config=CNN),
    "chameleon": case(
        shown(1, 3, 8, 8, count=16), vocabulary_map={"<image>": IMAGE, **chameleon_codes()}, vq_config=CHAMELEON_VQ
    ),
    "emu3": case(
        None, vocabulary_map={"<image>": IMAGE, "<|extra_200|>": 119, **EMU3_CODES},
        vq_config={**CNN, "codebook_size": 64, "attn_resolutions": [], "hidden_size": 32},
    ),
    "florence2": case(
        **text(encoder_layers=2, decoder_layers=2, d_model=HIDDEN, encoder_ffn_dim=96, decoder_ffn_dim=96,
               encoder_attention_heads=4, decoder_attention_heads=4),
    ),
    "udop": case(d_model=HIDDEN, d_kv=16, d_ff=96, num_layers=2, num_decoder_layers=2, num_heads=4),
    **dict.fromkeys(("diffusion_gemma", "pix2struct", "pp_formulanet", "t5gemma2", "vision-encoder-decoder"), case()),
    "phi4_multimodal": case(
        shown(count=13, image_pixel_values=(1, 2, 3, 28, 28), image_sizes=[[28, 28]],
              image_attention_mask=[[[[1] * 4] * 4] * 2]),
        cls="Phi4MultimodalForCausalLM", **vision(crop_size=28, patch_size=7, image_token_id=IMAGE),
        audio_config={"num_blocks": 1, "hidden_size": 32, "intermediate_size": 32, "audio_token_id": AUDIO,
                      "nemo_conv_channels": 32, "ext_pw_out_channel": 32, "depthwise_separable_out_channel": 32,
                      "num_attention_heads": 2},
    ),
    "qwen2_5_omni": Case(
        cls="Qwen2_5OmniForConditionalGeneration", around="qwen2_5_omni_thinker",
        asks={"generation_mode": "text", "thinker_max_new_tokens": 20},
    ),
    "qwen3_omni_moe": Case(
        cls="Qwen3OmniMoeForConditionalGeneration", around="qwen3_omni_moe_thinker",
        asks={"return_audio": False, "thinker_max_new_tokens": 20},
    ),
    # text alone
    "fuyu": case(),
    "mistral4": case(**EQUAL),
}  # fmt: skip
CASES = {name: one for name, one in CASES.items() if one.cls or name in MAPPED}  # those that this release has


# -- models and prompts -----------------------------------------------------------------------------------------------


def class_of(name: str) -> type:
    return getattr(T, CASES[name].cls or MAPPED[name])


def picture_of(name: str) -> Picture | None:
    return CASES[CASES[name].around or name].picture


def config_of(name: str) -> PretrainedConfig:
    one = CASES[name]
    kind = CONFIG_MAPPING[name] if name in CONFIG_MAPPING else class_of(name).config_class
    if one.around:
        return kind(thinker_config=config_of(one.around).to_dict(), enable_audio_output=False)
    return kind(**tiny(kind(), {**TEXT, **TOKENS}, one.more))


@cache
def model(name: str) -> Any:
    """The class's random model, with weights so large that prompts and pictures steer it and it repeats little."""
    torch.manual_seed(0)
    made = class_of(name)(config_of(name)).eval().float()
    if name == "qwen2_5_omni":  # its text alone asks its voice for these
        made.speaker_map, made.talker = {"Chelsie": {}}, SimpleNamespace(codec_pad_token=0)
    with torch.no_grad():
        for name_of, weight in made.named_parameters():
            if weight.numel() == 1 and not weight.any():
                weight.fill_(0.5)  # a gate that would shut a picture out
            elif weight.dim() > 1:
                weight.normal_(std=2.0 / (weight.shape[-1] if "experts" in name_of else weight[0].numel()) ** 0.5)
    told = getattr(made, "thinker", made).generation_config
    told.eos_token_id, told.pad_token_id, told.bos_token_id = None, 0, 1
    return made


ROWS: dict[str, list[list[int]]] = {"one": [[2, 7]], "ragged": [[1, 9], [3, 1], [2, 5]]}  # words around a picture
MORE: dict[str, list[list[int]]] = {"early": [[1, 9]], "late": [[3, 1]]}


def prompt(name: str, rows: str = "one", picture: int = 1) -> dict[str, Tensor]:
    """Inputs of `generate`, each row with a picture, left-padded where they differ; `picture` seeds the pictures."""
    target, paints = model(name), picture_of(name)
    words, paint = torch.Generator().manual_seed(1), torch.Generator().manual_seed(picture)
    ids, seen = [], []
    for before, after in {**ROWS, **MORE}[rows]:
        found = paints(target, paint) if paints else Seen({}, [])
        said = [torch.randint(5, 100, (n,), generator=words).tolist() for n in (before, after)]
        ids.append([1, *said[0], *found.tokens, *said[1]])
        seen.append(found.tensors)
    out = ragged(ids)
    wanted = inspect.signature(type(getattr(target, "thinker", target)).forward).parameters
    for kind in ("mm_token_type_ids", "moe_mm_token_type_ids", "token_type_ids"):
        if kind in wanted:
            out[kind] = (out["input_ids"] == IMAGE).int()
    if "image_embeds_position_mask" in wanted:
        out["image_embeds_position_mask"] = (out["input_ids"] == IMAGE).int()
    if "cross_attention_mask" in wanted:  # [B, L, pictures, tiles]: from the picture on
        shown_from = ((out["input_ids"] == IMAGE).cumsum(1) > 0).int()
        out["cross_attention_mask"] = shown_from[:, :, None, None].expand(-1, -1, 1, 2).clone()
    axes, out = {"pixel_values": CASES[name].axis}, {**out, **CASES[name].asks}
    return {**out, **{key: torch.cat([t[key] for t in seen], axes.get(key, 0)) for key in seen[0]}}


@cache
def stock_error(name: str) -> str | None:
    """What stock's own `generate` fails with in the installed release; None: it does not."""
    try:
        generate(model(name), prompt(name), max_new_tokens=1)
    except Exception as error:
        return f"stock generate fails: {type(error).__name__}: {error}"
    return None


generate = partial(tiny_vlms.generate, max_new_tokens=20)
