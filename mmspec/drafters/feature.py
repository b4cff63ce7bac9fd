"""Drafting on features: read the prompt and accepted tokens, then grow a chain or a tree from the last feature."""

from __future__ import annotations

import torch
from torch import Tensor

from mmspec.drafters import prune
from mmspec.drafters.blocks import beside
from mmspec.drafters.growth import Head, Stepwise, draws, grown
from mmspec.drafters.layer import FeatureLayer
from mmspec.drafters.memory import FeatureMemory, MemoryAttention, by_level
from mmspec.drafters.shape import TreeOptions
from mmspec.functional import LayerAttention
from mmspec.protocols import SessionView, Target
from mmspec.ragged_cache import Lengths, RaggedBuffer
from mmspec.tree import chain
from mmspec.types import Decided, Draft, Prompt, decided, fold, gather_rows, unfold


class FeatureDrafter(FeatureLayer, Stepwise):
    """A drafter with one FeatureLayer; its memory is the layer's keys and values of the rows read so far."""

    method: str
    options = TreeOptions()  # overridden on instances
    head: Head
    masked = positioned = False  # see mmspec.train.trace.Learns
    sees = False  # whether it treats visual rows differently from text

    @property
    def features(self) -> tuple[int, ...]:
        return self.config.features

    @property
    def capturable(self) -> bool:
        """Whether drafting depends only on tensors and on one layer's attention, `FeatureMemory.attend`."""
        return self.nodes > 1 and not self.more

    # -- drafting ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def start(self, session: SessionView[FeatureMemory], target: Target, prompt: Prompt) -> FeatureMemory:
        """Read the prompt: row j pairs the features at j with the embedding at j + 1; the last row follows later.

        Raises ValueError: the call is guided, which this drafter does not support.
        """
        assert prompt.embeds is not None and prompt.hidden is not None
        (B, L), S = prompt.ids.shape, target.streams
        if S > 1 and (self.head.own or self.sees):
            what = "with an output head of its own" if self.head.own else f"of the method {self.method!r}"
            raise ValueError(f"a drafter {what} supports no guidance; use an EAGLE drafter without a head, or 'jacobi'")
        device, zero = prompt.ids.device, Lengths.of([0] * B, prompt.ids.device)
        onward, places = self._places(prompt)
        embeds, features = fold(prompt.embeds[:, 1:], S), fold(prompt.hidden[:, :-1].to(prompt.embeds.dtype), S)
        visual, valid = (t.repeat_interleave(S, 0) for t in (prompt.visual[:, 1:], prompt.valid[:, :-1]))
        positions = places[:, :-1].expand(B, L - 1, *places.shape[2:]).repeat_interleave(S, 0)
        e = self.encode_prompt(*prune.pruned(self.options.prune, (embeds, features, visual, valid, positions)))
        n, open_slots = e.x.shape[1], e.valid[::S]
        memory = FeatureMemory(RaggedBuffer(n + 257), zero, onward, open_slots, not bool(open_slots.all()), e.onward)
        memory.more = tuple(RaggedBuffer(n + 257) for _ in self.more)
        if self.more:
            visible = chain(n, device).ancestors & e.valid[:, None] | torch.eye(n, dtype=torch.bool, device=device)
            self._through(memory, e.x, e.residual, e.positions, zero, visible, 1)
        else:
            k, v = (t.unflatten(0, (B, S)).flatten(1, 2) for t in self.block.keys_values(e.x, e.positions))
            memory.slots.append(k, v, zero)
        memory.lengths = Lengths.of([n] * B, device)
        size = 2 * self.block.kv_heads * self.block.head_dim * embeds.element_size() * S
        memory.stats = {**prompt_stats(visual[::S], valid[::S], open_slots, size), **e.stats}
        return memory

    def _read(
        self, memory: FeatureMemory, embeds: Tensor, features: Tensor, at: Lengths, ahead: Tensor | int,
        seen: Tensor | None, level: int = 0,
    ) -> Tensor:  # fmt: skip
        """Run n rows [B, n] through the layer; returns features.

        Args:
            embeds: [B, n, S·H], of the tokens that follow.
            features: [B, n, F], the target's, or at a level above 0 the result of `_read` for the rows' parents.
            at: lengths at which the rows are appended.
            ahead: their positions, counted from the memory's next one.
            seen: the mask, as in `FeatureMemory.attend`.
            level: 0 for rows that the target has read, otherwise the depth of these nodes below the root.
        """
        S = embeds.shape[-1] // self.config.hidden
        steps = torch.arange(embeds.shape[1], device=embeds.device) if isinstance(ahead, int) else ahead
        positions = memory.positions[:, None] + steps
        positions = positions if S == 1 else positions.repeat_interleave(S, 0)
        x, residual = self.inputs(fold(embeds, S), fold(features.to(embeds.dtype), S), memory.context)
        return unfold(self.carry(self._through(memory, x, residual, positions, at, seen, S)), S)

    def _through(
        self, memory: FeatureMemory, x: Tensor, residual: Tensor, positions: Tensor, at: Lengths, seen: Tensor | None,
        S: int,
    ) -> Tensor:  # fmt: skip
        """The output of the layers, whose keys and values are appended at `at`."""
        z = self.block(x, residual, positions, beside(memory.attend(at, seen), S))
        for layer, slots in zip(self.more.values(), memory.more, strict=True):
            z = layer(z, positions, memory.attend(at, seen, slots))
        return z

    def _places(self, prompt: Prompt) -> tuple[Tensor, Tensor]:
        """Rotary positions of the prompt's last row, [B], and of all rows; a generated picture begins after them."""
        if not self.block.rope.grid:
            return prompt.places(bool(self.block.rope.mrope))
        counted = torch.arange(1 - prompt.ids.shape[1], 1, device=prompt.ids.device)[None]
        return counted[:, -1].expand(len(prompt.ids)), counted

    def settle(self, memory: FeatureMemory, f: Tensor) -> None:
        """A hook that gets the features [B, 1, F] of the last row that the target has read, before the draft grows."""

    @torch.no_grad()
    def propose(self, session: SessionView[FeatureMemory], target: Target) -> Draft:
        return self.draft(session, target, decided(session.last), draws(self.options, session))

    def draft(self, session: SessionView[FeatureMemory], target: Target, path: Decided, drawn: int) -> Draft:
        """Read the last round's accepted nodes, then grow a draft by the options.

        It does not depend on the values of tensors, so that it can be captured.

        Args:
            session: only `memory`, `pending`, `emitted` and `seeds` are read.
            path: the accepted nodes of the last round.
            drawn: whether the draft is drawn at random.
        """
        memory = session.memory
        hidden, follow, count, counts = path
        W = follow.shape[1]
        seen = None if W == 1 else chain(W, follow.device).ancestors.expand(len(follow), W, W)
        out = self._read(memory, _embed(target, follow), hidden, memory.lengths, 0, seen)
        memory.lengths = memory.lengths.plus(counts, count)
        memory.positions = memory.positions + count
        f = gather_rows(out, count[:, None] - 1)  # [B, 1, S·H]
        self.settle(memory, f)
        return grown(self, session, target, f, drawn)

    def attending(self, before: FeatureMemory, after: FeatureMemory, rows: int) -> LayerAttention:
        """The attentions of a captured `draft`: of the accepted rows on the memory before the round, then of the levels
        on the memory after it.

        Args:
            rows: number of accepted rows; an attention is numbered by the offset at which it appends.
        """

        def attend(at: int, scale: float, q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None = None) -> Tensor:
            memory, n = (before, at) if at < rows else (after, at - rows)
            return memory.attend(memory.lengths.further(n), seen, scale=scale)(q, k, v)

        o = self.options
        return MemoryAttention(before, after, attend, by_level(rows), max(rows, o.size, o.depth * o.width) + 1)

    def step(
        self, session: SessionView[FeatureMemory], target: Target, tokens: Tensor, f: Tensor, appended: int,
        ahead: Tensor, seen: Tensor | None, level: int,
    ) -> Tensor:  # fmt: skip
        memory = session.memory
        at = memory.lengths.further(appended)
        return self._read(memory, _embed(target, tokens), f, at, ahead, seen, level)

    def logits(self, hidden: Tensor, target: Target) -> Tensor:
        return self.head.logits(hidden, target)


def prompt_stats(visual: Tensor, valid: Tensor, kept: Tensor, size: int) -> dict[str, float]:
    """Statistics of the prompts; `size` is the number of bytes of a row in the memory."""
    before = torch.stack([((visual > 0) & valid).sum(), valid.sum(), kept.sum()])
    seen, rows, after = before.tolist()
    visual_rows = {"visual rows before": seen, "visual rows": seen - (rows - after)}
    return {"prompts": len(valid), "rows": after, **visual_rows, "memory bytes": after * size}


def _embed(target: Target, ids: Tensor) -> Tensor:
    """Embeddings [B, n, S·H] of ids [B, n]; all streams read the same tokens."""
    embeds, S = target.embed(ids), target.streams
    return embeds if S == 1 else embeds.repeat(1, 1, S)
