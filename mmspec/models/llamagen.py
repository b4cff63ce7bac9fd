"""LlamaGen's transformer: a Llama over the codes of a picture, after a prefix with the class or the text."""

from __future__ import annotations

from typing import Protocol

import torch
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from torch import Tensor, nn
from torch.nn import functional as F

from mmspec.functional import Linear

PREFIX = -1  # the position of a prefix token


class Past(Protocol):
    """The KV cache of earlier forwards."""

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Append keys and values [B, kv_heads, n, D] of one layer; returns all of the layer's."""


class _Norm(nn.Module):
    """RMS norm in fp32, cast back before the weight is applied, as the published weights expect."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], eps=self.eps).type_as(x) * self.weight


class _TokenAttention(nn.Module):
    def __init__(self, dim: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.width = heads, kv_heads, dim // heads
        self.wqkv = Linear(dim, (heads + 2 * kv_heads) * self.width, bias=False)
        self.wo = Linear(dim, dim, bias=False)

    def forward(self, x: Tensor, turn: Tensor, mask: Tensor | None, past: Past | None, layer: int) -> Tensor:
        B, n, _ = x.shape
        heads = self.wqkv(x).view(B, n, -1, self.width).transpose(1, 2)
        rotated = rotate(heads[:, : self.heads + self.kv_heads], turn)
        q, k = rotated.split((self.heads, self.kv_heads), 1)
        v = heads[:, self.heads + self.kv_heads :]
        if past is not None:
            k, v = past.update(k, v, layer)
        causal = mask is None and n > 1
        out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=self.heads != self.kv_heads)
        return self.wo(out.transpose(1, 2).flatten(2))


class _FeedForward(nn.Module):
    def __init__(self, dim: int, multiple_of: int) -> None:
        super().__init__()
        inner = -(-int(2 * 4 * dim / 3) // multiple_of) * multiple_of
        self.w1, self.w3 = Linear(dim, inner, bias=False), Linear(dim, inner, bias=False)
        self.w2 = Linear(inner, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class _Layer(nn.Module):
    def __init__(self, dim: int, heads: int, kv_heads: int, multiple_of: int, eps: float) -> None:
        super().__init__()
        self.attention = _TokenAttention(dim, heads, kv_heads)
        self.feed_forward = _FeedForward(dim, multiple_of)
        self.attention_norm, self.ffn_norm = _Norm(dim, eps), _Norm(dim, eps)

    def forward(self, x: Tensor, turn: Tensor, mask: Tensor | None, past: Past | None, layer: int) -> Tensor:
        x = x + self.attention(self.attention_norm(x), turn, mask, past, layer)
        return x + self.feed_forward(self.ffn_norm(x))


class _ClassEmbedding(nn.Module):
    """One prefix token for the class; the last row of the table is for no class."""

    def __init__(self, classes: int, dim: int) -> None:
        super().__init__()
        self.embedding_table = nn.Embedding(classes + 1, dim)

    def forward(self, labels: Tensor) -> Tensor:
        return self.embedding_table(labels)[:, None]

    def null(self, batch: int) -> Tensor:
        table = self.embedding_table.weight
        return torch.full((batch,), len(table) - 1, device=table.device)


class _Projection(nn.Module):
    def __init__(self, width: int, dim: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = Linear(width, dim, bias=False), Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class _CaptionEmbedding(nn.Module):
    """Text features through an MLP; the features for no text are fixed random numbers."""

    uncond_embedding: Tensor

    def __init__(self, width: int, prefix: int, dim: int) -> None:
        super().__init__()
        self.cap_proj = _Projection(width, dim)
        self.register_buffer("uncond_embedding", torch.randn(prefix, width) / width**0.5)

    def forward(self, features: Tensor) -> Tensor:
        return self.cap_proj(features)

    def null(self, batch: int) -> Tensor:
        return self.uncond_embedding.expand(batch, -1, -1)


class LlamaGenTransformer(ModelMixin, ConfigMixin):
    """The GPT of LlamaGen (Sun et al. 2024, arXiv 2406.06525, §2.2); parameter names are the authors'.

    Args:
        dim, num_layers, heads, kv_heads: of the transformer; kv_heads None: equal to heads.
        vocab: codes of the tokenizer.
        grid: codes along one side of a picture, which has grid² of them.
        prefix: condition tokens before the picture: 1 for a class, 120 for a text in the published models.
        classes: number of classes; 0: text conditioning.
        caption_width: of the text features.
        multiple_of: the inner width of the MLP is rounded up to a multiple of this.
    """

    _supports_gradient_checkpointing = False

    @register_to_config
    def __init__(
        self, dim: int = 1280, num_layers: int = 36, heads: int = 20, kv_heads: int | None = None, vocab: int = 16384,
        grid: int = 16, prefix: int = 120, classes: int = 0, caption_width: int = 2048, multiple_of: int = 256,
        norm_eps: float = 1e-5, rope_base: float = 10000.0,
    ) -> None:  # fmt: skip
        super().__init__()
        if dim % heads or (dim // heads) % 4:
            raise ValueError(
                f"dim {dim} must divide into {heads} heads of a width that is a multiple of 4: half of its pairs are "
                "for the row, half for the column"
            )
        self.cls_embedding = _ClassEmbedding(classes, dim) if classes else _CaptionEmbedding(caption_width, prefix, dim)
        self.tok_embeddings = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(
            _Layer(dim, heads, kv_heads or heads, multiple_of, norm_eps) for _ in range(num_layers)
        )
        self.norm = _Norm(dim, norm_eps)
        self.output = Linear(dim, vocab, bias=False)
        table = turns(grid, dim // heads, rope_base)
        self.register_buffer("turns", table.view(torch.int32), persistent=False)  # int32: unchanged by casts

    def null_condition(self, batch: int) -> Tensor:
        """The condition for unconditional generation, as an argument of `prefix_embeds`."""
        return self.cls_embedding.null(batch)

    def prefix_embeds(self, condition: Tensor) -> Tensor:
        """Embeddings [B, prefix, dim] of class ids [B] or of text features [B, prefix, caption_width]."""
        return self.cls_embedding(condition)

    def prefix(self, condition: Tensor, guided: bool) -> Tensor:
        """`prefix_embeds` [B, prefix, dim]; if guided [2·B, prefix, dim], followed by those of no condition."""
        embeds = self.prefix_embeds(condition)
        return torch.cat([embeds, self.prefix_embeds(self.null_condition(len(embeds)))]) if guided else embeds

    def forward(
        self, embeds: Tensor, positions: Tensor, visible: Tensor | None = None, past: Past | None = None
    ) -> Tensor:
        """Final features, after the last norm.

        Args:
            embeds: [B, n, dim].
            positions: int64 [B, n]: PREFIX, or the input token's index in its picture, in reading order from 0.
            visible: attention mask, bool [B, n, T], over the T keys (those of `past` first); None: causal.
            past: the KV cache.
        """
        turn = self.turns[positions + 1].view(torch.float32)
        mask = None if visible is None else visible[:, None]
        x = embeds
        for index, layer in enumerate(self.layers):
            x = layer(x, turn, mask, past, index)
        return self.norm(x)

    def head(self, hidden: Tensor) -> Tensor:
        """fp32 logits [..., vocab]."""
        return self.output(hidden).float()


def visible(open_slots: Tensor, n: int) -> Tensor:
    """The causal mask of the first n tokens, bool [B, n, T], without the padding of the prefix, where `open_slots` [B,
    T] is false; each token sees itself. Without a condition the mask is the same."""
    T, device = open_slots.shape[1], open_slots.device
    causal = torch.ones(n, T, dtype=torch.bool, device=device).tril()
    return (causal & open_slots[:, None]) | torch.eye(n, T, dtype=torch.bool, device=device)


def turns(grid: int, width: int, base: float) -> Tensor:
    """Rotary table [1 + grid², 2, width/2]: cosines and sines of the prefix, followed by those of every position.

    The first half of the angles depends on the row, the second on the column. The prefix has zeros for both, so that
    its queries and keys are zero: all queries give every prefix token the same weight. Trained weights rely on that.
    """
    frequency = base ** (torch.arange(0, width // 2, 2, dtype=torch.float32) / -(width // 2))  # [width/4]
    place = torch.arange(grid * grid)
    angle = torch.cat([torch.outer(axis, frequency) for axis in (place // grid, place % grid)], 1)
    table = torch.stack([angle.cos(), angle.sin()], 1)
    return torch.cat([torch.zeros_like(table[:1]), table])


def rotate(x: Tensor, turn: Tensor) -> Tensor:
    """Rotate x [B, heads, n, D] in fp32 by a table [B, n, 2, D/2]; neighbouring dimensions 2i, 2i + 1 form a pair."""
    cos, sin = turn[:, None, :, 0], turn[:, None, :, 1]  # [B, 1, n, D/2]
    a, b = x[..., 0::2].float(), x[..., 1::2].float()
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2).type_as(x)
