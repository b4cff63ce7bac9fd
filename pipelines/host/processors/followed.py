"""Stateful logits processors over drafts: each node has its own copies, with the state after the node's path.

Some call the model themselves, for guidance; in their copies a Reader takes its place.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LogitsProcessor
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from mmspec.pipelines.host.names import CACHE, translated
from mmspec.session import Group
from mmspec.types import NO_TOKEN, Draft

OWN_STATE = "mmspec_own_state"  # if true on a processor, all of its state is in its attributes
# Classes of published inference code with that property. Their own code runs, so mmspec relies on nothing else.
_KNOWN = frozenset((
    "LLMImageStartTriggeredUnbatchedClassifierFreeGuidanceLogitsProcessor",  # Lumina-mGPT
    "MultiModalLogitsProcessor",
    "InterleavedTopKLogitsWarper",
    "UnbatchedClassifierFreeGuidanceLogitsForVisualTokenProcessor",  # Emu3.5
    "UnbatchedClassifierFreeGuidanceLogitsForVisualTokenWithDifferentialTopKProcessor",
))  # fmt: skip
_PLAIN = {bool, int, float, str, type(None)}


class _Plain(list[object]):
    """A list of plain values in a copied processor; the type marks it, so that a long vocabulary is cheap to copy."""


def follows(processor: object) -> bool:
    """Whether copies of a processor can be applied to drafts."""
    return type(processor).__name__ in _KNOWN or bool(getattr(processor, OWN_STATE, False))


def unfit(processors: Iterable[LogitsProcessor], rows: int, more: bool) -> str | None:
    """Why stateful processors cannot be applied to drafts, or None.

    Args:
        rows: the call's batch size.
        more: whether the model's layers keep more than keys and values.
    """
    for p in filter(follows, processors):
        name = f"the logits processor {type(p).__name__}"
        if more:
            return f"{name} keeps state, and so do the model's layers, so it cannot read a draft in its own forwards"
        if rows > 1:
            return f"{name} keeps state, which mmspec supports for one row only; generate row by row"
        if getattr(p, "unconditional_type", "no_text") != "no_text":  # Emu3.5's, for editing images
            return f"{name} guides by two more prompts, each of which would be read token by token"
        if any(isinstance(thing, Cache) and int(thing.get_seq_length()) for thing in _within(vars(p))):
            return f"{name} was used by a stock call and still has its cache; create a new one for each call"
    return None


def picture_tokens(processors: Iterable[Any]) -> Tensor | None:
    """bool [n], true at image tokens (false for any token beyond n), from a stateful processor; None: none knows them.

    Lumina-mGPT's has a list, the module of Emu3.5's a constant with the first one.
    """
    for p in filter(follows, processors):
        listed = getattr(p, "image_token_list", None)
        first = getattr(sys.modules.get(type(p).__module__), "BOV", None)
        if listed is None and isinstance(first, int):
            listed = range(first, p.model.config.vocab_size)
        if listed:
            tokens = torch.zeros(max(listed) + 1, dtype=torch.bool, device="cpu")
            tokens[list(listed)] = True
            return tokens
    return None


def _within(thing: object) -> Iterator[object]:
    yield thing
    if isinstance(thing, (dict, list, tuple)):
        for inner in thing.values() if isinstance(thing, dict) else thing:
            yield from _within(inner)


class Followed:
    """Adjacent stateful processors of a list, applied to the drafts of a call of one row."""

    def __init__(self, processors: Iterable[LogitsProcessor]) -> None:
        self._first = list(processors)
        self._readers: dict[int, Reader] = {}
        self._length = 0  # of the text up to the last draft's root
        # tokens below the root → the copies after they were applied there
        self._after: dict[tuple[int, ...], list[LogitsProcessor]] = {}

    def __call__(self, scores: Tensor, session: Group, draft: Draft) -> Tensor:
        """Scores [1, N, V], each node's processed by its own copies.

        Nodes below a forbidden token cannot be accepted. For these the processors get the likeliest allowed token
        instead, so that they see only texts that they allow.
        """
        (row,) = session.rows
        text = torch.tensor([row.tokens], device=scores.device)
        tokens, parents = torch.stack([draft.tokens, draft.tree.parents])[:, 0].tolist()
        begin = self._after[tuple(row.tokens[self._length : -1])] if self._after else self._first
        out, nodes, after = scores.clone(), list[tuple[list[int], bool, list[LogitsProcessor]] | None](), {}
        for n, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            line, broken, before = list[int](), False, begin
            if n:
                above = nodes[parent]
                if token == NO_TOKEN or above is None:
                    nodes.append(None)
                    continue
                line, broken, before = above
                allowed = bool(out[0, parent, token] > -torch.inf)
                line = [*line, token if allowed else int(out[0, parent].argmax())]
                broken = broken or not allowed
            own, prefix = self._copies(before), torch.cat([text, text.new_tensor(line)[None]], 1)
            for reader in self._readers.values():
                reader.ahead, reader.loose = _below(n, tokens, parents), broken
            here = scores[:, n].clone()
            for processor in own:
                here = processor(prefix, here)
            if broken:  # a token may still be drawn here, though never accepted, so keep some finite score
                here = torch.where(here.amax(-1, keepdim=True) > -torch.inf, here, 0.0)
            out[:, n] = here
            nodes.append((line, broken, own))
            if not broken:
                after[tuple(line)] = own
        self._length, self._after = len(row.tokens), after
        return out

    def _copies(self, processors: list[LogitsProcessor]) -> list[LogitsProcessor]:
        copies, seen = [copy.copy(p) for p in processors], dict[int, object]()
        for own in copies:
            vars(own).update({name: self._copied(value, seen) for name, value in vars(own).items()})
        return copies

    def _copied(self, thing: object, seen: dict[int, object]) -> object:
        """Copy tensors, ReadTexts and containers of them, and keep their identity relations; share everything else."""
        if id(thing) in seen:
            return seen[id(thing)]
        new: Any = thing
        if isinstance(thing, nn.Module) and hasattr(thing, "generate"):
            new = self._readers.setdefault(id(thing), Reader(thing))
        elif isinstance(thing, Tensor):
            new = thing.clone()
        elif isinstance(thing, (Cache, ReadText)):
            new = ReadText(list(thing.tokens) if isinstance(thing, ReadText) else [])
        elif isinstance(thing, _Plain) or (type(thing) is list and set(map(type, thing)) <= _PLAIN):
            new = _Plain(thing)
        elif isinstance(thing, dict):
            new = seen[id(thing)] = copy.copy(thing)
            new.update({name: self._copied(value, seen) for name, value in thing.items()})
        elif isinstance(thing, list):
            new = seen[id(thing)] = copy.copy(thing)
            new[:] = [self._copied(value, seen) for value in thing]
        elif isinstance(thing, set):
            new = copy.copy(thing)
        elif isinstance(thing, tuple):
            new = tuple(self._copied(value, seen) for value in thing)
        seen[id(thing)] = new
        return new


def _below(node: int, tokens: list[int], parents: list[int]) -> list[int]:
    """The tokens of the chain of first children below a node."""
    line: list[int] = []
    for n in range(node + 1, len(tokens)):
        if parents[n] == node and tokens[n] != NO_TOKEN:
            line.append(tokens[n])
            node = n
    return line


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
