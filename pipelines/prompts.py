"""Pictures and a question to model inputs, through the processor's own chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from PIL import Image


def chat_inputs(processor: Any, prompts: Sequence[str], images: Sequence[Sequence[Image.Image]]) -> Any:
    """Left-padded inputs, one row per prompt: a user turn with the row's pictures first, then its prompt.

    A processor without a chat template gets its image token once per picture, then the prompt.
    """
    if getattr(processor, "chat_template", None):
        chats = [
            [
                {
                    "role": "user",
                    "content": [*({"type": "image", "image": i} for i in row), {"type": "text", "text": prompt}],
                }
            ]
            for prompt, row in zip(prompts, images, strict=True)
        ]
        return processor.apply_chat_template(
            chats,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            processor_kwargs={"padding": True, "padding_side": "left"},
        )
    marker = getattr(processor, "image_token", None) or ""
    marker = getattr(marker, "content", marker)
    texts = [
        f"{marker * len(row)}\n{prompt}" if marker else prompt for prompt, row in zip(prompts, images, strict=True)
    ]
    pictures = [list(row) for row in images] if any(images) else None
    return processor(images=pictures, text=texts, padding=True, padding_side="left", return_tensors="pt")
