"""How a zoo model is built of Qwen3.5's stock classes, and how packed rows pass through it.

A packed row is a tree: texts branch off one prefix of pictures. Layers with a recurrent state read it in one go by the
definitions that read a draft's tree.
"""

from __future__ import annotations

import types
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, Qwen3VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_5 import Qwen3_5Config, Qwen3_5ForConditionalGeneration, Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet, Qwen3_5VisionModel
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

from benchmarks.zoo import pack
from benchmarks.zoo.recipes.vlm import Hybrid, VlmRecipe
from mmspec.kernels import reference_recurrent as ops
from mmspec.zoo import scenes

START, END, VIDEO = range(len(pack.SPECIAL), len(pack.SPECIAL) + 3)
FRAME = pack.Frame((START,), (END,), ("<vision_start>", "<vision_end>", "<video>"))
CHAT_TEMPLATE = pack.chat_template("{{ '<vision_start><image><vision_end>' }}")
MERGE = 2  # patches on a side of what becomes one visual token


def build_processor(recipe: VlmRecipe, tokenizer: PreTrainedTokenizerFast) -> Qwen3VLProcessor:
    """The stock processor; pictures keep their shape and are scaled to about SIDE x SIDE pixels."""
    area, patch = scenes.SIDE**2, recipe.vision.patch // MERGE
    size = {"shortest_edge": area, "longest_edge": area}
    given: dict[str, Any] = {
        "patch_size": patch, "merge_size": MERGE, "temporal_patch_size": 2,
        "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
    }  # fmt: skip
    for role in ("image", "video", "vision_start", "vision_end"):
        tokenizer._set_model_specific_special_tokens({f"{role}_token": f"<{role}>"})
    images = Qwen2VLImageProcessorPil(size=size, **given)
    videos = Qwen3VLVideoProcessor(size=size | {"longest_edge": 16 * area}, **given)
    return Qwen3VLProcessor(images, tokenizer, videos, chat_template=CHAT_TEMPLATE)


def _config(recipe: VlmRecipe) -> Qwen3_5Config:
    see, shape = recipe.vision, recipe.language
    assert isinstance(shape, Hybrid)
    patch = see.patch // MERGE
    rotary = int(shape.head * 0.5) // 2  # angles
    return Qwen3_5Config(
        vision_config={
            "depth": see.layers, "hidden_size": see.width, "num_heads": see.heads,
            "intermediate_size": see.feed_forward, "patch_size": patch, "spatial_merge_size": MERGE,
            "temporal_patch_size": 2, "out_hidden_size": shape.width,
            "num_position_embeddings": (scenes.SIDE // patch) ** 2,
        },
        text_config={
            "vocab_size": shape.vocabulary, "hidden_size": shape.width, "intermediate_size": shape.feed_forward,
            "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads, "head_dim": shape.head,
            "num_key_value_heads": shape.kv_heads, "max_position_embeddings": shape.positions,
            "linear_num_key_heads": shape.delta_heads, "linear_num_value_heads": shape.delta_heads,
            "linear_key_head_dim": shape.delta_head, "linear_value_head_dim": shape.delta_head,
            "layer_types": ["full_attention" if (i + 1) % 4 == 0 else "linear_attention" for i in range(shape.layers)],
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
                "mrope_section": [rotary - 2 * (rotary // 3), rotary // 3, rotary // 3], "mrope_interleaved": True,
            },
            "bos_token_id": pack.BOS, "eos_token_id": pack.EOS, "pad_token_id": pack.PAD, "tie_word_embeddings": True,
            "mtp_num_hidden_layers": 1,
        },
        image_token_id=pack.IMAGE, video_token_id=VIDEO, vision_start_token_id=START, vision_end_token_id=END,
        tie_word_embeddings=True,
    )  # fmt: skip


def build_tower(recipe: VlmRecipe) -> tuple[Qwen3_5VisionModel, int]:
    """The untrained vision tower with its merger, and the width of what it sees."""
    return Qwen3_5VisionModel._from_config(_config(recipe).vision_config), recipe.language.width


def build_model(recipe: VlmRecipe) -> Qwen3_5ForConditionalGeneration:
    """The untrained model in float32; its delta layers forget slowly at first."""
    model = Qwen3_5ForConditionalGeneration(_config(recipe))
    for layer in model.model.language_model.layers:
        if layer.block_type == "linear_attention":
            layer.linear_attn.A_log.data.uniform_(-4.0, 0.0)
            layer.linear_attn.dt_bias.data.uniform_(-4.0, -1.0)
    return model


def tower_of(model: Qwen3_5ForConditionalGeneration) -> nn.Module:
    """The part that the first stage trains."""
    tower: nn.Module = model.model.visual
    return tower


def patches(pixels: Tensor, side: int) -> Tensor:
    """Pictures [N, 3, S, S] as the stock image processor lays them out: [N·(S / side)², 3·2·side²]."""
    N, grid = len(pixels), pixels.shape[-1] // side
    cut = pixels.reshape(N, 3, grid // MERGE, MERGE, side, grid // MERGE, MERGE, side)
    cut = cut.permute(0, 2, 5, 3, 6, 1, 4, 7).reshape(N * grid * grid, 3, 1, side, side)
    return cut.expand(-1, -1, 2, -1, -1).reshape(N * grid * grid, -1)  # a picture is two frames that are the same


def see(tower: Any, pixels: Tensor) -> Tensor:
    """What the tower and its merger make of pictures [N, 3, S, S]: [N, tokens, width]."""
    grid = pixels.shape[-1] // tower.config.patch_size
    shapes = torch.tensor([[1, grid, grid]] * len(pixels))
    seen: Tensor = tower(patches(pixels, tower.config.patch_size), grid_thw=shapes).pooler_output
    return seen.unflatten(0, (len(pixels), -1))


def packed_hidden(model: Qwen3_5ForConditionalGeneration, batch: pack.Packed, pixels: Tensor) -> Tensor:
    """Last hidden states [B, S, width] of packed rows, by the stock decoder; see `branching`."""
    with torch.no_grad():
        visual = see(model.model.visual, pixels)
    tree = _tree(batch, model.model.language_model.config)
    return pack.read(model.model.language_model, batch, visual, _positions(model, batch), linear_attention=tree)


def _positions(model: Qwen3_5ForConditionalGeneration, batch: pack.Packed) -> Tensor:
    """Position ids [3, B, S]: by the model's own rule in the prefix, counted on from there in every branch."""
    length = int((batch.branches[0] == 0).sum())
    prefix = batch.ids[:1, :length]
    side = model.model.visual.num_grid_per_side
    shapes = torch.tensor([[1, side, side]] * int((prefix == START).sum()))
    at, _ = model.model.get_rope_index(prefix, (prefix == pack.IMAGE).int(), image_grid_thw=shapes)
    positions = (batch.positions - length + int(at.max()) + 1).expand(3, -1, -1).clone()
    positions[:, :, :length] = at
    return positions


def _tree(batch: pack.Packed, config: Qwen3_5TextConfig) -> tuple[Tensor, Tensor]:
    """Which positions each one follows, bool [B, S, S], and where the inputs of its convolution stand [B, S, k]."""
    length = batch.ids.shape[1]
    prefix = int((batch.branches[0] == 0).sum())
    before = (torch.arange(length) - 1).clamp(min=0).expand_as(batch.ids)
    first = batch.branches != batch.branches.gather(1, before)
    parents = torch.where(first & (batch.branches > 0), prefix - 1, before)
    return batch.seen(), ops.conv_windows(parents, batch.positions, config.linear_conv_kernel_dim)


def branching(model: Qwen3_5ForConditionalGeneration, on: bool) -> None:
    """Let the layers with a recurrent state read packed rows, or be stock's again."""
    for layer in model.model.language_model.layers:
        if layer.block_type == "linear_attention":
            vars(layer.linear_attn).pop("forward", None)
            if on:
                layer.linear_attn.forward = types.MethodType(_read_tree, layer.linear_attn)


def _read_tree(
    self: Qwen3_5GatedDeltaNet, hidden_states: Tensor, *, attention_mask: tuple[Tensor, Tensor], **_: object
) -> Tensor:
    """Stock's gated delta layer over a tree, from nothing: `attention_mask` is what `_tree` gives."""
    ancestors, windows = attention_mask
    mixed = self.in_proj_qkv(hidden_states).transpose(1, 2)
    blank = mixed.new_zeros(*mixed.shape[:2], self.conv_kernel_size)
    mixed = F.silu(ops.tree_conv(mixed, blank, self.conv1d.weight.squeeze(1), None, windows)).transpose(1, 2)
    split = mixed.float().split([self.key_dim, self.key_dim, self.value_dim], -1)
    q, k, v = (t.unflatten(-1, (self.num_k_heads, -1)).transpose(1, 2) for t in split)
    q, k = (t * torch.rsqrt((t * t).sum(-1, keepdim=True) + 1e-6) for t in (q, k))
    beta = self.in_proj_b(hidden_states).float().sigmoid().transpose(1, 2)
    g = -self.A_log.float().exp() * F.softplus(self.in_proj_a(hidden_states).float() + self.dt_bias)
    G = ops.path_decay(g.transpose(1, 2), ancestors)
    nothing = v.new_zeros(*v.shape[:2], self.head_k_dim, self.head_v_dim)
    out = ops.recurrent_tree(q * self.head_k_dim**-0.5, k, v, beta, G, nothing, ancestors)[0].transpose(1, 2)
    z = self.in_proj_z(hidden_states).unflatten(-1, (-1, self.head_v_dim))
    normed = self.norm(out.reshape(-1, self.head_v_dim).to(hidden_states.dtype), z.reshape(-1, self.head_v_dim))
    return self.out_proj(normed.view(*hidden_states.shape[:2], -1))
