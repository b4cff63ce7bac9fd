"""Texts about a scene: factual short captions, varied long descriptions, questions, and two-picture prompts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.zoo import lexicon as words
from benchmarks.zoo.prose import article, counted, describe_at_length, listing, pick
from benchmarks.zoo.recipes.vlm import Mix
from mmspec.zoo import PROMPTS, scenes
from mmspec.zoo.scenes import Scene, Thing

SHORT_PROMPTS = (
    PROMPTS["short"],
    "Describe the picture.",
    "What does the picture show?",
    "Caption this image.",
    "Give a short description.",
    "What is in this image?",
)
LONG_PROMPTS = (
    PROMPTS["long"],
    "Tell me about this picture at length.",
    "Write a long description of the image.",
    "Describe the picture in a lively way.",
)
ORDINALS = ("first", "second")
LOOKS = {
    "shape": scenes.SHAPES,
    "colour": tuple(scenes.COLOURS),
    "texture": scenes.TEXTURES,
    "size": tuple(scenes.SIZES),
}


@dataclass(frozen=True)
class Exchange:
    """One prompt and its answer; `kind` is short, long or the name of a question."""

    kind: str
    prompt: str
    answer: str


def capital(sentence: str) -> str:
    return sentence[0].upper() + sentence[1:]


def full_name(thing: Thing) -> str:
    return f"{thing.size} {thing.texture} {thing.colour} {thing.shape}"


def name(thing: Thing, scene: Scene) -> str:
    """The shortest name that no other object of the scene shares; with its place if there is none."""
    for fields in (("colour", "shape"), ("texture", "colour", "shape"), ("size", "texture", "colour", "shape")):
        called = [" ".join(getattr(other, f) for f in fields) for other in scene.things]
        own = " ".join(getattr(thing, f) for f in fields)
        if called.count(own) == 1:
            return own
    return f"{own} {words.PLACES[thing.cell]}"


def stated_relations(scene: Scene) -> list[tuple[Thing, str, Thing]]:
    """The relations a short caption states: the first object towards the last, and the second towards the first."""
    things = scene.things
    if len(things) < 2:
        return []
    told = [(things[0], scenes.relations(things[0], things[-1])[0], things[-1])]
    if len(things) > 2:
        told.append((things[1], scenes.relations(things[1], things[0])[-1], things[0]))
    return told


def short_caption(scene: Scene, shape_counts: bool = False) -> str:
    """Count, background, every object with size, texture, colour, shape and place, relations; perhaps counts."""
    number = len(scene.things)
    shown = listing([f"{article(full_name(t))} {words.PLACES[t.cell]}" for t in scene.things])
    told = [
        f"The picture shows {words.NUMBERS[number]} object{'s' * (number > 1)} on {article(scene.background)} "
        f"background: {shown}."
    ]
    told += [f"The {name(a, scene)} is {relation} the {name(b, scene)}." for a, relation, b in stated_relations(scene)]
    if shape_counts:
        kinds = scenes.counts(scene)
        verb = "is" if next(iter(kinds.values())) == 1 else "are"
        told.append(f"There {verb} {listing([counted(count, shape) for shape, count in kinds.items()])}.")
    return " ".join(told)


def short(rng: np.random.Generator, scene: Scene, mix: Mix) -> Exchange:
    return Exchange("short", pick(rng, SHORT_PROMPTS), short_caption(scene, mix.shape_counts))


def long(rng: np.random.Generator, scene: Scene, mix: Mix) -> Exchange:
    return Exchange("long", pick(rng, LONG_PROMPTS), describe_at_length(rng, scene, mix.shape_counts))


def names(things: Sequence[Thing], scene: Scene) -> str:
    """'The red circle and the blue star.' in reading order, or 'Nothing.'."""
    return capital(listing([f"the {name(t, scene)}" for t in things])) + "." if things else "Nothing."


def ask_total(rng: np.random.Generator, scene: Scene) -> tuple[str, str]:
    prompt = pick(rng, ("How many objects are there?", "How many things do you see?", "Count the objects."))
    return prompt, f"{words.NUMBERS[len(scene.things)].capitalize()}."


def ask_count(rng: np.random.Generator, scene: Scene) -> tuple[str, str]:
    attribute = pick(rng, ("shape", "shape", "colour", "texture", "size"))
    there = scenes.counts(scene, attribute)
    value = pick(rng, list(there)) if rng.random() < 0.8 else pick(rng, LOOKS[attribute])
    called = words.PLURALS[value] if attribute == "shape" else f"{value} objects"
    prompt = pick(rng, ("How many {} are there?", "How many {} does the picture show?", "Count the {}.")).format(called)
    return prompt, f"{words.NUMBERS[there.get(value, 0)].capitalize()}."


def ask_whether(rng: np.random.Generator, scene: Scene) -> tuple[str, str]:
    """Is A left of B? Even chances of yes and no."""
    if len(scene.things) < 2:
        return ask_presence(rng, scene)
    first, second = _two(rng, scene)
    holds = rng.random() < 0.5
    relation = pick(rng, scenes.relations(first, second) if holds else scenes.relations(second, first))
    return f"Is the {name(first, scene)} {relation} the {name(second, scene)}?", "Yes." if holds else "No."


def ask_relation(rng: np.random.Generator, scene: Scene) -> tuple[str, str]:
    if len(scene.things) < 2:
        return ask_place(rng, scene)
    first, second = _two(rng, scene)
    prompt = pick(rng, ("Where is the {} relative to the {}?", "How does the {} stand to the {}?"))
    relation = " and ".join(scenes.relations(first, second))
    return prompt.format(name(first, scene), name(second, scene)), f"It is {relation} the {name(second, scene)}."


def ask_neighbours(rng: np.random.Generator, scene: Scene) -> tuple[str, str]:
    thing, relation = pick(rng, scene.things), pick(rng, scenes.RELATIONS)
    prompt = pick(rng, ("What is {} the {}?", "Which objects are {} the {}?")).format(relation, name(thing, scene))
    return prompt, names([t for t in scene.things if relation in scenes.relations(t, thing)], scene)


def ask_spot(rng: np.random.Generator, scene: Scene) -> tuple[str, str]:
    cell = pick(rng, scene.things).cell if rng.random() < 0.8 else int(rng.integers(9))
    here = [thing for thing in scene.things if thing.cell == cell]
    field = pick(rng, ("thing", "colour", "shape", "texture"))
    if field == "thing":
        prompt = pick(rng, ("What is {}?", "What do you see {}?")).format(words.PLACES[cell])
        return prompt, f"{capital(article(full_name(here[0])))}." if here else "Nothing."
    prompt = pick(rng, ("What {} is the object {}?", "Which {} does the object {} have?"))
    return prompt.format(field, words.PLACES[cell]), f"{getattr(here[0], field).capitalize()}." if here else "Nothing."


def ask_attribute(rng: np.random.Generator, scene: Scene) -> tuple[str, str]:
    """Texture or size of a named object, when the name does not give it away."""
    thing = pick(rng, scene.things)
    field = pick(rng, ("texture", "size"))
    known = thing.colour + " " + thing.shape
    if name(thing, scene) != known:
        return ask_spot(rng, scene)
    prompt = pick(rng, ("What {} is the {}?", "Which {} does the {} have?")).format(field, known)
    return prompt, f"{getattr(thing, field).capitalize()}."


def ask_place(rng: np.random.Generator, scene: Scene) -> tuple[str, str]:
    thing = pick(rng, scene.things)
    prompt = pick(rng, ("Where is the {}?", "Where do you see the {}?")).format(name(thing, scene))
    return prompt, f"{capital(words.PLACES[thing.cell])}."


def ask_which(rng: np.random.Generator, scene: Scene) -> tuple[str, str]:
    field = pick(rng, ("texture", "size", "colour"))
    value = pick(rng, list(scenes.counts(scene, field))) if rng.random() < 0.8 else pick(rng, LOOKS[field])
    prompt = pick(rng, ("Which objects are {}?", "Name the {} objects.")).format(value)
    return prompt, names([t for t in scene.things if getattr(t, field) == value], scene)


def ask_background(rng: np.random.Generator, scene: Scene) -> tuple[str, str]:
    prompt = pick(rng, ("What is the background?", "What background does the picture have?"))
    return prompt, f"{capital(article(scene.background))} background."


def ask_presence(rng: np.random.Generator, scene: Scene) -> tuple[str, str]:
    thing = pick(rng, scene.things)
    colour, shape = thing.colour, thing.shape
    if rng.random() < 0.6:
        if rng.random() < 0.5:
            colour = pick(rng, list(scenes.COLOURS))
        else:
            shape = pick(rng, scenes.SHAPES)
    there = any((t.colour, t.shape) == (colour, shape) for t in scene.things)
    return f"Is there {article(colour + ' ' + shape)}?", "Yes." if there else "No."


def _two(rng: np.random.Generator, scene: Scene) -> tuple[Thing, Thing]:
    first, second = rng.choice(len(scene.things), size=2, replace=False)
    return scene.things[first], scene.things[second]


QUESTIONS: dict[str, Callable[[np.random.Generator, Scene], tuple[str, str]]] = {
    "total": ask_total,
    "count": ask_count,
    "whether": ask_whether,
    "relation": ask_relation,
    "neighbours": ask_neighbours,
    "spot": ask_spot,
    "attribute": ask_attribute,
    "place": ask_place,
    "which": ask_which,
    "background": ask_background,
    "presence": ask_presence,
}


def question(rng: np.random.Generator, scene: Scene, kind: str) -> Exchange:
    """A question of the named kind about the scene."""
    return Exchange(kind, *QUESTIONS[kind](rng, scene))


def any_question(rng: np.random.Generator, scene: Scene, mix: Mix) -> Exchange:
    """A question of a kind drawn by the weights of the mix."""
    weights = np.array([weight for _, weight in mix.questions])
    return question(rng, scene, mix.questions[int(rng.choice(len(weights), p=weights / weights.sum()))][0])


def pair_question(rng: np.random.Generator, pair: tuple[Scene, Scene], mix: Mix) -> Exchange:
    """A prompt about two pictures shown together."""
    which = int(rng.integers(2))
    scene, ordinal, form = pair[which], ORDINALS[which], rng.random()
    if form < 0.25:
        prompt = pick(rng, ("Describe the {} picture.", "Describe the {} image.")).format(ordinal)
        return Exchange("pair-short", prompt, short_caption(scene, mix.shape_counts))
    if form < 0.4:
        prompt = pick(rng, ("What is in the {} picture?", "Name the objects in the {} picture.")).format(ordinal)
        return Exchange("pair-names", prompt, names(scene.things, scene))
    if form < 0.6:
        order = int(np.sign(len(pair[1].things) - len(pair[0].things)))
        prompt = pick(rng, ("Which picture shows more objects?", "Which image has more objects?"))
        answer = {-1: "The first.", 0: "Both show the same number.", 1: "The second."}[order]
        return Exchange("pair-more", prompt, answer)
    if form < 0.75:
        thing = pick(rng, scene.things)
        shown = [any((t.colour, t.shape) == (thing.colour, thing.shape) for t in s.things) for s in pair]
        answer = "Both." if all(shown) else f"The {ordinal}."
        return Exchange("pair-which", f"Which picture shows {article(thing.colour + ' ' + thing.shape)}?", answer)
    inner = any_question(rng, scene, mix)
    return Exchange("pair-" + inner.kind, f"In the {ordinal} picture: {inner.prompt}", inner.answer)
