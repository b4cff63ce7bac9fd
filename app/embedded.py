"""The embedded models that come with mmspec: their names, the folders of their weights, drafters and prompt."""

from __future__ import annotations

from pathlib import Path

from mmspec import zoo

MODEL, DRAFTER = "scenes-video", "scenes-video-eagle"
HYBRID = "scenes-hybrid"  # Qwen3.5's classes
STOCK = "none"  # no drafter: the stock path
SHIPPED = "shipped"  # the drafter in the model's own files, such as an MTP head; else one without weights
IMAGE_MODEL, IMAGE_DRAFTER = "scenes-llamagen", "scenes-llamagen-heads"
MAR_MODEL, MAR_DRAFT = "scenes-mar", "scenes-mar-draft"
DRAFTERS = {MODEL: DRAFTER, HYBRID: SHIPPED, IMAGE_MODEL: IMAGE_DRAFTER}  # the default drafter of each
NOTE = (
    "note: {}, the model that comes with mmspec, knows only pictures from its own generator, such as the samples; its "
    "captions of photos and other drawings are meaningless. Name a real model: --model llava-hf/llava-1.5-7b-hf"
)


def resolve(name: str) -> str:
    """The folder of an embedded model's weights; other names unchanged. FileNotFoundError if weights are missing."""
    if name not in {*DRAFTERS, *zoo.DRAFTERS, MAR_MODEL, MAR_DRAFT} or Path(name).exists():
        return name
    return str(zoo.path(name))


def fitting(name: str, model: str) -> str:
    """The embedded drafter of a model for the name of a method, such as eagle; other names unchanged."""
    return next((one for one in drafters(model) if zoo.DRAFTERS[one].method == name), name)


def drafter(model: str) -> str:
    """The default drafter of a model."""
    return DRAFTERS.get(model, SHIPPED)


def drafters(model: str) -> list[str]:
    return [name for name, entry in zoo.DRAFTERS.items()
            if entry.target == model and (zoo.weights() / name / "config.json").is_file()]  # fmt: skip


def speaks(model: str) -> bool:
    """Whether it is an embedded model that generates text."""
    return model in (MODEL, HYBRID)


def prompt() -> str:
    """The prompt with which the embedded model was trained to caption."""
    return zoo.PROMPTS["short"]
