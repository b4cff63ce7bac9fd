"""Block drafters, which draft a block in one pass: DFlash, DSpark's heads, DFlash2's convolution and selector."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from mmspec.config import Options
from mmspec.drafters import static_trees
from mmspec.drafters.block_config import BlockConfig, BlockOptions
from mmspec.drafters.block_network import BlockNetwork, within
from mmspec.drafters.blocks import attention
from mmspec.drafters.growth import Noise, draws, filled, gumbel
from mmspec.drafters.memory import FeatureMemory, MemoryAttention, by_layer
from mmspec.drafters.trained import check_fit, placed
from mmspec.functional import LayerAttention
from mmspec.protocols import BareEmbedding, SessionView, Target, TargetInfo
from mmspec.ragged_cache import Lengths, RaggedBuffer, visibility
from mmspec.tree import Expand, chain
from mmspec.types import NO_TOKEN, Categorical, Decided, Draft, Prompt, decided, gather_rows


class BlockDrafter(BlockNetwork):
    """A block of the pending token and mask tokens, denoised in one pass (DFlash, 2026, z-lab; DSpark; DFlash2).

    The target's features at `config.features`, mixed by `fc` and normed, give every layer keys and values, which are
    its memory; the rows of the block attend to these and to each other. Their hidden states go into the target's head.

    Rows do not depend on each other's tokens, so a tree grows from their marginal distributions; a Markov head or a
    selector makes each depend on the token before it, and the tree then uses these conditional distributions. Under
    sampling the tokens of a chain are drawn row by row, and each one's distribution is recorded.
    """

    method = "block"
    Config = BlockConfig
    options = BlockOptions()
    masked, positioned = True, False  # its training needs the embedding of the mask token

    def __init__(self, config: BlockConfig) -> None:
        super().__init__(config)
        self.options = self.chosen({})

    # -- called by `enable` ------------------------------------------------------------------------------------------

    @property
    def features(self) -> tuple[int, ...]:
        return self.config.features

    @property
    def nodes(self) -> int:
        return self.options.size

    @property
    def capturable(self) -> bool:
        """Whether drafting depends only on tensors; with `confidence`, the number of tokens depends on their values."""
        return not self.options.confidence

    @property
    def block(self) -> nn.Module:
        """The module that identifies captures: fitted copies of a drafter share it."""
        return self.layers[0]  # type: ignore[no-any-return]

    def chosen(self, given: Options) -> BlockOptions:
        """The options: the user's values, and the config's defaults for the others.

        Raises ValueError: an option that it does not have, or values that contradict each other or its heads.
        """
        c = self.config
        if "prune" in given:
            raise ValueError("a block drafter has no use for prune: it reads no embeddings of images")
        options = BlockOptions.like(c.shape).with_(given, self.method)
        if options.depth > c.most:
            raise ValueError(
                f"a block of {c.block} drafts {c.most} tokens, so depth is at most that; got {options.depth}"
            )
        if options.named and (c.draft_vocab or c.sequential):
            raise ValueError("draft_vocab is for drafters that use only the target's head; leave it out with this one")
        if options.confidence and not (c.confidence and options.tree == "chain"):
            raise ValueError("confidence needs a drafter with a confidence head, and a chain (width=1)")
        if c.selector_rank and options.branches > c.selector_top:
            raise ValueError(f"the selector chooses from {c.selector_top} tokens per row; lower width")
        return options

    def fit(self, target: TargetInfo, given: Options) -> BlockDrafter:
        """The same weights with the user's options, on the target's device.

        Raises ValueError: the drafter was made for another target, or does not have an option; the message says why.
        """
        options = self.chosen(given)
        check_fit(self.config, target)
        if self.config.mask_token >= target.vocab:
            raise ValueError(f"its mask token {self.config.mask_token} is not in the {target.vocab} of {target.name}")
        return placed(self, target, options)

    # -- drafting ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def start(self, session: SessionView[FeatureMemory], target: Target, prompt: Prompt) -> FeatureMemory:
        """Read the prompt's features except the last token's, back as far as the layers' windows reach.

        Raises ValueError: the call is guided.
        """
        assert prompt.hidden is not None
        if getattr(target, "streams", 1) > 1:
            raise ValueError("a block drafter supports no guidance; use an EAGLE drafter without a head, or 'jacobi'")
        (B, L), device, windows = prompt.ids.shape, prompt.ids.device, self.config.each(self.config.windows)
        first = max(0, L - 1 - max(windows)) if all(windows) else 0
        valid = prompt.valid[:, first:-1]
        onward, positions = prompt.places(bool(self.config.mrope))
        x = self.hidden_norm(self.fc(prompt.hidden[:, first:-1].to(self.fc.weight.dtype)))
        by = self._turn(positions[:, first:-1].expand(B, *x.shape[1:2], *positions.shape[2:]))
        slots, zero = [RaggedBuffer(x.shape[1] + 257) for _ in self.layers], Lengths.of([0] * B, device)
        for layer, buffer in zip(self.layers, slots, strict=True):
            k, v = layer.keys_values(x, by)
            buffer.append(k, v, zero)
        read = Lengths.of([x.shape[1]] * B, device)
        memory = FeatureMemory(slots[0], read, onward, valid, not bool(valid.all()), more=tuple(slots[1:]))
        rows, width = int(valid.sum()), 2 * self.layers[0].kv_heads * self.layers[0].head_dim * len(slots)
        memory.stats = {"prompts": B, "rows": rows, "memory bytes": rows * width * x.element_size()}
        return memory

    @torch.no_grad()
    def propose(self, session: SessionView[FeatureMemory], target: Target) -> Draft:
        return self.draft(session, target, decided(session.last), draws(self.options, session))

    def draft(self, session: SessionView[FeatureMemory], target: Target, path: Decided, drawn: int) -> Draft:
        """Read the last round's accepted nodes, then draft a block; arguments as in `FeatureDrafter.draft`."""
        o, memory, at = self.options, session.memory, session.memory.lengths
        hidden, _, count, counts = path
        context = self.hidden_norm(self.fc(hidden.to(self.fc.weight.dtype)))
        ahead = torch.arange(max(context.shape[1], self.config.block), device=context.device)
        read = self._turn(memory.positions[:, None] + ahead[: context.shape[1]])
        memory.lengths, memory.positions = at.plus(counts, count), memory.positions + count
        n = o.depth + (not self.config.anchored)
        x = self._masked(target, session.pending, n)
        by = self._turn(memory.positions[:, None] + ahead[:n])
        for i, layer in enumerate(self.layers):
            x = layer(x, by, memory.over(i, layer.keys_values(context, read), at, partial(self._attend, memory, i)))
        rows = self.out_norm(x)[:, n - o.depth :]
        return self._drafted(session, rows, self.logits(rows, target), drawn)

    def attending(self, before: FeatureMemory, after: FeatureMemory, rows: int) -> LayerAttention:
        """As `FeatureDrafter.attending`; the accepted rows' keys and values come before those of the block."""

        def attend(layer: int, scale: float, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            ahead = k[:, :, :rows], v[:, :, :rows]
            run = before.over(layer, ahead, before.lengths, partial(self._attend, after, layer))
            return run(q, k[:, :, rows:], v[:, :, rows:])

        c = self.config
        inside = None if any(c.windows) else by_layer(rows, c.each(c.causal))
        return MemoryAttention(before, after, attend, inside, max(rows, self.config.block, self.options.depth) + 1)

    def _masked(self, target: Target, anchors: Tensor, n: int) -> Tensor:
        """Embeddings [B, n, H] of the anchors [B] followed by mask tokens."""
        ids = torch.full((len(anchors), n), self.config.mask_token, device=anchors.device)
        ids[:, 0] = anchors
        if not self.config.bare_embeds:
            return target.embed(ids).to(self.fc.weight.dtype)
        assert isinstance(target, BareEmbedding)
        return target.bare_embed(ids).to(self.fc.weight.dtype)

    def _attend(self, memory: FeatureMemory, i: int, slots: RaggedBuffer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of a block's rows over layer i's memory and themselves, within its window."""
        c, at = self.config, memory.lengths
        window, causal = c.each(c.windows)[i], c.each(c.causal)[i]
        keys, values = slots.append(k, v, at)
        n, mask = q.shape[2], None
        if causal or memory.padded or not at.even or (window and at.longest + n > window):
            seen = q.new_ones(n, n, dtype=torch.bool)
            mask = visibility(at, memory.open_slots, (seen.tril() if causal else seen).expand(len(q), n, n))
        if window and mask is not None:
            slot, row = torch.arange(keys.shape[2], device=q.device), torch.arange(n, device=q.device)
            mask = mask & within(window, slot - at.device[:, None, None], row[:, None], c.from_anchor)
            first = max(0, min(at.host) - window)
            keys, values, mask = keys[:, :, first:], values[:, :, first:], mask[..., first:]
        return attention(q, keys, values, mask)

    # -- from rows to a draft ----------------------------------------------------------------------------------------

    def _drafted(self, session: SessionView[FeatureMemory], hidden: Tensor, logits: Tensor, drawn: int) -> Draft:
        pending, q = session.pending[:, None], None
        noise = gumbel(session, drawn if self.head.ids is None else self.head.ids) if drawn else None
        if self.options.tree == static_trees.CHAIN:
            below, q, depth = self._chain(pending, hidden, logits, noise)
            tree = chain(depth + 1, below.device).expand(len(below))
        else:
            below, tree, q = filled(self.options, self.head, *self._growth(pending, hidden, logits), noise)
        distribution = None if q is None else Categorical(self._spread(q, drawn))
        return Draft(torch.cat([pending, below], 1), tree, distribution)

    def _chain(
        self, pending: Tensor, hidden: Tensor, logits: Tensor, noise: Noise | None
    ) -> tuple[Tensor, Tensor | None, int]:
        """Tokens [B, depth] below the root, log-distributions [B, 1 + depth, V_d] that they were drawn from (the root's
        is not used) or None, and the depth."""
        depth = logits.shape[1]
        before, state, trust = pending, None, torch.ones_like(pending, dtype=torch.float)
        tokens, trusted, distributions = [], [], []
        for level in range(depth):
            distribution, row = logits[:, level : level + 1], hidden[:, level : level + 1]
            if self.options.confidence:
                trust = trust * self.trust(row, before)
                trusted.append(trust >= self.options.confidence)
            if self.config.sequential:
                distribution, state = self.after(distribution, row, before, state)
            if noise is not None:
                distributions.append(distribution.log_softmax(-1))
                distribution = distributions[-1] + noise(level)
            before = self.head.to_target(distribution.argmax(-1))
            tokens.append(before)
        below = torch.cat(tokens, 1)
        if trusted:  # the depth is at least 1, so that there is a draft
            below = torch.where(torch.cat(trusted, 1), below, NO_TOKEN)
            depth = max(1, int((below != NO_TOKEN).sum(1).max()))
        drawn = torch.cat([distributions[0], *distributions[:depth]], 1) if distributions else None
        return below[:, :depth], drawn, depth

    def _growth(self, pending: Tensor, hidden: Tensor, logits: Tensor) -> tuple[Tensor, Expand]:
        """Log-probabilities [B, V_d] after the root, and a function that computes those after a frontier."""
        levels = iter(range(1, logits.shape[1]))
        states: list[Tensor | None] = [None]

        def at(level: int, before: Tensor) -> Tensor:
            distribution = logits[:, level : level + 1]
            if self.config.sequential:
                distribution, states[0] = self.after(distribution, hidden[:, level : level + 1], before, states[0])
            return distribution.log_softmax(-1).expand(-1, before.shape[1], -1)

        def expand(tokens: Tensor, came_from: Tensor) -> Tensor:
            if states[0] is not None:
                states[0] = gather_rows(states[0], came_from)
            return at(next(levels), self.head.to_target(tokens))

        return at(0, pending)[:, 0], expand

    def _spread(self, distributions: Tensor, vocab: int) -> Tensor:
        """Log-distributions [B, N, V_d] over the draft vocabulary as [B, N, V] over the target's."""
        if (ids := self.head.ids) is None:
            return distributions
        whole = distributions.new_full((*distributions.shape[:2], vocab), -torch.inf)
        return whole.index_copy(2, ids, distributions)
