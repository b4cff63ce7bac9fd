"""Recipes of the vision-language models: their shapes, and what rows of texts each stage reads."""

from dataclasses import dataclass, field

from benchmarks.zoo.recipes.schedule import Schedule


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
    """Shape of the vision tower; one visual token for `patch` x `patch` pixels."""

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


@dataclass(frozen=True)
class Hybrid(Language):
    """Shape of a Qwen3.5 decoder: three layers with the gated delta rule, then one with attention, and so on."""

    width: int = 128
    layers: int = 16
    heads: int = 2
    feed_forward: int = 256
    head: int = 64  # width of an attention head
    kv_heads: int = 1
    delta_heads: int = 2
    delta_head: int = 64


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
_SETTLED = tuple((dict(_FACTS) | {"total": 0.5, "count": 1.0}).items())
_DOES = ("moves", "stays", "appears", "vanishes", "up", "down")


@dataclass(frozen=True)
class DialogueTurn:
    """What every row of a step shows: a "picture", a "pair" of them or a "clip"; how many pictures that is; and how
    many tokens of texts about it follow."""

    kind: str
    pictures: int
    slots: int


_PICTURE, _PAIR = DialogueTurn("picture", 1, 256), DialogueTurn("pair", 2, 192)
_BRIEF, _CLIP, _LONG = DialogueTurn("clip", 2, 192), DialogueTurn("clip", 4, 192), DialogueTurn("clip", 8, 128)


@dataclass(frozen=True)
class ZooStage:
    """One stage of a decoder's training; `name` is that of its checkpoint, `stream` that of its random numbers.

    One batch row is one image prefix and texts about it: the short caption, the long description for some of the
    scenes, and questions as long as there is room. Steps take the `turns` one after the other.
    """

    name: str
    stream: int
    plan: Schedule
    mix: Mix
    turns: tuple[DialogueTurn, ...]


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

    Its tower is trained first, then the decoder in `stages`, then the `head` that drafts for it; with `start`, the
    name of another recipe, only the decoder, on from that one's weights.
    """

    name: str
    stages: tuple[ZooStage, ...]
    embedded: bool = True  # its weights come with the package
    start: str | None = None
    head: str | None = None  # how its multi-token-prediction head is distilled, in mmspec.train.recipes
    head_data: str = "scenes:900"
    head_depth: int = 8  # tokens that it is best to draft with it
    watching: Watching | None = None
    seed: int = 0
    vision: Vision = Vision()
    language: Language = Language()
    tower: Schedule = field(default_factory=lambda: Schedule(steps=1000, batch=48, lr=2e-3, decay=0.4))
    texts: Mix = Mix()  # that the tokenizer is trained on
    tokenizer_scenes: int = 3000


# Where `scenes-video` begins. All texts; more questions about facts; no counts by shape, which so small a model states
# wrongly too often.
SCENES_VLM = VlmRecipe(
    "scenes-vlm",
    (
        ZooStage("decoder", 3, Schedule(steps=1900, batch=12, lr=3e-3, warmup=69 / 1900, stop=1603), Mix(), _MIXED),
        ZooStage(
            "polish", 5, Schedule(steps=600, batch=12, lr=2.5e-3, decay=0.95, stop=349),
            Mix(0.2, 4.0, True, _FACTS), _MIXED,
        ),
        ZooStage(
            "settle", 6, Schedule(steps=240, batch=12, lr=1.2e-3, decay=0.95),
            Mix(0.3, 2.0, False, _SETTLED), _MIXED,
        ),
    ),
    embedded=False,
)  # fmt: skip
SCENES_VIDEO = VlmRecipe(
    "scenes-video",
    (
        ZooStage(
            "clips", 7, Schedule(steps=750, batch=4, lr=1.2e-3, decay=0.9, newton_schulz=3),
            Mix(0.3, 3.0, False, _SETTLED, _DOES), _CLIPS,
        ),
    ),
    start="scenes-vlm",
    watching=Watching(),
)  # fmt: skip
# A hybrid, small enough to stand beside the others.
SCENES_HYBRID = VlmRecipe(
    "scenes-hybrid",
    (
        ZooStage(
            "decoder", 9, Schedule(steps=1000, batch=12, lr=4e-3, decay=0.8, newton_schulz=3),
            Mix(0.4, 2.0, False, _SETTLED), (*[DialogueTurn("picture", 1, 224)] * 9, _PAIR),
        ),
    ),
    vision=Vision(width=96, layers=5, heads=3, feed_forward=288, patch=16),
    language=Hybrid(),
    head="scenes-mtp",
    tower=Schedule(steps=900, batch=48, lr=2e-3, decay=0.5),
)  # fmt: skip
RECIPES = {recipe.name: recipe for recipe in (SCENES_VLM, SCENES_VIDEO, SCENES_HYBRID)}
