"""Logits processors that read the tokens before a node, for all nodes of a tree at once, without waiting for a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.generation import logits_process as stock

from mmspec.modes import lasting
from mmspec.session import Group
from mmspec.types import NO_TOKEN, Draft

_BEYOND = 2**31 - 1  # in places without a token; larger than any id


class Texts:
    """Growing lists of tokens, left-aligned in a tensor on a device; only new tokens are copied, in one transfer."""

    def __init__(self) -> None:
        self._lists: list[list[int]] = []
        self._copied: list[int] = []  # how many tokens of each list are on the device
        self._ids: Tensor | None = None  # [B, capacity]

    def of(self, lists: list[list[int]], device: torch.device, room: int = 0) -> tuple[Tensor, Tensor]:
        """Tokens [B, T] with `room` free columns after the longest list, and the length of each list, [B]."""
        if [*map(id, lists)] != [*map(id, self._lists)] or any(
            n > len(tokens) for n, tokens in zip(self._copied, lists, strict=True)
        ):
            self._lists, self._copied, self._ids = list(lists), [0] * len(lists), None
        new = [tokens[n:] for tokens, n in zip(lists, self._copied, strict=True)]
        most, end = max(map(len, new)), max(map(len, lists)) + room
        ids = self._ids = self._with(end + most, device)
        rest = [[_BEYOND] * (most - len(tokens)) for tokens in new]
        counts = [[n, len(t), *x, *r] for n, t, x, r in zip(self._copied, lists, new, rest, strict=True)]
        copied = torch.tensor(counts, device=device)
        ids.scatter_(1, copied[:, :1] + torch.arange(most, device=device), copied[:, 2:])
        self._copied = [len(tokens) for tokens in lists]
        return ids[:, :end], copied[:, 1]

    def _with(self, capacity: int, device: torch.device) -> Tensor:
        if self._ids is not None and self._ids.shape[1] >= capacity:
            return self._ids
        before = 0 if self._ids is None else self._ids.shape[1]
        with lasting():
            grown = torch.full((len(self._lists), capacity + capacity // 4 + 64), _BEYOND, device=device)
            if self._ids is not None:
                grown[:, :before] = self._ids
        return grown


@dataclass(frozen=True)
class Prefixes:
    """For each node the tokens up to it: the row's own tokens and the node's ancestors."""

    session: Group  # its rows' tokens end with the root of the draft
    draft: Draft
    text: Tensor  # of the rows, [B, T], with room for the deepest path
    lengths: Tensor  # of the rows, [B]

    @classmethod
    def of(cls, texts: Texts, session: Group, draft: Draft) -> Prefixes:
        tokens = [row.tokens for row in session.rows]
        return cls(session, draft, *texts.of(tokens, draft.tokens.device, draft.tree.size - 1))

    @cached_property
    def length(self) -> Tensor:  # [B, N]
        return self.lengths[:, None] + self.draft.tree.depth

    @cached_property
    def ids(self) -> Tensor:
        """[B, N, T], left-aligned; _BEYOND after the end and for NO_TOKEN."""
        tree, (B, N), T = self.draft.tree, self.draft.tokens.shape, self.text.shape[1]
        below = tree.ancestors & (tree.depth > 0)[:, None]  # the root is in the text
        place = torch.where(below, self.length[:, None] - 1, T)  # a spare column for nodes that are not ancestors
        tokens = torch.where(self.draft.tokens == NO_TOKEN, _BEYOND, self.draft.tokens)
        text = pad(self.text, (0, 1))[:, None].repeat(1, N, 1)
        return text.scatter_(2, place, tokens[:, None].expand(B, N, N))[..., :T]

    def last(self, n: int) -> Tensor:
        """The last n tokens [B, N, n]; _BEYOND before the beginning."""
        place = self.length[..., None] - n + torch.arange(n, device=self.text.device)
        return torch.where(place < 0, _BEYOND, self.ids.gather(2, place.clamp(min=0)))


Definition = Callable[..., Tensor]  # (processor, scores [B, N, V], Prefixes) → scores


def _marked(ids: Tensor, scores: Tensor) -> Tensor:
    """Bool [..., V], true at ids [..., K]; ids outside of the vocabulary are ignored."""
    V = scores.shape[-1]
    spare = torch.zeros(*ids.shape[:-1], V + 1, dtype=torch.bool, device=scores.device)
    return spare.scatter_(-1, ids.to(scores.device).clamp(max=V), True)[..., :V]


def repetition_penalty(processor: stock.RepetitionPenaltyLogitsProcessor, scores: Tensor, before: Prefixes) -> Tensor:
    ids, ignored = before.ids, getattr(processor, "prompt_ignore_length", None)
    if isinstance(ignored, Tensor):  # one for each row of the call
        ignored = ignored.to(ids.device)
        if len(ignored) > len(ids):
            ignored = ignored[torch.tensor([row.index for row in before.session.rows], device=ids.device)]
        ignored = ignored[:, None, None]
    if ignored is not None:
        ids = torch.where(torch.arange(ids.shape[2], device=ids.device) < ignored, _BEYOND, ids)
    penalized = torch.where(scores < 0, scores * processor.penalty, scores / processor.penalty)
    return torch.where(_marked(ids, scores), penalized, scores)


def no_repeat_ngram(processor: stock.NoRepeatNGramLogitsProcessor, scores: Tensor, before: Prefixes) -> Tensor:
    ids, n = before.ids, processor.ngram_size
    windows = ids.shape[2] - n + 1
    if windows < 1:
        return scores
    last = before.last(n - 1)
    match = torch.arange(windows, device=ids.device) + n - 1 < before.length[..., None]  # windows within the text
    for j in range(n - 1):
        match = match & (ids[..., j : j + windows] == last[..., j : j + 1])
    return scores.masked_fill(_marked(torch.where(match, ids[..., n - 1 :], _BEYOND), scores), -torch.inf)


def sequence_bias(processor: stock.SequenceBiasLogitsProcessor, scores: Tensor, before: Prefixes) -> Tensor:
    """Calls the stock processor, which reads only the end of a prefix."""
    biased = processor.sequence_bias
    if not biased:  # stock ignores bad words that are end-of-sequence tokens
        return scores
    ids = before.last(max(map(len, biased)))
    return processor(ids.flatten(0, 1), scores.flatten(0, 1)).view_as(scores)


def min_length(processor: stock.MinLengthLogitsProcessor, scores: Tensor, before: Prefixes) -> Tensor:
    early = before.length < processor.min_length
    return scores.masked_fill(early[..., None] & _marked(processor.eos_token_id, scores), -torch.inf)


def min_new_tokens(processor: stock.MinNewTokensLengthLogitsProcessor, scores: Tensor, before: Prefixes) -> Tensor:
    early = before.length - processor.prompt_length_to_skip < processor.min_new_tokens
    return scores.masked_fill(early[..., None] & _marked(processor.eos_token_id, scores), -torch.inf)


def _forced(here: Tensor, ids: Tensor, scores: Tensor) -> Tensor:
    only = torch.where(_marked(ids, scores), 0.0, -torch.inf).to(scores.dtype)
    return torch.where(here[..., None], only, scores)


def forced_bos(processor: stock.ForcedBOSTokenLogitsProcessor, scores: Tensor, before: Prefixes) -> Tensor:
    return _forced(before.length == 1, torch.full((1,), processor.bos_token_id, device=scores.device), scores)


def forced_eos(processor: stock.ForcedEOSTokenLogitsProcessor, scores: Tensor, before: Prefixes) -> Tensor:
    return _forced(before.length == processor.max_length - 1, processor.eos_token_id, scores)


def suppressed_at_begin(
    processor: stock.SuppressTokensAtBeginLogitsProcessor, scores: Tensor, before: Prefixes
) -> Tensor:
    first = before.length == processor.begin_index
    return scores.masked_fill(first[..., None] & _marked(processor.begin_suppress_tokens, scores), -torch.inf)


def exponential_decay(processor: stock.ExponentialDecayLengthPenalty, scores: Tensor, before: Prefixes) -> Tensor:
    late = (before.length - processor.regulation_start).clamp(min=0)
    most = max(256, before.text.shape[1] - processor.regulation_start)
    growth = _powers(processor.regulation_factor, 1 << (most - 1).bit_length(), scores.device)[late]
    ends = processor.eos_token_id.to(scores.device).flatten()
    own = scores[..., ends]
    penalty = torch.where(own.isfinite() & (late > 0)[..., None], own.abs() * growth[..., None], 0.0)
    return scores + torch.zeros_like(scores).index_copy_(-1, ends, penalty.to(scores.dtype))


@lru_cache(maxsize=16)
@lasting()
def _powers(factor: float, most: int, device: torch.device) -> Tensor:
    """factor^i − 1 for i = 0 … most, computed by Python as in stock."""
    powers = []
    for i in range(most + 1):
        try:
            powers.append(pow(factor, i) - 1)
        except OverflowError:
            powers.append(torch.inf)
    return torch.tensor(powers, dtype=torch.float32, device=device)


def grammar(processor: stock.PrefixConstrainedLogitsProcessor, scores: Tensor, before: Prefixes) -> Tensor:
    """A pure `prefix_allowed_tokens_fn`, called for every node; it runs on the host, which has to wait for the device.

    Nodes below a forbidden token cannot be accepted. For these the function gets an allowed token instead, so that it
    sees only prefixes that it allows. Like stock it gets the number of the row's prompt, which `num_return_sequences`
    rows share.
    """
    tokens, parents = torch.stack([before.draft.tokens, before.draft.tree.parents]).tolist()
    allow, every = processor._prefix_allowed_tokens_fn, list[list[int]]()
    for b, row in enumerate(before.session.rows):
        text, prompt = before.text[b, : len(row.tokens)], row.index // processor._num_beams

        def allowed_after(line: list[int], text: Tensor = text, place: int = prompt) -> list[int]:
            with lasting():
                answer = allow(place, torch.cat([text, text.new_tensor(line)]))
            return answer.tolist() if isinstance(answer, Tensor) else list(answer)

        lines: list[list[int] | None] = [[]]
        allowed = [allowed_after([])]
        for token, parent in zip(tokens[b][1:], parents[b][1:], strict=True):
            line, options = lines[parent], allowed[parent]
            if token == NO_TOKEN or line is None or not options:
                lines.append(None)
                allowed.append([0])
                continue
            lines.append([*line, token if token in options else options[0]])
            allowed.append(allowed_after(lines[-1] or []))
        every += allowed
    each = stock.PrefixConstrainedLogitsProcessor(lambda i, _: every[i], 1)
    return each(before.last(1).flatten(0, 1), scores.flatten(0, 1)).view_as(scores)
