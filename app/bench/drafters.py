"""The drafters that a suite measures: parses --drafters, loads them, and finds stock's equivalents."""

from __future__ import annotations

import argparse
import copy
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

import mmspec
from mmspec import zoo
from mmspec.app import embedded, enabling
from mmspec.app.bench.command import BenchError, say
from mmspec.checkpoints.save import save_drafter
from mmspec.drafters.dflash import BlockDrafter
from mmspec.pipelines.drafters.draft_model import ModelDrafter
from mmspec.pipelines.drafters.mtp import MtpDrafter
from mmspec.pipelines.host.decoder import decoder
from mmspec.pipelines.host.kinds import GenerativeModel
from mmspec.pipelines.host.loading import stock_class
from mmspec.protocols import Drafter
from mmspec.registry import DRAFTERS, drafter_class, name_of

ALL = "all"
WEIGHTLESS = [name for name, entry in DRAFTERS.items() if not entry.trained and not entry.from_model]


def configure(parser: argparse.ArgumentParser, beside: str = "") -> None:
    """Add the option; `beside` tells in its help what is always measured."""
    parser.add_argument(
        "--drafters", "--drafter", nargs="+", dest="drafters", metavar="NAME",
        help=f"feature drafters to measure{beside}: folders, names, or a method as eagle for the embedded one of the "
        f"model; {ALL}: every embedded one; model: its own first layers; default: the embedded one, if it fits",
    )  # fmt: skip
    enabling.add(parser)


def read(args: argparse.Namespace, trained: bool = False, model: GenerativeModel | None = None) -> dict[str, Drafter]:
    """The requested drafters by method name; by default the model's embedded one, if it is available.

    Args:
        trained: refuse drafters without weights, since the suite has its own methods with them.
        model: the loaded model, for drafters that are built from it.

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
        meant = _named(name, args.model)
        if trained and name in DRAFTERS and not DRAFTERS[name].trained:
            raise BenchError(f"--drafters {name}: it has no weights; --methods '{name}*' selects its methods")
        names += [one for one in meant if one not in names]
    try:
        return _loaded(names, model)
    except (FileNotFoundError, ValueError) as error:
        there = dict.fromkeys([*(zoo.DRAFTERS[name].method for name in embedded.drafters(args.model)), *WEIGHTLESS])
        raise BenchError(f"--drafters: {error}; available by name: {', '.join(there)}") from error


def _named(name: str, model: str) -> list[str]:
    """The drafters for a value of --drafters; the name of a method stands for the model's embedded one."""
    here = {one: zoo.DRAFTERS[one].method for one in embedded.drafters(model)}
    if name == ALL and not here:
        raise BenchError(f"--drafters {ALL}: no drafter comes with {model!r}; name the drafters to measure")
    if name == ALL:
        return list(here)
    if name not in DRAFTERS or not DRAFTERS[name].trained:
        return [name]
    if (own := embedded.fitting(name, model)) == name:
        there = f"those of {', '.join(here.values())} do" if here else "none does"
        raise BenchError(
            f"--drafters {name}: no drafter of this method comes with {model!r} ({there}); name a folder, or train one "
            f"with `mmspec train --method {name} --target {model}`"
        )
    return [own]


def _loaded(names: list[str], model: GenerativeModel | None) -> dict[str, Drafter]:
    loaded: dict[str, Drafter] = {}
    for name in names:
        if name in DRAFTERS and DRAFTERS[name].from_model:
            if name not in OF_MODEL or model is None:
                raise ValueError(f"{name} is built from a model, and cannot be named here")
            loaded[name] = OF_MODEL[name](model)
            continue
        bare = name in DRAFTERS and not DRAFTERS[name].trained
        drafter = drafter_class(name)() if bare else mmspec.load_drafter(embedded.resolve(name))
        if model is not None and not bare:  # once here, so that `enable` makes no copies, which would recompile
            drafter.to(device=model.device, dtype=model.dtype)
        title = name if bare else name_of(drafter)
        loaded[title if title not in loaded else f"{title}:{Path(name).name}"] = drafter
    return loaded


EARLY = 6  # a draft model has 1/6 of its target's layers


def first_layers(model: GenerativeModel) -> ModelDrafter:
    """A draft model of the model's own first layers and its head, which shares the model's weights."""
    small = copy.deepcopy(model, {id(t): t for t in (*model.parameters(), *model.buffers())})
    own = decoder(small)
    count = max(1, len(own.layers) // EARLY)
    own.layers = nn.ModuleList(own.layers[:count])
    own.config.num_hidden_layers = count
    if getattr(own.config, "layer_types", None):
        own.config.layer_types = own.config.layer_types[:count]
    drafter = ModelDrafter.of(small)
    same = {"num_assistant_tokens": drafter.options.depth, "num_assistant_tokens_schedule": "constant"}
    small.generation_config.update(**same)
    return drafter


# By a drafter's name: a function that builds it from the measured model, for drafters that need no separate file.
OF_MODEL: dict[str, Callable[[GenerativeModel], Drafter]] = {"model": first_layers, "mtp": MtpDrafter.of_model}


def _dflash(drafter: BlockDrafter) -> dict[str, object]:
    """The same weights in transformers' own class, which reads embeddings without a norm.

    Raises ValueError: the class does not support this network.
    """
    same = copy.copy(drafter)
    same.config = replace(drafter.config, bare_embeds=True)
    with tempfile.TemporaryDirectory() as folder:
        save_drafter(same, folder, "muse-glimmer")
        theirs = stock_class("MuseGlimmerAssistantModel").from_pretrained(folder)
    own = next(drafter.parameters())
    return {"assistant_model": theirs.to(own.device, own.dtype).eval(), "speculation_type": "dflash"}


# By a drafter's method: the arguments that make stock `generate` draft the same way, except for prompt lookup.
ASSISTED: dict[str, Callable[[Any], dict[str, object]]] = {
    "model": lambda drafter: {"assistant_model": drafter.model},
    "mtp": lambda drafter: {"use_mtp": True},
    "block": _dflash,
}
