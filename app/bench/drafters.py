"""The drafters that a suite measures: parses --drafters, loads them, and finds stock's equivalents."""

from __future__ import annotations

import argparse
from collections import Counter

import mmspec
from mmspec import zoo
from mmspec.app import embedded, enabling
from mmspec.app.bench.command import BenchError, say
from mmspec.app.compare import Method
from mmspec.pipelines.drafters.mtp import MtpDrafter
from mmspec.pipelines.host.kinds import GenerativeModel
from mmspec.protocols import Drafter
from mmspec.registry import DRAFTERS, drafter_class, name_of

ALL = "all"
WEIGHTLESS = [name for name, entry in DRAFTERS.items() if not entry.trained and not entry.from_model]
OF_MODEL = "mtp"  # the drafter that is built from the measured model, without a separate file
# By a drafter's method: the arguments that make stock `generate` draft the same way, except for prompt lookup.
ASSISTED = {"mtp": {"use_mtp": True}}


def configure(parser: argparse.ArgumentParser, beside: str = "") -> None:
    """Add the option; `beside` tells in its help what is always measured."""
    parser.add_argument(
        "--drafters", "--drafter", nargs="+", dest="drafters", metavar="NAME",
        help=f"feature drafters to measure{beside}: folders, names, or a method as eagle for the embedded one of the "
        f"model; {ALL}: every embedded one; default: the embedded one, if it fits",
    )  # fmt: skip
    enabling.add(parser)


def read(args: argparse.Namespace, model: GenerativeModel | None = None) -> dict[str, Drafter]:
    """The requested drafters by method, several of one method also by name; by default the model's embedded one, if it
    is available.

    Args:
        model: the loaded model, for drafters that are built from it.

    Raises BenchError: there is no such drafter, or no embedded one for `all`.
    """
    here = {name: zoo.DRAFTERS[name].method for name in embedded.drafters(args.model)}
    usual = embedded.DRAFTERS.get(args.model)
    names: list[str] = []
    for name in args.drafters or (["mtp" if usual == embedded.SHIPPED else usual] if usual else []):
        if name == ALL and not here:
            raise BenchError(f"--drafters {ALL}: no drafter comes with {args.model!r}; name the drafters to measure")
        names += list(here) if name == ALL else [embedded.fitting(name, args.model)]
    try:
        loaded = {name: _loaded(name, model) for name in names}
    except (FileNotFoundError, ValueError) as error:
        if args.drafters is None:
            say(f"without the embedded drafter: {error}")
            return {}
        known = dict.fromkeys([*here.values(), *WEIGHTLESS])
        raise BenchError(f"--drafters: {error}; available by name: {', '.join(known)}") from error
    titles = {name: name if name in (*WEIGHTLESS, OF_MODEL) else name_of(one) for name, one in loaded.items()}
    alone = Counter(titles.values())
    return {title if alone[title] == 1 else f"{title}:{name}": loaded[name] for name, title in titles.items()}


def _loaded(name: str, model: GenerativeModel | None) -> Drafter:
    if name in WEIGHTLESS:
        return drafter_class(name)()
    if name in DRAFTERS and DRAFTERS[name].from_model:
        if name != OF_MODEL or model is None:
            raise ValueError(f"{name} is built from a model, and cannot be named here")
        return MtpDrafter.of_model(model)
    drafter = mmspec.load_drafter(embedded.resolve(name))
    if model is not None:  # once here, so that `enable` makes no copies, which would recompile
        drafter.to(device=model.device, dtype=model.dtype)
    return drafter


def stocks_own(title: str, drafter: object) -> list[Method]:
    """Stock's own assisted decoding with the same drafter, if stock supports it."""
    arguments = ASSISTED.get(getattr(drafter, "method", ""))
    return [] if arguments is None else [Method(f"hf-{title}", arguments=arguments)]
