"""Shared by suites of one model: the flags for model and drafter, loading, provenance and devices."""

import argparse
import copy
from typing import Any

import mmspec
from mmspec.app import embedded
from mmspec.app.bench.answers import VlmBench
from mmspec.app.bench.command import BenchError, Outcome
from mmspec.app.engine import Engine, load
from mmspec.app.options import count, where
from mmspec.app.provenance import provenance
from mmspec.protocols import Drafter


def configure(parser: argparse.ArgumentParser, tokens: int) -> None:
    add = parser.add_argument
    add("--model", default=embedded.MODEL, help="folder, name on the Hub, or an embedded one: %(default)s, "
        "scenes-hybrid")  # fmt: skip
    add("--drafter", help="name or folder (default: one that fits the model)")
    add("--max-new-tokens", type=count, default=tokens)
    where(parser)


def named(args: argparse.Namespace) -> str:
    """The requested drafter, or one that fits the model."""
    return embedded.fitting(args.drafter or embedded.drafter(args.model), args.model)


def loaded(args: argparse.Namespace, outcome: Outcome, enabled: str, **facts: object) -> Engine:
    """The model, with a drafter enabled or `embedded.STOCK`, and the provenance of the run."""
    engine = load(args.model, enabled, args.device, args.dtype, args.max_new_tokens, 0)
    outcome.provenance = provenance(engine.model.device, engine.model.dtype) | {"model": args.model} | facts
    return engine


def timed(args: argparse.Namespace, outcome: Outcome, **facts: object) -> VlmBench:
    """The model, for timing it with several drafters."""
    engine = loaded(args, outcome, embedded.STOCK, **facts)
    return VlmBench(engine.model, engine.processor, args.max_new_tokens, args.seed)


def fitted(bench: VlmBench, drafter: str, **options: object) -> Drafter:
    """A drafter of that name for a model."""
    name = None if drafter == embedded.SHIPPED else embedded.resolve(drafter)
    with mmspec.enable(bench.model, drafter=name, **options) as handle:
        made: Drafter = handle.drafter
    return made


def refuse(args: argparse.Namespace, why: str, **usual: object) -> None:
    """BenchError if one of these flags, which have no effect here, does not have its `usual` value."""
    given = [f"--{name.replace('_', '-')}" for name, value in usual.items() if getattr(args, name, value) != value]
    if given:
        raise BenchError(f"{' and '.join(given)}: {why}; leave {'it' if len(given) == 1 else 'them'} out")


def sharing(model: Any) -> Any:
    """A copy of a model that shares its weights."""
    return copy.deepcopy(model, {id(t): t for t in (*model.parameters(), *model.buffers())})
