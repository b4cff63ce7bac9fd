"""Writes the model card of an embedded drafter from its recipe and the report of its training."""

from typing import Any

from mmspec.zoo.recipes import DrafterRecipe

CARD = """---
license: apache-2.0
library_name: mmspec
tags: [speculative-decoding, {method}, mmspec]
---
# {name}

{what}
It only proposes; what is generated is what `{target}` alone would generate.

```python
import mmspec
from mmspec import zoo

mmspec.enable(model, drafter=zoo.path("{name}"))
```

- Trained by online distillation (`mmspec train --method {method}`): {train} prompts {about}.
  The features come from the frozen target as training runs.
- {steps} steps of {batch} sequences, {unroll} {unrolled}, soft cross-entropy x {token} and
  SmoothL1 x {feature} with weights {decay}^step, Muon on matrices, peak rate {lr}, seed {seed};
  the steps took {own:.1f} minutes of CPU time, all with answers and measuring {whole:.0f} minutes.
- Held out: {tau:.2f} tokens per target call for a {kind} chain of {unroll} (bonus token included; the ceiling is
  {ceiling}), over the answers to {held_out} prompts.
- It recommends depth {depth}, width {width}, size {size}.

Licence: Apache-2.0. To train it again: `mmspec zoo {name}`.
"""

_WHAT = {
    "eagle": "The EAGLE-2-style drafter of `{target}`, embedded in mmspec: one decoder layer on the target's final\n"
    "features, drafting with the target's own head.",
    "msd": "The MSD drafter of `{target}`, embedded in mmspec: EAGLE's one decoder layer, into which pictures enter\n"
    "as nothing but their embeddings.",
    "vispec": "The ViSpec drafter of `{target}`, embedded in mmspec: EAGLE's one decoder layer, into which each\n"
    "picture enters as one learned summary, while one more vector of the last picture joins all text after it.",
    "flash": "The FLASH drafter of `{target}`, embedded in mmspec: one decoder layer that reads each picture as a few\n"
    "latents and foretells {tokens} tokens in one pass.",
    "specvlm": "The SpecVLM drafter of `{target}`, embedded in mmspec: EAGLE's one decoder layer behind an elastic\n"
    "compressor of pictures (prune, pool, convolution, resampler, text only) that a gate chooses by the question.",
}
_WRITTEN = (
    "about drawn scenes, half short and\n  half long; the answers are the target's own ({sampled:.0%} sampled at "
    "temperature 1, the rest greedy)"
)
_MIXED = (
    "about drawn scenes, a third\n  single pictures, a sixth pairs, half clips of four to eight frames; the answers "
    "are the target's own\n  ({sampled:.0%} sampled at temperature 1, the rest greedy), the same for all drafters of "
    "this target"
)
_DRAWN = (
    "of the scene generator; the\n  pictures are the target's own, drawn at its own guidance scale, and its two "
    "streams are learnt with the\n  guided distribution that is verified"
)


def drafter_card(recipe: DrafterRecipe, report: dict[str, Any]) -> str:
    """The text of README.md in the drafter's folder, from the report of its training."""
    r = report["recipe"]
    source, _, samples = recipe.data.partition(":")
    written = {"zoo": _MIXED, "pictures": _DRAWN}.get(source, _WRITTEN)
    return CARD.format(
        name=recipe.name,
        method=recipe.method,
        what=_WHAT[recipe.method].format(target=recipe.target, tokens=recipe.shape.get("tokens")),
        target=recipe.target,
        train=int(samples) - r["held_out"],
        about=written.format(**r),
        kind="drawn" if r["overlap"] else "greedy",
        steps=r["steps"],
        batch=r["batch"],
        unroll=r["unroll"],
        unrolled="heads" if recipe.method == "flash" else "unrolled steps (training-time test)",
        token=r["token_weight"],
        feature=r["feature_weight"],
        decay=r["step_decay"],
        lr=r["lr"],
        seed=r["seed"],
        own=report["cpu_minutes_of_steps"],
        whole=report["minutes"],
        tau=report["held_out_tau"],
        ceiling=r["unroll"] + 1,
        held_out=r["held_out"],
        depth=recipe.depth,
        width=recipe.width,
        size=recipe.size,
    )
