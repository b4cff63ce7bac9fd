"""A smaller model that drafts is told what it can read: its own ids, pictures in order, no embeddings of the target."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import tiny_vlms
import torch
import vlm_classes as zoo
from compared import as_stock

import mmspec


@pytest.mark.parametrize("name", ["blip-2", "instructblip", "instructblipvideo"])
def test_a_model_that_hands_the_writing_on_drafts_by_the_one_that_writes(name: str) -> None:
    model = zoo.model(name)
    handle = as_stock(model, zoo.prompt(name, "ragged"), copy.deepcopy(model), draw=zoo.generate)
    assert handle.stats.drafted > 0


def test_embeddings_are_the_targets_alone() -> None:
    """A smaller model has narrower ones."""
    model = tiny_vlms.text()
    ids = torch.randint(5, 100, (1, 9), generator=torch.Generator().manual_seed(1))
    inputs = {"input_ids": ids, "inputs_embeds": model.get_input_embeddings()(ids).detach()}
    as_stock(model, inputs, tiny_vlms.text(hidden_size=32))


@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.full)])
def test_ids_that_only_the_target_has(compile: bool) -> None:
    """LLaVA's vocabulary is that of its text model, and a few ids for pictures and padding."""
    model, inputs = tiny_vlms.model("llava"), tiny_vlms.prompt("llava", "ragged")
    stock = tiny_vlms.generate(model, inputs)
    assert int(stock[:, inputs["input_ids"].shape[1] :].max()) >= tiny_vlms.IMAGE
    as_stock(model, inputs, tiny_vlms.text(vocab_size=tiny_vlms.IMAGE), compile=compile)


def test_several_answers_about_several_pictures() -> None:
    """For each answer the draft model has the pictures in their order: the target itself is nearly always right."""
    model, inputs = tiny_vlms.model("qwen2_5_vl"), tiny_vlms.prompt("qwen2_5_vl", "several images")
    assert len({tuple(grid) for grid in inputs["image_grid_thw"].tolist()}) > 1
    asked: dict[str, Any] = {"do_sample": True, "top_k": 1, "num_return_sequences": 3}
    handle = as_stock(model, inputs, copy.deepcopy(model), call=asked)
    assert handle.stats.accepted > 0.9 * handle.stats.drafted


@pytest.mark.parametrize("setting", [{"num_beams": 2}, {"stop_strings": ["a"]}, {"cache_implementation": "offloaded"}])
def test_its_own_generation_config_does_not_decide_how_it_drafts(setting: dict[str, Any]) -> None:
    model = tiny_vlms.model("llava")
    small = copy.deepcopy(model)
    small.generation_config.update(**setting)
    handle = as_stock(model, tiny_vlms.prompt("llava", "image first"), small)
    assert handle.stats.tokens_per_target_call > 2


@pytest.mark.parametrize("wrapper", ["peft", "compile"])
def test_a_model_in_a_wrapper_drafts(wrapper: str) -> None:
    model, small = tiny_vlms.text(), tiny_vlms.text()
    if wrapper == "peft":
        peft = pytest.importorskip("peft")
        wrapped = peft.get_peft_model(small, peft.LoraConfig(r=4, task_type="CAUSAL_LM")).eval()
    else:
        wrapped = torch.compile(small, backend="eager")
    call = {"input_ids": torch.randint(5, 90, (2, 9)), "max_new_tokens": 20, "do_sample": False}
    want = model.generate(**call)
    with mmspec.enable(model) as handle:
        assert torch.equal(model.generate(**call, assistant_model=wrapped), want)
        assert handle.stats.tokens_per_target_call > 2
    with mmspec.enable(model, wrapped) as handle:
        assert torch.equal(model.generate(**call), want) and handle.stats.tokens_per_target_call > 2
