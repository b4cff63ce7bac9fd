"""What feature drafters are built of: one Llama-style layer, the tree-shaped decoding around them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from mmspec.attention import cut, sdpa
from mmspec.drafters.rope import Rope, rotate
from mmspec.linear import Linear, linear
from mmspec.protocols import SessionView
from mmspec.ragged_cache import Lengths, RaggedBuffer, visibility
from mmspec.types import gather_rows

KeysValues = tuple[Tensor, Tensor]  # [B, heads, n, D] each
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # q, k, v [B, heads, n, D] → [B, heads, n, D]


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)


class Block(nn.Module):
    """One decoder layer with fused projections. The attention may read a wider input than the residual stream has."""

    def __init__(
        self, hidden: int, intermediate: int, heads: int, kv_heads: int, rope: Rope, eps: float,
        inputs: int = 1, qkv_bias: bool = False, head_dim: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.heads, self.kv_heads, self.rope = heads, kv_heads, rope
        self.head_dim = head_dim or hidden // heads
        self.qkv = Linear(inputs * hidden, (heads + 2 * kv_heads) * self.head_dim, bias=qkv_bias)
        self.out = Linear(heads * self.head_dim, hidden, bias=False)
        self.mlp_norm = RMSNorm(hidden, eps)
        self.gate_up = Linear(hidden, 2 * intermediate, bias=False)
        self.down = Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor, residual: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """x [B, n, inputs·H] is what attention reads, residual [B, n, H] what it adds to; returns [B, n, H]."""
        B, n, _ = x.shape
        heads = self.qkv(x).view(B, n, -1, self.head_dim).transpose(1, 2)
        turned = rotate(heads[:, : self.heads + self.kv_heads], positions, self.rope)
        o = attend(turned[:, : self.heads], turned[:, self.heads :], heads[:, self.heads + self.kv_heads :])
        x = residual + self.out(o.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)

    def keys_values(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """What `forward` would hand to `attend` as keys and values, [B, kv_heads, n, D], and nothing else."""
        B, n, _ = x.shape
        first = self.heads * self.head_dim
        bias = None if self.qkv.bias is None else self.qkv.bias[first:]
        heads = linear(x, self.qkv.weight[first:], bias).view(B, n, 2 * self.kv_heads, self.head_dim).transpose(1, 2)
        return rotate(heads[:, : self.kv_heads], positions, self.rope), heads[:, self.kv_heads :]


def beside(attend: Attend, streams: int) -> Attend:
    """Attention of [B·S, heads, n, D] as that of [B, S·heads, n, D]: a row's streams are heads of one memory."""
    if streams == 1:
        return attend

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.unflatten(0, (-1, streams)).flatten(1, 2) for t in (q, k, v))
        return attend(q, k, v).unflatten(1, (streams, -1)).flatten(0, 1)

    return run


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None = None) -> Tensor:
    """Softmax attention; `mask` bool [B or 1, n, T], true where visible."""
    return sdpa(q, k, v, None if mask is None else mask[:, None], scale)


Span = tuple[int, int, int]  # a row of the batch, and where something begins and ends in it


def runs(visual: Tensor, merge: bool = False) -> list[Span]:
    """Where the media of a batch stand, row by row from left to right.

    Args:
        visual: int64 [B, L]: k ≥ 1 at the tokens of the k-th medium of a row, 0 at all others.
        merge: take media that touch for one.
    """
    visual = visual.cpu()
    kind = (visual > 0).to(visual.dtype) if merge else visual
    found = []
    for b, line in enumerate(F.pad(kind, (1, 1)).diff(dim=1).ne(0)):
        at = line.nonzero()[:, 0].tolist()
        found += [(b, i, j) for i, j in pairwise(at) if kind[b, i]]
    return found


def spans_of(x: Tensor, spans: Sequence[Span]) -> tuple[Tensor, Tensor]:
    """Spans of rows of x [B, L, H] side by side, padded at their ends: [R, longest, H], and where they are real."""
    parts = [x[b, i:j] for b, i, j in spans]
    lengths = torch.tensor([len(part) for part in parts], device=x.device)
    padded = pad_sequence(parts, batch_first=True)
    return padded, torch.arange(padded.shape[1], device=x.device) < lengths[:, None]


def splice(valid: Tensor, spans: Sequence[Span], counts: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """How a batch is laid out after spans of its rows were replaced by new rows.

    Args:
        valid: bool [B, L], false on padding.
        spans: as `runs` gives them.
        counts: how many rows take the place of each span.

    Returns:
        Indices [B, n] into the B·L rows of the batch followed by the new ones, span by span; whether each is real, bool
        [B, n]; and which row of its sequence it is, int64 [B, n], −1 at new rows and padding. What is left of padding
        stands on the left.
    """
    (B, L), new = valid.shape, sum(counts)
    real, every = torch.cat([valid.flatten().cpu(), torch.ones(new, dtype=torch.bool)]), torch.arange(B * L + new)
    lines: list[list[Tensor]] = [[] for _ in range(B)]
    reached, first = [0] * B, B * L
    for (b, start, stop), count in zip(spans, counts, strict=True):
        lines[b] += [every[b * L + reached[b] : b * L + start], every[first : first + count]]
        reached[b], first = stop, first + count
    whole = [torch.cat([*line, every[b * L + reached[b] : b * L + L]]) for b, line in enumerate(lines)]
    index = pad_sequence([line[real[line]] for line in whole], True, -1, padding_side="left").to(valid.device)
    source = torch.where((index >= 0) & (index < B * L), index % max(L, 1), -1)
    return index.clamp(min=0), index >= 0, source


def spliced(x: Tensor, new: Tensor, index: Tensor) -> Tensor:
    """[B, n, …] of rows x [B, L, …] and new ones [M, …], by the indices [B, n] of `splice`."""
    return torch.cat([x.flatten(0, 1), new.to(x.dtype)])[index]


def shares(length: Tensor, count: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Spans of `length` [R] rows cut into `count` [R] shares that differ by one row at most; 1 ≤ count ≤ length.

    Returns:
        First and last row of each share, [R, C], within its span; and bool [R, C], which shares there are.
    """
    share = torch.arange(int(count.max()), device=count.device).expand(len(count), -1)
    real = share < count[:, None]
    share = share.minimum(count[:, None] - 1)
    first, after = ((share + i) * length[:, None] // count[:, None] for i in (0, 1))
    return first, after - 1, real


@dataclass
class FeatureMemory:
    """A feature drafter's state: keys and values of the rows it has read, per sequence; streams are further heads."""

    slots: RaggedBuffer
    lengths: Lengths  # rows read, per sequence
    positions: Tensor  # [B], of the next row
    open_slots: Tensor  # bool [B, L], false at padding
    padded: bool  # whether any slot is closed, as the host knows it
    context: Tensor | None = None  # [B, 1, C], what else `inputs` wants at the rows to come
    stats: dict[str, float] = field(default_factory=dict)  # for `Stats.drafter`, right after the prompt was read
    more: tuple[RaggedBuffer, ...] = ()  # of the layers after the first

    def _buffers(self) -> tuple[RaggedBuffer, ...]:
        return (self.slots, *self.more)

    def select(self, rows: Tensor) -> FeatureMemory:
        order = rows.tolist()
        for slots in self._buffers():
            slots.select(rows, order, self.lengths.longest)
        return replace(
            self,
            lengths=self.lengths.select(rows, order),
            positions=self.positions[rows],
            open_slots=self.open_slots[rows],
            context=None if self.context is None else self.context[rows],
        )

    def join(self, other: FeatureMemory) -> FeatureMemory:
        for mine, others in zip(self._buffers(), other._buffers(), strict=True):
            mine.join(others, self.lengths.longest)
        longest = max(self.open_slots.shape[1], other.open_slots.shape[1])
        open_slots = [F.pad(m.open_slots, (0, longest - m.open_slots.shape[1]), value=True) for m in (self, other)]
        positions = torch.cat([self.positions, other.positions])
        both = None if self.context is None or other.context is None else torch.cat([self.context, other.context])
        lengths, padded = self.lengths.join(other.lengths), self.padded or other.padded
        held: dict[str, Any] = {"lengths": lengths, "positions": positions, "padded": padded}
        return replace(self, **held, open_slots=torch.cat(open_slots), context=both)

    def attend(
        self, at: Lengths, ancestors: Tensor | None, slots: RaggedBuffer | None = None, scale: float | None = None
    ) -> Attend:
        """Attention over the rows read and the ones since; the last M columns of `ancestors` [B, n, ≥ M] say it of the
        M rows after the first `self.lengths`, of which the last n are being appended at `at`; None: all is visible."""

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = (slots or self.slots).append(k, v, at)
            return attention(q, keys, values, self.visible(at, q.shape[2], ancestors), scale)

        return run

    def over(self, layer: int, ahead: KeysValues, at: Lengths, run: Callable[..., Tensor]) -> Attend:
        """Attention of rows that see what a layer holds once `ahead` is appended at `at`; `run` is given its slots."""
        slots = self._buffers()[layer]
        slots.append(*ahead, at)
        return partial(run, slots)

    def state(self) -> list[Tensor]:
        """What a captured draft reads of it besides keys and values."""
        return [self.positions, *([] if self.context is None else [self.context])]

    @contextmanager
    def passing(self, state: Sequence[Tensor]) -> Iterator[Any]:
        """For a capture: a memory of these rows that began empty, with this state. Its attentions are cuts, numbered by
        how far in they append."""
        yield PassThroughMemory(*state)

    def visible(self, at: Lengths, n: int, ancestors: Tensor | None) -> Tensor | None:
        """The mask, bool [B, n, T], of n rows that are appended at `at`, as `attend` says; None: all is visible."""
        if ancestors is None and not self.padded and at.even:
            return None
        M = at.longest + n - self.lengths.longest
        some = torch.ones(len(at.device), n, M, dtype=torch.bool, device=at.device.device)
        return visibility(self.lengths, self.open_slots, some if ancestors is None else ancestors[..., -M:])


class PassThroughMemory:
    """See `FeatureMemory.passing`."""

    more = ()  # drafters that grow are captured with one layer only

    def __init__(self, positions: Tensor, context: Tensor | None = None) -> None:
        self.positions, self.context = positions, context
        self.lengths = Lengths.of([0] * len(positions), positions.device)

    def attend(self, at: Lengths, seen: Tensor | None) -> Attend:
        return lambda q, k, v: cut(at.longest, q.shape[-1] ** -0.5, q, k, v, seen)

    def over(self, layer: int, ahead: KeysValues, at: Lengths, run: Callable[..., Tensor]) -> Attend:
        """What is ahead stands before the rows' own keys and values, which whoever replays it takes apart."""

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            both = [torch.cat([first, mine], 2) for first, mine in zip(ahead, (k, v), strict=True)]
            return cut(layer, q.shape[-1] ** -0.5, q, both[0], both[1])

        return attend


class Decided(NamedTuple):
    """What a round decided, for a drafter to read; entries past a row's number are meaningless."""

    hidden: Tensor  # [B, W, F], features of the accepted nodes
    follow: Tensor  # [B, W], the token that follows each; the pending one follows the last
    number: Tensor  # [B], how many
    counts: tuple[int, ...]  # the same on the host


def path_after(session: SessionView) -> Decided:
    """What the last round decided.

    Raises:
        ValueError: without features of the target.
    """
    last = session.last
    if last.scores.hidden is None:
        raise ValueError("the target handed over no features; the drafter must name them in `features`")
    kept, count = last.kept, last.acceptance.count
    tokens = gather_rows(last.draft.tokens, kept).clamp(min=0)
    follow = torch.cat([tokens[:, 1:], last.acceptance.next_token[:, None]], 1)
    follow = follow.scatter(1, (count - 1)[:, None], last.acceptance.next_token[:, None])
    return Decided(gather_rows(last.scores.hidden, kept), follow, count, last.counts)
