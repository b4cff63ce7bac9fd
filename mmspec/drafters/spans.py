"""Spans of images in a batch of prompts, and their replacement by other rows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

Span = tuple[int, int, int]  # a row of the batch, begin and end within it


def runs(visual: Tensor, merge: bool = False) -> list[Span]:
    """The spans of a batch's images and frames, row by row from left to right.

    Args:
        visual: int64 [B, L]: k ≥ 1 at the tokens of the k-th image or frame of a row, 0 at all others.
        merge: treat adjacent ones as one.
    """
    visual = visual.cpu()
    kind = (visual > 0).to(visual.dtype) if merge else visual
    spans = []
    for b, line in enumerate(F.pad(kind, (1, 1)).diff(dim=1).ne(0)):
        at = line.nonzero()[:, 0].tolist()
        spans += [(b, i, j) for i, j in pairwise(at) if kind[b, i]]
    return spans


def spans_of(x: Tensor, spans: Sequence[Span]) -> tuple[Tensor, Tensor]:
    """Spans of rows of x [B, L, H] as a batch, padded at their ends, [R, longest, H], and the mask of real rows."""
    parts = [x[b, i:j] for b, i, j in spans]
    lengths = torch.tensor([len(part) for part in parts], device=x.device)
    padded = pad_sequence(parts, batch_first=True)
    return padded, torch.arange(padded.shape[1], device=x.device) < lengths[:, None]


def splice(valid: Tensor, spans: Sequence[Span], counts: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """The layout of a batch after spans of its rows were replaced by new rows.

    Args:
        valid: bool [B, L], false on padding.
        spans: the result of `runs`.
        counts: the number of rows that replace each span.

    Returns:
        Indices [B, n] into the B·L rows of the batch followed by the new ones, span by span; whether each is real, bool
        [B, n]; and its original index in its sequence, int64 [B, n], −1 at new rows and padding. Padding is on the
        left.
    """
    (B, L), new = valid.shape, sum(counts)
    real = torch.cat([valid.flatten().cpu(), torch.ones(new, dtype=torch.bool, device="cpu")])
    every = torch.arange(B * L + new, device="cpu")
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
    """Rows [B, n, …] taken from x [B, L, …] and new rows [M, …] by the indices [B, n] of `splice`."""
    return torch.cat([x.flatten(0, 1), new.to(x.dtype)])[index]


def shares(length: Tensor, count: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Split spans of `length` [R] rows into `count` [R] shares whose sizes differ by at most one; 1 ≤ count ≤ length.

    Returns:
        First and last row of each share, [R, C], within its span; and bool [R, C], which shares exist.
    """
    share = torch.arange(int(count.max()), device=count.device).expand(len(count), -1)
    real = share < count[:, None]
    share = share.minimum(count[:, None] - 1)
    first, after = ((share + i) * length[:, None] // count[:, None] for i in (0, 1))
    return first, after - 1, real
