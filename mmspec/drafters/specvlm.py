"""SpecVLM: an EAGLE drafter that reads compressed images; a gate selects or weighs compressors, or all are used."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmspec.drafters.blocks import RMSNorm
from mmspec.drafters.eagle import EagleConfig, EagleDrafter
from mmspec.drafters.layer import EncodedPrompt
from mmspec.drafters.spans import Span, runs, shares, spans_of, splice, spliced
from mmspec.functional import Linear
from mmspec.types import gather_rows

BRANCHES = ("prune", "pool", "conv", "resampler", "text")
SELECT, WEIGHT, CONCAT = "select", "weight", "concat"  # the paper's terms
WEIGHED = ("prune", "pool", "conv")  # branches whose rows can be summed, since one ratio gives the same number of rows


@dataclass(frozen=True)
class SpecVlmConfig(EagleConfig):
    """An EagleConfig and the compressors; a ratio is the number of visual rows per compressed row.

    Attributes:
        branches: the compressors, of BRANCHES; none: every visual row is kept (the paper's EagleVLM).
        gate: "select" chooses a branch for each prompt; "weight" sums branches of WEIGHED, all at `conv_ratio`, by the
            softmax of the gate's logits; "concat" keeps the rows of every branch, in the order of `branches` (the
            paper's is coarse to fine); the name of a branch: always that one.
        prune_ratio, pool_ratio, conv_ratio: as published; the convolution has conv_ratio · hidden² weights.
        queries: number of rows per image of the resampler.
        resampler_heads, resampler_width: of its attention, and the width of all heads together; 0: `hidden`.
        gate_width: of the gate's hidden layer.
    """

    input_norm: bool = True
    branches: tuple[str, ...] = BRANCHES
    gate: str = SELECT
    prune_ratio: int = 20
    pool_ratio: int = 20
    conv_ratio: int = 3
    queries: int = 2
    resampler_heads: int = 1
    resampler_width: int = 0
    gate_width: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        self.only_final("SpecVLM")
        unknown = sorted(set(self.branches) - set(BRANCHES))
        if unknown or len(set(self.branches)) < len(self.branches):
            raise ValueError(f"branches are some of {', '.join(BRANCHES)}, each once; got {self.branches!r}")
        if self.gate not in (SELECT, WEIGHT, CONCAT, *self.branches):
            modes = f"{SELECT!r}, {WEIGHT!r}, {CONCAT!r}"
            raise ValueError(f"gate is {modes} or one of the branches {self.branches!r}; got {self.gate!r}")
        if self.gate == WEIGHT and (len(self.branches) < 2 or not set(self.branches) <= set(WEIGHED)):
            raise ValueError(f"gate {WEIGHT!r} sums two or all of the branches {WEIGHED!r}; got {self.branches!r}")
        for name in ("prune_ratio", "pool_ratio", "conv_ratio", "queries", "resampler_heads", "gate_width"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be ≥ 1; got {getattr(self, name)!r}")
        if (self.resampler_width or self.hidden) % self.resampler_heads:
            raise ValueError(f"resampler_heads={self.resampler_heads} does not divide the width of its attention")


class Convolution(nn.Module):
    """Merges r neighbouring rows into one: Conv1d with kernel and stride r, padded by repeating the last row.

    The weight [H, r·H] is that of the convolution, [H, H, r], taps first; initially it computes the mean.
    """

    def __init__(self, hidden: int, ratio: int) -> None:
        super().__init__()
        self.ratio = ratio
        self.taps = Linear(ratio * hidden, hidden)
        with torch.no_grad():
            self.taps.weight.copy_(torch.eye(hidden).repeat(1, ratio) / ratio)
            self.taps.bias.zero_()

    def count(self, length: Tensor) -> Tensor:
        return (length + self.ratio - 1) // self.ratio

    def forward(self, rows: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """Compress rows [R, n, H], `valid` [R, n], to [R, C, H], and the last index that each covers, [R, C]."""
        length = valid.sum(1)
        taps = torch.arange(int(self.count(length).max()) * self.ratio, device=rows.device).view(1, -1, self.ratio)
        taps = taps.minimum(length[:, None, None] - 1)  # [R, C, r]
        windows = gather_rows(rows, taps.flatten(1)).view(*taps.shape[:2], -1)
        return self.taps(windows), taps[..., -1]


class Resampler(nn.Module):
    """A few learned queries that attend to all rows of an image: one normed cross-attention layer with residual."""

    def __init__(self, config: SpecVlmConfig) -> None:
        super().__init__()
        hidden, width = config.hidden, config.resampler_width or config.hidden
        self.heads = config.resampler_heads
        self.queries = nn.Parameter(0.02 * torch.randn(config.queries, hidden))
        self.norm, self.query_norm = RMSNorm(hidden, config.norm_eps), RMSNorm(hidden, config.norm_eps)
        self.q = Linear(hidden, width, bias=False)
        self.kv = Linear(hidden, 2 * width, bias=False)
        self.out = Linear(width, hidden, bias=False)

    def count(self, length: Tensor) -> Tensor:
        return length.clamp(max=len(self.queries))

    def forward(self, rows: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """Compress rows [R, n, H], `valid` [R, n], to [R, C, H], and the indices that they take, the last ones."""
        count = self.count(valid.sum(1))
        q = self.q(self.query_norm(self.queries)).expand(len(rows), -1, -1)
        k, v = self.kv(self.norm(rows)).chunk(2, -1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=valid[:, None, None])
        summaries = self.queries + self.out(o.transpose(1, 2).flatten(2))
        place = (valid.sum(1) - count)[:, None] + torch.arange(int(count.max()), device=rows.device)
        return summaries[:, : place.shape[1]], place.minimum(valid.sum(1)[:, None] - 1)


class Gate(nn.Module):
    """Chooses the compressor for a question: two layers on the mean feature of the prompt's text after its last image.

    Attributes:
        heat: if the gate is trained jointly, the temperature of the Gumbel-softmax that a branch is drawn from; None:
            branches are drawn uniformly, and the gate is trained afterwards.
    """

    heat: float | None = None

    def __init__(self, reads: int, config: SpecVlmConfig) -> None:
        super().__init__()
        self.eps = config.norm_eps
        self.down = Linear(reads, config.gate_width)
        self.up = Linear(config.gate_width, len(config.branches))
        nn.init.zeros_(self.up.weight)
        nn.init.zeros_(self.up.bias)

    def question_of(self, features: Tensor, visual: Tensor, valid: Tensor) -> Tensor:
        """The question vector [B, F] of prompts, from features [B, T, F]; `valid` [B, T] is true on the prompt."""
        here = question(visual, valid).to(features.dtype)[..., None]
        normed = F.rms_norm(features, features.shape[-1:], eps=self.eps)
        return (normed * here).sum(1) / here.sum(1).clamp(min=1)

    def forward(self, question: Tensor) -> Tensor:
        """Logits [B, branches] of questions [B, F]."""
        return self.up(F.silu(self.down(question)))

    def draw(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """A branch [B] for each prompt by the Gumbel-softmax, and ones [B, 1] with the gradient of its probability.

        Multiplied with the attention's input at the branch's rows, this factor tells the gate, to first order, how much
        better they are than rows of zeros, and so than "text", which leaves none.
        """
        assert self.heat is not None, "only in joint training"
        shares = F.gumbel_softmax(logits, self.heat)
        choice = shares.argmax(-1)
        chosen = shares.gather(1, choice[:, None])
        return choice, chosen - chosen.detach() + 1


def question(visual: Tensor, valid: Tensor) -> Tensor:
    """bool [B, T]: text rows after the last visual one; if there are none, all text rows.

    The row directly after an image pairs its last visual feature with a word, and counts as part of the image.
    """
    seen = (visual > 0) & valid
    until = seen.flip(1).cumsum(1).flip(1) > 0  # this row or a later one is visual
    behind = valid & ~until & ~(F.pad(seen, (1, 0))[:, :-1])
    return torch.where(behind.any(1, keepdim=True), behind, valid & ~seen)


class SpecVlmDrafter(EagleDrafter):
    """EAGLE-2 with an elastic visual compressor (SpecVLM, arXiv 2509.11815, in its modes Select, Weight and Concat).

    Neither the code nor the gate's architecture was published. Ours: the paper's operators run along the rows of each
    image or frame; prune and pool work on the input of `fc`, the learned ones on its output; a row that replaces
    several has the position of the last. In training with Select each prompt goes through a random branch, so that all
    learn equally; the gate is trained afterwards from the loss of each branch (mmspec/train/gate.py), or jointly by a
    straight-through Gumbel-softmax (`Gate.heat`). The gate of Weight is trained through the weighted sum. Concat has no
    gate.
    """

    method = "specvlm"
    Config = SpecVlmConfig
    config: SpecVlmConfig
    sees = True

    def __init__(self, config: SpecVlmConfig) -> None:
        super().__init__(config)
        c, reads = config, len(config.features) * (config.target_hidden or config.hidden)
        learned = {"conv": lambda: Convolution(c.hidden, c.conv_ratio), "resampler": lambda: Resampler(c)}
        self.compressors = nn.ModuleDict({name: make() for name, make in learned.items() if name in c.branches})
        self.gate = Gate(reads, c) if c.gate in (SELECT, WEIGHT) and len(c.branches) > 1 else None

    def choose(self, features: Tensor, visual: Tensor, valid: Tensor) -> Tensor:
        """The branch [B] of each prompt, as an index into `config.branches`."""
        c = self.config
        if c.gate == SELECT and self.training:
            return torch.randint(len(c.branches), (len(features),), device=features.device)
        if c.gate == SELECT and self.gate is not None:
            return self.gate(self.gate.question_of(features, visual, valid)).argmax(-1)
        number = 0 if c.gate == SELECT else c.branches.index(c.gate)
        return torch.full((len(features),), number, device=features.device)

    def encode_prompt(
        self, embeds: Tensor, features: Tensor, visual: Tensor, valid: Tensor, positions: Tensor
    ) -> EncodedPrompt:
        spans = runs(visual * valid)
        if not self.config.branches or not spans:
            return super().encode_prompt(embeds, features, visual, valid, positions)
        rows = embeds, features, valid, positions
        if self.config.gate == WEIGHT:
            assert self.gate is not None, "there are at least two branches"
            return self.weighed(spans, self.gate(self.gate.question_of(features, visual, valid)).softmax(-1), *rows)
        if self.config.gate == CONCAT:
            return self.compressed(spans, None, *rows)
        if self.training and self.gate is not None and self.gate.heat is not None:
            choice, weight = self.gate.draw(self.gate(self.gate.question_of(features, visual, valid)))
            return self.compressed(spans, choice, *rows, weight=weight)
        return self.compressed(spans, self.choose(features, visual, valid), *rows)

    def compressed(
        self, spans: list[Span], choice: Tensor | None, embeds: Tensor, features: Tensor, valid: Tensor,
        positions: Tensor, weight: Tensor | None = None,
    ) -> EncodedPrompt:  # fmt: skip
        """The layer's inputs after the spans of each prompt went through its branch, `choice` [B], or through all
        branches (None); `weight` [B, 1] multiplies the attention's input at the compressed rows."""
        device, names = embeds.device, self.config.branches
        length = torch.tensor([stop - start for _, start, stop in spans], device=device)
        owner = torch.tensor([b for b, _, _ in spans], device=device)
        R, every = len(spans), torch.arange(len(names), device=device)
        # pairs of a span and one of its branches, in the order of their rows
        span = torch.arange(R, device=device) if choice is not None else torch.arange(R * len(names)) // len(names)
        branch = choice[owner] if choice is not None else every.repeat(R)
        counts = torch.stack([self._count(name, length) for name in names])
        count = counts[branch, span]
        first, total = count.cumsum(0) - count, int(count.sum())
        new, place = embeds.new_zeros(total, self.config.hidden), positions.new_zeros(total)
        for number in branch[count > 0].unique().tolist():
            which = (branch == number).nonzero()[:, 0]
            some = [spans[i] for i in span[which].tolist()]
            (e, real), (f, _), (at, _) = (spans_of(t, some) for t in (embeds, features, positions))
            rows, last = self._branch(names[number], e, f, real, count[which])
            step = torch.arange(rows.shape[1], device=device)
            real = step < count[which, None]
            to = (first[which, None] + step)[real]
            new[to], place[to] = rows[real].to(new), at.gather(1, last)[real]
        used = {(int(b), number) for b, number in zip(owner[span].tolist(), branch.tolist(), strict=True)}
        stats = {f"branch {name}": float(sum(n == number for _, n in used)) for number, name in enumerate(names)}
        left = torch.zeros_like(length).index_add_(0, span, count)
        each = None if weight is None else weight[owner].repeat_interleave(left, 0)
        return self._spliced(spans, left, new, place, (embeds, features, valid, positions), stats, each)

    def weighed(
        self, spans: list[Span], weights: Tensor, embeds: Tensor, features: Tensor, valid: Tensor, positions: Tensor
    ) -> EncodedPrompt:
        """The layer's inputs after each span was replaced by the sum of all branches by `weights` [B, branches]."""
        names, owner = self.config.branches, torch.tensor([b for b, _, _ in spans], device=embeds.device)
        (e, inside), (f, _), (at, _) = (spans_of(t, spans) for t in (embeds, features, positions))
        length, ratio = inside.sum(1), self.config.conv_ratio
        count = (length + ratio - 1) // ratio
        each = torch.stack([self._branch(name, e, f, inside, count)[0] for name in names], 1)  # [R, branches, C, H]
        rows = (weights[owner][..., None, None].to(each) * each).sum(1)
        _, last, real = shares(length, count)
        seen = weights[sorted({b for b, _, _ in spans})].sum(0).tolist()
        stats = {f"weight {name}": share for name, share in zip(names, seen, strict=True)}
        place = at.gather(1, last)[real]
        return self._spliced(spans, count, rows[real], place, (embeds, features, valid, positions), stats)

    def _spliced(
        self, spans: list[Span], count: Tensor, new: Tensor, place: Tensor, rows: tuple[Tensor, ...],
        stats: dict[str, float], weight: Tensor | None = None,
    ) -> EncodedPrompt:  # fmt: skip
        """The prompt with each span replaced by `count` [R] of the rows `new` [M, H] at positions `place` [M]."""
        embeds, features, valid, positions = rows
        index, real, source = splice(valid, spans, count.tolist())
        own = source.clamp(min=0)  # row 0 where there is none: overwritten below, or padding
        _, residual = self.inputs(gather_rows(embeds, own), gather_rows(features, own))
        replaced = (real & (source < 0))[..., None]
        residual = residual.masked_scatter(replaced, new.to(residual))
        x = self.input_norm(residual)  # would cancel a factor of the rows, so `weight` comes after it
        if weight is not None:
            x = x * torch.ones_like(x[..., :1]).masked_scatter(replaced, weight.to(x))
        return EncodedPrompt(x, residual, spliced(positions, place, index), real, source, stats=stats)

    def _branch(self, name: str, e: Tensor, f: Tensor, valid: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        """Compress R spans [R, n, …] to `count` [R] rows each by a branch: [R, C, H], and their indices [R, C]."""
        if name in self.compressors:
            return self.compressors[name](self.inputs(e, f)[1], valid)
        first, last, _ = shares(valid.sum(1), count)
        each = torch.arange(valid.shape[1], device=valid.device)
        if name == "prune" and self.training:  # random rows, as published; in drafting always the same rows
            rank = torch.rand(valid.shape, device=valid.device).masked_fill(~valid, 2.0).argsort(1).argsort(1)
            last = torch.where(rank < count[:, None], each, each[-1]).sort(1).values[:, : last.shape[1]]
        first = last if name == "prune" else first
        pick = (each >= first[..., None]) & (each <= last[..., None])
        mean = (pick / pick.sum(-1, keepdim=True)).to(e)
        return self.inputs(mean @ e, mean @ f)[1], last

    def _count(self, name: str, length: Tensor) -> Tensor:
        """Number of rows that a branch makes of spans of `length` rows."""
        if name in self.compressors:
            return self.compressors[name].count(length)  # type: ignore[operator]
        ratios = {"prune": self.config.prune_ratio, "pool": self.config.pool_ratio}
        return (length // ratios[name]).clamp(min=1) if name in ratios else torch.zeros_like(length)
