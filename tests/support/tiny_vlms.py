"""Tiny random targets of the true transformers classes, and prompts of every kind for each of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import transformers as T
from torch import Tensor

VOCAB, HIDDEN = 128, 64
GAIN = 2.0  # size of the random weights: outputs then differ from prompt to prompt
IMAGE, VIDEO, OPEN, CLOSE = 120, 121, 122, 123  # placeholders, and what stands around them in some families
TEXT = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
PLAIN = {k: v for k, v in TEXT.items() if k != "head_dim"}  # for text configs that derive it
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
QWEN_VISION = {
    "hidden_size": 32, "intermediate_size": 48, "depth": 2, "num_heads": 2, "patch_size": 14, "spatial_merge_size": 2,
    "temporal_patch_size": 2, "out_hidden_size": HIDDEN,
}  # fmt: skip
QWEN_TOKENS = {
    "image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": OPEN, "vision_end_token_id": CLOSE,
}  # fmt: skip


def rope(kind: str = "default", **more: Any) -> dict[str, Any]:
    return dict(rope_type=kind, rope_theta=1e4, **more)


@dataclass
class Seen:
    """One image or video: its tensors, each with a leading axis to concatenate, and the tokens that stand for it."""

    tensors: dict[str, Tensor]
    tokens: list[int]
    kinds: list[int]  # token type of each: 0 text, 1 image, 2 video


def _images(shape: tuple[int, ...], count: int = 4, around: bool = False) -> Callable[[Any, torch.Generator], Seen]:
    """A family whose pictures are one tensor each and always stand for the same number of tokens."""

    def make(_: Any, g: torch.Generator) -> Seen:
        edge = int(around)
        tokens = [OPEN] * edge + [IMAGE] * count + [CLOSE] * edge
        return Seen({"pixel_values": torch.randn(1, *shape, generator=g)}, tokens, [int(t == IMAGE) for t in tokens])

    return make


def _anyres(model: Any, g: torch.Generator) -> Seen:
    """LLaVA-NeXT: the number of tokens follows from the picture's shape; tiles are filled up to five."""
    high = 28 * int(torch.randint(1, 3, (), generator=g))
    size, tiles = torch.tensor([[high, 56]]), 1 + 2 * high // 28
    pixels = torch.cat([torch.randn(1, tiles, 3, 28, 28, generator=g), torch.zeros(1, 5 - tiles, 3, 28, 28)], 1)
    with torch.no_grad():
        count = sum(len(f) for f in model.get_image_features(pixels, size).pooler_output)
    return Seen({"pixel_values": pixels, "image_sizes": size}, [IMAGE] * count, [1] * count)


def _patches(frames: int, wide: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(frames * 4 * wide, 3 * 2 * 14 * 14, generator=g), torch.tensor([[frames, 4, wide]])


def _qwen_image(_: Any, g: torch.Generator) -> Seen:
    wide = 4 * int(torch.randint(1, 3, (), generator=g))
    pixels, grid = _patches(1, wide, g)
    tokens = [OPEN] + [IMAGE] * wide + [CLOSE]
    return Seen({"pixel_values": pixels, "image_grid_thw": grid}, tokens, [int(t == IMAGE) for t in tokens])


def _qwen_video(split: bool) -> Callable[[Any, torch.Generator], Seen]:
    """Two frames; Qwen3 writes each frame on its own, with a time stamp before it."""

    def make(_: Any, g: torch.Generator) -> Seen:
        pixels, grid = _patches(2, 4, g)
        frame = [VIDEO] * 4
        tokens = [50, OPEN, *frame, CLOSE, 51, OPEN, *frame, CLOSE] if split else [OPEN, *frame, *frame, CLOSE]
        kinds = [2 * int(t == VIDEO) for t in tokens]
        return Seen({"pixel_values_videos": pixels, "video_grid_thw": grid}, tokens, kinds)

    return make


def _siglip2(_: Any, g: torch.Generator) -> Seen:
    """LFM2-VL: pictures are lists of patches with a shape, here 4 × 4."""
    pixels = torch.randn(1, 16, 3 * 14 * 14, generator=g)
    told = {"spatial_shapes": torch.tensor([[4, 4]]), "pixel_attention_mask": torch.ones(1, 16, dtype=torch.long)}
    return Seen({"pixel_values": pixels, **told}, [IMAGE] * 4, [1] * 4)


@dataclass(frozen=True)
class Family:
    """How to make one family's model and its pictures."""

    build: Callable[[], Any]
    image: Callable[[Any, torch.Generator], Seen]
    video: Callable[[Any, torch.Generator], Seen] | None = None
    types: str = ""  # the name of the token types the forward wants, and whether it tells images from text
    per_row: bool = False  # pictures are [rows, pictures, …], filled up with black ones


def family(
    kind: str, text: dict[str, Any], vision: dict[str, Any], *how: Any, types: str = "", per_row: bool = False,
    **more: Any,
) -> Family:  # fmt: skip
    """Of the class of this kind; `how` are its image and video, `more` what its config says beside the inner two."""

    def build() -> Any:
        told = copy.deepcopy({"text_config": text, "vision_config": vision, **more})
        return getattr(T, f"{kind}ForConditionalGeneration")(getattr(T, f"{kind}Config")(**told))

    return Family(build, *how, types=types, per_row=per_row)


def qwen(kind: str, text: dict[str, Any], vision: dict[str, Any], split: bool = False) -> Family:
    return family(kind, text, vision, _qwen_image, _qwen_video(split), types="mm_token_type_ids", **QWEN_TOKENS)


TILE, CLIP = _images((3, 28, 28)), {**VISION, "image_size": 28, "patch_size": 14}
MROPE = {"rope_parameters": rope(mrope_section=[2, 3, 3])}
LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip
FAMILIES: dict[str, Family] = {
    "llava": family("Llava", TEXT, CLIP, TILE, image_token_id=IMAGE, vision_feature_layer=-2),
    "llava_next": family(
        "LlavaNext", TEXT, CLIP, _anyres, image_token_id=IMAGE, image_grid_pinpoints=[[28, 56], [56, 28], [56, 56]]
    ),
    "qwen2_vl": qwen(
        "Qwen2VL",
        {**PLAIN, **MROPE},
        {"depth": 2, "embed_dim": 32, "mlp_ratio": 2, "hidden_size": HIDDEN, "num_heads": 2, "patch_size": 14},
    ),
    "qwen2_5_vl": qwen(
        "Qwen2_5_VL", {**PLAIN, **MROPE}, {**QWEN_VISION, "window_size": 56, "fullatt_block_indexes": [1]}
    ),
    "qwen3_vl": qwen(
        "Qwen3VL",
        {**TEXT, "rope_parameters": rope(mrope_section=[4, 2, 2], mrope_interleaved=True)},
        {**QWEN_VISION, "depth": 3, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]},
        split=True,
    ),
    "qwen3_5": qwen(
        "Qwen3_5",
        {**TEXT, **LINEAR, "rope_parameters": rope(mrope_section=[2, 1, 1], partial_rotary_factor=0.5)},
        {**QWEN_VISION, "num_position_embeddings": 16},
        split=True,
    ),
    "lfm2_vl": family(
        "Lfm2Vl",
        {**PLAIN, "model_type": "lfm2", "layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 8},
        {**VISION, "model_type": "siglip2_vision_model", "num_patches": 16, "patch_size": 14},
        _siglip2, image_token_id=IMAGE, downsample_factor=2,
    ),
    **{
        kind.lower(): family(
            kind, {**TEXT, "model_type": "llama"}, {**VISION, "image_size": 32, "patch_size": 8}, _images((3, 32, 32)),
            per_row=True, image_token_id=IMAGE, scale_factor=2, pad_token_id=0,
        )
        for kind in ("SmolVLM", "Idefics3")
    },
    "internvl": family(
        "InternVL",
        {**PLAIN, "model_type": "qwen2"}, {**VISION, "image_size": [28, 28], "patch_size": [7, 7]},
        TILE, image_token_id=IMAGE, downsample_ratio=0.5,
    ),
    "paligemma": family(
        "PaliGemma",
        {**TEXT, "model_type": "gemma"}, {**CLIP, "model_type": "siglip_vision_model", "projection_dim": HIDDEN},
        TILE, types="token_type_ids", image_token_id=IMAGE, image_token_index=IMAGE, projection_dim=HIDDEN,
        hidden_size=HIDDEN, tie_word_embeddings=False,
    ),
    "gemma3": family(  # its window is shorter than every prompt
        "Gemma3",
        {**TEXT, "sliding_window": 8, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]},
        {**VISION, "image_size": 28, "patch_size": 7},
        _images((3, 28, 28), around=True), types="token_type_ids", mm_tokens_per_image=4, image_token_id=IMAGE,
        boi_token_id=OPEN, eoi_token_id=CLOSE, tie_word_embeddings=False,
    ),
}  # fmt: skip

# kind of prompt → rows of pieces; a number is that many text tokens
KINDS: dict[str, list[list[Any]]] = {
    "image first": [["image", 7]],
    "image last": [[7, "image"]],
    "several images": [[2, "image", 3, "image", "image", 4]],
    "text only": [[11]],
    "ragged": [["image", 9], [3, "image", 1], [2, "image", 1, "image", 4], [13]],
    "video": [[2, "video", 3, "image", 4]],
    "ragged video": [["video", 9], [3, "image", 1], [2, "video", 1, "image", 4], [5]],
}


@cache
def model(name: str, attn: str = "sdpa") -> Any:
    """The family's random model, with weights so large that prompts and pictures steer it and it repeats little."""
    torch.manual_seed(0)
    made = FAMILIES[name].build().float()
    made.set_attn_implementation(attn)
    return enlarged(made)


def enlarged(model: Any, gain: float = GAIN) -> Any:
    """The model with weights so large that its prompts steer it, and without an end."""
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(std=gain / weight[0].numel() ** 0.5)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model.eval()


def text(name: str = "Llama", **more: Any) -> Any:
    """A tiny language model without eyes, of a class of transformers; `None` leaves an argument out."""
    torch.manual_seed(0)
    config = getattr(T, f"{name}Config")(**{k: v for k, v in {**TEXT, **more}.items() if v is not None})
    return enlarged(getattr(T, f"{name}ForCausalLM")(config))


def has_kind(name: str, kind: str) -> bool:
    return "video" not in kind or FAMILIES[name].video is not None


def prompt(
    name: str, kind: str, seed: int = 1, picture_seed: int | None = None, rows: list[int] | None = None
) -> dict[str, Tensor]:
    """Inputs of `generate`, left-padded where the rows differ.

    Args:
        name, kind: keys of FAMILIES and KINDS.
        seed: of the words and the pictures' shapes.
        picture_seed: changes the pictures and nothing else.
        rows: which of the kind's rows, in which order; None: all.
    """
    own, target = FAMILIES[name], model(name)
    words = torch.Generator().manual_seed(seed)
    shapes = torch.Generator().manual_seed(seed + 1000)
    ids, types, seen = [], [], []
    for pieces in KINDS[kind]:
        row, row_types, row_seen = [1], [0], []
        for piece in pieces:
            if isinstance(piece, int):
                row += torch.randint(5, 100, (piece,), generator=words).tolist()
                row_types += [0] * piece
            else:
                one = getattr(own, piece)(target, shapes)
                row, row_types = row + one.tokens, row_types + one.kinds
                row_seen.append(one.tensors)
        ids.append(row)
        types.append(row_types)
        seen.append(row_seen)
    if picture_seed is not None:
        _repaint(seen, picture_seed)
    ids, types, seen = ([x[i] for i in rows or range(len(ids))] for x in (ids, types, seen))
    out = ragged(ids)
    if own.types:
        told = padded(types)
        out[own.types] = told * 0 if name == "paligemma" else told  # PaliGemma: 0 prefix, 1 suffix
    return {**out, **_stack(seen, own.per_row)}


def padded(rows: list[list[int]]) -> Tensor:
    """To the left, with zeros."""
    longest = max(map(len, rows))
    return torch.tensor([[0] * (longest - len(row)) + row for row in rows])


def ragged(rows: list[list[int]], name: str = "") -> dict[str, Tensor]:
    """Left-padded ids and their mask; `name` comes before both."""
    ids, mask = f"{name}{'ids' if name else 'input_ids'}", f"{name}attention_mask"
    return {ids: padded(rows), mask: padded([[1] * len(row) for row in rows])}


def _repaint(seen: list[list[dict[str, Tensor]]], seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    for one in (one for row in seen for one in row):
        for key in one:
            if key.startswith("pixel_values"):
                one[key] = torch.randn(one[key].shape, generator=g) * (one[key] != 0)


def _stack(seen: list[list[dict[str, Tensor]]], per_row: bool) -> dict[str, Tensor]:
    flat = [one for row in seen for one in row]
    if not flat:
        return {}
    if per_row:
        most, black = max(map(len, seen)), torch.zeros_like(flat[0]["pixel_values"])
        rows = [torch.cat([*(one["pixel_values"] for one in row), *[black] * (most - len(row))]) for row in seen]
        return {"pixel_values": torch.stack(rows)}
    keys = sorted({key for one in flat for key in one})
    return {key: torch.cat([one[key] for one in flat if key in one]) for key in keys}


def generate(target: Any, inputs: dict[str, Tensor], **options: Any) -> Any:
    """Greedy `generate` of 24 tokens, unless the options say otherwise."""
    return target.generate(**inputs, **{"max_new_tokens": 24, "do_sample": False, **options})
