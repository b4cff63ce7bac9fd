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
    if text_alone(processor):
        if any(images):
            raise ValueError("this model reads text alone, and was shown a picture; give prompts without pictures")
        from mmspec.pipelines.host.loading import BatchFeature

        return BatchFeature(dict(_text_inputs(processor, prompts, system, start, before)))
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


def text_alone(processor: Any) -> bool:
    """Whether no picture can be shown: it is a tokenizer."""
    return not any(hasattr(processor, part) for part in ("tokenizer", "image_processor"))


def _text_inputs(tokenizer: Any, prompts: Sequence[str], system: str, start: str, before: Turns) -> Any:
    """The same by a tokenizer, whose template takes texts for the contents of turns."""
    padding = {"padding": True, "return_tensors": "pt"}
    tokenizer.padding_side = "left"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if not getattr(tokenizer, "chat_template", None):
        said = [line for turn in before for line in turn]
        lines = [(system, *said, prompt, start) for prompt in prompts]
        texts = ["\n".join(part for part in row if part or part is row[-2]) for row in lines]
        return tokenizer(texts, **padding)
    chats = [_chat(prompt, (), system, start, False, before) for prompt in prompts]
    told = [[{**turn, "content": "".join(part["text"] for part in turn["content"])} for turn in chat] for chat in chats]
    return tokenizer.apply_chat_template(
        told, add_generation_prompt=not start, continue_final_message=bool(start), tokenize=True, return_dict=True,
        **padding,
    )  # fmt: skip


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
