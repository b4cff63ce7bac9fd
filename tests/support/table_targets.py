"""A target that a table defines, small enough to know the distribution of everything it can say, and drafters with
distributions q."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmspec.kernels import reference as ops
from mmspec.loop import decode, start
from mmspec.rules import Rule
from mmspec.session import Row, Session
from mmspec.tree import chain, from_paths, lone
from mmspec.types import NO_TOKEN, Categorical, Draft, Prompt, Round, Scores

CPU = torch.device("cpu")


@dataclass
class Place:
    """Where each row stands: the number of the text in its cache, and of the text after each node of the last draft."""

    text: Tensor  # [B]
    nodes: Tensor  # [B, N]

    def select(self, rows: Tensor) -> Place:
        return Place(self.text[rows], self.nodes[rows])

    def join(self, other: Place) -> Place:
        return Place(torch.cat([self.text, other.text]), torch.cat([self.nodes[:, :1], other.nodes[:, :1]]))


class TableModel:
    """A Target: the distribution of a token depends on all tokens before it, by a table with one line per text.

    Texts are numbered as in a heap: 0 is the empty one, and h·V + 1 + x follows h by x. After `length` tokens the
    distribution is uniform.
    """

    device = CPU
    features: tuple[int, ...] = ()
    inference = torch.inference_mode
    streams = 1
    guidance = None
    weighs = False
    grid: tuple[int, int] | None = None

    def __init__(self, vocab: int = 4, length: int = 4, seed: int = 0, scale: float = 1.0) -> None:
        self.vocab, self.length = vocab, length
        texts = sum(vocab**t for t in range(length))
        g = torch.Generator().manual_seed(seed)
        logits = scale * torch.randn(texts, vocab, generator=g, dtype=torch.float64)
        self.logits = torch.cat([logits, torch.zeros(1, vocab, dtype=torch.float64)])

    def after(self, text: Tensor, token: Tensor) -> Tensor:
        return (text * self.vocab + 1 + token.clamp(min=0)).clamp(max=len(self.logits) - 1)

    def joint(self) -> Tensor:
        """The distribution of whole outputs, [V^length], the first token most significant."""
        distribution, first = torch.ones(1, dtype=torch.float64), 0
        for t in range(self.length):
            texts = self.vocab**t
            distribution = (distribution[:, None] * self.logits[first : first + texts].softmax(-1)).flatten()
            first += texts
        return distribution

    def distribution(self, texts: Tensor, session: Session, draft: Draft) -> Categorical:
        """p at numbered texts [B, N]; a subclass may realise it otherwise."""
        return Categorical(self.logits[texts])

    def prefill(self, session: Session, inputs: None, nodes: int) -> tuple[Prompt, Scores]:
        """Nothing is read: every text begins with the same token, which is not part of it."""
        ids = torch.zeros(len(session.rows), 1, dtype=torch.long)
        session.cache = Place(ids[:, 0], ids)
        prompt = Prompt(ids, None, None, torch.zeros_like(ids), torch.ones_like(ids, dtype=torch.bool), self.grid)
        return prompt, Scores(self.distribution(ids, session, lone(ids)))

    def score(self, session: Any, draft: Draft) -> Scores:
        nodes = [self.after(session.cache.text, draft.tokens[:, 0])]
        for n in range(1, draft.tree.size):
            above = torch.stack(nodes, 1).gather(1, draft.tree.parents[:, n, None])[:, 0]
            nodes.append(self.after(above, draft.tokens[:, n]))
        session.cache.nodes = torch.stack(nodes, 1)
        return Scores(self.distribution(session.cache.nodes, session, draft))

    def commit(self, session: Any, round_: Round) -> None:
        session.cache.text = session.cache.nodes.gather(1, round_.acceptance.last[:, None])[:, 0]

    def embed(self, ids: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(ids, self.vocab).double()

    def head(self, hidden: Tensor) -> Tensor:
        return hidden


def run(model: TableModel, drafter: Any, rule: Rule, rows: int, seed: int = 0) -> tuple[Tensor, list[Row], Session]:
    """`rows` outputs [rows, length], each with a seed of its own, through the real loop; the rows; the session."""
    # Multiples of an odd number, so that no two runs share seeds.
    lines = [Row([0], 1, 1 + model.length, (seed * rows + b) * 7919 + 5, index=b, rule=rule) for b in range(rows)]
    session, _ = start(model, drafter, list(lines), None)
    for _ in decode(session, model, drafter):
        pass
    return torch.tensor([row.tokens[1 : 1 + model.length] for row in lines]), lines, session


class Nothing:
    """A drafter's memory with nothing in it."""

    def select(self, rows: Tensor) -> Nothing:
        return self

    def join(self, other: Nothing) -> Nothing:
        return self


class Drawn:
    """Draws from distributions q that depend on the pending token and on the depth, with noise of its own, and says so.

    `paths` are ranks as in `from_paths`; siblings are drawn without replacement, each with the distribution it was
    drawn from. `honest=False` states another distribution than the one it draws from.
    """

    features: tuple[int, ...] = ()

    def __init__(self, model: TableModel, paths: list[tuple[int, ...]] | int, honest: bool = True) -> None:
        depth = paths if isinstance(paths, int) else max(map(len, paths))
        self.chain = isinstance(paths, int)
        if isinstance(paths, int):
            self.tree, self.ranks = chain(1 + paths, CPU), torch.zeros(1, 1 + paths, dtype=torch.long)
        else:
            self.tree, self.ranks = from_paths(paths, CPU)
        g = torch.Generator().manual_seed(99)
        self.q = torch.randn(model.vocab, 1 + depth, model.vocab, generator=g, dtype=torch.float64)
        self.honest = honest
        self.nodes = self.tree.size

    def start(self, session: Any, target: Any, prompt: Prompt) -> Nothing:
        return Nothing()

    def propose(self, session: Any, target: Any) -> Draft:
        B, N = len(session.rows), self.tree.size
        q = self.q[session.pending][:, self.tree.depth[0]]  # [B, N, V]
        lines = self.tree.parents[0]  # siblings share one line of noise, so that ranks are a draw without replacement
        place = session.emitted[:, None] * N + lines
        noise = ops.gumbel(ops.stream(session.seeds, ops.FRESH), place, target.vocab)
        order = (q.log_softmax(-1) + noise).argsort(-1, descending=True)
        tokens = order.gather(-1, self.ranks.expand(B, N)[..., None])[..., 0]
        tokens[:, 0] = session.pending
        before = torch.arange(target.vocab) < self.ranks[..., None]
        taken = torch.zeros_like(q, dtype=torch.bool).scatter(-1, order, before.expand_as(order))
        stated = q.masked_fill(taken, -math.inf) if self.honest else torch.zeros_like(q)
        return Draft(tokens, self.tree.expand(B), Categorical(stated))


class Holes(Drawn):
    """The same with nothing proposed at every third node."""

    def propose(self, session: Any, target: Any) -> Draft:
        draft = super().propose(session, target)
        draft.tokens[:, 3::3] = NO_TOKEN
        return draft


def chi_square(counts: Tensor, expected: Tensor, least: float = 8) -> float:
    """Standard deviations by which χ² exceeds its mean; cells expected less than `least` times count together."""
    rare = expected < least
    counts, expected = (torch.cat([t[~rare], t[rare].sum()[None]]) for t in (counts.double(), expected))
    free = max(int((expected > 1e-6).sum()) - 1, 1)
    return (float(((counts - expected) ** 2 / expected.clamp(min=1e-9)).sum()) - free) / math.sqrt(2 * free)


def counted(samples: Tensor, joint: Tensor, vocab: int) -> Tensor:
    """How often each output came: of samples [n, T], numbered as the joint distribution [V^T] is."""
    place = vocab ** torch.arange(samples.shape[1] - 1, -1, -1)
    return torch.bincount((samples * place).sum(-1), minlength=len(joint)).double()


def excess(samples: Tensor, joint: Tensor, vocab: int) -> float:
    """χ² of samples [n, T] against a joint distribution, see above."""
    return chi_square(counted(samples, joint, vocab), joint * len(samples))


def distance(samples: Tensor, joint: Tensor, vocab: int) -> float:
    """Total variation between the frequencies of samples [n, T] and a distribution, the noise of n samples included."""
    return float((counted(samples, joint, vocab) / len(samples) - joint).abs().sum() / 2)
