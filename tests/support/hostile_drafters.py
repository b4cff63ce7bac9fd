"""Hostile drafters: whatever these propose, the output has to be the target's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from tiny_vlms import HIDDEN, IMAGE, VOCAB
from torch import Tensor

from mmspec.drafters.eagle import EagleDrafter
from mmspec.registry import OF_TEXT, drafter_class
from mmspec.tree import chain, from_parents
from mmspec.types import NO_TOKEN, Categorical, Draft

Line = tuple[list[int], list[int]]  # tokens and parents of the nodes below the root (parents count the root as 0)


@dataclass
class Oracle:
    """Knows what stock decoding gave for each prompt, and nothing else."""

    answers: dict[tuple[int, ...], list[int]]  # prompt → prompt and answer

    @classmethod
    def of(cls, prompts: Tensor, sequences: Tensor) -> Oracle:
        return cls({tuple(p): s for p, s in zip(prompts.tolist(), sequences.tolist(), strict=True)})

    def after(self, row: Any, count: int) -> list[int]:
        """The next `count` tokens of a row; token 3 where the answer has ended."""
        full = self.answers.get(tuple(row.tokens[: row.start]), [])
        return (full[len(row.tokens) :] + [3] * count)[:count]


class Scripted:
    """A drafter without weights, given by a function from a row to a line; `chained` lines are known to be chains."""

    features: tuple[int, ...] = ()
    nodes = 16

    def __init__(self, line: Callable[[Any, torch.Generator], Line], chained: bool = False) -> None:
        self.line, self.chained = line, chained
        self.noise = torch.Generator().manual_seed(11)

    def fit(self, *_: Any) -> Scripted:
        return self

    def start(self, *_: Any) -> None:
        return None

    def propose(self, session: Any, target: Any) -> Draft:
        lines = [self.line(row, self.noise) for row in session.rows]
        size = max(len(tokens) for tokens, _ in lines)
        tokens = [[*t, *[NO_TOKEN] * (size - len(t))] for t, _ in lines]
        parents = [[0, *p, *[0] * (size - len(p))] for _, p in lines]
        below = torch.tensor(tokens, dtype=torch.long).view(len(lines), size)
        tree = (
            chain(size + 1, below.device).expand(len(lines))
            if self.chained
            else from_parents(torch.tensor(parents), size)
        )
        return self.draft(torch.cat([session.pending[:, None], below], 1), tree)

    def draft(self, tokens: Tensor, tree: Any) -> Draft:
        return Draft(tokens, tree)


class Drawn(Scripted):
    """Draws its tokens from distributions q of its own, some of them flat and some sharp, and says so."""

    def draft(self, tokens: Tensor, tree: Any) -> Draft:
        scale = torch.tensor([0.1, 1.0, 8.0])[torch.randint(3, (tokens.shape[1],), generator=self.noise)]
        logits = torch.randn(*tokens.shape, VOCAB, generator=self.noise) * scale[:, None]
        u = torch.rand(tokens.shape, generator=self.noise)
        drawn = torch.searchsorted(logits.softmax(-1).cumsum(-1), u[..., None])[..., 0].clamp(max=VOCAB - 1)
        drawn[:, 0] = tokens[:, 0]
        return Draft(drawn, tree, Categorical(logits))


def _random(row: Any, g: torch.Generator) -> Line:
    """A tree of random shape, size and tokens, among them tokens that stood in the text before."""
    n = int(torch.randint(0, 9, (), generator=g))
    parents = [int(torch.randint(0, i + 1, (), generator=g)) for i in range(n)]
    said = torch.tensor(row.tokens[-8:]) % VOCAB  # a prompt may hold ids that no code of a picture has
    pool = torch.cat([torch.randint(0, VOCAB, (40,), generator=g), said])
    return pool[torch.randint(len(pool), (n,), generator=g)].tolist(), parents


def _specials(row: Any, g: torch.Generator) -> Line:
    """Padding, end-of-sequence and picture placeholders, where no target would put them."""
    return [0, 2, IMAGE, IMAGE + 1, IMAGE, 2, 0, VOCAB - 1], [0, 0, 0, 3, 4, 5, 6, 3]


def _wrong(oracle: Oracle) -> Callable[..., Line]:
    """Never the right token, not even below a wrong one."""

    def line(row: Any, g: torch.Generator) -> Line:
        truth = oracle.after(row, 3)
        return [(t + 1 + k) % VOCAB for t in truth for k in range(2)], [0, 0, 1, 1, 3, 3]

    return line


def _right(oracle: Oracle, depth: int) -> Callable[..., Line]:
    return lambda row, g: (oracle.after(row, depth), list(range(depth)))


def _right_within(oracle: Oracle) -> Callable[..., Line]:
    """A tree with the right path somewhere inside it, at another place every time; sometimes it breaks off."""

    def line(row: Any, g: torch.Generator) -> Line:
        tokens, parents, at = [], [], 0
        for truth in oracle.after(row, 4):
            for right in torch.randperm(3, generator=g).tolist():
                off = 1 + int(torch.randint(0, 50, (), generator=g))
                tokens.append(truth if right == 0 else (truth + off) % VOCAB)
                parents.append(at)
            children = [i + 1 for i in range(len(tokens) - 3, len(tokens)) if tokens[i] == truth]
            if torch.rand((), generator=g) < 0.2:
                break
            at = children[0]
        return tokens, parents

    return line


def _holes(oracle: Oracle) -> Callable[..., Line]:
    """Holes, children of holes, the same token twice under one parent, and a right path between them."""

    def line(row: Any, g: torch.Generator) -> Line:
        a, b, c = oracle.after(row, 3)
        parents = [0, 0, 0, 1, 2, 2, 3, 5] if torch.rand((), generator=g) < 0.5 else [0, 0, 0, 2, 2, 2, 4, 6]
        return [NO_TOKEN, a, a, b, b, NO_TOKEN, c, NO_TOKEN], parents

    return line


def _broken_chain(oracle: Oracle) -> Callable[..., Line]:
    """A chain with a hole in it: what comes after the hole is unreachable, however right it is."""

    def line(row: Any, g: torch.Generator) -> Line:
        tokens = oracle.after(row, 5)
        tokens[int(torch.randint(0, 5, (), generator=g))] = NO_TOKEN
        return tokens, list(range(5))

    return line


def feature_drafter(method: str, target: Any, **options: Any) -> EagleDrafter:
    """A feature drafter of any method, with random weights, that fits the target."""
    head = target.get_output_embeddings().weight
    torch.manual_seed(7)
    sizes = {"hidden": HIDDEN, "intermediate": 96, "heads": 4, "kv_heads": 2, "vocab": head.shape[0]}
    made = drafter_class(method)(drafter_class(method).Config.of({**sizes, **options}))
    with torch.no_grad():
        for weight in made.parameters():
            weight.mul_(3.0)
    return made


def eagle(target: Any, nan: bool = False, **options: Any) -> EagleDrafter:
    """An EAGLE drafter with random weights that fits the target; `draft_vocab` makes it EAGLE-3-like."""
    third = {"features": (0, 1, 2), "parallel_norm": True, "fc_bias": False} if options.get("draft_vocab") else {}
    made = feature_drafter("eagle", target, **{**third, **options})
    if third:
        made.head.ids.copy_(torch.randperm(made.config.vocab)[: options["draft_vocab"]])
    with torch.no_grad():
        for weight in made.parameters() if nan else ():
            weight.fill_(float("nan"))
    return made


# name → drafter for (target, oracle)
DRAFTERS: dict[str, Callable[[Any, Oracle], Any]] = {
    **{name: lambda target, oracle, name=name: name for name in OF_TEXT},
    "random tree": lambda target, oracle: Scripted(_random),
    "specials": lambda target, oracle: Scripted(_specials),
    "always wrong": lambda target, oracle: Scripted(_wrong(oracle)),
    "always right": lambda target, oracle: Scripted(_right(oracle, 6), chained=True),
    "right within": lambda target, oracle: Scripted(_right_within(oracle)),
    "empty": lambda target, oracle: Scripted(lambda row, g: ([], [])),
    "holes": lambda target, oracle: Scripted(_holes(oracle)),
    "broken chain": lambda target, oracle: Scripted(_broken_chain(oracle), chained=True),
    "drawn": lambda target, oracle: Drawn(_right(oracle, 3)),
    "eagle NaN": lambda target, oracle: eagle(target, nan=True, depth=3, width=3, size=10),
    "eagle chain": lambda target, oracle: eagle(target, depth=4, width=1, size=5),
    "eagle tree": lambda target, oracle: eagle(target, depth=4, width=3, size=14),
    "eagle-3": lambda target, oracle: eagle(target, depth=3, width=4, size=12, draft_vocab=50),
    "vispec": lambda target, oracle: feature_drafter("vispec", target, num_q=3, depth=3, width=3, size=10),
    "msd": lambda target, oracle: feature_drafter("msd", target, depth=3, width=3, size=10),
    "flash": lambda target, oracle: feature_drafter(
        "flash", target, latents=3, least=1, ratio=2.0, tree="mc_sim_7b_63"
    ),
    "specvlm": lambda target, oracle: feature_drafter(
        "specvlm", target, conv_ratio=2, queries=1, gate_width=8, depth=3, width=3, size=10
    ),
}
