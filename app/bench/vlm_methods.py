"""The methods of the vlm suite: stock paths, drafters, and these with one of their parts switched off."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import CompileConfig

from mmspec import registry
from mmspec.app.bench import drafters
from mmspec.app.bench.assisted import ASSISTED
from mmspec.app.bench.command import matching, say
from mmspec.app.options import count
from mmspec.drafters.specvlm import BRANCHES

GRIDS: dict[str, tuple[dict[str, int], ...]] = {  # what --tune tries
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
    arguments: dict[str, Any] = field(default_factory=dict)
    drafter: Any = None
    options: dict[str, Any] = field(default_factory=dict)  # of `enable`
    grid: str = ""  # row of GRIDS
    single: bool = False  # batch 1 only
    of: str = ""  # the method of which it is a variant
    told: str = ""  # the switch, for the table

    def tuned(self, setting: dict[str, int]) -> VlmMethod:
        if self.drafter is None:
            return replace(self, arguments=self.arguments | setting)
        return replace(self, options=self.options | setting)

    @property
    def setting(self) -> str:
        held = {k: v for k, v in (self.options or self.arguments).items() if isinstance(v, int)}
        tree = " ".join(f"{k.removeprefix('prompt_lookup_')} {v}" for k, v in held.items())
        return ", ".join(part for part in (self.told, tree) if part)


@dataclass(frozen=True)
class Variant:
    """A switch that is thrown when a trained drafter drafts: other values of its config, or options of `enable`."""

    name: str
    config: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def told(self) -> str:
        return " ".join(f"{name}={value}" for name, value in {**self.config, **self.options}.items())


# By a drafter's method. FLASH's chain drafts token by token with its first head, as EAGLE does.
ABLATIONS: dict[str, tuple[Variant, ...]] = {
    "eagle": tuple(Variant(f"pruned {share:.0%}", options={"prune": share}) for share in (0.5, 0.9)),
    "vispec": (
        Variant("no summaries", {"summaries": False}),
        Variant("no global vector", {"global_vector": False}),
        Variant("nothing of the adaptor", {"summaries": False, "global_vector": False}),
        Variant("media as published", {"media": "merge"}),
    ),
    "flash": (
        Variant("chain", {"tokens": 1}),
        Variant("all rows", {"latents": 0}),
        Variant("4.5 rows a latent", {"ratio": 4.5}),
        Variant("16 rows a latent", {"ratio": 16.0}),
        Variant("64 rows a latent", {"ratio": 64.0, "least": 1}),
    ),
    "specvlm": (
        *(Variant(f"always {branch}", {"gate": branch}) for branch in BRANCHES),
        Variant("always prune, 1 in 4", {"gate": "prune", "prune_ratio": 4}),
        Variant("always pool, 1 in 4", {"gate": "pool", "pool_ratio": 4}),
        Variant("always pool, 1 in 64", {"gate": "pool", "pool_ratio": 64}),
    ),
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Which methods are measured, and with what trees."""
    add = parser.add_argument
    drafters.configure(parser, " beside ngram")
    add("--ablate", action="store_true", help="each drafter also with one of its parts switched off at a time, when "
        "it drafts; nothing is trained again")  # fmt: skip
    add("--tune", action="store_true", help="choose each method's depth and tree on other images first")
    add("--tune-images", type=count, default=4, help="of them (default: %(default)s)")
    add("--depth", type=count, help="of the feature drafters, without --tune")
    add("--width", type=count, help="branches per node; 1 drafts a chain")
    add("--size", type=count, help="nodes per round, the root included")
    add("--draft-vocab", type=count, metavar="N", help="they propose from the first N tokens, and read no other rows "
        "of the model's head")  # fmt: skip
    add("--without", nargs="+", default=[], metavar="PATTERN", help="leave these out, such as stock-static 'eagle*'")


def stock(device: torch.device) -> list[VlmMethod]:
    """Stock generate as it is, and compiled on a static cache."""
    compiling: Any = CompileConfig(dynamic=False, mode="reduce-overhead" if device.type == "cuda" else "default")
    compiling._compile_all_devices = True  # transformers compiles by itself on some devices only
    return [
        VlmMethod("stock"),
        VlmMethod("stock-static", {"cache_implementation": "static", "compile_config": compiling}),
    ]


def methods(model: Any, args: argparse.Namespace) -> list[VlmMethod]:
    """The stock paths, prompt lookup as transformers has it, and mmspec with each drafter, stock's own path before."""
    found = [
        *stock(model.device),
        VlmMethod("hf-prompt-lookup", {"prompt_lookup_num_tokens": 10}, grid="lookup", single=True),
        VlmMethod("ngram", drafter=registry.drafter_class("ngram")(), grid="text drafter"),
    ]
    flags = {k: v for k in ("depth", "width", "size", "draft_vocab") if (v := getattr(args, k)) is not None}
    flags |= drafters.options(args)
    for title, drafter in drafters.read(args, model=model).items():
        if title == "ngram":  # it is there already, and has the options where it is named
            found = [replace(m, options=drafters.options(args)) if m.name == title else m for m in found]
            continue
        whole = VlmMethod(title, drafter=drafter, options=flags, grid="feature drafter")
        found += [*stocks_own(title, drafter), whole, *(variants(whole) if args.ablate else ())]
    return matching(found, None, args.without)


def stocks_own(title: str, drafter: Any) -> Iterator[VlmMethod]:
    """Stock's own assisted path with the same drafter, where stock has one."""
    how = ASSISTED.get(getattr(drafter, "method", ""))
    if how is None:
        return
    try:
        yield VlmMethod(f"hf-{title}", how(drafter), single=True)
    except ValueError as error:
        say(f"without hf-{title}: {error}")


def variants(whole: VlmMethod) -> Iterator[VlmMethod]:
    """A drafter's method with each of its switches thrown; those that its config does not allow are left out."""
    for variant in ABLATIONS.get(whole.drafter.method, ()):
        try:
            drafter = altered(whole.drafter, variant.config)
        except ValueError as error:
            say(f"without {whole.name}, {variant.name}: {error}")
            continue
        yield replace(
            whole, name=f"{whole.name}, {variant.name}", drafter=drafter, options=whole.options | variant.options,
            of=whole.name, told=variant.told,
        )  # fmt: skip


def altered(drafter: Any, changes: dict[str, Any]) -> Any:
    """The same weights under a config with some values changed; what that has no place for is left out.

    Raises:
        ValueError: values that the config does not allow, or that want weights which the drafter does not have.
    """
    if not changes:
        return drafter
    made = type(drafter)(replace(drafter.config, **changes))
    missing = made.load_state_dict(drafter.state_dict(), strict=False).missing_keys
    if missing:
        raise ValueError(f"it was trained without {', '.join(missing)}")
    return made.eval()
