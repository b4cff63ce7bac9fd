"""Long descriptions: many sentence forms that are true of a scene, among mood and fancy that it does not decide."""

from collections.abc import Sequence
from itertools import pairwise
from typing import TypeVar

import numpy as np

from benchmarks.zoo import lexicon as words
from mmspec.zoo import scenes
from mmspec.zoo.scenes import Scene, Thing

OPENINGS = (
    "The image presents {n} {things} against {bg}.",
    "Here we find {n} {things} spread over {bg}.",
    "{N} {things} share {bg} in this {mood} little picture.",
    "What we have is {bg} carrying {n} {things}.",
    "At first glance this is a {mood} arrangement: {n} {things}, set on {bg}.",
    "Imagine {bg}; upon it somebody has put {n} {things}.",
    "On {bg} you can make out {n} {things}.",
    "This {mood} composition consists of {n} {things} resting on {bg}.",
)
THING_FORMS = (
    "{Place} there is {a}.",
    "{Place} sits {a}, {like_colour}.",
    "{A} {appears} {place}.",
    "{A}, {like_shape}, {appears} {place}.",
    "{Place} we discover {a}, {mood} and {mood2}.",
    "Then there is {a} {place}, {like_shape}.",
    "{A} {appears} {place} and looks rather {mood}.",
    "Your eye soon meets {a} {place}, its colour {like_colour}.",
    "{Place}, {a} keeps its {noun}.",
    "Look {place}: {a}, {mood} {like_shape}.",
    "{A} has settled {place}, {like_colour}.",
)
APPEARS = ("appears", "sits", "stands", "rests", "waits", "shows itself", "floats", "hovers", "lingers", "poses")
LIKENESSES = ("like a", "much like a", "almost a")
RELATION_FORMS = (
    "The {first} is {relation} the {second}.",
    "Notice that the {first} lies {relation} the {second}.",
    "Seen from the {second}, the {first} is {relation} it.",
    "By the way, the {first} stands {relation} the {second}.",
)
COMPARISONS = (
    ("size", "The {first} is {more} than the {second}.", "The {first} and the {second} are about equally {same}."),
    ("texture", "Unlike the {second}, the {first} is {value}.", "Both the {first} and the {second} are {value}."),
    ("colour", "The {first} and the {second} differ in colour.", "The {first} and the {second} share one colour."),
)
FANCIES = (
    "The whole thing feels {mood}, like a {object} in a {setting}.",
    "One might call it {mood}, {mood2} or even {mood3}.",
    "It reminds me of a {person} who {deed} a {object} one {time}.",
    "There is something {mood} about the {noun} of it all.",
    "Somehow it brings to mind a {mood} {animal} near the {setting}.",
    "A {person} would {opinion} it {adverb}.",
    "Perhaps a {person} {adverb} {deed} it for a {person2}.",
    "You can almost smell {scent} and {scent2}.",
    "A {animal} and a {animal2} might meet here {adverb} at {time}.",
    "It carries the {noun} of a {mood} {setting}.",
    "Think of a {object}, a {object2} and a {mood} {noun}.",
    "The mood is {mood}, with a hint of {scent}.",
    "No {animal} has ever {deed} a {object} so {adverb}.",
    "If it were a {noun}, it would be {mood} and {mood2}.",
    "It could hang in a {setting} beside a {mood} {object}.",
    "Some {person} must have {deed} it {adverb} one {time}.",
)
COUNT_FORMS = (
    "In total there {are} {counts}.",
    "Altogether one counts {counts}.",
    "Sorted by shape, that makes {counts}.",
)
_FANCY_TABLES: dict[str, Sequence[str]] = {
    "mood": words.MOODS,
    "object": words.OBJECTS,
    "setting": words.SETTINGS,
    "person": words.PEOPLE,
    "deed": words.DEEDS,
    "time": words.TIMES,
    "noun": words.NOUNS,
    "animal": words.ANIMALS,
    "opinion": words.OPINIONS,
    "adverb": words.ADVERBS,
    "scent": words.SCENTS,
    "appears": APPEARS,
}
T = TypeVar("T")


def pick(rng: np.random.Generator, options: Sequence[T]) -> T:
    """One of the options, evenly."""
    return options[int(rng.integers(len(options)))]


def article(phrase: str) -> str:
    return ("an " if phrase[0] in "aeiou" else "a ") + phrase


def listing(parts: Sequence[str]) -> str:
    """'x', 'x and y', 'x, y and z'."""
    return " and ".join(p for p in (", ".join(parts[:-1]), parts[-1]) if p)


def counted(count: int, shape: str) -> str:
    return f"{words.NUMBERS[count]} {shape if count == 1 else words.PLURALS[shape]}"


def describe_at_length(rng: np.random.Generator, scene: Scene, shape_counts: bool = False) -> str:
    """A varied description: true of objects, relations, comparisons and counts; free in mood and fancy."""
    things = scene.things
    called = {thing: f"{thing.colour} {thing.shape}" for thing in things}
    single = [thing for thing in things if list(called.values()).count(called[thing]) == 1]
    told = [_open(rng, scene), _fancy(rng)]
    middle = [_tell(rng, things[i]) for i in _order(rng, len(things))]
    if len(single) > 1:
        first, second = (single[i] for i in rng.choice(len(single), 2, replace=False))
        relation = pick(rng, scenes.relations(first, second))
        middle.append(pick(rng, RELATION_FORMS).format(first=called[first], second=called[second], relation=relation))
        if rng.random() < 0.6:
            middle.append(_compare(rng, first, second, called))
    while len(middle) < 4 or rng.random() < 0.35:
        middle.insert(int(rng.integers(1, len(middle) + 1)), _fancy(rng))
    told += middle
    if rng.random() < 0.4 and shape_counts:
        told.append(_count(rng, scene))
    return " ".join([*told, _fancy(rng)])


def _order(rng: np.random.Generator, count: int) -> list[int]:
    """Reading order, or the reverse."""
    return list(range(count)) if rng.random() < 0.7 else list(range(count))[::-1]


def _open(rng: np.random.Generator, scene: Scene) -> str:
    number = words.NUMBERS[len(scene.things)]
    things = pick(rng, ("object", "shape", "figure")) + "s" * (len(scene.things) > 1)
    background = f"{article(scene.background)} background"
    return _drawn(rng, OPENINGS, n=number, N=number.capitalize(), things=things, bg=background)


def _tell(rng: np.random.Generator, thing: Thing) -> str:
    shade = pick(rng, words.SHADES) + " " if rng.random() < 0.4 else ""
    called = (
        f"{pick(rng, words.SIZE_WORDS[thing.size])} {pick(rng, words.TEXTURE_WORDS[thing.texture])} "
        f"{shade}{thing.colour} {thing.shape}"
    )
    place = words.PLACES[thing.cell] if rng.random() < 0.4 else pick(rng, words.LIVELY_PLACES[thing.cell])
    likened = pick(rng, ("as " + thing.colour + " as", "reminiscent of", "recalling"))
    return _drawn(
        rng,
        THING_FORMS,
        a="a " + called,
        A="A " + called,
        place=place,
        Place=place[0].upper() + place[1:],
        like_colour=f"{likened} {pick(rng, words.COLOUR_LIKE[thing.colour])}",
        like_shape=f"{pick(rng, LIKENESSES)} {pick(rng, words.SHAPE_LIKE[thing.shape])}",
    )


def _fancy(rng: np.random.Generator) -> str:
    return _drawn(rng, FANCIES)


def _drawn(rng: np.random.Generator, forms: Sequence[str], **facts: str) -> str:
    """One of the forms with these facts in it; 'a' before a vowel becomes 'an'."""
    parts = pick(rng, forms).format_map(_Drawn(rng, **facts)).split(" ")
    for here, (word, following) in enumerate(pairwise(parts)):
        if word in ("a", "A") and following[:1] in "aeiou":
            parts[here] = word + "n"
    return " ".join(parts)


class _Drawn(dict[str, str]):
    """Fills the slots of a template with random words of their tables; mood, mood2 and mood3 are drawn apart."""

    def __init__(self, rng: np.random.Generator, **facts: str) -> None:
        super().__init__(facts)
        self.rng = rng

    def __missing__(self, slot: str) -> str:
        return pick(self.rng, _FANCY_TABLES[slot.rstrip("23")])


def _compare(rng: np.random.Generator, first: Thing, second: Thing, called: dict[Thing, str]) -> str:
    field, different, same = pick(rng, COMPARISONS)
    value, other = getattr(first, field), getattr(second, field)
    more = {"large": "larger", "small": "smaller"}[first.size]
    form = different if value != other else same
    return form.format(first=called[first], second=called[second], more=more, value=value, same=value)


def _count(rng: np.random.Generator, scene: Scene) -> str:
    kinds = scenes.counts(scene)
    listed = listing([counted(count, shape) for shape, count in kinds.items()])
    return pick(rng, COUNT_FORMS).format(are="is" if next(iter(kinds.values())) == 1 else "are", counts=listed)
