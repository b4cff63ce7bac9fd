"""Short clips: drawn objects that move, appear, vanish or stay; their captions, and what reads these back."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from PIL import Image

from benchmarks.zoo import language
from benchmarks.zoo import lexicon as words
from benchmarks.zoo.language import Exchange
from benchmarks.zoo.prose import article, pick
from mmspec.zoo import scenes
from mmspec.zoo.scenes import CELL, Scene, Thing

WAYS = {"right": (1, 0), "left": (-1, 0), "up": (0, -1), "down": (0, 1)}  # columns and rows of one step
_DOES = {
    "still": "stays",
    "right": "moves to the right",
    "left": "moves to the left",
    "up": "moves up",
    "down": "moves down",
    "appears": "appears",
    "vanishes": "vanishes",
}
TOLD = {  # kind of motion: how a caption tells it
    kind: f"{{thing}} {does} {{place}}." if kind in ("still", "appears") else f"{{thing}} {{place}} {does}."
    for kind, does in _DOES.items()
}
ANSWERS = {kind: f"It {does}." for kind, does in _DOES.items()}
HOLD = 0.15  # share of the clip in which nothing happens yet, and again at its end
COUNT_WEIGHTS = np.array([0.25, 0.35, 0.25, 0.15])  # of one to four objects
STILL = 0.35  # chance that an object stays where it is
MOVES = 0.75  # chance that another one moves, rather than appears or vanishes
PROMPTS = (
    "Describe this clip.",
    "Describe this video.",
    "What happens in this clip?",
    "What happens in this video?",
    "Caption this video.",
    *language.SHORT_PROMPTS,
    *language.LONG_PROMPTS,
)


@dataclass(frozen=True)
class Motion:
    """What an object does: a kind of TOLD; movers go `steps` cells, others appear or vanish at `when` in 0..1."""

    kind: str = "still"
    steps: int = 0
    when: float = 0.5


@dataclass(frozen=True)
class Clip:
    """All objects that are ever seen, where they are first seen, in reading order; and the motion of each."""

    scene: Scene
    motions: tuple[Motion, ...]

    @property
    def parts(self) -> list[tuple[Thing, Motion]]:
        return list(zip(self.scene.things, self.motions, strict=True))


def draw(rng: np.random.Generator) -> Clip:
    """A random clip in which no object crosses another's way; the same state of `rng` gives the same one."""
    count = 1 + int(rng.choice(len(COUNT_WEIGHTS), p=COUNT_WEIGHTS))
    free = set(range(9))
    drawn: list[tuple[Thing, Motion]] = []
    for cell in rng.permutation(9).tolist():
        if cell in free and len(drawn) < count:
            motion = _motion(rng, cell, free)
            free -= set(_way(cell, motion))
            drawn.append((scenes.draw_thing(rng, cell), motion))
    drawn.sort(key=lambda part: part[0].cell)
    scene = Scene(str(rng.choice(list(scenes.BACKGROUNDS))), tuple(t for t, _ in drawn), int(rng.integers(2**31)))
    return Clip(scene, tuple(motion for _, motion in drawn))


def _motion(rng: np.random.Generator, cell: int, free: set[int]) -> Motion:
    """What an object at the cell does; it only goes where the way is free."""
    if rng.random() < STILL:
        return Motion()
    when = float(rng.uniform(0.35, 0.65))
    every = [Motion(kind, steps, when) for kind in WAYS for steps in (1, 2)]
    open_ways = [motion for motion in every if (way := _way(cell, motion)) and free.issuperset(way)]
    if open_ways and rng.random() < MOVES:
        kind = pick(rng, sorted({motion.kind for motion in open_ways}))
        return pick(rng, [motion for motion in open_ways if motion.kind == kind])
    return Motion(pick(rng, ("appears", "vanishes")), 0, when)


def _way(cell: int, motion: Motion) -> list[int]:
    """The cells that an object passes, with first and last; none if it would leave the picture."""
    across, down = WAYS.get(motion.kind, (0, 0))
    spots = [(cell % 3 + across * i, cell // 3 + down * i) for i in range(motion.steps + 1)]
    return [row * 3 + column for column, row in spots] if all(0 <= n < 3 for spot in spots for n in spot) else []


def last_cell(thing: Thing, motion: Motion) -> int:
    """Where an object is in the end, if it does not vanish."""
    return _way(thing.cell, motion)[-1]


def at(clip: Clip, time: float) -> Scene:
    """What is seen at a time in 0..1; things between two cells keep the number of the one they come from."""
    gone = float(np.clip((time - HOLD) / (1 - 2 * HOLD), 0, 1))
    gone = gone * gone * (3 - 2 * gone)  # starts and ends softly
    seen = []
    for thing, motion in clip.parts:
        if (motion.kind == "appears" and time < motion.when) or (motion.kind == "vanishes" and time >= motion.when):
            continue
        across, down = (CELL * motion.steps * gone * n for n in WAYS.get(motion.kind, (0, 0)))
        cell = last_cell(thing, motion) if gone == 1 else thing.cell
        seen.append(replace(thing, cell=cell, x=thing.x + across, y=thing.y + down))
    return replace(clip.scene, things=tuple(seen))


def moments(count: int, rng: np.random.Generator | None = None) -> list[float]:
    """Evenly spread times of `count` frames, from first to last; with `rng`, some while after and before these."""
    start, end = (0.0, 1.0) if rng is None else rng.uniform((0, 1 - HOLD), (HOLD, 1)).tolist()
    return [float(time) for time in np.linspace(start, end, count)]


def frames(clip: Clip, count: int) -> list[Image.Image]:
    """`count` pictures of the clip, from its first moment to its last."""
    return [scenes.render(at(clip, time)) for time in moments(count)]


def held_out(count: int, seed: int = 2**31) -> list[Clip]:
    """Clips that no embedded model is trained on, the same ones every time."""
    rng = np.random.default_rng(seed)
    return [draw(rng) for _ in range(count)]


def caption(clip: Clip) -> str:
    """How many objects there are, the background, and what each object does, in reading order."""
    number = len(clip.motions)
    background = f"{article(clip.scene.background)} background"
    told = [f"The clip shows {words.NUMBERS[number]} object{'s' * (number > 1)} on {background}."]
    for thing, motion in clip.parts:
        called = language.capital(article(language.full_name(thing)))
        told.append(TOLD[motion.kind].format(thing=called, place=words.PLACES[thing.cell]))
    return " ".join(told)


def describe(rng: np.random.Generator, clip: Clip) -> Exchange:
    return Exchange("clip", pick(rng, PROMPTS), caption(clip))


def question(rng: np.random.Generator, clip: Clip) -> Exchange:
    """A question about what one object does, who does something, where one ends, or the background."""
    kind = pick(rng, ("does", "does", "does", "which", "which", "start", "end", "end", "background"))
    thing, motion = pick(rng, clip.parts)
    called = language.name(thing, clip.scene)
    if kind == "does":
        prompt = pick(rng, ("What does the {} do?", "What happens to the {}?")).format(called)
        return Exchange("clip-does", prompt, ANSWERS[motion.kind])
    if kind == "which":
        verb, kinds = pick(rng, (("moves", tuple(WAYS)), *((word, (word,)) for word in ("appears", "vanishes"))))
        doing = [thing for thing, motion in clip.parts if motion.kind in kinds]
        return Exchange("clip-which", f"What {verb}?", language.names(doing, clip.scene))
    if kind == "background":
        return Exchange("clip-" + kind, *language.ask_background(rng, clip.scene))
    here = at(clip, float(kind == "end")).things
    now = [t for t in here if language.full_name(t) == language.full_name(thing) and t.radius == thing.radius]
    answer = f"{language.capital(words.PLACES[now[0].cell])}." if now else "Nowhere."
    when = {"start": "in the first picture", "end": "in the last picture"}[kind]
    return Exchange("clip-" + kind, f"Where is the {called} {when}?", answer)


@dataclass(frozen=True)
class Told:
    """One object and its motion as a caption tells them."""

    size: str
    texture: str
    colour: str
    shape: str
    cell: int
    kind: str


@dataclass(frozen=True)
class Facts:
    """What a caption says; None where it says nothing of a kind that can be read."""

    count: int | None
    background: str | None
    told: tuple[Told, ...]


def any_of(options: Iterable[str]) -> str:
    return "(?:" + "|".join(sorted(options, key=len, reverse=True)) + ")"


def _forms(names: Sequence[str]) -> dict[str, re.Pattern[str]]:
    fields = " ".join(f"({any_of(some)})" for some in (scenes.SIZES, scenes.TEXTURES, scenes.COLOURS, scenes.SHAPES))
    thing, place = rf"\bAn? {fields}", f"({any_of(names)})"
    return {kind: re.compile(form[:-1].format(thing=thing, place=place) + r"\.") for kind, form in TOLD.items()}


_FORMS = _forms(words.PLACES)
_OPENING = re.compile(rf"shows ({any_of(words.NUMBERS)}) objects? on an? ({any_of(scenes.BACKGROUNDS)}) background")


def read(text: str) -> Facts:
    """A caption read back into facts; sentences of another form are passed over."""
    opening = _OPENING.search(text)
    told = [
        (
            sentence.start(),
            Told(sentence[1], sentence[2], sentence[3], sentence[4], words.PLACES.index(sentence[5]), kind),
        )
        for kind, form in _FORMS.items()
        for sentence in form.finditer(text)
    ]
    count, background = (words.NUMBERS.index(opening[1]), opening[2]) if opening else (None, None)
    return Facts(count, background, tuple(one for _, one in sorted(told, key=lambda pair: pair[0])))


def facts(clip: Clip) -> Facts:
    """What a perfect caption of the clip says."""
    told = (Told(t.size, t.texture, t.colour, t.shape, t.cell, motion.kind) for t, motion in clip.parts)
    return Facts(len(clip.motions), clip.scene.background, tuple(told))
