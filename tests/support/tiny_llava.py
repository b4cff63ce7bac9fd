"""A random LLaVA of a few thousand weights with a processor to match, made on the fly and saved like any checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as T
from PIL import Image
from tiny_vlms import CLIP, TEXT
from tokenizers import Tokenizer, models, pre_tokenizers

IMAGE_TOKEN = 120
TEMPLATE = (
    "{% for m in messages %}{% for c in m['content'] %}{% if c['type'] == 'image' %}<image> "
    "{% else %}{{ c['text'] }} {% endif %}{% endfor %}{% endfor %}"
)


def model(seed: int = 0) -> T.LlavaForConditionalGeneration:
    """Random weights, scaled up so that pictures and prompts change the answer."""
    torch.manual_seed(seed)
    text, vision = T.LlamaConfig(**{**TEXT, "num_hidden_layers": 2}), T.CLIPVisionConfig(**CLIP)
    config = T.LlavaConfig(text_config=text, vision_config=vision, image_token_id=IMAGE_TOKEN, vision_feature_layer=-2)
    made = T.LlavaForConditionalGeneration(config).eval()
    with torch.no_grad():
        for weight in made.parameters():
            if weight.dim() > 1:
                weight.mul_(3.0)
    return made


def tokenizer(vocab: dict[str, int], at: Any = None, **special: Any) -> T.PreTrainedTokenizerFast:
    """Whole words as tokens, parted `at` spaces or by another pre-tokenizer; what is none is <unk>."""
    held = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    held.pre_tokenizer = at or pre_tokenizers.WhitespaceSplit()
    return T.PreTrainedTokenizerFast(tokenizer_object=held, pad_token="<pad>", unk_token="<unk>", **special)


def processor(template: str | None = TEMPLATE) -> T.LlavaProcessor:
    """Words w3 ... w127; everything else is <unk>."""
    words = {f"w{i}": i for i in range(4, 128) if i != IMAGE_TOKEN}
    words |= {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3, "<image>": IMAGE_TOKEN}
    return T.LlavaProcessor(
        image_processor=T.CLIPImageProcessor(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}),
        tokenizer=tokenizer(words, bos_token="<s>", eos_token="</s>", additional_special_tokens=["<image>"]),
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=template,
    )


def save(folder: Path) -> Path:
    """Both, in a folder that `--model` takes."""
    model().save_pretrained(folder)
    processor().save_pretrained(folder)
    return folder


def noise(folder: Path, count: int) -> list[dict[str, Any]]:
    """So many pictures of noise in a folder; a question about each, as a line of a list has it."""
    g = np.random.default_rng(0)
    for i in range(count):
        Image.fromarray(g.integers(0, 255, (28, 28, 3), dtype=np.uint8)).save(folder / f"{i}.png")
    return [{"image": f"{i}.png", "prompt": f"w{5 + i} w9 w{30 + i}"} for i in range(count)]


def listed(folder: Path, lines: list[dict[str, Any]]) -> Path:
    """The list of these lines, in the folder of the pictures."""
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder / "data.jsonl"
