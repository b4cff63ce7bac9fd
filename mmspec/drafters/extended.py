"""Insertion of a line of tokens into each row of a draft, after one of its nodes; a chain remains a chain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmspec.tree import chain, from_parents
from mmspec.types import NO_TOKEN, Categorical, Draft

STEP = 4  # drafts grow in multiples of this, so that there are few shapes

Line = tuple[int, list[int]]  # a node, and the tokens to insert after it


def extended(draft: Draft, lines: Sequence[Line]) -> Draft:
    """The draft with each row's line after the node that it names; after the root it replaces the row's whole draft.

    Inserted tokens are point masses, even if the drafter drew the same token. In a chain they replace what followed the
    node; the nodes of a tree keep their numbers and parents. A row with an empty line does not change.
    """
    if not any(line for _, line in lines):
        return draft
    device, N = draft.tokens.device, draft.tree.size
    # for each row the number of its nodes that stay, and the node where its line begins
    stay = [node + 1 if line and (draft.tree.is_chain or node == 0) else N for node, line in lines]
    if draft.tree.is_chain:
        begins, longest = stay, max(node + 1 + len(line) for node, line in lines)
        tree = chain(N + -(-max(0, longest - N) // STEP) * STEP, device).expand(len(lines))
    else:
        begins, more = [N] * len(lines), -(-max(len(line) for _, line in lines) // STEP) * STEP
        below = torch.tensor([[node, *range(N, N + more - 1)] for node, _ in lines], device=device)
        tree = from_parents(torch.cat([draft.tree.parents, below], 1), N + more)
    size = tree.size
    rows = [
        [*[NO_TOKEN] * begin, *line, *[NO_TOKEN] * (size - begin - len(line))]
        for begin, (_, line) in zip(begins, lines, strict=True)
    ]
    own = torch.arange(size, device=device) < torch.tensor(stay, device=device)[:, None]
    tokens = torch.where(own, pad(draft.tokens, (0, size - N)), torch.tensor(rows, device=device))
    q = None if draft.q is None else Categorical(_points(draft.q, tokens, own))
    return replace(draft, tokens=tokens, tree=tree, q=q)


def _points(q: Categorical, tokens: Tensor, own: Tensor) -> Tensor:
    """Logits [B, N, V]: those of q at the draft's `own` nodes, bool [B, N], and point masses on the other tokens."""
    assert q.logits is not None
    logits = pad(q.logits, (0, 0, 0, tokens.shape[1] - q.logits.shape[1]))
    points = Categorical(ids=tokens).spread(logits)
    assert points.logits is not None
    return torch.where(own[..., None], logits, points.logits)
