"""Logits processors of transformers, applied to every node of a tree as stock decoding would."""

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

PURE = "mmspec_pure"  # a user's function that has this attribute, true, answers by its arguments alone


def _known(names: str) -> frozenset[type]:
    return frozenset(getattr(logits_process, name) for name in names.split() if hasattr(logits_process, name))


# Functions of one position's scores alone.
POINTWISE = _known("""
    TemperatureLogitsWarper TopKLogitsWarper TopPLogitsWarper MinPLogitsWarper TopHLogitsWarper TypicalLogitsWarper
    EpsilonLogitsWarper EtaLogitsWarper SuppressTokensLogitsProcessor InfNanRemoveLogitsProcessor LogitNormalization
""")
# What does the same on a GPU, where sorting the logits of all nodes is slow; a CPU sorts them faster than it searches.
UNSORTED: dict[type, Callable[..., Tensor]] = {logits_process.TopPLogitsWarper: nucleus.top_p}
# Functions of the scores and of the tokens before them, with no state of their own; and what does the same for a tree.
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


def _known_to_us(processor: object) -> bool:
    return type(processor) in POINTWISE or type(processor) in HISTORY or type(processor) is GrammarProcessor


def unsafe(processors: Iterable[object]) -> str | None:
    """Why rejected nodes might disturb one of these processors, or None."""
    for p in processors:
        name = f"the logits processor {type(p).__name__}"
        if type(p) is PrefixConstrainedLogitsProcessor and not getattr(p._prefix_allowed_tokens_fn, PURE, False):
            return (
                f"{name} asks a prefix_allowed_tokens_fn that may keep state, which rejected drafts would disturb; if "
                f"its answer depends on its arguments alone, say so: prefix_allowed_tokens_fn.{PURE} = True"
            )
        if not (_known_to_us(p) or follows(p)):
            return (
                f"{name} may keep state that rejected drafts would disturb; if all that it remembers lies in its "
                f"attributes, say so: {type(p).__name__}.{OWN_STATE} = True"
            )
    return None


class Processors:
    """A LogitsProcessorList over trees: each node is processed with exactly its own prefix.

    Attributes:
        grammar: the first one, if there is any.
        private: whether it serves the rows of one call alone.
    """

    def __init__(self, processors: LogitsProcessorList) -> None:
        self.processors = processors
        self.need_history = any(type(p) in HISTORY for p in processors)
        self._texts = history.Texts()
        self._steps: list[LogitsProcessor | Grammar | Followed] = []
        for known, group in groupby(processors, _known_to_us):
            run = list(group)
            grammars = (Grammar(p) if isinstance(p, GrammarProcessor) else p for p in run)
            self._steps += grammars if known else [Followed(run)]
        self.grammar = next((step for step in self._steps if isinstance(step, Grammar)), None)
        self.private = self.need_history or any(isinstance(step, (Followed, Grammar)) for step in self._steps)

    def __call__(self, logits: Tensor, session: Group, draft: Draft) -> Tensor:
        """Process float logits [B, N, V]; the tokens before node n are the row's own and n's line of ancestors."""
        no_tokens = draft.tokens.reshape(-1, 1)  # a pointwise warper does not look at them
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
    """Whether a `prefix_allowed_tokens_fn` says which tokens may come."""
    return any(type(p) is PrefixConstrainedLogitsProcessor for p in processors)


def warpers(how: Options) -> LogitsProcessorList:
    """Temperature, then top-k, then top-p."""
    chosen = LogitsProcessorList()
    if how["temperature"] not in (0, 1):
        chosen.append(logits_process.TemperatureLogitsWarper(float(how["temperature"])))
    if how["top_k"]:
        chosen.append(logits_process.TopKLogitsWarper(how["top_k"]))
    if how["top_p"] < 1:
        chosen.append(logits_process.TopPLogitsWarper(how["top_p"]))
    return chosen
