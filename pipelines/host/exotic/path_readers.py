"""Mixins by which modules that count cache slots, or store inputs, read a draft; padding that an indexer heeds."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.functional import pad

from mmspec.pipelines.host.exotic import by_path
from mmspec.pipelines.host.exotic.by_path import OneChannel, Paths, RowCache
from mmspec.pipelines.host.hooks import stock
from mmspec.pipelines.host.kinds import PretrainedConfig
from mmspec.pipelines.host.names import bound, cache_name

Stock = Callable[..., Any]  # a method of a stock class


def _for_drafts(read: Callable[..., Any]) -> Callable[..., Any]:
    """A module's method that `read` replaces while a draft is read: a function of the module, of the stock method of
    this name, of the Paths, and of the call's arguments by name."""

    def method(self: Module, *args: object, **kwargs: object) -> Any:
        own, paths = getattr(stock(self), read.__name__), by_path.paths()
        if paths is None:
            return own(self, *args, **kwargs)
        return read(self, own, paths, bound(own, *args, **kwargs))

    return method


class _Blocks:
    """MiniMax-M3's indexer: it selects blocks of adjacent slots by their best key."""

    @_for_drafts
    def forward(self, own: Stock, paths: Paths, arguments: dict[str, Any]) -> object:
        arguments = _by_row(own, paths, arguments, "hidden_states", "position_ids")
        arguments["position_embeddings"] = tuple(paths.fold(t) for t in arguments["position_embeddings"])
        chosen = own(self, **arguments)
        return paths.unfold(chosen.transpose(1, 2)).transpose(1, 2)  # [B, h, n, blocks], by places

    @_for_drafts
    def build_block_mask(self, own: Stock, paths: Paths, arguments: dict[str, Any]) -> Tensor:
        attention_mask = arguments["attention_mask"]
        every = torch.ones_like(attention_mask, dtype=torch.bool)
        chosen = paths.real(own(self, **arguments | {"attention_mask": every}))
        seen = attention_mask if attention_mask.dtype == torch.bool else attention_mask == 0
        mask = chosen.masked_fill(~seen, torch.finfo(chosen.dtype).min)
        # after padding, a node may see nothing in its blocks; stock's softmax then sees all slots of the row
        blind = ~(mask == 0).any(3, keepdim=True)
        return mask.masked_fill(blind & ~paths.own.to(mask.device), -torch.inf)


class _Keys:
    """The indexer of DeepSeek-V3.2 and similar models: it selects tokens, many of which may have the score 0."""

    @_for_drafts
    def forward(self, own: Stock, paths: Paths, arguments: dict[str, Any]) -> object:
        with by_path.Choosing(paths.chosen):
            return own(self, **arguments)


class _Pools:
    """GLM-5-next's indexer: it selects pools of adjacent tokens by a weighted mean of their keys."""

    @_for_drafts
    def forward(self, own: Stock, paths: Paths, arguments: dict[str, Any]) -> object:
        arguments = _by_row(own, paths, arguments, "hidden_states", "q_resid", "attention_mask")
        with by_path.Choosing(partial(self._chosen, paths)):
            chosen = paths.unfold(own(self, **arguments))  # [B, n, k], by places
        slots = paths.slot().to(chosen.device).gather(2, chosen.clamp(min=0).long())
        return slots.where(chosen >= 0, -1).to(chosen.dtype)

    def _chosen(self, paths: Paths, scores: Tensor, k: int) -> Tensor:
        """Choose among as many pools [R, 1, P] of each row as stock has there, including those made of padding.

        These come last in any choice, so which of them are chosen does not matter.
        """
        P = scores.shape[2]
        if scores.device.type != "cpu":
            return scores.topk(k).indices
        whole = [end // self.index_kpool for end in paths.ends]  # type: ignore[attr-defined]
        wide = pad(scores[:, 0], (0, max(0, max(whole) - P)), value=torch.finfo(scores.dtype).min)
        return paths.chosen_places(wide, k, whole, whole).clamp(max=P - 1)[:, None]


class _VisibleBlocks:
    """Qwen4-Exp's indexer: like `_Pools`, of the tokens that the mask shows, rotated at the start of a block."""

    @_for_drafts
    def forward(self, own: Stock, paths: Paths, arguments: dict[str, Any]) -> object:
        arguments = _by_row(own, paths, arguments, "hidden_states")
        nodes, B = paths.lengths.longest, len(paths.depth)
        # for all positions of a row; the node's own comes last
        arguments["position_embeddings"] = tuple(
            torch.cat([paths.rows(t.expand(B, -1, -1), nodes), paths.fold(t[:, nodes:])], 1)
            for t in arguments["position_embeddings"]
        )
        mask = arguments["attention_mask"]
        seen = mask if mask.dtype == torch.bool else mask == 0
        arguments["attention_mask"] = (paths.fold(seen[:, 0].gather(2, paths.slot())) & paths.live)[:, None]
        return paths.real(paths.unfold(own(self, **arguments)[:, 0])[:, None])


class _Distances:
    """Inkling's attention bias by the distance between two slots."""

    @_for_drafts
    def forward(self, own: Stock, paths: Paths, arguments: dict[str, Any]) -> Tensor:
        relative_states, extent = arguments["relative_states"], self.rel_extent  # type: ignore[attr-defined]
        back = torch.arange(extent, device=relative_states.device)
        by_distance = own(self, relative_states, back.new_zeros(relative_states.shape[1]), -back)
        distance = paths.distance.to(back.device)
        bias = by_distance.gather(3, distance.clamp(0, extent - 1).expand(-1, by_distance.shape[1], -1, -1))
        return bias.masked_fill((distance < 0) | (distance >= extent), 0.0)


class _DistanceBias:
    """Inkling-2's bias by the distance between two slots; from transformers 5.24 on the decoder computes that."""

    @_for_drafts
    def forward(self, own: Stock, paths: Paths, arguments: dict[str, Any]) -> object:
        return own(self, **arguments | {"relative_distance": paths.distance.to(arguments["hidden_states"].device)})


class _Tokens:
    """Qwen4-Exp's embedding of the last few tokens."""

    def forward(self, *args: object, **kwargs: object) -> object:
        own, paths = stock(self), by_path.paths()
        arguments = bound(own.forward, *args, **kwargs)
        name, ids = cache_name(own.forward), arguments["input_ids"]
        if paths is None:
            return own.forward(
                self, **arguments | {name: None if arguments[name] is None else OneChannel(arguments[name])}
            )
        rows = paths.fold(ids)
        arguments |= {"input_ids": rows, name: OneChannel(RowCache(arguments[name], paths, rows[:, None]))}
        return paths.unfold(own.forward(self, **arguments))


class _SpacedConvolution:
    """Qwen4-Exp's dilated convolution."""

    @_for_drafts
    def _short_conv(self, own: Stock, paths: Paths, arguments: dict[str, Any]) -> object:
        return paths.unfold(own(self, **_by_row(own, paths, arguments, "hidden_states")))


class _OwnTaps:
    """Inkling-2's convolution, whose weights are computed from each token."""

    @_for_drafts
    def forward(self, own: Stock, paths: Paths, arguments: dict[str, Any]) -> object:
        arguments = _by_row(own, paths, arguments, "hidden_states", "dynamic_input")
        return paths.unfold(own(self, **arguments | {"conv_mask": None}))  # nodes are not padding


class _SlotPositions:
    """The positions of Kosmos: slots, counted from the padding token's id + 1; a padding token has that id itself."""

    def forward(self, *args: object, **kwargs: object) -> object:
        own, arguments = stock(self), bound(stock(self).forward, *args, **kwargs)
        if by_path.paths() is not None:
            ids, place = arguments["input_ids"], arguments["position_ids"] + 1
            place = place if ids is None else place * (ids != self.padding_idx)  # type: ignore[attr-defined]
            arguments["position_ids"] = place + self.padding_idx  # type: ignore[attr-defined]
        return own.forward(self, **arguments)


def _by_row(own: Stock, paths: Paths, arguments: dict[str, Any], *nodes: str) -> dict[str, Any]:
    """The arguments of a stock method, with those named in `nodes` folded into rows, and the RowCache of these rows."""
    name = cache_name(own)
    return arguments | {each: paths.fold(arguments[each]) for each in nodes} | {name: RowCache(arguments[name], paths)}


READERS: dict[str, type] = {
    "MistralLarge4TextIndexer": _Keys,
    "Dots3NoteTextIndexer": _Keys,
    "DeepseekV32Indexer": _Keys,
    "GlmMoeDsaIndexer": _Keys,
    "AXK2Indexer": _Keys,
    "HYV4Indexer": _Keys,
    "MiniMaxM3VLIndexer": _Blocks,
    "Glm5NextTextIndexer": _Pools,
    "Qwen4ExpTextQSAIndexer": _VisibleBlocks,
    "Qwen4ExpTextNGramEmbedding": _Tokens,
    "Qwen4ExpTextPLELayer": _SpacedConvolution,
    "Kosmos2_5TextSinusoidalPositionalEmbedding": _SlotPositions,
    "InklingRelativeLogits": _Distances,
    "Inkling2RelativeLogits": _Distances,  # up to transformers 5.23
    "Inkling2RelativePositionBias": _DistanceBias,
    "Inkling2DynamicShortConvolution": _OwnTaps,
}


def reader(module: Module) -> type | None:
    """The mixin for the class of a module that reads nodes as rows; None: it needs none."""
    return READERS.get(stock(module).__name__)


def tied(config: PretrainedConfig, mask: Tensor) -> str | None:
    """Why padding in this mask [B, L] changes an indexer's choice: blocks tie (MiniMax-M3), or all pools are shifted
    (GLM-5-next); None: neither."""
    blocks = "minimax_m3_sparse" in (getattr(config, "layer_types", None) or ())
    if not (blocks or getattr(config, "index_kpool", None)):
        return None
    padding = (mask.cumsum(1) == 0).sum(1)
    if not blocks:
        pools = "its indexer counts pools from the first slot on; remove the padding that all rows have"
        return pools if int(padding.min()) else None
    size, most = config.index_block_size, int(padding.max())
    if most < size:
        return None
    return (
        f"its indexer selects blocks of {size} slots, and a row has {most} slots of padding; such blocks tie, and in "
        f"stock the order of ties depends on the sort. Batch prompts that differ by fewer than {size} tokens"
    )
