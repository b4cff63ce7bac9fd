"""Recipes of the embedded models: every hyperparameter of a training run, as data."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Schedule:
    """One stage: `steps` optimizer steps of `batch` scenes.

    The rate warms up, stays at `lr`, then falls linearly to zero; `warmup` and `decay` are fractions of the steps.
    Matrices inside the layers take Muon, all else AdamW.
    """

    steps: int
    batch: int
    lr: float
    warmup: float = 0.03
    decay: float = 0.6
    weight_decay: float = 0.02
    clip: float = 1.0
    newton_schulz: int = 5
    kernels: bool = False  # Muon takes the kernels of convolutions, too
    stop: int | None = None  # leave the stage after this many steps, before the rate has fallen to zero


@dataclass(frozen=True)
class Mix:
    """What texts a row holds: `long_share` of the rows get a long description; question kinds by relative weight.

    Tokens of numbers, relations, yes and no, and the first token of each of the `stressed` words count `emphasis` times
    in the loss. With `shape_counts` descriptions may end with how many objects there are of each shape.
    """

    long_share: float = 0.5
    emphasis: float = 1.0
    shape_counts: bool = True
    questions: tuple[tuple[str, float], ...] = (
        ("total", 1.0),
        ("count", 2.0),
        ("whether", 2.0),
        ("relation", 2.0),
        ("neighbours", 1.5),
        ("spot", 1.5),
        ("attribute", 1.0),
        ("place", 1.0),
        ("which", 1.0),
        ("background", 0.3),
        ("presence", 0.7),
    )
    stressed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Vision:
    """Shape of the CLIP vision tower; one visual token per patch."""

    width: int = 192
    layers: int = 5
    heads: int = 3
    feed_forward: int = 512
    patch: int = 12


@dataclass(frozen=True)
class Language:
    """Shape of the Llama decoder, deep and narrow because that is where speculative decoding pays best."""

    width: int = 192
    layers: int = 24
    heads: int = 3
    feed_forward: int = 384
    positions: int = 1024
    vocabulary: int = 2048


_FACTS = (
    ("total", 0.3),
    ("count", 3.0),
    ("whether", 2.0),
    ("relation", 3.0),
    ("neighbours", 1.0),
    ("spot", 0.7),
    ("attribute", 1.0),
    ("place", 3.0),
    ("which", 1.0),
    ("background", 0.2),
    ("presence", 1.5),
)
_SETTLED = (
    ("total", 0.5),
    ("count", 1.0),
    ("whether", 2.0),
    ("relation", 3.0),
    ("neighbours", 1.0),
    ("spot", 0.7),
    ("attribute", 1.0),
    ("place", 3.0),
    ("which", 1.0),
    ("background", 0.2),
    ("presence", 1.5),
)
_DOES = ("moves", "stays", "appears", "vanishes", "up", "down")


@dataclass(frozen=True)
class Turn:
    """What every row of a step shows: a "picture", a "pair" of them or a "clip"; how many pictures that is; and how
    many tokens of texts about it follow."""

    kind: str
    pictures: int
    slots: int


_PICTURE, _PAIR = Turn("picture", 1, 256), Turn("pair", 2, 192)
_BRIEF, _CLIP, _LONG = Turn("clip", 2, 192), Turn("clip", 4, 192), Turn("clip", 8, 128)


@dataclass(frozen=True)
class Stage:
    """One stage of a decoder's training; `name` is that of its checkpoint, `stream` that of its random numbers.

    One batch row is one image prefix and texts about it: the short caption, the long description for some of the
    scenes, and questions as long as there is room. Steps take the `turns` one after the other.
    """

    name: str
    stream: int
    plan: Schedule
    mix: Mix
    turns: tuple[Turn, ...]


_MIXED = (*[_PICTURE] * 9, _PAIR)
_CLIPS = (_BRIEF, _PICTURE, _BRIEF, _CLIP, _PAIR, _BRIEF, _LONG, _BRIEF, _PICTURE, _CLIP)  # 3 in 10 are known already


@dataclass(frozen=True)
class Watching:
    """A stage before those on texts: what happened in every cell of a clip, told on the patches of its last picture.

    Texts say it in so few words that a decoder would take very long to find out what to compare. Only the lower
    `layers` learn; steps take clips of so many `pictures` one after the other, `plan.batch` of two pictures and fewer
    of more.
    """

    layers: int = 12
    pictures: tuple[int, ...] = (2, 2, 2, 4, 2, 8)
    plan: Schedule = field(default_factory=lambda: Schedule(steps=600, batch=16, lr=1.5e-3, decay=0.7, newton_schulz=3))


@dataclass(frozen=True)
class VlmRecipe:
    """Everything that decides the weights of a vision-language model of the zoo.

    Its tower is trained first, then the decoder in `stages`; with `start`, the name of an embedded model, only the
    decoder, on from that model's weights.
    """

    name: str
    stages: tuple[Stage, ...]
    start: str | None = None
    watching: Watching | None = None
    seed: int = 0
    vision: Vision = field(default_factory=Vision)
    language: Language = field(default_factory=Language)
    tower: Schedule = field(default_factory=lambda: Schedule(steps=1000, batch=48, lr=2e-3, decay=0.4))
    texts: Mix = field(default_factory=Mix)  # that the tokenizer is trained on
    tokenizer_scenes: int = 3000


# All texts; more questions about facts; no counts by shape, which so small a model states wrongly too often.
SCENES_VLM = VlmRecipe(
    "scenes-vlm",
    (
        Stage("decoder", 3, Schedule(steps=1900, batch=12, lr=3e-3, warmup=69 / 1900, stop=1603), Mix(), _MIXED),
        Stage(
            "polish", 5, Schedule(steps=600, batch=12, lr=2.5e-3, decay=0.95, stop=349),
            Mix(0.2, 4.0, True, _FACTS), _MIXED,
        ),
        Stage(
            "settle", 6, Schedule(steps=240, batch=12, lr=1.2e-3, decay=0.95),
            Mix(0.3, 2.0, False, _SETTLED), _MIXED,
        ),
    ),
)  # fmt: skip
SCENES_VIDEO = VlmRecipe(
    "scenes-video",
    (
        Stage(
            "clips", 7, Schedule(steps=750, batch=4, lr=1.2e-3, decay=0.9, newton_schulz=3),
            Mix(0.3, 3.0, False, _SETTLED, _DOES), _CLIPS,
        ),
    ),
    start="scenes-vlm",
    watching=Watching(),
)  # fmt: skip
RECIPES = {recipe.name: recipe for recipe in (SCENES_VLM, SCENES_VIDEO)}


@dataclass(frozen=True)
class DrafterRecipe:
    """An embedded drafter: for which model, from which prompts, in which shape; `mmspec.train.recipes` says how.

    `depth`, `width` and `size` are the tree it recommends, chosen by `mmspec bench vlm --tune` on scenes of their own.
    """

    name: str
    target: str
    data: str
    method: str = "eagle"
    shape: dict[str, Any] = field(default_factory=dict)  # of its config, where it is not the method's own
    intermediate: int = 512
    depth: int = 8
    width: int = 1
    size: int = 9
    recipe: str = "scenes-eagle"  # in mmspec.train.recipes


SCENES_VLM_EAGLE = DrafterRecipe("scenes-vlm-eagle", target="scenes-vlm", data="scenes:640")
SCENES_LLAMAGEN_EAGLE = DrafterRecipe(
    "scenes-llamagen-eagle", target="scenes-llamagen", data="pictures:424", depth=4, size=5, recipe="scenes-image-eagle"
)
_VIDEO: dict[str, dict[str, Any]] = {
    "eagle": {},
    "msd": {},
    "vispec": {},
    "flash": {"tokens": 6, "tree": "dynamic"},
    "specvlm": {"gate_width": 32, "resampler_width": 64},
}
SCENES_VIDEO_DRAFTERS = tuple(
    DrafterRecipe(
        f"scenes-video-{method}", target="scenes-video", data="zoo:600", method=method, shape=shape,
        depth=shape.get("tokens", 8), size=shape.get("tokens", 8) + 1, recipe=f"scenes-video-{method}",
    )
    for method, shape in _VIDEO.items()
)  # fmt: skip
DRAFTERS = {r.name: r for r in (SCENES_VLM_EAGLE, SCENES_LLAMAGEN_EAGLE, *SCENES_VIDEO_DRAFTERS)}


@dataclass(frozen=True)
class Tokenizer:
    """Shape and training of the VQ autoencoder.

    For `warm` steps latents are not quantized; then codes are put onto latents, and until `reseed` steps every
    `reseed_every` steps those again that `reseed_pictures` pictures leave out.
    """

    base: int = 16
    multipliers: tuple[int, ...] = (1, 2, 4)
    latent: int = 64
    codes: int = 1024
    code_dim: int = 8
    blocks: int = 1
    groups: int = 4
    commitment: float = 0.25
    warm: int = 150
    reseed: int = 1200
    reseed_every: int = 50
    reseed_pictures: int = 24
    plan: Schedule = field(
        default_factory=lambda: Schedule(steps=2000, batch=4, lr=4e-3, decay=0.6, weight_decay=0.0, kernels=True)
    )


@dataclass(frozen=True)
class Generator:
    """Shape of the LlamaGen transformer and of the T5 encoder that is trained along with it.

    First the text encoder learns to tell what prompts mean (`reading`; published models take a T5 that can read
    already). Then the codes that objects touch, which a prompt foretells, count `emphasis` times. Such weights make
    objects too likely, so at last (`settle`) all codes count the same.
    """

    dim: int = 128
    layers: int = 8
    heads: int = 2
    multiple_of: int = 128
    prefix: int = 24
    text_width: int = 128
    text_layers: int = 2
    text_heads: int = 4
    text_feed_forward: int = 256
    drop: float = 0.1  # share of the prompts that are shown as null
    guidance: float = 3.0  # that its pipeline samples with
    emphasis: float = 6.0
    reading: Schedule = field(default_factory=lambda: Schedule(steps=700, batch=64, lr=2e-3, warmup=0.05, decay=0.5))
    settle: Schedule = field(
        default_factory=lambda: Schedule(steps=450, batch=12, lr=1.2e-3, decay=0.9, newton_schulz=3)
    )
    plan: Schedule = field(
        default_factory=lambda: Schedule(steps=3200, batch=12, lr=3e-3, warmup=0.02, decay=0.7, newton_schulz=3)
    )


@dataclass(frozen=True)
class ImageRecipe:
    """Everything that decides the weights of an autoregressive image model of the zoo."""

    name: str
    seed: int = 0
    tokenizer: Tokenizer = field(default_factory=Tokenizer)
    generator: Generator = field(default_factory=Generator)


SCENES_LLAMAGEN = ImageRecipe("scenes-llamagen")
IMAGES = {recipe.name: recipe for recipe in (SCENES_LLAMAGEN,)}


@dataclass(frozen=True)
class Autoencoder:
    """Shape and training of the AutoencoderKL; every entry of `channels` but the last halves the picture's sides.

    In the second stage (`objects`) the pixels of objects count `emphasis` times. Colours are learnt last: in the third
    (`colours`) every cell holds an object, and errors of colour count `chroma` times those of brightness. In the last
    (`finish`) the decoder alone goes back to ordinary pictures, objects and colours counting as before.
    """

    channels: tuple[int, ...] = (16, 16, 32, 64)
    latent: int = 8
    groups: int = 8
    kl: float = 1e-4
    emphasis: float = 8.0
    chroma: float = 4.0
    plan: Schedule = field(
        default_factory=lambda: Schedule(steps=1600, batch=4, lr=4e-3, decay=0.6, weight_decay=0.0, kernels=True)
    )
    objects: Schedule = field(
        default_factory=lambda: Schedule(steps=600, batch=4, lr=4e-3, decay=0.8, weight_decay=0.0, kernels=True)
    )
    colours: Schedule = field(
        default_factory=lambda: Schedule(steps=700, batch=4, lr=4e-3, decay=0.7, weight_decay=0.0, kernels=True)
    )
    finish: Schedule = field(
        default_factory=lambda: Schedule(steps=500, batch=4, lr=3e-3, decay=0.9, weight_decay=0.0, kernels=True)
    )


@dataclass(frozen=True)
class Trunk:
    """Shape and training of a MAR transformer with its head.

    A share `drop` of the pictures is shown without its class. Hidden tokens are noised `repeats` times a step.
    """

    dim: int
    layers: int  # of the encoder, and again of the decoder
    heads: int
    head_layers: int
    head_width: int
    plan: Schedule
    buffer: int = 8
    drop: float = 0.1
    repeats: int = 2


@dataclass(frozen=True)
class MarRecipe:
    """Everything that decides the weights of the continuous image models of the zoo: two of them on one autoencoder.

    Both are trained on the same `pictures`, encoded once. `diffusion_steps`, `guidance` and `temperature` are what
    their pipelines sample with.
    """

    name: str
    draft: str
    target_trunk: Trunk
    draft_trunk: Trunk
    vae: Autoencoder = field(default_factory=Autoencoder)
    seed: int = 0
    pictures: int = 6144
    diffusion_steps: int = 50
    guidance: float = 2.0
    temperature: float = 1.0


SCENES_MAR = MarRecipe(
    "scenes-mar",
    "scenes-mar-draft",
    Trunk(128, 3, 4, 3, 192, Schedule(steps=3000, batch=16, lr=3e-3, warmup=0.03, decay=0.7, newton_schulz=3)),
    Trunk(64, 2, 2, 2, 128, Schedule(steps=2000, batch=16, lr=4e-3, warmup=0.03, decay=0.7, newton_schulz=3)),
)
MARS = {recipe.name: recipe for recipe in (SCENES_MAR,)}
