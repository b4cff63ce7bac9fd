"""Denoising paths of continuous tokens: drawing them, their likelihood under another network, and the residual."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from mmspec.kernels import dispatch as ops


@dataclass(frozen=True)
class Chain:
    """The K denoising steps of a sampler, noise first; step k leads from state k to state k + 1.

    Attributes:
        timesteps: int64 [K], the training timestep at which the network sees each state.
        table: float32 [K, 6], see `kernels.reference.gaussian_path`: √ᾱ, √(1 − ᾱ), the weights of x̂₀ and x in the
            mean, log β and log β̃.
        final_noise: whether the last step adds noise, too. Only then do paths have a density, and two a density ratio.
    """

    timesteps: Tensor
    table: Tensor
    final_noise: bool

    def __len__(self) -> int:
        return len(self.table)

    def noisy(self, k: int) -> bool:
        """Whether step k adds noise."""
        return self.final_noise or k + 1 < len(self)

    @cached_property
    def steps(self) -> list[tuple[float, float, float, float]]:
        """(a, b, c, d) of each step: the mean is a·x − b·ε, the log of the standard deviation c·v + d."""
        root, rest, clean, x, beta, tilde = self.table.cpu().double().unbind(1)
        columns = (clean / root + x, clean * rest / root, (beta - tilde) / 4, (beta + tilde) / 4)
        return list(zip(*(column.tolist() for column in columns), strict=True))

    @cached_property
    def numbers(self) -> Tensor:
        """`steps` as a tensor, float32 [K, 4]."""
        return torch.tensor(self.steps, device=self.table.device)

    def shaken(self, noise: Tensor, temperature: float) -> Tensor:
        """The noise of the steps [R, K, C], from standard normal numbers: scaled, and zero for a step without noise."""
        scaled = noise * temperature
        if not self.final_noise:
            scaled[:, -1] = 0
        return scaled


Output = tuple[Tensor, Tensor | None]  # ε and v [..., 2·C] of a network; ε [..., ≥ C] without the condition


class Net(Protocol):
    """A denoising network bound to R tokens, with their conditioning and guidance scale."""

    guidance: Tensor | None  # float32 [R]

    def at(self, x: Tensor, k: int) -> Output:
        """fp32 outputs at step k for states x [R, C]."""

    def along(self, x: Tensor) -> Output:
        """fp32 outputs at all steps at once, for states x [R, K, C]."""

    def take(self, rows: Tensor) -> Net:
        """The network bound to the tokens `rows` [R'], in that order; a token may be repeated."""


@dataclass(frozen=True)
class Path:
    """R drawn paths; `x` [R, C] is their last state.

    Attributes:
        states: [R, K + 1, C], noise first.
        noise: [R, K, C], the standard normal numbers of the steps.
        log_std: [R, K, C], of the distributions that they were drawn from, before temperature.
    """

    states: Tensor
    noise: Tensor
    log_std: Tensor

    @property
    def x(self) -> Tensor:
        return self.states[:, -1]

    def take(self, rows: Tensor | slice) -> Path:
        return Path(self.states[rows], self.noise[rows], self.log_std[rows])


def joined(several: Sequence[Path]) -> Path:
    """Concatenate paths with the same number of steps."""
    return Path(*(torch.cat([getattr(path, part) for path in several]) for part in ("states", "noise", "log_std")))


Row = Sequence[float] | Sequence[Tensor]  # a, b, c, d of a step, see `Chain.steps`


def kernel(x: Tensor, out: Output, guidance: Tensor | None, row: Row) -> tuple[Tensor, Tensor]:
    """Mean and log standard deviation [..., C] of a step from x [..., C]; `row` is an entry of `Chain.steps`."""
    C, (a, b, c, d) = x.shape[-1], row
    eps = out[0][..., :C]
    if out[1] is not None and guidance is not None:
        eps = torch.lerp(out[1][..., :C], eps, guidance[..., None])
    return x * a - eps * b, out[0][..., C:] * c + d


def step(x: Tensor, out: Output, guidance: Tensor | None, noise: Tensor, row: Row) -> tuple[Tensor, Tensor]:
    """The state after a step, and its log standard deviation [..., C]; noise [..., C] from `Chain.shaken`."""
    mean, log_std = kernel(x, out, guidance, row)
    return torch.addcmul(mean, log_std.exp(), noise), log_std


def draw(net: Net, chain: Chain, noise: Tensor, temperature: float = 1.0) -> Path:
    """Draw paths of the network.

    Args:
        noise: fp32 [R, K + 1, C], standard normal: the first state, then the noise of every step.
        temperature: scales the noise of the steps, not the first state.
    """
    x, states, spread = noise[:, 0], [noise[:, 0]], []
    shaken = chain.shaken(noise[:, 1:], temperature).unbind(1)
    for k, row in enumerate(chain.steps):
        x, log_std = step(x, net.at(x, k), net.guidance, shaken[k], row)
        states.append(x)
        spread.append(log_std)
    return Path(torch.stack(states, 1), noise[:, 1:], torch.stack(spread, 1))


def log_ratio(path: Path, net: Net, chain: Chain, temperature: float = 1.0) -> Tensor:
    """log P/Q [R]: the network's log-density of paths minus that of the distributions that they were drawn from.

    The network is evaluated at the paths' own states, at all steps at once. For two networks that both undo the same
    noising well, the ratio is that of the tokens' own densities.

    Raises:
        ValueError: the last step has no noise, or the temperature is 0; then paths have no density.
    """
    if not chain.final_noise or temperature <= 0:
        raise ValueError(
            "paths have no density without noise at every step; use a scheduler with final_noise=True, and a "
            f"temperature above 0 (got {temperature!r})"
        )
    out, null = net.along(path.states[:, :-1])
    guidance = net.guidance if null is not None else None
    return ops.gaussian_path(
        path.states, path.noise, path.log_std, out, chain.table, null, guidance, temperature=temperature
    )


def chance(log_pq: Tensor, eta: Tensor | float = 1.0) -> Tensor:
    """The chance to accept a drafted path, min(1, η·P/Q)."""
    return (log_pq.exp() * eta).clamp(max=1.0)


def leftover_chance(log_qp: Tensor, eta: Tensor | float = 1.0) -> Tensor:
    """The chance to accept a path of the target after a rejection, 1 − min(η, Q/P).

    Accepted drafts have the density Q·min(1, η·P/Q) = min(Q, η·P). Paths accepted here have P·(1 − min(η, Q/P)) =
    P − min(η·P, Q), normalised to the probability of a rejection. The sum is P.
    """
    return 1 - torch.minimum(log_qp.exp(), torch.as_tensor(eta, dtype=log_qp.dtype, device=log_qp.device))


TRIALS = 100_000  # limit on the trials for one token
NOT_NUMBERS = "the model returns NaN. If it overflows in float16, run it in bfloat16 or float32"
Draw = Callable[[Net, Chain, Tensor, float], Path]
Fresh = Callable[[Tensor, int], tuple[Tensor, Tensor]]  # rows [r], number of the trial → noise [r, K + 1, C], u [r]


def leftover(
    p: Net, q: Net, chain: Chain, fresh: Fresh, eta: Tensor, temperature: float = 1.0, at_once: int = 4,
    draw: Draw = draw, beside: Tensor | None = None,
) -> tuple[Tensor, list[int], Path]:  # fmt: skip
    """Tokens [R ≥ 1, C] from the target's residual after a rejection, and the number of trials of each.

    Args:
        p, q: the target's and the draft's network, bound to the R tokens.
        fresh: noise and uniform numbers of one trial, independent of those of the draft.
        eta: [R], as in the test that rejected; below 1 a trial succeeds with a chance of at least 1 − η.
        draw: draws paths; same interface as `draw`.
        at_once: trials of a token that run in one batch; the first accepted one counts, so the distribution does not
            change.
        beside: noise [M, K + 1, C] of M more tokens, to which p is bound after the R. Their paths are drawn in one
            batch with the first trials, and returned.
    """
    R, device = len(eta), eta.device
    trials, waiting, first = [0] * R, list(range(R)), 0
    while waiting:
        if first >= TRIALS:
            raise RuntimeError(f"{first} trials gave no token; eta below 1 (here {max(eta):.3g}) needs fewer")
        rows = torch.tensor(waiting, dtype=torch.int64, device=device)
        again = which = rows.repeat(at_once)
        noise, u = zip(*(fresh(rows, first + i) for i in range(at_once)), strict=True)
        if not first and beside is not None:
            which, noise = torch.cat([again, torch.arange(R, R + len(beside), device=device)]), (*noise, beside)
        path = draw(p.take(which), chain, torch.cat(noise), temperature)
        if not first:
            others, path = path.take(slice(len(again), None)), path.take(slice(len(again)))
            tokens = path.x.new_empty(R, path.x.shape[1])
        ratio = log_ratio(path, q.take(again), chain, temperature)
        kept = (torch.cat(u) < leftover_chance(ratio, eta[again])).view(at_once, -1)
        trial = kept.int().argmax(0)
        tokens[rows] = path.x.unflatten(0, (at_once, -1))[trial, torch.arange(len(rows), device=device)]
        taken = torch.where(kept.any(0), trial + 1, -ratio.view(at_once, -1).isnan().any(0).int()).tolist()
        if min(taken) < 0:
            raise ValueError(NOT_NUMBERS)
        for row, count in zip(waiting, taken, strict=True):
            trials[row] = first + count if count else 0
        waiting, first = [row for row, count in zip(waiting, taken, strict=True) if not count], first + at_once
    return tokens, trials, others
