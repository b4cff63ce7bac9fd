"""`--enable NAME=VALUE ...`: the options of `mmspec.enable` on the command line, the same for every command."""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mmspec import zoo
from mmspec.app.embedded import SHIPPED, STOCK, resolve

WORDS = {"true": True, "false": False, "none": None, "on": True, "off": False, "yes": True, "no": False}
PLAIN = "plain"  # the registry's name for decoding without a drafter
OF_MODEL = ("model", "assistant")  # drafters that are a separate model
DRAFT = "draft"  # the option that names that model
DRAWN = ("rule", "budget", "reproducible")  # options that change the output; all others change only the speed


class EnableError(ValueError):
    """A value of --enable is invalid; the message says what is allowed."""


FLAG: dict[str, Any] = {
    "nargs": "+", "action": "extend", "metavar": "NAME=VALUE",
    "help": "options of mmspec.enable, such as compile=true depth=6",
}  # fmt: skip


def add(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--enable", default=[], **FLAG)


def given(words: Iterable[str], drafter: object = None, batches: bool = False) -> dict[str, Any]:
    """Keyword arguments of `mmspec.enable` from words like depth=6, checked as far as possible without a model.

    Args:
        drafter: a name, a folder or None; with a known name, only the options of that drafter are allowed.
        batches: for continuous batches, where each row has its own seed, so that `reproducible` means nothing.

    Raises EnableError: an unknown drafter or option, an invalid value, or a word that is not NAME=VALUE.
    """
    _check_drafter(drafter)
    options = unchecked(words)
    if drafter in OF_MODEL:
        if DRAFT not in options:
            raise EnableError(f"--drafter {drafter} needs --enable {DRAFT}=FOLDER, the smaller model that drafts")
        options[DRAFT] = resolve(str(options[DRAFT]))
    if not options:  # do not import torch in this case
        return {}
    from mmspec.config import SpecConfig, option_names
    from mmspec.drafters.own_options import check_options, options_of
    from mmspec.registry import check_rule

    method = zoo.DRAFTERS[drafter].method if drafter in zoo.DRAFTERS else PLAIN if drafter == STOCK else drafter
    own = options_of(method)
    names = [*option_names(SpecConfig()), *own, *([DRAFT] if drafter in OF_MODEL else [])]
    if unknown := next((name for name in options if name not in names), None):
        whose = f" with the drafter {drafter}" if drafter else ""
        raise EnableError(f"--enable has no {unknown!r}{whose}. It takes {', '.join(names)}")
    if batches and options.get("reproducible"):
        raise EnableError("--enable reproducible fixes the noise of a whole call; here every row has its own seed")
    try:
        check_options(own, SpecConfig.split(options)[1])
        if isinstance(rule := options.get("rule"), str):
            check_rule(rule)
    except ValueError as error:
        raise EnableError(f"--enable: {error}") from error
    return options


def _check_drafter(drafter: object) -> None:
    """EnableError, before a model is loaded, for a drafter that is neither known nor a folder or a name on the Hub."""
    if not isinstance(drafter, str) or drafter in (STOCK, SHIPPED, *zoo.DRAFTERS):
        return
    from mmspec.registry import DRAFTERS

    if drafter not in DRAFTERS and "/" not in drafter and not Path(drafter).exists():
        raise EnableError(
            f"unknown drafter {drafter!r}. Choose from {', '.join(DRAFTERS)}, {STOCK}, or give a folder or owner/name "
            "on the Hub"
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


def value_of(text: str) -> object:
    """The value of a text: a number, a boolean, None, several of these separated by commas, or the text itself."""
    text = text.strip()
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
