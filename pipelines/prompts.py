"""Turns images and a question into model inputs, with the processor's own chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

from PIL import Image

if TYPE_CHECKING:  # chat turns can be built without importing transformers
    from mmspec.pipelines.host.kinds import BatchFeature, PreTrainedTokenizerBase, Processor

THINKS = "enable_thinking"  # a variable of chat templates
Turns = Sequence[tuple[str, str]]  # pairs of question and answer
Chat = Sequence[dict[str, Any]]  # messages in the form that chat templates take, each with a list of content parts


def chat_inputs(
    processor: Processor, prompts: Sequence[str], images: Sequence[Sequence[Image.Image]], system: str = "",
    clips: bool = False, before: Turns = (),
) -> BatchFeature:  # fmt: skip
    """Left-padded inputs, one row per prompt: a user turn with the row's images first, then its prompt.

    For a processor without a chat template, the text is the system prompt, its image token once per image, and the
    prompt.

    Args:
        system: the system prompt.
        clips: several images of a row are the frames of a clip; a processor that supports videos gets them as a video.
        before: earlier questions and answers of every row; its images are in the first of these turns.
    """
    clips = clips and knows_clips(processor)
    chats = [chat(prompt, row, system, clips, before) for prompt, row in zip(prompts, images, strict=True)]
    return inputs_of(processor, chats)


def inputs_of(processor: Processor, chats: Sequence[Chat], thinking: bool = False) -> BatchFeature:
    """Left-padded inputs, one row per chat: turns {role, content: parts of type text, image or video}.

    Marks of pictures in texts (`<image>`, as in data sets for LLaVA) are left out: the chat template adds them where
    the pictures belong.

    Args:
        thinking: whether a model that may reason before it answers does so, if its template leaves the choice
            (`enable_thinking`, as Qwen3.5's).

    Raises:
        ValueError: an image for a text-only model.
    """
    text_only = text_alone(processor)
    chats = chats if text_only else [_unmarked(processor, chat) for chat in chats]
    parts = [[part for turn in chat for part in turn["content"]] for chat in chats]
    pictures = [[part["image"] for part in row if part["type"] == "image"] for row in parts]
    if text_only and any(part["type"] != "text" for row in parts for part in row):
        raise ValueError("this model reads only text, but a prompt has an image; use prompts without images")
    if text_alone(processor):
        processor.padding_side = "left"
        if processor.pad_token is None:
            processor.pad_token = processor.eos_token
    if template(processor):
        padding = {"padding": True, "padding_side": "left"}
        kwargs: dict[str, Any] = {"padding": True} if text_only else {"processor_kwargs": padding}
        if THINKS in str(template(processor)):
            kwargs[THINKS] = thinking
        inputs: Any = processor.apply_chat_template(
            [_joined_text(chat) for chat in chats] if text_only else chats,
            add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt", **kwargs,
        )  # fmt: skip
    else:
        texts = [_untemplated(processor, chat) for chat in chats]
        images = {} if text_only else {"images": pictures if any(pictures) else None, "padding_side": "left"}
        inputs = processor(text=texts, padding=True, return_tensors="pt", **images)
    if not text_only:
        return inputs
    from mmspec.pipelines.host.kinds import BatchFeature

    return BatchFeature(dict(inputs))


def knows_clips(processor: Processor) -> bool:
    """Whether the processor takes a clip as a video, not just as frames: its chat template has a place for videos."""
    if not template(processor) or getattr(processor, "video_processor", None) is None:
        return False
    turns = ([{"role": "user", "content": [*clip, _text("?")]}] for clip in ([{"type": "video"}], []))
    with_clip, without = (processor.apply_chat_template(turn, tokenize=False) for turn in turns)
    return bool(with_clip != without)


def template(processor: Processor) -> str | dict[str, str] | None:
    """The processor's chat template, or None."""
    return getattr(processor, "chat_template", None)


def _joined_text(chat: Chat) -> list[dict[str, Any]]:
    """The chat with each turn's content joined to one string, the form that a tokenizer's chat template takes."""
    return [{**turn, "content": "".join(part["text"] for part in turn["content"])} for turn in chat]


def _untemplated(processor: Processor, chat: Chat) -> str:
    """A chat as text without a template: for each turn a line of image tokens, and one for each of its texts."""
    marker = _marker(processor, "image")
    lines = []
    for turn in chat:
        kinds = [part["type"] for part in turn["content"]]
        lines.append(marker * kinds.count("image"))
        lines += [part["text"] for part in turn["content"] if part["type"] == "text"]
    return "\n".join(filter(None, lines))


def _unmarked(processor: Processor, chat: Chat) -> Chat:
    """The chat, without the processor's marks of pictures and videos in its texts."""
    markers = [marker for kind in ("image", "video") if (marker := _marker(processor, kind))]

    def cleaned(part: dict[str, Any]) -> dict[str, Any]:
        text = part.get("text", "")
        found = [marker for marker in markers if marker in text]
        for marker in found:
            text = text.replace(marker, "")
        return {**part, "text": text.strip()} if found else part

    return [{**turn, "content": [cleaned(part) for part in turn["content"]]} for turn in chat]


def _marker(processor: Processor, kind: str) -> str:
    """The text that stands for a picture or a video in this processor's prompts."""
    marker = getattr(processor, f"{kind}_token", None) or ""
    return str(getattr(marker, "content", marker))


def text_alone(processor: Processor) -> TypeGuard[PreTrainedTokenizerBase]:
    """Whether the processor is a plain tokenizer, so that it takes no images."""
    return not any(hasattr(processor, part) for part in ("tokenizer", "image_processor"))


def chat(
    prompt: str, pictures: Sequence[Image.Image | None], system: str = "", clips: bool = False, before: Turns = (),
) -> list[dict[str, Any]]:  # fmt: skip
    """The turns of one row in the form that `inputs_of` takes; for the arguments see `chat_inputs`."""
    first = shown(pictures, clips)
    turns = [("system", [_text(system)])] if system else []
    for question, answer in (*before, (prompt, "")):
        turns.append(("user", [*first, _text(question)]))
        turns += [("assistant", [_text(answer)])] if answer else []
        first = []
    return [{"role": role, "content": content} for role, content in turns]


def shown(pictures: Sequence[Image.Image | None], clip: bool = False) -> list[dict[str, Any]]:
    """Content parts of a turn: one for each image, or one video whose frames are all the images."""
    if clip and len(pictures) > 1:
        return [{"type": "video", "video": list(pictures)}]
    return [{"type": "image", "image": picture} for picture in pictures]


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}
