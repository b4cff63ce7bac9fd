"""Builds and trains the embedded continuous image models: their AutoencoderKL, then a large and a small MAR on it."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.zoo import card, classes, lessons, sheets
from benchmarks.zoo.card import Results, Score
from benchmarks.zoo.faithful import PictureReader
from benchmarks.zoo.fit import Say, fit
from benchmarks.zoo.recipes.pictures import MarRecipe, Trunk
from mmspec.continuous.denoising import Chain
from mmspec.models.mar import MARTransformer2DModel
from mmspec.models.mar_head import MARHead
from mmspec.models.mar_scheduler import MARScheduler
from mmspec.pipelines.mar.files import AutoencoderKL, build_vae
from mmspec.pipelines.mar.pipeline import MARPipeline

Encoded = tuple[Tensor, Tensor, Tensor]  # tokens [N, L, C], labels [N], and what the squares show [N, L, 5]
_VAE, _TARGET, _DRAFT, _OBJECTS, _COLOURS, _FINISH = range(11, 17)  # which stage a random state belongs to


def pixels(samples: list[classes.Sample]) -> Tensor:
    return sheets.pixels([classes.render(sample) for sample in samples])


def train_vae(recipe: MarRecipe, work: Path, say: Say) -> AutoencoderKL:
    """Train the autoencoder, or go on from its checkpoint in `work`; its latents are scaled to unit variance."""
    plan = recipe.vae
    torch.manual_seed(recipe.seed)
    vae = build_vae(plan.channels, plan.latent, plan.groups, classes.SIDE)

    def given_back(seen: Tensor, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        """What comes back of pictures through noisy latents, less the pictures; and the price of the latents."""
        posterior = vae.encode(seen).latent_dist
        noise = torch.from_numpy(rng.standard_normal(posterior.mean.shape)).float()
        far = vae.decode(posterior.mean + posterior.std * noise).sample - seen
        return far, plan.kl * posterior.kl().mean() / posterior.mean[0].numel()

    def scenes_at(
        step: int, stream: int, batch: int, emphasis: float, error: Callable[[Tensor], Tensor], priced: bool = True
    ) -> tuple[Tensor, int]:
        rng = np.random.default_rng((recipe.seed, stream, step))
        samples = [classes.draw(rng) for _ in range(batch)]
        touched = torch.from_numpy(np.stack([classes.covered(sample) for sample in samples]))[:, None]
        weight = torch.where(touched, emphasis, 1.0)
        far, price = given_back(pixels(samples), rng)
        return (error(far) * (weight / weight.mean())).mean() + (price if priced else 0), len(samples)

    def alike(far: Tensor) -> Tensor:
        return far**2 + 0.2 * far.abs()

    def crowds_at(step: int) -> tuple[Tensor, int]:
        rng = np.random.default_rng((recipe.seed, _COLOURS, step))
        far, price = given_back(sheets.pixels([classes.crowd(rng) for _ in range(plan.colours.batch)]), rng)
        return _coloured(far, plan.chroma).mean() + price, len(far)

    plainly = partial(scenes_at, batch=plan.plan.batch, error=alike)
    finely = partial(scenes_at, stream=_FINISH, batch=plan.finish.batch, emphasis=plan.emphasis, priced=False)
    fit(vae, plan.plan, partial(plainly, stream=_VAE, emphasis=1.0), work / "vae.pt", say)
    fit(vae, plan.objects, partial(plainly, stream=_OBJECTS, emphasis=plan.emphasis), work / "vae-objects.pt", say)
    fit(vae, plan.colours, crowds_at, work / "vae-colours.pt", say)
    vae.encoder.requires_grad_(False)
    vae.quant_conv.requires_grad_(False)
    fit(vae, plan.finish, partial(finely, error=partial(_coloured, chroma=plan.chroma)), work / "vae-finish.pt", say)
    vae.eval().requires_grad_(False)
    rng = np.random.default_rng((recipe.seed, _VAE))
    means = vae.encode(pixels([classes.draw(rng) for _ in range(64)])).latent_dist.mean
    vae.register_to_config(scaling_factor=float(1 / means.std()))
    return vae


def _coloured(far: Tensor, chroma: float) -> Tensor:
    """Squared error of brightness, and `chroma` times that of colour, of far [B, 3, h, w]."""
    bright = far.mean(1, keepdim=True)
    return bright**2 + chroma * (far - bright) ** 2


def build_model(recipe: MarRecipe, trunk: Trunk) -> MARTransformer2DModel:
    """A MAR transformer of this shape, with random weights, but for its places: they start as waves.

    From noise it takes very long to find out which places are neighbours.
    """
    torch.manual_seed(recipe.seed)
    model = MARTransformer2DModel(
        dim=trunk.dim, layers=trunk.layers, heads=trunk.heads, head_layers=trunk.head_layers,
        head_width=trunk.head_width, grid=classes.SIDE // 2 ** (len(recipe.vae.channels) - 1),
        channels=recipe.vae.latent, buffer=trunk.buffer, classes=len(classes.NAMES),
    )  # fmt: skip
    waves = _waves(model.config.grid, trunk.dim)
    for places in (model.encoder_pos_embed_learned, model.decoder_pos_embed_learned):
        places.data[0, trunk.buffer :] = waves
    return model


def _waves(grid: int, width: int) -> Tensor:
    """[grid², width]: sines and cosines of every place's row, then of its column, in reading order."""
    turns = 100.0 ** (torch.arange(0, width, 4) / -width)
    places = torch.arange(grid * grid)
    angles = torch.cat([torch.outer(axis, turns) for axis in (places // grid, places % grid)], 1)
    return torch.cat([angles.sin(), angles.cos()], 1)


def build_pipeline(recipe: MarRecipe, model: MARTransformer2DModel, vae: AutoencoderKL) -> MARPipeline:
    defaults = {
        "guidance_scale": recipe.guidance, "temperature": recipe.temperature,
        "num_inference_steps": model.tokens, "num_diffusion_steps": recipe.diffusion_steps,
    }  # fmt: skip
    scheduler = MARScheduler(final_noise=True, skip_terminal=True)
    return MARPipeline(model, scheduler, vae, defaults, dict(enumerate(classes.NAMES)))


def denoising_loss(head: MARHead, clock: Chain, x: Tensor, z: Tensor, t: Tensor, noise: Tensor) -> Tensor:
    """[R] of tokens x [R, C] noised to times t [R]: squared error of ε, and the variational bound of the variance.

    The bound is in bits per channel and sees the mean as a constant (Nichol & Dhariwal 2021, §3.1).
    """
    root, rest, clean, weight, beta, tilde = clock.table.flip(0)[t].unbind(1)
    at = (slice(None), None)
    noisy = root[at] * x + rest[at] * noise
    eps, v = head(noisy, t, z).chunk(2, 1)
    mean = clean[at] * x + weight[at] * noisy
    guess = clean[at] * (noisy - rest[at] * eps.detach()) / root[at] + weight[at] * noisy
    share = (v + 1) / 2
    log_var = share * beta[at] + (1 - share) * tilde[at]
    bound = 0.5 * (log_var - tilde[at] + torch.exp(tilde[at] - log_var) + (mean - guess) ** 2 * torch.exp(-log_var) - 1)
    return (F.mse_loss(eps, noise, reduction="none") + bound / math.log(2)).mean(1)


def loss_of(
    model: MARTransformer2DModel, clock: Chain, tokens: Tensor, labels: Tensor, rng: np.random.Generator, repeats: int,
    lesson: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """Mean denoising loss of the hidden tokens of pictures; all show the same number of tokens, often few.

    `lesson` adds something for the conditioning of the hidden tokens [R, D], given which they are, bool [B, L].
    """
    B, L = tokens.shape[:2]
    shown = min(L - 1, int(L * rng.random() ** 2))
    hidden = torch.from_numpy(rng.random((B, L)).argsort(1) >= shown)
    z = model(tokens, ~hidden, labels, [shown] * B)[hidden]
    x = tokens[hidden].repeat(repeats, 1)
    t = torch.from_numpy(rng.integers(len(clock), size=len(x)))
    noise = torch.from_numpy(rng.standard_normal(x.shape)).float()
    loss = denoising_loss(model.diffloss, clock, x, z.repeat(repeats, 1), t, noise).mean()
    return loss if lesson is None else loss + lesson(z, hidden)


@torch.no_grad()
def latents(vae: AutoencoderKL, samples: list[classes.Sample]) -> Tensor:
    """Tokens [B, L, C] of pictures, of about unit variance."""
    mean: Tensor = vae.encode(pixels(samples)).latent_dist.mean * vae.config.scaling_factor
    return mean.flatten(2).transpose(1, 2)


def encoded(recipe: MarRecipe, vae: AutoencoderKL, at_once: int = 64) -> Encoded:
    """The pictures to train on."""
    rng = np.random.default_rng((recipe.seed, _TARGET))
    samples = [classes.draw(rng) for _ in range(recipe.pictures)]
    parts = [latents(vae, samples[i : i + at_once]) for i in range(0, len(samples), at_once)]
    grid = math.isqrt(parts[0].shape[1])
    told = np.stack([lessons.shown(sample.picture, grid) for sample in samples])
    return torch.cat(parts), torch.tensor([sample.label for sample in samples]), torch.from_numpy(told)


def train_model(recipe: MarRecipe, stage: str, data: Encoded, work: Path, say: Say) -> MARTransformer2DModel:
    """Train the "target" or the "draft" on `encoded` pictures, or on from the checkpoint in `work`."""
    trunk, number = {"target": (recipe.target_trunk, _TARGET), "draft": (recipe.draft_trunk, _DRAFT)}[stage]
    model, clock = build_model(recipe, trunk), MARScheduler().chain(1000)
    tokens, labels, told = data
    lesson = lessons.Probe(trunk.dim, recipe.emphasis)

    def loss_at(step: int) -> tuple[Tensor, int]:
        rng = np.random.default_rng((recipe.seed, number, step))
        some = torch.from_numpy(rng.integers(len(labels), size=trunk.plan.batch))
        dropped = torch.from_numpy(rng.random(len(some)) < trunk.drop)
        asked = torch.where(dropped, len(classes.NAMES), labels[some])

        def telling(z: Tensor, hidden: Tensor) -> Tensor:
            return recipe.tell * lesson(z, told[some][hidden])

        return loss_of(model, clock, tokens[some], asked, rng, trunk.repeats, telling), len(some)

    taught = nn.ModuleDict({"model": model.train(), "lesson": lesson})
    fit(taught, trunk.plan, loss_at, work / f"{stage}.pt", say)
    return model.eval()


@torch.no_grad()
def score_vae(vae: AutoencoderKL, count: int = 64) -> float:
    """PSNR in dB on held-out pictures."""
    seen = pixels(classes.held_out(count))
    return sheets.psnr(_given_back(vae, seen), seen)


@torch.no_grad()
def score_model(model: MARTransformer2DModel, vae: AutoencoderKL, count: int = 64) -> Results:
    """The training loss on held-out pictures, under their own class and under that of the next picture."""
    samples, clock = classes.held_out(count), MARScheduler().chain(1000)
    tokens, labels = latents(vae, samples), torch.tensor([sample.label for sample in samples])

    def loss(labels: Tensor) -> float:
        rng = np.random.default_rng(0)
        return float(torch.stack([loss_of(model, clock, tokens, labels, rng, 1) for _ in range(4)]).mean())

    return {"loss": loss(labels), "other": loss(labels.roll(1))}


def sheet(pipe: MARPipeline, count: int = 16) -> Image.Image:
    """Held-out pictures as the autoencoder gives them back; below each the model's own of that class."""
    samples = classes.held_out(count)
    made = sheets.drawn(pipe, [sample.label for sample in samples])
    known = pipe.image_processor.postprocess(_given_back(pipe.vae, pixels(samples)), "pil")
    return sheets.paired(known, made)


@torch.no_grad()
def _given_back(vae: AutoencoderKL, seen: Tensor) -> Tensor:
    made: Tensor = vae.decode(vae.encode(seen).latent_dist.mean).sample.clamp(-1, 1)
    return made


def read(pipe: MARPipeline, count: int) -> dict[str, dict[str, Score]]:
    """What the embedded VLM reads in pictures of held-out classes, under their own class and the next picture's."""
    samples = classes.held_out(count)
    made = sheets.drawn(pipe, [sample.label for sample in samples])
    wanted = [sample.picture for sample in samples]
    reader = PictureReader()
    return {
        "read": reader.score(made, wanted)["facts"],
        "misread": reader.score(made, [*wanted[1:], wanted[0]])["facts"],
    }


def evaluate(recipe: MarRecipe, out_dir: Path, say: Say, count: int = 64) -> None:
    """Score what is exported, and write its cards."""
    pipe = MARPipeline.from_pretrained(out_dir, torch_dtype=torch.float32)
    vae, losses = pipe.vae, []
    for folder in (out_dir, out_dir.with_name(recipe.draft)):
        within = "transformer" if folder == out_dir else None
        model = MARTransformer2DModel.from_pretrained(folder, torch_dtype=torch.float32, subfolder=within).eval()
        results = score_model(model, vae)
        results["parameters"] = sheets.parameters({"transformer": model, "head": model.diffloss, "vae": vae})
        losses.append(results["loss"])
        drawn = build_pipeline(recipe, model, vae)
        sheet(drawn).save(folder / "samples.webp", quality=80)
        if folder == out_dir:
            results |= {"psnr": score_vae(vae), "n": count, **read(drawn, count)}
            text = card.mar_card(recipe, results)
        else:
            text = card.mar_draft_card(recipe, results, losses[0])
        (folder / "README.md").write_text(text)
        say(f"{folder.name}: " + ", ".join(f"{name} {value}" for name, value in results.items()))


def export(pipe: MARPipeline, folder: Path, whole: bool) -> None:
    """The pipeline, or its transformer alone, in bfloat16. The modules themselves are cast, too."""
    pipe.transformer.to(torch.bfloat16)
    if whole:
        pipe.vae.to(torch.bfloat16)
        pipe.save_pretrained(folder)
    else:
        pipe.transformer.save_pretrained(folder)
    sheets.readable(folder)


def train(recipe: MarRecipe, out_dir: Path, work: Path, say: Say) -> None:
    """Train autoencoder, target and draft, or on from the checkpoints in `work`; export the latter two side by side."""
    vae = train_vae(recipe, work, say)
    say(f"autoencoder: {score_vae(vae):.2f} dB, latents scaled by {vae.config.scaling_factor:.3f}")
    data = encoded(recipe, vae)
    for stage, folder in (("target", out_dir), ("draft", out_dir.with_name(recipe.draft))):
        model = train_model(recipe, stage, data, work, say)
        export(build_pipeline(recipe, model, vae), folder, whole=stage == "target")
        vae.float()
        say(f"exported to {folder}")
    evaluate(recipe, out_dir, say)
