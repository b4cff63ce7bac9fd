"""The base class of targets, and the request of a row: one forward over a draft, and each node's distribution."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, nn

from mmspec.drafters.draft_vocab import DraftVocab
from mmspec.kernels import reference as ops
from mmspec.modes import Mode
from mmspec.pipelines.host.kinds import Mask
from mmspec.pipelines.host.processors.guidance import Guidance
from mmspec.pipelines.host.processors.table import Processors, pointwise
from mmspec.pipelines.target.noise import CounterNoise, Noise
from mmspec.pipelines.target.state import State, each_stream
from mmspec.protocols import SessionView
from mmspec.ragged_cache import Lengths
from mmspec.session import Group, Session
from mmspec.types import FINAL, LIKELIEST, RANKS, Categorical, Draft, Round, Scores, Tree, fold, unfold


class ModelTarget:
    """A `protocols.Target`: a view of a model with the guidance of a call. All state that changes is in the session.

    A subclass defines the forwards (`prefill`, `read`), the attention mask (`mask`), the embeddings and the head.
    """

    model: Any
    device: torch.device
    inference: Mode
    features: tuple[int, ...]
    captured: Any = None  # the `captures.Forward` that captures and compiles `read`; None: `read` is not captured
    last: int | None = None  # the highest position that a node may have; None: no limit
    kinds: tuple[str, ...] = ()  # the type of each layer, if masks differ by type
    stateful = False  # whether layers keep more than keys, values and recurrent states; such a model is not captured
    weighs = eager = tree = mixed = False  # whether `weigh` does anything; how the decoder attends

    def __init__(self, features: tuple[int, ...], guidance: Guidance | None = None) -> None:
        self.features = tuple(i for i in features if i >= FINAL)
        self.ranks = LIKELIEST in features  # whether the drafter needs the likeliest tokens
        self.guidance = guidance
        self.streams = 1 if guidance is None else 2

    @property
    def tables(self) -> tuple[nn.Module, ...]:
        """The modules that `embed` and `head` read."""
        return (self.model,)

    def score(self, session: Session, draft: Draft) -> Scores:
        raw, hidden = self.nodes(session, draft)
        return self.scores(raw, session, draft, hidden)

    def nodes(self, session: Session, draft: Draft) -> tuple[Tensor, Tensor | None]:
        """Raw logits [B·S, N, V] after each node, and its features [B, N, S·F], or None if the drafter needs none."""
        state: State = session.cache
        S, tree = self.streams, draft.tree
        tokens, index = (each_stream(t, S) for t in (draft.tokens.clamp(min=0), (session.emitted - 1)[:, None]))
        if S > 1:
            parents, depth, ancestors = (each_stream(t, S) for t in (tree.parents, tree.depth, tree.ancestors))
            tree = replace(tree, parents=parents, depth=depth, ancestors=ancestors)
        places = state.places.at(index + tree.depth)
        places = places if self.last is None else places.clamp(max=self.last)  # no row keeps tokens beyond it
        read = self.reader if self.captures(session) else self.read
        with self.reads(tree, state.cache.lengths):
            raw, *hidden = read(state, tokens, places, self.mask(state, tree.ancestors, tree.depth, tree.is_chain))
        return raw, unfold(hidden[0], self.streams) if hidden else None

    def commit(self, session: Session, round_: Round) -> None:
        session.cache.commit(round_)

    def head(self, hidden: Tensor, vocab: DraftVocab | None = None) -> Tensor:
        """Logits [B, n, V] of features [B, n, S·H], guided if there are two streams; only of `vocab` if given."""
        raw = self.logits(fold(hidden, self.streams), vocab)
        return self.guided(raw, hidden.new_zeros(1, 1, dtype=torch.long)).to(hidden.device)

    def weigh(self, logits: Tensor, session: SessionView, position: Tensor) -> Tensor:
        """A drafter's logits [B, n, V] for the tokens at `position` [B, n], processed as this target's own logits."""
        return logits

    def read(self, state: State, tokens: Tensor, places: Tensor, mask: Mask) -> tuple[Tensor, ...]:
        """Raw logits [B·S, N, V] of one forward, and the features [B·S, N, F] if the drafter needs some."""
        raise NotImplementedError

    @property
    def reader(self) -> Callable[..., tuple[Tensor, ...]]:
        """`read`, or its captured version."""
        return self.read if self.captured is None else partial(self.captured.read, self)

    def reads(self, tree: Tree, lengths: Lengths) -> AbstractContextManager[None]:
        """A context in which forwards read this tree, for layers that need more than a mask; most models have none."""
        return nullcontext()

    def mask(self, state: State, ancestors: Tensor, depth: Tensor, chain: bool = False) -> Mask:
        """The nodes' attention mask in the model's format; `chain`: the nodes are known on the host to be a chain."""
        raise NotImplementedError

    def logits(self, hidden: Tensor, vocab: DraftVocab | None = None) -> Tensor:
        """Raw logits [B·S, n, V] of final features [B·S, n, H]."""
        raise NotImplementedError

    def captures(self, session: Session) -> bool:
        """Whether rounds with these rows are worth a capture."""
        return True

    def guided(self, raw: Tensor, position: Tensor) -> Tensor:
        """Guided logits [B, n, V] from raw ones [B·S, n, V], for the new tokens number `position` [B, n]."""
        return raw if self.guidance is None else self.guidance(raw, position)

    def scores(self, raw: Tensor, session: Session, draft: Draft, hidden: Tensor | None) -> Scores:
        """The distribution of each node, from the logits by the request of its row."""
        logits = self.guided(raw, session.emitted[:, None] + draft.tree.depth)
        scores = self._scores(logits, raw, session, draft, hidden)
        if not self.ranks:
            return scores
        return replace(scores, likeliest=logits.topk(min(RANKS, logits.shape[-1]), -1).indices)

    def _scores(
        self, logits: Tensor, raw: Tensor, session: Session, draft: Draft, hidden: Tensor | None
    ) -> Scores:  # fmt: skip
        cond = raw if self.streams == 1 else raw[:: self.streams]
        groups: dict[int, list[int]] = {}
        for b, row in enumerate(session.rows):
            groups.setdefault(id(row.request), []).append(b)
        if len(groups) == 1:
            return session.rows[0].request.scores(logits, cond, session, draft, hidden)
        index = [torch.tensor(rows, device=raw.device) for rows in groups.values()]
        parts = (self._part(rows, logits, cond, session, draft) for rows in index)
        return replace(reduce(Scores.join, parts).select(torch.cat(index).argsort()), hidden=hidden)

    def _part(self, index: Tensor, logits: Tensor, cond: Tensor, session: Session, draft: Draft) -> Scores:
        """The distributions of some rows, which share one request."""
        group: Group = session.group(index)
        return group.rows[0].request.scores(logits[index], cond[index], group, draft.select(index), None)


@dataclass(frozen=True, eq=False)
class Request:
    """From the logits of a call's rows to the distributions that drafts are verified against; each row refers to it."""

    processors: Processors
    sample: bool = True  # draw tokens; otherwise take the likeliest
    # replaces each distribution by a point mass on the token that this noise chooses (seed-exact). That depends only on
    # a node's path and position, so any draft gives the same tokens: with CounterNoise those of the row's seed, with
    # TorchNoise those that a stock loop would have drawn. None: the distribution is kept
    noise: Noise | None = None
    keep: bool = False  # return processed and raw logits with the scores
    widen: bool = True  # process logits in float32, as `_sample` does
    # masks tokens that the model itself does not allow, before any processor: a function of logits [B, N, V] and of the
    # numbers [B, N] of the new tokens that they are for; None: all are allowed
    allowed: Callable[[Tensor, Tensor], Tensor] | None = None

    def scores(self, logits: Tensor, raw: Tensor, rows: Group, draft: Draft, hidden: Tensor | None) -> Scores:
        """The distribution that stock `generate` would draw from.

        Args:
            logits: [B, N, V], guided.
            raw: [B, N, V], of the conditional stream.
        """
        relaxed = rows.rows[0].rule.greedy is not None  # whether the rule reads the logits of a greedy call
        bare = not (self.sample or self.keep or relaxed or self.processors.processors)
        wide = logits.to(torch.float32) if self.widen and not bare else logits
        if self.allowed is not None:
            wide = self.allowed(wide, rows.emitted[:, None] + draft.tree.depth)
        if bare:
            return Scores(Categorical(ids=ops.likeliest(wide)), hidden)
        processed = self.processors(wide, rows, draft)
        kept = (processed, raw.to(torch.float32)) if self.keep else (None, None)
        if not self.sample:
            p = Categorical(processed if relaxed else None, ops.likeliest(processed))
        elif self.noise is None:
            p = Categorical(processed)
        else:
            p = Categorical(ids=self.noise.draw(processed, rows, draft))
        return Scores(p, hidden, *kept)

    def weighed(self, logits: Tensor, session: Group, position: Tensor) -> Tensor:
        """A drafter's logits [B, n, V] for the tokens at `position` [B, n] after the prompt, processed as the target's.

        Point-wise processors are applied, and for seed-exact sampling the noise of the target's own draw is added.
        """
        if not self.sample:
            return logits
        processors: Any = pointwise(self.processors.processors)
        warped = processors(position.reshape(-1, 1), logits.float().flatten(0, 1)).view_as(logits)
        if not isinstance(self.noise, CounterNoise):
            return warped
        noisy: Tensor = warped + self.noise.at(session, position, logits.shape[-1])
        return noisy
