"""Applies logits processors of transformers to every node of a tree, with the results of stock decoding."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import groupby

from torch import Tensor
from transformers import LogitsProcessor
from transformers.generation import logits_process
from transformers.generation.logits_process import (
    LogitsProcessorList,
    PrefixConstrainedLogitsProcessor,
)

from mmspec.config import Options
from mmspec.pipelines.host.processors import history, nucleus
from mmspec.pipelines.host.processors.followed import OWN_STATE, Followed, follows
from mmspec.pipelines.host.processors.grammar import Grammar, GrammarProcessor
from mmspec.session import Group
from mmspec.types import Draft

PURE = "mmspec_pure"  # if true on a user's function, its result depends only on its arguments


def _known(names: str) -> frozenset[type]:
    return frozenset(getattr(logits_process, name) for name in names.split() if hasattr(logits_process, name))


# Functions of one position's scores only.
POINTWISE = _known("""
    TemperatureLogitsWarper TopKLogitsWarper TopPLogitsWarper MinPLogitsWarper TopHLogitsWarper TypicalLogitsWarper
    EpsilonLogitsWarper EtaLogitsWarper SuppressTokensLogitsProcessor InfNanRemoveLogitsProcessor LogitNormalization
""")
# Equivalents for a GPU, where sorting the logits of all nodes is slow; on a CPU sorting is faster than these.
UNSORTED: dict[type, Callable[..., Tensor]] = {logits_process.TopPLogitsWarper: nucleus.top_p}
# Functions of the scores and of the tokens before them, without state; each with its equivalent for a tree.
HISTORY: dict[type, history.Definition] = {
    logits_process.RepetitionPenaltyLogitsProcessor: history.repetition_penalty,
    logits_process.NoRepeatNGramLogitsProcessor: history.no_repeat_ngram,
    logits_process.SequenceBiasLogitsProcessor: history.sequence_bias,
    logits_process.NoBadWordsLogitsProcessor: history.sequence_bias,
    logits_process.MinLengthLogitsProcessor: history.min_length,
    logits_process.MinNewTokensLengthLogitsProcessor: history.min_new_tokens,
    logits_process.ForcedBOSTokenLogitsProcessor: history.forced_bos,
    logits_process.ForcedEOSTokenLogitsProcessor: history.forced_eos,
    logits_process.SuppressTokensAtBeginLogitsProcessor: history.suppressed_at_begin,
    logits_process.ExponentialDecayLengthPenalty: history.exponential_decay,
    PrefixConstrainedLogitsProcessor: history.grammar,
}


def _stateless(processor: object) -> bool:
    return type(processor) in POINTWISE or type(processor) in HISTORY or type(processor) is GrammarProcessor


def unsafe(processors: Iterable[object]) -> str | None:
    """Why rejected nodes might corrupt the state of one of these processors, or None."""
    for p in processors:
        name = f"the logits processor {type(p).__name__}"
        if type(p) is PrefixConstrainedLogitsProcessor and not getattr(p._prefix_allowed_tokens_fn, PURE, False):
            return (
                f"{name} calls a prefix_allowed_tokens_fn that may keep state, which rejected drafts would corrupt; if "
                f"its result depends only on its arguments, set prefix_allowed_tokens_fn.{PURE} = True"
            )
        if not (_stateless(p) or follows(p)):
            return (
                f"{name} may keep state that rejected drafts would corrupt; if all of its state is in its attributes, "
                f"set {type(p).__name__}.{OWN_STATE} = True"
            )
    return None


class Processors:
    """A LogitsProcessorList for trees: each node is processed with exactly its own prefix.

    Attributes:
        grammar: the first grammar, if any.
        private: whether the rows of one call need an instance of their own.
    """

    def __init__(self, processors: LogitsProcessorList) -> None:
        self.processors = processors
        self.need_history = any(type(p) in HISTORY for p in processors)
        self._texts = history.Texts()
        self._steps: list[LogitsProcessor | Grammar | Followed] = []
        for known, group in groupby(processors, _stateless):
            run = list(group)
            grammars = (Grammar(p) if isinstance(p, GrammarProcessor) else p for p in run)
            self._steps += grammars if known else [Followed(run)]
        self.grammar = next((step for step in self._steps if isinstance(step, Grammar)), None)
        self.private = self.need_history or any(isinstance(step, (Followed, Grammar)) for step in self._steps)

    def __call__(self, logits: Tensor, session: Group, draft: Draft) -> Tensor:
        """Process float logits [B, N, V]; the tokens before node n are the row's own and n's ancestors."""
        no_tokens = draft.tokens.reshape(-1, 1)  # pointwise processors do not read them
        before = history.Prefixes.of(self._texts, session, draft) if self.need_history else None
        for p in self._steps:
            if isinstance(p, (Followed, Grammar)):
                logits = p(logits, session, draft)
            elif type(p) in UNSORTED and logits.is_cuda:
                logits = UNSORTED[type(p)](p, logits.flatten(0, 1)).view_as(logits)
            elif type(p) in POINTWISE:
                logits = p(no_tokens, logits.flatten(0, 1)).view_as(logits)
            else:
                assert before is not None
                logits = HISTORY[type(p)](p, logits, before)
        return logits


def pointwise(processors: Iterable[LogitsProcessor]) -> LogitsProcessorList:
    return LogitsProcessorList(p for p in processors if type(p) in POINTWISE)


def constrained(processors: Iterable[object]) -> bool:
    """Whether a `prefix_allowed_tokens_fn` restricts the tokens."""
    return any(type(p) is PrefixConstrainedLogitsProcessor for p in processors)


def warpers(how: Options) -> LogitsProcessorList:
    """The processors for temperature, then top-k, then top-p."""
    chosen = LogitsProcessorList()
    if how["temperature"] not in (0, 1):
        chosen.append(logits_process.TemperatureLogitsWarper(float(how["temperature"])))
    if how["top_k"]:
        chosen.append(logits_process.TopKLogitsWarper(how["top_k"]))
    if how["top_p"] < 1:
        chosen.append(logits_process.TopPLogitsWarper(how["top_p"]))
    return chosen
