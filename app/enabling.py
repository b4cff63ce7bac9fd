"""`--enable NAME=VALUE ...`: the options of `mmspec.enable` on the command line, the same for every command."""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any

from mmspec import zoo
from mmspec.app.embedded import SHIPPED, STOCK, resolve
from mmspec.app.options import Pairs, did_you_mean

_DRAFT = "the smaller model that drafts: its folder, or its name in the Hub's cache"
WORDS = {"true": True, "false": False, "none": None, "on": True, "off": False, "yes": True, "no": False}
PLAIN = "plain"  # the registry's name for decoding without a drafter
OF_MODEL = ("model", "assistant")  # drafters that are a separate model
DRAFT = "draft"  # the option that names that model
LIST = "help"  # given in place of NAME=VALUE: print the options
DRAWN = ("rule", "budget", "reproducible")  # options that change the output; all others change only the speed


class EnableError(ValueError):
    """A value of --enable is invalid; the message says what is allowed."""


class _Enable(Pairs):
    """Collects NAME=VALUE; for LIST it prints all options and exits."""

    @staticmethod
    def names() -> list[str]:
        from mmspec.config import SpecConfig, option_names

        return [DRAFT, *(name for kind in (SpecConfig(), *kinds_of(None)) for name in option_names(kind))]

    def __call__(self, parser: argparse.ArgumentParser, args: argparse.Namespace, values: Any, *_: Any) -> None:
        if values == [LIST]:
            print(help_text(getattr(args, "drafter", None)))
            parser.exit()
        super().__call__(parser, args, values, *_)


FLAG: dict[str, Any] = {
    "nargs": "+", "action": _Enable, "metavar": "NAME=VALUE",
    "help": f"options of mmspec.enable, such as compile=true depth=6; '--enable {LIST}' explains those of the "
    "--drafter given before it, or of all drafters",
}  # fmt: skip


def add(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--enable", default=[], **FLAG)


def given(words: Iterable[str], drafter: object = None) -> dict[str, Any]:
    """Keyword arguments of `mmspec.enable` from words like depth=6, checked as far as possible without a model.

    Args:
        drafter: a name, a folder or None; with a known name, only the options of that drafter are allowed.

    Raises EnableError: an unknown drafter or option, an invalid value, or a word that is not NAME=VALUE.
    """
    _known(drafter)
    options = unchecked(words)
    if drafter in OF_MODEL:
        if DRAFT not in options:
            raise EnableError(f"--drafter {drafter} needs --enable {DRAFT}=FOLDER, {_DRAFT}")
        options[DRAFT] = resolve(str(options[DRAFT]))
    if not options:  # do not import torch in this case
        return {}
    from mmspec.config import SpecConfig, option_names

    kinds = kinds_of(drafter)
    known = [name for kind in (SpecConfig(), *kinds) for name in option_names(kind)]
    known += [DRAFT] if drafter in OF_MODEL else []
    for name in options:
        if name not in known:
            whose = f" with the drafter {drafter}" if drafter and len(kinds) == 1 else ""
            near, names = did_you_mean(name, known) or ".", ", ".join(dict.fromkeys(known))
            raise EnableError(f"--enable has no {name!r}{whose}{near} It takes {names}")
    _check(options, kinds)
    return options


def _known(drafter: object) -> None:
    """EnableError, before a model is loaded, for a drafter that is neither known nor a folder or a name on the Hub."""
    if not isinstance(drafter, str) or drafter in (STOCK, SHIPPED, *zoo.DRAFTERS):
        return
    if "/" in drafter or Path(drafter).exists():
        return
    from mmspec.registry import DRAFTERS

    if drafter not in DRAFTERS:
        raise EnableError(
            f"unknown drafter {drafter!r}{did_you_mean(drafter, DRAFTERS) or '.'} Choose from {', '.join(DRAFTERS)}, "
            f"{STOCK}, or give a folder or owner/name on the Hub"
        )


def unchecked(words: Iterable[str]) -> dict[str, Any]:
    """Options from words like depth=6, without a check of their names; also for engines of others."""
    options = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals:
            raise EnableError(f"--enable takes NAME=VALUE, such as depth=6; got {word!r}")
        options[name.strip().replace("-", "_")] = value_of(text)
    return options


def help_text(drafter: object = None) -> str:
    """One line for each option with its meaning: first the shared options, then those of the drafter."""
    from mmspec.config import SpecConfig
    from mmspec.registry import DRAFTERS

    lines = ["of every drafter:", *_described(SpecConfig())]
    lines += [] if drafter not in (None, *OF_MODEL) else [f"of {', '.join(OF_MODEL)}:", f"  {DRAFT}=  {_DRAFT}"]
    for kind in kinds_of(drafter):
        users = [name for name in DRAFTERS if type(_options(name)) is type(kind)]
        own = _described(kind)
        lines += [f"of {', '.join(users)}:", *(own or ["  nothing of their own"])]
    return "\n".join(lines)


def kinds_of(drafter: object) -> list[object]:
    """The options objects of a drafter; those of all drafters if its method is unknown until it is loaded."""
    from mmspec.registry import DRAFTERS

    name = zoo.DRAFTERS[drafter].method if drafter in zoo.DRAFTERS else drafter
    name = PLAIN if name == STOCK else name
    if name in DRAFTERS:
        return [_options(name)]
    kinds = {type(options): options for options in map(_options, DRAFTERS)}
    return list(kinds.values())


def _options(name: str) -> object:
    from mmspec.drafters.block_config import BlockOptions
    from mmspec.drafters.shape import TreeOptions
    from mmspec.registry import DRAFTERS, drafter_class

    if DRAFTERS[name].trained or DRAFTERS[name].from_model:  # the actual options come with its weights or model
        return BlockOptions() if name == "block" else TreeOptions()
    return getattr(drafter_class(name), "options", None)


def value_of(text: str) -> object:
    """The value of a text: a number, a boolean, None, several of these separated by commas, or the text itself."""
    text = text.strip()
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _check(words: Mapping[str, object], kinds: Iterable[object]) -> None:
    """EnableError for values that no option of that name allows."""
    from mmspec.config import SpecConfig, option_names
    from mmspec.registry import check_rule

    try:
        SpecConfig.split(words)
        if isinstance(rule := words.get("rule"), str):
            check_rule(rule)
    except ValueError as error:
        raise EnableError(f"--enable: {error}") from error
    for name, value in words.items():
        troubles = [_trouble(kind, name, value) for kind in kinds if name in option_names(kind)]
        if value is not None and troubles and all(troubles):
            raise EnableError(f"--enable: {name}={value!r}: {troubles[0]}")


def _trouble(kind: object, name: str, value: object) -> str:
    try:
        type(kind)(**{name: value})
    except (ValueError, TypeError) as error:
        return str(error)
    return ""


def _described(kind: object) -> list[str]:
    """A line for each field of a dataclass: its name, its default, and its text in the docstring's Attributes."""
    if not is_dataclass(kind):
        return []
    about = _attributes(type(kind))
    usual = {one.name: "" if one.default is MISSING else one.default for one in fields(kind) if one.init}
    return [f"  {name}={value}  {about.get(name, '')}".rstrip() for name, value in usual.items()]


def _attributes(cls: type) -> dict[str, str]:
    """The descriptions of attributes in the docstrings of a class and its parents."""
    sections = [(parent.__doc__ or "").partition("Attributes:\n")[2] for parent in reversed(cls.__mro__)]
    found = re.findall(r"^ {8}(\w+): (.*(?:\n {9,}.*)*)", "\n".join(sections), re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in found}
