"""The small models that come with mmspec: their names, the folders of their weights, the prompt and its limits."""

from __future__ import annotations

from pathlib import Path

from mmspec import zoo

MODEL, DRAFTER = "scenes-video", "scenes-video-eagle"
HYBRID = "scenes-hybrid"  # Qwen3.5's classes
STOCK = "none"  # the drafter that is none: the stock path
SHIPPED = "shipped"  # the drafter that a model ships with, such as a head in its own file; else one without weights
IMAGE_MODEL, IMAGE_DRAFTER = "scenes-llamagen", "scenes-llamagen-heads"
MAR_MODEL, MAR_DRAFT = "scenes-mar", "scenes-mar-draft"
DRAFTERS = {MODEL: DRAFTER, HYBRID: SHIPPED, IMAGE_MODEL: IMAGE_DRAFTER}  # what fits each
NOTE = (
    "note: {}, the model that comes with mmspec, knows only pictures from its own generator, such as the samples; its "
    "captions of photos, and of other drawings, mean nothing. Name a real model: --model llava-hf/llava-1.5-7b-hf"
)


def resolve(name: str) -> str:
    """Folder of an embedded model's weights; any other name unchanged. FileNotFoundError if the weights are missing."""
    if (name not in DRAFTERS and name not in zoo.DRAFTERS) or Path(name).exists():
        return name
    return str(zoo.path(name))


def fitting(name: str, model: str) -> str:
    """The embedded drafter of a model that the name of a method means, such as eagle; any other name unchanged."""
    return next((one for one in drafters(model) if zoo.DRAFTERS[one].method == name), name)


def drafter(model: str) -> str:
    """What fits a model if nobody says otherwise."""
    return DRAFTERS.get(model, SHIPPED)


def drafters(model: str) -> list[str]:
    return [name for name, made in zoo.DRAFTERS.items()
            if made.target == model and (zoo.weights() / name / "config.json").is_file()]  # fmt: skip


def speaks(model: str) -> bool:
    """Whether it is an embedded model that answers in words."""
    return model in (MODEL, HYBRID)


def prompt() -> str:
    """The prompt under which the embedded model was trained to write a caption."""
    return zoo.PROMPTS["short"]
