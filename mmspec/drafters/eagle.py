"""EAGLE: one layer that continues the target's own features; EAGLE-1/2 (final feature) and EAGLE-3 (three layers)."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from mmspec.drafters import static_trees as shapes
from mmspec.drafters.blocks import Attend, Block, RMSNorm
from mmspec.drafters.draft_vocab import DraftVocab
from mmspec.drafters.feature import FeatureDrafter
from mmspec.drafters.options import ALL, TreeOptions, grown
from mmspec.drafters.rope import Rope
from mmspec.tree import Expand, chain, marginal
from mmspec.types import FINAL, Target, TargetInfo, Tree

_PADDED = 1.01  # some targets have a few more embeddings than others: LLaVA 32000 by its authors, 32064 in transformers


@dataclass(frozen=True)
class EagleConfig(Rope):
    """Shapes and switches of one EAGLE drafter; the switches are what the published layouts differ in. Rotary positions
    are said by what it is besides, a Rope.

    Attributes:
        hidden, intermediate, heads, kv_heads, head_dim, vocab, norm_eps: as in Llama.
        features: FINAL (−1) for the target's final hidden state (EAGLE-1/2), or the decoder layers whose inputs are
            read (EAGLE-3: 2, L//2, L−3).
        target_hidden: width of the target's features, where it is not `hidden`.
        parallel_norm: EAGLE-3's layer: attention reads [norm(embedding); norm(feature)].
        norm_residual: in EAGLE-3's layer the residual is the normed feature (`norm_before_residual` of speculators).
        input_norm: norm before the attention (absent in EAGLE-1/2's only layer).
        embed_norm, out_norm: norm of the embedding, and of the output feature before the head.
        layers: how many; the second and later ones are plain, and need a head of its own.
        fc_norm, norm_before_fc: norms of the target's features, of each by itself and of all together, before `fc`.
        norm_output: the output is normed before it is fed back, not only before the head (EAGLE-3.1).
        parallel, mask_token: rows that carry `mask_hidden` and this token's embedding foretell all further tokens in
            one pass (P-EAGLE).
        draft_vocab: rows of the drafter's own head; 0: the target's head is used.
        target, target_revision: what it was trained for.
        depth, width, size, tree, draws: how it recommends to draft (see TreeOptions).
    """

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocab: int
    head_dim: int = 0
    norm_eps: float = 1e-6
    features: tuple[int, ...] = (FINAL,)
    target_hidden: int = 0
    parallel_norm: bool = False
    norm_residual: bool = False
    input_norm: bool = False
    embed_norm: bool = False
    out_norm: bool = False
    layers: int = 1
    fc_norm: bool = False
    norm_before_fc: bool = False
    norm_output: bool = False
    parallel: bool = False
    mask_token: int = 0
    fc_bias: bool = True
    qkv_bias: bool = False
    draft_vocab: int = 0
    target: str = ""
    target_revision: str = ""
    depth: int = 5
    width: int = 8
    size: int = 32
    tree: str = shapes.DYNAMIC
    draws: bool = False

    def __post_init__(self) -> None:
        self.check(self.head_dim or self.hidden // self.heads)
        later = self.layers > 1 or self.parallel or self.fc_norm or self.norm_before_fc or self.norm_output
        if later and not (self.parallel_norm and self.draft_vocab):
            raise ValueError(
                "several layers, norms of features and mask rows need EAGLE-3's layer and a head of its own"
            )

    def only_final(self, method: str) -> None:
        """Refuse what a method that is built on EAGLE-1/2's layer has no place for.

        Raises:
            ValueError: EAGLE-3's layer, other features than the target's final one, or rope "2d".
        """
        wide = self.target_hidden in (0, self.hidden)
        if self.parallel_norm or self.features != (FINAL,) or not wide or self.rope != "1d" or self.mrope:
            raise ValueError(
                f"{method} continues the target's final feature, as wide as its embeddings, in EAGLE-1/2's layer with "
                f"rope '1d'; got features {self.features}, target_hidden {self.target_hidden}, parallel_norm "
                f"{self.parallel_norm}, rope {self.rope!r}"
            )

    @classmethod
    def of(cls, values: dict[str, Any]) -> EagleConfig:
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ValueError(
                f"config.json has unknown fields {', '.join(unknown)}; an EAGLE config has {sorted(known)}"
            )
        frozen: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        return cls(**frozen)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class EagleDrafter(FeatureDrafter):
    """Autoregression on features (Li et al. 2024, EAGLE §3; EAGLE-2 §4 for the tree; 2025, EAGLE-3 §3)."""

    method = "eagle"
    Config = EagleConfig
    draft_ids: Tensor

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self.config = c = config
        self.options = self.chosen({})
        reads = len(c.features) * (c.target_hidden or c.hidden)
        self.fc = nn.Linear(reads if c.parallel_norm else c.hidden + reads, c.hidden, bias=c.fc_bias)
        self.block = Block(
            c.hidden, c.intermediate, c.heads, c.kv_heads, c, c.norm_eps,
            inputs=2 if c.parallel_norm else 1, qkv_bias=c.qkv_bias, head_dim=c.head_dim or None,
        )  # fmt: skip
        both = c.parallel_norm
        wide = c.target_hidden or c.hidden
        self.fc_norm = nn.ModuleList(RMSNorm(wide, c.norm_eps) for _ in c.features) if c.fc_norm else None
        self.fused_norm = RMSNorm(reads, c.norm_eps) if c.norm_before_fc else None
        self.mask_hidden = nn.Parameter(torch.zeros(1, 1, reads)) if c.parallel else None
        self.more = nn.ModuleDict({str(i): Deeper(c) for i in range(1, c.layers)})
        self.embed_norm = _norm(c, c.embed_norm or both)
        self.input_norm = _norm(c, c.input_norm)
        self.feature_norm = _norm(c, both)
        self.out_norm = _norm(c, c.out_norm or c.draft_vocab > 0)
        self.lm_head: nn.Linear | None = None
        if c.draft_vocab:
            self.lm_head = nn.Linear(c.hidden, c.draft_vocab, bias=False)
            self.register_buffer("draft_ids", torch.arange(c.draft_vocab))  # target id of each row of the head

    def fit(self, target: TargetInfo, given: Mapping[str, Any]) -> EagleDrafter:
        """The same weights with the user's options, on the target's device.

        Raises:
            ValueError: the drafter was made for another target, or has no use for an option; the message says why.
        """
        options = self.chosen(given)
        check_fit(self.config, target)
        fitted: EagleDrafter = placed(self, target)
        most = options.branches
        fitted.options = options
        fitted.vocab = None if options.draft_vocab == ALL else DraftVocab.of(options.draft_vocab, target)
        if fitted.vocab is not None and len(fitted.vocab.ids) < most:
            raise ValueError(f"a tree with {most} branches per node needs a draft_vocab of as many tokens; lower width")
        return fitted

    def chosen(self, given: Mapping[str, Any]) -> TreeOptions:
        """What the user gave, elsewhere what its config recommends.

        Raises:
            ValueError: an option that it does not have, or values that do not go together or not with its head.
        """
        c, options = self.config, grown(self.config, given, self.method, TreeOptions())
        if options.draft_vocab != ALL and c.draft_vocab:
            raise ValueError(f"this drafter has a head of its own, with {c.draft_vocab} rows; leave draft_vocab out")
        if options.draws and c.draft_vocab:
            raise ValueError("draws=True needs the target's own head; this drafter has one of its own")
        if options.draws and options.draft_vocab != ALL:
            raise ValueError("draws=True needs all of the target's head; leave draft_vocab out, or give draws=False")
        return options

    @property
    def own_head(self) -> bool:
        return self.lm_head is not None

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
        """The target's features [B, n, F] as `fc` reads them."""
        if self.fused_norm is not None:
            features = self.fused_norm(features)
        if self.fc_norm is None:
            return features
        parts = features.chunk(len(self.fc_norm), -1)
        return torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)

    def logits(self, hidden: Tensor, target: Target) -> Tensor:
        if self.lm_head is not None:
            return self.lm_head(hidden if self.config.norm_output else self.out_norm(hidden))
        return target.head(hidden) if self.vocab is None else target.head(hidden, self.vocab)

    def carry(self, z: Tensor) -> Tensor:
        """With a head of its own the drafter hands on what stands before that head's norm, as EAGLE-3 does."""
        return self.out_norm(z) if self.lm_head is None or self.config.norm_output else z

    # -- mask rows ---------------------------------------------------------------------------------------------------

    def _levels(self, session: Any, target: Target, f: Tensor) -> Tensor:
        """Logits [B, depth, V_d] of the tokens at the levels below the root: of f [B, 1, H], and of rows of masks."""
        if self.options.depth == 1 or self.mask_hidden is None:
            return self.logits(f, target)
        n = self.options.depth - 1
        ids = session.pending[:, None].expand(-1, n)
        embeds = target.embed(torch.full_like(ids, self.config.mask_token))
        seen, memory = chain(n, ids.device).ancestors.expand(len(ids), n, n), session.memory
        masks = self.mask_hidden.expand(len(ids), n, -1)
        return self.logits(torch.cat([f, self._read(memory, embeds, masks, memory.lengths, 0, seen)], 1), target)

    def _chain(self, session: Any, target: Target, f: Tensor) -> tuple[Tensor, Tree]:
        if not self.config.parallel:
            return super()._chain(session, target, f)
        tokens = self.to_target(self._levels(session, target, f).argmax(-1))
        return tokens, chain(tokens.shape[1] + 1, f.device).expand(len(f))

    def _growth(self, session: Any, target: Target, f: Tensor) -> tuple[Tensor, Expand]:
        if not self.config.parallel:
            return super()._growth(session, target, f)
        return marginal(self._levels(session, target, f).float().log_softmax(-1))

    def to_target(self, ids: Tensor) -> Tensor:
        if self.lm_head is not None:
            return self.draft_ids[ids]
        return ids if self.vocab is None else self.vocab.ids[ids]

    def to_draft(self, logits: Tensor) -> Tensor:
        """The target's logits [..., V] at the drafter's own vocabulary."""
        return logits if self.lm_head is None else logits[..., self.draft_ids]


class Deeper(nn.Module):
    """A plain Llama layer behind EAGLE-3's."""

    def __init__(self, c: EagleConfig) -> None:
        super().__init__()
        self.input_norm = RMSNorm(c.hidden, c.norm_eps)
        self.block = Block(c.hidden, c.intermediate, c.heads, c.kv_heads, c, c.norm_eps, head_dim=c.head_dim or None)

    def forward(self, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        return self.block(self.input_norm(x), x, positions, attend)  # type: ignore[no-any-return]


def _norm(config: EagleConfig, there: bool) -> nn.Module:
    return RMSNorm(config.hidden, config.norm_eps) if there else nn.Identity()


def check_fit(c: Any, target: TargetInfo) -> None:
    """Refuse a target that a drafter with this config was not made for.

    Raises:
        ValueError: the message says what differs.
    """
    wanted = {
        "hidden size": (c.target_hidden or c.hidden, target.hidden),
        "embedding width": (c.hidden, target.embedding),
    }
    if not c.vocab <= target.vocab <= _PADDED * c.vocab:
        wanted["vocabulary"] = (c.vocab, target.vocab)
    if not c.draft_vocab:
        wanted["head width"] = (c.hidden, target.hidden)
    wrong = [f"{name} {mine} (target: {theirs})" for name, (mine, theirs) in wanted.items() if mine != theirs]
    wrong += [f"layer {i} (target: {target.layers} layers)" for i in c.features if i >= target.layers]
    if wrong:
        raise ValueError(
            f"this drafter was made for {c.target or 'another target'} and does not fit {target.name}: "
            f"{', '.join(wrong)}. Use a drafter trained for this target, or drafter='ngram', which fits any"
        )


def placed(drafter: Any, target: TargetInfo) -> Any:
    """A drafter for itself, on the target's device and in its dtype, which leaves the given one as it is.

    Where nothing moves, both have the same layers; else those of the new one are copies.
    """
    own = [*drafter.parameters(), *drafter.buffers()]
    stays = all(t.device == target.device and (t.dtype == target.dtype or not t.is_floating_point()) for t in own)
    if stays:
        same = copy.copy(drafter)
        same.training = False
        return same
    memo: dict[int, Any] = {id(drafter.vocab): None}
    for t in own:  # aliases, whose data can go elsewhere
        alias = t.detach()
        memo[id(t)] = nn.Parameter(alias, t.requires_grad) if isinstance(t, nn.Parameter) else alias
    return copy.deepcopy(drafter, memo).to(device=target.device, dtype=target.dtype).eval()
