"""The nouns that travel through a round: Categorical, Tree, Draft, Scores, Acceptance, Round. All are frozen values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from mmspec.batch import join, select
from mmspec.kernels import reference as ops
from mmspec.modes import Mode

NO_TOKEN = -1  # the token of a node that proposes nothing: never accepted, never drawn
FINAL = -1  # as a feature: the final hidden state, after the last norm; i ≥ 0: what enters decoder layer i
ATTENTION = -2  # asked for among the features: how much each token of the prompt is attended to, as `Prompt.attention`
LIKELIEST = -3  # asked for among the features: the RANKS likeliest tokens after each node, as `Scores.likeliest`
RANKS = 8


@dataclass(frozen=True)
class Categorical:
    """A distribution over V tokens at each of N nodes: either logits, or (a point mass) only the token it always gives.

    Logits are log-weights up to a constant, −inf for what cannot happen. Exactly one of the two is given.
    """

    logits: Tensor | None = None  # [B, N, V]
    ids: Tensor | None = None  # [B, N]

    def __post_init__(self) -> None:
        if (self.logits is None) == (self.ids is None):
            raise ValueError("a Categorical holds either logits [B, N, V] or ids [B, N]; give exactly one of them")

    @property
    def is_point(self) -> bool:
        return self.ids is not None

    @cached_property
    def log_z(self) -> Tensor:  # [B, N], logsumexp of the logits, in float32 at least
        assert self.logits is not None
        return self.logits.to(torch.promote_types(self.logits.dtype, torch.float32)).logsumexp(-1)

    def mass(self, nodes: Tensor, tokens: Tensor) -> Tensor:
        """Probability, as `ops.widest`, of tokens [B, K] or [B, K, M] by what is at nodes [B, K]; 0 for holes."""
        if self.logits is not None:
            return ops.token_mass(self.logits, self.log_z, nodes, tokens)
        assert self.ids is not None
        drawn = self.ids.gather(1, nodes)
        return ((drawn if tokens.dim() == 2 else drawn[..., None]) == tokens).to(ops.widest(tokens.device))

    def weights(self, nodes: Tensor, vocab: int | None = None) -> Tensor:
        """Probabilities, as `ops.widest`, [B, V] or [B, K, V] at nodes [B] or [B, K]; a point mass is told V."""
        rows = torch.arange(len(nodes), device=nodes.device).view(-1, *[1] * (nodes.dim() - 1))
        if self.ids is not None:
            if vocab is None:
                raise ValueError("a point mass does not know its vocabulary; pass vocab=V")
            ids = self.ids[rows, nodes][..., None].clamp(min=0)
            none = torch.zeros(*nodes.shape, vocab, dtype=ops.widest(ids.device), device=ids.device)
            return none.scatter_(-1, ids, 1.0)
        assert self.logits is not None
        return self.logits[rows, nodes].to(ops.widest(nodes.device)).softmax(-1)


@dataclass(frozen=True)
class Tree:
    """The shape of a draft. Node 0 is the root; every parent stands before its children; the root is its own parent.

    `families` bounds, for all rows, how many nodes have at least one child, at least two, …; known to the host when the
    tree is made, so that nothing need be read from the device to walk it. None: nothing is known of it.
    """

    parents: Tensor  # [B, N]
    depth: Tensor  # [B, N], 0 at the root
    ancestors: Tensor  # [B, N, N] bool, a node counts among its own ancestors
    is_chain: bool = False
    families: tuple[int, ...] | None = None

    @property
    def size(self) -> int:
        return self.parents.shape[1]

    def expand(self, batch: int) -> Tree:
        """The same shape for every one of `batch` rows, without copying."""
        parents, depth, ancestors = (t.expand(batch, *t.shape[1:]) for t in (self.parents, self.depth, self.ancestors))
        return Tree(parents, depth, ancestors, self.is_chain, self.families)


@dataclass(frozen=True)
class Draft:
    """Proposed tokens on a tree; node 0 is the pending token: decided, not yet in the KV cache."""

    tokens: Tensor  # [B, N], NO_TOKEN where nothing is proposed
    tree: Tree
    q: Categorical | None = None  # at each node as it was when its token was drawn; None: point masses on the tokens

    def select(self, rows: Tensor) -> Draft:
        """The same draft for some of its rows."""
        return select(self, rows)


@dataclass(frozen=True)
class Scores:
    """What the target says after each node."""

    p: Categorical  # [B, N, V], with every processor (temperature, top-p, grammar) applied
    hidden: Tensor | None = None  # [B, N, S·F], the features that the drafter asked for, of S streams side by side
    processed: Tensor | None = None  # [B, N, V], logits after the processors, where the caller wants them back
    raw: Tensor | None = None  # [B, N, V], logits before them, likewise
    likeliest: Tensor | None = None  # [B, N, RANKS], before the processors, the likeliest first; see LIKELIEST

    def select(self, rows: Tensor) -> Scores:
        return select(self, rows)

    def join(self, other: Scores) -> Scores:
        """The scores of two sets of rows of the same draft."""
        return join(self, other, {})


@dataclass(frozen=True)
class Acceptance:
    """Which drafted tokens were accepted, and the next token."""

    accepted: Tensor  # [B, N] bool, true on one path that starts at the root
    count: Tensor  # [B], accepted nodes, the root included
    last: Tensor  # [B], the deepest of them
    next_token: Tensor  # [B], drawn from the distribution after `last`: the next pending token
    tv_cost: Tensor | None = None  # [B], as `ops.widest`: what the tested drafts cost in total variation


@dataclass(frozen=True)
class Round:
    """One propose → verify → accept, frozen; the next `propose` may read it as `session.last`."""

    draft: Draft
    scores: Scores
    acceptance: Acceptance
    kept: Tensor  # [B, K], the accepted nodes, in path order; entries past a row's count mean nothing
    path: tuple[Sequence[int], ...]  # the accepted nodes of each row, ascending, as the host read them
    new: tuple[tuple[int, ...], ...]  # tokens decided in this round, per row: the accepted ones, then the drawn one
    proposed: tuple[int, ...]  # drafted tokens per row, NO_TOKEN left out
    refused: tuple[bool, ...]  # per row: a drafted token was rejected; false where nobody watches the session

    @property
    def counts(self) -> tuple[int, ...]:
        """`acceptance.count`, as the host read it."""
        return tuple(map(len, self.path))

    def select(self, rows: Tensor) -> Round:
        """The same round for some of its rows."""
        chosen = rows.tolist()
        part = select(self, rows)
        read: dict[str, Any] = {name: tuple(getattr(self, name)[i] for i in chosen) for name in _PER_ROW}
        return replace(part, **read)

    def join(self, other: Round) -> Round:
        """The rounds of two sets of rows as one; the smaller tree is filled up with holes."""
        both = join(self, other, {"tokens": NO_TOKEN})
        read: dict[str, Any] = {name: getattr(self, name) + getattr(other, name) for name in _PER_ROW}
        return replace(both, **read)


_PER_ROW = ("path", "new", "proposed", "refused")


@dataclass(frozen=True)
class Prompt:
    """What a drafter may know of the prompt, as the target's decoder saw it; L positions, left-padded."""

    ids: Tensor  # [B, L]
    embeds: Tensor | None  # [B, L, S·H], text embeddings with the visual features in their places
    hidden: Tensor | None  # [B, L, S·F], the features that the drafter asked for
    visual: Tensor  # int64 [B, L], k ≥ 1 at the tokens of the row's k-th image or video frame, 0 at all others
    valid: Tensor  # [B, L] bool, false on padding
    grid: tuple[int, int] | None = None  # rows and columns, where the tokens to come are known to be one picture's
    attention: Tensor | None = None  # [B, L], share of the attention of the text behind the last image; see ATTENTION
    positions: Tensor | None = None  # int64 [B, A, L + 1], the decoder's position ids on A axes, the next token's last
    given: Mapping[str, Any] = field(default_factory=dict)  # what the user gave `generate`, by name

    def places(self, three: bool) -> tuple[Tensor, Tensor]:
        """Rotary positions for a drafter: of its next row, [B], and of all rows of the prompt.

        Args:
            three: on the target's three axes, [B, L, 3], where it has such; the last row is text, where all are alike.
                Else they are counted, [1, L].
        """
        B, L = self.ids.shape
        if three and self.positions is not None and self.positions.shape[1] >= 3:
            places = self.positions[:, -3:, :-1].transpose(1, 2)  # Qwen's have a fourth before them, of text alone
            return places[:, -1].amax(-1), places
        counted = torch.arange(L, device=self.ids.device)[None]
        return counted[:, -1].expand(B), counted


@dataclass(frozen=True)
class TargetInfo:
    """What a drafter has to fit.

    Attributes:
        name: folder or hub name that the target was loaded from.
        vocab: V, rows of its head.
        hidden: H, width of its final features.
        embedding: width of its input embeddings.
        layers: of its text decoder.
        ends: ids of tokens that end an answer; None: its tokens are no text.
    """

    name: str
    vocab: int
    hidden: int
    embedding: int
    layers: int
    device: torch.device
    dtype: torch.dtype
    ends: tuple[int, ...] | None = None


class Rows(Protocol):
    """State with one entry per row: it can lose rows and take in the rows of another."""

    def select(self, rows: Tensor) -> Any: ...

    def join(self, other: Any) -> Any: ...


@runtime_checkable
class Reporting(Protocol):
    """A drafter's memory that reports on the prompts that it read: sums, by name."""

    stats: dict[str, float]


def reported(memory: Any) -> dict[str, float]:
    """What goes into `Stats.drafter`: nothing, unless the memory is `Reporting`."""
    return dict(memory.stats) if isinstance(memory, Reporting) else {}


class Target(Protocol):
    """The model whose distribution is kept: a view of it without a state of its own. It knows no drafter.

    Attributes:
        device: where sessions and drafters are, however the model's layers are spread.
        features: what is recorded for the drafter, in the drafter's order: layers i ≥ 0 by what enters them, FINAL.
        inference: the mode that rounds run in, torch.inference_mode or torch.no_grad.
        streams: S, how many forwards of the same tokens make one distribution: 2 under classifier-free guidance.
        guidance: what makes one distribution of the streams, which a captured draft depends on; None: there is one.
        weighs: whether `weigh` does anything.
    """

    device: torch.device
    features: tuple[int, ...]
    inference: Mode
    streams: int
    guidance: Any
    weighs: bool

    def prefill(self, session: Any, inputs: Any, nodes: int) -> tuple[Prompt, Scores]:
        """Read the prompts of the session's rows into `session.cache`.

        Args:
            inputs: what came with the call.
            nodes: the most that a draft will hold, for which room is made.

        Returns:
            What a drafter may know of the prompts, and the scores [B, 1, V] after them.
        """

    def score(self, session: Any, draft: Draft) -> Scores:
        """One forward over every node of the draft [B, N], each seeing the row's cache and its own ancestors."""

    def commit(self, session: Any, round_: Round) -> None:
        """Keep the KV cache entries of the accepted nodes, drop the rest."""

    def embed(self, ids: Tensor) -> Tensor:
        """Input embeddings [..., H] of token ids; all streams read the same tokens."""

    def head(self, hidden: Tensor, vocab: Any = None) -> Tensor:
        """Raw logits [B, n, V] of final features [B, n, S·H]; of a DraftVocab's tokens alone where one is given.

        One is given on the option `draft_vocab`, which needs a target that says which tokens end an answer.
        """

    def weigh(self, logits: Tensor, session: Any, position: Tensor) -> Tensor:
        """A drafter's logits [B, n, V] of the tokens at `position` [B, n], weighed as the target weighs its own."""


class Drafter(Protocol):
    """What proposes. It knows no target's class; it changes nothing but its own memory in the session.

    Whatever it proposes, rule `exact` keeps the target's distribution: a bad drafter costs time, never quality. The
    loop calls `start` and `propose`; `enable` asks for the rest.

    Attributes:
        features: what it wants to read of the target, as `prompt.hidden` and `session.last.scores.hidden`, side by side
            on the last axis: layer i ≥ 0 (what enters it) or FINAL (after the last norm); `()` for nothing. What
            ATTENTION and LIKELIEST ask for comes in places of its own.
        nodes: the most nodes N of its drafts, the root included; room in the cache is made for so many.

    One that can be told how to draft has `options` besides, a frozen dataclass of its own, whose names `enable` takes.
    One whose drafts follow from what other rows and calls wrote has `shares = True`: what a row draws is then fixed by
    its seed beforehand, and does not depend on them.
    """

    @property
    def features(self) -> tuple[int, ...]: ...

    @property
    def nodes(self) -> int: ...

    def fit(self, target: TargetInfo, given: Mapping[str, Any]) -> Drafter:
        """Itself for this target, with the options that the user gave (`config.chosen` puts them into `options`).

        Raises:
            ValueError: it was made for another target, has no use for an option, or a value makes no sense.
        """

    def start(self, session: Any, target: Target, prompt: Prompt) -> Any:
        """Memory for these rows, filled from the prompt; the loop keeps it as `session.memory`.

        Returns:
            Rows (it can `select` and `join`, since rows end and enter), which may be `Reporting`, or None for a drafter
            that remembers nothing.
        """

    def propose(self, session: Any, target: Target) -> Draft:
        """The next draft [B, N] for the rows under way, node 0 being `session.pending`.

        To be read: `session.rows[b].tokens` (prompt and answer so far, the pending token last), `session.memory`,
        `session.last` (the round before, the prefill's at first), `target.embed` and `target.head`. NO_TOKEN stands
        where a row has nothing to propose. A draft drawn at random must bring the distribution it was drawn from, as it
        was then.
        """
