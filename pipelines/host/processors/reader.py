"""Replaces the model in copies of a logits processor that calls it, as Emu3.5's does for guidance."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from transformers.cache_utils import DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from mmspec.pipelines.host.names import CACHE, translated


@dataclass(eq=False)
class ReadText:
    """Replaces a KV cache in a copied processor by the list of tokens that were read into it."""

    tokens: list[int] = field(default_factory=list)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return len(self.tokens)


class Reader:
    """Replaces the model in copied processors that call it.

    All copies read the same text, each along its own path of the draft. So the cache of a copy is a list of tokens, and
    one forward reads to the end of the draft; the copies of later nodes use its logits.

    Attributes:
        model: the model itself.
        ahead: tokens of the draft below the current node.
        loose: whether the current node cannot be accepted anyway, so that any logits suffice, without a forward.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.ahead: list[int] = []
        self.loose = False
        self._cache, self._text, self._begin = DynamicCache(), [], 0  # type: DynamicCache, list[int], int
        self._logits: Tensor | None = None  # [T, V], after the tokens of the text from `_begin` on

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __deepcopy__(self, memo: object) -> Reader:
        return self

    def __call__(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, use_cache: bool = True, **others: object
    ) -> CausalLMOutputWithPast:
        """The model's output for one row [1, n] that continues the text in the KV cache among `others`.

        Raises:
            ValueError: padding, several rows, a cache that is not from the model, or an unsupported argument.
        """
        others = translated(others)
        past = ReadText() if (given := others.pop(CACHE, None)) is None else given
        others.pop("return_dict", None)
        closed = attention_mask is not None and not bool(attention_mask.all())
        if len(input_ids) > 1 or closed or others or not isinstance(past, ReadText):
            what = "several rows" if len(input_ids) > 1 else "padding" if closed else ", ".join(others) or "a new cache"
            raise ValueError(
                f"a logits processor calls the model with {what}; mmspec supports input_ids [1, n], an attention_mask "
                "of ones, the KV cache that the model returned, and use_cache. Call mmspec.disable(model) for this"
            )
        text = past.tokens + input_ids[0].tolist()
        if use_cache:
            past.tokens = text
        logits = self._after(text, input_ids)
        return CausalLMOutputWithPast(logits=logits, **{CACHE: past if use_cache else None})  # type: ignore[arg-type]

    def _after(self, text: list[int], ids: Tensor) -> Tensor:
        """Logits [1, n, V] after each of the last n tokens of a text, which are `ids` [1, n]."""
        n, end = ids.shape[1], len(text)
        first = end - n
        if self.loose and self._logits is not None and len(self._logits) >= n:
            first = min(max(first, self._begin), len(self._text) - n)
        elif first < self._begin or self._text[:end] != text:
            whole = text + self.ahead
            pairs = enumerate(zip(self._text, text[:first], strict=False))
            shared = next((i for i, (a, b) in pairs if a != b), min(len(self._text), first))
            if shared < len(self._text):
                self._cache.crop(shared - len(self._text))
            new = ids.new_tensor([whole[shared:]])
            mask = ids.new_ones(1, len(whole))
            out = self.model(new, attention_mask=mask, use_cache=True, return_dict=True, **{CACHE: self._cache})
            self._text, self._begin, self._logits = whole, shared, out.logits[0]
        assert self._logits is not None
        return self._logits[first - self._begin :][None, :n]
