"""Logits processors that keep state, followed node by node: each node has a copy of what they remember of its path."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LogitsProcessor
from transformers.cache_utils import Cache

from mmspec.pipelines.host.processors.reader import Reader, ReadText
from mmspec.session import Group
from mmspec.types import NO_TOKEN, Draft

OWN_STATE = "mmspec_own_state"  # a processor that has this attribute, true, remembers what its attributes hold, no more
# Classes of published inference code of which the same is known; their own code runs, so only that is taken on trust.
_KNOWN = frozenset((
    "LLMImageStartTriggeredUnbatchedClassifierFreeGuidanceLogitsProcessor",  # Lumina-mGPT
    "MultiModalLogitsProcessor",
    "InterleavedTopKLogitsWarper",
    "UnbatchedClassifierFreeGuidanceLogitsForVisualTokenProcessor",  # Emu3.5
    "UnbatchedClassifierFreeGuidanceLogitsForVisualTokenWithDifferentialTopKProcessor",
))  # fmt: skip
_PLAIN = {bool, int, float, str, type(None)}


class _Plain(list[object]):
    """A list of numbers and words in a copied processor, known as one, so that a long vocabulary is cheap to copy."""


def follows(processor: object) -> bool:
    """Whether copies of a processor can be asked about drafts."""
    return type(processor).__name__ in _KNOWN or bool(getattr(processor, OWN_STATE, False))


def unfit(processors: Iterable[LogitsProcessor], rows: int, more: bool) -> str | None:
    """Why processors cannot be followed, or None.

    Args:
        rows: of the call.
        more: whether the model's layers keep more than keys and values.
    """
    for p in filter(follows, processors):
        name = f"the logits processor {type(p).__name__}"
        if more:
            return f"{name} keeps state, and so do the model's layers: it could not read a draft on its own"
        if rows > 1:
            return f"{name} keeps state, which is followed for one row only; generate row by row"
        if getattr(p, "unconditional_type", "no_text") != "no_text":  # Emu3.5's, for pictures made of pictures
            return f"{name} guides by two more prompts, each of which would be read token by token"
        if any(isinstance(thing, Cache) and int(thing.get_seq_length()) for thing in _within(vars(p))):
            return f"{name} has been used by a stock call and holds its cache; make a new one for each call"
    return None


def picture_tokens(processors: Iterable[Any]) -> Tensor | None:
    """Which tokens are a picture's, bool [n], all others not, as processors that are followed say; None: none says so.

    Lumina-mGPT's has a list, Emu3.5's a constant of its module, the first of them.
    """
    for p in filter(follows, processors):
        listed = getattr(p, "image_token_list", None)
        first = getattr(sys.modules.get(type(p).__module__), "BOV", None)
        if listed is None and isinstance(first, int):
            listed = range(first, p.model.config.vocab_size)
        if listed:
            tokens = torch.zeros(max(listed) + 1, dtype=torch.bool)
            tokens[list(listed)] = True
            return tokens
    return None


def _within(thing: object) -> Iterator[object]:
    yield thing
    if isinstance(thing, (dict, list, tuple)):
        for inner in thing.values() if isinstance(thing, dict) else thing:
            yield from _within(inner)


class Followed:
    """Processors that stand next to each other in a list, over the drafts of a call of one row."""

    def __init__(self, processors: Iterable[LogitsProcessor]) -> None:
        self._first = list(processors)
        self._readers: dict[int, Reader] = {}
        self._length = 0  # of the text under the last draft's root
        # tokens below the root → the copies that were asked there
        self._after: dict[tuple[int, ...], list[LogitsProcessor]] = {}

    def __call__(self, scores: Tensor, session: Group, draft: Draft) -> Tensor:
        """Scores [1, N, V], each node's as its own copies make them.

        Nodes below a forbidden token cannot be accepted. There the processors are shown the likeliest allowed token
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
                lawful = bool(out[0, parent, token] > -torch.inf)
                line = [*line, token if lawful else int(out[0, parent].argmax())]
                broken = broken or not lawful
            own, prefix = self._copies(before), torch.cat([text, text.new_tensor(line)[None]], 1)
            for reader in self._readers.values():
                reader.ahead, reader.loose = _below(n, tokens, parents), broken
            here = scores[:, n].clone()
            for processor in own:
                here = processor(prefix, here)
            if broken:  # nothing is drawn here but guesses, and these from something
                here = torch.where(here.amax(-1, keepdim=True) > -torch.inf, here, 0.0)
            out[:, n] = here
            nodes.append((line, broken, own))
            if not broken:
                after[tuple(line)] = own
        self._length, self._after = len(row.tokens), after
        return out

    def _copies(self, processors: list[LogitsProcessor]) -> list[LogitsProcessor]:
        made, seen = [copy.copy(p) for p in processors], dict[int, object]()
        for own in made:
            vars(own).update({name: self._copied(value, seen) for name, value in vars(own).items()})
        return made

    def _copied(self, thing: object, seen: dict[int, object]) -> object:
        """Tensors, texts read, and lists and dicts of them, what is the same staying the same; all else is shared."""
        if id(thing) in seen:
            return seen[id(thing)]
        made: Any = thing
        if isinstance(thing, nn.Module) and hasattr(thing, "generate"):
            made = self._readers.setdefault(id(thing), Reader(thing))
        elif isinstance(thing, Tensor):
            made = thing.clone()
        elif isinstance(thing, (Cache, ReadText)):
            made = ReadText(list(thing.tokens) if isinstance(thing, ReadText) else [])
        elif isinstance(thing, _Plain) or (type(thing) is list and set(map(type, thing)) <= _PLAIN):
            made = _Plain(thing)
        elif isinstance(thing, dict):
            made = seen[id(thing)] = copy.copy(thing)
            made.update({name: self._copied(value, seen) for name, value in thing.items()})
        elif isinstance(thing, list):
            made = seen[id(thing)] = copy.copy(thing)
            made[:] = [self._copied(value, seen) for value in thing]
        elif isinstance(thing, set):
            made = copy.copy(thing)
        elif isinstance(thing, tuple):
            made = tuple(self._copied(value, seen) for value in thing)
        seen[id(thing)] = made
        return made


def _below(node: int, tokens: list[int], parents: list[int]) -> list[int]:
    """Tokens of the line of first children below a node."""
    line: list[int] = []
    for n in range(node + 1, len(tokens)):
        if parents[n] == node and tokens[n] != NO_TOKEN:
            line.append(tokens[n])
            node = n
    return line
