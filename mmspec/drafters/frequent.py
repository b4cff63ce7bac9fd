"""Drafts from the tokens that a model's texts have most, so that a drafter reads few rows of the target's head."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from itertools import chain
from weakref import ref

import numpy as np
import torch

from mmspec.drafters.draft_vocab import DraftVocab
from mmspec.kernels import dispatch
from mmspec.modes import lasting
from mmspec.protocols import Proposer, Target, TargetInfo
from mmspec.session import Session
from mmspec.types import Draft, Prompt

ROWS = 32768  # frequent tokens
LEAST = 2 * ROWS  # the smallest vocabulary of which not all tokens are read
WINDOW, ENOUGH = 1024, 128  # latest tokens that count; fewer say nothing
FEW, MANY = 0.92, 0.95  # shares of frequent ones: below FEW all tokens are read, from MANY on the frequent ones
RENEWED = 32  # tokens that were not among the frequent ones, until these are chosen anew


class FrequentTokens:
    """The ROWS tokens that a model's prompts and answers had most so far; of those that they had as often, or not at
    all, the ones with the smallest ids, which a BPE vocabulary learned first. Those that end an answer are always
    among them.

    Attributes:
        suffice: whether they held enough of the latest tokens to draft from them alone.
    """

    def __init__(self, target: TargetInfo) -> None:
        self._counts = np.zeros(target.vocab, np.int64)
        self._ends = [token for token in target.ends or () if token < target.vocab]
        self._latest: deque[bool] = deque(maxlen=WINDOW)
        self._missing = 0
        self._lock = threading.Lock()  # calls in several threads count in the same place
        self.suffice = True
        self._device, self._ids = target.device, self._most()
        self._vocab: ref[DraftVocab] | None = None  # it has a copy of rows of the head, which a drafter keeps alive

    @property
    def vocab(self) -> DraftVocab:
        """These tokens; they change in place while the object is in use."""
        vocab = None if self._vocab is None else self._vocab()
        if vocab is None:
            with lasting():
                vocab = DraftVocab(torch.from_numpy(self._ids).to(self._device))
            self._vocab = ref(vocab)
        return vocab

    def _most(self) -> np.ndarray:
        """The frequent tokens, int64 [ROWS], ascending; they are marked as known."""
        seen, fixed = np.flatnonzero(self._counts), self._ends
        order = seen[np.argsort(-self._counts[seen], kind="stable")]
        ranked = dict.fromkeys([*fixed, *order.tolist(), *range(ROWS)])
        ids = np.sort(np.array([*ranked][:ROWS]))
        self._known = np.zeros(len(self._counts), bool)
        self._known[ids] = True
        return ids

    def read(self, tokens: Sequence[int]) -> None:
        """Count the tokens of a prompt; choose the frequent ones anew if too many were missing among them, and see
        whether they suffice: not later, since the first draft from the others may have to be compiled."""
        ids = np.asarray(tokens, np.int64)
        with self._lock:
            np.add.at(self._counts, ids[(ids >= 0) & (ids < len(self._counts))], 1)
            if len(self._latest) >= ENOUGH:
                self.suffice = sum(self._latest) >= (FEW if self.suffice else MANY) * len(self._latest)
            if self._missing >= RENEWED:
                self._missing, self._ids = 0, self._most()
                self.vocab.become(torch.from_numpy(self._ids))

    def decided(self, tokens: Sequence[int]) -> None:
        """Count the tokens that a round decided."""
        with self._lock:
            for token in tokens:
                known = bool(self._known[token])
                self._counts[token] += 1
                self._missing += not known
                self._latest.append(known)


class FrequentDrafts:
    """Proposes the drafts of a drafter that reads only the frequent tokens' rows of the target's head, as long as they
    suffice, and else those of the one that reads all.

    Which drafter it is depends on other calls. So all rows are read where the tokens depend on the draft: under a
    relaxed rule, or above temperature 0 if a row's noise is not fixed before anything is drafted. Where a kernel draws
    with fixed noise, it is (`shares`); on a CPU that would take longer than the rows of the head.

    Args:
        whole, few: the same drafter, whose memory does not depend on the head.
    """

    def __init__(self, whole: Proposer, few: Proposer, tokens: FrequentTokens) -> None:
        self.whole, self.few, self.tokens = whole, few, tokens
        self.shares = not dispatch.defined("draw", tokens.vocab.ids)
        self.features, self.nodes = whole.features, whole.nodes

    def start(self, session: Session, target: Target, prompt: Prompt) -> object:
        for row in session.rows:
            self.tokens.read(row.tokens)
        return self.few.start(session, target, prompt)  # which copies its rows of the head if they have changed

    def propose(self, session: Session, target: Target) -> Draft:
        self.tokens.decided([*chain.from_iterable(session.last.new)])
        fixed = session.last.scores.p.is_point and session.rule.lossless
        return (self.few if fixed and self.tokens.suffice else self.whole).propose(session, target)
