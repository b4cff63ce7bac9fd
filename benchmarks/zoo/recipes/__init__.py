"""Recipes of the embedded models: every hyperparameter of a training run, as data."""

from benchmarks.zoo.recipes.drafters import DRAFTERS, DrafterRecipe
from benchmarks.zoo.recipes.pictures import IMAGES, MARS, SCENES_MAR, ImageRecipe, MarRecipe, Tokenizer, Trunk
from benchmarks.zoo.recipes.schedule import Schedule
from benchmarks.zoo.recipes.vlm import (
    RECIPES,
    SCENES_HYBRID,
    SCENES_VIDEO,
    SCENES_VLM,
    DialogueTurn,
    Hybrid,
    Language,
    Mix,
    Vision,
    VlmRecipe,
    Watching,
    ZooStage,
)

__all__ = [
    "DRAFTERS",
    "IMAGES",
    "MARS",
    "RECIPES",
    "SCENES_HYBRID",
    "SCENES_MAR",
    "SCENES_VIDEO",
    "SCENES_VLM",
    "DialogueTurn",
    "DrafterRecipe",
    "Hybrid",
    "ImageRecipe",
    "Language",
    "MarRecipe",
    "Mix",
    "Schedule",
    "Tokenizer",
    "Trunk",
    "Vision",
    "VlmRecipe",
    "Watching",
    "ZooStage",
]  # fmt: skip
