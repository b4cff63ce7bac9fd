"""Chameleon and Anole: stock masks picture tokens out of every forward; here a call can ask for a picture instead."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mmspec.config import UnsupportedError
from mmspec.pipelines.families.decoder_only import DecoderOnly, DecoderOnlyPatch
from mmspec.pipelines.host.call import Call, calling, picture
from mmspec.pipelines.host.exotic import pictures
from mmspec.pipelines.host.forward import Read
from mmspec.pipelines.host.hooks import stock
from mmspec.pipelines.host.kinds import GenerativeModel
from mmspec.pipelines.host.processors import followed
from mmspec.pipelines.host.processors.guidance import Guidance
from mmspec.pipelines.patching.handle import Patch
from mmspec.pipelines.patching.obstacles import Obstacle
from mmspec.pipelines.target.request import Request
from mmspec.pipelines.target.vlm import VlmTarget
from mmspec.rules import Rule, exact

MODES = ("text-only", "image-only")
_BEGIN, _END = "<racm3:break>", "<eoss>"  # what the family calls the marks around a picture


@dataclass(frozen=True)
class PictureTokens:
    """What a picture looks like as tokens: its beginning where the prompt does not end with one, the codes, its end."""

    head: int  # tokens before the first code, 0 or 1
    side: int  # rows, and columns
    begin: int  # id of the mark
    end: int  # likewise
    codes: Tensor  # ids of the picture tokens, [K]

    @classmethod
    def of(cls, model: GenerativeModel, ids: Tensor) -> PictureTokens:
        """For prompts [B, L].

        Raises:
            ValueError: some prompts end with the beginning of a picture and some do not, or the marks have no id.
        """
        names = pictures.chameleon_marks(model)
        missing = [name for name in (_BEGIN, _END) if name not in names]
        if missing:
            raise ValueError(f"a picture stands between {_BEGIN} and {_END}; config.vocabulary_map lacks {missing}")
        begun = {int(token) == names[_BEGIN] for token in ids[:, -1]}
        if len(begun) > 1:
            raise ValueError(f"either all prompts end with {_BEGIN} or none; these differ, generate them in two calls")
        side, codes = pictures.chameleon_tokens(model)
        return cls(int(not begun.pop()), side, names[_BEGIN], names[_END], torch.tensor(codes, device=ids.device))

    @property
    def length(self) -> int:
        return self.head + self.side**2 + 1

    def allowed(self, logits: Tensor, index: Tensor) -> Tensor:
        """Logits [B, N, V] with all but the possible tokens at −inf; `index` [B, N] counts from the first new one."""
        out = torch.full_like(logits, -torch.inf)
        out[..., self.codes] = logits[..., self.codes]
        for mark, here in ((self.begin, index < self.head), (self.end, index >= self.length - 1)):
            only = torch.full_like(logits[0, 0], -torch.inf)
            only[mark] = 0.0
            out = torch.where(here[..., None], only, out)
        return out


class ChameleonTarget(VlmTarget):
    """The model with its head read directly."""

    def _logits(self, out: object, read: Read) -> Tensor:
        return self.logits(read.final).to(self.device)

    def _grid(self, read: Read) -> tuple[int, int] | None:
        drawn = picture(PictureTokens)
        return None if drawn is None else (drawn.side, drawn.side)


class ChameleonPatch(DecoderOnlyPatch):
    """Adds to `generate` the argument `multimodal_generation_mode`, which the Anole port of transformers had.

    "text-only", the default, is stock. "image-only" draws one picture per row: the mark of its beginning unless the
    prompt ends with it, its codes, the mark of its end. It is guided where `guidance_scale` is given, by
    `negative_prompt_ids` as in stock; without them the null prompt is the prompt's last token. There is no such call in
    stock, so none can fall back to it.
    """

    def generate(self, inputs: Tensor | None = None, *args: object, **kwargs: Any) -> object:  # type: ignore[override]
        mode = kwargs.pop("multimodal_generation_mode", "text-only")
        if mode not in MODES:
            raise ValueError(f"multimodal_generation_mode must be one of {', '.join(MODES)}; got {mode!r}")
        if mode == "text-only":
            return DecoderOnlyPatch.generate(self, inputs, *args, **kwargs)
        ids = kwargs.get("input_ids") if inputs is None else inputs
        if ids is None:
            raise ValueError("a picture needs a prompt of token ids; pass input_ids")
        drawn = PictureTokens.of(self, ids)
        limit = kwargs.get("max_new_tokens")
        kwargs["max_new_tokens"] = drawn.length if limit is None else min(limit, drawn.length)
        with calling(picture=drawn):
            return stock(self).generate(self, inputs, *args, **kwargs)


class Chameleon(DecoderOnly):
    """A call draws a picture, or is one of text."""

    mixin = ChameleonPatch
    guided = True

    def target(self, model: GenerativeModel, features: tuple[int, ...], guidance: Guidance | None) -> VlmTarget:
        return (VlmTarget if picture(PictureTokens) is None else ChameleonTarget)(model, features, guidance)

    def request(self, request: Request) -> Request:
        """Only what a picture may hold."""
        drawn = picture(PictureTokens)
        return request if drawn is None else replace(request, allowed=drawn.allowed)

    def rule(self, named: Rule, call: Call) -> Rule:
        """A relaxed rule is for pictures, of the image mode or of Lumina-mGPT's processors: text stays exact."""
        if picture(PictureTokens) is not None:
            return named
        return exact if followed.picture_tokens(call.logits_processor) is None else super().rule(named, call)

    def decline(self, patch: Patch, why: Obstacle) -> None:
        if picture(PictureTokens) is not None:
            raise UnsupportedError(
                f"stock has no image mode that this call could run on, and mmspec cannot: {why.reason}"
            )
        super().decline(patch, why)

    def codebook(self, model: GenerativeModel) -> Tensor:
        return pictures.chameleon(model)
