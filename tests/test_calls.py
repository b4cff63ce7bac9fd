"""Calls that say their prompt, their ids or their cache in another way than usual: as stock answers, or refused."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import targets
import torch
import transformers as T
from drafters import DRAFTERS, Oracle, Scripted, _random
from torch import Tensor

import mmspec
from mmspec.pipelines.patch import UnsupportedError

PLAIN = {"do_sample": False, "max_new_tokens": 16}


@pytest.fixture
def llava() -> Any:
    """A tiny LLaVA of this test alone."""
    return copy.deepcopy(targets.model("llava"))


def text(config: Any, kind: Any, **more: Any) -> Any:
    """A tiny language model without eyes, weights so large that it repeats little; `None` leaves an argument out."""
    torch.manual_seed(0)
    made = kind(config(**{k: v for k, v in {**targets.TEXT, **more}.items() if v is not None})).eval()
    with torch.no_grad():
        for weight in made.parameters():
            if weight.dim() > 1:
                weight.normal_(std=targets.GAIN / weight[0].numel() ** 0.5)
    made.generation_config.eos_token_id, made.generation_config.pad_token_id = None, 0
    return made


def words(count: int, seed: int = 3, rows: int = 1) -> Tensor:
    return torch.randint(5, 100, (rows, count), generator=torch.Generator().manual_seed(seed))


# -- what the prefill reads ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", ["random tree", "ngram", "eagle tree"])
@pytest.mark.parametrize("mask", ["ones", "padded"])
def test_soft_prompts_before_the_ids(llava: Any, drafter: str, mask: str) -> None:
    """More embeddings than ids: the cache, the one handed back too, counts what was read, not the ids."""
    ids = words(6)
    soft = torch.randn(1, 5, targets.HIDDEN, generator=torch.Generator().manual_seed(1))
    embeds = torch.cat([soft, llava.get_input_embeddings()(ids)], 1).detach()
    valid = torch.ones(1, 11, dtype=torch.long)
    valid[0, 0] = int(mask == "ones")

    def call() -> Any:
        inputs = {"input_ids": ids, "inputs_embeds": embeds, "attention_mask": valid}
        return llava.generate(**inputs, **PLAIN, return_dict_in_generate=True)

    stock = call()
    with mmspec.enable(llava, drafter=DRAFTERS[drafter](llava, Oracle.of(ids, stock.sequences))) as handle:
        fast = call()
    assert torch.equal(stock.sequences, fast.sequences) and handle.stats.tokens == 16
    assert stock.past_key_values.get_seq_length() == fast.past_key_values.get_seq_length() == 11 + 15


def chat(model: Any, enabled: bool, padded: bool, drafter: Any) -> list[Any]:
    """Three turns, of which the later ones send their new ids alone, with a mask of the whole."""
    cache, seen, found = T.DynamicCache(), torch.ones(1, 0, dtype=torch.long), []
    for turn in range(3):
        ids = words(7 - turn, seed=turn)
        mask = torch.ones_like(ids)
        mask[0, 0] = int(turn > 0 or not padded)
        mask = torch.cat([seen, mask], 1)
        if enabled:
            mmspec.enable(model, drafter=drafter)
        out = model.generate(input_ids=ids, attention_mask=mask, past_key_values=cache, **PLAIN)
        mmspec.disable(model)
        new = out.shape[1] - ids.shape[1]
        seen = torch.cat([mask, torch.ones(1, new - 1, dtype=torch.long)], 1)  # the last token is not in the cache
        found.append((out.tolist(), int(cache.get_seq_length())))
    return found


@pytest.mark.parametrize("drafter", ["random tree", "ngram", "eagle chain"])
@pytest.mark.parametrize("padded", [False, True])
def test_turns_that_send_the_new_ids_alone(llava: Any, drafter: str, padded: bool) -> None:
    stock = chat(llava, False, padded, None)
    assert chat(llava, True, padded, DRAFTERS[drafter](llava, Oracle({}))) == stock
    assert [length for _, length in stock] == [7 + 15, 7 + 6 + 30, 7 + 6 + 5 + 45]


@pytest.mark.parametrize("drafter", ["random tree", "eagle tree"])
def test_a_prompt_longer_than_a_model_keeps_its_cache_for(drafter: str) -> None:
    """Phi-3 makes its cache anew where the text passes the original length, whatever its rotary embedding."""
    model = text(T.Phi3Config, T.Phi3ForCausalLM, head_dim=None, original_max_position_embeddings=16)
    for count in (10, 20):
        ids = words(count)
        stock = model.generate(ids, **PLAIN)
        with mmspec.enable(model, drafter=DRAFTERS[drafter](model, Oracle.of(ids, stock))):
            assert torch.equal(model.generate(ids, **PLAIN), stock)


@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl"])
def test_prefill_in_pieces_is_said_to_have_no_effect(name: str) -> None:
    model = copy.deepcopy(targets.model(name))
    inputs = targets.prompt(name, "text only")
    stock = targets.generate(model, inputs, prefill_chunk_size=4)
    with mmspec.enable(model), pytest.warns(UserWarning, match="prefill_chunk_size has no effect") as said:
        for _ in range(2):
            assert torch.equal(targets.generate(model, inputs, prefill_chunk_size=4), stock)
    assert len([w for w in said if "prefill_chunk_size" in str(w.message)]) == 1


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("streamer", [False, True])
def test_ids_of_32_bits(llava: Any, do_sample: bool, streamer: bool) -> None:
    ids = words(9, rows=2).int()
    how = {"max_new_tokens": 8, "do_sample": do_sample, "return_dict_in_generate": True}
    stock = llava.generate(ids, **how)
    with mmspec.enable(llava, drafter="ngram"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fast = llava.generate(ids, **how)
    assert fast.sequences.dtype == stock.sequences.dtype == torch.int64
    assert do_sample or torch.equal(fast.sequences, stock.sequences)


# -- caches ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["error", "fallback"])
@pytest.mark.parametrize("kind", [T.DynamicCache, lambda: T.DynamicCache(config=targets.model("llava").config)])
def test_an_empty_cache_of_the_users_for_several_rows(llava: Any, policy: str, kind: Any) -> None:
    inputs, theirs, mine = targets.prompt("llava", "ragged"), kind(), kind()
    stock = targets.generate(llava, inputs, past_key_values=theirs)
    with mmspec.enable(llava, on_unsupported=policy):
        if policy == "error":
            with pytest.raises(UnsupportedError, match="one row only"):
                targets.generate(llava, inputs, past_key_values=mine)
            return
        with pytest.warns(UserWarning, match="one row only"):
            fast = targets.generate(llava, inputs, past_key_values=mine)
    assert torch.equal(stock, fast) and mine.get_seq_length() == theirs.get_seq_length() == stock.shape[1] - 1


def test_several_rows_without_a_cache_say_so(llava: Any) -> None:
    inputs = targets.prompt("llava", "ragged")
    stock = targets.generate(llava, inputs, return_dict_in_generate=True)
    with mmspec.enable(llava) as handle, pytest.warns(UserWarning, match="past_key_values for one row only") as said:
        for _ in range(2):
            fast = targets.generate(llava, inputs, return_dict_in_generate=True)
            assert torch.equal(fast.sequences, stock.sequences) and fast.past_key_values is None
    assert len([w for w in said if "past_key_values" in str(w.message)]) == 1 and handle.stats.tokens > 0


# -- positions -------------------------------------------------------------------------------------------------------


OPT = {"ffn_dim": 96, "word_embed_proj_dim": 64, "intermediate_size": None, "num_key_value_heads": None}
LEARNED = {
    "OPT": lambda: text(T.OPTConfig, T.OPTForCausalLM, **OPT, head_dim=None, max_position_embeddings=32),
    "BioGPT": lambda: text(
        T.BioGptConfig, T.BioGptForCausalLM, head_dim=None, num_key_value_heads=None, max_position_embeddings=32
    ),
}


@pytest.mark.parametrize("drafter", ["random tree", "right within", "always right", "eagle tree"])
@pytest.mark.parametrize("name", LEARNED)
def test_a_text_that_fills_the_table_of_positions(name: str, drafter: str) -> None:
    """Drafts near the last position reach past the table; only what stock reads may fail."""
    model, ids = LEARNED[name](), words(20)
    stock = model.generate(ids, max_new_tokens=13, do_sample=False)  # the last one is not read any more
    with pytest.raises(IndexError):
        model.generate(ids, max_new_tokens=14, do_sample=False)
    made = DRAFTERS[drafter](model, Oracle.of(ids, stock))
    with mmspec.enable(model, drafter=made):
        assert torch.equal(model.generate(ids, max_new_tokens=13, do_sample=False), stock)
        with pytest.raises(IndexError, match="32 learned positions"):
            model.generate(ids, max_new_tokens=14, do_sample=False)
        ended = model.generate(ids, max_new_tokens=40, do_sample=False, eos_token_id=int(stock[0, -1]))
    assert torch.equal(ended, model.generate(ids, max_new_tokens=40, do_sample=False, eos_token_id=int(stock[0, -1])))


@pytest.mark.parametrize("drafter", ["random tree", "right within"])
def test_padded_rows_near_the_end_of_the_table(drafter: str) -> None:
    model, ids = LEARNED["OPT"](), words(20, rows=2)
    mask = torch.ones_like(ids)
    mask[1, :6], ids[1, :6] = 0, 0
    call = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 13, "do_sample": False}
    stock = model.generate(**call)
    with mmspec.enable(model, drafter=DRAFTERS[drafter](model, Oracle.of(ids, stock))):
        assert torch.equal(model.generate(**call), stock)


def longrope() -> dict[str, Any]:
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    return targets.rope(**factors, original_max_position_embeddings=32) | {"rope_type": "longrope"}


def dynamic() -> dict[str, Any]:
    return targets.rope(factor=4.0) | {"rope_type": "dynamic"}


GROWING = {
    "dynamic": lambda: text(
        T.LlamaConfig, T.LlamaForCausalLM, max_position_embeddings=32, rope_parameters=dynamic()
    ),
    "longrope": lambda: text(
        T.Phi3Config,
        T.Phi3ForCausalLM,
        head_dim=None,
        rope_parameters=longrope(),
        original_max_position_embeddings=32,
    ),
}


@pytest.mark.parametrize("drafter", ["random tree", "right within", "always right"])
@pytest.mark.parametrize("name", GROWING)
def test_rotary_frequencies_that_change_with_the_length(name: str, drafter: str) -> None:
    """Up to the trained length a draft does not turn them, however far it reaches; past it stock takes over."""
    model, ids = GROWING[name](), words(20)
    for new in (13, 14, 30):
        stock = model.generate(ids, max_new_tokens=new, do_sample=False)
        made = DRAFTERS[drafter](model, Oracle.of(ids, stock))
        with mmspec.enable(model, drafter=made, on_unsupported="fallback") as handle, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert torch.equal(model.generate(ids, max_new_tokens=new, do_sample=False), stock)
        assert (handle.stats.tokens > 0) == (new == 13)
    with mmspec.enable(model), pytest.raises(UnsupportedError, match="may reach 33"):
        model.generate(ids, max_new_tokens=14, do_sample=False)


def test_rotary_frequencies_of_a_padded_batch() -> None:
    model, ids = GROWING["dynamic"](), words(20, rows=3)
    mask = torch.ones_like(ids)
    mask[1, :6], ids[1, :6] = 0, 0
    call = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 13, "do_sample": False}
    stock = model.generate(**call)
    with mmspec.enable(model, drafter=Scripted(_random)):
        assert torch.equal(model.generate(**call), stock)
