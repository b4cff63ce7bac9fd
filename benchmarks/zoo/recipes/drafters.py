"""Recipes of the drafters: for which model, from which prompts, in which shape."""

from dataclasses import dataclass, field, replace

from mmspec.drafters.shape import Shape
from mmspec.drafters.trained import Values

_CHAIN = Shape.chain(8)


@dataclass(frozen=True)
class DrafterRecipe:
    """An embedded drafter: for which model, from which prompts, in which shape; `mmspec.train.recipes` says how.

    `drafts` is how it recommends to draft, chosen on scenes of their own: sizes by `python -m benchmarks vlm --tune`.
    """

    name: str
    target: str
    data: str
    method: str = "eagle"
    shape: Values = field(default_factory=dict)  # of its config, where it is not the method's own
    intermediate: int = 512
    drafts: Shape = _CHAIN
    recipe: str = "scenes-eagle"  # in mmspec.train.recipes

    @property
    def whole_shape(self) -> Values:
        return {"intermediate": self.intermediate, **self.shape}


SCENES_LLAMAGEN_HEADS = DrafterRecipe(
    "scenes-llamagen-heads", target="scenes-llamagen", data="pictures:1024", method="heads", intermediate=192,
    recipe="heads-image",
)  # fmt: skip
_VIDEO: dict[str, Values] = {
    **{method: {} for method in ("eagle", "msd", "vispec")},
    "flash": {"tokens": 6},
    "specvlm": {"gate_width": 32, "resampler_width": 64},
    "block": {"layers": 2, "features": (12, 22, -1), "block": 8, "anchored": True, "markov_rank": 32},
}
_MLP = {"block": 384}  # of two layers
_LONGEST = {"eagle": 16}  # chains that are as long as they are accepted
_DEPTH = {**{method: shape.get("tokens", 8) for method, shape in _VIDEO.items()}, **_LONGEST}
SCENES_VIDEO_DRAFTERS = tuple(
    DrafterRecipe(
        f"scenes-video-{method}", target="scenes-video", data="zoo:1800", method=method,
        intermediate=_MLP.get(method, 512), shape=shape,
        drafts=replace(Shape.chain(_DEPTH[method]), adaptive=method in _LONGEST), recipe=f"scenes-video-{method}",
    )
    for method, shape in _VIDEO.items()
)  # fmt: skip
DRAFTERS = {r.name: r for r in (SCENES_LLAMAGEN_HEADS, *SCENES_VIDEO_DRAFTERS)}
