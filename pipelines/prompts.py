"""Pictures and a question to model inputs, through the processor's own chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

from PIL import Image

if TYPE_CHECKING:  # a prompt's turns are made without transformers
    from mmspec.pipelines.host.kinds import BatchFeature, PreTrainedTokenizerBase, Processor

Turns = Sequence[tuple[str, str]]  # what was asked and answered
Chat = Sequence[dict[str, Any]]  # turns as chat templates take them, each with a list of parts


def chat_inputs(
    processor: Processor, prompts: Sequence[str], images: Sequence[Sequence[Image.Image]], system: str = "",
    start: str = "", clips: bool = False, before: Turns = (),
) -> BatchFeature:  # fmt: skip
    """Left-padded inputs, one row per prompt: a user turn with the row's pictures first, then its prompt.

    A processor without a chat template gets the system's words, its image token once per picture, the prompt and
    `start`.

    Args:
        system: what a system turn says before.
        start: how every answer is made to begin.
        clips: several pictures of a row are the frames of a clip; a processor that knows videos gets them as one.
        before: what every row was asked before and answered; its pictures stand in the first of these turns.
    """
    clips = clips and knows_clips(processor)
    chats = [chat(prompt, row, system, start, clips, before) for prompt, row in zip(prompts, images, strict=True)]
    return inputs_of(processor, chats, bool(start))


def inputs_of(processor: Processor, chats: Sequence[Chat], start: bool = False) -> BatchFeature:
    """Left-padded inputs, one row per chat: turns {role, content: parts of type text, image or video}.

    Args:
        start: whether the last turn is the beginning of the answer.

    Raises:
        ValueError: a picture for a model of text alone.
    """
    alone = text_alone(processor)
    parts = [[part for turn in chat for part in turn["content"]] for chat in chats]
    pictures = [[part["image"] for part in row if part["type"] == "image"] for row in parts]
    if alone and any(part["type"] != "text" for row in parts for part in row):
        raise ValueError("this model reads text alone, and was shown a picture; give prompts without pictures")
    if text_alone(processor):
        processor.padding_side = "left"
        if processor.pad_token is None:
            processor.pad_token = processor.eos_token
    if template(processor):
        padding = {"padding": True, "padding_side": "left"}
        how = {"padding": True} if alone else {"processor_kwargs": padding}
        inputs: Any = processor.apply_chat_template(
            [_plain(chat) for chat in chats] if alone else chats,
            add_generation_prompt=not start, continue_final_message=start,
            tokenize=True, return_dict=True, return_tensors="pt", **how,
        )  # fmt: skip
    else:
        texts = [_untemplated(processor, chat) for chat in chats]
        images = {} if alone else {"images": pictures if any(pictures) else None, "padding_side": "left"}
        inputs = processor(text=texts, padding=True, return_tensors="pt", **images)
    if not alone:
        return inputs
    from mmspec.pipelines.host.kinds import BatchFeature

    return BatchFeature(dict(inputs))


def knows_clips(processor: Processor) -> bool:
    """Whether a clip can be shown as one, not as its frames: its template says where one stands."""
    if not template(processor) or getattr(processor, "video_processor", None) is None:
        return False
    turns = ([{"role": "user", "content": [*clip, _said("?")]}] for clip in ([{"type": "video"}], []))
    shown, none = (processor.apply_chat_template(turn, tokenize=False) for turn in turns)
    return bool(shown != none)


def template(processor: Processor) -> str | dict[str, str] | None:
    """Its chat template, if it has one."""
    return getattr(processor, "chat_template", None)


def _plain(chat: Chat) -> list[dict[str, Any]]:
    """With texts for the contents of turns, as a tokenizer's template takes them."""
    return [{**turn, "content": "".join(part["text"] for part in turn["content"])} for turn in chat]


def _untemplated(processor: Processor, chat: Chat) -> str:
    """A chat where there is no template: a line for a turn's pictures, one for each of its texts."""
    marker = _marker(processor)
    lines = []
    for turn in chat:
        kinds = [part["type"] for part in turn["content"]]
        lines.append(marker * kinds.count("image"))
        lines += [part["text"] for part in turn["content"] if part["type"] == "text"]
    return "\n".join(filter(None, lines))


def unmarked(processor: Processor, text: str) -> str:
    """What a data set asks, without the processor's mark of a picture, which stands where pictures are shown."""
    marker = _marker(processor)
    return text.replace(marker, "").strip() if marker and marker in text else text


def _marker(processor: Processor) -> str:
    marker = getattr(processor, "image_token", None) or ""
    return str(getattr(marker, "content", marker))


def text_alone(processor: Processor) -> TypeGuard[PreTrainedTokenizerBase]:
    """Whether no picture can be shown: it is a tokenizer."""
    return not any(hasattr(processor, part) for part in ("tokenizer", "image_processor"))


def chat_text(processor: Processor, prompt: str, pictures: int, system: str = "", start: str = "") -> str:
    """The same turn as text, with the processor's mark in the place of each of so many pictures."""
    turns = chat(prompt, [None] * pictures, system, start)
    if not template(processor):
        return _untemplated(processor, turns)
    for turn in turns:
        turn["content"] = [{k: v for k, v in part.items() if k != "image"} for part in turn["content"]]
    text = processor.apply_chat_template(
        turns, add_generation_prompt=not start, continue_final_message=bool(start), tokenize=False
    )
    return str(text)


def chat(
    prompt: str, pictures: Sequence[Image.Image | None], system: str = "", start: str = "", clips: bool = False,
    before: Turns = (),
) -> list[dict[str, Any]]:  # fmt: skip
    """The turns of a row, as `inputs_of` takes them; see `chat_inputs`."""
    first = shown(pictures, clips)
    turns = [("system", [_said(system)])] if system else []
    for question, answer in (*before, (prompt, start)):
        turns.append(("user", [*first, _said(question)]))
        turns += [("assistant", [_said(answer)])] if answer else []
        first = []
    return [{"role": role, "content": content} for role, content in turns]


def shown(pictures: Sequence[Image.Image | None], clip: bool = False) -> list[dict[str, Any]]:
    """Parts of a turn: each picture, or several as the frames of one clip."""
    if clip and len(pictures) > 1:
        return [{"type": "video", "video": list(pictures)}]
    return [{"type": "image", "image": picture} for picture in pictures]


def _said(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}
