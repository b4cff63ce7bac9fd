"""Answers that follow a grammar: which tokens are allowed after each node of a draft, and which are forced."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import LogitsProcessor, PreTrainedTokenizerFast

from mmspec.pipelines.host.kinds import Processor
from mmspec.pipelines.host.processors.json_schema import grammar_of
from mmspec.session import Group, Row
from mmspec.types import NO_TOKEN, Draft

if TYPE_CHECKING:  # an optional dependency
    from llguidance import LLMatcher, LLTokenizer


class GrammarError(ValueError):
    """A grammar went beyond llguidance's limits in the middle of an answer, that of `row` if it is one of a batch."""

    row: Row | None = None


class Parse:
    """The parse of an answer, token by token; for another text, only the part that differs is parsed again."""

    def __init__(self, make: Callable[[], LLMatcher], ends: frozenset[int]) -> None:
        self._make, self._ends = make, ends
        self._begin()

    def _begin(self) -> None:
        """With a new matcher: one that went beyond a limit stays in error."""
        self._matcher, self._text = self._make(), list[int]()

    def go(self, text: list[int]) -> bool:
        """Parse this text; returns whether the grammar allows it and it has not ended. It may raise a GrammarError."""
        keep = min(len(text), len(self._text))
        while text[:keep] != self._text[:keep]:
            keep -= 1
        if keep < len(self._text):
            self._matcher.rollback(len(self._text) - keep)
            del self._text[keep:]
        for token in text[keep:]:
            if token in self._ends:
                return False
            taken = self._matcher.try_consume_tokens([token])
            if self._matcher.is_error():
                why = self._matcher.get_error().strip().partition("\n")[0]
                self._begin()
                raise GrammarError(f"the grammar is too large for llguidance, so simplify the schema ({why})")
            if taken != 1:
                return False
            self._text.append(token)
        return True

    def may_go(self, text: list[int]) -> bool:
        """`go` for a draft; False if it is beyond the parser's limits: the answer may go elsewhere."""
        try:
            return self.go(text)
        except GrammarError:
            return False

    @property
    def mask(self) -> bytes:
        """The allowed next tokens, one bit for each."""
        return bytes(self._matcher.compute_bitmask())

    def forced(self, text: list[int], most: int) -> list[int]:
        """Tokens that have to follow this text, if the grammar has one continuation, in its canonical tokenization."""
        if not self.may_go(text):
            return []
        tokens = [int(token) for token in self._matcher.compute_ff_tokens()[:most]]
        if self._matcher.is_error():
            self._begin()
            return []
        if len(tokens) < most and self.may_go(text + tokens) and self._matcher.is_stopped():
            tokens.append(min(self._ends))
        return tokens


class GrammarProcessor(LogitsProcessor):
    """Masks tokens that a grammar does not allow; for `model.generate(logits_processor=[...])`, enabled or not.

    On an enabled model each node of a draft is masked by its own path, and tokens that the grammar forces are drafted.
    With stock `generate`, use it in one call at a time; the answer begins after the prompt of the first step.
    """

    def __init__(self, tokenizer: LLTokenizer, grammar: str) -> None:
        """
        Args:
            tokenizer: llguidance's.
            grammar: in llguidance's form.
        """
        self._tokenizer, self._grammar = tokenizer, grammar
        self._prompts: list[list[int]] = []
        self._length = 0
        self._parses: list[Parse] = []

    def parse(self) -> Parse:
        """The parse of an empty answer."""
        from llguidance import LLMatcher

        return Parse(partial(LLMatcher, self._tokenizer, self._grammar), frozenset(self._tokenizer.eos_tokens))

    def masked(self, scores: Tensor, masks: list[bytes | None]) -> Tensor:
        """Scores [n, V], each row masked by its own bits; None leaves a row unchanged."""
        size = max((len(mask) for mask in masks if mask), default=0)
        if not size:
            return scores
        packed = torch.frombuffer(bytearray(b"".join(mask or b"\xff" * size for mask in masks)), dtype=torch.uint8)
        places = torch.arange(8, dtype=torch.uint8, device=scores.device)
        bits = packed.view(len(masks), size, 1).to(scores.device) >> places
        allowed = (bits & 1).bool().flatten(1)[:, : scores.shape[-1]]
        allowed = pad(allowed, (0, scores.shape[-1] - allowed.shape[1]))
        return scores.masked_fill(~allowed, -torch.inf)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """One step of stock decoding: ids [B, L] and scores [B, V]."""
        texts, length = input_ids.tolist(), input_ids.shape[1]
        begin = len(self._prompts[0]) if self._prompts else length
        same = begin < length <= self._length + 1 and [text[:begin] for text in texts] == self._prompts
        if not same:
            self._prompts, begin = texts, length
            self._parses = [self.parse() for _ in texts]
        self._length = length
        answers = zip(self._parses, texts, strict=True)
        return self.masked(scores, [parse.mask if parse.go(text[begin:]) else None for parse, text in answers])


class Grammar:
    """A GrammarProcessor applied to the drafts of a call."""

    def __init__(self, processor: GrammarProcessor) -> None:
        self._processor = processor
        self._parses: dict[int, Parse] = {}

    def parse(self, row: Row) -> Parse:
        """The parse of a row of this call."""
        if row.index not in self._parses:
            self._parses[row.index] = self._processor.parse()
        return self._parses[row.index]

    def __call__(self, scores: Tensor, session: Group, draft: Draft) -> Tensor:
        """Scores [B, N, V], each node's masked by its path; nodes below a forbidden token stay unmasked."""
        masks: list[bytes | None] = []
        for row, tokens, parents in zip(session.rows, draft.tokens.tolist(), draft.tree.parents.tolist(), strict=True):
            parse, answer = self.parse(row), row.tokens[row.start :]
            try:
                lines: list[list[int] | None] = [answer if parse.go(answer) else None]
            except GrammarError as error:
                error.row = row
                raise
            masks.append(None if lines[0] is None else parse.mask)
            for token, parent in zip(tokens[1:], parents[1:], strict=True):
                above = lines[parent]
                line = None if above is None or token == NO_TOKEN else [*above, token]
                lines.append(line if line is not None and parse.may_go(line) else None)
                masks.append(None if lines[-1] is None else parse.mask)
        return self._processor.masked(scores.flatten(0, 1), masks).view_as(scores)


def json_grammar(processor: Processor, schema: dict[str, object] | str) -> GrammarProcessor:
    """A logits processor for `model.generate(logits_processor=[...])` that allows only JSON that matches a schema.

    The JSON has no white space between its parts. On an enabled model, tokens that the schema forces, such as the names
    of required fields, are drafted in addition to the drafter's tokens; the output is that of stock `generate` with the
    same processor. An answer that `max_new_tokens` cuts off is not valid JSON.

    Args:
        processor: of the model, or its tokenizer; it has to be a fast one.
        schema: JSON Schema.

    Raises:
        ImportError: llguidance is not installed.
        ValueError: an invalid schema, or one that llguidance does not support; a tokenizer without JSON's characters.
    """
    grammar_of(schema)  # before the tokenizer, which takes a second
    own = _tokenizer(getattr(processor, "tokenizer", processor))
    return GrammarProcessor(own, grammar_of(schema, own))


@lru_cache(maxsize=4)
def _tokenizer(tokenizer: PreTrainedTokenizerFast) -> LLTokenizer:
    """llguidance's form of a tokenizer; building it takes about a second."""
    from llguidance.hf import from_tokenizer

    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(f"a grammar needs a fast tokenizer; {type(tokenizer).__name__} is not one")
    return from_tokenizer(tokenizer)
