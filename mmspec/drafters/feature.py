"""Drafting on features: read the prompt, catch up with what stands, grow a chain or a tree from the last feature."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from mmspec.drafters import prune, shapes
from mmspec.drafters.blocks import Memory, beside, fold, path_after, unfold
from mmspec.drafters.layer import FeatureLayer
from mmspec.drafters.options import TreeOptions
from mmspec.drafters.vocab import DraftVocab
from mmspec.kernels import reference as ops
from mmspec.rows import gather_rows
from mmspec.slots import Lengths, Slots
from mmspec.tree import Expand, chain, grow
from mmspec.types import ATTENTION, Categorical, Draft, Prompt, Target, TargetInfo, Tree


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
    capturable = True  # whether what it does is a function of tensors and `Memory.attend` alone

    @property
    def features(self) -> tuple[int, ...]:
        return (*self.config.features, ATTENTION) if prune.by_attention(self.options) else self.config.features

    @property
    def nodes(self) -> int:
        """Nodes of a draft at most, the root included."""
        return self.options.size

    def placed(self, target: TargetInfo) -> Self:
        """A drafter for itself, on the target's device and in its dtype, which leaves this one as it is.

        Where nothing moves, both have the same layers; else those of the new one are copies.
        """
        own = [*self.parameters(), *self.buffers()]
        stays = all(t.device == target.device and (t.dtype == target.dtype or not t.is_floating_point()) for t in own)
        if stays:
            placed = copy.copy(self)
            placed.training = False
            return placed
        memo: dict[int, Any] = {id(self.vocab): None}
        for t in own:  # aliases, whose data can go elsewhere
            alias = t.detach()
            memo[id(t)] = nn.Parameter(alias, t.requires_grad) if isinstance(t, nn.Parameter) else alias
        return copy.deepcopy(self, memo).to(device=target.device, dtype=target.dtype).eval()

    # -- drafting ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def start(self, session: Any, target: Target, prompt: Prompt) -> Memory:
        """Read the prompt: row j pairs the features at j with the embedding at j + 1; the last waits for its token.

        Raises:
            ValueError: the call is guided, and this drafter knows no guidance; or it prunes by an attention that this
                target does not tell.
        """
        assert prompt.embeds is not None and prompt.hidden is not None
        (B, L), S = prompt.ids.shape, _streams(target)
        if S > 1 and (self.own_head or self.sees):
            what = "with an output head of its own" if self.own_head else f"of the method {self.method!r}"
            raise ValueError(f"a drafter {what} knows no guidance; use an EAGLE drafter without a head, or 'jacobi'")
        device, zero = prompt.ids.device, Lengths.of([0] * B, prompt.ids.device)
        first = torch.full((B,), 1 - L if self.block.grid else 0, device=device)
        embeds, features = fold(prompt.embeds[:, 1:], S), fold(prompt.hidden[:, :-1].to(prompt.embeds.dtype), S)
        visual, valid = (t.repeat_interleave(S, 0) for t in (prompt.visual[:, 1:], prompt.valid[:, :-1]))
        positions = (first[:, None] + torch.arange(L - 1, device=device)).repeat_interleave(S, 0)
        looked = None if prompt.attention is None else prompt.attention[:, 1:].repeat_interleave(S, 0)
        e = self.enter(*prune.pruned(self.options, looked, (embeds, features, visual, valid, positions)))
        n, open_slots = e.x.shape[1], e.valid[::S]
        memory = Memory(Slots(n + 257), zero, first + (L - 1), open_slots, not bool(open_slots.all()), e.onward)
        k, v = (t.unflatten(0, (B, S)).flatten(1, 2) for t in self.block.keys_values(e.x, e.positions))
        memory.slots.append(k, v, zero)
        memory.lengths = Lengths.of([n] * B, device)
        size = 2 * self.block.kv_heads * self.block.head_dim * embeds.element_size() * S
        memory.told = {**told(visual[::S], valid[::S], open_slots, size), **e.told}
        return memory

    def _read(
        self, memory: Memory, embeds: Tensor, features: Tensor, at: Lengths, ahead: Tensor | int, seen: Tensor | None,
        level: int = 0,
    ) -> Tensor:  # fmt: skip
        """Run n rows [B, n] through the layer; returns features.

        Args:
            embeds: [B, n, S·H], of the tokens that follow.
            features: [B, n, F], the target's, or at a level above 0 what `_read` gave for the rows' parents.
            at: where the rows are appended.
            ahead: their positions, counted from the memory's next one.
            seen: as `Memory.attend` takes it.
            level: 0 for what the target has read, else how deep below the root these nodes stand.
        """
        S = embeds.shape[-1] // self.config.hidden
        steps = torch.arange(embeds.shape[1], device=embeds.device) if isinstance(ahead, int) else ahead
        positions = memory.positions[:, None] + steps
        positions = positions if S == 1 else positions.repeat_interleave(S, 0)
        x, residual = self.inputs(fold(embeds, S), fold(features.to(embeds.dtype), S), memory.context)
        z = self.block(x, residual, positions, beside(memory.attend(at, seen), S))
        return unfold(self.carry(z), S)

    def settle(self, memory: Memory, f: Tensor) -> None:
        """Told the features [B, 1, F] of the last row that the target has read, after each catching up."""

    def at_level(self, f: Tensor, level: int | Tensor) -> Tensor:
        """Of what `_read` gave for nodes of a level, the feature that stands before the head."""
        return f

    @torch.no_grad()
    def propose(self, session: Any, target: Target) -> Draft:
        return self.draft(session, target, *path_after(session), self.drawing(session))

    def drawing(self, session: Any) -> bool:
        """Whether the next draft is drawn: a point mass is not met by drawing."""
        return self.options.draws and not session.last.scores.law.is_point

    def draft(self, session: Any, target: Target, hidden: Tensor, follow: Tensor, count: Tensor, draws: bool) -> Draft:
        """Catch up with what the last round decided, then grow what the options ask for.

        No value of a tensor is looked at, so that it can be captured.

        Args:
            session: of it `memory`, `pending`, `emitted`, `seeds` and `last.counts` are read.
            hidden, follow, count: as `path_after` gives them.
            draws: see `drawing`.
        """
        memory: Memory = session.memory
        W = follow.shape[1]
        seen = None if W == 1 else chain(W, follow.device).ancestors.expand(len(follow), W, W)
        out = self._read(memory, _embed(target, follow), hidden, memory.lengths, 0, seen)
        memory.lengths = memory.lengths.plus(session.last.counts, count)
        memory.positions = memory.positions + count
        f = gather_rows(out, count[:, None] - 1)  # [B, 1, S·H]
        self.settle(memory, f)
        o, law = self.options, None
        if o.tree == shapes.DYNAMIC:
            below, tree = self._tree(session, target, f)
        elif o.tree == "chain" and not draws:
            below, tree = self._chain(session, target, f)
        else:
            below, tree, law = self._static(session, target, f, draws)
        return Draft(torch.cat([session.pending[:, None], below], 1), tree, law)

    def _weighed(self, session: Any, target: Target, f: Tensor, level: int | Tensor) -> Tensor:
        """Logits [B, n, V] of the tokens at `level` below the root's children, weighed as the target weighs its own."""
        logits, weigh = self.logits(self.at_level(f, level), target), getattr(target, "weigh", None)
        if weigh is None or self.own_head:
            return logits
        return weigh(logits, session, session.emitted[:, None] + level)

    def _chain(self, session: Any, target: Target, f: Tensor) -> tuple[Tensor, Tree]:
        memory, depth, tokens = session.memory, self.options.depth, []
        ahead = torch.arange(depth, device=f.device).split(1)
        for level in range(depth):
            tokens.append(self.to_target(self._weighed(session, target, f, level).argmax(-1)))  # [B, 1]
            if level + 1 < depth:
                at = memory.lengths.further(level)
                f = self._read(memory, _embed(target, tokens[-1]), f, at, ahead[level], None, level + 1)
        return torch.cat(tokens, 1), chain(depth + 1, f.device).expand(len(f))

    def _tree(self, session: Any, target: Target, f: Tensor) -> tuple[Tensor, Tree]:
        o = self.options
        size = min(o.size, 1 + o.width + (o.depth - 1) * o.width**2)
        first, expand = self._growth(session, target, f)
        below, tree = grow(first, expand, o.width, o.depth, size)
        return self.to_target(below), tree

    def _static(self, session: Any, target: Target, f: Tensor, draws: bool) -> tuple[Tensor, Tree, Categorical | None]:
        """A static tree, and the law of what was drawn."""

        def noise(level: int) -> Tensor:
            return ops.gumbel(seeds, session.emitted[:, None] + level, first.shape[-1])

        plan = shapes.plan(self.options.tree, self.options.depth, f.device)
        seeds = ops.stream(session.seeds, ops.FRESH)
        first, expand = self._growth(session, target, f)
        below, law = shapes.fill(first, expand, plan, noise if draws else None)
        return self.to_target(below), plan.tree.expand(len(f)), None if law is None else Categorical(law)

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
            state.hidden = self._read(memory, embeds, before, at, here, state.seen, state.level + 1)
            state.appended, state.level = n + k, state.level + 1
            return self._weighed(session, target, state.hidden, state.level).float().log_softmax(-1)

        return self._weighed(session, target, f, 0)[:, 0].float().log_softmax(-1), expand


def told(visual: Tensor, valid: Tensor, kept: Tensor, size: int) -> dict[str, float]:
    """What reading the prompts came to; `size` are the bytes that a row takes in the memory."""
    before = torch.stack([((visual > 0) & valid).sum(), valid.sum(), kept.sum()])
    seen, rows, after = before.tolist()
    return {
        "prompts": len(valid),
        "rows": after,
        "visual rows before": seen,
        "visual rows": seen - (rows - after),
        "memory bytes": after * size,
    }


def _streams(target: Target) -> int:
    return getattr(target, "streams", 1)


def _embed(target: Target, ids: Tensor) -> Tensor:
    """Embeddings [B, n, S·H] of ids [B, n]: every stream reads the same tokens."""
    embeds, S = target.embed(ids), _streams(target)
    return embeds if S == 1 else embeds.repeat(1, 1, S)
