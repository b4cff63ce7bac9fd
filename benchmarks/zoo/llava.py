"""How a zoo model is built of LLaVA's stock classes, and how packed rows pass through it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import CLIPVisionConfig, CLIPVisionModel, LlamaConfig, PreTrainedTokenizerFast
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.llava import LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor

from benchmarks.zoo import pack
from benchmarks.zoo.recipes.vlm import VlmRecipe
from mmspec.zoo import scenes

FRAME = pack.Frame()
CHAT_TEMPLATE = pack.chat_template("{{ '<image>' }}")


def build_processor(recipe: VlmRecipe, tokenizer: PreTrainedTokenizerFast) -> LlavaProcessor:
    """The stock processor; pictures of any size and shape are squeezed to SIDE x SIDE."""
    side = {"height": scenes.SIDE, "width": scenes.SIDE}
    images = CLIPImageProcessorPil(
        size=side, crop_size=side, do_center_crop=False, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )
    return LlavaProcessor(
        images,
        tokenizer,
        patch_size=recipe.vision.patch,
        num_additional_image_tokens=1,
        vision_feature_select_strategy="default",
        image_token="<image>",
        chat_template=CHAT_TEMPLATE,
    )


def _vision_config(recipe: VlmRecipe) -> CLIPVisionConfig:
    shape = recipe.vision
    return CLIPVisionConfig(
        hidden_size=shape.width,
        intermediate_size=shape.feed_forward,
        image_size=scenes.SIDE,
        num_attention_heads=shape.heads,
        num_hidden_layers=shape.layers,
        patch_size=shape.patch,
    )


def build_tower(recipe: VlmRecipe) -> tuple[CLIPVisionModel, int]:
    """The untrained vision tower, and the width of what it sees."""
    return CLIPVisionModel(_vision_config(recipe)), recipe.vision.width


def build_model(recipe: VlmRecipe) -> LlavaForConditionalGeneration:
    """The untrained model in float32."""
    shape = recipe.language
    text = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        intermediate_size=shape.feed_forward,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        max_position_embeddings=shape.positions,
        bos_token_id=pack.BOS,
        eos_token_id=pack.EOS,
        pad_token_id=pack.PAD,
        tie_word_embeddings=False,
    )
    config = LlavaConfig(  # type: ignore[call-arg]  # a plain PreTrainedConfig takes these, too
        vision_config=_vision_config(recipe),
        text_config=text,
        image_token_id=pack.IMAGE,
        vision_feature_layer=-1,
        image_seq_length=(scenes.SIDE // recipe.vision.patch) ** 2,
        vision_feature_select_strategy="default",
        tie_word_embeddings=False,
        pad_token_id=pack.PAD,
        eos_token_id=pack.EOS,
        bos_token_id=pack.BOS,
    )
    return LlavaForConditionalGeneration(config)


def tower_of(model: LlavaForConditionalGeneration) -> nn.Module:
    """The part that the first stage trains."""
    return model.model.vision_tower


def see(tower: nn.Module, pixels: Tensor) -> Tensor:
    """What the tower makes of pictures [N, 3, S, S]: [N, tokens, width]."""
    seen: Tensor = tower(pixels).last_hidden_state[:, 1:]
    return seen


def branching(model: LlavaForConditionalGeneration, on: bool) -> None:
    """Nothing: attention reads packed rows by their mask."""


def packed_hidden(model: LlavaForConditionalGeneration, batch: pack.Packed, pixels: Tensor) -> Tensor:
    """Last hidden states [B, S, width] of packed rows, by the stock decoder; the tower itself is frozen."""
    with torch.no_grad():
        seen = see(model.model.vision_tower, pixels)
    visual = model.model.multi_modal_projector(seen)
    return pack.read(model.model.language_model, batch, visual, batch.positions)
