"""The options that each registered drafter takes beside the shared ones, and a check of values without a model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mmspec.config import Options, option_names
from mmspec.drafters.shape import TreeOptions
from mmspec.registry import DRAFTERS, drafter_class


def options_of(method: object) -> dict[str, list[Any]]:
    """The options that a registered drafter takes, or for another name all of them: for each, the classes that have it,
    with their defaults. What the file of a trained drafter recommends is in that file.
    """
    takers: dict[str, list[Any]] = {}
    for name in [method] if isinstance(method, str) and method in DRAFTERS else DRAFTERS:
        one = TreeOptions() if DRAFTERS[name].from_model else getattr(drafter_class(name), "options", None)
        for option in option_names(one):
            takers.setdefault(option, []).append(one)
    return takers


def check_options(takers: dict[str, list[Any]], given: Options) -> None:
    """Raise ValueError for a value that all classes with that option refuse; `takers` from `options_of`."""
    refused: dict[int, ValueError] = {}
    for one in {id(one): one for some in takers.values() for one in some}.values():
        try:
            replace(one, **{name: given[name] for name in option_names(one) if name in given})
        except ValueError as error:
            refused[id(one)] = error
    for name in takers.keys() & given.keys():
        if all(id(one) in refused for one in takers[name]):
            raise refused[id(takers[name][0])]
