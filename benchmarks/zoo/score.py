"""Reads the generated texts of a zoo VLM back into facts and counts how many of them hold in the scene."""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.zoo import clips
from benchmarks.zoo import lexicon as words
from benchmarks.zoo.clips import Clip, Told, any_of
from mmspec.zoo import scenes
from mmspec.zoo.scenes import Scene, Thing


def _spoken(table: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    return {word: value for value, spoken in table.items() for word in spoken}


_SIZES, _TEXTURES = _spoken(words.SIZE_WORDS), _spoken(words.TEXTURE_WORDS)
_CELLS = {place: cell for cell, place in enumerate(words.PLACES)}
_CELLS |= {place: cell for cell, places in enumerate(words.LIVELY_PLACES) for place in places}
_COLOUR, _SHAPE = any_of(scenes.COLOURS), any_of(scenes.SHAPES)
_PLACES = re.compile(rf"\b{any_of(_CELLS)}\b")
_LOOKS = rf"({any_of(_SIZES)}) ({any_of(_TEXTURES)}) (?:{any_of(words.SHADES)} )?({_COLOUR}) ({_SHAPE})"
_THING = re.compile(rf"\b[Aa]n? {_LOOKS}\b")
_PLACED = rf"({_COLOUR}) ({_SHAPE})(?: ({any_of(words.PLACES)}))?"
_NAME = rf"(?:({any_of(scenes.SIZES)}) )?(?:({any_of(scenes.TEXTURES)}) )?{_PLACED}"
_RELATION = re.compile(rf"[Tt]he {_NAME} (?:is|lies|stands) ({any_of(scenes.RELATIONS)}) the {_NAME}")
_LIST = re.compile(r"(?:, | and )(?=an? (?:small|large) )")
_NUMBER = any_of(words.NUMBERS)
_COUNT = re.compile(rf"\b({_NUMBER}) ({any_of([*words.PLURALS, *words.PLURALS.values()])})\b")
_TOTAL = re.compile(rf"\b({_NUMBER}) (?:object|shape|figure)s?\b", re.IGNORECASE)
_SINGULAR = {plural: shape for shape, plural in words.PLURALS.items()}


@dataclass(frozen=True)
class Stated:
    """One object as a text states it; `cell` is None where the text gives no place."""

    size: str
    texture: str
    colour: str
    shape: str
    cell: int | None


class Tally(Counter[tuple[str, str]]):
    """Counts, as 'fact right' and 'fact of'."""

    def note(self, fact: str, right: bool) -> None:
        self[fact, "right"] += right
        self[fact, "of"] += 1


def stated_things(text: str) -> list[Stated]:
    """The fully named objects of a text, each with the one place its sentence or list item gives."""
    things = []
    for sentence in re.split(r"(?<=[.;])\s", text):
        for part in _LIST.split(sentence) if "background:" in sentence else [sentence]:
            if named := _THING.search(part):
                longest = max(_PLACES.findall(part.lower()), key=len, default="")
                things.append(Stated(_SIZES[named[1]], _TEXTURES[named[2]], named[3], named[4], _CELLS.get(longest)))
    return things


def score_caption(text: str, scene: Scene) -> Tally:
    """Over the objects, relations and counts that a text states."""
    tally = Tally()
    note = tally.note
    here = {thing.cell: thing for thing in scene.things}
    stated = stated_things(text)
    for claim in stated:
        thing = here.get(-1 if claim.cell is None else claim.cell)
        note("object precision", thing is not None and (claim.shape, claim.colour) == (thing.shape, thing.colour))
        if thing is not None:
            note("size", claim.size == thing.size)
            note("texture", claim.texture == thing.texture)
    claims = {(claim.cell, claim.shape, claim.colour) for claim in stated}
    for thing in scene.things:
        note("object recall", (thing.cell, thing.shape, thing.colour) in claims)
    for stated_relation in _RELATION.finditer(text):
        note("relations", _relation_holds(stated_relation.groups(), scene))
    for number, shape in _COUNT.findall(text):
        note("counts", scenes.counts(scene).get(_SINGULAR.get(shape, shape), 0) == words.NUMBERS.index(number))
    if total := _TOTAL.search(text):
        note("counts", words.NUMBERS.index(total[1].lower()) == len(scene.things))
    return tally


def _relation_holds(groups: tuple[str | None, ...], scene: Scene) -> bool:
    """Whether some two objects that answer to the names stand so."""
    first, relation, second = groups[:5], groups[5], groups[6:]
    return any(
        a is not b and _answers(a, first) and _answers(b, second) and relation in scenes.relations(a, b)
        for a in scene.things
        for b in scene.things
    )


def _answers(thing: Thing, called: tuple[str | None, ...]) -> bool:
    own = (thing.size, thing.texture, thing.colour, thing.shape, words.PLACES[thing.cell])
    return all(said is None or said == true for said, true in zip(called, own, strict=True))


def score_clip(text: str, clip: Clip) -> Tally:
    """Of what a caption says of a clip.

    An object is right when shape and colour are right at the place where it is first seen, once each. Motion counts the
    objects whose motion is told rightly, `moving` only those that do not stay, `all` the captions without any error.
    """
    tally = Tally()
    note = tally.note
    told, true = clips.read(text), clips.facts(clip)
    claims = {_seen(one): one for one in told.told}
    there = {_seen(one) for one in true.told}
    for one in told.told:
        note("object precision", _seen(one) in there and claims[_seen(one)] is one)
    for one in true.told:
        claim = claims.get(_seen(one))
        note("object recall", claim is not None)
        note("motion", claim is not None and claim.kind == one.kind)
        if one.kind != "still":
            note("moving", claim is not None and claim.kind == one.kind)
        if claim is not None:
            note("size", claim.size == one.size)
            note("texture", claim.texture == one.texture)
    note("counts", told.count == true.count)
    note("background", told.background == true.background)
    note("all", told == true)
    return tally


def _seen(one: Told) -> tuple[int, str, str]:
    return one.cell, one.shape, one.colour
