"""MAR's generation: the distribution of every token, the state of images while they fill up, and plain decoding."""

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

COINS, PATHS, DRAFTS, ORDER = range(4)  # the independent noise streams of an image
GUIDANCE = ("linear", "constant")
STEPS = {  # the schedules by which a token's denoising steps decrease from the upper number to the lower, by progress
    "linear": lambda share: 1 - share,
    "cosine": lambda share: math.cos(math.pi / 2 * share),
    "two-stage": lambda share: float(share < 0.5),
}


@dataclass(frozen=True)
class MarDistribution:
    """The distribution of an image: for every token, by its turn, its guidance and its denoising steps."""

    # for every iteration the range of tokens that it draws: the first, and the end
    turns: tuple[tuple[int, int], ...]
    guidance: tuple[float, ...]  # the strength for each token
    steps: tuple[int, ...]  # denoising steps of each token; equal within an iteration
    temperature: float  # of the noise of the steps
    guided: bool  # False: no forward without the class


def distribution(
    tokens: int, iterations: int, scale: float, schedule: str, steps: int | tuple[int, int], annealing: str,
    temperature: float,
) -> MarDistribution:  # fmt: skip
    """The distribution of MAR (Li et al. 2024, §3.4, §4), with the annealed steps of DiSA (Zhao et al. 2025, arXiv
    2505.20297).

    Args:
        tokens: L, the number of tokens of an image.
        iterations: the cosine schedule spreads the tokens over them; with L iterations each draws one.
        scale, schedule: of the guidance, which stays ("constant") or grows from 1 with the share drawn ("linear").
        steps: denoising steps of every token, or those of the first and the last, with the schedule `annealing`.
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
    """The state of B images: everything that changes while they are generated."""

    tokens: Tensor  # fp32 [B, L, C], zero where nothing is drawn yet
    order: Tensor  # int64 [B, L], the place of each token by its turn
    labels: Tensor  # int64 [B]
    seeds: Tensor  # int64 [B]
    counts: list[int]  # how many tokens each image has

    def put(self, rows: Tensor, turns: Tensor, x: Tensor) -> None:
        """Write tokens x [R, C] of images `rows` [R] at `turns` [R]; the caller updates `counts`."""
        self.tokens[rows, self.order[rows, turns]] = x.to(self.tokens.dtype)


def canvas(model: MARTransformer2DModel, labels: Tensor, seeds: list[int]) -> MarState:
    """Empty images with random orders."""
    B, L, device = len(labels), model.tokens, labels.device
    of = torch.tensor(seeds, dtype=torch.int64, device=device)
    order = ops.uniform(stream(of, ORDER)[:, None], torch.arange(L, device=device)).argsort(dim=1, stable=True)
    return MarState(torch.zeros(B, L, model.config.channels, device=device), order, labels, of, [0] * B)


def normal(seeds: Tensor, kind: int, tokens: int, turns: Tensor, trial: int, steps: int, channels: int) -> Tensor:
    """fp32 normal noise [R, steps + 1, channels] for tokens with seeds [R] and turns [R], and a trial number."""
    cell = (trial * tokens + turns)[:, None] * ((steps + 1) * channels)
    counter = cell + torch.arange((steps + 1) * channels, device=seeds.device)
    u = ops.uniform(stream(seeds, kind)[:, None], counter)
    return quantile(u).view(len(seeds), steps + 1, channels)


def coins(seeds: Tensor, tokens: int, turns: Tensor, trial: int | Tensor) -> Tensor:
    """Uniform fp64 (fp32 on MPS) [R] in [0, 1), with the arguments of `normal`."""
    return ops.uniform(stream(seeds, COINS), trial * tokens + turns)


@dataclass
class MarRunner:
    """A model with its sampler, for one call; counts its work."""

    model: MARTransformer2DModel
    scheduler: MARScheduler
    distribution: MarDistribution
    fast: bool = True  # compute only once what the head's steps share; False: run the head as it is defined
    compile: bool = False  # compile the fast head's steps
    passes: int = 0  # forwards of the trunk
    rows: int = 0  # rows in these forwards
    evaluations: int = 0  # evaluations of the head: tokens times steps
    chain: Callable[[int], denoising.Chain] = field(init=False)
    draw: denoising.Draw = field(init=False)

    def __post_init__(self) -> None:
        scheduler, head, device = self.scheduler, self.model.diffloss, self.model.device
        chain = self.chain = cache(lambda steps: scheduler.chain(steps, device))  # without `self`, which would keep
        steps = mar_compiled.of(head, self.compile)  # a call's tensors alive until the next garbage collection
        self.draw = denoising.draw if steps is None else steps.draw
        folded = cache(head.folded)
        self._bound = cache(lambda steps: head.bind(chain(steps), folded()))
        self._guidance = torch.tensor(self.distribution.guidance, dtype=torch.float32, device=device)

    def work(self) -> dict[str, int]:
        """The work so far."""
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
        """The head for tokens with conditioning z [streams, R, D] and turns [R]."""
        strength = self._guidance[turns] if self.distribution.guided else None
        null = z[1] if self.distribution.guided else None
        if self.fast:
            return self._bound(steps).on(z[0], null, strength)
        return PlainHead(self.model.diffloss, self.chain(steps), z[0], null, strength)


def plain(runner: MarRunner, state: MarState, upto: int | None = None) -> Iterator[MarState]:
    """Draw all images together, one iteration of the distribution at a time, until they have `upto` tokens (None: all
    of them)."""
    B, device = len(state.order), state.order.device
    rows = torch.arange(B, device=device)
    for first, last in runner.distribution.turns:
        if upto is not None and first >= upto:
            return
        z = runner.read(state.tokens, state.order, state.counts, state.labels)
        turns, of = torch.arange(first, last, device=device).repeat(B), rows.repeat_interleave(last - first)
        chosen = z[:, of, state.order[of, turns]]
        state.put(of, turns, fresh(runner, chosen, state, of, turns, runner.distribution.steps[first], PATHS).x)
        state.counts = [last] * B
        yield state


def fresh(
    runner: MarRunner, z: Tensor, state: MarState, rows: Tensor, turns: Tensor, steps: int, kind: int,
    guided: Tensor | None = None,
) -> denoising.Path:  # fmt: skip
    """Denoising paths of tokens at `turns` [R] of images `rows` [R], with equal numbers of steps; z [streams, R, D].

    `guided` [R] are the turns whose guidance is used; None: their own.
    """
    chain, L = runner.chain(steps), state.order.shape[1]
    noise = normal(state.seeds[rows], kind, L, turns, 0, len(chain), state.tokens.shape[2])
    runner.evaluations += len(rows) * len(chain) * (1 + runner.distribution.guided)
    return runner.draw(
        runner.net(z, turns if guided is None else guided, steps), chain, noise, runner.distribution.temperature
    )
