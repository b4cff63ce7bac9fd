"""SpecVLM: an EAGLE drafter that reads images through compressors: one that suits the question, a sum, or all."""

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
SELECT, WEIGHT, CONCAT = "select", "weight", "concat"  # the paper's words
WEIGHED = ("prune", "pool", "conv")  # whose rows can be summed, for at one ratio they leave as many


@dataclass(frozen=True)
class SpecVlmConfig(EagleConfig):
    """An EAGLE drafter's shapes, and the compressors that it has; ratios are visual rows for each row that stays.

    Attributes:
        branches: which of BRANCHES there are; none: every visual row is kept (the paper's EagleVLM).
        gate: "select" chooses for each prompt; "weight" sums branches of WEIGHED, all at `conv_ratio`, by the softmax
            of the gate's logits; "concat" keeps the rows of every branch, in the order of `branches` (the paper goes
            from the coarse to the fine); the name of a branch, always that one.
        prune_ratio, pool_ratio, conv_ratio: as published; the convolution has conv_ratio · hidden² weights.
        queries: rows that the resampler leaves of an image.
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
    """Neighbouring rows as one, r at a time: Conv1d with kernel and stride r, the last row repeated where they lack.

    The weight [H, r·H] is that of the convolution, [H, H, r], taps first; it begins as their mean.
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

    def forward(self, rows: Tensor, there: Tensor) -> tuple[Tensor, Tensor]:
        """Of rows [R, n, H], real where `there` [R, n]: [R, C, H], and the last place that each covers, [R, C]."""
        length = there.sum(1)
        taps = torch.arange(int(self.count(length).max()) * self.ratio, device=rows.device).view(1, -1, self.ratio)
        taps = taps.minimum(length[:, None, None] - 1)  # [R, C, r]
        windows = gather_rows(rows, taps.flatten(1)).view(*taps.shape[:2], -1)
        return self.taps(windows), taps[..., -1]


class Resampler(nn.Module):
    """A few learned queries that look at all rows of an image: one normed layer of cross-attention, with residual."""

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

    def forward(self, rows: Tensor, there: Tensor) -> tuple[Tensor, Tensor]:
        """Of rows [R, n, H], real where `there` [R, n]: [R, C, H], and the places that they take, the last ones."""
        count = self.count(there.sum(1))
        q = self.q(self.query_norm(self.queries)).expand(len(rows), -1, -1)
        k, v = self.kv(self.norm(rows)).chunk(2, -1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=there[:, None, None])
        summaries = self.queries + self.out(o.transpose(1, 2).flatten(2))
        place = (there.sum(1) - count)[:, None] + torch.arange(int(count.max()), device=rows.device)
        return summaries[:, : place.shape[1]], place.minimum(there.sum(1)[:, None] - 1)


class Gate(nn.Module):
    """Which compressor suits a question: two layers on the mean feature of the prompt's text behind its last image.

    Attributes:
        heat: while it learns along with the rest, the temperature of the Gumbel-softmax that a branch is drawn from;
            None: branches are drawn evenly, and it learns afterwards.
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
        """The question [B, F] of prompts, from features [B, T, F]; `valid` [B, T] where they are a prompt's."""
        here = question(visual, valid).to(features.dtype)[..., None]
        normed = F.rms_norm(features, features.shape[-1:], eps=self.eps)
        return (normed * here).sum(1) / here.sum(1).clamp(min=1)

    def forward(self, question: Tensor) -> Tensor:
        """Logits [B, branches] of questions [B, F]."""
        return self.up(F.silu(self.down(question)))

    def draw(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """A branch [B] of each prompt by the Gumbel-softmax, and 1 [B, 1] with the gradient of its share.

        As a factor of what attention reads of the branch's rows, this lets the gate know, to first order, how much
        better they are than rows of zeros, and so than "text", which leaves none.
        """
        assert self.heat is not None, "it learns along with the rest"
        shares = F.gumbel_softmax(logits, self.heat)
        choice = shares.argmax(-1)
        won = shares.gather(1, choice[:, None])
        return choice, won - won.detach() + 1


def question(visual: Tensor, valid: Tensor) -> Tensor:
    """bool [B, T]: text rows behind the last visual one; where there are none, all text rows.

    The row right behind an image pairs its last visual feature with a word, and counts as the image's.
    """
    seen = (visual > 0) & valid
    until = seen.flip(1).cumsum(1).flip(1) > 0  # this row or a later one is visual
    behind = valid & ~until & ~(F.pad(seen, (1, 0))[:, :-1])
    return torch.where(behind.any(1, keepdim=True), behind, valid & ~seen)


class SpecVlmDrafter(EagleDrafter):
    """EAGLE-2 with an elastic visual compressor (SpecVLM, arXiv 2509.11815, in its modes Select, Weight and Concat).

    No code was published, and nothing of the gate's shape. Ours: the paper's operators run along the rows of each image
    or frame; prune and pool work on what enters `fc`, the learned ones on what leaves it; a row that stands for several
    takes the position of the last. While Select learns, each prompt goes through a branch drawn at random, so that all
    learn alike; the gate learns afterwards from what each branch costs (mmspec/train/gate.py), or along with the rest
    by a straight-through Gumbel-softmax (`Gate.heat`). The gate of Weight is part of what is summed, and learns so.
    Concat has no gate.
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
        """The branch [B] of each prompt, by its number in `config.branches`."""
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
            assert self.gate is not None, "there are two branches at least"
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
        """What enters when the spans of each prompt go through its branch, `choice` [B], or through all of them (None);
        `weight` [B, 1] multiplies what attention reads of the rows that a branch leaves."""
        device, names = embeds.device, self.config.branches
        length = torch.tensor([stop - start for _, start, stop in spans], device=device)
        owner = torch.tensor([b for b, _, _ in spans], device=device)
        R, every = len(spans), torch.arange(len(names), device=device)
        # a span and one of its branches, in the order in which their rows enter
        span = torch.arange(R, device=device) if choice is not None else torch.arange(R * len(names)) // len(names)
        branch = choice[owner] if choice is not None else every.repeat(R)
        counts = torch.stack([self._count(name, length) for name in names])
        count = counts[branch, span]
        first, total = count.cumsum(0) - count, int(count.sum())
        made, place = embeds.new_zeros(total, self.config.hidden), positions.new_zeros(total)
        for number in branch[count > 0].unique().tolist():
            which = (branch == number).nonzero()[:, 0]
            some = [spans[i] for i in span[which].tolist()]
            (e, there), (f, _), (at, _) = (spans_of(t, some) for t in (embeds, features, positions))
            rows, last = self._brief(names[number], e, f, there, count[which])
            step = torch.arange(rows.shape[1], device=device)
            real = step < count[which, None]
            to = (first[which, None] + step)[real]
            made[to], place[to] = rows[real].to(made), at.gather(1, last)[real]
        went = {(int(b), number) for b, number in zip(owner[span].tolist(), branch.tolist(), strict=True)}
        stats = {f"branch {name}": float(sum(n == number for _, n in went)) for number, name in enumerate(names)}
        left = torch.zeros_like(length).index_add_(0, span, count)
        each = None if weight is None else weight[owner].repeat_interleave(left, 0)
        return self._spliced(spans, left, made, place, (embeds, features, valid, positions), stats, each)

    def weighed(
        self, spans: list[Span], weights: Tensor, embeds: Tensor, features: Tensor, valid: Tensor, positions: Tensor
    ) -> EncodedPrompt:
        """What enters when the rows that all branches make of a span are summed, by `weights` [B, branches]."""
        names, owner = self.config.branches, torch.tensor([b for b, _, _ in spans], device=embeds.device)
        (e, there), (f, _), (at, _) = (spans_of(t, spans) for t in (embeds, features, positions))
        length, ratio = there.sum(1), self.config.conv_ratio
        count = (length + ratio - 1) // ratio
        each = torch.stack([self._brief(name, e, f, there, count)[0] for name in names], 1)  # [R, branches, C, H]
        rows = (weights[owner][..., None, None].to(each) * each).sum(1)
        _, last, real = shares(length, count)
        seen = weights[sorted({b for b, _, _ in spans})].sum(0).tolist()
        stats = {f"weight {name}": share for name, share in zip(names, seen, strict=True)}
        place = at.gather(1, last)[real]
        return self._spliced(spans, count, rows[real], place, (embeds, features, valid, positions), stats)

    def _spliced(
        self, spans: list[Span], count: Tensor, made: Tensor, place: Tensor, rows: tuple[Tensor, ...],
        stats: dict[str, float], weight: Tensor | None = None,
    ) -> EncodedPrompt:  # fmt: skip
        """A prompt in which `made` [M, H], `count` [R] rows of each span at `place` [M], stand for the spans."""
        embeds, features, valid, positions = rows
        index, real, source = splice(valid, spans, count.tolist())
        own = source.clamp(min=0)  # row 0 where there is none, to be overwritten or left unread
        _, residual = self.inputs(gather_rows(embeds, own), gather_rows(features, own))
        new = (real & (source < 0))[..., None]
        residual = residual.masked_scatter(new, made.to(residual))
        x = self.input_norm(residual)  # which no factor of the rows gets through
        if weight is not None:
            x = x * torch.ones_like(x[..., :1]).masked_scatter(new, weight.to(x))
        return EncodedPrompt(x, residual, spliced(positions, place, index), real, source, stats=stats)

    def _brief(self, name: str, e: Tensor, f: Tensor, there: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        """What a branch makes of R spans [R, n, …], `count` [R] rows of each: [R, C, H], and their places [R, C]."""
        if name in self.compressors:
            return self.compressors[name](self.inputs(e, f)[1], there)
        first, last, _ = shares(there.sum(1), count)
        each = torch.arange(there.shape[1], device=there.device)
        if name == "prune" and self.training:  # at random, as published; when it drafts, always the same rows
            rank = torch.rand(there.shape, device=there.device).masked_fill(~there, 2.0).argsort(1).argsort(1)
            last = torch.where(rank < count[:, None], each, each[-1]).sort(1).values[:, : last.shape[1]]
        first = last if name == "prune" else first
        pick = (each >= first[..., None]) & (each <= last[..., None])
        mean = (pick / pick.sum(-1, keepdim=True)).to(e)
        return self.inputs(mean @ e, mean @ f)[1], last

    def _count(self, name: str, length: Tensor) -> Tensor:
        """Rows that a branch leaves of a span of so many."""
        if name in self.compressors:
            return self.compressors[name].count(length)  # type: ignore[operator]
        ratios = {"prune": self.config.prune_ratio, "pool": self.config.pool_ratio}
        return (length // ratios[name]).clamp(min=1) if name in ratios else torch.zeros_like(length)
