"""Logits processors and stopping criteria of transformers, applied to every node of a tree as stock decoding would."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from transformers.generation import logits_process
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList

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
    ExponentialDecayLengthPenalty
""")


def unsafe(processors: Iterable[Any]) -> list[str]:
    """Names of the processors that may keep state of their own, which rejected nodes would disturb."""
    return [type(p).__name__ for p in processors if type(p) not in POINTWISE | HISTORY]


class Processors:
    """A LogitsProcessorList over trees: each node is processed with exactly its own prefix."""

    def __init__(self, processors: logits_process.LogitsProcessorList) -> None:
        self.processors = processors
        self.need_history = any(type(p) in HISTORY for p in processors)

    def __call__(self, logits: Tensor, session: Session, draft: Draft) -> Tensor:
        """Process float logits [B, N, V]; the tokens before node n are the row's own and n's line of ancestors."""
        if not self.processors:
            return logits
        if not self.need_history:
            no_tokens = draft.tokens.reshape(-1, 1)  # a pointwise warper does not look at them
            return self.processors(no_tokens, logits.flatten(0, 1)).view_as(logits)
        out = logits.clone()
        for ids, rows, nodes in _prefixes(session, draft):
            out[rows, nodes] = self.processors(ids, logits[rows, nodes])
        return out


def _prefixes(session: Session, draft: Draft) -> Iterable[tuple[Tensor, Tensor, Tensor]]:
    """Nodes grouped by the length of their prefix: ids [G, L], and the G row and node indices."""
    tokens, parents = draft.tokens.tolist(), draft.tree.parents.tolist()
    groups: dict[int, list[tuple[list[int], int, int]]] = defaultdict(list)
    for b, row in enumerate(session.rows):
        before: list[list[int] | None] = [row.tokens]  # of the root: it is the row's last token
        for n in range(1, len(tokens[b])):
            above = before[parents[b][n]]
            reachable = above is not None and tokens[b][n] != HOLE
            before.append([*above, tokens[b][n]] if reachable and above is not None else None)
        for n, prefix in enumerate(before):
            if prefix is not None:
                groups[len(prefix)].append((prefix, b, n))
    device = draft.tokens.device
    for group in groups.values():
        ids, rows, nodes = zip(*group, strict=True)
        yield torch.tensor(ids, device=device), torch.tensor(rows, device=device), torch.tensor(nodes, device=device)


def endings(
    criteria: StoppingCriteriaList, device: torch.device
) -> tuple[int, frozenset[int], Callable[[list[int]], bool] | None]:
    """(length limit, end-of-sequence ids, any further condition on one row's tokens) of a StoppingCriteriaList."""
    limit, eos, others = 2**62, frozenset[int](), []
    for criterion in criteria:
        if type(criterion) is MaxLengthCriteria:
            limit = min(limit, criterion.max_length)
        elif type(criterion) is EosTokenCriteria:
            eos |= frozenset(criterion.eos_token_id.flatten().tolist())
        else:
            others.append(criterion)

    def stop(tokens: list[int]) -> bool:
        ids = torch.tensor([tokens], device=device)
        return any(bool(torch.as_tensor(criterion(ids, None)).all()) for criterion in others)

    return limit, eos, stop if others else None
