"""Every trained drafter, and a model that drafts, in every mode: greedy text is stock's, whatever was drafted."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import published_mtp
import pytest
import tiny_vlms
import torch
from compared import as_stock
from hostile_drafters import eagle, feature_drafter
from published_drafters import put

from mmspec.drafters import lookup
from mmspec.types import Draft
from tests.drafters import test_block, test_eagle_vlm

Row = tuple[str, Callable[[Any, Path], Any], dict[str, Any]]  # target, what makes its drafter, options of that


def heads(count: int) -> Callable[[Any, Path], str]:
    """Heads in the target's own folder, that know nothing of it."""

    def shipped(model: Any, folder: Path) -> str:
        published_mtp.shipped(model, folder, published_mtp.qwen_heads(model, count))
        return "mtp"

    return shipped


def another(model: Any, folder: Path) -> Any:
    """A model that is often wrong."""
    made = copy.deepcopy(model)
    torch.manual_seed(3)
    with torch.no_grad():
        for weight in made.parameters():
            weight.add_(torch.randn_like(weight) * weight.std(correction=0))
    return made


def of(method: str, **config: Any) -> Callable[[Any, Path], Any]:
    return lambda model, folder: feature_drafter(method, model, **config)


def layout(name: str) -> Callable[[Any, Path], Any]:
    """A block drafter in one of its published layouts."""
    return lambda model, folder: test_block.load(put(folder, *test_block.MADE[name][1]()))


def network(name: str) -> Callable[[Any, Path], Any]:
    return lambda model, folder: test_eagle_vlm.made(**test_eagle_vlm.NETWORKS[name])


MADE: dict[str, Row] = {
    "eagle": ("llava", of("eagle"), {}),
    "chain": ("llava", of("eagle"), {"width": 1, "depth": 3}),
    "eagle, adaptive": ("llava", of("eagle"), {"depth": 4, "adaptive": True}),
    "eagle-3": ("llava", lambda model, _: eagle(model, draft_vocab=50), {"width": 2, "depth": 3, "size": 7}),
    "msd": ("llava", of("msd"), {}),
    "vispec": ("llava", of("vispec", num_q=2), {}),
    "flash": ("llava", of("flash"), {}),
    "flash, one token a pass": (
        "llava",
        of("flash", tokens=1, latents=3, least=1, tree="dynamic", depth=3, width=2, size=7),
        {},
    ),
    "specvlm": ("llava", of("specvlm"), {}),
    "block": ("llava", layout("dflash"), {}),
    "model": ("llava", another, {"depth": 3}),
    "mtp": ("qwen3_5", heads(1), {}),
}
MORE: dict[str, Row] = {
    "the target itself": ("llava", lambda model, _: copy.deepcopy(model), {}),
    "mtp, three heads": ("qwen3_5", heads(3), {}),
    "mtp, a tree": ("qwen3_5", heads(3), {"depth": 5, "width": 2, "size": 11}),
    "jacobi": ("llava", lambda *_: "jacobi", {"window": 6}),
    "jacobi, a tree": ("llava", lambda *_: "jacobi", {"window": 9, "coupling": "gumbel", "proactive": (2, 3)}),
    **{name: ("llava", layout(name), {}) for name in test_block.MADE},
    **{name: ("qwen2_5_vl", network(name), {}) for name in test_eagle_vlm.NETWORKS},
    **{
        f"{name}, {' '.join(options)}": ("llava", layout(name), options)
        for name in ("dflash", "dspark, rnn", "dflash2", "speculators dflash")
        for options in ({"width": 3, "size": 12}, {"tree": "mc_sim_7b_63"}, {"depth": 2})
    },
}
KINDS = {
    "llava": ("image first", "ragged"),
    "qwen2_5_vl": ("several images", "ragged"),
    "qwen3_5": ("image first", "image last", "several images", "text only", "ragged"),
}
MODES: dict[str, tuple[list[str], dict[str, Any]]] = {  # name → the rows that it is tested on, and what says so
    "as it is": ([*MORE], {}),
    "lookup": ([*MADE], {"lookup": True}),
    "adaptive": (["eagle", "the target itself", "mtp"], {"adaptive": True, "depth": 8}),
    "auto": (["mtp"], {"auto": True}),
}
EVERY = {"as it is": pytest.mark.every(2), "adaptive": pytest.mark.every(3)}
CASES = [pytest.param(name, mode, marks=EVERY.get(mode, ())) for mode, (names, _) in MODES.items() for name in names]


class Turns:
    """Notes at each row of each round whether it was a copy of the row's own text."""

    def __init__(self) -> None:
        self.copies: list[bool] = []

    def __call__(self, handle: Any) -> None:
        inner = handle.proposer.propose

        def propose(session: Any, target: Any) -> Draft:
            draft = inner(session, target)
            self.copies += [row.copied for row in session.memory.values]
            return draft

        handle.proposer.propose = propose


@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.parametrize(("name", "mode"), CASES)
def test_greedy_text_is_stocks(
    name: str, mode: str, compile: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With lookup, copies are made wherever there is one to make, so that drafts and copies take turns."""
    monkeypatch.setattr(lookup, "EDGE", 0.0)
    monkeypatch.setattr(lookup, "LEAST", 0.0)
    target, make, own = {**MADE, **MORE}[name]
    model = copy.deepcopy(tiny_vlms.model(target))
    drafter, options, copying = make(model, tmp_path), {**own, **MODES[mode][1]}, mode == "lookup"
    for kind in KINDS[target] if mode == "as it is" else ("image first", "ragged"):
        turns, inputs = Turns(), tiny_vlms.prompt(target, kind)
        told = {"begun": turns} if copying else {"times": 3 if mode == "auto" else 2}
        handle = as_stock(model, inputs, drafter, compile=compile, **told, **options)
        assert handle.stats.drafted or mode == "auto"
        assert not copying or 0 < sum(turns.copies) < len(turns.copies), "both take turns"
