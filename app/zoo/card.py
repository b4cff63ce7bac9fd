"""Writes the model cards of the embedded models that see and that draw from recipes and held-out results."""

from pathlib import Path

from mmspec.app.zoo import fit as zoo_fit
from mmspec.train.recipes import RECIPES as HOW
from mmspec.zoo import clips, language, pictures
from mmspec.zoo.recipes import Hybrid, ImageRecipe, VlmRecipe

CARD = """---
license: apache-2.0
library_name: transformers
pipeline_tag: image-text-to-text
tags: [{tag}, mmspec, synthetic]
---
# {name}

A small but real `{model}` ({parameters:.1f} M parameters, bfloat16 safetensors), embedded in
mmspec so that its demo, tests and benchmarks run without a network. It describes drawn scenes of coloured shapes, in a
short and factual or a long and fanciful style, and answers questions about one or two pictures{more}.

```python
from transformers import AutoModelForImageTextToText, AutoProcessor
from mmspec import zoo
processor = AutoProcessor.from_pretrained(zoo.path("{name}"))
model = AutoModelForImageTextToText.from_pretrained(zoo.path("{name}"))
```
Prompts it knows best: "{short}" and "{long}"{clip}.

## Made from
{made}
- Wall time: {minutes:.0f} minutes on {cores} that other work shared.

## Held-out results
Greedy, float32, n = {n} that no training step has drawn. An object is right when shape and colour are right at its
place; precision is over the objects stated, recall over those drawn. Counts are the totals that captions state. Answers
to questions must match exactly.{explained}

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
- English only; {limit}.

Licence: Apache-2.0. To train it again: `mmspec zoo {name}`.
"""

MADE = """\
- Data: scenes drawn by `mmspec.zoo.scenes` (one to six objects of seven shapes, eight colours, three textures and two
  sizes on seven backgrounds, 96 x 96 pixels) and texts composed from them by `mmspec.zoo.language`. No outside data, no
  other model.
- Vision tower: CLIP, {vision.layers} layers x {vision.width}, patch {vision.patch}, 64 visual tokens a picture; first
  trained alone to classify what stands in each cell of the grid ({tower.steps} steps of {tower.batch} scenes), then
  frozen.
- Decoder: Llama, {language.layers} layers x {language.width}, {language.heads} heads, byte-level BPE of
  {language.vocabulary} tokens; {steps} steps of {decoder.plan.batch} packed rows. A row is one picture (in every
  {pair_every}th step two) and up to {slots} tokens of texts about it that see the picture and themselves only.
- Stages of the decoder: {decoder.plan.stop} of {decoder.plan.steps} planned steps on all texts; {polish.plan.stop} of
  {polish.plan.steps} on more questions about facts, with numbers and relations weighted {polish.mix.emphasis:.0f}
  times; {settle.plan.steps} without the sentence that counts objects by shape, which the model kept stating wrongly for
  repeated shapes.
- Optimiser: Muon for the matrices of the layers, AdamW for the rest, peak rates {tower.lr}, {decoder.plan.lr},
  {polish.plan.lr} and {settle.plan.lr} by stage, warm-up, plateau and linear decay, gradient clip
  {decoder.plan.clip}, bfloat16 autocast where the CPU has it. Seed {seed}."""

MADE_HYBRID = """\
- Data: scenes drawn by `mmspec.zoo.scenes` (one to six objects of seven shapes, eight colours, three textures and two
  sizes on seven backgrounds, 96 x 96 pixels) and texts composed from them by `mmspec.zoo.language`. No outside data, no
  other model.
- Vision tower: Qwen3.5's, {vision.layers} layers x {vision.width}, patches of {side} pixels, four of them merged into a
  visual token, 36 tokens a picture; first trained alone to classify what stands in each cell of the grid
  ({tower.steps} steps of {tower.batch} scenes), then frozen.
- Decoder: Qwen3.5's, {language.layers} layers x {language.width}, three with the gated delta rule
  ({language.delta_heads} heads x {language.delta_head}) to one with attention ({language.heads} heads x
  {language.head}), M-RoPE, byte-level BPE of {language.vocabulary} tokens, tied head; {decoder.plan.steps} steps of
  {decoder.plan.batch} packed rows. A row is one picture (in every {pair_every}th step two) and up to {slots} tokens of
  texts about it that see the picture and themselves only: a tree, which the recurrent layers read as they read a draft.
- Head: one multi-token-prediction layer (`mtp.*` in the same file), distilled from the frozen model's own answers to
  {head_prompts} prompts: {head.steps} steps of {head.batch} sequences, {head.unroll} unrolled steps. Held out:
  {head_tau:.2f} tokens per target call for a greedy chain of {head.unroll} (the ceiling is {head_ceiling}).
- Optimiser: Muon for the matrices of the layers, AdamW for the rest, peak rates {tower.lr}, {decoder.plan.lr} and
  {head.lr}, warm-up, plateau and linear decay, gradient clip {decoder.plan.clip}, bfloat16 autocast where the CPU has
  it. Seed {seed}."""

MADE_ON = """\
- Start: the weights of `{start}`; its card says what they were made from. The tower stays as it is.
- Data: clips drawn by `mmspec.zoo.clips`, in which objects move, appear, vanish or stay, with captions and questions;
  {known:.0%} of the steps show single pictures and pairs as before. No outside data, no other model.
- First the decoder's lower {watching.layers} layers learnt, by classifiers that are thrown away, to tell on the last
  frame's patches what stood in each cell at first and what became of it: {watching.plan.steps} steps. From texts alone
  it had not found out what to compare.
- Then {clips.plan.steps} steps of {clips.plan.batch} packed rows; a row of a clip is two, four or eight frames.
- Optimiser: Muon for the matrices of the layers, AdamW for the rest, peak rates {watching.plan.lr} and {clips.plan.lr},
  warm-up, plateau and linear decay, gradient clip {clips.plan.clip}. Seed {seed}."""

_MORE = ", and says what happens in\nshort clips (two to eight frames, all in one message)"
_EXPLAINED = (
    " In clips, motion is what the caption says that each object does (an object not found\ncounts as wrong), moving "
    "only those that do not stay, all whole captions."
)
_PAIRS_ONLY = "at most two pictures in a prompt were trained"
_EIGHT = "clips of two, four and eight frames were trained, in which nothing crosses the way of something else"


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
    for seen in results["clips"]:
        facts += [(f"clip of {seen['frames']} frames: {fact}", score) for fact, score in seen["facts"].items()]
    rows = "\n".join(f"| {fact} | {right} | {of} | {right / of:.1%} |" for fact, (right, of) in facts if of)
    moving, n, hybrid = bool(results["clips"]), results["short"]["scenes"], isinstance(recipe.language, Hybrid)
    return CARD.format(
        name=recipe.name,
        tag="qwen3_5" if hybrid else "llava",
        model="Qwen3_5ForConditionalGeneration" if hybrid else "LlavaForConditionalGeneration",
        parameters=results["parameters"] / 1e6,
        more=_MORE if moving else "",
        clip=f', and for the frames of a clip "{clips.PROMPTS[0]}"' if moving else "",
        made=_made_hybrid(recipe, results["head tau"]) if hybrid else _made(recipe),
        minutes=minutes,
        cores="two CPU cores" if recipe.start is None and not hybrid else "one CPU core",
        explained=_EXPLAINED if moving else "",
        limit=_EIGHT if moving else _PAIRS_ONLY,
        rows=rows,
        n=f"{n} scenes, and as many clips," if moving else f"{n} scenes",
        short=language.PROMPTS["short"],
        long=language.PROMPTS["long"],
        short_tokens=results["short"]["tokens"],
        long_tokens=results["long"]["tokens"],
        long_words=results["long"]["different words"],
    )


def _made(recipe: VlmRecipe) -> str:
    stages = {stage.name: stage for stage in recipe.stages}
    turns = recipe.stages[0].turns
    if recipe.start is not None:
        known = sum(turn.kind != "clip" for turn in turns) / len(turns)
        return MADE_ON.format(start=recipe.start, known=known, seed=recipe.seed, watching=recipe.watching, **stages)
    return MADE.format(
        vision=recipe.vision, language=recipe.language, tower=recipe.tower, seed=recipe.seed,
        steps=sum(stage.plan.stop or stage.plan.steps for stage in recipe.stages), pair_every=len(turns),
        slots=max(turn.slots for turn in turns), **stages,
    )  # fmt: skip


def _made_hybrid(recipe: VlmRecipe, tau: float) -> str:
    assert recipe.head is not None
    how, stage = HOW[recipe.head], recipe.stages[0]
    return MADE_HYBRID.format(
        vision=recipe.vision, side=recipe.vision.patch // 2, tower=recipe.tower, language=recipe.language,
        seed=recipe.seed, head=how, head_prompts=int(recipe.head_data.partition(":")[2]) - how.held_out, head_tau=tau,
        head_ceiling=how.unroll + 1, pair_every=len(stage.turns), slots=max(turn.slots for turn in stage.turns),
        decoder=stage,
    )  # fmt: skip


def wall_minutes(work: Path) -> float:
    """Minutes that all stages took, from their checkpoints."""
    return sum(map(zoo_fit.seconds, work.glob("*.pt"))) / 60


def _share(score: tuple[int, int]) -> str:
    right, of = score
    return f"{right} of {of}"


def _sum(scores: dict[str, tuple[int, int]]) -> tuple[int, int]:
    return sum(right for right, _ in scores.values()), sum(of for _, of in scores.values())


IMAGE_CARD = """---
license: apache-2.0
library_name: diffusers
pipeline_tag: text-to-image
tags: [llamagen, mmspec, synthetic]
---
# {name}

A small but real LlamaGen, embedded in mmspec so that `mmspec generate`, tests and benchmarks run without a network: a
text-conditional transformer ({transformer:.1f} M parameters) over a 16 x 16 grid of {codes} codes, its VQ tokenizer
({vqvae:.1f} M) and its T5 encoder ({text_encoder:.1f} M), all in bfloat16 safetensors. It draws 64 x 64 pictures of one
or two coloured shapes.

```python
import mmspec
from mmspec import zoo

pipe = mmspec.LlamaGenPipeline.from_pretrained(zoo.path("{name}"))
mmspec.enable(pipe, drafter="jacobi")
pipe("a small red striped circle left of a large blue square on a grainy background").images[0]
```
Prompts it knows: "a [small|large] COLOUR [striped|dotted] SHAPE [RELATION a ...] [on a BACKGROUND background]",
with the words of `mmspec.zoo.pictures`.

![held-out prompts: the drawn picture as the tokenizer gives it back, below it the generator's](samples.png)

## Made from
- Data: pictures drawn by `mmspec.zoo.pictures`; {grainy:.0%} of them have a grainy background, whose codes are as
  hard to foretell as those of photographs. No outside data, no other model.
- Tokenizer: VQ of LlamaGen with {vq.base} channels, multipliers {vq.multipliers} (4 x 4 pixels a code), {codes}
  L2-normalised codes of {vq.code_dim}; {vq_steps} steps of {vq_batch} pictures with Muon, squared
  and absolute error, no adversarial and no perceptual loss.
- Transformer: {shape.layers} layers x {shape.dim}, {shape.heads} heads, {shape.prefix} prefix tokens; trained together
  with the T5 encoder ({shape.text_layers} layers x {shape.text_width}) on {steps} steps of {batch} pictures;
  {drop:.0%} of the prompts shown as null; the codes that objects touch counted {shape.emphasis:.0f} times. Beside the
  codes, throw-away linear classifiers on the hidden states of layers {layers} had to say what the square about to be
  drawn shows (weight {shape.tell}), and one on the mean of the prefix what the prompt means. Last, {shape.settle.steps}
  steps (peak rate {shape.settle.lr}) in which all codes counted alike.
- Muon for the matrices of the transformer, AdamW for the rest, peak rate {lr}, seed {seed}, float32.
- Before all that the T5 encoder learnt to say what prompts mean, on {shape.reading.steps} steps of
  {shape.reading.batch} prompts.
- Wall time: {minutes:.0f} minutes on CPU cores that other work shared.

## Held-out results
The tokenizer gives pictures back at {psnr:.1f} dB and uses {used} codes (entropy of their use {bits:.1f} bits). The
transformer needs {nats:.2f} nats a token, and {other:.3f} more under another picture's prompt.

How far the prompt rules the picture, as `scenes-vlm` reads {n} of them (guidance {shape.guidance}); the last column is
what the same pictures score against somebody else's prompt, so the difference is what the prompt did:

| fact | own prompt | another prompt |
|---|---|---|
{read}

How fast they come is measured by `mmspec bench image`: see docs/ar-image.md.

Licence: Apache-2.0. To train it again: `mmspec zoo {name}`.
"""


def image_card(recipe: ImageRecipe, results: dict, minutes: float) -> str:
    """The text of README.md in the folder of an image generator."""
    vq, shape = recipe.tokenizer, recipe.generator
    own, other = (results["read"][whose]["facts"] for whose in ("own", "other"))
    return IMAGE_CARD.format(
        name=recipe.name,
        n=results["read"]["own"]["n"],
        read="\n".join(f"| {fact} | {_share(own[fact])} | {_share(other[fact])} |" for fact in own),
        **{part: results["parameters"][part] / 1e6 for part in ("transformer", "vqvae", "text_encoder")},
        vq=vq,
        codes=vq.codes,
        vq_steps=vq.plan.steps,
        vq_batch=vq.plan.batch,
        shape=shape,
        grainy=pictures.GRAINY,
        steps=shape.plan.steps,
        batch=shape.plan.batch,
        drop=shape.drop,
        layers=" and ".join(str(1 + layer) for layer in shape.tell_after),
        lr=shape.plan.lr,
        seed=recipe.seed,
        minutes=minutes,
        psnr=results["psnr"],
        used=results["codes"],
        bits=results["bits"],
        nats=results["nats"],
        other=results["other"] - results["nats"],
    )
