"""The small models that come with mmspec: their names, the folders of their weights, the prompt and its limits."""

from __future__ import annotations

from pathlib import Path

from mmspec import zoo

MODEL, DRAFTER = "scenes-vlm", "scenes-vlm-eagle"
IMAGE_MODEL, IMAGE_DRAFTER = "scenes-llamagen", "scenes-llamagen-eagle"
NOTE = (
    "note: scenes-vlm, the model that comes with mmspec, knows only drawn scenes of coloured shapes; its captions of "
    "other pictures mean nothing. Name a real model: --model llava-hf/llava-1.5-7b-hf --drafter ngram"
)
CLIPS = f"note: {MODEL} was trained on single pictures and pairs; of a clip it tells what stands there, not what moves"


def resolve(name: str) -> str:
    """Folder of an embedded model's weights; any other name unchanged. FileNotFoundError if the weights are missing."""
    if name not in (MODEL, DRAFTER, IMAGE_MODEL, IMAGE_DRAFTER) or Path(name).exists():
        return name
    return str(zoo.path(name))


def drafter(model: str) -> str:
    """What fits a model if nobody says otherwise."""
    return DRAFTER if model == MODEL else "ngram"


def prompt() -> str:
    """The prompt under which the embedded model was trained to write a caption."""
    from mmspec.zoo.language import PROMPTS

    return PROMPTS["short"]
