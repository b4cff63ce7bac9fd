"""Stopping criteria of transformers, asked about all tokens that a round has decided at once."""

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


def _looks_at_nothing(criterion: StoppingCriteria) -> bool:
    """Whether it is asked for the time, or for an event, and not for the tokens."""
    return type(criterion) is MaxTimeCriteria or getattr(criterion, "looks_at_nothing", False)


def unheard(criteria: Iterable[StoppingCriteria], rows: int, scored: bool) -> str | None:
    """Why one of these criteria could not be asked as stock decoding asks it, or None.

    Stock asks a criterion about all rows at once, all of one length, and hands it the scores where they are collected.
    """
    for criterion in criteria:
        name = f"the stopping criterion {type(criterion).__name__}"
        if type(criterion) in _KNOWN or _looks_at_nothing(criterion):
            continue
        if rows > 1:
            return f"{name} may look at all {rows} rows at once, which have different lengths here; call row by row"
        if scored:
            return f"{name} may read the scores, which are collected after it is asked; leave output_scores out"
    return None


def at_strings(strings: str | list[str], tokenizer: PreTrainedTokenizerBase) -> StopStringCriteria:
    """What stock makes of `stop_strings`; a `custom_generate` is not given the tokenizer for it."""
    return StopStringCriteria(tokenizer=tokenizer, stop_strings=strings)


class Endings:
    """A StoppingCriteriaList, asked row by row.

    Attributes:
        limit: length at which every row ends.
        eos: end-of-sequence ids.
        cut: length at which the whole call ended, where rows end together; None otherwise.
    """

    def __init__(self, criteria: StoppingCriteriaList, rows: int, device: torch.device) -> None:
        self.limit, self.eos = 2**62, frozenset[int]()
        self._strings: list[StopStringCriteria] = []
        self._blind: list[StoppingCriteria] = []
        self._users: list[StoppingCriteria] = []
        self._rows, self._device = rows, device
        self._stopped: dict[int, int] = {}  # row → length at which its conditions first held
        for criterion in criteria:
            if type(criterion) is MaxLengthCriteria:
                self.limit = min(self.limit, criterion.max_length)
            elif type(criterion) is EosTokenCriteria:
                self.eos |= frozenset(criterion.eos_token_id.flatten().tolist())
            elif type(criterion) is StopStringCriteria:
                self._strings.append(criterion)
            else:
                (self._blind if _looks_at_nothing(criterion) else self._users).append(criterion)

    def of(self, row: int) -> Callable[[list[int], int], int | None] | None:
        """What to ask about a row's new tokens, besides limit and eos: the length at which a condition first held.

        Without an end-of-sequence token stock decoding goes on with rows that have stopped until all have, so then
        rows end together.
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
        """What the host can answer by itself comes first; a user's criterion is not asked about what lies behind."""
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
    """The length ≥ `begin` at which a stop string is first complete, all in one look at the host's own tokens."""
    widest, ends = criterion.maximum_token_len, range(begin, len(tokens) + 1)
    looks = [tokens[max(0, end - widest) : end] for end in ends]
    if len(looks[0]) == len(looks[-1]):
        held = criterion(torch.tensor(looks), None).tolist()
    else:  # a text shorter than the string
        held = [bool(criterion(torch.tensor([look]), None).all()) for look in looks]
    return next((end for end, holds in zip(ends, held, strict=True) if holds), None)


def _users_end(criteria: list[StoppingCriteria], ids: Tensor, ends: range) -> int | None:
    """The first of the lengths of ids [1, L] at which one of the criteria holds.

    Answers that lie on a device are read together, so that such a criterion may hear of a few tokens after its end.
    """
    waiting: list[tuple[int, Tensor]] = []
    held = None
    for end in ends:
        answers = [torch.as_tensor(criterion(ids[:, :end].clone(), None)).all() for criterion in criteria]
        waiting += [(end, answer) for answer in answers if answer.device.type != "cpu"]
        if any(bool(answer) for answer in answers if answer.device.type == "cpu"):
            held = end
            break
    read = torch.stack([answer for _, answer in waiting]).tolist() if waiting else []
    return next((end for (end, _), holds in zip(waiting, read, strict=True) if holds), held)
