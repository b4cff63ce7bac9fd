"""Chameleon and Anole: stock masks image tokens in every forward; here a call can generate an image instead."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mmspec.config import UnsupportedError
from mmspec.pipelines.families.decoder_only import DecoderOnly, DecoderOnlyPatch
from mmspec.pipelines.host.assisted import setting
from mmspec.pipelines.host.call import Call, calling, picture
from mmspec.pipelines.host.exotic import pictures
from mmspec.pipelines.host.forward import Read
from mmspec.pipelines.host.hooks import stock
from mmspec.pipelines.host.kinds import GenerativeModel
from mmspec.pipelines.host.processors import followed
from mmspec.pipelines.host.processors.guidance import Guidance
from mmspec.pipelines.patching.handle import Patch
from mmspec.pipelines.patching.obstacles import Obstacle
from mmspec.pipelines.target.model import Request
from mmspec.pipelines.target.vlm import VlmTarget
from mmspec.rules import Rule, exact

MODES = ("text-only", "image-only")
_BEGIN, _END = "<racm3:break>", "<eoss>"  # the names of the tokens before and after an image


@dataclass(frozen=True)
class PictureTokens:
    """The tokens of an image: the begin token unless the prompt ends with it, the codes, the end token."""

    head: int  # tokens before the first code, 0 or 1
    side: int  # the number of rows, and of columns
    begin: int  # id of the begin token
    end: int  # id of the end token
    codes: Tensor  # ids of the image tokens, [K]

    @classmethod
    def of(cls, model: GenerativeModel, ids: Tensor) -> PictureTokens:
        """For prompts [B, L].

        Raises:
            ValueError: only some prompts end with the begin token, or one of the two tokens has no id.
        """
        names = pictures.chameleon_marks(model)
        missing = [name for name in (_BEGIN, _END) if name not in names]
        if missing:
            raise ValueError(f"a picture is between {_BEGIN} and {_END}, but config.vocabulary_map lacks {missing}")
        begun = {int(token) == names[_BEGIN] for token in ids[:, -1]}
        if len(begun) > 1:
            raise ValueError(f"only some of the prompts end with {_BEGIN}; generate those in a call of their own")
        side, codes = pictures.chameleon_tokens(model)
        return cls(int(not begun.pop()), side, names[_BEGIN], names[_END], torch.tensor(codes, device=ids.device))

    @property
    def length(self) -> int:
        return self.head + self.side**2 + 1

    def allowed(self, logits: Tensor, index: Tensor) -> Tensor:
        """Logits [B, N, V] with all impossible tokens at −inf; `index` [B, N] counts from the first new token."""
        out = torch.full_like(logits, -torch.inf)
        out[..., self.codes] = logits[..., self.codes]
        for mark, here in ((self.begin, index < self.head), (self.end, index >= self.length - 1)):
            only = torch.full_like(logits[0, 0], -torch.inf)
            only[mark] = 0.0
            out = torch.where(here[..., None], only, out)
        return out


class ChameleonTarget(VlmTarget):
    """A target whose logits come directly from the head, without stock's mask of image tokens."""

    def _logits(self, out: object, read: Read) -> Tensor:
        return self.logits(read.final).to(self.device)

    def _grid(self, read: Read) -> tuple[int, int] | None:
        image = picture(PictureTokens)
        return None if image is None else (image.side, image.side)


class ChameleonPatch(DecoderOnlyPatch):
    """Adds to `generate` the argument `multimodal_generation_mode`, which the Anole port of transformers had.

    "text-only", the default, is stock. "image-only" generates one image per row: the begin token unless the prompt ends
    with it, the codes, the end token. With `guidance_scale` it is guided, by `negative_prompt_ids` as in stock; without
    them the negative prompt is the prompt's last token. Stock has no such call, so none can fall back to it.
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
        if (whole := kwargs.pop("max_length", None)) is not None:
            kwargs["max_new_tokens"] = kwargs.get("max_new_tokens") or max(1, whole - ids.shape[1])
        image = PictureTokens.of(self, ids)
        config = copy(kwargs.get("generation_config"))
        limit = kwargs.get("max_new_tokens") or setting("max_new_tokens", config)
        limit = image.length if limit is None else min(limit, image.length)
        if config is None or "max_new_tokens" in kwargs:
            kwargs["max_new_tokens"] = limit
        else:
            config.max_new_tokens = limit
            kwargs["generation_config"] = config
        with calling(picture=image):
            return stock(self).generate(self, inputs, *args, **kwargs)


class Chameleon(DecoderOnly):
    """A call generates either an image or text."""

    mixin = ChameleonPatch
    guided = True

    def target(self, model: GenerativeModel, features: tuple[int, ...], guidance: Guidance | None) -> VlmTarget:
        if picture(PictureTokens) is None:
            return super().target(model, features, guidance)
        return ChameleonTarget(model, features, guidance)

    def request(self, request: Request) -> Request:
        """Allows only the tokens of an image in image mode."""
        image = picture(PictureTokens)
        return request if image is None else replace(request, allowed=image.allowed)

    def rule(self, named: Rule, call: Call) -> Rule:
        """A relaxed rule applies to images, of the image mode or of Lumina-mGPT's processors; text stays exact."""
        if picture(PictureTokens) is not None:
            return named
        return exact if followed.picture_tokens(call.logits_processor) is None else super().rule(named, call)

    def decline(self, patch: Patch, why: Obstacle) -> None:
        if picture(PictureTokens) is not None:
            raise UnsupportedError(
                f"mmspec cannot accelerate this call, and stock has no image mode to run it: {why.reason}"
            )
        super().decline(patch, why)

    def codebook(self, model: GenerativeModel) -> Tensor:
        return pictures.chameleon(model)
