"""The Target for LlamaGen's transformer: positions on a grid, and a condition prefix instead of a text prompt."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmspec.drafters.draft_vocab import DraftVocab
from mmspec.models.llamagen import PREFIX, LlamaGenTransformer, visible
from mmspec.pipelines.host import tree_attention
from mmspec.pipelines.host.cache import RaggedCache
from mmspec.pipelines.host.devices import mode_of
from mmspec.pipelines.host.forward import reading
from mmspec.pipelines.host.kinds import Mask
from mmspec.pipelines.host.masks import additive
from mmspec.pipelines.host.processors.guidance import Guidance
from mmspec.pipelines.target.captures import Forward
from mmspec.pipelines.target.model import ModelTarget
from mmspec.pipelines.target.state import Onward, State, each_stream
from mmspec.protocols import SessionView
from mmspec.ragged_cache import visibility
from mmspec.session import Session
from mmspec.tree import lone
from mmspec.types import Prompt, Scores, unfold


@dataclass(frozen=True)
class Condition:
    """The condition of images: class ids [B] or text features [B, P, width], and which of the P places are valid.

    The unconditional stream has the same mask.
    """

    what: Tensor
    valid: Tensor  # bool [B, P], false at the prompt's padding


class LlamaGenTarget(ModelTarget):
    """A view of a LlamaGenTransformer.

    Args:
        features: the features that the drafter reads.
        guidance: None: one stream.
        captured: captures and compiles the forward over drafts; None: it is not captured.
        rows: the batch size that the call started with, from which `captures` recognizes a shrunken batch; 0: unknown.
    """

    weighs = True
    last: int

    def __init__(
        self, transformer: LlamaGenTransformer, features: tuple[int, ...], guidance: Guidance | None = None,
        captured: Forward | None = None, rows: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(features, guidance)
        self.model, self.captured, self.rows = transformer, captured, rows
        self.device = transformer.device
        self.inference = mode_of(transformer)
        self.grid = (transformer.config.grid, transformer.config.grid)
        self.last = transformer.config.grid**2 - 1
        self.tree = captured is not None and tree_attention.used(self.device)  # uncaptured, its layers use sdpa

    def embed(self, ids: Tensor) -> Tensor:
        """[B, n, H]; both streams read the same tokens."""
        return self.model.tok_embeddings(ids)

    def logits(self, hidden: Tensor, vocab: DraftVocab | None = None) -> Tensor:
        return self.model.head(hidden)

    def weigh(self, logits: Tensor, session: SessionView, position: Tensor) -> Tensor:
        return session.rows[0].request.weighed(logits, session, position)

    def prefix(self, what: Tensor) -> Tensor:
        """Embeddings [B·S, P, H] of the condition; the streams of a row are adjacent rows."""
        embeds = self.model.prefix(what, guided=self.streams == 2)  # all rows of one stream, then all of the other
        return embeds if self.streams == 1 else embeds.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1)

    def prefill(self, session: Session, inputs: Condition, nodes: int) -> tuple[Prompt, Scores]:
        (B, P), S = inputs.valid.shape, self.streams
        valid = each_stream(inputs.valid, S)
        embeds = self.prefix(inputs.what)
        cache = RaggedCache(S * B, valid.device, P + self.last + 1 + nodes)
        first = Onward(torch.zeros_like(cache.lengths.device)[:, None])
        session.cache = State(cache, first, valid, {}, {}, S)
        before = torch.full((S * B, P), PREFIX, device=valid.device)
        hidden, *features = self._forward(embeds, before, visible(valid, P), cache)
        cache.advance(P)
        ids = torch.zeros(B, P, dtype=torch.long, device=valid.device)
        seen = unfold(features[0], S) if features else None
        prompt = Prompt(ids, unfold(embeds, S), seen, torch.zeros_like(ids), inputs.valid, self.grid)
        end = None if seen is None else seen[:, -1:]
        return prompt, self.scores(self.model.head(hidden[:, -1:]), session, lone(ids[:, -1:]), end)

    def mask(self, state: State, ancestors: Tensor, depth: Tensor, chain: bool = False) -> Tensor:
        seen = visibility(state.cache.lengths, state.open_slots, ancestors)[:, None]
        if self.tree:
            return tree_attention.marked(seen, state.cache.lengths.device, state.open_slots, ancestors, depth)
        dtype = self.model.tok_embeddings.weight.dtype  # diffusers' `dtype` looks through all modules
        return additive(seen, dtype) if seen.device.type == "cpu" else seen

    def captures(self, session: Session) -> bool:
        """Whether this batch size is worth a capture: the original one, or a power of two once rows have ended."""
        rows = len(session.rows)
        return not (rows < self.rows and rows.bit_count() > 1)

    def read(self, state: State, tokens: Tensor, places: Tensor, mask: Mask) -> tuple[Tensor, ...]:
        assert isinstance(mask, Tensor)
        hidden, *features = self._forward(self.embed(tokens), places, mask[:, 0], state.cache)
        return self.model.head(hidden), *features

    def _forward(self, embeds: Tensor, place: Tensor, seen: Tensor, cache: RaggedCache) -> tuple[Tensor, ...]:
        """Final hidden states [B·S, n, H], and the features [B·S, n, F] if the drafter needs some."""
        with reading() as read:
            read.final = hidden = self.model(embeds, place, seen, cache)
        features = read.features(self.features)
        return (hidden, torch.cat(features, -1)) if features else (hidden,)
