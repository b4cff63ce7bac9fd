"""Devices, dtypes and waits without a GPU: every drafter on pretended devices, and what makes the host wait in a round.

Stock answers are those of the CPU. `WAITS` holds what each round costs at most, so that no change can worsen it unseen;
where a round has become better, the test warns with the new number, to be written here.
"""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import drafters
import pytest
import targets
import tiny_llamagen
import torch
from accelerate import dispatch_model
from pretend_cuda import Mismatch, Pretend, home, place
from torch import Tensor

import mmspec
from mmspec.kernels import dispatch
from mmspec.pipelines import generate

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="pretends a GPU where there is none")

FIRST, SECOND = torch.device("cuda:0"), torch.device("cuda:1")
SHORT = {"max_new_tokens": 8}
DRAFTERS: dict[str, Callable[[Any], Any]] = {
    **{name: lambda model, name=name: name for name in ("plain", "ngram", "jacobi")},
    "eagle": lambda model: drafters.eagle(model, depth=4, width=3, size=14),
    **{name: lambda model, name=name: drafters.DRAFTERS[name](model, None) for name in ("vispec", "msd", "flash", "specvlm")},
}


@pytest.fixture(autouse=True)
def as_shipped(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Without a wish for kernels, and with what is known of Triton forgotten."""
    monkeypatch.delenv(dispatch.VARIABLE, raising=False)
    yield
    dispatch.chosen.cache_clear()
    dispatch._installed.cache_clear()


@cache
def stock(kind: str, autocast: bool = False) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        return targets.generate(targets.model("llava"), targets.prompt("llava", kind), **SHORT)


def split(model: Any) -> Any:
    """The first layer on one device, the others and the head on another, by accelerate."""
    model.to(FIRST)
    text = "model.language_model"
    there = [f"{text}.layers.1", f"{text}.layers.2", f"{text}.norm", "lm_head"]
    here = ["model.vision_tower", "model.multi_modal_projector", f"{text}.embed_tokens", f"{text}.rotary_emb"]
    spread = {**dict.fromkeys([*here, f"{text}.layers.0"], FIRST), **dict.fromkeys(there, SECOND)}
    return dispatch_model(model, {name: str(device) for name, device in spread.items()}, force_hooks=True)


def answered(model: Any, kind: str, device: torch.device | str, **options: Any) -> Tensor:
    inputs = {name: t.to(device) for name, t in targets.prompt("llava", kind).items()}
    return targets.generate(model, inputs, **{**SHORT, **options})


# -- what is pretended -----------------------------------------------------------------------------------------------


def test_two_devices_do_not_meet() -> None:
    with Pretend():
        a, b = torch.ones(2, 3, device="cuda:0"), torch.ones(2, 3, device="cuda:1")
        assert (a.device, (a @ b.to("cuda:0").T).device) == (FIRST, FIRST)
        for meet in (lambda: a + b, lambda: torch.cat([a, b.cpu()]), lambda: a[b[:, 0].long()]):
            with pytest.raises(Mismatch):
                meet()
        assert (a + torch.tensor(1.0)).device == FIRST


def test_waits_are_counted_where_they_are_asked_for() -> None:
    with Pretend() as pretended:
        t = torch.arange(4, device="cuda")
        assert pretended.waits == (0, 0) and t.sum().item() == 6 and bool(t.any()) and t.tolist() == [0, 1, 2, 3]
        assert t[t > 1].cpu().sum() == 5 and torch.tensor([1], device="cuda") == 1
    assert pretended.waits == (6, 1) and all("test_pretend_cuda.py" in line for line in pretended.reads)


# -- every drafter, wherever a model lies ----------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("where", ["one", "two"])
def test_a_model_on_one_device_or_two(drafter: str, where: str) -> None:
    made = DRAFTERS[drafter](targets.model("llava"))
    with Pretend():
        model = copy.deepcopy(targets.model("llava"))
        model = split(model) if where == "two" else place(model, SECOND)
        device = FIRST if where == "two" else SECOND
        with mmspec.enable(model, made) as handle:
            for kind in ("image first", "ragged"):
                out = answered(model, kind, device)
                assert home(out) == device and torch.equal(out.cpu(), stock(kind))
        assert handle.stats.rounds
