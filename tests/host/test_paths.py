"""Exact speculation on continuous tokens: known densities come out of it; CSpD's rule and planted errors do not."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from mmspec.continuous import cspd, denoising
from mmspec.continuous.denoising import Chain, Path
from mmspec.models.mar_scheduler import MARScheduler

N, C = 8000, 4


def chain(T: int = 25, **config: bool) -> Chain:
    return MARScheduler(**{"final_noise": True, "skip_terminal": True, **config}).chain(T)


@dataclass
class Known:
    """The exact ε of tokens from a mixture of Gaussians of one width, as a `Net`.

    `share` is v at every step; `null` adds an unguided branch, whose ε is that of a single Gaussian.
    """

    chain: Chain
    means: Tensor  # [M, C]
    weights: Tensor  # [M]
    std: float
    share: float = 1.0
    guidance: Tensor | None = None
    null: Known | None = None

    def eps(self, x: Tensor, root: Tensor, rest: Tensor) -> Tensor:
        """[..., C]; the score of the noised mixture times −√(1 − ᾱ)."""
        var = root**2 * self.std**2 + rest**2
        apart = x[..., None, :] - root[..., None] * self.means  # [..., M, C]
        log = torch.log(self.weights) - 0.5 * (apart**2).sum(-1) / var
        return rest * (log.softmax(-1)[..., None] * apart).sum(-2) / var

    def at(self, x: Tensor, k: int) -> denoising.Output:
        out = self.along(x[:, None], slice(k, k + 1))
        return out[0][:, 0], None if out[1] is None else out[1][:, 0]

    def along(self, x: Tensor, steps: slice = slice(None)) -> denoising.Output:
        root, rest = (t[steps, None] for t in self.chain.table[:, :2].unbind(1))
        eps = self.eps(x, root, rest)
        out = torch.cat([eps, torch.full_like(eps, self.share)], -1)
        return out, None if self.null is None else self.null.along(x, steps)[0]

    def take(self, rows: Tensor) -> Known:
        return replace(self, guidance=None if self.guidance is None else self.guidance[rows])


def gaussian(steps: Chain, shift: float = 0.0, std: float = 0.5, share: float = 1.0) -> Known:
    return Known(steps, torch.full((1, C), shift), torch.ones(1), std, share)


def mixture(steps: Chain, weight: float) -> Known:
    return Known(steps, torch.tensor([[1.0] * C, [-1.0] * C]), torch.tensor([weight, 1 - weight]), 0.3)


def noise(seed: int, steps: Chain, count: int = N) -> Tensor:
    return torch.randn(count, len(steps) + 1, C, generator=torch.Generator().manual_seed(seed))


def speculate(p: Known, q: Known, eta: float = 1.0, tau: float = 1.0, ratio=denoising.log_ratio, back=None) -> tuple:
    """N tokens by the exact rule, which of them were accepted, and the trials of the others."""
    coin, steps = torch.Generator().manual_seed(99), p.chain
    draft = denoising.draw(q, steps, noise(1, steps), tau)
    kept = torch.rand(N, generator=coin) < denoising.chance(ratio(draft, p, steps, tau), eta)
    rows = (~kept).nonzero()[:, 0]
    x, trials = draft.x.clone(), torch.zeros(0)

    def fresh(waiting: Tensor, trial: int) -> tuple[Tensor, Tensor]:
        return noise(1000 + trial, steps, len(waiting)), torch.rand(len(waiting), generator=coin)

    if len(rows):
        left = denoising.leftover(p.take(rows), q.take(rows), steps, fresh, torch.full((len(rows),), back or eta), tau)
        x[rows], trials = left[0], torch.tensor(left[1])
    return x, kept, trials


def direct(p: Known, tau: float = 1.0, seed: int = 11) -> Tensor:
    return denoising.draw(p, p.chain, noise(seed, p.chain), tau).x


def p_value(a: Tensor, b: Tensor) -> float:
    """The smallest of two-sample Kolmogorov–Smirnov tests on three projections and the norm, times four."""
    along = torch.tensor([[1.0, 1, 1, 1], [1, -1, 1, -1], [1, 0, 0, 0]])
    smallest = 1.0
    for one, two in [*((a @ v, b @ v) for v in along), (a.norm(dim=1), b.norm(dim=1))]:
        order = torch.cat([one, two]).argsort()
        step = torch.where(order < len(one), 1 / len(one), -1 / len(two)).double()
        far = float(step.cumsum(0).abs().max())
        root = math.sqrt(len(one) * len(two) / (len(one) + len(two)))
        lam = (root + 0.12 + 0.11 / root) * far
        tail = 2 * sum((-1) ** (j - 1) * math.exp(-2 * j * j * lam * lam) for j in range(1, 60)) if lam > 0.3 else 1.0
        smallest = min(smallest, tail)
    return 4 * smallest


def energy_distance(a: Tensor, b: Tensor, some: int = 1500) -> float:
    a, b = a[:some], b[:some]
    within = [torch.cdist(t, t).sum() / (len(t) * (len(t) - 1)) for t in (a, b)]
    return float(2 * torch.cdist(a, b).mean() - within[0] - within[1])


CASES = {
    "another mean": (lambda s: gaussian(s), lambda s: gaussian(s, 0.1), {}),
    "another width": (lambda s: gaussian(s), lambda s: gaussian(s, 0.05, 0.6), {}),
    "another variance of the steps": (lambda s: gaussian(s, share=0.5), lambda s: gaussian(s, 0.05, share=0.9), {}),
    "cooler": (lambda s: gaussian(s), lambda s: gaussian(s, 0.1), {"tau": 0.8}),
    "eta 0.9": (lambda s: gaussian(s), lambda s: gaussian(s, 0.1), {"eta": 0.9}),
    "eta 0.5": (lambda s: gaussian(s), lambda s: gaussian(s, 0.1), {"eta": 0.5}),
    "a mixture": (lambda s: mixture(s, 0.5), lambda s: mixture(s, 0.65), {"eta": 0.95}),
    "guided": (
        lambda s: replace(gaussian(s), guidance=torch.full((N,), 1.8), null=gaussian(s, -0.2)),
        lambda s: replace(gaussian(s), guidance=torch.full((N,), 1.2), null=gaussian(s, -0.2)),
        {"eta": 0.95},
    ),
}


@pytest.mark.parametrize("T", [6, 25])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.every(2)
def test_the_targets_law_comes_out(case, T):
    steps = chain(T)
    target, draft, settings = CASES[case]
    x, kept, _ = speculate(target(steps), draft(steps), **settings)
    want = direct(target(steps), settings.get("tau", 1.0))
    assert 0.02 < kept.float().mean() < 0.99  # both branches had their part
    assert p_value(x, want) > 1e-3
    assert energy_distance(x, want) < 4e-3
    assert (
        p_value(direct(draft(steps), settings.get("tau", 1.0)), want) < 1e-3
    )  # the draft's own distribution is told apart


def always(path: Path, net: Known, steps: Chain, tau: float) -> Tensor:
    return torch.full((N,), 9.0)


def no_determinant(path: Path, net: Known, steps: Chain, tau: float) -> Tensor:
    """Without the terms of the standard deviations."""
    own = torch.stack([denoising.kernel(path.states[:, k], net.at(path.states[:, k], k), None, steps.steps[k])[1]
                       for k in range(len(steps))], 1)  # fmt: skip
    return denoising.log_ratio(path, net, steps, tau) - (path.log_std - own).sum((1, 2))


def swapped_spread(path: Path, net: Known, steps: Chain, tau: float) -> Tensor:
    """The draft's standard deviations in the place of the target's."""
    eps, out = path.noise, net.along(path.states[:, :-1])
    total = torch.zeros(len(eps))
    for k in range(len(steps)):
        mean, _ = denoising.kernel(path.states[:, k], (out[0][:, k], None), None, steps.steps[k])
        z = (path.states[:, k + 1] - mean) * torch.exp(-path.log_std[:, k]) / tau
        total += 0.5 * (eps[:, k] ** 2 - z**2).sum(1)
    return total


def shared_noise(path: Path, net: Known, steps: Chain, tau: float) -> Tensor:
    """The target at its own states under the draft's noise, as if the two paths were one."""
    own = denoising.draw(net, steps, torch.cat([path.states[:, :1], path.noise], 1), tau)
    far = 0.5 * (((path.x - own.x) / own.log_std[:, -1].exp() / 42) ** 2).sum(1)
    return (path.log_std - own.log_std).sum((1, 2)) - far


@pytest.mark.parametrize(("wrong", "case"), [
    (always, "another mean"), (no_determinant, "another variance of the steps"),
    (swapped_spread, "another variance of the steps"), (shared_noise, "another mean"),
])  # fmt: skip
def test_planted_errors_are_seen(wrong, case):
    steps = chain(25)
    target, draft, _ = CASES[case]
    x, *_ = speculate(target(steps), draft(steps), ratio=wrong)
    assert p_value(x, direct(target(steps))) < 1e-3


def test_another_eta_after_a_refusal_is_seen():
    steps = chain(25)
    x, *_ = speculate(mixture(steps, 0.5), mixture(steps, 0.8), eta=0.5, back=0.99)
    assert p_value(x, direct(mixture(steps, 0.5))) < 1e-3


@pytest.mark.parametrize("share", [1.0, 0.6])
def test_cspd_is_seen_to_be_approximate(share):
    """The published rule on the same two distributions: it keeps what it should not."""
    steps = chain(25, final_noise=False)
    p, q = gaussian(steps, share=share), gaussian(steps, 0.1)
    shared = noise(1, steps)
    draft, own = denoising.draw(q, steps, shared), denoising.draw(p, steps, shared)
    of_p, of_q = cspd.end(own, steps), cspd.end(draft, steps)
    coin = torch.Generator().manual_seed(5)
    kept = torch.rand(N, generator=coin).log() < cspd.log_chance(draft.x, of_p, of_q)
    other = torch.randn(cspd.ROUNDS, N, C, generator=coin)
    left = cspd.leftover(of_p, of_q, other, torch.rand(cspd.ROUNDS, N, generator=coin))
    x = torch.where(kept[:, None], draft.x, left)
    if share == 1.0:
        assert 0.05 < kept.float().mean() < 0.999
        assert p_value(x, direct(p)) < 1e-3
    else:  # its factor F has the wrong sign: where the target's steps are narrower, it refuses nearly everything
        assert kept.float().mean() < 0.05


def test_cspd_is_its_published_formula():
    """Products and densities as the authors' code writes them, where they do not underflow."""
    R = 50
    mu_p, x, mu_q = torch.randn(3, R, C).double().unbind(0)
    std_p, std_q = (0.5 + torch.rand(2, R, C).double()).unbind(0)
    sum_p, sum_q = (0.3 * torch.randn(2, R).double()).unbind(0)
    near = [(-0.5 * ((x - m) / (42 * s)).pow(2).sum(1)).exp() for m, s in ((mu_p, std_p), (mu_q, std_q))]
    F = (sum_p - sum_q).exp()
    want = near[0] / near[1] * F * std_q.prod(1) / std_p.prod(1)
    p, q = cspd.End(mu_p, std_p.log(), sum_p), cspd.End(mu_q, std_q.log(), sum_q)
    torch.testing.assert_close(cspd.log_chance(x, p, q).exp(), want.clamp(max=1))
    noise, coins = torch.randn(cspd.ROUNDS, R, C).double(), torch.rand(cspd.ROUNDS, R).double()
    got = cspd.leftover(p, q, noise, coins)
    for row in range(R):
        answer = mu_p[row]  # published: zero
        for n in range(cspd.ROUNDS):
            y = mu_p[row] + std_p[row] * noise[n, row]
            p0, q0 = (
                torch.exp(-0.5 * ((y - m[row]) / s[row]).pow(2).sum()) / s[row].prod()
                for m, s in ((mu_p, std_p), (mu_q, std_q))
            )
            if coins[n, row] < max(0.0, p0 - q0 / F[row]) / p0:
                answer = y
                break
        torch.testing.assert_close(got[row], answer)


@pytest.mark.parametrize("shift", [0.05, 0.2])
def test_acceptance_is_the_best_there_is(shift):
    """1 − TV of the tokens' own distributions: per-step tests would keep far less."""
    steps = chain(100)
    draft = denoising.draw(gaussian(steps, shift), steps, noise(1, steps))
    kept = denoising.chance(denoising.log_ratio(draft, gaussian(steps), steps)).mean()
    overlap = math.erfc(shift * math.sqrt(C) / 0.5 / 2 / math.sqrt(2))
    assert float(kept) == pytest.approx(overlap, abs=0.025)


@pytest.mark.parametrize(("T", "tau"), [(6, 1.0), (100, 1.0), (25, 0.8)])
def test_a_draft_of_the_target_is_kept(T, tau):
    steps = chain(T)
    path = denoising.draw(gaussian(steps, share=0.3), steps, noise(1, steps), tau)
    assert denoising.log_ratio(path, gaussian(steps, share=0.3), steps, tau).abs().max() < 1e-4 * T


def test_the_ratio_has_mean_one():
    steps = chain(25)
    path = denoising.draw(gaussian(steps, 0.05), steps, noise(1, steps))
    ratio = denoising.log_ratio(path, gaussian(steps), steps).exp()
    assert float(ratio.mean()) == pytest.approx(1, abs=4 * float(ratio.std()) / N**0.5)


@pytest.mark.parametrize("eta", [0.5, 0.9])
def test_trials_after_a_refusal(eta):
    """One on average over accepted and refused tokens alike, and at most 1/(1 − η) after a refusal."""
    steps = chain(25)
    _, kept, trials = speculate(gaussian(steps), gaussian(steps, 0.1), eta)
    assert float(trials.sum()) / N == pytest.approx(1.0, abs=0.1)
    assert float(trials.float().mean()) < 1.1 / (1 - eta)
    assert trials.min() >= 1 and len(trials) == int((~kept).sum())


def test_without_noise_there_is_no_ratio():
    for steps, tau in ((chain(6, final_noise=False), 1.0), (chain(6), 0.0)):
        path = denoising.draw(gaussian(steps), steps, noise(1, steps), tau)
        with pytest.raises(ValueError, match="final_noise=True"):
            denoising.log_ratio(path, gaussian(steps), steps, tau)


@pytest.mark.parametrize(
    ("mean", "eta", "error", "why"),
    [(math.nan, 0.9, ValueError, "returns NaN"), (0.0, 1.0, RuntimeError, "trials gave no token")],  # nothing is left
)
def test_trials_come_to_an_end(mean, eta, error, why, monkeypatch):
    monkeypatch.setattr(denoising, "TRIALS", 8)
    steps = chain(6)
    with pytest.raises(error, match=why):
        denoising.leftover(gaussian(steps), gaussian(steps, mean), steps, lambda rows, trial: (
                       noise(trial, steps, len(rows)), torch.rand(len(rows))), torch.full((3,), eta))  # fmt: skip
