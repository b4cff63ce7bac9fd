"""Stopping criteria of transformers, evaluated on all tokens that a round adds to a row."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from transformers import StoppingCriteria
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from mmspec.modes import lasting
from mmspec.pipelines.host.kinds import PreTrainedTokenizerBase
from mmspec.pipelines.host.processors.history import Texts

_KNOWN = {EosTokenCriteria, MaxLengthCriteria, StopStringCriteria}


def _ignores_tokens(criterion: StoppingCriteria) -> bool:
    """Whether it depends on the time or on an event, and not on the tokens."""
    return type(criterion) is MaxTimeCriteria or getattr(criterion, "ignores_tokens", False)


def unsupported(criteria: Iterable[StoppingCriteria], rows: int, scored: bool) -> str | None:
    """Why one of these criteria cannot be called in the same way as by stock decoding, or None.

    Stock calls a criterion with all rows, which have one length there, and with the scores if these are collected.
    """
    for criterion in criteria:
        name = f"the stopping criterion {type(criterion).__name__}"
        if type(criterion) in _KNOWN or _ignores_tokens(criterion):
            continue
        if rows > 1:
            return f"{name} may read all {rows} rows at once, but these have different lengths here; call row by row"
        if scored:
            return f"{name} may read the scores, but these are collected after it is called; leave output_scores out"
    return None


def at_strings(strings: str | list[str], tokenizer: PreTrainedTokenizerBase) -> StopStringCriteria:
    """The criterion that stock builds from `stop_strings`; a `custom_generate` does not get the tokenizer for it."""
    return StopStringCriteria(tokenizer=tokenizer, stop_strings=strings)


class Endings:
    """A StoppingCriteriaList, evaluated row by row.

    Attributes:
        limit: the length at which every row ends.
        eos: end-of-sequence ids.
        cut: the length at which the whole call ended if rows end together, else None.
    """

    def __init__(self, criteria: StoppingCriteriaList, rows: int, device: torch.device) -> None:
        self.limit, self.eos = 2**62, frozenset[int]()
        self._strings: list[StopStringCriteria] = []
        self._blind: list[StoppingCriteria] = []  # which ignore the tokens
        self._users: list[StoppingCriteria] = []
        self._rows, self._device = rows, device
        self._stopped: dict[int, int] = {}  # row → the first length at which a condition was true
        for criterion in criteria:
            if type(criterion) is MaxLengthCriteria:
                self.limit = min(self.limit, criterion.max_length)
            elif type(criterion) is EosTokenCriteria:
                self.eos |= frozenset(criterion.eos_token_id.flatten().tolist())
            elif type(criterion) is StopStringCriteria:
                self._strings.append(criterion)
            else:
                (self._blind if _ignores_tokens(criterion) else self._users).append(criterion)

    def of(self, row: int) -> Callable[[list[int], int], int | None] | None:
        """A row's stop condition besides limit and eos: a function that returns the first length at which it is true.

        Without an end-of-sequence token, stock decoding continues stopped rows until all have stopped, so then rows
        end together.
        """
        if not (self._strings or self._blind or self._users):
            return None
        texts = Texts()

        def first(tokens: list[int], new: int) -> int | None:
            with lasting():
                return self._first(tokens, new, texts)

        def together(tokens: list[int], new: int) -> int | None:
            if row not in self._stopped and (length := first(tokens, new)) is not None:
                self._stopped[row] = length
            cut = self.cut
            return None if cut is None or len(tokens) < cut else max(cut, len(tokens) - new + 1)

        return first if self.eos or self._rows == 1 else together

    @property
    def cut(self) -> int | None:
        return max(self._stopped.values()) if len(self._stopped) == self._rows else None

    def _first(self, tokens: list[int], new: int, texts: Texts) -> int | None:
        """Criteria that run on the host come first; a user's criterion is not called for anything after their end."""
        begin = len(tokens) - new + 1
        ends = [end for criterion in self._strings if (end := string_end(criterion, tokens, begin)) is not None]
        if any(bool(criterion(torch.tensor([tokens[-1:]]), None).all()) for criterion in self._blind):
            ends.append(begin)
        end = min(ends, default=None)
        if not self._users:
            return end
        ids, _ = texts.of([tokens], self._device)
        earlier = _users_end(self._users, ids, range(begin, (end or len(tokens)) + 1))
        return end if earlier is None else earlier


def string_end(criterion: StopStringCriteria, tokens: list[int], begin: int) -> int | None:
    """The first length ≥ `begin` at which a stop string is complete, in one call on the host if possible."""
    widest, ends = max(1, criterion.maximum_token_len), range(begin, len(tokens) + 1)  # 0: every string is empty
    tails = [tokens[max(0, end - widest) : end] for end in ends]
    if len(tails[0]) == len(tails[-1]):
        complete = criterion(torch.tensor(tails), None).tolist()
    else:  # the text is shorter than the string
        complete = [bool(criterion(torch.tensor([tail]), None).all()) for tail in tails]
    return next((end for end, stops in zip(ends, complete, strict=True) if stops), None)


def _users_end(criteria: list[StoppingCriteria], ids: Tensor, ends: range) -> int | None:
    """The first of the lengths `ends` of ids [1, L] at which one of the criteria is true.

    Results on a device are read together, so such a criterion may be called with a few tokens after its end.
    """
    waiting: list[tuple[int, Tensor]] = []
    first = None
    for end in ends:
        answers = [torch.as_tensor(criterion(ids[:, :end].clone(), None)).all() for criterion in criteria]
        waiting += [(end, answer) for answer in answers if answer.device.type != "cpu"]
        if any(bool(answer) for answer in answers if answer.device.type == "cpu"):
            first = end
            break
    read = torch.stack([answer for _, answer in waiting]).tolist() if waiting else []
    return next((end for (end, _), stops in zip(waiting, read, strict=True) if stops), first)
