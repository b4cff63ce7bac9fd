"""Pictures and a question to model inputs, through the processor's own chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from PIL import Image

Turns = Sequence[tuple[str, str]]  # what was asked and answered


def chat_inputs(
    processor: Any, prompts: Sequence[str], images: Sequence[Sequence[Image.Image]], system: str = "", start: str = "",
    clips: bool = False, before: Turns = (),
) -> Any:  # fmt: skip
    """Left-padded inputs, one row per prompt: a user turn with the row's pictures first, then its prompt.

    A processor without a chat template gets the system's words, its image token once per picture, the prompt and
    `start`.

    Args:
        system: what a system turn says before.
        start: how every answer is made to begin.
        clips: several pictures of a row are the frames of a clip; a processor that knows videos gets them as one.
        before: what every row was asked before and answered; its pictures stand in the first of these turns.
    """
    clips = clips and getattr(processor, "video_processor", None) is not None
    if getattr(processor, "chat_template", None):
        chats = [_chat(prompt, row, system, start, clips, before) for prompt, row in zip(prompts, images, strict=True)]
        return processor.apply_chat_template(
            chats,
            add_generation_prompt=not start,
            continue_final_message=bool(start),
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            processor_kwargs={"padding": True, "padding_side": "left"},
        )
    marker = getattr(processor, "image_token", None) or ""
    marker = getattr(marker, "content", marker)
    said = [line for turn in before for line in turn]
    texts = [
        "\n".join(part for part in (system, marker * len(row), *said, prompt, start) if part or part is prompt)
        for prompt, row in zip(prompts, images, strict=True)
    ]
    pictures = [list(row) for row in images] if any(images) else None
    return processor(images=pictures, text=texts, padding=True, padding_side="left", return_tensors="pt")


def chat_text(processor: Any, prompt: str, pictures: int, system: str = "", start: str = "") -> str:
    """The same turn as text, with the processor's mark in the place of each of so many pictures."""
    if getattr(processor, "chat_template", None):
        chat: Any = _chat(prompt, [None] * pictures, system, start, False, ())
        for turn in chat:
            turn["content"] = [{k: v for k, v in part.items() if k != "image"} for part in turn["content"]]
        text = processor.apply_chat_template(
            chat, add_generation_prompt=not start, continue_final_message=bool(start), tokenize=False
        )
        return str(text)
    marker = getattr(processor, "image_token", None) or ""
    marker = str(getattr(marker, "content", marker))
    return "\n".join(part for part in (system, marker * pictures, prompt, start) if part or part is prompt)


def _chat(
    prompt: str, pictures: Sequence[Image.Image | None], system: str, start: str, clips: bool, before: Turns
) -> list[dict[str, Any]]:
    shown: list[dict[str, Any]] = [{"type": "image", "image": picture} for picture in pictures]
    if clips and len(pictures) > 1:
        shown = [{"type": "video", "video": list(pictures)}]
    turns = [("system", [_said(system)])] if system else []
    for asked, answered in (*before, (prompt, start)):
        turns.append(("user", [*shown, _said(asked)]))
        turns += [("assistant", [_said(answered)])] if answered else []
        shown = []
    return [{"role": role, "content": content} for role, content in turns]


def _said(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}
