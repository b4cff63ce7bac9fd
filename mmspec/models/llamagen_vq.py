"""LlamaGen's VQ tokenizer: a convolutional autoencoder whose latent pixels are codes of an L2-normalised codebook."""

from __future__ import annotations

from collections.abc import Sequence

from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from torch import Tensor, nn
from torch.nn import functional as F


def _norm(width: int, groups: int) -> nn.GroupNorm:
    return nn.GroupNorm(groups, width, eps=1e-6)


class _Residual(nn.Module):
    def __init__(self, inside: int, outside: int, groups: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = _norm(inside, groups), nn.Conv2d(inside, outside, 3, padding=1)
        self.norm2, self.conv2 = _norm(outside, groups), nn.Conv2d(outside, outside, 3, padding=1)
        if inside != outside:
            self.nin_shortcut = nn.Conv2d(inside, outside, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        h = self.conv2(F.silu(self.norm2(h)))
        return h + (self.nin_shortcut(x) if hasattr(self, "nin_shortcut") else x)


class _PixelAttention(nn.Module):
    """One head over all latent pixels."""

    def __init__(self, width: int, groups: int) -> None:
        super().__init__()
        self.norm = _norm(width, groups)
        self.q, self.k, self.v, self.proj_out = (nn.Conv2d(width, width, 1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (conv(h).flatten(2).transpose(1, 2) for conv in (self.q, self.k, self.v))  # [B, h·w, C]
        seen = F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0]
        return x + self.proj_out(seen.transpose(1, 2).view_as(x))


class _Down(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x, (0, 1, 0, 1)))


class _Up(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))


class _Level(nn.Module):
    """Residual blocks of one resolution, with attention after each if `attend`, then the resampling to the next one."""

    def __init__(self, inside: int, width: int, blocks: int, attend: bool, groups: int) -> None:
        super().__init__()
        self.res = nn.ModuleList(_Residual(inside if i == 0 else width, width, groups) for i in range(blocks))
        self.attn = nn.ModuleList(_PixelAttention(width, groups) for _ in range(blocks if attend else 0))

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.res):
            x = block(x)
            x = self.attn[i](x) if len(self.attn) else x
        for name in ("downsample", "upsample"):
            x = getattr(self, name)(x) if hasattr(self, name) else x
        return x


def _middle(width: int, groups: int) -> nn.ModuleList:
    return nn.ModuleList(
        [_Residual(width, width, groups), _PixelAttention(width, groups), _Residual(width, width, groups)]
    )


class _Encoder(nn.Module):
    def __init__(self, base: int, multipliers: Sequence[int], latent: int, blocks: int, groups: int) -> None:
        super().__init__()
        self.conv_in = nn.Conv2d(3, base, 3, padding=1)
        widths, last = [base, *(base * m for m in multipliers)], len(multipliers) - 1
        self.conv_blocks = nn.ModuleList()
        for i in range(last + 1):
            level = _Level(widths[i], widths[i + 1], blocks, i == last, groups)
            if i < last:
                level.downsample = _Down(widths[i + 1])
            self.conv_blocks.append(level)
        self.mid = _middle(widths[-1], groups)
        self.norm_out, self.conv_out = _norm(widths[-1], groups), nn.Conv2d(widths[-1], latent, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_in(x)
        for block in (*self.conv_blocks, *self.mid):
            x = block(x)
        return self.conv_out(F.silu(self.norm_out(x)))


class _Decoder(nn.Module):
    def __init__(self, base: int, multipliers: Sequence[int], latent: int, blocks: int, groups: int) -> None:
        super().__init__()
        widths = [base * m for m in reversed(multipliers)]
        self.conv_in = nn.Conv2d(latent, widths[0], 3, padding=1)
        self.mid = _middle(widths[0], groups)
        self.conv_blocks = nn.ModuleList()
        for i, width in enumerate(widths):
            level = _Level(widths[max(0, i - 1)], width, blocks + 1, i == 0, groups)
            if i < len(widths) - 1:
                level.upsample = _Up(width)
            self.conv_blocks.append(level)
        self.norm_out, self.conv_out = _norm(widths[-1], groups), nn.Conv2d(widths[-1], 3, 3, padding=1)

    def forward(self, z: Tensor) -> Tensor:
        x = self.conv_in(z)
        for block in (*self.mid, *self.conv_blocks):
            x = block(x)
        return self.conv_out(F.silu(self.norm_out(x)))


class _Quantizer(nn.Module):
    def __init__(self, codes: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(codes, width)
        nn.init.uniform_(self.embedding.weight, -1.0 / codes, 1.0 / codes)


class LlamaGenVQ(ModelMixin, ConfigMixin):
    """VQ-8 and VQ-16 of LlamaGen (Sun et al. 2024, arXiv 2406.06525, §2.1); parameter names are the authors'.

    Args:
        base: channels at full resolution.
        multipliers: of `base`, one per resolution; each but the last halves the picture (VQ-16: 1, 1, 2, 2, 4).
        latent: channels between the convolutions and the codes.
        codes, code_dim: size of the codebook. Its rows are L2-normalised whenever they are used.
        blocks: residual blocks per resolution; the decoder has one more.
        groups: of the normalisation.
    """

    @register_to_config
    def __init__(
        self, base: int = 128, multipliers: Sequence[int] = (1, 1, 2, 2, 4), latent: int = 256,
        codes: int = 16384, code_dim: int = 8, blocks: int = 2, groups: int = 32,
    ) -> None:  # fmt: skip
        super().__init__()
        self.encoder = _Encoder(base, multipliers, latent, blocks, groups)
        self.decoder = _Decoder(base, multipliers, latent, blocks, groups)
        self.quantize = _Quantizer(codes, code_dim)
        self.quant_conv = nn.Conv2d(latent, code_dim, 1)
        self.post_quant_conv = nn.Conv2d(code_dim, latent, 1)

    @property
    def downsample(self) -> int:
        """Pixels per code along a side."""
        return 2 ** (len(self.config["multipliers"]) - 1)

    def codebook(self) -> Tensor:
        """[codes, code_dim], rows of length one."""
        return F.normalize(self.quantize.embedding.weight, dim=-1)

    def latents(self, pixels: Tensor) -> Tensor:
        """Encoder output [B, h, w, code_dim], each of length one, for pixels [B, 3, H, W] in [−1, 1]."""
        return F.normalize(self.quant_conv(self.encoder(pixels)).permute(0, 2, 3, 1), dim=-1)

    def nearest(self, latents: Tensor) -> Tensor:
        """Ids [...] of the codes nearest to unit vectors [..., code_dim]."""
        return (latents @ self.codebook().T).argmax(-1)

    def encode(self, pixels: Tensor) -> Tensor:
        """Code ids [B, h, w] of pixels [B, 3, H, W] in [−1, 1]; H and W must be multiples of `downsample`."""
        if pixels.shape[-1] % self.downsample or pixels.shape[-2] % self.downsample:
            raise ValueError(
                f"a picture of {pixels.shape[-1]}x{pixels.shape[-2]} does not divide into codes of {self.downsample}x"
                f"{self.downsample} pixels; resize or crop it first"
            )
        return self.nearest(self.latents(pixels))

    def render(self, vectors: Tensor) -> Tensor:
        """Pixels [B, 3, H, W] of code vectors [B, h, w, code_dim]."""
        return self.decoder(self.post_quant_conv(vectors.permute(0, 3, 1, 2)))

    def decode(self, ids: Tensor) -> Tensor:
        """Pixels [B, 3, H, W], about [−1, 1], of code ids [B, h, w]."""
        return self.render(F.embedding(ids, self.codebook()))

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """For training: reconstruction, latents [B, h, w, c], and their codes.

        Gradients pass the quantizer by the straight-through estimator.
        """
        z = self.latents(pixels)
        codes = F.embedding(self.nearest(z), self.codebook())
        return self.render(z + (codes - z).detach()), z, codes
