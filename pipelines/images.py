"""An autoregressive image model as a Target: one or two streams under guidance, positions by grid, explicit masks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mmspec.models.llamagen import PREFIX, visible
from mmspec.modes import mode_of
from mmspec.pipelines import attention
from mmspec.pipelines.cache import SlotCache
from mmspec.pipelines.compiled import Compiled
from mmspec.pipelines.sampling import Sampler
from mmspec.pipelines.state import Onward, State, spread, stacked, tiled
from mmspec.pipelines.swap import layer_input, listen
from mmspec.rules import Rule
from mmspec.session import Session, Stats
from mmspec.slots import visibility
from mmspec.tree import lone
from mmspec.types import FINAL, Draft, Prompt, Round, Scores


@dataclass(frozen=True)
class Guidance:
    """Classifier-free guidance: u + scale·(c − u), for the first `tokens` tokens of a picture (None: for all).

    A scale up to 1 needs no unconditional stream.
    """

    scale: float
    tokens: int | None = None

    @property
    def streams(self) -> int:
        return 2 if self.scale > 1 else 1

    def __call__(self, logits: Tensor, position: Tensor | None = None) -> Tensor:
        """Guided float32 logits [B, n, V] of both streams' [S·B, n, V].

        Args:
            logits: of the conditional stream, then of the unconditional one.
            position: [B, n], index in the picture of the token that the logits are for; None: guide everywhere.
        """
        logits = logits.to(torch.float32)
        if self.streams == 1:
            return logits
        c, u = logits.chunk(2)
        guided = u + self.scale * (c - u)
        if self.tokens is None or position is None:
            return guided
        return torch.where((position < self.tokens)[..., None], guided, c)


class ImageTarget:
    """One call's view of a LlamaGenTransformer.

    Args:
        held: captures and compiles the forward over drafts; None: it runs as it is.

    Attributes:
        grid: rows and columns of tokens in a picture, in reading order.
        streams: 2 under guidance (conditional, unconditional), else 1. Drafters see them side by side as features.
    """

    eager = tree = mixed = False  # stock attention, the same mask in every layer
    window = None

    def __init__(
        self,
        transformer: Any,
        features: tuple[int, ...],
        sampler: Sampler,
        guidance: Guidance,
        held: Compiled | None = None,
    ) -> None:
        self.model = transformer
        self.inference = mode_of(transformer)
        self.held = held
        self.rows = 0  # of the call
        self.features = features
        self.sampler = sampler
        self.guidance = guidance
        self.streams = guidance.streams
        self.grid = (transformer.config.grid, transformer.config.grid)
        self.size = transformer.config.grid**2

    def embed(self, ids: Tensor) -> Tensor:
        """[B, n, H]; both streams read the same tokens."""
        return self.model.tok_embeddings(ids)

    def head(self, hidden: Tensor) -> Tensor:
        """Guided logits [B, n, V] of final features [B, n, S·H]."""
        return self.guidance(self.model.head(spread(hidden, self.streams)))

    def weigh(self, logits: Tensor, session: Session, position: Tensor) -> Tensor:
        """A drafter's logits [B, n, V] of the tokens at `position` [B, n], weighed as this target weighs its own."""
        return self.sampler.weighed(logits, session, position)

    def prefill(self, session: Session, condition: Tensor, valid: Tensor, nodes: int) -> tuple[Prompt, Scores]:
        """Read the prefix, into `session.cache`.

        Args:
            condition: class ids [B], or text features [B, P, width].
            valid: bool [B, P], false at the prompt's padding; the unconditional stream has the same mask.
            nodes: the most that a draft will hold, for which slots are reserved.
        """
        (B, P), device, S = valid.shape, valid.device, self.streams
        self.rows = B
        embeds = self.model.prefix(condition, guided=S == 2)
        cache = SlotCache(S * B, device, P + self.size + nodes)
        session.cache = State(cache, Onward(torch.zeros_like(cache.lengths.device)[:, None]), tiled(valid, S), {}, S)
        before = torch.full((S * B, P), PREFIX, device=device)
        hidden, *features = self._forward(embeds, before, tiled(visible(valid, P), S), cache)
        cache.advance(P)
        ids = torch.zeros(B, P, dtype=torch.long, device=device)
        seen = stacked(features[0], S) if features else None
        prompt = Prompt(ids, stacked(embeds, S), seen, torch.zeros_like(ids), valid)
        last = [t[:, -1:] for t in (hidden, *features)]
        return prompt, self._scores(self.model.head(last[0]), last[1:], session, lone(ids[:, -1:]))

    def score(self, session: Session, draft: Draft) -> Scores:
        state: State = session.cache
        index = (session.emitted - 1)[:, None] + draft.tree.depth  # of the nodes' tokens
        place = state.places.at(tiled(index, self.streams)).clamp(max=self.size - 1)
        seen = visibility(state.cache.lengths, state.open_slots, tiled(draft.tree.ancestors, self.streams))[:, None]
        dtype = self.model.tok_embeddings.weight.dtype  # diffusers' `dtype` looks through all modules
        mask = attention.additive(seen, dtype) if seen.device.type == "cpu" else seen
        read = self.read if self.held is None or self._passing(len(session.rows)) else partial(self.held.read, self)
        raw, *features = read(state, tiled(draft.tokens.clamp(min=0), self.streams), place, mask)
        return self._scores(raw, features, session, draft)

    def _passing(self, rows: int) -> bool:
        """Whether so few rows are left of a batch that their shape is not worth capturing: some soon end as well."""
        return rows < self.rows and rows.bit_count() > 1

    def read(self, state: State, tokens: Tensor, places: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        """Raw logits [S·B, N, V] of one forward, and the features [S·B, N, F] where the drafter asked for some."""
        hidden, *features = self._forward(self.embed(tokens), places, mask[:, 0], state.cache)
        return self.model.head(hidden), *features

    def commit(self, session: Session, round_: Round) -> None:
        session.cache.commit(round_)

    def _forward(self, embeds: Tensor, place: Tensor, seen: Tensor, cache: SlotCache) -> tuple[Tensor, ...]:
        """Final hidden states [S·B, n, H], and the features [S·B, n, F] where the drafter asked for some."""
        with listen() as heard:
            hidden = self.model(embeds, place, seen, cache)
        found = [hidden if i == FINAL else layer_input(heard[f"layer {i}"]) for i in self.features]
        return (hidden, torch.cat(found, -1)) if found else (hidden,)

    def _scores(self, raw: Tensor, features: Sequence[Tensor], session: Session, draft: Draft) -> Scores:
        logits = self.guidance(raw, session.emitted[:, None] + draft.tree.depth)
        law = self.sampler.law(logits, session, draft)
        return Scores(law, stacked(features[0], self.streams) if features else None)


@dataclass(frozen=True)
class Plan:
    """How a call decodes; the stock pipeline's is plain decoding with the noise fixed by the rows' seeds."""

    drafter: Any
    rule: Rule
    reproducible: bool
    compile: bool = False
    book: Callable[[Stats], None] = lambda stats: None
