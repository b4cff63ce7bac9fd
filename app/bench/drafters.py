"""Which drafters a suite measures: the option that names them, and those that it names, loaded."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import mmspec
from mmspec import zoo
from mmspec.app import embedded, enabling
from mmspec.app.bench.assisted import OF_MODEL
from mmspec.app.bench.command import BenchError, say
from mmspec.registry import DRAFTERS, drafter_class, name_of

ALL = "all"
WEIGHTLESS = [name for name, entry in DRAFTERS.items() if not entry.trained and not entry.from_model]


def configure(parser: argparse.ArgumentParser, beside: str = "") -> None:
    """The option; `beside` says what is measured anyway."""
    parser.add_argument(
        "--drafters", "--drafter", nargs="+", dest="drafters", metavar="NAME",
        help=f"feature drafters to measure{beside}: folders, names, or a method as eagle for the embedded one of the "
        f"model; {ALL}: every embedded one; model: its own first layers; default: the embedded one, if it fits",
    )  # fmt: skip
    enabling.add(parser)


def options(args: argparse.Namespace) -> dict[str, Any]:
    """What is said to `enable` of every drafter that is measured.

    Raises BenchError: there is no such option, or no such value.
    """
    try:
        return enabling.given(args.enable)
    except enabling.EnableError as error:
        raise BenchError(str(error)) from error


def read(args: argparse.Namespace, trained: bool = False, model: Any = None) -> dict[str, Any]:
    """The drafters asked for, each under its method's name; by default the model's embedded one, if it is there.

    Args:
        trained: those without weights have methods of their own, and are refused here.
        model: the loaded model, for drafters that are made of it.

    Raises BenchError: there is no such drafter, or no embedded one for `all`.
    """
    if args.drafters is None:
        try:
            usual = embedded.DRAFTERS.get(args.model)
            return _loaded(["mtp" if usual == embedded.SHIPPED else usual] if usual else [], model)
        except FileNotFoundError as error:
            say(f"without the embedded drafter: {error}")
            return {}
    names: list[str] = []
    for name in args.drafters:
        found = _named(name, args.model)
        if trained and name in DRAFTERS and not DRAFTERS[name].trained:
            raise BenchError(f"--drafters {name}: it has no weights; --methods '{name}*' chooses among its methods")
        names += [one for one in found if one not in names]
    try:
        return _loaded(names, model)
    except (FileNotFoundError, ValueError) as error:
        there = dict.fromkeys([*(zoo.DRAFTERS[name].method for name in embedded.drafters(args.model)), *WEIGHTLESS])
        raise BenchError(f"--drafters: {error}; by name there are here {', '.join(there)}") from error


def _named(name: str, model: str) -> list[str]:
    """The drafters that a word of --drafters means: a method means the embedded one of the model that follows it."""
    here = {one: zoo.DRAFTERS[one].method for one in embedded.drafters(model)}
    if name == ALL and not here:
        raise BenchError(f"--drafters {ALL}: no drafter comes with {model!r}; name the drafters to measure")
    if name == ALL:
        return list(here)
    if name not in DRAFTERS or not DRAFTERS[name].trained:
        return [name]
    if (found := embedded.fitting(name, model)) == name:
        there = f"those of {', '.join(here.values())} do" if here else "none does"
        raise BenchError(
            f"--drafters {name}: no drafter of this method comes with {model!r} ({there}); name a folder, or train one "
            f"with `mmspec train --method {name} --target {model}`"
        )
    return [found]


def _loaded(names: list[str], model: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in names:
        if name in DRAFTERS and DRAFTERS[name].from_model:
            if name not in OF_MODEL or model is None:
                raise ValueError(f"{name} comes from a model; it is measured where that model is named")
            found[name] = OF_MODEL[name](model)
            continue
        bare = name in DRAFTERS and not DRAFTERS[name].trained
        drafter = drafter_class(name)() if bare else mmspec.load_drafter(embedded.resolve(name))
        if model is not None and not bare:  # there already, enabling it again makes no copy, which would compile anew
            drafter.to(device=model.device, dtype=model.dtype)
        title = name if bare else name_of(drafter)
        found[title if title not in found else f"{title}:{Path(name).name}"] = drafter
    return found
