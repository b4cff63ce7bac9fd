"""Logits processors and stopping criteria of transformers, applied to every node of a tree as stock decoding would."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from transformers.generation import logits_process
from transformers.generation.logits_process import PrefixConstrainedLogitsProcessor
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList

from mmspec.modes import lasting
from mmspec.session import Session
from mmspec.types import HOLE, Draft


def _known(names: str) -> frozenset[type]:
    return frozenset(getattr(logits_process, name) for name in names.split() if hasattr(logits_process, name))


# Functions of one position's scores alone.
POINTWISE = _known("""
    TemperatureLogitsWarper TopKLogitsWarper TopPLogitsWarper MinPLogitsWarper TopHLogitsWarper TypicalLogitsWarper
    EpsilonLogitsWarper EtaLogitsWarper SuppressTokensLogitsProcessor InfNanRemoveLogitsProcessor LogitNormalization
""")
# Functions of the scores and of the tokens before them, with no state of their own.
HISTORY = _known("""
    RepetitionPenaltyLogitsProcessor NoRepeatNGramLogitsProcessor MinLengthLogitsProcessor
    MinNewTokensLengthLogitsProcessor ForcedBOSTokenLogitsProcessor ForcedEOSTokenLogitsProcessor
    SuppressTokensAtBeginLogitsProcessor SequenceBiasLogitsProcessor NoBadWordsLogitsProcessor
    ExponentialDecayLengthPenalty PrefixConstrainedLogitsProcessor
""")


def unsafe(processors: Iterable[Any]) -> list[str]:
    """Names of the processors that may keep state of their own, which rejected nodes would disturb."""
    return [type(p).__name__ for p in processors if type(p) not in POINTWISE | HISTORY]


class Processors:
    """A LogitsProcessorList over trees: each node is processed with exactly its own prefix."""

    def __init__(self, processors: logits_process.LogitsProcessorList) -> None:
        self.processors = processors
        self.need_history = any(type(p) in HISTORY for p in processors)
        self.grammar = any(type(p) is PrefixConstrainedLogitsProcessor for p in processors)

    def __call__(self, logits: Tensor, session: Session, draft: Draft) -> Tensor:
        """Process float logits [B, N, V]; the tokens before node n are the row's own and n's line of ancestors."""
        if not self.processors:
            return logits
        if not self.need_history:
            no_tokens = draft.tokens.reshape(-1, 1)  # a pointwise warper does not look at them
            return self.processors(no_tokens, logits.flatten(0, 1)).view_as(logits)
        out = logits.clone()
        for ids, rows, nodes in self._prefixes(session, draft, out):
            places = [session.rows[b].index for b in rows.tolist()]
            out[rows, nodes] = self._of(places)(ids, logits[rows, nodes])
        return out

    def _of(self, places: list[int]) -> logits_process.LogitsProcessorList:
        """The same processors for these rows of the call, where one holds a value per row."""
        return logits_process.LogitsProcessorList(_narrowed(p, places) for p in self.processors)

    def _prefixes(self, session: Session, draft: Draft, out: Tensor) -> Iterable[tuple[Tensor, Tensor, Tensor]]:
        """Nodes grouped by the length of their prefix, the shorter ones first: ids [G, L], and G row and node indices.

        `out` holds what has been processed so far. Below a token that a grammar forbids there is nothing that it would
        be asked about: the likeliest allowed token stands for it, so that the grammar sees lawful prefixes only.
        """
        tokens, parents = draft.tokens.tolist(), draft.tree.parents.tolist()
        texts = [torch.tensor(row.tokens, device=draft.tokens.device) for row in session.rows]
        lines: list[list[list[int]]] = [[[]] for _ in session.rows]  # per node: the drafted tokens that lead to it
        groups: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for b, row in enumerate(session.rows):
            depths: list[int | None] = [0]
            for n in range(1, len(tokens[b])):
                above = depths[parents[b][n]]
                depths.append(None if above is None or tokens[b][n] == HOLE else above + 1)
                lines[b].append([])
            for n, depth in enumerate(depths):
                if depth is not None:
                    groups[len(row.tokens) + depth].append((b, n))
        for length in sorted(groups):
            rows, nodes = (torch.tensor(index, device=out.device) for index in zip(*groups[length], strict=True))
            above = draft.tree.parents[rows, nodes]
            ids = draft.tokens[rows, nodes]
            if self.grammar:
                laws = out[rows, above]
                forbidden = laws.gather(1, ids[:, None].clamp(min=0))[:, 0].isneginf() & (nodes > 0)
                ids = torch.where(forbidden, laws.argmax(-1), ids)
            for (b, n), token in zip(groups[length], ids.tolist(), strict=True):
                lines[b][n] = [*lines[b][parents[b][n]], token] if n else []
            prefixes = [torch.cat([texts[b], texts[b].new_tensor(lines[b][n])]) for b, n in groups[length]]
            yield torch.stack(prefixes), rows, nodes


def _narrowed(processor: Any, places: list[int]) -> Any:
    """A processor whose per-row values (padding lengths, a grammar's rows) are those of `places`."""
    lengths = getattr(processor, "prompt_ignore_length", None)
    if isinstance(lengths, Tensor):
        narrowed = copy.copy(processor)
        narrowed.prompt_ignore_length = lengths[places]
        return narrowed
    if type(processor) is PrefixConstrainedLogitsProcessor:
        allowed = processor._prefix_allowed_tokens_fn
        return PrefixConstrainedLogitsProcessor(lasting()(lambda i, ids: allowed(places[i], ids.clone())), 1)
    return processor


class Endings:
    """A StoppingCriteriaList, asked row by row.

    Attributes:
        limit: length at which every row ends.
        eos: end-of-sequence ids.
        cut: length at which the whole call ended, where rows end together; None otherwise.
    """

    def __init__(self, criteria: StoppingCriteriaList, rows: int, device: torch.device) -> None:
        self.limit, self.eos, self.others = 2**62, frozenset[int](), []
        self._rows, self._device = rows, device
        self._stopped: dict[int, int] = {}  # row → length at which its conditions first held
        for criterion in criteria:
            if type(criterion) is MaxLengthCriteria:
                self.limit = min(self.limit, criterion.max_length)
            elif type(criterion) is EosTokenCriteria:
                self.eos |= frozenset(criterion.eos_token_id.flatten().tolist())
            else:
                self.others.append(criterion)

    def of(self, row: int) -> Callable[[list[int]], bool] | None:
        """What to ask after each token of a row, besides limit and eos.

        Without an end-of-sequence token stock decoding goes on with rows that have stopped until all have, so then
        rows end together.
        """
        if not self.others:
            return None
        if self.eos or self._rows == 1:
            return self._holds

        def together(tokens: list[int]) -> bool:
            if row not in self._stopped and self._holds(tokens):
                self._stopped[row] = len(tokens)
            return len(self._stopped) == self._rows and len(tokens) >= max(self._stopped.values())

        return together

    @property
    def cut(self) -> int | None:
        return max(self._stopped.values()) if len(self._stopped) == self._rows else None

    def _holds(self, tokens: list[int]) -> bool:
        with lasting():
            ids = torch.tensor([tokens], device=self._device)
            return any(bool(torch.as_tensor(criterion(ids, None)).all()) for criterion in self.others)
