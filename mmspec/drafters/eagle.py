"""EAGLE: one layer that continues the target's own features. Covers EAGLE-1/2 (final feature) and EAGLE-3 (three layers)."""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmspec.config import SpecConfig
from mmspec.drafters.blocks import Block, Memory, RMSNorm, attention, path_after
from mmspec.registry import TargetInfo
from mmspec.slots import Lengths, Slots
from mmspec.tree import chain, from_parents, grow
from mmspec.types import FINAL, Draft, Prompt, Target, Tree


@dataclass(frozen=True)
class EagleConfig:
    """Shapes and switches of one EAGLE drafter; the switches are what the published layouts differ in.

    Attributes:
        hidden, intermediate, heads, kv_heads, head_dim, vocab, rope_theta, norm_eps: as in Llama.
        features: FINAL (−1) for the target's final hidden state (EAGLE-1/2), or the decoder layers whose inputs are
            read (EAGLE-3: 2, L//2, L−3).
        target_hidden: width of the target's features, where it is not `hidden`.
        parallel_norm: EAGLE-3's layer: attention reads [norm(embedding); norm(feature)].
        input_norm: norm before the attention (absent in EAGLE-1/2's only layer).
        embed_norm, out_norm: norm of the embedding, and of the output feature before the head.
        draft_vocab: rows of the drafter's own head; 0: the target's head is used.
        target, target_revision: what it was trained for.
        depth, width, size: the tree it recommends (see SpecConfig).
    """

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocab: int
    head_dim: int = 0
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6
    features: tuple[int, ...] = (FINAL,)
    target_hidden: int = 0
    parallel_norm: bool = False
    input_norm: bool = False
    embed_norm: bool = False
    out_norm: bool = False
    fc_bias: bool = True
    qkv_bias: bool = False
    draft_vocab: int = 0
    target: str = ""
    target_revision: str = ""
    depth: int = 5
    width: int = 8
    size: int = 32

    @classmethod
    def of(cls, values: dict[str, Any]) -> EagleConfig:
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ValueError(f"config.json has unknown fields {', '.join(unknown)}; an EAGLE config has {sorted(known)}")
        if "features" in values:
            values = {**values, "features": tuple(values["features"])}
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class _Frontier:
    """Growth under way: the last level's features, and who is whose ancestor since the root."""

    hidden: Tensor  # [B, k, H]
    seen: Tensor  # bool [B, k, M]
    appended: int = 0
    level: int = 0
    extra: dict[str, Any] = field(default_factory=dict)


class EagleDrafter(nn.Module):
    """Autoregression on features (Li et al. 2024, EAGLE §3; EAGLE-2 §4 for the tree; 2025, EAGLE-3 §3)."""

    method = "eagle"

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self.config = c = config
        self.options = SpecConfig().filled(c.depth, c.width, c.size)
        reads = len(c.features) * (c.target_hidden or c.hidden)
        self.fc = nn.Linear(reads if c.parallel_norm else c.hidden + reads, c.hidden, bias=c.fc_bias)
        self.block = Block(
            c.hidden, c.intermediate, c.heads, c.kv_heads, c.rope_theta, c.norm_eps,
            inputs=2 if c.parallel_norm else 1, qkv_bias=c.qkv_bias, head_dim=c.head_dim or None,
        )  # fmt: skip
        wanted = {
            "embed_norm": c.embed_norm or c.parallel_norm,
            "input_norm": c.input_norm,
            "feature_norm": c.parallel_norm,
            "out_norm": c.out_norm or c.draft_vocab > 0,
        }
        for name, there in wanted.items():
            setattr(self, name, RMSNorm(c.hidden, c.norm_eps) if there else nn.Identity())
        if c.draft_vocab:
            self.lm_head = nn.Linear(c.hidden, c.draft_vocab, bias=False)
            self.register_buffer("draft_ids", torch.arange(c.draft_vocab))  # target id of each row of the head

    @property
    def features(self) -> tuple[int, ...]:
        return self.config.features

    @property
    def nodes(self) -> int:
        return self.options.size or 1

    def fit(self, target: TargetInfo, options: SpecConfig) -> EagleDrafter:
        """The same weights with the user's options, on the target's device.

        Raises:
            ValueError: the drafter was made for another target; the message says which shapes differ.
        """
        c = self.config
        wanted = {"hidden size": (c.target_hidden or c.hidden, target.hidden), "vocabulary": (c.vocab, target.vocab)}
        if not c.draft_vocab:
            wanted["head width"] = (c.hidden, target.hidden)
        wrong = [f"{name} {mine} (target: {theirs})" for name, (mine, theirs) in wanted.items() if mine != theirs]
        wrong += [f"layer {i} (target: {target.layers} layers)" for i in c.features if i >= target.layers]
        if wrong:
            raise ValueError(
                f"this drafter was made for {c.target or 'another target'} and does not fit {target.name}: "
                f"{', '.join(wrong)}. Use a drafter trained for this target, or drafter='ngram', which fits any"
            )
        fitted = copy.copy(self.to(device=target.device, dtype=target.dtype).eval())
        fitted.options = options.filled(c.depth, c.width, c.size)
        return fitted

    # -- the network -------------------------------------------------------------------------------------------------

    def inputs(self, embeds: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """(what attention reads, the residual) from embeddings [B, n, H] and features: the target's [B, n, F] or own."""
        embeds = self.embed_norm(embeds)
        if self.config.parallel_norm:
            own = features.shape[-1] == self.config.hidden and len(self.config.features) > 1
            residual = features if own else self.fc(features)
            return torch.cat([embeds, self.feature_norm(residual)], -1), residual
        residual = self.fc(torch.cat([embeds, features], -1))
        return self.input_norm(residual), residual

    def logits(self, hidden: Tensor, target: Target) -> Tensor:
        """Logits [..., V_d] over the draft vocabulary from output features [..., H]."""
        return self.lm_head(self.out_norm(hidden)) if self.config.draft_vocab else target.head(hidden)

    def carry(self, z: Tensor) -> Tensor:
        """The layer's output as the feature it stands for; the norm belongs to the head where that is the drafter's own."""
        return z if self.config.draft_vocab else self.out_norm(z)

    def to_target(self, ids: Tensor) -> Tensor:
        return self.draft_ids[ids] if self.config.draft_vocab else ids

    def unroll(self, embeds: Tensor, features: Tensor, valid: Tensor, steps: int) -> list[Tensor]:
        """Training-time test: what the drafter would predict `steps` tokens ahead, from every position at once.

        Step i at base row j reads its own step i−1 output at j and the embedding i tokens later; it attends to the real
        rows up to j and to its own rows of steps 1..i, exactly as in decoding (EAGLE-3, §3.2).

        Args:
            embeds: [B, T, H], embedding of the token after each row.
            features: [B, T, F], the target's features at each row.
            valid: bool [B, T], false on padding.
            steps: ≥ 1.

        Returns:
            `steps` tensors [B, T, H]; entry i at row j predicts the feature i + 1 rows later.
        """
        B, T, _ = embeds.shape
        device = embeds.device
        causal = torch.ones(T, T, dtype=torch.bool, device=device).tril()
        own = torch.eye(T, dtype=torch.bool, device=device)
        masks, keys, values, outputs = [causal & valid[:, None] | own], [], [], []
        positions = torch.arange(T, device=device)[None]
        for step in range(steps):

            def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                keys.append(k)
                values.append(v)
                return attention(q, torch.cat(keys, 2), torch.cat(values, 2), torch.cat(masks, 2))

            shifted = torch.cat([embeds[:, step:], embeds.new_zeros(B, step, embeds.shape[2])], 1)
            x, residual = self.inputs(shifted, features)
            features = self.carry(self.block(x, residual, positions + step, attend))
            outputs.append(features)
            masks.append(own.expand(B, T, T))
        return outputs

    # -- drafting ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def start(self, session: Any, target: Target, prompt: Prompt) -> Memory:
        """Read the prompt: row j pairs the features at j with the embedding at j + 1; the last one waits for its token."""
        assert prompt.embeds is not None and prompt.hidden is not None
        B, L = prompt.ids.shape
        valid = prompt.valid[:, :-1]
        padded = not bool(valid.all())
        zero = Lengths.of([0] * B, valid.device)
        memory = Memory(Slots(L + 256), zero, torch.zeros(B, dtype=torch.long, device=valid.device), valid, padded)
        if L > 1:
            causal = torch.ones(L - 1, L - 1, dtype=torch.bool, device=valid.device).tril()
            seen = (causal & valid[:, None]) | torch.eye(L - 1, dtype=torch.bool, device=valid.device)
            self._read(memory, prompt.embeds[:, 1:], prompt.hidden[:, :-1], memory.lengths, 0, seen)
            memory.lengths = Lengths.of([L - 1] * B, valid.device)
            memory.positions = memory.positions + (L - 1)
        return memory

    def _read(
        self, memory: Memory, embeds: Tensor, features: Tensor, at: Lengths, ahead: Tensor | int, seen: Tensor | None
    ) -> Tensor:
        """Run n rows [B, n]: appended at `at`, at positions `ahead` of the memory's next one; returns features."""
        steps = torch.arange(embeds.shape[1], device=embeds.device) if isinstance(ahead, int) else ahead
        x, residual = self.inputs(embeds, features.to(embeds.dtype))
        return self.carry(self.block(x, residual, memory.positions[:, None] + steps, memory.attend(at, seen)))

    @torch.no_grad()
    def propose(self, session: Any, target: Target) -> Draft:
        memory: Memory = session.memory
        hidden, follow, count = path_after(session)
        W = follow.shape[1]
        seen = None if W == 1 else chain(W, follow.device).ancestors.expand(len(follow), W, W)
        out = self._read(memory, target.embed(follow), hidden, memory.lengths, 0, seen)
        memory.lengths = memory.lengths.plus(session.last.counts, count)
        memory.positions = memory.positions + count
        f = out.gather(1, (count - 1)[:, None, None].expand(-1, 1, out.shape[2]))  # [B, 1, H]
        below, tree = self._chain(session, target, f) if self.options.width == 1 else self._tree(session, target, f)
        return Draft(torch.cat([session.pending[:, None], below], 1), tree)

    def _chain(self, session: Any, target: Target, f: Tensor) -> tuple[Tensor, Tree]:
        memory, depth, tokens = session.memory, self.options.depth or 1, []
        for level in range(depth):
            tokens.append(self.to_target(self.logits(f, target).argmax(-1)))  # [B, 1]
            if level + 1 < depth:
                at = Lengths(tuple(n + level for n in memory.lengths.host), memory.lengths.device + level)
                here = torch.full((1,), level, device=f.device)
                f = self._read(memory, target.embed(tokens[-1]), f, at, here, None)
        return torch.cat(tokens, 1), chain(depth + 1, f.device).expand(len(f))

    def _tree(self, session: Any, target: Target, f: Tensor) -> tuple[Tensor, Tree]:
        memory, o = session.memory, self.options
        width, depth = o.width or 1, o.depth or 1
        size = min(o.size or 1, 1 + width + (depth - 1) * width**2)
        state = _Frontier(f.expand(-1, width, -1), torch.zeros(len(f), width, 0, dtype=torch.bool, device=f.device))

        def expand(tokens: Tensor, came_from: Tensor) -> Tensor:
            k, n = tokens.shape[1], state.appended
            before = state.hidden.gather(1, came_from[:, :, None].expand(-1, -1, f.shape[2]))
            seen = state.seen.gather(1, came_from[:, :, None].expand(-1, -1, n))
            own = torch.eye(k, dtype=torch.bool, device=f.device).expand(len(f), k, k)
            state.seen = torch.cat([seen, own], 2)
            at = Lengths(tuple(x + n for x in memory.lengths.host), memory.lengths.device + n)
            here = torch.full((k,), state.level, device=f.device)
            embeds = target.embed(self.to_target(tokens))
            state.hidden = self._read(memory, embeds, before, at, here, state.seen)
            state.appended, state.level = n + k, state.level + 1
            return self.logits(state.hidden, target).float().log_softmax(-1)

        first = self.logits(f[:, 0], target).float().log_softmax(-1)
        below, tree = grow(first, expand, width, depth, size)
        return self.to_target(below), tree

    # -- files -------------------------------------------------------------------------------------------------------

    def save_pretrained(self, folder: str | Path, layout: str = "mmspec") -> None:
        """Write config.json and model.safetensors, in our own layout or in that of `speculators`."""
        from mmspec.checkpoints.save import save_drafter

        save_drafter(self, folder, layout)

    @classmethod
    def from_pretrained(cls, name_or_path: str | Path, **options: Any) -> EagleDrafter:
        """Read a drafter from a folder or the hub; see `mmspec.load_drafter`."""
        from mmspec.checkpoints.load import load_drafter

        return load_drafter(name_or_path, **options)

    def push_to_hub(self, repo_id: str, **options: Any) -> str:
        """Upload to the hub, safetensors only; returns the address."""
        from mmspec.checkpoints.save import push_drafter

        return push_drafter(self, repo_id, **options)
