"""Speculation on MAR: pictures have the distribution of plain drawing, each goes its own way, and planted errors are
seen."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_mar as tiny
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mmspec.continuous import cspd, denoising
from mmspec.pipelines.mar import loop as mar_loop
from mmspec.pipelines.mar import plan as mar_plan
from mmspec.pipelines.mar import speculate as mar_speculate
from tests.host.test_paths import energy_distance, p_value

N, L, C = 3000, 4, 4


@dataclass
class Toy:
    """A "MAR" of known distribution: a token is Gaussian around `pull` times the mean of the tokens known, plus
    `shift`.

    Without the class it is pulled half as much. It has what the loops ask of a model.
    """

    pull: float = 0.9
    shift: float = 0.0
    std: float = 0.5

    tokens = L
    device = torch.device("cpu")
    config = SimpleNamespace(channels=C, classes=5)

    def __call__(self, tokens: Tensor, known: Tensor, labels: Tensor, counts: Any = None) -> Tensor:
        mean = (tokens * known[..., None]).sum(1) / known.sum(1, keepdim=True).clamp(min=1)
        pull = torch.where(labels < self.config.classes, self.pull, self.pull / 2)
        return (pull[:, None] * mean + self.shift)[:, None].repeat(1, L, 1)

    @property
    def diffloss(self) -> Any:
        on = SimpleNamespace
        bind = lambda chain, _: on(on=lambda z, null, weight: Steered(chain, self.std, z, null, weight))  # noqa: E731
        return on(bind=bind, folded=tuple)


@dataclass
class Steered:
    """The exact ε of Gaussian tokens around z [R, C]; a `Net`."""

    chain: denoising.Chain
    std: float
    z: Tensor
    null: Tensor | None
    guidance: Tensor | None

    def at(self, x: Tensor, k: int) -> denoising.Output:
        out, null = self.along(x[:, None], slice(k, k + 1))
        return out[:, 0], None if null is None else null[:, 0]

    def along(self, x: Tensor, steps: slice = slice(None)) -> denoising.Output:
        root, rest = (t[steps, None] for t in self.chain.table[:, :2].unbind(1))

        def eps(z: Tensor) -> Tensor:
            return rest * (x - root * z[:, None]) / (root**2 * self.std**2 + rest**2)

        out = torch.cat([eps(self.z), torch.full_like(x, 0.7)], -1)
        return out, None if self.null is None else eps(self.null)

    def take(self, rows: Tensor) -> Steered:
        z, null, guidance = (None if t is None else t[rows] for t in (self.z, self.null, self.guidance))
        return Steered(self.chain, self.std, z, null, guidance)


NEAR = Toy(0.8, 0.05)  # a draft much like the model


def pictures(how: mar_plan.Speculation | None, seed: int, scale: float = 1.5) -> tuple[Tensor, Any]:
    """Tokens [N, L, C] of N pictures of one class, in the order in which they were drawn; and what happened."""
    torch.manual_seed(seed)
    model, scheduler = Toy(), tiny.scheduler()
    distribution = mar_loop.distribution(L, L, scale, "linear", 12, "linear", 1.0)
    brush, told = mar_loop.MarRunner(model, scheduler, distribution), mar_plan.tally(L)
    drawn = mar_loop.canvas(model, torch.ones(N, dtype=torch.long), torch.randint(2**62, (N,)).tolist())
    draft_runner = brush if how is None or how.draft is None else mar_loop.MarRunner(how.draft, scheduler, distribution)
    for _ in mar_loop.plain(brush, drawn) if how is None else mar_speculate.draw(brush, drawn, how, draft_runner, told):
        pass
    return drawn.tokens.gather(1, drawn.order[..., None].expand(-1, -1, C)), told


@pytest.fixture(scope="module")
def plain() -> Tensor:
    return pictures(None, 50)[0]


def joint(a: Tensor, b: Tensor) -> float:
    """The smallest p of tests on tokens, and on sums and differences of two of them, times the number of tests."""
    pairs = [(i, j) for i in range(L) for j in range(i)]
    signs = [(i, j, sign) for i, j in pairs for sign in (torch.add, torch.sub)]
    seen = [[*t.unbind(1), *(sign(t[:, i], t[:, j]) for i, j, sign in signs)] for t in (a, b)]
    return len(seen[0]) * min(p_value(*both) for both in zip(*seen, strict=True))


MODES = {
    "self": {"ahead": 3},
    "self, eta 1": {"ahead": 2, "eta": 1.0},
    "a draft": {"ahead": 3, "draft": NEAR},
    "a draft, eta 0.6": {"ahead": 2, "draft": NEAR, "eta": 0.6},
    "prefill": {"ahead": 3, "prefill": 0.3},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.every(2)
def test_pictures_have_the_law_of_plain_drawing(mode, plain):
    x, told = pictures(mar_plan.Speculation(**MODES[mode]), 60)
    summary = told.summary()
    assert 0.2 < summary["acceptance"] < 0.95 and summary["refused"] > N / 10
    assert joint(x, plain) > 1e-3
    assert energy_distance(x.flatten(1), plain.flatten(1)) < 0.02


def without_rollback(accept: Any) -> Any:
    """Drafts that knew a refused token stay."""

    def each(drawn: Any, draft: Any, facts: Any, *more: Any) -> Any:
        standing, _, found, whole = accept(drawn, draft, [(True, *fact[1:]) for fact in facts], *more)
        return standing, [i for i, (kept, *_) in enumerate(facts) if not kept], found, whole

    return each


def blind(read: Any) -> Any:
    """Drafts are tested as if no more than one token were known."""
    return lambda self, tokens, order, counts, labels: read(self, tokens, order, [min(n, 1) for n in counts], labels)


def every(own: Any) -> Any:
    return lambda brush, drafts, *more: torch.full((len(drafts),), 9.0)


PLANTED: dict[str, tuple[Any, str, Any, dict[str, Any]]] = {  # what is replaced, by what is made of it; how one drafts
    "every draft is kept": (mar_speculate, "_ratios", every, MODES["self"]),
    "every draft of a draft is kept": (mar_speculate, "_ratios", every, MODES["a draft"]),
    "what knew a refused token": (mar_speculate, "_accept", without_rollback, {"draft": Toy(0.9, 0.5), "ahead": 3}),
    "a wrong prefix": (mar_loop.MarRunner, "read", blind, MODES["self"]),
    "what was refused is drawn anew from the whole law": (
        denoising, "leftover_chance", lambda _: lambda ratio, eta: torch.ones_like(ratio, dtype=torch.float64),
        {"draft": Toy(0.9, 0.3), "ahead": 3}),
    "a trial starts as the refused draft did": (mar_speculate, "DRAFTS", lambda _: mar_loop.PATHS, MODES["self"]),
}  # fmt: skip


@pytest.mark.parametrize("error", PLANTED)
def test_a_planted_error_is_seen(error, monkeypatch, plain):
    place, name, wrong, mode = PLANTED[error]
    monkeypatch.setattr(place, name, wrong(getattr(place, name)))
    assert joint(pictures(mar_plan.Speculation(**mode), 60)[0], plain) < 1e-3


def test_cspd_is_seen(plain):
    """The published rule, with the same draft."""
    x, told = pictures(mar_plan.Speculation(NEAR, 3, "cspd"), 60)
    assert told.rounds == 2
    assert joint(x, plain) < 1e-3


# -- one picture among others -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["self", "a draft", "cspd", "annealed"])
def test_a_picture_does_not_depend_on_its_neighbours(mode):
    pipe, settings = tiny.pipeline(), {}
    own = {"self": {}, "annealed": {"ahead": 3}, "a draft": {"draft": tiny.pipeline(2), "ahead": 3}}
    pipe.enable_speculation(**own.get(mode, {"draft": tiny.transformer(2), "rule": "cspd"}))
    if mode == "annealed":
        settings = {"num_diffusion_steps": (9, 5), "annealing": "two-stage"}
    alone = pipe([2], generator=tiny.seeded(7), output_type="latent", guidance_scale=1.5, **settings)
    among = pipe([0, 2, 1], generator=tiny.seeded(1, 7, 2), output_type="latent", guidance_scale=1.5, **settings)
    torch.testing.assert_close(among.tokens[1], alone.tokens[0], atol=5e-3, rtol=1e-3)


def test_rows_accept_for_themselves(monkeypatch):
    pipe, counts, put = tiny.pipeline(), [], mar_loop.MarState.put
    pipe.enable_speculation(ahead=3)
    monkeypatch.setattr(mar_loop.MarState, "put", lambda self, *a: counts.append([*self.counts]) or put(self, *a))
    out = pipe([0, 1, 2, 3], generator=tiny.seeded(1, 2, 3, 4), output_type="latent", guidance_scale=1.5)
    assert any(len(set(now)) > 2 for now in counts)
    assert out.work["passes"] < 16 and out.stats.summary()["tested"] > 10


@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_the_model_as_its_own_draft_is_always_kept(scale):
    pipe = tiny.pipeline()
    pipe.enable_speculation(draft=tiny.transformer(0), ahead=4, eta=1.0)
    out = pipe([0, 1], generator=tiny.seeded(1, 2), output_type="latent", guidance_scale=scale)
    told = out.stats.summary()
    assert told["acceptance"] > 0.99 and abs(told["divergence"]) < 1e-3 and told["rounds"] == 4
    assert out.work["passes"] == 4 and out.work["draft_passes"] == 16


def test_speculation_is_switched_on_and_off():
    pipe = tiny.pipeline()
    want = pipe([1], generator=tiny.seeded(3), output_type="latent").tokens
    pipe.enable_speculation()
    out = pipe([1], generator=tiny.seeded(3), output_type="latent")
    assert out.stats is not None and out.work["passes"] < 16
    pipe.disable_speculation()
    again = pipe([1], generator=tiny.seeded(3), output_type="latent")
    assert again.stats is None and torch.equal(again.tokens, want)


def test_cspds_passes_do_not_depend_on_what_is_kept():
    pipe, passes = tiny.pipeline(), []
    for width in (0.01, 1e6):
        pipe.enable_speculation(draft=tiny.transformer(2), rule="cspd", ahead=4, prefill=0.15, width=width)
        out = pipe([0, 1], generator=tiny.seeded(1, 2), output_type="latent")
        passes.append(out.work["passes"])
        assert out.stats.rounds == 4 and out.work["draft_passes"] == 13  # ⌊0.15 · 16⌋ + 1 tokens before
    assert passes == [7, 7]


def test_cspd_draws_by_a_schedule_of_several_tokens():
    """Four iterations of a cosine schedule, two of them drafted; the exact rule takes no such schedule."""
    pipe, settings = tiny.pipeline(), {"num_inference_steps": 4, "output_type": "latent"}
    plain = pipe([0, 1], generator=tiny.seeded(1, 2), **settings)
    assert plain.work["passes"] == 4
    pipe.enable_speculation(draft=tiny.transformer(2), rule="cspd", ahead=2, prefill=0.3)
    out = pipe([0, 1], generator=tiny.seeded(1, 2), **settings)
    first = mar_loop.distribution(16, 4, 3.0, "linear", 9, "linear", 1.0).turns[1][1]  # ⌊0.3 · 4⌋ + 1 iterations before
    assert out.work["passes"] == 3 and out.work["draft_passes"] == 2 and out.stats.rounds == 1
    assert sum(out.stats.tested) == 2 * (16 - first) and out.stats.tested[first - 1] == 0
    pipe.enable_speculation()
    with pytest.raises(ValueError, match=r"the exact rule keeps .*pass num_inference_steps=16 \(got 4\)"):
        pipe([0], num_inference_steps=4)


def test_cspd_shares_its_noise(monkeypatch):
    """With the target as its own draft and every token alone, the two paths are one, and nothing is replaced."""
    seen = []
    original = cspd.log_chance
    monkeypatch.setattr(cspd, "log_chance", lambda *args: seen.append(original(*args)) or seen[-1])
    pipe = tiny.pipeline(final_noise=False)
    pipe.enable_speculation(draft=tiny.transformer(0), rule="cspd", ahead=1)
    pipe([0], generator=tiny.seeded(1), output_type="latent", guidance_scale=1.0)
    assert len(seen) == 16 and all(float(chance.min()) > -1e-3 for chance in seen)


def test_cspd_keeps_nothing_by_a_chance_that_is_no_number(monkeypatch):
    monkeypatch.setattr(cspd, "log_chance", lambda x, *args: torch.full((len(x),), float("nan")))
    pipe = tiny.pipeline()
    pipe.enable_speculation(draft=tiny.transformer(2), rule="cspd")
    assert pipe([0], generator=tiny.seeded(1), output_type="latent").stats.refused == 16


class Copies(TorchFunctionMode):
    """Lists by which tensors are indexed: on a GPU each is a copy from the host that waits."""

    def __init__(self) -> None:
        super().__init__()
        self.lists: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("__getitem__", "__setitem__"):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            self.lists += [part for part in index if isinstance(part, list)]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("draft", [None, 2])
def test_no_tensor_is_indexed_by_a_list(draft):
    """Nor by one of any length: what is known to the host goes to the device packed, see `mar_drafts.indices`."""
    pipe = tiny.pipeline()
    pipe.enable_speculation(draft=None if draft is None else tiny.transformer(draft), ahead=3)
    with Copies() as copies:
        out = pipe([0, 1, 2], generator=tiny.seeded(1, 2, 3), output_type="latent", num_diffusion_steps=(8, 4))
    assert out.stats.refused > 0 and copies.lists == []


@pytest.mark.parametrize(("settings", "message"), [
    ({"rule": "lantern"}, "rule must be one of gaussian_path, cspd; got 'lantern'"),
    ({"ahead": 0}, "ahead must be a whole number ≥ 1; got 0"),
    ({"ahead": 2.5}, "ahead must be a whole number ≥ 1; got 2.5"),
    *(({"eta": wrong}, f"eta must be in \\(0, 1\\]; got {wrong!r}") for wrong in (0.0, "1")),
    ({"prefill": 2}, "prefill must be in \\[0, 1\\]"),
    ({"rule": "cspd"}, "needs a draft model"),
    ({"window": 3}, "no setting 'window'; choose from ahead, rule, eta, prefill, width"),
    ({"draft": tiny.transformer(grid=3)}, "a draft must have the model's grid, 4; this one has 3"),
    ({"draft": tiny.vae()}, "a draft must be a MAR or a pipeline with one; got a AutoencoderKL"),
    ({"width": 3.0}, "width must be left out, since only the rule cspd has it; got 3.0"),
    ({"draft": tiny.transformer(2), "rule": "cspd", "eta": 0.5}, "eta must be left out, since the rule cspd has none"),
])  # fmt: skip
def test_senseless_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        tiny.pipeline().enable_speculation(**settings)


def test_what_has_no_density_is_refused():
    with pytest.raises(ValueError, match="final_noise=True"):
        tiny.pipeline(final_noise=False).enable_speculation()
    pipe, steps = tiny.pipeline(), []
    pipe.enable_speculation(prefill=0.5)
    with pytest.raises(ValueError, match="a temperature above 0; got 0"):
        pipe([0], temperature=0, callback_on_step_end=lambda *step: steps.append(step))
    pipe.scheduler = tiny.scheduler(final_noise=False)
    with pytest.raises(ValueError, match="final_noise=True"):
        pipe([0], callback_on_step_end=lambda *step: steps.append(step))
    assert not steps  # before anything is drawn


@pytest.mark.parametrize("speculative", [False, True])
def test_a_model_that_overflows_says_so(speculative):
    pipe = tiny.pipeline()
    if speculative:
        pipe.enable_speculation()
    torch.nn.init.constant_(pipe.transformer.decoder_norm.weight, torch.nan)
    with pytest.raises(ValueError, match=r"returns NaN\. If it overflows in float16"):
        pipe([0], generator=tiny.seeded(1))
