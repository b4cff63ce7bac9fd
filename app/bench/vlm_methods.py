"""The methods of the vlm suite: stock paths and drafters."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from mmspec import registry
from mmspec.app import enabling
from mmspec.app.bench import drafters
from mmspec.app.bench.command import BenchError, matching, say
from mmspec.app.options import count
from mmspec.pipelines.families import table as families
from mmspec.pipelines.host.kinds import GenerativeModel
from mmspec.pipelines.host.loading import CompileConfig

GRIDS: dict[str, tuple[dict[str, int], ...]] = {  # the settings that --tune tries
    "lookup": tuple({"prompt_lookup_num_tokens": k} for k in (3, 5, 10)),
    "text drafter": tuple({"depth": d} for d in (3, 5, 8)),
    "feature drafter": (
        *({"depth": d, "width": 1} for d in range(3, 11)),
        {"depth": 3, "width": 2, "size": 8},
        {"depth": 5, "width": 2, "size": 12},
        {"depth": 5, "width": 4, "size": 16},
        {"depth": 7, "width": 4, "size": 24},
        {"depth": 6, "width": 8, "size": 40},
    ),
}


@dataclass(frozen=True)
class VlmMethod:
    """One way to generate: arguments of `generate`, and the drafter to enable, if any."""

    name: str
    arguments: Mapping[str, object] = field(default_factory=dict)
    drafter: Any = None
    options: dict[str, Any] = field(default_factory=dict)  # of `mmspec.enable`
    grid: str = ""  # key of GRIDS
    single: bool = False  # batch 1 only
    of: str = ""  # the method of which it is a variant
    switch: str = ""  # what the variant switches, for the table

    def tuned(self, setting: dict[str, int]) -> VlmMethod:
        if self.drafter is None:
            return replace(self, arguments={**self.arguments, **setting})
        return replace(self, options={**self.options, **setting})

    @property
    def setting(self) -> str:
        numbers = {k: v for k, v in (self.options or self.arguments).items() if isinstance(v, int)}
        tree = " ".join(f"{k.removeprefix('prompt_lookup_')} {v}" for k, v in numbers.items())
        return ", ".join(part for part in (self.switch, tree) if part)


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    drafters.configure(parser, " beside ngram")
    add("--tune", action="store_true", help="choose each method's depth and tree on other images first")
    add("--tune-images", type=count, default=4, help="number of these images (default: %(default)s)")
    add("--without", nargs="+", default=[], metavar="PATTERN", help="leave these out, such as stock-static 'eagle*'")


def stock(device: torch.device) -> list[VlmMethod]:
    """Stock generate, and stock generate compiled with a static cache."""
    compiling: Any = CompileConfig(dynamic=False, mode="reduce-overhead" if device.type == "cuda" else "default")
    compiling._compile_all_devices = True  # transformers compiles by itself on some devices only
    return [
        VlmMethod("stock"),
        VlmMethod("stock-static", {"cache_implementation": "static", "compile_config": compiling}),
    ]


def methods(
    model: GenerativeModel,
    args: argparse.Namespace,
    variants: Callable[[VlmMethod], Iterable[VlmMethod]] = lambda whole: (),
) -> list[VlmMethod]:
    """The stock paths, transformers' prompt lookup, ngram, and each drafter, after stock's equivalent if there is one.

    Args:
        variants: returns variants of a drafter's method, which are added after it.
    """
    ways = [
        *stock(model.device),
        VlmMethod("hf-prompt-lookup", {"prompt_lookup_num_tokens": 10}, grid="lookup", single=True),
        VlmMethod("ngram", drafter=registry.drafter_class("ngram")(), grid="text drafter"),
    ]
    flags = enabling.given(args.enable)
    target = families.of(model).describe(model)
    for title, drafter in drafters.read(args, model=model).items():
        try:
            drafter.fit(target, {})
        except ValueError as error:
            raise BenchError(f"--drafters: {error}") from error
        if title == "ngram":  # it is in the list already; naming it applies the options to it
            ways = [replace(m, options=flags) if m.name == title else m for m in ways]
            continue
        whole = VlmMethod(title, drafter=drafter, options=flags, grid="feature drafter")
        ways += [*stocks_own(title, drafter), whole, *variants(whole)]
    return matching(ways, None, args.without)


def stocks_own(title: str, drafter: object) -> Iterator[VlmMethod]:
    """Stock's own assisted decoding with the same drafter, if stock supports it."""
    how = drafters.ASSISTED.get(getattr(drafter, "method", ""))
    if how is None:
        return
    try:
        yield VlmMethod(f"hf-{title}", how(drafter), single=True)
    except ValueError as error:
        say(f"without hf-{title}: {error}")
