"""MAR against literal transcriptions of its formulas: trunk, head, sampler, generation; and its pipeline's manners."""

from __future__ import annotations

import gc
import math
import weakref
from functools import partial
from typing import Any

import numpy as np
import pytest
import tiny_mar as tiny
import torch
from diffusers import DDPMScheduler

import mmspec
from mmspec.compile import mar as mar_compiled
from mmspec.compile.capture import PiecewiseFunction
from mmspec.continuous import denoising
from mmspec.models import mar_head
from mmspec.models.mar import mar
from mmspec.models.mar_head import SHAPES, MARHead, PlainHead
from mmspec.models.mar_scheduler import MARScheduler, alpha_bar
from mmspec.pipelines.mar import loop as mar_loop
from mmspec.pipelines.mar.pipeline import MARPipeline
from mmspec.pipelines.patch import UnsupportedError

L, C = 16, tiny.SIZES["channels"]
TRAPS_TRUNK = ("packed positions", "class past the norm")
TRAPS_HEAD = ("sine first", "scale first")
TRAPS_CHAIN = ("spaced clock", "guided variance", "clipped")


def somewhere(count: int, seed: int) -> list[int]:
    return torch.randperm(L, generator=torch.Generator().manual_seed(seed))[:count].tolist()


def mask(*rows: list[int]) -> torch.Tensor:
    known = torch.zeros(len(rows), L, dtype=torch.bool)
    for row, places in zip(known, rows, strict=True):
        row[places] = True
    return known


# -- the networks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("counts", [(0, 0, 0), (4, 4, 4), (0, 5, 15), (16, 1, 7)])
@torch.no_grad()
def test_the_trunk_is_its_formulas(counts):
    model, tokens = tiny.transformer(), torch.randn(3, L, C)
    rows = [somewhere(n, i) for i, n in enumerate(counts)]
    labels = [0, 4, None]
    z = model(tokens, mask(*rows), torch.tensor([0, 4, tiny.CLASSES]))
    for b, (known, label) in enumerate(zip(rows, labels, strict=True)):
        torch.testing.assert_close(z[b].double(), tiny.literal_trunk(model, tokens[b], known, label), atol=1e-5, rtol=0)


@pytest.mark.parametrize("wrong", TRAPS_TRUNK)
@torch.no_grad()
def test_the_trunk_falls_into_no_trap(wrong):
    model, tokens, known = tiny.transformer(), torch.randn(1, L, C), somewhere(6, 0)
    z = model(tokens, mask(known), torch.tensor([1]))[0].double()
    assert (z - tiny.literal_trunk(model, tokens[0], known, 1, wrong)).abs().max() > 1e-2


@torch.no_grad()
def test_what_is_unknown_does_not_matter():
    model, tokens, labels = tiny.transformer(), torch.randn(2, L, C), torch.tensor([1, 2])
    known = mask(somewhere(3, 0), somewhere(8, 1))
    other = torch.where(known[..., None], tokens, 50 * torch.randn(2, L, C))
    assert torch.equal(model(tokens, known, labels), model(other, known, labels))


@pytest.mark.parametrize("t", [0, 7, 999])
@torch.no_grad()
def test_the_head_is_its_formulas(t):
    model, x, z = tiny.transformer(), torch.randn(3, C), torch.randn(3, 24)
    out = model.diffloss(x, torch.full((3,), t), z)
    for row in range(3):
        expected = tiny.literal_head(model, x[row], t, z[row].double())
        torch.testing.assert_close(out[row].double(), expected, atol=1e-4, rtol=0)  # cos(999) in fp32 is off by 3e-5
        for wrong in TRAPS_HEAD:
            assert (tiny.literal_head(model, x[row], t or 1, z[row].double(), wrong) - expected).abs().max() > 1e-3


@pytest.mark.parametrize(("size", "total", "head"), [("base", 208, 35.7), ("large", 478, 72.2), ("huge", 942, 151.2)])
def test_published_sizes(size, total, head):
    with torch.device("meta"):
        model = mar(size)
    count = [sum(weight.numel() for weight in part.parameters()) / 1e6 for part in (model, model.diffloss)]
    assert count == pytest.approx([total, head], abs=0.5)
    with pytest.raises(ValueError, match=f"choose from {', '.join(SHAPES)}"):
        mar("small")


# -- the sampler ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("T", [8, 25, 100])
def test_the_scheduler_is_diffusers_ddpm(T):
    theirs = DDPMScheduler(
        num_train_timesteps=1000, beta_schedule="squaredcos_cap_v2", prediction_type="epsilon",
        variance_type="learned_range", clip_sample=False, timestep_spacing="linspace",
    )  # fmt: skip
    ours = MARScheduler()
    torch.testing.assert_close(theirs.alphas_cumprod.double(), ours.alphas_cumprod, atol=2e-5, rtol=0)
    theirs.alphas_cumprod = ours.alphas_cumprod  # theirs are rounded to float32, which small ᾱ amplify
    theirs.set_timesteps(T)
    chain = ours.chain(T)
    assert torch.equal(chain.timesteps, theirs.timesteps)
    x = torch.randn(5, C, 1, 1)
    for k, t in enumerate(chain.timesteps):
        out = torch.randn(5, 2 * C, 1, 1)
        want = theirs.step(out, t, x, generator=torch.Generator().manual_seed(3)).prev_sample[..., 0, 0]
        noise = torch.randn(5, C, generator=torch.Generator().manual_seed(3)) * chain.noisy(k)
        got, _ = denoising.step(x[..., 0, 0], (out[..., 0, 0], None), None, noise, chain.steps[k])
        torch.testing.assert_close(got.double(), want.double(), atol=1e-5, rtol=1e-5)


def test_the_clock_is_nichols():
    assert torch.allclose(alpha_bar(1000), torch.tensor(tiny.literal_alpha_bar(), dtype=torch.float64), rtol=1e-12)
    assert MARScheduler().chain(100).timesteps[:3].tolist() == [999, 989, 979]
    for steps, config in ((1, {}), (2, {"skip_terminal": True}), (1001, {})):
        with pytest.raises(ValueError, match="number of steps must be from"):
            MARScheduler(**config).chain(steps)


@pytest.mark.parametrize(("final", "skip"), [(False, False), (True, True)])
@pytest.mark.parametrize("guided", [False, True])
@pytest.mark.parametrize("net", ["plain", "fast"])
@torch.no_grad()
def test_chains_are_their_formulas(net, guided, final, skip):
    model, T, tau = tiny.transformer(), 9, 0.8
    chain = MARScheduler(final_noise=final, skip_terminal=skip).chain(T)
    z, noise = torch.randn(2, 3, 24), torch.randn(3, len(chain) + 1, C)
    strength = torch.tensor([1.0, 2.5, 0.5]) if guided else None
    of = (z[0], z[1] if guided else None, strength)
    bound = PlainHead(model.diffloss, chain, *of) if net == "plain" else model.diffloss.bind(chain).on(*of)
    x = denoising.draw(bound, chain, noise, tau).x
    for row in range(3):
        both = (z[0, row].double(), z[1, row].double() if guided else None)
        weight = float(strength[row]) if guided else 1.0
        want = tiny.literal_chain(model, both, weight, noise[row], T, tau, final, skip)
        scale = float(want.abs().max())  # random heads give huge tokens where the first step amplifies
        torch.testing.assert_close(x[row].double(), want, atol=(1e-4 if skip else 1e-3) * max(1.0, scale), rtol=0)
        for wrong in TRAPS_CHAIN if weight != 1 and skip else ():
            apart = tiny.literal_chain(model, both, weight, noise[row], T, tau, final, skip, wrong) - want
            assert apart.abs().max() > 1e-2, wrong


# -- generation -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("iterations", [1, 5, 16])
@pytest.mark.parametrize("schedule", mar_loop.GUIDANCE)
def test_the_law_is_the_authors_loop(iterations, schedule):
    distribution = mar_loop.distribution(L, iterations, 3.0, schedule, 10, "linear", 1.0)
    unknown = L
    for s, (first, last) in enumerate(distribution.turns):
        left = max(1, min(unknown - 1, math.floor(L * math.cos(math.pi / 2 * (s + 1) / iterations))))
        weight = 1 + 2.0 * (L - left) / L if schedule == "linear" else 3.0
        assert first == L - unknown and distribution.guidance[first] == pytest.approx(weight)
        unknown = 0 if s == iterations - 1 else left
        assert last == L - unknown
    if iterations == L:
        assert distribution.turns == tuple((i, i + 1) for i in range(L))
    if schedule == "linear" and iterations == L:
        assert distribution.guidance == pytest.approx([1 + 2.0 * min(i + 1, L - 1) / L for i in range(L)])


@pytest.mark.parametrize(
    ("kind", "first", "middle", "last"), [("linear", 50, 27, 5), ("cosine", 50, 36, 5), ("two-stage", 50, 5, 5)]
)
def test_steps_are_annealed(kind, first, middle, last):
    steps = mar_loop.distribution(64, 64, 1.0, "constant", (50, 5), kind, 1.0).steps
    assert (steps[0], steps[32], steps[-1]) == (first, middle, last) and sorted(steps, reverse=True) == list(steps)


@pytest.mark.parametrize("settings", [
    {"num_inference_steps": 5, "guidance_scale": 3.0},
    {"num_inference_steps": 16, "guidance_scale": 1.0, "temperature": 0.9, "num_diffusion_steps": (9, 4)},
    {"num_inference_steps": 3, "guidance_scale": 2, "guidance_schedule": "constant", "fast_head": False},
])  # fmt: skip
@torch.no_grad()
def test_pictures_are_the_formulas(settings):
    pipe = tiny.pipeline()
    out = pipe(["blue star"], generator=tiny.seeded(5), output_type="latent", **settings)
    seed = torch.randint(2**62, (1,), generator=tiny.seeded(5)[0])
    n, scale = settings["num_inference_steps"], settings["guidance_scale"]
    schedule, steps = settings.get("guidance_schedule", "linear"), settings.get("num_diffusion_steps", 9)
    distribution = mar_loop.distribution(L, n, scale, schedule, steps, "linear", 1.0)
    order = mar_loop.canvas(pipe.transformer, torch.tensor([1]), seed.tolist()).order[0].tolist()
    tokens = torch.zeros(L, C, dtype=torch.float64)
    for first, last in distribution.turns:
        known = order[:first]
        cond = tiny.literal_trunk(pipe.transformer, tokens, known, 1)
        null = tiny.literal_trunk(pipe.transformer, tokens, known, None) if scale != 1 else None
        for turn in range(first, last):
            T, place = distribution.steps[turn], order[turn]
            noise = mar_loop.normal(seed, mar_loop.PATHS, L, torch.tensor([turn]), 0, T - 1, C)[0]
            z = (cond[place], None if null is None else null[place])
            tau = settings.get("temperature", 1.0)
            tokens[place] = tiny.literal_chain(
                pipe.transformer, z, distribution.guidance[turn], noise, T, tau, True, True
            )
    torch.testing.assert_close(out.tokens[0].double(), tokens, atol=5e-3, rtol=1e-3)


@pytest.mark.parametrize("settings", [{}, {"num_inference_steps": 5}])
def test_a_picture_does_not_depend_on_its_neighbours(settings):
    pipe = tiny.pipeline()
    alone = pipe([2], generator=tiny.seeded(7), output_type="latent", **settings).tokens
    among = pipe([0, 2, 1], generator=tiny.seeded(1, 7, 2), output_type="latent", **settings).tokens
    torch.testing.assert_close(among[1], alone[0], atol=1e-3, rtol=1e-3)
    assert (among[0] - among[1]).abs().max() > 0.1


def test_noise_is_standard_normal_and_told_apart():
    seeds = torch.arange(40)
    cells = [
        mar_loop.normal(seeds, kind, L, torch.full((40,), turn), trial, 8, C)
        for kind in (mar_loop.PATHS, mar_loop.DRAFTS) for turn in (0, 3) for trial in (0, 1)
    ]  # fmt: skip
    flat = torch.stack([cell.flatten() for cell in cells])
    assert flat.mean().abs() < 0.03 and (flat.std() - 1).abs() < 0.03
    assert (torch.corrcoef(flat) - torch.eye(len(cells))).abs().max() < 0.1
    assert flat.unique().numel() > 0.999 * flat.numel()


# -- manners ----------------------------------------------------------------------------------------------------------


def test_saved_and_loaded_it_draws_the_same(tmp_path):
    pipe = tiny.pipeline()
    pipe.save_pretrained(tmp_path)
    want = pipe(0, generator=tiny.seeded(1), output_type="pt").images
    back = MARPipeline.from_pretrained(tmp_path)
    back.set_progress_bar_config(disable=True)
    assert back.scheduler.config.final_noise and back.config.id2label
    assert torch.equal(back("red circle", generator=tiny.seeded(1), output_type="pt").images, want)


def test_outputs_and_callback():
    pipe, seen = tiny.pipeline(), []
    how = {"num_inference_steps": 5, "output_type": "latent"}
    want = pipe([0, 1], generator=tiny.seeded(1, 2), **how).images

    def spoils(_, step, done, more):
        seen.append((step, done))
        more["tokens"].zero_()

    assert torch.equal(pipe([0, 1], generator=tiny.seeded(1, 2), callback_on_step_end=spoils, **how).images, want)
    out = pipe([0, 1], num_inference_steps=5)
    assert [image.size for image in out.images] == [(16, 16)] * 2
    assert [step for step, _ in seen] == list(range(5)) and seen[-1][1] == L
    assert pipe([0], output_type="np", return_dict=False)[0].shape == (1, 16, 16, 3)
    assert out.work["passes"] == 5 and out.work["rows"] == 20


@pytest.mark.parametrize(("arguments", "message"), [
    ({"class_labels": 5}, "numbers from 0 to 4; got \\[5\\]"),
    ({"class_labels": "teapot"}, "names in id2label"),
    ({"class_labels": []}, "got none"),
    ({"class_labels": 0, "num_inference_steps": 17}, "from 1 to the picture's 16 tokens; got 17"),
    ({"class_labels": 0, "guidance_schedule": "cubic"}, "one of linear, constant; got 'cubic'"),
    ({"class_labels": 0, "annealing": "cubic"}, "annealing must be one of"),
    ({"class_labels": 0, "annealing": "cosine"}, "annealing must be left out, or num_diffusion_steps two numbers"),
    ({"class_labels": None}, r"numbers from 0 to .*; got \[None\]"),
    *(({"class_labels": 0, "temperature": wrong}, "temperature must be ≥ 0") for wrong in (-1, "1")),
    ({"class_labels": 0, "output_type": "gif"}, "output_type must be one of"),
    ({"class_labels": 0, "num_diffusion_steps": 1}, "number of steps must be from"),
    ({"class_labels": 0, "num_diffusion_steps": (9, 1)}, "number of steps must be from .* got 1"),
    ({"class_labels": 0, "num_diffusion_steps": (9, 3, 3)}, "a whole number, or two of them"),
    ({"class_labels": 0, "num_diffusion_steps": 4.5}, "a whole number, or two of them"),
    *(({"class_labels": 0, "num_inference_steps": wrong}, f"got {wrong}") for wrong in (2.5, 4.0)),
    *(({"class_labels": 0, "guidance_scale": wrong}, "guidance_scale must be a number") for wrong in (math.nan, "3")),
    ({"class_labels": [0, 1.5]}, r"got \[1.5\]"),
])  # fmt: skip
def test_senseless_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        tiny.pipeline()(**arguments, callback_on_step_end=lambda *_: pytest.fail("it draws"))


def test_a_class_may_be_a_tensor_of_one_number():
    pipe = tiny.pipeline()
    drawn = [pipe(label, generator=tiny.seeded(3), output_type="latent").tokens for label in (1, torch.tensor(1))]
    assert torch.equal(*drawn)


def test_parts_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="tokens of 6 channels, but this VAE has 4"):
        MARPipeline(tiny.transformer(channels=6), tiny.scheduler(), tiny.vae())
    with pytest.raises(ValueError, match="unknown default 'top_k'; choose from guidance_scale"):
        MARPipeline(tiny.transformer(), tiny.scheduler(), tiny.vae(), {"top_k": 1})


def test_enable_says_what_to_call_instead():
    with pytest.raises(UnsupportedError, match=r"tokens are continuous.*pipe\.enable_speculation\(\)"):
        mmspec.enable(tiny.pipeline())
    assert mmspec.MARPipeline is MARPipeline


@torch.no_grad()
@pytest.mark.parametrize("budget", [1, 5000])
def test_tables_in_chunks_change_nothing(budget, monkeypatch):
    model, chain = tiny.transformer(), tiny.scheduler().chain(9)
    z, noise, states = torch.randn(2, 3, 24), torch.randn(3, len(chain) + 1, C), torch.randn(3, len(chain), C)
    whole = model.diffloss.bind(chain).on(z[0], z[1], torch.full((3,), 2.0))
    want, along = denoising.draw(whole, chain, noise), whole.along(states)
    monkeypatch.setattr(mar_head, "BUDGET", budget)
    parts = model.diffloss.bind(chain).on(z[0], z[1], torch.full((3,), 2.0))
    torch.testing.assert_close(denoising.draw(parts, chain, noise).x, want.x, rtol=1e-5, atol=1e-4)
    for one, other in zip(parts.along(states), along, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    assert len(parts.table[1]) < len(chain)


@pytest.mark.parametrize("speculative", [False, True])
def test_a_call_folds_the_head_once_and_frees_it(speculative, monkeypatch):
    """Without the garbage collector; of a large head these are hundreds of megabytes."""
    pipe, folded, weights = tiny.pipeline(), MARHead.folded, list[Any]()

    def watched(self: MARHead) -> tuple[torch.Tensor, torch.Tensor]:
        made = folded(self)
        weights.append(weakref.ref(made[0]))
        return made

    monkeypatch.setattr(MARHead, "folded", watched)
    if speculative:
        pipe.enable_speculation()
    gc.collect()
    gc.disable()
    try:
        pipe([0], output_type="latent", num_diffusion_steps=(np.int64(9), 5), num_inference_steps=16)
        assert len(weights) == 1 and weights[0]() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("fast", [True, False])
def test_autocast_leaves_the_last_layer_in_float32(fast):
    pipe = tiny.pipeline()
    pipe.enable_speculation(ahead=3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        tokens = pipe([0], generator=tiny.seeded(1), output_type="latent", fast_head=fast).tokens
    assert tokens.dtype == torch.float32 and tokens.isfinite().all()


@torch.no_grad()
def test_bfloat16_ends_in_float32():
    """The weights are rounded, what is denoised is not: ε, v and tokens are float32, near those of float32 weights."""
    model, x, z = tiny.transformer(), torch.randn(3, C), torch.randn(3, 24)
    want = model.diffloss(x, torch.full((3,), 500), z)
    model.to(torch.bfloat16)
    out = model.diffloss(x, torch.full((3,), 500), z)
    assert out.dtype == torch.float32 and (out - want).abs().max() < 0.1 * want.abs().max()
    pipe = tiny.pipeline()
    pipe.transformer.to(torch.bfloat16)
    pipe.enable_speculation(ahead=3)
    tokens = pipe([0, 1], generator=tiny.seeded(1, 2), output_type="latent").tokens
    assert tokens.dtype == torch.float32 and tokens.isfinite().all()


# -- compiled ---------------------------------------------------------------------------------------------------------


def test_compiled_steps_draw_the_same(monkeypatch):
    """Here captured graphs run as they are; what is filled up, bound and put back is the same as with a compiler."""
    monkeypatch.setattr(
        mar_compiled, "PiecewiseFunction", partial(PiecewiseFunction, compile=lambda piece, examples: piece)
    )
    pipe, more = tiny.pipeline(), {"output_type": "latent", "guidance_scale": 1.5}
    for ahead, labels in ((None, [1]), (3, [1]), (3, [0, 2, 1])):  # 3 tokens side by side are filled up to 4
        pipe.disable_speculation()
        if ahead:
            pipe.enable_speculation(ahead=ahead)
        want, got = (pipe(labels, generator=tiny.seeded(*labels), compile=c, **more) for c in (False, True))
        torch.testing.assert_close(got.tokens, want.tokens, atol=5e-3, rtol=1e-3)
        assert got.work == want.work
    held = mar_compiled.of(pipe.transformer.diffloss)._captures
    assert all(held.values()) and {key[0][0][0] for key in held} > {1, 4}
    with torch.no_grad():
        pipe.transformer.diffloss.net.input_proj.weight = torch.nn.Parameter(torch.randn(20, C))
    assert not mar_compiled.of(pipe.transformer.diffloss)._captures  # other weights, nothing kept


@pytest.mark.full
def test_a_compiler_draws_the_same():
    pipe = tiny.pipeline()
    want, got = (pipe([1], generator=tiny.seeded(3), output_type="latent", compile=c).tokens for c in (False, True))
    torch.testing.assert_close(got, want, atol=5e-3, rtol=1e-3)
    assert all(mar_compiled.of(pipe.transformer.diffloss)._captures.values())


@pytest.mark.parametrize("broken", ["no compiler", "wrong"])
def test_what_cannot_be_compiled_runs_as_it_is(broken, monkeypatch):
    def compile(piece: Any, examples: Any) -> Any:
        if broken == "no compiler":
            raise RuntimeError("no g++")
        return lambda *given: [t * 1.01 for t in piece(*given)]

    monkeypatch.setattr(mar_compiled, "PiecewiseFunction", partial(PiecewiseFunction, compile=compile))
    pipe = tiny.pipeline()
    want = pipe([1], generator=tiny.seeded(3), output_type="latent").tokens
    with pytest.warns(UserWarning, match="uncompiled: " + {"wrong": "its outputs"}.get(broken, "RuntimeError: no g")):
        got = pipe([1], generator=tiny.seeded(3), output_type="latent", compile=True).tokens
    assert torch.equal(got, want)
    with pytest.raises(ValueError, match="leave fast_head=False out"):
        pipe([1], compile=True, fast_head=False)


def test_timesteps_are_those_of_an_accumulated_stride():
    """Published code adds the stride up before it rounds; exact halves, at odd numbers of steps, depend on that."""
    for steps in range(2, 251):
        now, stride, wanted = 0.0, 999 / (steps - 1), []
        for _ in range(steps):
            wanted.append(round(now))
            now += stride
        assert MARScheduler().chain(steps).timesteps.tolist() == wanted[::-1], steps
