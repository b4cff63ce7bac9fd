"""Tiny random models of the structure of Lumina-mGPT and Emu3.5, with logits processors that do what the authors' do.

Written from what their public inference code does: one class guides and keeps the picture on its grid (Emu3.5), or
three share this (Lumina-mGPT). All of them work on a single row, read the second prompt by calls of the model of their
own, and remember where in a picture they are. The names are the authors'.
"""

from __future__ import annotations

import copy
import math
from functools import cache
from typing import Any

import torch
import transformers as T
from tiny_image_models import CHAMELEON_VQ, chameleon_codes, randomised
from tiny_vlms import PLAIN, TEXT
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.modeling_outputs import CausalLMOutputWithPast

from mmspec.pipelines.host.names import CACHE

EOS, OPEN, CLOSE, LINE, IMG = 2, 40, 41, 42, 43  # end of text; a picture's beginning and end; end of a row; codes begin
TIMES, ZERO, SIZES = 9, 10, 50  # Emu3.5 writes sizes in digits, "4*3"; Lumina has a token for each size
FIRST_CODE = BOV = 60  # codes are 60 … 127; Emu3.5's module has the second name for it


class Digits:
    """What Emu3.5's processor asks of its tokenizer."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [TIMES if c == "*" else ZERO + int(c) for c in text]

    def decode(self, ids: Tensor) -> str:
        return "".join("*" if i == TIMES else str(i - ZERO) for i in ids.tolist())


def only(scores: Tensor, *allowed: int) -> Tensor:
    """Zero for the allowed tokens as in both codes, which add or put in a mask."""
    out = torch.full_like(scores, -math.inf)
    out[:, list(allowed)] = 0
    return out


def top_k(scores: Tensor, k: int) -> Tensor:
    return scores.masked_fill(scores < scores.topk(min(k, scores.shape[-1]))[0][..., -1, None], -math.inf)


class UnbatchedClassifierFreeGuidanceLogitsForVisualTokenWithDifferentialTopKProcessor(LogitsProcessor):
    """Emu3.5's: the second prompt grows by the pictures' tokens alone, text is not read into it."""

    def __init__(self, model: Any, ids: Tensor, size: tuple[int, int] | None, scale: float = 2.0, both: bool = False):
        self.model, self.tokenizer, self.scale, self.both = model, Digits(), scale, both
        self.context: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "past": None}
        self.height, self.width = size or (None, None)
        self.inside = self.drawing = False

    def second(self, ids: Tensor) -> Tensor:
        own = self.context
        own["input_ids"] = torch.cat([own["input_ids"], ids[:, -1:]], 1)
        own["attention_mask"] = torch.cat([own["attention_mask"], torch.ones_like(ids[:, -1:])], 1)
        new = own["input_ids"] if own["past"] is None else own["input_ids"][:, -1:]
        mask = own["attention_mask"]
        out = self.model(new, attention_mask=mask, use_cache=True, **{CACHE: own["past"]})
        own["past"] = out.get(CACHE, None)
        return out.logits[:, -1]

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        if ids[0][-1] == OPEN:
            self.inside = True
        if ids[0][-1] == CLOSE:
            self.inside = self.drawing = False
            self.second(ids)
        if not self.inside:
            mask = torch.full_like(scores, -math.inf)
            mask[:, :FIRST_CODE] = 0
            return top_k(scores + mask, 12)
        return top_k(self.picture(ids, scores), 30)

    def picture(self, ids: Tensor, scores: Tensor) -> Tensor:
        unguided = self.second(ids)
        since = ids.shape[1] - int((ids[0] == OPEN).nonzero()[-1])
        if not self.drawing and ids[0][-1] != IMG:
            if self.height is not None:
                digits = self.tokenizer.encode(f"{self.height}*{self.width}", add_special_tokens=False)
                return scores + only(scores, digits[since - 1] if since <= len(digits) else IMG)
            steps = {1: range(ZERO + 2, ZERO + 5), 2: [TIMES], 3: range(ZERO + 2, ZERO + 5)}
            return scores + only(scores, *steps.get(since, [IMG]))
        if not self.drawing:
            self.drawing = True
            if self.height is None:
                begin = int((ids[0] == OPEN).nonzero()[-1])
                self.height, self.width = map(int, self.tokenizer.decode(ids[0][begin + 1 : -1]).split("*"))
        at = ids.shape[1] - int((ids[0] == IMG).nonzero()[-1])
        if at == self.height * (self.width + 1):
            return scores + only(scores, CLOSE)
        if at % (self.width + 1) == 0:
            return scores + only(scores, LINE)
        c, u = scores.log_softmax(-1), unguided.log_softmax(-1)
        mask = torch.full_like(scores, -math.inf)
        mask[:, FIRST_CODE:] = 0
        return self.scale * (c - u) + u + mask


class _OfLumina(LogitsProcessor):
    """Where in a picture a text is: None outside of it, else the number of tokens after its beginning."""

    begin: int | None = None

    def since(self, ids: Tensor) -> int | None:
        if (ids[0] == OPEN).sum() == (ids[0] == CLOSE).sum():
            self.begin = None
            return None
        if self.begin is None:
            self.begin = int((ids[0] == OPEN).nonzero()[-1])
        return ids.shape[1] - self.begin - 1


class LLMImageStartTriggeredUnbatchedClassifierFreeGuidanceLogitsProcessor(_OfLumina):
    """The second stream is the picture alone, from its beginning; each picture begins another."""

    def __init__(self, model: Any, scale: float = 2.0, fading: bool = False):
        self.model, self.scale, self.fading = model, scale, fading
        self.backup = {"mask": None, "past": T.DynamicCache(), "first": True}
        self.context: dict[str, Any] | None = None

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        since = self.since(ids)
        if since is None:
            self.context = None
            return scores
        if since < 2:
            return scores
        if self.context is None:
            self.context = copy.deepcopy(self.backup)
        if self.fading:  # of version 2.0, where each step lowers what the next one begins with
            self.scale = max(1.2, self.scale * (1 - since / 64))
        new = ids[:, self.begin :] if self.context["first"] else ids[:, -1:]
        old, ones = self.context["mask"], torch.ones_like(new)
        self.context["mask"] = ones if old is None else torch.cat([old, ones], 1)
        out = self.model(new, attention_mask=self.context["mask"], use_cache=True, **{CACHE: self.context["past"]})
        self.context.update(first=False, past=out.get(CACHE, None))
        unguided = out.logits[:, -1]
        return self.scale * (scores - unguided) + unguided


class MultiModalLogitsProcessor(_OfLumina):
    """Keeps pictures on their grid."""

    def __init__(self, vocab: int, device: torch.device):
        self.image_token_list = list(range(FIRST_CODE, vocab))
        self.suppress = torch.arange(vocab, device=device) < FIRST_CODE
        self.width: Tensor | None = None

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        since = self.since(ids)
        if since is None:
            self.width = None
        if since is None or since < 2:
            return scores
        if self.width is None:
            self.height, self.width = (2 * (ids[0][self.begin + i] - SIZES) for i in (1, 2))
        count = since - 1
        if count % (self.width + 1) == 0:
            return only(scores, LINE)
        if count == (self.width + 1) * self.height + 1:
            return only(scores, CLOSE)
        return torch.where(self.suppress, -math.inf, scores)


class InterleavedTopKLogitsWarper(LogitsProcessor):
    def __init__(self, picture: int = 30, text: int = 10):
        self.picture, self.text = picture, text

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        inside = (ids[0] == OPEN).sum() == (ids[0] == CLOSE).sum() + 1
        return top_k(scores, self.picture if inside else self.text)


class Lumina(T.ChameleonForConditionalGeneration):
    """Chameleon that lets its picture tokens through, which transformers' class masks."""

    def forward(self, *args: Any, return_dict: bool = True, **kwargs: Any) -> Any:
        out = self.model(*args, **kwargs)
        return CausalLMOutputWithPast(logits=self.lm_head(out[0]), **{CACHE: getattr(out, CACHE)})


@cache
def model(name: str) -> Any:
    """Emu3.5's decoder is Qwen3's: no biases, and norms of each head's queries and keys."""
    if name.startswith("emu3_5"):
        return randomised(T.Qwen3ForCausalLM(T.Qwen3Config(**TEXT, attention_dropout=0.0)), 3, 3.0)
    names = {"<image>": 59, "<racm3:break>": OPEN, "<eoss>": CLOSE, **chameleon_codes(FIRST_CODE)}
    config = T.ChameleonConfig(**PLAIN, vq_config=dict(CHAMELEON_VQ), vocabulary_map=names)
    return randomised(Lumina(config), 1, 4.0)


def sizes(batch: int, ids: Tensor) -> list[int]:
    """What training teaches, and weights at random do not: after a picture's beginning come two sizes."""
    inside = OPEN in ids[-2:].tolist()
    return [SIZES + 1, SIZES + 2] if inside else [*range(3, OPEN + 1)] if ids[-1] < LINE else [*range(128)]


sizes.mmspec_pure = True  # type: ignore[attr-defined]

EMU = {"emu3_5": (3, 4), "emu3_5 auto": None}
MODELS = [*EMU, "lumina_mgpt", "lumina_mgpt 2"]


def call(name: str) -> dict[str, Any]:
    """Arguments of `generate`, with new processors as the authors make them for each call: text, a picture, text."""
    target, more = model(name), {}
    ids = torch.tensor([[1, 5, 6, 7, 8, 30]])
    if name in EMU:
        guides: list[Any] = [
            UnbatchedClassifierFreeGuidanceLogitsForVisualTokenWithDifferentialTopKProcessor(
                target, torch.tensor([[1, 30]], device=target.device), EMU[name]
            )
        ]
    else:
        guides = [
            LLMImageStartTriggeredUnbatchedClassifierFreeGuidanceLogitsProcessor(
                target, fading=name == "lumina_mgpt 2"
            ),
            MultiModalLogitsProcessor(target.config.vocab_size, target.device),
            InterleavedTopKLogitsWarper(),
        ]
        more = {"prefix_allowed_tokens_fn": sizes}
    bias = {(OPEN,): 6.0, (EOS,): -50.0}
    processors = LogitsProcessorList(guides)
    return {"input_ids": ids, "logits_processor": processors, "sequence_bias": bias, "max_new_tokens": 60,
            "eos_token_id": EOS, "top_k": 0, **more}  # fmt: skip
