"""MAR's transformer: an encoder of the known tokens, a decoder of all positions, a diffusion head for the others."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from torch import Tensor, nn
from torch.nn import functional as F

from mmspec.models.mar_head import EPS, SHAPES, MARHead


class _Attention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2))


class _MLP(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class _Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim, eps=EPS), nn.LayerNorm(dim, eps=EPS)
        self.attn, self.mlp = _Attention(dim, heads), _MLP(dim)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.attn(self.norm1(x), mask)
        return x + self.mlp(self.norm2(x))


class MARTransformer2DModel(ModelMixin, ConfigMixin):
    """MAR (Li et al. 2024, arXiv 2406.11838, §3.3 and appendix); parameter names are the authors'.

    Args:
        dim, layers, heads: of the encoder and again of the decoder.
        head_layers, head_width: of the diffusion head.
        grid: tokens along one side of a picture.
        channels: width of a token.
        buffer: positions before the picture, which contain the class.
        classes: number of classes; the label after the last one is for none.
    """

    _supports_gradient_checkpointing = False

    @register_to_config
    def __init__(
        self, dim: int = 768, layers: int = 12, heads: int = 12, head_layers: int = 6, head_width: int = 1024,
        grid: int = 16, channels: int = 16, buffer: int = 64, classes: int = 1000,
    ) -> None:  # fmt: skip
        super().__init__()
        if dim % heads:
            raise ValueError(f"dim {dim} must divide into {heads} heads")
        L = grid * grid
        self.class_emb = nn.Embedding(classes, dim)
        self.fake_latent = nn.Parameter(torch.empty(1, dim))
        self.z_proj, self.z_proj_ln = nn.Linear(channels, dim), nn.LayerNorm(dim, eps=EPS)
        self.encoder_pos_embed_learned = nn.Parameter(torch.empty(1, buffer + L, dim))
        self.encoder_blocks = nn.ModuleList(_Block(dim, heads) for _ in range(layers))
        self.encoder_norm = nn.LayerNorm(dim, eps=EPS)
        self.decoder_embed = nn.Linear(dim, dim)
        self.mask_token = nn.Parameter(torch.empty(1, 1, dim))
        self.decoder_pos_embed_learned = nn.Parameter(torch.empty(1, buffer + L, dim))
        self.decoder_blocks = nn.ModuleList(_Block(dim, heads) for _ in range(layers))
        self.decoder_norm = nn.LayerNorm(dim, eps=EPS)
        self.diffusion_pos_embed_learned = nn.Parameter(torch.empty(1, L, dim))
        self.diffloss = MARHead(channels, dim, head_width, head_layers)
        for name, weight in self.named_parameters():
            if name.endswith(("class_emb.weight", "fake_latent", "mask_token", "pos_embed_learned")):
                nn.init.normal_(weight, std=0.02)

    @property
    def tokens(self) -> int:
        """L, the number of tokens of a picture."""
        return self.config["grid"] ** 2

    def forward(self, tokens: Tensor, known: Tensor, labels: Tensor, counts: Sequence[int] | None = None) -> Tensor:
        """Conditioning z [B, L, D] of every position, given the known tokens.

        Args:
            tokens: [B, L, C]; values at unknown positions are ignored.
            known: bool [B, L].
            labels: int64 [B]; the number of classes is the label for none.
            counts: number of known tokens in each row, if the caller has it; otherwise it is read from `known`.
        """
        S, counts = self.config["buffer"], known.sum(1).tolist() if counts is None else counts
        most = max(counts)
        places = (~known).int().argsort(stable=True, dim=1)[:, :most]  # the known ones first, in natural order
        real = known.gather(1, places)
        x = self._encode(tokens, labels, places, real if min(counts) < most else None)
        rows = self.decoder_embed(x)
        blank = self.mask_token.to(rows.dtype)
        canvas = blank.expand(len(tokens), self.tokens, -1)
        index = places[..., None].expand(-1, -1, rows.shape[-1])
        canvas = canvas.scatter(1, index, torch.where(real[..., None], rows[:, S:], blank))
        x = torch.cat([rows[:, :S], canvas], 1) + self.decoder_pos_embed_learned
        for block in self.decoder_blocks:
            x = block(x)
        return self.decoder_norm(x)[:, S:] + self.diffusion_pos_embed_learned

    def _encode(self, tokens: Tensor, labels: Tensor, places: Tensor, real: Tensor | None) -> Tensor:
        """Encode the class and the tokens at `places` to [B, S + most, D]; `real` masks the tokens, None: all."""
        S = self.config["buffer"]
        classes = torch.cat([self.class_emb.weight, self.fake_latent])[labels]
        seen = tokens.gather(1, places[..., None].expand(-1, -1, tokens.shape[-1]))
        position = self.encoder_pos_embed_learned[0]
        x = torch.cat([classes[:, None] + position[:S], self.z_proj(seen.to(classes.dtype)) + position[S:][places]], 1)
        mask = None if real is None else F.pad(real, (S, 0), value=True)[:, None, None]
        x = self.z_proj_ln(x)
        for block in self.encoder_blocks:
            x = block(x, mask)
        return self.encoder_norm(x)


def mar(size: str, **other: object) -> MARTransformer2DModel:
    """A model of a published size, "base", "large" or "huge", with random weights."""
    if size not in SHAPES:
        raise ValueError(f"unknown size {size!r}; choose from {', '.join(SHAPES)}")
    return MARTransformer2DModel(**{**SHAPES[size], **other})
