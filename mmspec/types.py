"""The nouns that travel through a round, all frozen values: Categorical, Tree, Draft, Scores, Acceptance, Round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from mmspec.kernels import reference as ops

NO_TOKEN = -1  # the token of a node that proposes nothing: never accepted, never drawn
FINAL = -1  # as a feature: the final hidden state, after the last norm; i ≥ 0: what enters decoder layer i
LIKELIEST = -2  # asked for among the features: the RANKS likeliest tokens after each node, as `Scores.likeliest`
RANKS = 8

T = TypeVar("T")


@dataclass(frozen=True)
class Categorical:
    """A distribution over V tokens at each of N nodes: logits, or (a point mass) only the token it always gives.

    Logits are log-weights up to a constant, −inf for what cannot happen. A point mass on the likeliest token may hold
    them as well, for a rule that relaxes greedy decoding.
    """

    logits: Tensor | None = None  # [B, N, V]
    ids: Tensor | None = None  # [B, N]

    def __post_init__(self) -> None:
        if self.logits is None and self.ids is None:
            raise ValueError("a Categorical holds logits [B, N, V] or ids [B, N]; give one of them")

    @property
    def is_point(self) -> bool:
        return self.ids is not None

    @cached_property
    def log_z(self) -> Tensor:  # [B, N], logsumexp of the logits, in float32 at least
        assert self.logits is not None
        return self.logits.to(torch.promote_types(self.logits.dtype, torch.float32)).logsumexp(-1)

    def spread(self, like: Tensor | None) -> Categorical:
        """The same point mass as logits [B, N, V], of the type and the V of those of other rows."""
        assert self.ids is not None and like is not None
        logits = like.new_full((*self.ids.shape, like.shape[-1]), -torch.inf)
        return Categorical(logits.scatter_(-1, self.ids.clamp(min=0)[..., None], 0.0))

    def mass(self, nodes: Tensor, tokens: Tensor) -> Tensor:
        """Probability, as `ops.widest`, of tokens [B, K] or [B, K, M] by what is at nodes [B, K]; 0 for holes."""
        if self.ids is None:
            assert self.logits is not None
            return ops.token_mass(self.logits, self.log_z, nodes, tokens)
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


class Decided(NamedTuple):
    """What a round decided, for a drafter on features to read; entries past a row's number are meaningless."""

    hidden: Tensor  # [B, W, F], features of the accepted nodes
    follow: Tensor  # [B, W], the token that follows each; the pending one follows the last
    number: Tensor  # [B], how many
    counts: tuple[int, ...]  # the same on the host


def decided(last: Round) -> Decided:
    """What a drafter on features reads of a round.

    Raises:
        ValueError: without features of the target.
    """
    if last.scores.hidden is None:
        raise ValueError("the target handed over no features; the drafter must name them in `features`")
    count, after = last.acceptance.count, last.acceptance.next_token[:, None]
    tokens = gather_rows(last.draft.tokens, last.kept).clamp(min=0)
    follow = torch.cat([tokens[:, 1:], after], 1).scatter(1, (count - 1)[:, None], after)
    return Decided(gather_rows(last.scores.hidden, last.kept), follow, count, last.counts)


@dataclass(frozen=True)
class Prompt:
    """What a drafter may know of the prompt, as the target's decoder saw it; L positions, left-padded."""

    ids: Tensor  # [B, L]
    embeds: Tensor | None  # [B, L, S·H], text embeddings with the visual features in their places
    hidden: Tensor | None  # [B, L, S·F], the features that the drafter asked for
    visual: Tensor  # int64 [B, L], k ≥ 1 at the tokens of the row's k-th image or video frame, 0 at all others
    valid: Tensor  # [B, L] bool, false on padding
    grid: tuple[int, int] | None = None  # rows and columns, where the tokens to come are known to be one picture's
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


# -- rows of such values ----------------------------------------------------------------------------------------------


def select(value: T, rows: Tensor | slice) -> T:
    """Index the batch axis of every tensor inside a frozen value."""
    if isinstance(value, Tensor):
        return value[rows]  # type: ignore[return-value]
    if hasattr(value, "__dataclass_fields__"):
        names = [f.name for f in fields(value)]  # type: ignore[arg-type]
        return type(value)(**{name: select(getattr(value, name), rows) for name in names})
    return value


def join(a: T, b: T, fills: Mapping[str, int], name: str = "") -> T:
    """Stack two frozen values along the batch axis, the smaller tensor of a pair filled up at its end.

    Args:
        fills: what to fill up with, by the tensor's name; 0 where nothing is said.
    """
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        shape = [max(x, y) for x, y in zip(a.shape[1:], b.shape[1:], strict=True)]
        return torch.cat([_filled(t, shape, fills.get(name, 0)) for t in (a, b)])  # type: ignore[return-value]
    if isinstance(a, Categorical) and isinstance(b, Categorical) and a.is_point != b.is_point:
        a, b = (d if d.logits is not None else d.spread(o.logits) for d, o in ((a, b), (b, a)))  # type: ignore[assignment]
    if a is None or b is None:  # such as the distribution of a draft, which an empty one has not
        return None  # type: ignore[return-value]
    if hasattr(a, "__dataclass_fields__"):
        names = [f.name for f in fields(a)]  # type: ignore[arg-type]
        return type(a)(**{n: join(getattr(a, n), getattr(b, n), fills, n) for n in names})
    if isinstance(a, bool):
        return a and b
    return a if a == b else None  # type: ignore[return-value]


def gather_rows(x: Tensor, rows: Tensor) -> Tensor:
    """[B, n, …] of x [B, L, …]: of each sequence the rows [B, n]."""
    return x[torch.arange(len(x), device=x.device)[:, None], rows]


def fold(x: Tensor, streams: int) -> Tensor:
    """Streams from the feature axis to the batch axis, a row's one below the other: [B, n, S·F] to [B·S, n, F]."""
    if streams == 1:
        return x
    folded: Tensor = x.unflatten(-1, (streams, -1)).transpose(1, 2).flatten(0, 1)
    return folded


def unfold(x: Tensor, streams: int) -> Tensor:
    """And back: [B·S, n, F] to [B, n, S·F]."""
    if streams == 1:
        return x
    unfolded: Tensor = x.unflatten(0, (-1, streams)).transpose(1, 2).flatten(2)
    return unfolded


def _filled(t: Tensor, shape: list[int], fill: int) -> Tensor:
    out = t.new_full((t.shape[0], *shape), fill)
    out[tuple(slice(0, n) for n in t.shape)] = t
    return out
