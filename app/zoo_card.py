"""Writes the model card of an embedded VLM from its recipe and its held-out results."""

from pathlib import Path

from mmspec.app import zoo_fit, zoo_vlm
from mmspec.zoo import language
from mmspec.zoo.recipes import DrafterRecipe, VlmRecipe

CARD = """---
license: apache-2.0
library_name: transformers
pipeline_tag: image-text-to-text
tags: [llava, mmspec, synthetic]
---
# {name}

A small but real `LlavaForConditionalGeneration` ({parameters:.1f} M parameters, bfloat16 safetensors), embedded in
mmspec so that its demo, tests and benchmarks run without a network. It describes drawn scenes of coloured shapes, in a
short and factual or a long and fanciful style, and answers questions about one or two pictures.

```python
from transformers import AutoModelForImageTextToText, AutoProcessor
from mmspec import zoo
processor = AutoProcessor.from_pretrained(zoo.path("{name}"))
model = AutoModelForImageTextToText.from_pretrained(zoo.path("{name}"))
```
Prompts it knows best: "{short}" and "{long}".

## Made from
- Data: scenes drawn by `mmspec.zoo.scenes` (one to six objects of seven shapes, eight colours, three textures and two
  sizes on seven backgrounds, 96 x 96 pixels) and texts composed from them by `mmspec.zoo.language`. No outside data, no
  other model.
- Vision tower: CLIP, {vision.layers} layers x {vision.width}, patch {vision.patch}, 64 visual tokens a picture; first
  trained alone to classify what stands in each cell of the grid ({tower.steps} steps of {tower.batch} scenes), then
  frozen.
- Decoder: Llama, {language_shape.layers} layers x {language_shape.width}, {language_shape.heads} heads, byte-level BPE
  of {language_shape.vocabulary} tokens; {steps} steps of {decoder.batch} packed rows. A row is one picture (in every
  {pair_every}th step two) and {slots} tokens of texts about it that see the picture and themselves only.
- Stages of the decoder: {decoder.stop} of {decoder.steps} planned steps on all texts; {polish.stop} of
  {polish.steps} on more questions about facts, with numbers and relations weighted {polish_weight:.0f} times;
  {settle.steps} without the sentence that counts objects by shape, which the model kept stating wrongly for repeated
  shapes.
- Optimiser: Muon for the matrices of the layers, AdamW for the rest, peak rates {tower.lr}, {decoder.lr}, {polish.lr}
  and {settle.lr} by stage, warm-up, plateau and linear decay, gradient clip {decoder.clip}, bfloat16 autocast.
  Seed {seed}.
- Wall time: {minutes:.0f} minutes on two CPU cores that other work shared.

## Held-out results
Greedy, float32, n = {n} scenes that no training step has drawn. An object is right when shape and colour are right at
its place; precision is over the objects stated, recall over those drawn. Counts are
the totals that captions state. Answers to questions must match exactly.

| fact | right | of | share |
|---|---|---|---|
{rows}

Short captions have {short_tokens:.0f} tokens in the mean, long ones {long_tokens:.0f} (with {long_words} different
words).

## Limits
- Counting is weak: the total in the first sentence is reliable, the number of one shape or colour is often wrong when
  it is more than one. Questions how two named objects stand to each other, what lies beside an object, whether one is
  there, and questions about two pictures are answered much less reliably than captions are written; see the table.
- It knows nothing but such drawings: on photographs, other shapes or other questions its answers mean nothing.
- The mood and fancy of long descriptions are invented.
- English only; at most two pictures in a prompt were trained.

Licence: Apache-2.0. To train it again: `mmspec zoo {name}`.
"""


def card(recipe: VlmRecipe, results: dict, minutes: float) -> str:
    """The text of README.md in the model's folder."""
    facts = [
        (f"{style} caption: {fact}", score)
        for style in ("short", "long")
        for fact, score in results[style]["facts"].items()
    ]
    facts += [(f"question: {kind}", score) for kind, score in results["questions"].items()]
    facts.append(("questions, all", _sum(results["questions"])))
    facts.append(("two pictures, all", _sum(results["pairs"])))
    rows = "\n".join(f"| {fact} | {right} | {of} | {right / of:.1%} |" for fact, (right, of) in facts if of)
    return CARD.format(
        name=recipe.name,
        parameters=results["parameters"] / 1e6,
        vision=recipe.vision,
        language_shape=recipe.language,
        tower=recipe.tower,
        decoder=recipe.decoder,
        polish=recipe.polish,
        settle=recipe.settle,
        polish_weight=recipe.polish_mix.emphasis,
        steps=_steps(recipe),
        pair_every=recipe.pair_every,
        slots=recipe.slots,
        seed=recipe.seed,
        minutes=minutes,
        rows=rows,
        n=results["short"]["scenes"],
        short=language.PROMPTS["short"],
        long=language.PROMPTS["long"],
        short_tokens=results["short"]["tokens"],
        long_tokens=results["long"]["tokens"],
        long_words=results["long"]["different words"],
    )


def wall_minutes(work: Path) -> float:
    """Minutes that all stages took, from their checkpoints."""
    return sum(zoo_fit.seconds(work / f"{stage}.pt") for stage in zoo_vlm.STAGES) / 60


def _steps(recipe: VlmRecipe) -> int:
    return sum(plan.stop or plan.steps for plan in (recipe.decoder, recipe.polish, recipe.settle))


def _sum(scores: dict[str, tuple[int, int]]) -> tuple[int, int]:
    return sum(right for right, _ in scores.values()), sum(of for _, of in scores.values())


DRAFTER_CARD = """---
license: apache-2.0
library_name: mmspec
tags: [speculative-decoding, eagle, mmspec]
---
# {name}

The EAGLE-2-style drafter of `{target}`, embedded in mmspec: one decoder layer on the target's final features, drafting
with the target's own head. It only proposes; what is generated is what `{target}` alone would generate.

```python
import mmspec
from mmspec import zoo
mmspec.enable(model, drafter=zoo.path("{name}"))
```

- Trained by online distillation (`mmspec train --method eagle`): {train} prompts about drawn scenes, half short and
  half long; the answers are the target's own ({sampled:.0%} sampled at temperature 1, the rest greedy), its features
  come from the frozen target as training runs.
- {steps} steps of {batch} sequences, {unroll} unrolled steps (training-time test), soft cross-entropy x {token} and
  SmoothL1 x {feature} with weights {decay}^step, Muon on matrices, peak rate {lr}, seed {seed}; {minutes:.0f} minutes
  on two CPU cores.
- Held out: {tau:.2f} tokens per target call for a greedy chain of {unroll} (bonus token included; the ceiling is
  {ceiling}), over the answers to {held_out} prompts.
- It recommends depth {depth}, width {width}, size {size}.

Licence: Apache-2.0. To train it again: `mmspec zoo {name}`.
"""


def drafter_card(recipe: DrafterRecipe, report: dict) -> str:
    """The text of README.md in the drafter's folder, from the report of its training."""
    r = report["recipe"]
    prompts = int(recipe.data.partition(":")[2]) - r["held_out"]
    return DRAFTER_CARD.format(
        name=recipe.name,
        target=recipe.target,
        train=prompts,
        sampled=r["sampled"],
        steps=r["steps"],
        batch=r["batch"],
        unroll=r["unroll"],
        token=r["token_weight"],
        feature=r["feature_weight"],
        decay=r["step_decay"],
        lr=r["lr"],
        seed=r["seed"],
        minutes=report["minutes"],
        tau=report["held_out_tau"],
        ceiling=r["unroll"] + 1,
        held_out=r["held_out"],
        depth=recipe.depth,
        width=recipe.width,
        size=recipe.size,
    )
