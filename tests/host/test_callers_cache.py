"""Caches of the caller's: filled as stock fills them, with states and windows, and gone on from in either direction."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import transformers
import vlm_classes as zoo
from hostile_drafters import DRAFTERS, Oracle
from torch import Tensor

import mmspec
from mmspec.pipelines.host.call import TYPES
from mmspec.pipelines.host.names import CACHE

RECURRENT = ["qwen3_5_moe", "nemotron_h_omni", "minicpmv4_6", "lfm3_vl"]
WINDOWS = ["lfm3_vl", "gemma4", "mistral3", "cohere2_vision"]


def returned(model: Any, inputs: dict[str, Tensor], most: int) -> Any:
    """The cache that an answer returns."""
    return getattr(zoo.generate(model, inputs, max_new_tokens=most, return_dict_in_generate=True), CACHE)


def own(model: Any, inputs: dict[str, Tensor], most: int) -> Any:
    """A cache that the caller gives, and reads afterwards."""
    cache = transformers.DynamicCache(config=model.config.get_text_config())
    zoo.generate(model, inputs, max_new_tokens=most, **{CACHE: cache})
    return cache


def next_turn(text: Tensor, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """A question after this text, whose pictures are in the cache."""
    ids = torch.cat([text, torch.tensor([[3, 4, 5]])], 1)
    types = {name: torch.zeros_like(ids) for name in TYPES if name in inputs}
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **types}


@pytest.mark.parametrize("turns", ["both", "only the first", "only the second"])
@pytest.mark.parametrize("cache", [returned, own])
@pytest.mark.parametrize("case", dict.fromkeys([*RECURRENT, *WINDOWS]))
@pytest.mark.every(5)
def test_a_cache_over_two_turns(case: str, cache: Any, turns: str) -> None:
    """Wherever an answer ends, in the middle of a draft too, its cache is that of stock."""
    model, inputs = zoo.model(case), zoo.prompt(case)
    whole = zoo.generate(model, inputs, max_new_tokens=17)
    right = DRAFTERS["always right"](model, Oracle.of(inputs["input_ids"], whole))
    for most in (1, 4, 5, 17):
        asked = next_turn(whole[:, : inputs["input_ids"].shape[1] + most], inputs)
        want = cache(model, inputs, most)
        with mmspec.enable(model, right) if turns != "only the second" else nullcontext():
            found = cache(model, inputs, most)
        assert found.get_seq_length() == want.get_seq_length() == asked["input_ids"].shape[1] - 4
        for mine, theirs in zip(found.layers, want.layers, strict=True):
            for name in ("keys", "values", "conv_states", "recurrent_states"):
                pair = getattr(mine, name, None), getattr(theirs, name, None)
                torch.testing.assert_close(*pair, rtol=1e-3, atol=1e-4)
        answer = zoo.generate(model, asked, max_new_tokens=8, **{CACHE: want})
        with mmspec.enable(model, "ngram") if turns != "only the first" else nullcontext():
            assert torch.equal(zoo.generate(model, asked, max_new_tokens=8, **{CACHE: found}), answer)


def test_a_cache_without_a_place_for_states_is_refused() -> None:
    model = zoo.model("lfm3_vl")
    with mmspec.enable(model), pytest.raises(mmspec.UnsupportedError, match="no place for the states"):
        zoo.generate(model, zoo.prompt("lfm3_vl"), **{CACHE: transformers.DynamicCache()})


@pytest.mark.parametrize("kind", [transformers.StaticCache, transformers.DynamicCache])
def test_layers_with_attention_and_a_state(kind: Any) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    states = {"mamba_n_heads": 4, "mamba_d_ssm": 64, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1}
    config = transformers.FalconH1Config(**sizes, **states, num_hidden_layers=2, vocab_size=64, eos_token_id=None)
    model, ids = transformers.FalconH1ForCausalLM(config).eval(), torch.tensor([[3, 9, 4, 9, 3, 9]])

    def conversation(*enabled: bool) -> list[list[int]]:
        more = {"max_cache_len": 64} if kind is transformers.StaticCache else {}
        cache, text = kind(config=config, **more), ids
        for accelerated in enabled:
            with mmspec.enable(model, "recycle", auto=False) if accelerated else nullcontext():
                text = model.generate(text, max_new_tokens=7, do_sample=False, **{CACHE: cache})
            assert cache.get_seq_length() == text.shape[1] - 1
            text = torch.cat([text, ids[:, :2]], 1)
        return text.tolist()

    stock = conversation(False, False, False)
    assert all(conversation(*turns) == stock for turns in ((True, True, True), (True, False, True)))


def test_a_static_cache_with_a_window_is_filled_here_and_gone_on_from_by_stock() -> None:
    model, inputs = zoo.model("mistral3"), zoo.prompt("mistral3")

    def conversation() -> list[int]:
        cache = transformers.StaticCache(config=model.config.get_text_config(), max_cache_len=64)
        text = zoo.generate(model, inputs, max_new_tokens=6, **{CACHE: cache})
        return zoo.generate(model, next_turn(text, inputs), max_new_tokens=6, **{CACHE: cache})[0].tolist()

    wanted = conversation()
    with mmspec.enable(model, "ngram"), pytest.warns(UserWarning, match="stock path: .* out of order"):
        assert conversation() == wanted


def test_a_window_for_filled_caches_alone_is_refused() -> None:
    model, inputs = zoo.model("qwen3_vl_moe"), zoo.prompt("qwen3_vl_moe")
    filled = own(model, inputs, 4)
    asked = next_turn(zoo.generate(model, inputs, max_new_tokens=4), inputs)
    with mmspec.enable(model), pytest.raises(mmspec.UnsupportedError, match="its window to a filled cache"):
        zoo.generate(model, asked, **{CACHE: filled})
