"""A draft with a line of further tokens behind one of its nodes, in each row; a chain stays one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmspec.tree import chain, from_parents
from mmspec.types import NO_TOKEN, Categorical, Draft

STEP = 4  # by which drafts become longer, so that there are few shapes

Line = tuple[int, list[int]]  # a node, and what stands behind it


def extended(draft: Draft, lines: Sequence[Line]) -> Draft:
    """The draft with a row's line behind the node that it names; behind the root it takes the place of the row's draft.

    What is put in is a point mass, also where the drafter drew the same token. In a chain it takes the place of what
    stood behind the node; the nodes of a tree keep their numbers and parents. A row whose line is empty stays as it is.
    """
    if not any(line for _, line in lines):
        return draft
    tokens, device = draft.tokens.tolist(), draft.tokens.device
    N = len(tokens[0])
    # of each row the nodes of its own that stay, and where its line stands
    stay = [node + 1 if line and (draft.tree.is_chain or node == 0) else N for node, line in lines]
    if draft.tree.is_chain:
        begins = stay
        longest = max(node + 1 + len(line) for node, line in lines)
        tree = chain(N + -(-max(0, longest - N) // STEP) * STEP, device).expand(len(lines))
    else:
        begins = [N] * len(lines)
        more = -(-max(len(line) for _, line in lines) // STEP) * STEP
        parents = zip(draft.tree.parents.tolist(), lines, strict=True)
        above = [[*own, node, *range(N, N + more - 1)] for own, (node, _) in parents]
        tree = from_parents(torch.tensor(above, device=device), N + more)
    rows = []
    for own, kept, begin, (_, line) in zip(tokens, stay, begins, lines, strict=True):
        row = [*own[:kept], *[NO_TOKEN] * (begin - kept), *line]
        rows.append([*row, *[NO_TOKEN] * (tree.size - len(row))])
    made = torch.tensor(rows, device=device)
    q = None if draft.q is None else Categorical(_points(draft.q, made, torch.tensor(stay, device=device)))
    return replace(draft, tokens=made, tree=tree, q=q)


def _points(q: Categorical, tokens: Tensor, stay: Tensor) -> Tensor:
    """Logits [B, N, V]: of q at the first `stay` nodes [B] of a row, point masses on the tokens behind them."""
    assert q.logits is not None
    N = tokens.shape[1]
    logits = pad(q.logits, (0, 0, 0, N - q.logits.shape[1]))
    points = Categorical(ids=tokens).spread(logits)
    assert points.logits is not None
    own = torch.arange(N, device=tokens.device) < stay[:, None]
    return torch.where(own[..., None], logits, points.logits)
