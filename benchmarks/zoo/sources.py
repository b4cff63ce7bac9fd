"""Training prompts that only the embedded models need: drawn pairs and clips, and the mixture of all."""

from __future__ import annotations

import numpy as np

from benchmarks.zoo import clips, language
from benchmarks.zoo.recipes.vlm import Mix
from mmspec.train import data
from mmspec.train.data import TrainingSample
from mmspec.zoo import scenes


def _pair(index: int, seed: int) -> TrainingSample:
    """Two pictures, one of which is to be told."""
    rng = np.random.default_rng([seed, 79, index])
    pair = (scenes.draw(rng), scenes.draw(rng))
    told = language.pair_question(rng, pair, Mix())
    while told.kind not in ("pair-short", "pair-names"):
        told = language.pair_question(rng, pair, Mix())
    return TrainingSample(lambda: [scenes.render(scene) for scene in pair], told.prompt, 2)


def _clip(index: int, seed: int, frames: int = 8) -> TrainingSample:
    """The frames of a clip, in which something moves."""
    rng = np.random.default_rng([seed, 80, index])
    clip = clips.draw(rng)
    return TrainingSample(lambda: clips.frames(clip, frames), clips.describe(rng, clip).prompt, frames)


def _mixed(index: int, seed: int) -> TrainingSample:
    """A third single pictures, a sixth pairs, half clips of four to eight frames."""
    turn = ("picture", "clip", "pair", "clip", "picture", "clip")[index % 6]
    if turn == "clip":
        return _clip(index, seed, int(np.random.default_rng([seed, 81, index]).integers(4, 9)))
    return (
        _pair(index, seed) if turn == "pair" else data.DRAWN["scenes"](index // 2, seed)
    )  # so that all its prompts come


DRAWN = {"clips": _clip, "zoo": _mixed}
