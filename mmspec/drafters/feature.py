"""Drafting on features: read the prompt, catch up with what stands, grow a chain or a tree from the last feature."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmspec.batch import fold, gather_rows, unfold
from mmspec.drafters import prune
from mmspec.drafters import static_trees as shapes
from mmspec.drafters.blocks import Block, FeatureMemory, beside, path_after
from mmspec.drafters.draft_vocab import DraftVocab
from mmspec.drafters.layer import FeatureLayer
from mmspec.drafters.options import TreeOptions
from mmspec.kernels import reference as ops
from mmspec.ragged_cache import Lengths, RaggedBuffer
from mmspec.tree import Expand, chain, grow
from mmspec.types import ATTENTION, Categorical, Draft, Prompt, Target, Tree


@dataclass
class _Frontier:
    """Growth under way: the last level's features, and who is whose ancestor since the root."""

    hidden: Tensor  # [B, k, S·H]
    seen: Tensor  # bool [B, k, M], in its last columns what was appended
    appended: int = 0
    level: int = 0


class FeatureDrafter(FeatureLayer):
    """Drafts with one such layer, whose keys and values of the rows read so far are its memory."""

    method: str
    options = TreeOptions()  # of an instance: its own
    vocab: DraftVocab | None = None  # part of the target's that it drafts from; None: all, or one of its own
    sees = False  # whether it treats visual rows in a way of its own

    @property
    def features(self) -> tuple[int, ...]:
        return (*self.config.features, ATTENTION) if prune.by_attention(self.options) else self.config.features

    @property
    def nodes(self) -> int:
        """Nodes of a draft at most, the root included."""
        return self.options.size

    # -- drafting ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def start(self, session: Any, target: Target, prompt: Prompt) -> FeatureMemory:
        """Read the prompt: row j pairs the features at j with the embedding at j + 1; the last waits for its token.

        Raises:
            ValueError: the call is guided, and this drafter knows no guidance; or it prunes by an attention that this
                target does not tell.
        """
        assert prompt.embeds is not None and prompt.hidden is not None
        (B, L), S = prompt.ids.shape, target.streams
        if S > 1 and (self.own_head or self.sees):
            what = "with an output head of its own" if self.own_head else f"of the method {self.method!r}"
            raise ValueError(f"a drafter {what} knows no guidance; use an EAGLE drafter without a head, or 'jacobi'")
        device, zero = prompt.ids.device, Lengths.of([0] * B, prompt.ids.device)
        onward, places = self._places(prompt)
        embeds, features = fold(prompt.embeds[:, 1:], S), fold(prompt.hidden[:, :-1].to(prompt.embeds.dtype), S)
        visual, valid = (t.repeat_interleave(S, 0) for t in (prompt.visual[:, 1:], prompt.valid[:, :-1]))
        positions = places[:, :-1].expand(B, L - 1, *places.shape[2:]).repeat_interleave(S, 0)
        looked = None if prompt.attention is None else prompt.attention[:, 1:].repeat_interleave(S, 0)
        e = self.encode_prompt(*prune.pruned(self.options, looked, (embeds, features, visual, valid, positions)))
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
        memory.stats = {
            **_prompt_stats(self.block, visual[::S], valid[::S], open_slots, embeds.element_size() * S),
            **e.stats,
        }
        return memory

    def _read(
        self,
        memory: FeatureMemory,
        embeds: Tensor,
        features: Tensor,
        at: Lengths,
        ahead: Tensor | int,
        seen: Tensor | None,
    ) -> Tensor:
        """Run n rows [B, n]: appended at `at`, at positions `ahead` of the memory's next one; returns features."""
        S = embeds.shape[-1] // self.config.hidden
        steps = torch.arange(embeds.shape[1], device=embeds.device) if isinstance(ahead, int) else ahead
        positions = memory.positions[:, None] + steps
        positions = positions if S == 1 else positions.repeat_interleave(S, 0)
        x, residual = self.inputs(fold(embeds, S), fold(features.to(embeds.dtype), S), memory.context)
        return unfold(self.carry(self._through(memory, x, residual, positions, at, seen, S)), S)

    def _through(
        self,
        memory: FeatureMemory,
        x: Tensor,
        residual: Tensor,
        positions: Tensor,
        at: Lengths,
        seen: Tensor | None,
        S: int,
    ) -> Tensor:
        """The output of the layers, whose keys and values are appended at `at`."""
        z = self.block(x, residual, positions, beside(memory.attend(at, seen), S))
        for layer, slots in zip(self.more.values(), memory.more, strict=True):
            z = layer(z, positions, memory.attend(at, seen, slots))
        return z

    def _places(self, prompt: Prompt) -> tuple[Tensor, Tensor]:
        """Rotary positions of the prompt's last row, [B], and of all its rows; a picture begins behind the prompt."""
        if not self.block.rope.grid:
            return prompt.places(bool(self.block.rope.mrope))
        counted = torch.arange(1 - prompt.ids.shape[1], 1, device=prompt.ids.device)[None]
        return counted[:, -1].expand(len(prompt.ids)), counted

    @torch.no_grad()
    def propose(self, session: Any, target: Target) -> Draft:
        return self.draft(session, target, *path_after(session), self.drawing(session))

    def drawing(self, session: Any) -> bool:
        """Whether the next draft is drawn: a point mass is not met by drawing."""
        return self.options.draws and not session.last.scores.p.is_point

    def draft(self, session: Any, target: Target, hidden: Tensor, follow: Tensor, count: Tensor, draws: bool) -> Draft:
        """Catch up with what the last round decided, then grow what the options ask for.

        No value of a tensor is looked at, so that it can be captured.

        Args:
            session: of it `memory`, `pending`, `emitted`, `seeds` and `last.counts` are read.
            hidden, follow, count: as `path_after` gives them.
            draws: see `drawing`.
        """
        memory: FeatureMemory = session.memory
        W = follow.shape[1]
        seen = None if W == 1 else chain(W, follow.device).ancestors.expand(len(follow), W, W)
        out = self._read(memory, _embed(target, follow), hidden, memory.lengths, 0, seen)
        memory.lengths = memory.lengths.plus(session.last.counts, count)
        memory.positions = memory.positions + count
        f = gather_rows(out, count[:, None] - 1)  # [B, 1, S·H]
        o, distribution = self.options, None
        if o.tree == shapes.DYNAMIC:
            below, tree = self._tree(session, target, f)
        elif o.tree == "chain" and not draws:
            below, tree = self._chain(session, target, f)
        else:
            below, tree, distribution = self._static(session, target, f, draws)
        return Draft(torch.cat([session.pending[:, None], below], 1), tree, distribution)

    def _weighed(self, session: Any, target: Target, f: Tensor, level: int | Tensor) -> Tensor:
        """Logits [B, n, V] of the tokens at `level` below the root's children, weighed as the target weighs its own."""
        logits = self.logits(f, target)
        if not target.weighs or self.own_head:
            return logits
        return target.weigh(logits, session, session.emitted[:, None] + level)

    def _chain(self, session: Any, target: Target, f: Tensor) -> tuple[Tensor, Tree]:
        memory, depth, tokens = session.memory, self.options.depth, []
        ahead = torch.arange(depth, device=f.device).split(1)
        for level in range(depth):
            tokens.append(self.to_target(self._weighed(session, target, f, level).argmax(-1)))  # [B, 1]
            if level + 1 < depth:
                f = self._read(memory, _embed(target, tokens[-1]), f, memory.lengths.further(level), ahead[level], None)
        return torch.cat(tokens, 1), chain(depth + 1, f.device).expand(len(f))

    def _tree(self, session: Any, target: Target, f: Tensor) -> tuple[Tensor, Tree]:
        o = self.options
        size = min(o.size, 1 + o.width + (o.depth - 1) * o.width**2)
        first, expand = self._growth(session, target, f)
        below, tree = grow(first, expand, o.width, o.depth, size)
        return self.to_target(below), tree

    def _static(self, session: Any, target: Target, f: Tensor, draws: bool) -> tuple[Tensor, Tree, Categorical | None]:
        """A static tree, and the distribution of what was drawn."""

        def noise(level: int) -> Tensor:
            return ops.gumbel(seeds, session.emitted[:, None] + level, first.shape[-1])

        plan = shapes.plan(self.options.tree, self.options.depth, f.device)
        seeds = ops.stream(session.seeds, ops.FRESH)
        first, expand = self._growth(session, target, f)
        below, distribution = shapes.fill(first, expand, plan, noise if draws else None)
        return (
            self.to_target(below),
            plan.tree.expand(len(f)),
            None if distribution is None else Categorical(distribution),
        )

    def _growth(self, session: Any, target: Target, f: Tensor) -> tuple[Tensor, Expand]:
        """Log-probabilities [B, V] after the root, and the way to those after a frontier."""
        memory, o, depth = session.memory, self.options, self.options.depth
        room = (depth - 1) * o.width if o.tree == shapes.DYNAMIC else self.nodes
        ahead = torch.arange(depth, device=f.device).split(1)
        state = _Frontier(f, torch.zeros(len(f), 1, room, dtype=torch.bool, device=f.device))

        def expand(tokens: Tensor, came_from: Tensor) -> Tensor:
            k, n = tokens.shape[1], state.appended
            before, seen = gather_rows(state.hidden, came_from), gather_rows(state.seen, came_from)
            own = torch.eye(k, dtype=torch.bool, device=f.device).expand(len(f), k, k)
            state.seen = torch.cat([seen[:, :, k:], own], 2)
            embeds = _embed(target, self.to_target(tokens))
            at, here = memory.lengths.further(n), ahead[state.level]
            state.hidden = self._read(memory, embeds, before, at, here, state.seen)
            state.appended, state.level = n + k, state.level + 1
            return self._weighed(session, target, state.hidden, state.level).float().log_softmax(-1)

        return self._weighed(session, target, f, 0)[:, 0].float().log_softmax(-1), expand


def _prompt_stats(block: Block, visual: Tensor, valid: Tensor, kept: Tensor, size: int) -> dict[str, float]:
    """What reading the prompts came to; `size` are the bytes of a number, of all streams."""
    before = torch.stack([((visual > 0) & valid).sum(), valid.sum(), kept.sum()])
    seen, rows, after = before.tolist()
    return {
        "prompts": len(valid),
        "rows": after,
        "visual rows before": seen,
        "visual rows": seen - (rows - after),
        "memory bytes": after * 2 * block.kv_heads * block.head_dim * size,
    }


def _embed(target: Target, ids: Tensor) -> Tensor:
    """Embeddings [B, n, S·H] of ids [B, n]: every stream reads the same tokens."""
    embeds, S = target.embed(ids), target.streams
    return embeds if S == 1 else embeds.repeat(1, 1, S)
