"""The frozen values that the steps of a round exchange: Categorical, Tree, Draft, Scores, Acceptance, Round, Prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from mmspec.kernels import reference as ops

NO_TOKEN = -1  # the token of a node that proposes nothing: never accepted, never drawn
FINAL = -1  # in `features`: the final hidden state, after the last norm; i ≥ 0: the input of decoder layer i
LIKELIEST = -2  # in `features`: the RANKS likeliest tokens after each node, in `Scores.likeliest`
RANKS = 8

T = TypeVar("T")


@dataclass(frozen=True)
class Categorical:
    """A distribution over V tokens at each of N nodes: logits, or for a point mass the id of its only token.

    Logits are log-weights up to a constant, −inf for a token of probability 0. A point mass on the likeliest token may
    hold the logits as well, for a rule that relaxes greedy decoding.
    """

    logits: Tensor | None = None  # [B, N, V]
    ids: Tensor | None = None  # [B, N]

    def __post_init__(self) -> None:
        if self.logits is None and self.ids is None:
            raise ValueError("a Categorical needs logits [B, N, V] or ids [B, N]")

    @property
    def is_point(self) -> bool:
        return self.ids is not None

    @cached_property
    def log_z(self) -> Tensor:  # [B, N], logsumexp of the logits, at least in float32
        assert self.logits is not None
        return self.logits.to(torch.promote_types(self.logits.dtype, torch.float32)).logsumexp(-1)

    def spread(self, like: Tensor | None) -> Categorical:
        """The same point mass as logits [B, N, V], with the dtype and the V of `like`, the logits of other rows."""
        assert self.ids is not None and like is not None
        logits = like.new_full((*self.ids.shape, like.shape[-1]), -torch.inf)
        return Categorical(logits.scatter_(-1, self.ids.clamp(min=0)[..., None], 0.0))

    def mass(self, nodes: Tensor, tokens: Tensor) -> Tensor:
        """Probabilities, of dtype `ops.widest`, of tokens [B, K] or [B, K, M] at nodes [B, K]; 0 for NO_TOKEN."""
        if self.ids is None:
            assert self.logits is not None
            return ops.token_mass(self.logits, self.log_z, nodes, tokens)
        drawn = self.ids.gather(1, nodes)
        return ((drawn if tokens.dim() == 2 else drawn[..., None]) == tokens).to(ops.widest(tokens.device))

    def weights(self, nodes: Tensor, vocab: int | None = None) -> Tensor:
        """Probabilities, as `ops.widest`, [B, V] or [B, K, V] at nodes [B] or [B, K]; a point mass needs `vocab`."""
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
    """The shape of a draft. Node 0 is the root and its own parent; every parent has a lower index than its children.

    `families[r]` is an upper bound, over all rows, of the number of nodes with more than r children. The host knows it
    when the tree is built, so walking the tree reads nothing from the device. None: no bounds are known.
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
        """The same shape for `batch` rows, without copying."""
        parents, depth, ancestors = (t.expand(batch, *t.shape[1:]) for t in (self.parents, self.depth, self.ancestors))
        return Tree(parents, depth, ancestors, self.is_chain, self.families)


@dataclass(frozen=True)
class Draft:
    """Proposed tokens on a tree; node 0 is the pending token: decided, not yet in the KV cache."""

    tokens: Tensor  # [B, N], NO_TOKEN where nothing is proposed
    tree: Tree
    q: Categorical | None = None  # the distribution that each node's token was drawn from; None: point masses on them

    def select(self, rows: Tensor) -> Draft:
        return select(self, rows)


@dataclass(frozen=True)
class Scores:
    """The target's output after each node."""

    p: Categorical  # [B, N, V], with every logits processor (temperature, top-p, grammar) applied
    hidden: Tensor | None = None  # [B, N, S·F], the features that the drafter reads, of S streams side by side
    processed: Tensor | None = None  # [B, N, V], logits after the processors, if the caller wants them returned
    raw: Tensor | None = None  # [B, N, V], logits before the processors, likewise
    likeliest: Tensor | None = None  # [B, N, RANKS] token ids before the processors, likeliest first; see LIKELIEST

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
    tv_cost: Tensor | None = None  # [B], of dtype `ops.widest`: the total-variation cost of the tested drafts


@dataclass(frozen=True)
class Round:
    """One propose → verify → accept, frozen; the next `propose` may read it as `session.last`."""

    draft: Draft
    scores: Scores
    acceptance: Acceptance
    kept: Tensor  # [B, K], the accepted nodes, in path order; entries past a row's count mean nothing
    path: tuple[Sequence[int], ...]  # the accepted nodes of each row, ascending, on the host
    new: tuple[tuple[int, ...], ...]  # tokens decided in this round, per row: the accepted ones, then the drawn one
    proposed: tuple[int, ...]  # number of drafted tokens per row, NO_TOKEN not counted
    refused: tuple[bool, ...]  # per row: a drafted token was rejected; false unless the session is `watched`

    @property
    def counts(self) -> tuple[int, ...]:
        """`acceptance.count` on the host."""
        return tuple(map(len, self.path))

    def select(self, rows: Tensor) -> Round:
        """The same round for some of its rows."""
        chosen = rows.tolist()
        part = select(self, rows)
        on_host: dict[str, Any] = {name: tuple(getattr(self, name)[i] for i in chosen) for name in _PER_ROW}
        return replace(part, **on_host)

    def join(self, other: Round) -> Round:
        """The rounds of two sets of rows as one; the smaller tree is padded with NO_TOKEN."""
        both = join(self, other, {"tokens": NO_TOKEN})
        on_host: dict[str, Any] = {name: getattr(self, name) + getattr(other, name) for name in _PER_ROW}
        return replace(both, **on_host)


_PER_ROW = ("path", "new", "proposed", "refused")


class Decided(NamedTuple):
    """The accepted nodes of a round, as input of a feature drafter; entries past a row's `number` mean nothing."""

    hidden: Tensor  # [B, W, F], features of the accepted nodes
    follow: Tensor  # [B, W], the token that follows each; the pending token follows the last
    number: Tensor  # [B], the number of accepted nodes
    counts: tuple[int, ...]  # `number` on the host


def decided(last: Round) -> Decided:
    """The accepted nodes of a round, as input of a feature drafter.

    Raises:
        ValueError: the round holds no features of the target.
    """
    if last.scores.hidden is None:
        raise ValueError("the target returned no features; the drafter must list them in `features`")
    count, after = last.acceptance.count, last.acceptance.next_token[:, None]
    tokens = gather_rows(last.draft.tokens, last.kept).clamp(min=0)
    follow = torch.cat([tokens[:, 1:], after], 1).scatter(1, (count - 1)[:, None], after)
    return Decided(gather_rows(last.scores.hidden, last.kept), follow, count, last.counts)


@dataclass(frozen=True)
class Prompt:
    """The prompt that a drafter sees, as the target's decoder read it; L positions, left-padded."""

    ids: Tensor  # [B, L]
    embeds: Tensor | None  # [B, L, S·H], text embeddings with the visual features in their places
    hidden: Tensor | None  # [B, L, S·F], the features that the drafter reads
    visual: Tensor  # int64 [B, L], k ≥ 1 at the tokens of the row's k-th image or video frame, 0 at all others
    valid: Tensor  # [B, L] bool, false on padding
    grid: tuple[int, int] | None = None  # rows and columns, if the tokens to generate are those of one picture
    positions: Tensor | None = None  # int64 [B, A, L + 1], the decoder's position ids on A axes, the next token's last
    given: Mapping[str, Any] = field(default_factory=dict)  # the user's arguments of `generate`, by name

    def places(self, three: bool) -> tuple[Tensor, Tensor]:
        """Rotary positions for a drafter: of its next row, [B], which is at the prompt's last token, and of all tokens.

        Args:
            three: use the target's three axes, [B, L, 3], if it has them; the last token is text, where all three are
                equal. Otherwise the positions are 0, 1, …, [1, L].
        """
        B, L = self.ids.shape
        if three and self.positions is not None and self.positions.shape[1] >= 3:
            places = self.positions[:, -3:, :-1].transpose(1, 2)  # Qwen has a fourth axis before these, for text only
            return places[:, -1].amax(-1), places
        counted = torch.arange(L, device=self.ids.device)[None]
        return counted[:, -1].expand(B), counted


# -- selecting and joining rows of these values -----------------------------------------------------------------------


def select(value: T, rows: Tensor | slice) -> T:
    """Index the batch axis of every tensor inside a frozen value."""
    if isinstance(value, Tensor):
        return value[rows]  # type: ignore[return-value]
    if hasattr(value, "__dataclass_fields__"):
        names = [f.name for f in fields(value)]  # type: ignore[arg-type]
        return type(value)(**{name: select(getattr(value, name), rows) for name in names})
    return value


def join(a: T, b: T, fills: Mapping[str, int], name: str = "") -> T:
    """Concatenate two frozen values along the batch axis; the smaller tensor of a pair is padded at its end.

    Args:
        fills: padding value by the tensor's name; 0 for all others.
    """
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return stacked(a, b, fills.get(name, 0))  # type: ignore[return-value]
    if isinstance(a, Categorical) and isinstance(b, Categorical) and a.is_point != b.is_point:
        a, b = (d if d.logits is not None else d.spread(o.logits) for d, o in ((a, b), (b, a)))  # type: ignore[assignment]
    if a is None or b is None:  # such as q, which an empty draft does not have
        return None  # type: ignore[return-value]
    if hasattr(a, "__dataclass_fields__"):
        names = [f.name for f in fields(a)]  # type: ignore[arg-type]
        return type(a)(**{n: join(getattr(a, n), getattr(b, n), fills, n) for n in names})
    if isinstance(a, bool):
        return a and b
    return a if a == b else None  # type: ignore[return-value]


def stacked(a: Tensor, b: Tensor, fill: int = 0) -> Tensor:
    """Concatenate the rows of a and b; the one that is shorter on another axis is padded at its end with `fill`."""
    if a.shape[1:] == b.shape[1:]:
        return torch.cat([a, b])
    wide = [max(sizes) for sizes in zip(a.shape[1:], b.shape[1:], strict=True)]
    out = a.new_full((len(a) + len(b), *wide), fill, dtype=torch.promote_types(a.dtype, b.dtype))
    for rows, t in ((slice(len(a)), a), (slice(len(a), None), b)):
        out[(rows, *(slice(size) for size in t.shape[1:]))] = t
    return out


def gather_rows(x: Tensor, rows: Tensor) -> Tensor:
    """x [B, L, …] indexed along L by `rows` [B, n], row by row: [B, n, …]."""
    return x[torch.arange(len(x), device=x.device)[:, None], rows]


def fold(x: Tensor, streams: int) -> Tensor:
    """Move streams from the feature axis to the batch axis, those of a row adjacent: [B, n, S·F] to [B·S, n, F]."""
    if streams == 1:
        return x
    folded: Tensor = x.unflatten(-1, (streams, -1)).transpose(1, 2).flatten(0, 1)
    return folded


def unfold(x: Tensor, streams: int) -> Tensor:
    """The inverse of `fold`: [B·S, n, F] to [B, n, S·F]."""
    if streams == 1:
        return x
    unfolded: Tensor = x.unflatten(0, (-1, streams)).transpose(1, 2).flatten(2)
    return unfolded
