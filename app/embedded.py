"""The small models that come with mmspec: their names, the folders of their weights, the prompt and its limits."""

from __future__ import annotations

from pathlib import Path

from mmspec import zoo

MODEL, VIDEO_MODEL, DRAFTER = "scenes-vlm", "scenes-video", "scenes-vlm-eagle"
VLMS = (MODEL, VIDEO_MODEL)  # one drafter suits both
IMAGE_MODEL, IMAGE_DRAFTER = "scenes-llamagen", "scenes-llamagen-eagle"
NOTE = (
    "note: scenes-vlm, the model that comes with mmspec, knows only drawn scenes of coloured shapes; its captions of "
    "other pictures mean nothing. Name a real model: --model llava-hf/llava-1.5-7b-hf --drafter ngram"
)
CLIPS_NOTE = (
    f"note: {MODEL} knows single pictures; for clips of such scenes choose --model {VIDEO_MODEL}, which was trained on "
    "several frames"
)


def resolve(name: str) -> str:
    """Folder of an embedded model's weights; any other name unchanged. FileNotFoundError if the weights are missing."""
    if name not in (*VLMS, DRAFTER, IMAGE_MODEL, IMAGE_DRAFTER) or Path(name).exists():
        return name
    return str(zoo.path(name))


def drafter(model: str) -> str:
    """What fits a model if nobody says otherwise."""
    return DRAFTER if model in VLMS else "ngram"


def prompt() -> str:
    """The prompt under which the embedded model was trained to write a caption."""
    from mmspec.zoo.language import PROMPTS

    return PROMPTS["short"]
