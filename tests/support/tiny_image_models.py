"""Tiny random models of the true classes that draw pictures token by token, and the calls that users make of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import tiny_llava
import tiny_vlms
import torch
import transformers as T
from tiny_vlms import GAIN, TEXT, VOCAB, ragged
from tokenizers import pre_tokenizers
from torch import Tensor

CODES = VOCAB  # as many as the language models have tokens, so that every drafter of hostile_drafters.py fits
BEGIN, END, LINE, CLOSE = 121, 2, 119, 118
FIRST_CODE = 40  # of Emu3 and Chameleon, whose picture tokens stand in the vocabulary of the text: 40 … 103
PROMPTS = [[1, 5, 6, 7, 8], [1, 9], [1, 33, 12, 20]]
NEGATIVE = [[1, 30, 31], [1, 32, 33, 34, 35, 36, 37], [1, 38]]
CNN = {"base_channels": 32, "channel_multiplier": [1, 1], "num_res_blocks": 1}
CHAMELEON_VQ = {
    **CNN, "embed_dim": 8, "num_embeddings": 64, "latent_channels": 32, "resolution": 8, "attn_resolutions": [],
}  # fmt: skip
EMU3_CODES = {f"<|visual token {i:06d}|>": FIRST_CODE + i for i in range(64)}  # names of codes, and their tokens


def chameleon_codes(first: int = FIRST_CODE) -> dict[str, int]:
    letters = str.maketrans("0123456789", "ABCDEFGHIJ")
    return {f"IMGIMG{str(i).translate(letters)}Z": first + i for i in range(64)}


def _janus(codes: int = CODES, side: int = 4) -> Any:
    vision = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8 * side,
              "patch_size": 8, "projection_dim": 64, "num_image_tokens": side**2}  # fmt: skip
    vq = {**CNN, "embed_dim": 8, "num_embeddings": codes, "latent_channels": 32, "projection_dim": 64,
          "image_token_embed_dim": 64, "num_hidden_layers": 2, "num_patches": side}  # fmt: skip
    text = T.LlamaConfig(**TEXT)
    made = T.JanusForConditionalGeneration(
        T.JanusConfig(text_config=text, vision_config=vision, vq_config=vq, image_token_id=120)
    )
    made.generation_config.bos_token_id = 1
    made.generation_config.generation_kwargs = {"boi_token_id": BEGIN}
    return made


def _emu3() -> Any:
    names = {"<image>": 120, "<|extra_200|>": LINE, **EMU3_CODES}
    vq = {**CNN, "codebook_size": 64, "embed_dim": 4, "latent_channels": 4, "attn_resolutions": [], "hidden_size": 32,
          "temporal_downsample_factor": 1}  # fmt: skip
    text = {**TEXT, "attention_dropout": 0.0}
    return T.Emu3ForConditionalGeneration(T.Emu3Config(text_config=text, vq_config=vq, vocabulary_map=names))


def _glm_image() -> Any:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2], "partial_rotary_factor": 1.0}
    text = {**TEXT, "vocab_size": 256, "vision_vocab_size": CODES, "eos_token_id": None, "rope_parameters": rope}
    vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "image_size": 32, "patch_size": 8, "intermediate_size": 48}
    return T.GlmImageForConditionalGeneration(
        T.GlmImageConfig(
            text_config=text,
            vision_config=vision,
            vq_config={"embed_dim": 32, "num_embeddings": CODES - 2, "latent_channels": 32},
            image_token_id=200,
            image_start_token_id=120,
            image_end_token_id=BEGIN,
        )
    )


def _chameleon() -> Any:
    names = {"<image>": 120, "<racm3:break>": BEGIN, "<eoss>": END, **chameleon_codes()}
    config = T.ChameleonConfig(**tiny_vlms.PLAIN, vq_config=dict(CHAMELEON_VQ), vocabulary_map=names)
    return T.ChameleonForConditionalGeneration(config)


def grid(height: int, width: int, lower: int | None = None) -> Callable[[int, Tensor], list[int]]:
    """Emu3's documented grammar: rows of codes, each with its end of line, then two marks; nothing else is lawful.

    `lower` is the height of row 1's picture; a prefix that stock decoding could not have made is an error.
    """
    codes = list(range(FIRST_CODE, FIRST_CODE + 64))

    def at(batch_id: int, index: int) -> list[int]:
        rows = lower if lower is not None and batch_id == 1 else height
        if index >= rows * (width + 1):
            return [CLOSE] if index == rows * (width + 1) else [END]
        return [LINE] if index % (width + 1) == width else codes

    def allowed(batch_id: int, ids: Tensor) -> list[int]:
        drawn = ids[int((ids == BEGIN).nonzero()[0]) + 1 :].tolist()
        ended = drawn.index(END) if END in drawn else len(drawn)
        assert all(token in at(batch_id, i) for i, token in enumerate(drawn[:ended])), "an unlawful prefix"
        return at(batch_id, len(drawn))

    allowed.mmspec_pure = True  # type: ignore[attr-defined]
    return allowed


def _janus_call(rows: int) -> dict[str, Any]:
    return {**ragged([[*p, BEGIN] for p in PROMPTS[:rows]]), "generation_mode": "image", "guidance_scale": 2.0}


def _emu3_call(rows: int) -> dict[str, Any]:
    negative = ragged([[*p, BEGIN] for p in NEGATIVE[:rows]], "negative_prompt_")
    return {
        **ragged([[*p, BEGIN] for p in PROMPTS[:rows]]), **negative, "guidance_scale": 2.0, "eos_token_id": END,
        "prefix_allowed_tokens_fn": grid(4, 4, lower=2), "max_new_tokens": 23,
    }  # fmt: skip


def _glm_call(rows: int) -> dict[str, Any]:
    grids = torch.tensor([[1, 4, 4], [1, 2, 2]] * rows)
    prompts = ragged([[*p, 201, 212, 212, 202, 120] for p in PROMPTS[:rows]])
    return {**prompts, "image_grid_thw": grids, "images_per_sample": torch.tensor([2] * rows), "max_new_tokens": 21}


def _chameleon_call(rows: int) -> dict[str, Any]:
    return {**ragged(PROMPTS[:rows]), "multimodal_generation_mode": "image-only"}


def _guided_chameleon_call(rows: int) -> dict[str, Any]:
    return {**_chameleon_call(rows), **ragged(NEGATIVE[:rows], "negative_prompt_"), "guidance_scale": 2.0}


@dataclass(frozen=True)
class Painter:
    """A model, the call for so many rows, whether stock can run it, and weights that make it repeat little."""

    build: Callable[[], Any]
    call: Callable[[int], dict[str, Any]]
    stock: bool = True
    seed: int = 0
    gain: float = GAIN


PAINTERS: dict[str, Painter] = {
    "janus": Painter(_janus, _janus_call),
    "emu3": Painter(_emu3, _emu3_call),
    "glm_image": Painter(_glm_image, _glm_call, seed=2),
    "chameleon": Painter(_chameleon, _chameleon_call, stock=False, seed=1, gain=4.0),
    "chameleon guided": Painter(_chameleon, _guided_chameleon_call, stock=False, seed=1, gain=4.0),
}


def randomised(made: Any, seed: int, gain: float) -> Any:
    """With weights so large that prompts steer the model."""
    torch.manual_seed(seed)
    return tiny_vlms.enlarged(made.float(), gain)


@cache
def model(name: str, attn: str = "sdpa") -> Any:
    painter = PAINTERS[name]
    made = randomised(painter.build(), painter.seed, painter.gain)
    made.set_attn_implementation(attn)
    return made


@cache
def small_janus() -> Any:
    """Six codes on a grid of 2 × 2: few enough to count."""
    return randomised(_janus(codes=6, side=2), 0, GAIN)


def tokenizer(**special: str) -> Any:
    """Whole words as ids; the special ones where the tiny models have them."""
    places = {"image_token": 120, "boi_token": BEGIN, "eoi_token": 117, "image_wrapper_token": BEGIN}
    places |= {"eof_token": CLOSE}
    vocab = {"<pad>": 0, "<s>": 1, "</s>": END, "red": 5, "blue": 6, "circle": 7, "4": 30, "*": 31, "<unk>": 32}
    vocab |= {token: places[name] for name, token in special.items()}
    return tiny_llava.tokenizer(
        vocab, pre_tokenizers.Whitespace(), bos_token="<s>", eos_token="</s>", sep_token="4", padding_side="left",
        extra_special_tokens=special,
    )  # fmt: skip


def saved(name: str, folder: Path) -> Path:
    """A model and its processor as a folder that `from_pretrained` reads; its prompts are red and blue circles."""
    model(name).save_pretrained(folder)
    marks = {"image_token": "<image>", "boi_token": "<begin>", "eoi_token": "<end>"}
    if name == "janus":
        T.JanusProcessor(T.JanusImageProcessor(), tokenizer(**marks), num_image_tokens=16).save_pretrained(folder)
    elif name == "emu3":
        words = tokenizer(**{**marks, "boi_token": "<boi>"}, image_wrapper_token="<begin>", eof_token="<eof>")
        T.Emu3Processor(T.Emu3ImageProcessor(), words).save_pretrained(folder)
    else:
        T.ChameleonProcessor(T.ChameleonImageProcessor(), tokenizer(**marks)).save_pretrained(folder)
    return folder


def draw(target: Any, call: dict[str, Any], **options: Any) -> Any:
    """Greedy, unless the options say otherwise."""
    return target.generate(**{**call, "do_sample": False, **options})


def glm_pipeline() -> Any:
    """A GlmImagePipeline of tiny random parts, whose prompts are of the words w3 … w109."""
    import diffusers as D

    words = {f"w{i}": i for i in range(3, 110)} | {"<pad>": 0, "<unk>": 1, "<image>": 200, "<gb>": 201, "<ge>": 202}
    words |= {"<sop>": 120} | {str(i): 210 + i for i in range(33)}
    special = {"image_token": "<image>", "grid_bos_token": "<gb>", "grid_eos_token": "<ge>"}
    processor = T.GlmImageProcessor(
        image_processor=T.GlmImageImageProcessor(patch_size=8),
        tokenizer=tiny_llava.tokenizer(words, bos_token="<sop>", extra_special_tokens=special),
        chat_template=tiny_llava.TEMPLATE,
    )
    torch.manual_seed(0)
    made = D.GlmImagePipeline(
        tokenizer=T.ByT5Tokenizer(),
        processor=processor,
        text_encoder=T.T5EncoderModel(
            T.T5Config(vocab_size=384, d_model=32, d_kv=8, d_ff=37, num_layers=1, num_heads=4)
        ),
        vision_language_encoder=model("glm_image"),
        vae=D.AutoencoderKL(
            block_out_channels=(4, 8, 16, 16), down_block_types=("DownEncoderBlock2D",) * 4, latent_channels=4,
            up_block_types=("UpDecoderBlock2D",) * 4, layers_per_block=1, norm_num_groups=4, sample_size=128,
            use_quant_conv=False, use_post_quant_conv=False, latents_mean=[0.0] * 4, latents_std=[1.0] * 4,
        ),
        transformer=D.GlmImageTransformer2DModel(
            patch_size=2, in_channels=4, out_channels=4, num_layers=1, attention_head_dim=8, num_attention_heads=2,
            text_embed_dim=32, time_embed_dim=16, condition_dim=8, prior_vq_quantizer_codebook_size=CODES,
        ),
        scheduler=D.FlowMatchEulerDiscreteScheduler(),
    )  # fmt: skip
    made.set_progress_bar_config(disable=True)
    return made
