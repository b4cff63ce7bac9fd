"""Names of drafters and rules, and the way from a name to the thing."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmspec.config import SpecConfig
from mmspec.types import TargetInfo


@dataclass(frozen=True)
class Entry:
    """Where a drafter lives and what it is."""

    module: str
    cls: str
    trained: bool
    about: str


DRAFTERS: dict[str, Entry] = {
    "ngram": Entry("mmspec.drafters.ngram", "NgramDrafter", False, "prompt lookup, no weights; the default"),
    "eagle": Entry(
        "mmspec.drafters.eagle", "EagleDrafter", True, "EAGLE-2-style feature drafter; reads EAGLE, EAGLE-3"
    ),
}


def drafters() -> dict[str, str]:
    return {name: entry.about for name, entry in DRAFTERS.items()}


def drafter_class(name: str) -> Any:
    """The class registered under a name.

    Raises:
        ValueError: an unknown name; the message lists the known ones.
    """
    if name not in DRAFTERS:
        raise ValueError(f"unknown drafter {name!r}; choose from {', '.join(DRAFTERS)}")
    return getattr(importlib.import_module(DRAFTERS[name].module), DRAFTERS[name].cls)


def resolve(drafter: Any, config: SpecConfig, target: TargetInfo) -> Any:
    """A drafter ready for the target: from None, a registered name, a folder, a hub name or an instance.

    Raises:
        ValueError: an unknown name, a name that needs weights, or a drafter made for another target.
    """
    if drafter is None:
        drafter = "ngram"
    if isinstance(drafter, str) and drafter in DRAFTERS:
        if DRAFTERS[drafter].trained:
            raise ValueError(
                f"the drafter {drafter!r} needs weights; pass its folder or hub name, or train one with "
                f"`mmspec train --method {drafter} --target {target.name}`"
            )
        drafter = drafter_class(drafter)()
    if isinstance(drafter, (str, Path)):
        if isinstance(drafter, str) and "/" not in drafter and not Path(drafter).exists():
            raise ValueError(
                f"unknown drafter {drafter!r}; choose from {', '.join(DRAFTERS)}, or pass a folder or "
                "owner/name on the hub"
            )
        from mmspec.checkpoints.load import load_drafter

        drafter = load_drafter(drafter, target=target)
    if not hasattr(drafter, "fit"):
        raise ValueError(f"a drafter has start, propose and fit; {type(drafter).__name__} has not")
    return drafter.fit(target, config)
