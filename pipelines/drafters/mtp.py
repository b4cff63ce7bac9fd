"""MTP: drafts with the multi-token-prediction heads in the target's own checkpoint."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from mmspec.compile import capture
from mmspec.config import Options
from mmspec.drafters import prune
from mmspec.drafters.feature import FeatureDrafter, prompt_stats
from mmspec.drafters.growth import head_of
from mmspec.drafters.memory import FeatureMemory, PassThroughMemory
from mmspec.drafters.shape import Shape, TreeOptions
from mmspec.drafters.trained import placed
from mmspec.pipelines.drafters import mtp_files
from mmspec.pipelines.host import tree_attention
from mmspec.pipelines.host.assisted import draft_length
from mmspec.pipelines.host.decoder import decoder
from mmspec.pipelines.host.kinds import GenerativeModel
from mmspec.pipelines.host.masks import additive
from mmspec.pipelines.host.mtp import MtpHeads
from mmspec.pipelines.host.names import CACHE
from mmspec.pipelines.host.readable import head_shape
from mmspec.protocols import SessionView, Target, TargetInfo
from mmspec.ragged_cache import Lengths, RaggedBuffer
from mmspec.types import FINAL, Prompt

DEPTH = 4  # the draft length of a single head if the model's generation_config has no `num_assistant_tokens`


@dataclass(frozen=True)
class MtpConfig:
    """The sizes and recommended shape of the heads."""

    hidden: int  # the target's width
    vocab: int  # the target's vocabulary
    heads: int  # K, how many tokens ahead they were trained for
    shape: Shape  # the recommended shape
    features: tuple[int, ...] = (FINAL,)


@dataclass
class HeadMemory(FeatureMemory):
    """A FeatureMemory of K heads, with the target's position ids.

    Row r pairs the target's feature at token r with the embedding of token r + 1. `positions` counts rows from the
    prompt's last token; `context` [B, 1, (K − 1)·H] has the outputs of all heads but the last for the last row read.
    """

    index: RaggedBuffer = field(kw_only=True)  # the row in every slot, [B, 1, T, 1], if masks depend on it
    places: Tensor = field(kw_only=True)  # [B, A, 2], position ids of rows 0 and 1
    first: Tensor = field(kw_only=True)  # [B], the first row of the text

    @property
    def layers(self) -> tuple[RaggedBuffer, ...]:
        return (self.slots, *self.more)

    @property
    def size(self) -> int:
        """The number of bytes of a row."""
        tensors = [t for slots in (*self.layers, self.index) for t in (slots.keys, slots.values) if t is not None]
        return sum(t.shape[1] * t.shape[3] * t.element_size() for t in tensors)

    def _buffers(self) -> tuple[RaggedBuffer, ...]:
        return (*self.layers, self.index)

    def select(self, rows: Tensor) -> HeadMemory:
        return replace(cast(HeadMemory, super().select(rows)), places=self.places[rows], first=self.first[rows])

    def join(self, other: FeatureMemory) -> HeadMemory:
        assert isinstance(other, HeadMemory)
        places, first = torch.cat([self.places, other.places]), torch.cat([self.first, other.first])
        return replace(cast(HeadMemory, super().join(other)), places=places, first=first)

    def ids(self, rows: Tensor) -> Tensor:
        """Position ids [B, A, n] of rows [B, n]."""
        at = rows[:, None]
        return torch.where(at <= 0, self.places[..., :1] + at, self.places[..., 1:] + at - 1)

    def state(self) -> list[Tensor]:
        return [self.positions, self.places]

    @contextmanager
    def passing(self, state: Sequence[Tensor]) -> Iterator[_PassThroughHeads]:
        empty = _PassThroughHeads(*state)
        with capture.Cut(empty, masked=False):
            yield empty


class _PassThroughHeads(PassThroughMemory):
    """The memory in a capture of a single head, whose stock layer calls torch's own attention."""

    ids = HeadMemory.ids

    def __init__(self, positions: Tensor, places: Tensor) -> None:
        super().__init__(positions)
        self.places, self.first = places, None
        self.layers = (self,)
        self.fresh: tuple[int, Tensor, Tensor, Tensor | None] | None = None
        self._seen: Tensor | None = None

    def visible(self, at: Lengths, n: int, seen: Tensor | None) -> Tensor | None:
        """The mask for the layer, over the new rows only; the real mask is kept for the capture's cut."""
        self._seen = seen
        return None if seen is None else torch.ones(len(seen), n, n, dtype=torch.bool, device=seen.device)

    def append(self, keys: Tensor, values: Tensor, at: Lengths) -> tuple[Tensor, Tensor]:
        self.fresh = (at.longest, keys, values, self._seen)
        return keys, values


@dataclass
class _SlotCache:
    """Takes the place of the KV cache of a stock layer; appends to a memory's slots."""

    layers: Sequence[RaggedBuffer | _PassThroughHeads]
    at: Lengths

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        return self.layers[layer].append(keys, values, self.at)


class _TrainingCache:
    """Takes the place of the KV cache in training: keys and values of all steps, concatenated."""

    def __init__(self) -> None:
        self.steps: list[tuple[Tensor, Tensor]] = []

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        self.steps.append((keys, values))
        both = [torch.cat(each, 2) for each in zip(*self.steps, strict=True)]
        return both[0], both[1]


class MtpDrafter(FeatureDrafter):
    """Multi-token prediction (Gloeckle et al. 2024; DeepSeek-V3, 2024, §2.2), drafting with the target's own heads.

    Head k reads the token k + 1 positions ahead of a row and the output of head k − 1 for the row before; head 0 reads
    the target's final feature. So a node at depth d goes through the heads from d on. Below the last head's depth, that
    head is applied again, to its own output for the node's parent. Everything that the heads share with the target
    (embedding, head, rotary positions, position ids) is the target's.
    """

    method = "mtp"
    positioned = True  # trained with the target's own position ids
    options = TreeOptions.chain(4)

    def __init__(self, heads: MtpHeads, vocab: int, hidden: int, depth: int = DEPTH) -> None:
        super().__init__()
        self.head = head_of(hidden, 0)
        self.heads, K = heads, len(heads.layers)
        self.config = MtpConfig(hidden, vocab, K, Shape.chain(K if K > 1 else depth))
        self.options = TreeOptions.like(self.config.shape)
        self.eager, self.kinds, self.windows = heads.attention == "eager", heads.kinds, heads.windows
        self.plain = K == 1 and self.windows == [None]  # then masks do not depend on the rows in the slots
        self.by_kind = "layer_type" in inspect.signature(heads.rotary.forward).parameters if heads.rotary else False

    @classmethod
    def of_model(cls, model: GenerativeModel, where: Path | None = None) -> MtpDrafter:
        """The heads in the files that a model was loaded from, or those in the folder `where`.

        Raises:
            ValueError: there are none, or they are incomplete, damaged or of an unknown kind.
        """
        heads = mtp_files.heads(model, where)
        unsupported = sorted(set(heads.kinds) - set(tree_attention.KINDS))
        if unsupported:
            raise ValueError(
                f"the heads of {type(model).__name__} have {', '.join(unsupported)} layers, which keep a state besides "
                "keys and values; drafter='mtp' supports full and sliding attention. Use drafter='ngram'"
            )
        return cls(heads, head_shape(model)[0], heads.hidden, draft_length(model) or DEPTH)

    @classmethod
    def untrained(cls, model: Any) -> MtpDrafter:
        """A head to be trained for a model: its own, if it ships with one, else a new one."""
        if mtp_files.found(model):
            return cls.of_model(model)
        return cls(MtpHeads(model, 1), head_shape(model)[0], decoder(model).config.hidden_size)

    @property
    def block(self) -> MtpHeads:  # type: ignore[override]
        return self.heads

    @property
    def capturable(self) -> bool:
        return self.nodes > 1 and self.plain and self.heads.attention == "sdpa"

    def fit(self, target: TargetInfo, given: Options) -> MtpDrafter:
        """The same heads with the user's options, on the target's device.

        Raises:
            ValueError: an option that it does not use, or heads for another width.
        """
        options = TreeOptions.like(self.config.shape).with_(given, "the mtp drafter")
        if self.config.hidden != target.hidden:
            raise ValueError(
                f"these heads are for a model of width {self.config.hidden}; {target.name} has {target.hidden}. Use "
                "the ones in its own files"
            )
        if options.draws and options.named:
            raise ValueError("draws=True needs all of the target's head; leave draft_vocab out, or use draws=False")
        return placed(self, target, options)

    def forward(
        self, embeds: Tensor, features: Tensor, visual: Tensor, valid: Tensor, steps: int, start: int = 0,
        rows: Tensor | None = None, positions: Tensor | None = None,
    ) -> list[Tensor]:  # fmt: skip
        """The head's outputs for `steps` steps, from all rows at once, as in drafting; see `FeatureLayer.forward`,
        which has the same arguments and result.

        Args:
            positions: [B, T, A], the target's position ids of the rows; None: 0, 1, 2, …

        Raises:
            ValueError: several heads, or one whose attention has a window.
        """
        if not self.plain:
            raise ValueError("only a single head with full attention can be trained; these are more, or have a window")
        B, T, _ = embeds.shape
        place = torch.arange(T, device=embeds.device)
        own = torch.eye(T, dtype=torch.bool, device=embeds.device).expand(B, T, T)
        masks, seen, outputs = [(place <= place[:, None]) & valid[:, None] | own], _TrainingCache(), []
        positions = place.expand(B, T)[..., None] if positions is None else positions
        ahead, ids = F.pad(embeds, (0, 0, 0, steps)), positions.permute(2, 0, 1)
        for step in range(steps):
            mask = torch.cat(masks, 2)[:, None]
            mask = additive(mask, embeds.dtype) if self.eager else mask
            at = ids + step
            features = self._head(0, ahead[:, step : step + T], features, at if len(at) > 1 else at[0], mask, seen)
            outputs.append(features)
            masks.append(own)
        return outputs

    def at_level(self, f: Tensor, level: int | Tensor) -> Tensor:
        return f.unflatten(-1, (self.config.heads, -1))[..., min(level, self.config.heads - 1), :]

    def settle(self, memory: FeatureMemory, f: Tensor) -> None:
        if self.config.heads > 1:
            memory.context = f[..., : -self.config.hidden]

    @torch.no_grad()
    def start(self, session: SessionView, target: Target, prompt: Prompt) -> HeadMemory:
        """Read the prompt: row j pairs the target's feature at j with the embedding at j + 1.

        Raises:
            ValueError: the call is guided.
        """
        if target.streams > 1:
            raise ValueError("the mtp drafter has no guidance; leave guidance_scale out, or use drafter='jacobi'")
        assert prompt.embeds is not None and prompt.hidden is not None and prompt.positions is not None
        (B, L), device = prompt.ids.shape, prompt.ids.device
        rows = torch.arange(1 - L, 0, device=device).expand(B, -1)
        features, ids = prompt.hidden[:, :-1].to(prompt.embeds.dtype), prompt.positions
        given = (prompt.embeds[:, 1:], features, prompt.visual[:, 1:], prompt.valid[:, :-1], rows)
        embeds, features, _, valid, rows = prune.pruned(self.options.prune, given)
        n, zero = embeds.shape[1], Lengths.of([0] * B, device)
        nothing = valid.new_zeros(B, 0)
        slots, index, *more = (RaggedBuffer(n + 257) for _ in range(self.config.heads + 1))
        first = 1 - L + (~prompt.valid).sum(1)
        places = ids[..., -2:].contiguous()
        memory = HeadMemory(
            slots, zero, zero.device, nothing, False, more=tuple(more), index=index, places=places, first=first
        )
        if self.config.heads > 1:
            memory.context = embeds.new_zeros(B, 1, (self.config.heads - 1) * self.config.hidden)
        if n:
            every = bool(valid.all())
            seen = torch.ones(n, n, dtype=torch.bool, device=device).tril() & valid[:, None]
            seen = seen | torch.eye(n, dtype=torch.bool, device=device)
            at = ids.gather(2, (rows + L - 1)[:, None].expand(-1, ids.shape[1], -1))
            plain = every and not self.eager
            out = self._pass(memory, embeds, features, zero, rows, at, None if plain else seen, 0)
            self.settle(memory, out[:, -1:])
        memory.lengths, memory.open_slots = Lengths.of([n] * B, device), valid
        memory.padded = not bool(valid.all())
        memory.stats = prompt_stats(prompt.visual[:, 1:], prompt.valid[:, :-1], valid, memory.size)
        return memory

    def _read(
        self, memory: Any, embeds: Tensor, features: Tensor, at: Lengths, ahead: Tensor | int, seen: Tensor | None,
        level: int = 0,
    ) -> Tensor:  # fmt: skip
        n = embeds.shape[1]
        steps = torch.arange(n, device=embeds.device) if isinstance(ahead, int) else ahead
        rows = (memory.positions[:, None] + steps).expand(len(embeds), n)
        visible = memory.visible(at, n, seen)
        if self.eager and visible is None:
            visible = torch.ones(len(embeds), n, at.longest + n, dtype=torch.bool, device=embeds.device)
        return self._pass(memory, embeds, features.to(embeds.dtype), at, rows, memory.ids(rows), visible, level)

    def _pass(
        self, memory: Any, embeds: Tensor, features: Tensor, at: Lengths, rows: Tensor, ids: Tensor,
        visible: Tensor | None, level: int,
    ) -> Tensor:  # fmt: skip
        """The outputs of the heads for rows [B, n], concatenated, [B, n, K·H].

        Args:
            features: [B, n, H], the target's; at a level above 0 the result of `_pass` for the rows' parents.
            rows: the indices of the rows, as in HeadMemory.
            ids: [B, A, n], position ids.
            visible: bool [B or 1, n, T]; None: causal.
        """
        K, H = self.config.heads, self.config.hidden
        positions = ids.transpose(0, 1) if ids.shape[1] > 1 else ids[:, 0]
        index = None
        if not self.plain:
            index = memory.index.append(rows[:, None, :, None], rows[:, None, :, None], at)[0][:, 0, :, 0]
        above = list(features.split(H, -1)) if level else [features] * K
        outputs = list(above)
        for k in range(min(level, K - 1), K):
            before = above[k if level >= K else max(k - 1, 0)]
            if k and not level:  # the output for the row before; for the first row it is in the memory
                context = memory.context[..., (k - 1) * H : k * H].to(features.dtype)
                before = torch.cat([context, outputs[k - 1][:, :-1]], 1)
            mask = self._mask(visible, rows, index, memory.first, k)
            outputs[k] = self._head(k, embeds, before, positions, mask, _SlotCache(memory.layers, at))
        return torch.cat(outputs, -1)

    def _head(
        self, k: int, embeds: Tensor, before: Tensor, positions: Tensor, mask: Tensor | None, cache: Any
    ) -> Tensor:
        rotary, kind = self.heads.rotary, {"layer_type": self.kinds[k]} if self.by_kind else {}
        axes = positions[1:] if positions.dim() == 3 and len(positions) == 4 else positions  # Qwen's first is a count
        return self.heads.layers[k](
            embeds, before, position_embeddings=None if rotary is None else rotary(embeds, axes, **kind),
            attention_mask=mask, position_ids=positions if positions.dim() == 2 else positions[0], **{CACHE: cache},
        )  # fmt: skip

    def _mask(self, visible: Tensor | None, rows: Tensor, index: Tensor | None, first: Tensor, k: int) -> Tensor | None:
        """The mask [B, 1, n, T] for head k, which has no input for a text's first k rows, and may have a window."""
        if index is not None:
            if visible is None:
                visible = torch.ones(rows.shape[1], index.shape[1], dtype=torch.bool, device=rows.device)
                visible = visible.tril(index.shape[1] - rows.shape[1])[None]
            read = index[:, None] >= first[:, None, None] + k
            window = self.windows[k]
            if window is not None:
                read = read & (rows[:, :, None] - index[:, None] < window)
            visible = visible & (read | (rows[:, :, None] == index[:, None]))
        if visible is None:
            return None
        mask = visible.expand(len(rows), -1, -1)[:, None]
        return additive(mask, self.heads.dtype) if self.eager else mask
