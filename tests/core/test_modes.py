"""Rounds run in inference mode where the weights bear it, and nobody outside of mmspec can tell."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import tiny_vlms
import torch
import transformers as T
from compared import as_stock
from hostile_drafters import Scripted, _random, eagle
from torch import Tensor, nn

import mmspec
from mmspec.modes import each_in
from mmspec.pipelines.host.call import calling
from mmspec.pipelines.host.devices import mode_of
from mmspec.pipelines.host.names import CACHE
from mmspec.pipelines.target import vlm
from mmspec.tree import chain


class Quantized(Tensor):
    """As quantizers put them into models: a class of its own."""


def _own_class(model: Any) -> None:
    layer = model.get_decoder().layers[-1].mlp.down_proj
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Quantized), requires_grad=False)


def _moved(model: Any) -> None:
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    add_hook_to_module(model.get_decoder().layers[0], AlignDevicesHook("cpu", offload=True))


def _rewrites(model: Any) -> None:
    model.get_decoder().rotary_emb.rope_type = "dynamic"


def _by_layer(model: Any) -> None:
    model.get_decoder().rotary_emb.rope_type = {"full_attention": "longrope", "sliding_attention": "default"}


def _cast(model: Any) -> None:
    ModelHook = pytest.importorskip("diffusers.hooks").ModelHook
    HookRegistry = pytest.importorskip("diffusers.hooks").HookRegistry
    HookRegistry.check_if_exists_or_initialize(model.get_decoder().layers[0]).register_hook(ModelHook(), "still")


@pytest.mark.parametrize(
    ("change", "mode"),
    [(None, torch.inference_mode), *((change, torch.no_grad) for change in (_own_class, _moved, _cast))],
)
def test_the_mode_that_rounds_run_in(change: Any, mode: Any) -> None:
    model, inputs = copy.deepcopy(tiny_vlms.model("llava")), tiny_vlms.prompt("llava", "image first")
    stock = tiny_vlms.generate(model, inputs)
    if change is not None:
        change(model)
    assert mode_of(model) is mode_of(nn.Linear(1, 1), model) is mode
    modes: list[bool] = []
    watch = calling(watch=lambda round_: modes.append(round_.scores.p.ids.is_inference()))
    with watch, mmspec.enable(model, drafter=Scripted(_random)):
        assert torch.equal(tiny_vlms.generate(model, inputs), stock)
    assert modes[0] is False  # the prefill's, in which a model may keep something for itself
    assert len(modes) > 1 and set(modes[1:]) == {mode is torch.inference_mode}


@pytest.mark.parametrize("change", [_rewrites, _by_layer])
def test_buffers_that_a_round_may_rewrite(change: Any) -> None:
    model = copy.deepcopy(tiny_vlms.model("llava"))
    change(model)
    assert mode_of(model) is torch.no_grad


def test_steps_are_made_in_the_mode_and_taken_outside() -> None:
    def steps() -> Iterator[bool]:
        for _ in range(2):
            yield torch.is_inference_mode_enabled()

    seen = [(within, torch.is_inference_mode_enabled()) for within in each_in(torch.inference_mode, steps())]
    assert seen == [(True, False)] * 2


class Remembering(T.StoppingCriteria):
    """Writes into what an earlier call showed it, and needs gradients to decide."""

    kept: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        if self.kept is not None:
            self.kept.zero_()
        self.kept = input_ids.clone()
        with torch.enable_grad():
            weight = torch.ones((), requires_grad=True)
            (input_ids.float() * weight).sum().backward()
        assert weight.grad is not None and weight.grad > 0
        return torch.zeros(len(input_ids), dtype=torch.bool)


def test_the_users_own_conditions_and_grammars_see_ordinary_tensors() -> None:
    model, inputs = tiny_vlms.model("llava"), tiny_vlms.prompt("llava", "image first")
    asked: list[bool] = []

    def allowed(row: int, ids: Tensor) -> list[int]:
        asked.append(ids.is_inference() or torch.is_inference_mode_enabled())
        return list(range(5, 90))

    allowed.mmspec_pure = True  # type: ignore[attr-defined]
    told = {"stopping_criteria": [Remembering()], "prefix_allowed_tokens_fn": allowed}
    as_stock(model, inputs, Scripted(_random), call=told, times=2)
    assert asked and not any(asked)


def test_what_comes_out_may_be_used_for_anything() -> None:
    model = tiny_vlms.model("llava")
    told = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    with mmspec.enable(model, drafter=eagle(model)):
        out = tiny_vlms.generate(model, tiny_vlms.prompt("llava", "image first"), **{CACHE: T.DynamicCache()}, **told)
    cache = getattr(out, CACHE)
    entries = [t for layer in cache.layers for t in (layer.keys, layer.values)]
    assert not any(t.is_inference() for t in (out.sequences, *out.scores, *out.logits, *entries))
    entries[0].add_(0.0)  # in place
    weight = torch.ones(tiny_vlms.VOCAB, requires_grad=True)
    (torch.stack(out.logits) * weight).sum().backward()
    assert weight.grad is not None


def test_a_cache_that_outgrew_its_room_may_be_written_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vlm, "_RESERVE", 1)
    model = tiny_vlms.model("llava")
    with mmspec.enable(model, drafter=Scripted(_random)):
        out = tiny_vlms.generate(model, tiny_vlms.prompt("llava", "image first"), return_dict_in_generate=True)
    for layer in getattr(out, CACHE).layers:
        assert not layer.keys.is_inference() and layer.keys.zero_().sum() == 0


def test_an_enabled_model_may_be_trained_afterwards() -> None:
    model, inputs = copy.deepcopy(tiny_vlms.model("llava")), tiny_vlms.prompt("llava", "image first")
    with mmspec.enable(model, drafter=Scripted(_random)):
        tiny_vlms.generate(model, inputs)
    loss = model(**inputs, labels=inputs["input_ids"]).loss
    loss.backward()
    assert all(p.grad is not None for p in model.get_decoder().layers.parameters())


def test_shapes_that_are_kept_may_be_used_by_autograd() -> None:
    chain.cache_clear()
    with torch.inference_mode():
        tree = chain(4, torch.device("cpu"))
    assert not any(t.is_inference() for t in (tree.parents, tree.depth, tree.ancestors))
    x = torch.ones(1, 4, requires_grad=True)
    x.gather(1, tree.parents).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [[2.0, 1.0, 1.0, 0.0]]
