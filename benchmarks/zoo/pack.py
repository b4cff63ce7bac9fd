"""Packs many texts about one prefix of pictures into one row: they share it, attend to it and to themselves only."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from transformers import LlamaModel, Qwen3_5TextModel

from benchmarks.zoo import clips, language
from benchmarks.zoo.language import Exchange
from benchmarks.zoo.recipes.vlm import DialogueTurn, Mix, VlmRecipe
from mmspec.zoo import scenes
from mmspec.zoo.scenes import Scene

SPECIAL = ("<pad>", "<bos>", "<eos>", "<image>", "<user>", "<assistant>")  # their ids are 0, 1, 2, ...
PAD, BOS, EOS, IMAGE, USER, ASSISTANT = range(len(SPECIAL))
IGNORED = -100
PADDING = -1  # branch number of the padding; 0 is the image prefix
SECOND_TURN = 0.15  # chance that a question is followed by a second one in the same branch
Encode = Callable[[str], list[int]]
Branch = tuple[list[int], list[bool]]  # token ids of a conversation, and which of them the assistant says


@dataclass(frozen=True)
class Frame:
    """The tokens around each picture of a prompt, and the special tokens that a model has beside SPECIAL."""

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    special: tuple[str, ...] = ()


def chat_template(image: str) -> str:
    """Jinja of a conversation whose pictures are written as `image`."""
    return (
        "{{ '<bos>' }}{% for message in messages %}"
        "{% if message.role == 'assistant' %}{{ '<assistant>' }}{% else %}{{ '<user>' }}{% endif %}"
        "{% if message.content is string %}{{ message.content | trim }}{% else %}"
        "{% for part in message.content %}{% if part.type == 'image' %}" + image + "{% endif %}{% endfor %}"
        "{% for part in message.content %}{% if part.type == 'text' %}{{ part.text | trim }}{% endif %}{% endfor %}"
        "{% endif %}"
        "{% if message.role == 'assistant' %}{{ '<eos>' }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
    )


@dataclass(frozen=True)
class Packed:
    """One batch; S = prefix and slots. `labels` holds the token to be predicted *after* each position, or IGNORED."""

    ids: torch.Tensor  # [B, S]
    labels: torch.Tensor  # [B, S]
    positions: torch.Tensor  # [B, S], restarting behind the prefix in every branch
    branches: torch.Tensor  # [B, S]

    def seen(self) -> torch.Tensor:
        """Where a position may look, bool [B, S, S]: at the prefix, and at what stands before it in its branch."""
        length = self.ids.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        own = self.branches[:, :, None] == self.branches[:, None]
        return causal & (own | (self.branches == 0)[:, None])

    def mask(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Additive mask, 0 where a query may look: [B, 1, S, S]."""
        seen = self.seen()
        return torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, -1e9)[:, None]


def branch(exchanges: list[Exchange], encode: Encode) -> Branch:
    """A conversation behind its image prefix."""
    ids: list[int] = []
    said: list[bool] = []
    for turn, exchange in enumerate(exchanges):
        asked = ([USER] if turn else []) + encode(exchange.prompt) + [ASSISTANT]
        answered = [*encode(exchange.answer), EOS]
        ids += asked + answered
        said += [False] * len(asked) + [True] * len(answered)
    return ids, said


def pack(rows: list[list[Branch]], images: int, tokens_per_image: int, slots: int, frame: Frame) -> Packed:
    """Rows of branches as tensors; branches that do not fit into `slots` any more are left out."""
    prefix = [BOS, USER] + [*frame.before, *[IMAGE] * tokens_per_image, *frame.after] * images
    start, shape = len(prefix), (len(rows), len(prefix) + slots)
    ids, labels = np.full(shape, PAD), np.full(shape, IGNORED)
    branches, positions = np.full(shape, PADDING), np.zeros(shape, np.int64)
    ids[:, :start], branches[:, :start], positions[:, :start] = prefix, 0, np.arange(start)
    for row, parts in enumerate(rows):
        here = start
        for number, (tokens, said) in enumerate(parts, 1):
            end = here + len(tokens)
            if end > shape[1]:
                continue
            ids[row, here:end], branches[row, here:end] = tokens, number
            positions[row, here:end] = np.arange(start, start + len(tokens))
            labels[row, here : end - 1] = np.where(said[1:], tokens[1:], IGNORED)
            here = end
    return Packed(*(torch.from_numpy(a.astype(np.int64)) for a in (ids, labels, positions, branches)))


def read(
    inner: LlamaModel | Qwen3_5TextModel,
    batch: Packed,
    visual: torch.Tensor,
    positions: torch.Tensor,
    **masks: tuple[torch.Tensor, ...],
) -> torch.Tensor:
    """Last hidden states [B, S, width] of packed rows by a stock decoder that attends by their mask.

    Args:
        visual: what stands in the places of the pictures, [N, tokens, width].
        positions: [B, S], or as many axes of them as the decoder has.
        masks: of layers of other types, by type; none: the decoder has one type.
    """
    embedded = inner.embed_tokens(batch.ids)
    shown = (batch.ids == IMAGE)[..., None].expand_as(embedded)
    embedded = embedded.masked_scatter(shown, visual.to(embedded.dtype))
    own = batch.mask(torch.bfloat16 if torch.is_autocast_enabled("cpu") else embedded.dtype)
    mask = {"full_attention": own, **masks} if masks else own
    out = inner(inputs_embeds=embedded, attention_mask=mask, position_ids=positions, use_cache=False)
    hidden: torch.Tensor = out.last_hidden_state
    return hidden


def draw_batch(
    recipe: VlmRecipe, mix: Mix, turn: DialogueTurn, rows: int, encode: Encode, seed: list[int], frame: Frame = Frame()
) -> tuple[list[Scene], Packed]:
    """The batch of one step: its scenes (the pictures of a row stand together) and its packed texts."""
    rng = np.random.default_rng(seed)
    shown: list[Scene] = []
    parts = []
    for _ in range(rows):
        here, first, ask = SHOWN[turn.kind](rng, turn, mix)
        shown += here
        parts.append(_row(rng, first, ask, turn.slots, encode))
    tokens_per_image = (scenes.SIDE // recipe.vision.patch) ** 2
    return shown, pack(parts, turn.pictures, tokens_per_image, turn.slots, frame)


def _row(
    rng: np.random.Generator, first: list[Exchange], ask: Callable[[], Exchange], room: int, encode: Encode
) -> list[Branch]:
    """Branches of the texts that must come first, then of questions as long as there is room."""
    parts, refused = [], 0
    while refused < 3:
        exchanges = [first.pop(0)] if first else [ask() for _ in range(1 + (rng.random() < SECOND_TURN))]
        tokens, said = branch(exchanges, encode)
        if len(tokens) > room:
            refused += 1
            continue
        room -= len(tokens)
        parts.append((tokens, said))
    return parts


Shown = tuple[list[Scene], list[Exchange], Callable[[], Exchange]]  # pictures, texts that come first, a question


def _picture(rng: np.random.Generator, turn: DialogueTurn, mix: Mix) -> Shown:
    scene = scenes.draw(rng)
    first = [language.long(rng, scene, mix)] if rng.random() < mix.long_share else []
    return [scene], [*first, language.short(rng, scene, mix)], lambda: language.any_question(rng, scene, mix)


def _pair(rng: np.random.Generator, turn: DialogueTurn, mix: Mix) -> Shown:
    pair = (scenes.draw(rng), scenes.draw(rng))
    return list(pair), [], lambda: language.pair_question(rng, pair, mix)


def _clip(rng: np.random.Generator, turn: DialogueTurn, mix: Mix) -> Shown:
    clip = clips.draw(rng)
    frames = [clips.at(clip, time) for time in clips.moments(turn.pictures, rng)]
    return frames, [clips.describe(rng, clip)], lambda: clips.question(rng, clip)


SHOWN = {"picture": _picture, "pair": _pair, "clip": _clip}
