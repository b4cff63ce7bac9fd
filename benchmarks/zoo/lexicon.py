"""Word tables of the zoo's language: names of what can be drawn, and the many words that decorate long descriptions."""

from pathlib import Path
from typing import Any

import yaml

_TABLES: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))


def _words(name: str) -> tuple[str, ...]:
    return tuple(_TABLES[name].split())


def _lists(name: str) -> dict[str, tuple[str, ...]]:
    return {word: tuple(others.split()) for word, others in _TABLES[name].items()}


NUMBERS, SHADES = _words("numbers"), _words("shades")
PLURALS: dict[str, str] = _TABLES["plurals"]
PLACES: tuple[str, ...] = tuple(_TABLES["places"])
LIVELY_PLACES: tuple[tuple[str, ...], ...] = tuple(map(tuple, _TABLES["lively_places"]))
TEXTURE_WORDS, SIZE_WORDS = _lists("textures"), _lists("sizes")
COLOUR_LIKE, SHAPE_LIKE = _lists("colours"), _lists("shapes")
MOODS, OBJECTS, ANIMALS, PEOPLE = map(_words, ("moods", "objects", "animals", "people"))
DEEDS, OPINIONS, ADVERBS, SETTINGS = map(_words, ("deeds", "opinions", "adverbs", "settings"))
TIMES, SCENTS, NOUNS = map(_words, ("times", "scents", "nouns"))
