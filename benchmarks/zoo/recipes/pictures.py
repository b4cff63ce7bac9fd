"""Recipes of the models that draw: LlamaGen over codes, MAR over continuous tokens."""

from dataclasses import dataclass, field
from functools import partial

from benchmarks.zoo.recipes.schedule import Schedule

_convolutions = partial(Schedule, batch=4, lr=4e-3, weight_decay=0.0, kernels=True)


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
    plan: Schedule = field(default_factory=partial(_convolutions, 2000))


@dataclass(frozen=True)
class Generator:
    """Shape of the LlamaGen transformer and of the T5 encoder that is trained along with it.

    First the text encoder learns to tell what prompts mean (`reading`; published models take a T5 that can read
    already), and goes on with that lesson to the end: drawing alone would unlearn which word stands for which place.
    The codes that objects touch, which a prompt foretells, count `emphasis` times. Shapes show in few codes, so
    throw-away classifiers on the layers `tell_after` have to say, too, what the square about to be drawn shows; that
    counts `tell` times. Weights on objects make them too likely, so at last (`settle`) all codes count the same.
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
    tell_after: tuple[int, ...] = (3, 5)
    tell: float = 0.3
    reading: Schedule = field(default_factory=partial(Schedule, 700, 64, 2e-3, warmup=0.05, decay=0.5))
    plan: Schedule = field(default_factory=partial(Schedule, 4000, 8, 2.5e-3, 0.02, 0.7, newton_schulz=3))
    settle: Schedule = field(default_factory=partial(Schedule, 350, 8, 1e-3, decay=0.9, newton_schulz=3))


@dataclass(frozen=True)
class ImageRecipe:
    """Everything that decides the weights of an autoregressive image model of the zoo."""

    name: str
    seed: int = 0
    tokenizer: Tokenizer = Tokenizer()
    generator: Generator = Generator()


IMAGES = {"scenes-llamagen": ImageRecipe("scenes-llamagen")}


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
    plan: Schedule = field(default_factory=partial(_convolutions, 1600))
    objects: Schedule = field(default_factory=partial(_convolutions, 600, decay=0.8))
    colours: Schedule = field(default_factory=partial(_convolutions, 700, decay=0.7))
    finish: Schedule = field(default_factory=partial(_convolutions, 500, lr=3e-3, decay=0.9))


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

    Both are trained on the same `pictures`, encoded once. Beside the denoising loss, throw-away classifiers on the
    conditioning have to say what the hidden squares show; that counts `tell` times, and squares with an object in it
    `emphasis` times. `diffusion_steps`, `guidance` and `temperature` are what their pipelines sample with.
    """

    name: str
    draft: str
    target_trunk: Trunk
    draft_trunk: Trunk
    vae: Autoencoder = Autoencoder()
    seed: int = 0
    pictures: int = 6144
    tell: float = 0.1
    emphasis: float = 4.0
    diffusion_steps: int = 50
    guidance: float = 2.0
    temperature: float = 1.0


SCENES_MAR = MarRecipe(
    "scenes-mar",
    "scenes-mar-draft",
    Trunk(128, 3, 4, 3, 192, Schedule(steps=3000, batch=16, lr=3e-3, warmup=0.03, decay=0.7, newton_schulz=3)),
    Trunk(64, 2, 2, 2, 128, Schedule(steps=2000, batch=16, lr=4e-3, warmup=0.03, decay=0.7, newton_schulz=3)),
)
MARS = {SCENES_MAR.name: SCENES_MAR}
