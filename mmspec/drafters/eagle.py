"""EAGLE: one layer that continues the target's features; EAGLE-1/2 (final features) and EAGLE-3 (of three layers)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from mmspec.config import Options, is_whole
from mmspec.drafters.blocks import Attend, Block, RMSNorm
from mmspec.drafters.feature import FeatureDrafter
from mmspec.drafters.growth import head_of
from mmspec.drafters.memory import FeatureMemory
from mmspec.drafters.shape import TreeOptions
from mmspec.drafters.trained import TrainedConfig, check_fit, placed
from mmspec.functional import Linear
from mmspec.protocols import SessionView, Target, TargetInfo
from mmspec.tree import chain
from mmspec.types import FINAL


@dataclass(frozen=True)
class EagleConfig(TrainedConfig):
    """The config fields of an EAGLE drafter beyond a TrainedConfig's, in which published drafters differ.

    Attributes:
        features: FINAL (−1) for the target's final hidden state (EAGLE-1/2), or the decoder layers whose inputs are
            read (EAGLE-3: 2, L//2, L−3).
        parallel_norm: EAGLE-3's layer: attention reads [norm(embedding); norm(feature)].
        norm_residual: in EAGLE-3's layer the residual is the normed feature (`norm_before_residual` of speculators).
        input_norm: norm before the attention (absent in EAGLE-1/2's only layer).
        embed_norm, out_norm: norm of the embedding, and of the output feature before the head.
        layers: the second and later ones are plain Llama layers, and need a head of its own.
        fc_norm, norm_before_fc: norms of the target's features before `fc`, of each layer's and of all concatenated.
        norm_output: the output is normed before it is fed back, not only before the head (EAGLE-3.1).
        parallel, mask_token: rows with `mask_hidden` and this token's embedding predict all further tokens in one pass
            (P-EAGLE).
        proposes: ids of the target's tokens that it was trained to propose with the target's head: the default of
            `draft_vocab`; (): all.
    """

    named: ClassVar[str] = "an EAGLE config"

    parallel_norm: bool = False
    norm_residual: bool = False
    input_norm: bool = False
    embed_norm: bool = False
    out_norm: bool = False
    fc_norm: bool = False
    norm_before_fc: bool = False
    norm_output: bool = False
    parallel: bool = False
    mask_token: int = 0
    proposes: tuple[int, ...] = ()
    fc_bias: bool = True
    qkv_bias: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_whole(self.layers, 1):
            raise ValueError(f"layers must be a whole number of at least 1; got {self.layers!r}")
        later = self.layers > 1 or self.parallel or self.fc_norm or self.norm_before_fc or self.norm_output
        if later and not (self.parallel_norm and self.draft_vocab):
            raise ValueError(
                "several layers, norms of features and mask rows need EAGLE-3's layer and the drafter's own head"
            )

    def only_final(self, method: str) -> None:
        """Check the config of a method that is built on EAGLE-1/2's layer.

        Raises ValueError: EAGLE-3's layer, other features than the target's final one, or rope "2d".
        """
        wide = self.target_hidden in (0, self.hidden)
        if self.parallel_norm or self.features != (FINAL,) or not wide or self.rope != "1d" or self.mrope:
            raise ValueError(
                f"{method} continues the target's final feature, as wide as its embeddings, in EAGLE-1/2's layer with "
                f"rope '1d'; got features {self.features}, target_hidden {self.target_hidden}, parallel_norm "
                f"{self.parallel_norm}, rope {self.rope!r}"
            )


class EagleDrafter(FeatureDrafter):
    """Autoregression on features (Li et al. 2024, EAGLE §3; EAGLE-2 §4 for the tree; 2025, EAGLE-3 §3)."""

    method = "eagle"
    Config = EagleConfig

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self.config = c = config
        self.options = self.chosen({})
        both, wide = c.parallel_norm, c.target_hidden or c.hidden
        reads = len(c.features) * wide
        self.fc = Linear(reads if both else c.hidden + reads, c.hidden, bias=c.fc_bias)
        self.block = Block(
            c.hidden, c.intermediate, c.heads, c.kv_heads, c, c.norm_eps,
            inputs=2 if both else 1, qkv_bias=c.qkv_bias, head_dim=c.head_dim or None,
        )  # fmt: skip
        self.fc_norm = nn.ModuleList(RMSNorm(wide, c.norm_eps) for _ in c.features) if c.fc_norm else None
        self.fused_norm = RMSNorm(reads, c.norm_eps) if c.norm_before_fc else None
        self.mask_hidden = nn.Parameter(torch.zeros(1, 1, reads)) if c.parallel else None
        self.more = nn.ModuleDict({str(i): Deeper(c) for i in range(1, c.layers)})
        self.embed_norm = _norm(c, c.embed_norm or both)
        self.input_norm = _norm(c, c.input_norm)
        self.feature_norm = _norm(c, both)
        self.out_norm = _norm(c, c.out_norm or c.draft_vocab > 0)
        self.head = head_of(c.hidden, c.draft_vocab)

    def fit(self, target: TargetInfo, given: Options) -> EagleDrafter:
        """The same weights with the user's options, on the target's device.

        Raises ValueError: the drafter was made for another target, or does not have an option; the message says why.
        """
        options = self.chosen(given)
        check_fit(self.config, target)
        if options.prune and target.ends is None:
            raise ValueError("prune skips visual tokens of a prompt, and the prompt of an image generation has none")
        return placed(self, target, options)

    def chosen(self, given: Options) -> TreeOptions:
        """The options: the user's values, and the config's defaults for the others.

        Raises ValueError: an option that it does not have, or values that contradict each other or its head.
        """
        c, defaults = self.config, {"draft_vocab": self.config.proposes} if self.config.proposes else {}
        options = TreeOptions.like(c.shape).with_({**defaults, **given}, self.method)
        if options.named and c.draft_vocab:
            raise ValueError(f"this drafter has a head of its own, with {c.draft_vocab} rows; leave draft_vocab out")
        if options.draws and c.draft_vocab:
            raise ValueError("draws=True needs the target's own head; this drafter has one of its own")
        if options.draws and options.named:
            raise ValueError("draws=True needs the target's whole head; set draft_vocab='all', or draws=False")
        return options

    def inputs(self, embeds: Tensor, features: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        embeds = self.embed_norm(embeds)
        if self.config.parallel_norm:
            own = features.shape[-1] == self.config.hidden and len(self.config.features) > 1
            residual = features if own else self.fc(self._normed(features))
            normed = self.feature_norm(residual)
            return torch.cat([embeds, normed], -1), normed if self.config.norm_residual else residual
        residual = self.fc(torch.cat([embeds, features], -1))
        return self.input_norm(residual), residual

    def _normed(self, features: Tensor) -> Tensor:
        """The target's features [B, n, F] after the norms before `fc`."""
        if self.fused_norm is not None:
            features = self.fused_norm(features)
        if self.fc_norm is None:
            return features
        parts = features.chunk(len(self.fc_norm), -1)
        return torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)

    def logits(self, hidden: Tensor, target: Target) -> Tensor:
        normed = not self.head.own or self.config.norm_output
        return self.head.logits(hidden if normed else self.out_norm(hidden), target)

    def carry(self, z: Tensor) -> Tensor:
        """A drafter with its own head feeds back its output before the head's norm, as EAGLE-3 does."""
        return self.out_norm(z) if not self.head.own or self.config.norm_output else z

    # -- mask rows ---------------------------------------------------------------------------------------------------

    def levels(self, session: SessionView[FeatureMemory], target: Target, f: Tensor) -> Tensor | None:
        """The logits of all levels from f [B, 1, H] and mask rows, with `parallel`."""
        if self.mask_hidden is None:
            return None
        if self.options.depth == 1:
            return self.logits(f, target)
        n = self.options.depth - 1
        ids = session.pending[:, None].expand(-1, n)
        embeds = target.embed(torch.full_like(ids, self.config.mask_token))
        seen, memory = chain(n, ids.device).ancestors.expand(len(ids), n, n), session.memory
        masks = self.mask_hidden.expand(len(ids), n, -1)
        return self.logits(torch.cat([f, self._read(memory, embeds, masks, memory.lengths, 0, seen)], 1), target)


class Deeper(nn.Module):
    """A plain Llama layer after EAGLE-3's."""

    def __init__(self, c: EagleConfig) -> None:
        super().__init__()
        self.input_norm = RMSNorm(c.hidden, c.norm_eps)
        self.block = Block(c.hidden, c.intermediate, c.heads, c.kv_heads, c, c.norm_eps, head_dim=c.head_dim or None)

    def forward(self, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        return self.block(self.input_norm(x), x, positions, attend)  # type: ignore[no-any-return]


def _norm(config: EagleConfig, present: bool) -> nn.Module:
    return RMSNorm(config.hidden, config.norm_eps) if present else nn.Identity()
