"""Writes the model cards of the embedded continuous image models from their recipe and their held-out results."""

from __future__ import annotations

from typing import Any

from mmspec.zoo import classes
from mmspec.zoo.recipes import MarRecipe

TARGET = """---
license: apache-2.0
library_name: diffusers
pipeline_tag: unconditional-image-generation
tags: [mar, mmspec, synthetic]
---
# {name}

A small but real MAR, embedded in mmspec so that tests and benchmarks run without a network: a class-conditional masked
transformer ({transformer:.1f} M parameters, {head:.1f} M of them in its diffusion head) over {grid} x {grid} continuous
tokens of {channels} channels, and its AutoencoderKL ({vae:.1f} M), all in bfloat16 safetensors. It draws 64 x 64
pictures of one coloured shape.

```python
import mmspec
from mmspec import zoo

pipe = mmspec.MARPipeline.from_pretrained(zoo.path("{name}"))
pipe.enable_speculation()  # its own drafts; or draft=zoo.path("{draft}")
pipe("red circle").images[0]
```
Classes: a colour and a shape, such as "{first}" and "{last}" ({classes} of them, `pipe.config.id2label`).
Size, texture, place and background are the model's own choice.

![held-out pictures as the autoencoder gives them back; below each the model's own of that class](samples.png)

## Made from
- Data: pictures drawn by `mmspec.zoo.classes`, one object on one of {backgrounds} backgrounds; the transformers see
  {pictures} of them. No outside data, no other model.
- Autoencoder: {vae_channels} channels, {factor} x {factor} pixels a token; {vae_steps} steps of {vae_batch} pictures
  in four stages with Muon: all pixels alike; objects {emphasis:g} times; an object in every cell, errors of colour
  {chroma:g} times; the decoder alone on ordinary pictures. No adversarial and no perceptual loss.
- Transformer: encoder and decoder of {shape.layers} layers x {shape.dim}, {shape.buffer} places for the class, a head
  of {shape.head_layers} layers x {shape.head_width}; {plan.steps} steps of {plan.batch} pictures, hidden tokens noised
  {shape.repeats} times a step, {shape.drop:.0%} of the classes shown as none; Muon for the
  matrices of the layers, AdamW for the rest, peak rate {plan.lr}, seed {seed}, float32. The learnt places start as
  sines and cosines of row and column. Beside the denoising loss, throw-away classifiers on the conditioning have to say
  what the hidden squares show ({tell:g} times; squares with an object in it count {told:g} times): from the loss alone
  the model had not learnt in as many steps that there is one object.
- Sampler: {steps} denoising steps without the first, with noise at the last, guidance {guidance:g} (linear).

## Held-out results
The autoencoder gives pictures back at {psnr:.1f} dB. The denoising loss of held-out tokens is {loss:.4f}, and
{more:.4f} more under another picture's class. What `scenes-vlm` reads in {n} pictures of held-out classes: {read};
under the next picture's class: {misread}.

How fast they come is measured by `mmspec bench image --model mar`: see docs/continuous.md.

Licence: Apache-2.0. To train it again: `mmspec zoo {name}`.
"""

DRAFT = """---
license: apache-2.0
library_name: diffusers
tags: [mar, speculative-decoding, mmspec]
---
# {draft}

A smaller MAR ({transformer:.1f} M parameters, {shape.layers} layers x {shape.dim}, a head of {shape.head_layers} layers
x {shape.head_width}) on the autoencoder of `{name}`, trained on the same pictures ({plan.steps} steps of {plan.batch}).
It only drafts: what is drawn has the distribution of `{name}`.

```python
pipe.enable_speculation(draft=zoo.path("{draft}"))
```

Its denoising loss of held-out tokens is {loss:.4f}; that of `{name}` is {target:.4f}. For itself it draws this:

![held-out pictures as the autoencoder gives them back; below each the draft's own of that class](samples.png)

Licence: Apache-2.0. To train it again: `mmspec zoo {name}`.
"""


def target_card(recipe: MarRecipe, results: dict[str, Any]) -> str:
    """The text of README.md in the target's folder."""
    shape, vae = recipe.target_trunk, recipe.vae
    factor = 2 ** (len(vae.channels) - 1)
    return TARGET.format(
        name=recipe.name, draft=recipe.draft, grid=classes.SIDE // factor, channels=vae.latent, factor=factor,
        first=classes.NAMES[0], last=classes.NAMES[-1], classes=len(classes.NAMES), backgrounds=len(classes.PLAIN),
        pictures=recipe.pictures, tell=recipe.tell, told=recipe.emphasis,
        vae_channels=vae.channels, vae_steps=vae.plan.steps + vae.objects.steps + vae.colours.steps + vae.finish.steps,
        vae_batch=vae.plan.batch, emphasis=vae.emphasis, chroma=vae.chroma, shape=shape, plan=shape.plan,
        seed=recipe.seed, steps=recipe.diffusion_steps, guidance=recipe.guidance,
        more=results["other"] - results["loss"], read=_told(results["read"]), misread=_told(results["misread"]),
        **{name: results[name] for name in ("psnr", "loss", "n")},
        **{name: count / 1e6 for name, count in results["parameters"].items()},
    )  # fmt: skip


def draft_card(recipe: MarRecipe, results: dict[str, Any], target: float) -> str:
    """The text of README.md in the draft's folder; `target` is the loss of its target."""
    return DRAFT.format(
        name=recipe.name, draft=recipe.draft, shape=recipe.draft_trunk, plan=recipe.draft_trunk.plan, target=target,
        loss=results["loss"], transformer=results["parameters"]["transformer"] / 1e6,
    )  # fmt: skip


def _told(facts: dict[str, tuple[int, int]]) -> str:
    return ", ".join(f"{fact} {right} of {of}" for fact, (right, of) in facts.items() if fact in ("colour", "shape"))
