"""The training of the embedded MAR: a few real steps of every stage, the loss against its formula, export and cards."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tiny_mar as tiny
import torch

from benchmarks.zoo import classes
from benchmarks.zoo import mar as zoo_mar
from benchmarks.zoo.recipes.pictures import SCENES_MAR, MarRecipe
from mmspec.models.mar import MARTransformer2DModel
from mmspec.models.mar_scheduler import MARScheduler
from mmspec.pipelines.mar.pipeline import MARPipeline


def short(steps: int) -> MarRecipe:
    """The recipe with tiny networks and few steps."""

    def brief(plan):
        return replace(plan, steps=steps, batch=2, warmup=0.3)

    vae = SCENES_MAR.vae
    vae = replace(
        vae,
        channels=(8, 8, 8, 8),
        plan=brief(vae.plan),
        objects=brief(vae.objects),
        colours=brief(vae.colours),
        finish=brief(vae.finish),
    )
    target, draft = (
        replace(t, dim=16, layers=1, heads=2, head_layers=1, head_width=16, plan=brief(t.plan))
        for t in (SCENES_MAR.target_trunk, SCENES_MAR.draft_trunk)
    )
    return replace(SCENES_MAR, vae=vae, target_trunk=target, draft_trunk=draft, diffusion_steps=5, pictures=9)


def test_all_stages_run_and_are_taken_up(tmp_path, monkeypatch):
    monkeypatch.setattr(zoo_mar, "read", lambda pipe, count: {"read": {"shape": (1, 2)}, "misread": {"shape": (0, 2)}})
    monkeypatch.setattr(zoo_mar, "sheet", lambda pipe: classes.render(classes.held_out(1)[0]))
    said: list[str] = []
    recipe, out = short(2), tmp_path / "out" / "scenes-mar"
    zoo_mar.train(recipe, out, tmp_path / "work", said.append)
    stages = ("vae", "vae-objects", "vae-colours", "vae-finish", "target", "draft")
    assert {path.stem for path in (tmp_path / "work").glob("*.pt")} == {*stages}
    pipe = MARPipeline.from_pretrained(out)
    pipe.set_progress_bar_config(disable=True)
    draft = MARTransformer2DModel.from_pretrained(out.with_name("scenes-mar-draft"))
    assert next(pipe.transformer.parameters()).dtype == torch.float32  # diffusers loads bfloat16 files so
    pipe.enable_speculation(draft=draft, ahead=2)
    assert pipe("blue ring", generator=tiny.seeded(0)).images[0].size == (classes.SIDE, classes.SIDE)
    for folder, what in ((out, "mmspec.MARPipeline.from_pretrained"), (out.with_name(recipe.draft), "It only drafts")):
        card = (folder / "README.md").read_text()
        assert what in card and "{" not in card.replace("{name}", "")
    count = len(said)
    zoo_mar.train(recipe, out, tmp_path / "work", said.append)
    assert not any(line.startswith("step") for line in said[count:])  # nothing is trained again


def test_the_loss_falls():
    torch.manual_seed(0)
    recipe, clock = short(2), MARScheduler().chain(1000)
    model = zoo_mar.build_model(recipe, replace(recipe.target_trunk, dim=32, head_width=32))
    tokens, labels = 0.3 * torch.randn(16, 64, 8) + 1.0, torch.zeros(16, dtype=torch.long)
    tool, seen = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    for step in range(40):
        loss = zoo_mar.loss_of(model, clock, tokens, labels, np.random.default_rng(step), 1)
        loss.backward()
        tool.step()
        tool.zero_grad()
        seen.append(loss.item())
    assert np.mean(seen[-8:]) < 0.7 * np.mean(seen[:4])


@torch.no_grad()
@pytest.mark.parametrize("time", [3, 400, 990])
def test_the_loss_is_its_formula(time):
    """ε's squared error, and the KL of the step's two Gaussians in bits, the network's mean held fixed."""
    model, x, noise = tiny.transformer(), torch.randn(6, 4).double(), torch.randn(6, 4).double()
    z, bars = torch.randn(6, 24), tiny.literal_alpha_bar()
    got = zoo_mar.denoising_loss(
        model.diffloss, MARScheduler().chain(1000), x.float(), z, torch.full((6,), time), noise.float()
    )
    bar, before = bars[time], bars[time - 1]
    beta = 1 - bar / before
    noisy = bar**0.5 * x + (1 - bar) ** 0.5 * noise
    out = torch.stack([tiny.literal_head(model, noisy[i], time, z[i].double()) for i in range(6)])
    eps, v = out.chunk(2, 1)

    def mean(clean):
        return beta * before**0.5 / (1 - bar) * clean + (1 - before) * (1 - beta) ** 0.5 / (1 - bar) * noisy

    tilde = (1 - before) / (1 - bar) * beta
    one = torch.distributions.Normal(mean(x), tilde**0.5)
    log_var = (v + 1) / 2 * np.log(beta) + (1 - v) / 2 * np.log(tilde)
    other = torch.distributions.Normal(mean((noisy - (1 - bar) ** 0.5 * eps) / bar**0.5), torch.exp(0.5 * log_var))
    want = ((eps - noise) ** 2 + torch.distributions.kl_divergence(one, other) / np.log(2)).mean(1)
    torch.testing.assert_close(got.double(), want, rtol=2e-3, atol=2e-3)


def test_classes_say_colour_and_shape():
    samples = classes.held_out(200)
    assert len(classes.NAMES) == 56 and {sample.label for sample in samples} <= set(range(56))
    assert all(classes.NAMES[s.label] == f"{s.thing.colour} {s.thing.shape}" for s in samples)
    sample = samples[0]
    image = np.asarray(classes.render(sample)).astype(int)
    middle = image[int(sample.thing.y), int(sample.thing.x)]
    assert image.shape == (64, 64, 3) and classes.covered(sample)[int(sample.thing.y), int(sample.thing.x)]
    assert classes.render(sample).tobytes() == classes.render(classes.held_out(1)[0]).tobytes() and middle.min() >= 0
