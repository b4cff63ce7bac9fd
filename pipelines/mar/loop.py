"""How MAR draws: the distribution of every token, the canvas that fills up, and plain decoding."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

from mmspec.compile import mar as mar_compiled
from mmspec.continuous import denoising
from mmspec.continuous.denoising import Net
from mmspec.kernels import dispatch as ops
from mmspec.kernels.reference import quantile, stream
from mmspec.models.mar import MARTransformer2DModel
from mmspec.models.mar_head import PlainHead
from mmspec.models.mar_scheduler import MARScheduler

COINS, PATHS, DRAFTS, ORDER = range(4)  # a picture's independent streams of noise
GUIDANCE = ("linear", "constant")
STEPS = {  # how the denoising steps of a token go from the upper number to the lower one, by its share of the way
    "linear": lambda share: 1 - share,
    "cosine": lambda share: math.cos(math.pi / 2 * share),
    "two-stage": lambda share: float(share < 0.5),
}


@dataclass(frozen=True)
class MarDistribution:
    """What a picture is drawn from: for every token, by its turn, its guidance and its denoising steps."""

    # of every iteration, the first token that it draws and the first that it does not
    turns: tuple[tuple[int, int], ...]
    guidance: tuple[float, ...]  # the strength for each token
    steps: tuple[int, ...]  # denoising steps of each token; those of one iteration are alike
    temperature: float  # of the noise of the steps
    guided: bool  # false leaves the forward without the class out


def distribution(
    tokens: int, iterations: int, scale: float, schedule: str, steps: int | tuple[int, int], annealing: str,
    temperature: float,
) -> MarDistribution:  # fmt: skip
    """The distribution of MAR (Li et al. 2024, §3.4, §4), with the annealed steps of DiSA (Zhao et al. 2025, arXiv
    2505.20297).

    Args:
        tokens: L of a picture.
        iterations: the cosine schedule spreads the tokens over them; one each where there are as many.
        scale, schedule: of the guidance, which stays ("constant") or grows from 1 with the share drawn ("linear").
        steps: denoising steps of every token, or the numbers for the first and the last, with `annealing` between.
    """
    turns, first = [], 0
    for s in range(iterations):
        left = max(1, min(tokens - first - 1, math.floor(tokens * math.cos(math.pi / 2 * (s + 1) / iterations))))
        last = tokens if s + 1 == iterations else tokens - left
        share = (tokens - left) / tokens
        strength = 1 + (scale - 1) * share if schedule == "linear" else scale
        turns.append((first, last, strength, _steps(s, iterations, steps, annealing)))
        first = last
    return MarDistribution(
        tuple((first, last) for first, last, *_ in turns),
        tuple(strength for first, last, strength, _ in turns for _ in range(first, last)),
        tuple(K for first, last, _, K in turns for _ in range(first, last)), temperature, scale != 1,
    )  # fmt: skip


def _steps(s: int, iterations: int, steps: int | tuple[int, int], annealing: str) -> int:
    if isinstance(steps, int):
        return steps
    upper, lower = steps
    return lower + int(STEPS[annealing](s / max(1, iterations - 1)) * (upper - lower))


@dataclass
class MarState:
    """B pictures as they fill up: everything that changes while they are drawn."""

    tokens: Tensor  # fp32 [B, L, C], zero where nothing is drawn yet
    order: Tensor  # int64 [B, L], the place of each token by its turn
    labels: Tensor  # int64 [B]
    seeds: Tensor  # int64 [B]
    counts: list[int]  # how many tokens each picture has

    def put(self, rows: Tensor, turns: Tensor, x: Tensor) -> None:
        """Write tokens x [R, C] of pictures `rows` [R] at `turns` [R]; `counts` are the caller's."""
        self.tokens[rows, self.order[rows, turns]] = x.to(self.tokens.dtype)


def canvas(model: MARTransformer2DModel, labels: Tensor, seeds: list[int]) -> MarState:
    """Empty pictures, their random orders drawn."""
    B, L, device = len(labels), model.tokens, labels.device
    of = torch.tensor(seeds, dtype=torch.int64, device=device)
    order = ops.uniform(stream(of, ORDER)[:, None], torch.arange(L, device=device)).argsort(dim=1, stable=True)
    return MarState(torch.zeros(B, L, model.config.channels, device=device), order, labels, of, [0] * B)


def normal(seeds: Tensor, kind: int, tokens: int, turns: Tensor, trial: int, steps: int, channels: int) -> Tensor:
    """fp32 standard normal [R, steps + 1, channels] for tokens by seeds [R] and turns [R], and a trial's number."""
    cell = (trial * tokens + turns)[:, None] * ((steps + 1) * channels)
    counter = cell + torch.arange((steps + 1) * channels, device=seeds.device)
    u = ops.uniform(stream(seeds, kind)[:, None], counter)
    return quantile(u).view(len(seeds), steps + 1, channels)


def coins(seeds: Tensor, tokens: int, turns: Tensor, trial: int | Tensor) -> Tensor:
    """fp64 (fp32 on MPS) [R] in [0, 1), as `normal`."""
    return ops.uniform(stream(seeds, COINS), trial * tokens + turns)


@dataclass
class MarRunner:
    """A model with its sampler, as one call uses them; counts what it does."""

    model: MARTransformer2DModel
    scheduler: MARScheduler
    distribution: MarDistribution
    fast: bool = True  # compute once what the head's steps share; false asks it as it is defined
    compile: bool = False  # its steps, too
    passes: int = 0  # forwards of the trunk
    rows: int = 0  # in them
    evaluations: int = 0  # tokens times steps that the head was asked at
    chain: Callable[[int], denoising.Chain] = field(init=False)
    draw: denoising.Draw = field(init=False)

    def __post_init__(self) -> None:
        device = self.model.device
        self.chain = cache(lambda steps: self.scheduler.chain(steps, device))
        steps = mar_compiled.of(self.model.diffloss, self.compile)
        self.draw = denoising.draw if steps is None else steps.draw
        self._bound = cache(lambda steps: self.model.diffloss.bind(self.chain(steps)))
        self._guidance = torch.tensor(self.distribution.guidance, dtype=torch.float32, device=device)

    def work(self) -> dict[str, int]:
        """What it did so far."""
        return {"passes": self.passes, "rows": self.rows, "evaluations": self.evaluations}

    def read(self, tokens: Tensor, order: Tensor, counts: list[int], labels: Tensor) -> Tensor:
        """Conditioning [streams, R, L, D] of rows that know the first `counts` tokens of their order."""
        R, L = order.shape
        turn = torch.empty_like(order).scatter_(1, order, torch.arange(L, device=order.device).expand(R, L))
        known = turn < torch.tensor(counts, device=order.device)[:, None]
        self.passes, self.rows = self.passes + 1, self.rows + R * (1 + self.distribution.guided)
        if not self.distribution.guided:
            return self.model(tokens, known, labels, counts)[None]
        none = torch.full_like(labels, self.model.config.classes)
        z = self.model(tokens.repeat(2, 1, 1), known.repeat(2, 1), torch.cat([labels, none]), counts * 2)
        return z.unflatten(0, (2, R))

    def net(self, z: Tensor, turns: Tensor, steps: int) -> Net:
        """The head bound to tokens with conditioning z [streams, R, D] by their turns [R]."""
        strength = self._guidance[turns] if self.distribution.guided else None
        null = z[1] if self.distribution.guided else None
        if self.fast:
            return self._bound(steps).on(z[0], null, strength)
        return PlainHead(self.model.diffloss, self.chain(steps), z[0], null, strength)


def plain(runner: MarRunner, drawn: MarState, upto: int | None = None) -> Iterator[MarState]:
    """Draw all pictures in step, an iteration of the distribution at a time, until they have `upto` tokens; None:
    all."""
    B, device = len(drawn.order), drawn.order.device
    rows = torch.arange(B, device=device)
    for first, last in runner.distribution.turns:
        if upto is not None and first >= upto:
            return
        z = runner.read(drawn.tokens, drawn.order, drawn.counts, drawn.labels)
        turns, of = torch.arange(first, last, device=device).repeat(B), rows.repeat_interleave(last - first)
        chosen = z[:, of, drawn.order[of, turns]]
        drawn.put(of, turns, fresh(runner, chosen, drawn, of, turns, runner.distribution.steps[first], PATHS).x)
        drawn.counts = [last] * B
        yield drawn


def fresh(
    runner: MarRunner, z: Tensor, drawn: MarState, rows: Tensor, turns: Tensor, steps: int, kind: int,
    guided: Tensor | None = None,
) -> denoising.Path:  # fmt: skip
    """Paths of tokens at `turns` [R] of pictures `rows` [R], all of as many steps; z [streams, R, D].

    `guided` [R] are the turns whose guidance counts; None: their own.
    """
    chain, L = runner.chain(steps), drawn.order.shape[1]
    noise = normal(drawn.seeds[rows], kind, L, turns, 0, len(chain), drawn.tokens.shape[2])
    runner.evaluations += len(rows) * len(chain) * (1 + runner.distribution.guided)
    return runner.draw(
        runner.net(z, turns if guided is None else guided, steps), chain, noise, runner.distribution.temperature
    )
