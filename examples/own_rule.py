"""A rule of your own in one file: keep what the model finds likely enough. It changes the distribution, at a cost in
total variation.

python examples/own_rule.py
"""

from __future__ import annotations

import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor, logging

import mmspec
from mmspec import registry, zoo
from mmspec.kernels.reference import exact_ratio
from mmspec.rules import Rule, Trial, ordinary


def likely(*, least: float) -> Rule:
    """A drafted token x is accepted where the model gives it p(x) ≥ least; else with the exact chance min(1, p/q)."""
    if not 0 < least <= 1:
        raise ValueError(f"least must be a probability above 0; got {least!r}")

    def relaxed(trial: Trial) -> torch.Tensor:
        return torch.where(trial.p_x >= least, 1.0, exact_ratio(trial.p_x, trial.q_x))

    return Rule(f"likely(least={least})", exact_ratio, ordinary, relaxed=relaxed)


registry.RULES["likely"] = likely  # from here on it has a name, wherever rules are named

if __name__ == "__main__":
    logging.disable_progress_bar()  # of loading weights
    processor = AutoProcessor.from_pretrained(zoo.path("scenes-video"))
    model = AutoModelForImageTextToText.from_pretrained(zoo.path("scenes-video"), dtype="float32")
    content = [
        {"type": "image", "image": Image.open(zoo.samples() / "scene-01.png")},
        {"type": "text", "text": "Describe this image in detail."},
    ]
    inputs = processor.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=True,
        return_dict=True, return_tensors="pt",
    )  # fmt: skip

    for options in ({"rule": "exact"}, {"rule": "likely(least=0.1)"}, {"rule": "likely(least=0.1)", "budget": 0.5}):
        with mmspec.enable(model, drafter=zoo.path("scenes-video-eagle"), **options) as handle:
            torch.manual_seed(0)
            model.generate(**inputs, max_new_tokens=48, do_sample=True, num_return_sequences=4)
        pace, charged = handle.stats.tokens_per_target_call, handle.stats.spent / 4
        print(f"{options}: {pace:.2f} tokens per target call, charged {charged:.2f} a text in total variation")
