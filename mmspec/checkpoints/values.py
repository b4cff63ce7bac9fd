"""Validation of values from an untrusted config.json: their types and bounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING
from reprlib import repr as briefly
from typing import TypeGuard, TypeVar

from mmspec.checkpoints.files import Json, Settings
from mmspec.config import option_names
from mmspec.drafters.shape import USUAL
from mmspec.drafters.trained import FileConfig
from mmspec.types import FINAL

LARGEST, MANY = 2**24, 64  # limits on any number in config.json, and on the length of a list
ENTRIES = {"proposes": LARGEST}  # limits on longer lists, such as one entry per token
MOST = {"tokens": 128}  # smaller limits on numbers
_KINDS = {bool: "true or false", float: "a number above 0", str: "a string"}
Made = TypeVar("Made", bound=FileConfig)


def made(kind: type[Made], values: Json) -> Made:
    """A config of class `kind` with these values.

    Raises ValueError: values that are missing, of the wrong type, or out of bounds.
    """
    needed = [name for name, usual in kind.usual().items() if usual is MISSING]
    wrong = [f"{name} = {briefly(values.get(name))}" for name in needed if not is_count(values.get(name))]
    if wrong:
        raise ValueError(f"config.json must give whole numbers from 1 to {LARGEST}; it gives {', '.join(wrong)}")
    settings = checked(kind, values)
    try:
        return kind.of(settings)
    except ValueError as error:
        raise ValueError(f"config.json: {error}") from error


def checked(kind: type[FileConfig], values: Json) -> Settings:
    """The values, after a check of their types and bounds; those of a Shape are checked by that class.

    Raises ValueError: lists the wrong values and what is expected.
    """
    shaped = option_names(USUAL)
    usual = {name: 0 if one is MISSING else one for name, one in kind.usual().items() if name not in shaped}
    wrong = [
        f"{name} is {briefly(value)}, expected {expected}"
        for name, value in values.items()
        if name in usual and (expected := _expected(name, value, usual[name]))
    ]
    if wrong:
        raise ValueError(f"config.json: {'; '.join(wrong)}. Correct it, or fetch the drafter again")
    return dict(values)


def part(config: Json, key: str) -> Json:
    """An object inside config.json, empty if it is missing."""
    inner = config.get(key)
    if inner is not None and not isinstance(inner, Mapping):
        raise ValueError(f"{key} in config.json must be an object; it is {briefly(inner)}")
    return inner or {}


def is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= LARGEST


def is_list(value: object, least: int = 0) -> TypeGuard[list[int]]:
    """Whether `value` is a list of at least `least` layer numbers."""
    if not isinstance(value, list) or not least <= len(value) <= MANY:
        return False
    return all(_like(one, 0) and one >= 0 for one in value)


def _expected(name: str, value: object, usual: object) -> str:
    """A description of the allowed values if `value` is not one of them; empty if it is."""
    if isinstance(usual, tuple):
        least, some = (FINAL, "1 to") if name == "features" else (0, "at most")  # a layer's number, or FINAL
        kind, most = (*usual, 0)[0], ENTRIES.get(name, MANY)
        listed = value if isinstance(value, list | tuple) and (name == "features") <= len(value) <= most else None
        if listed is not None and all(_like(one, kind) and (type(one) is not int or one >= least) for one in listed):
            return ""
        return f"a list of {some} {most} " + (f"whole numbers from {least}" if type(kind) is int else "strings")
    most = MOST.get(name, LARGEST)
    if _like(value, usual) and not (type(value) is int and type(usual) is int and not 0 <= value <= most):
        return ""
    return _KINDS.get(type(usual), f"a whole number from 0 to {most}")


def _like(value: object, usual: object) -> bool:
    if type(usual) is float:
        return isinstance(value, int | float) and type(value) is not bool and 0 < value < LARGEST**2
    return type(value) is type(usual) and not (type(value) is int and abs(value) > LARGEST)
