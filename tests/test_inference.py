"""Rounds run in inference mode where the weights bear it, and nobody outside of a round can tell."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import targets
import torch
import transformers as T
from drafters import Scripted, _random, eagle
from torch import Tensor, nn

import mmspec
from mmspec.app.bench.image_methods import Hostile
from mmspec.config import SpecConfig
from mmspec.pipelines import generate
from mmspec.pipelines.inference import inference
from mmspec.types import TargetInfo


class Quantized(Tensor):
    """As quantizers put them into models: a class of its own."""


def _own_class(model: Any) -> None:
    layer = model.get_decoder().layers[-1].mlp.down_proj
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Quantized), requires_grad=False)


def _moved(model: Any) -> None:
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    add_hook_to_module(model.get_decoder().layers[0], AlignDevicesHook("cpu", offload=True))


@pytest.mark.parametrize(
    ("change", "mode"), [(None, torch.inference_mode), (_own_class, torch.no_grad), (_moved, torch.no_grad)]
)
def test_the_mode_that_rounds_run_in(change: Any, mode: Any) -> None:
    model, inputs = copy.deepcopy(targets.model("llava")), targets.prompt("llava", "image first")
    stock = targets.generate(model, inputs)
    if change is not None:
        change(model)
    assert inference(model) is mode
    modes: list[bool] = []
    told = generate.watching.set(lambda round_: modes.append(round_.scores.law.ids.is_inference()))
    try:
        with mmspec.enable(model, drafter=Scripted(_random)):
            assert torch.equal(targets.generate(model, inputs), stock)
    finally:
        generate.watching.reset(told)
    assert modes[0] is False  # the prefill's, in which a model may keep something for itself
    assert len(modes) > 1 and set(modes[1:]) == {mode is torch.inference_mode}


def test_what_comes_out_may_be_used_for_anything() -> None:
    model = targets.model("llava")
    told = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    with mmspec.enable(model, drafter=eagle(model)):
        out = targets.generate(model, targets.prompt("llava", "image first"), past_key_values=T.DynamicCache(), **told)
    cache = out.past_key_values
    entries = [t for layer in cache.layers for t in (layer.keys, layer.values)]
    assert not any(t.is_inference() for t in (out.sequences, *out.scores, *out.logits, *entries))
    entries[0].add_(0.0)  # in place
    weight = torch.ones(targets.VOCAB, requires_grad=True)
    (torch.stack(out.logits) * weight).sum().backward()
    assert weight.grad is not None


def test_a_cache_that_outgrew_its_room_may_be_written_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "_RESERVE", 1)
    model = targets.model("llava")
    with mmspec.enable(model, drafter=Scripted(_random)):
        out = targets.generate(model, targets.prompt("llava", "image first"), return_dict_in_generate=True)
    for layer in out.past_key_values.layers:
        assert not layer.keys.is_inference() and layer.keys.zero_().sum() == 0


def test_an_enabled_model_may_be_trained_afterwards() -> None:
    model, inputs = copy.deepcopy(targets.model("llava")), targets.prompt("llava", "image first")
    with mmspec.enable(model, drafter=Scripted(_random)):
        targets.generate(model, inputs)
    loss = model(**inputs, labels=inputs["input_ids"]).loss
    loss.backward()
    assert all(p.grad is not None for p in model.get_decoder().layers.parameters())


def test_hostile_windows_are_fitted_like_others() -> None:
    info = TargetInfo("toy", 50, 1, 1, 1, torch.device("cpu"), torch.float32)
    fitted = Hostile().fit(info, SpecConfig.of({"window": 4, "reproducible": True}))
    assert type(fitted) is Hostile and fitted.vocab == 50
