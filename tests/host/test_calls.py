"""Calls that say their prompt, their ids or their cache in another way than usual: as stock answers, or refused."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import tiny_image_models
import tiny_vlms
import torch
import transformers as T
import vlm_classes as zoo
from compared import as_stock, refused_or_stock
from hostile_drafters import DRAFTERS, Oracle, Scripted, _random
from torch import Tensor

import mmspec
from mmspec.pipelines.host.names import CACHE
from mmspec.pipelines.patch import UnsupportedError

PLAIN = {"do_sample": False, "max_new_tokens": 16}


@pytest.fixture
def llava() -> Any:
    """A tiny LLaVA of this test alone."""
    return copy.deepcopy(tiny_vlms.model("llava"))


def words(count: int, seed: int = 3, rows: int = 1) -> Tensor:
    return torch.randint(5, 100, (rows, count), generator=torch.Generator().manual_seed(seed))


# -- what the prefill reads ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", ["random tree", "ngram", "eagle tree"])
@pytest.mark.parametrize("mask", ["ones", "padded"])
def test_soft_prompts_before_the_ids(llava: Any, drafter: str, mask: str) -> None:
    """More embeddings than ids: the cache, the one handed back too, counts what was read, not the ids."""
    ids = words(6)
    soft = torch.randn(1, 5, tiny_vlms.HIDDEN, generator=torch.Generator().manual_seed(1))
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
    assert getattr(stock, CACHE).get_seq_length() == getattr(fast, CACHE).get_seq_length() == 11 + 15


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
        out = model.generate(input_ids=ids, attention_mask=mask, **{CACHE: cache}, **PLAIN)
        mmspec.disable(model)
        new = out.shape[1] - ids.shape[1]
        seen = torch.cat([mask, torch.ones(1, new - 1, dtype=torch.long)], 1)  # the last token is not in the cache
        found.append((out.tolist(), int(cache.get_seq_length())))
    return found


@pytest.mark.parametrize("drafter", ["random tree", "ngram", "eagle chain"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.every(2)
def test_turns_that_send_the_new_ids_alone(llava: Any, drafter: str, padded: bool) -> None:
    stock = chat(llava, False, padded, None)
    assert chat(llava, True, padded, DRAFTERS[drafter](llava, Oracle({}))) == stock
    assert [length for _, length in stock] == [7 + 15, 7 + 6 + 30, 7 + 6 + 5 + 45]


@pytest.mark.parametrize("drafter", ["random tree", "eagle tree"])
def test_a_prompt_longer_than_a_model_keeps_its_cache_for(drafter: str) -> None:
    """Phi-3 makes its cache anew where the text passes the original length, whatever its rotary embedding."""
    model = tiny_vlms.text("Phi3", head_dim=None, original_max_position_embeddings=16)
    for count in (10, 20):
        as_stock(model, {"input_ids": words(count)}, drafter, call=PLAIN)


@pytest.mark.parametrize("drafter", ["ngram", "eagle tree"])
@pytest.mark.parametrize("name", ["attention_mask", "position_ids"])
def test_a_mask_or_positions_of_one_row_for_several(llava: Any, name: str, drafter: str) -> None:
    """Rows that end at different times take theirs with them."""
    one = {"attention_mask": torch.ones(1, 9, dtype=torch.long), "position_ids": torch.arange(3, 12)[None]}
    call = {**PLAIN, "eos_token_id": [*range(3, 40)]}
    as_stock(llava, {"input_ids": words(9, rows=3), name: one[name]}, drafter, call=call)


@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl"])
def test_prefill_in_pieces_is_said_to_have_no_effect(name: str) -> None:
    model, inputs = copy.deepcopy(tiny_vlms.model(name)), tiny_vlms.prompt(name, "text only")
    with pytest.warns(UserWarning, match="prefill_chunk_size has no effect") as said:
        as_stock(model, inputs, call={"prefill_chunk_size": 4}, times=2)
    assert len([w for w in said if "prefill_chunk_size" in str(w.message)]) == 1


@pytest.mark.parametrize("name", ["gemma3", "paligemma"])
def test_pieces_of_what_is_read_in_both_directions_are_stock(name: str) -> None:
    model, inputs = copy.deepcopy(tiny_vlms.model(name)), tiny_vlms.prompt(name, "image first", 2)
    wanted = tiny_vlms.generate(model, inputs, prefill_chunk_size=3)
    assert not torch.equal(tiny_vlms.generate(model, inputs), wanted)
    with mmspec.enable(model), pytest.warns(UserWarning, match="stock path: prefill_chunk_size hides later tokens"):
        assert torch.equal(tiny_vlms.generate(model, inputs, prefill_chunk_size=3), wanted)


@pytest.mark.parametrize("do_sample", [False, True])
def test_ids_of_32_bits(llava: Any, do_sample: bool) -> None:
    ids = words(9, rows=2).int()
    how = {"max_new_tokens": 8, "do_sample": do_sample, "return_dict_in_generate": True}
    stock = llava.generate(ids, **how)
    with mmspec.enable(llava, drafter="ngram"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fast = llava.generate(ids, **how)
    assert fast.sequences.dtype == stock.sequences.dtype == torch.int64
    assert do_sample or torch.equal(fast.sequences, stock.sequences)


# -- caches ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [T.DynamicCache, lambda: T.DynamicCache(config=tiny_vlms.model("llava").config)])
def test_an_empty_cache_of_the_users_for_several_rows(llava: Any, kind: Any) -> None:
    caches: list[Any] = []

    def answer(target: Any, inputs: dict[str, Tensor], **call: Any) -> Tensor:
        caches.append(kind())
        return tiny_vlms.generate(target, inputs, **call, **{CACHE: caches[-1]})

    refused_or_stock(llava, tiny_vlms.prompt("llava", "ragged"), "one row only", draw=answer)
    refused, stock, *fast = (cache.get_seq_length() for cache in caches)
    assert refused == 0 and fast == [stock, stock]


def test_several_rows_without_a_cache_say_so(llava: Any) -> None:
    inputs = tiny_vlms.prompt("llava", "ragged")
    stock = tiny_vlms.generate(llava, inputs, return_dict_in_generate=True)
    with mmspec.enable(llava) as handle, pytest.warns(UserWarning, match="KV cache for one row only") as said:
        for _ in range(2):
            fast = tiny_vlms.generate(llava, inputs, return_dict_in_generate=True)
            assert torch.equal(fast.sequences, stock.sequences) and getattr(fast, CACHE) is None
    assert len([w for w in said if "KV cache" in str(w.message)]) == 1 and handle.stats.tokens > 0


def test_the_cache_of_a_guided_call_is_that_of_the_prompt_alone() -> None:
    """Both streams share a batch and a cache; what comes back has one row, and is as long as stock's."""
    model, full = tiny_image_models.model("emu3"), tiny_image_models.PAINTERS["emu3"].call(1)
    stock = model.generate(**full, return_dict_in_generate=True)
    with mmspec.enable(model, drafter="jacobi", window=5):
        fast = model.generate(**full, return_dict_in_generate=True)
    assert torch.equal(stock.sequences, fast.sequences)
    for mine, theirs in zip(getattr(fast, CACHE).layers, getattr(stock, CACHE).layers, strict=True):
        torch.testing.assert_close(mine.keys, theirs.keys, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_a_cache_that_was_filled_under_autocast(attn: str) -> None:
    """Values are in bfloat16 there and keys in float32; a turn without autocast goes on in float32, as in stock."""
    model, ids = copy.deepcopy(tiny_vlms.model("llava", attn)), words(9)

    def talk() -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model.generate(ids, do_sample=False, max_new_tokens=1, return_dict_in_generate=True)
        turn = torch.cat([out.sequences, words(7, seed=4)], 1)
        return model.generate(turn, **{CACHE: getattr(out, CACHE)}, **PLAIN)

    as_stock(model, {}, Scripted(_random), draw=lambda *_: talk())


# -- positions -------------------------------------------------------------------------------------------------------


OPT = {"ffn_dim": 96, "word_embed_proj_dim": 64, "intermediate_size": None, "num_key_value_heads": None}
LEARNED = {
    "OPT": lambda: tiny_vlms.text("OPT", **OPT, head_dim=None, max_position_embeddings=32),
    "BioGPT": lambda: tiny_vlms.text("BioGpt", head_dim=None, num_key_value_heads=None, max_position_embeddings=32),
}


def padded(count: int, rows: int) -> dict[str, Tensor]:
    """Rows of which the second has less to say."""
    ids = words(count, rows=rows)
    mask = torch.ones_like(ids)
    mask[1, :6], ids[1, :6] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("drafter", ["random tree", "right within", "always right", "eagle tree"])
@pytest.mark.parametrize("name", LEARNED)
def test_a_text_that_fills_the_table_of_positions(name: str, drafter: str) -> None:
    """Drafts near the last position reach past the table; only what stock reads may fail."""
    model, ids, plain = LEARNED[name](), words(20), {"do_sample": False}
    with pytest.raises(IndexError):  # of 13 tokens the last one is not read any more
        model.generate(ids, max_new_tokens=14, **plain)

    def fails(handle: Any) -> None:
        with pytest.raises(IndexError, match="32 learned positions"):
            model.generate(ids, max_new_tokens=14, **plain)

    as_stock(model, {"input_ids": ids}, drafter, call={"max_new_tokens": 13}, begun=fails)
    last = int(model.generate(ids, max_new_tokens=13, **plain)[0, -1])
    as_stock(model, {"input_ids": ids}, drafter, call={"max_new_tokens": 40, "eos_token_id": last})


@pytest.mark.parametrize("drafter", ["random tree", "right within"])
def test_padded_rows_near_the_end_of_the_table(drafter: str) -> None:
    as_stock(LEARNED["OPT"](), padded(20, 2), drafter, call={"max_new_tokens": 13})


DYNAMIC = tiny_vlms.rope("dynamic", factor=4.0)
TRAINED = {"original_max_position_embeddings": 32}
LONGROPE = tiny_vlms.rope("longrope", short_factor=[1.0] * 8, long_factor=[4.0] * 8, **TRAINED)
GROWING = {
    "dynamic": lambda: tiny_vlms.text("Llama", max_position_embeddings=32, rope_parameters=DYNAMIC),
    "longrope": lambda: tiny_vlms.text("Phi3", head_dim=None, rope_parameters=LONGROPE, **TRAINED),
}


@pytest.mark.parametrize("drafter", ["random tree", "right within", "always right"])
@pytest.mark.parametrize("name", GROWING)
def test_rotary_frequencies_that_change_with_the_length(name: str, drafter: str) -> None:
    """Up to the trained length a draft does not turn them, however far it reaches; past it stock takes over."""
    model, ids = GROWING[name](), words(20)
    for new in (13, 14, 30):
        told = {"call": {"max_new_tokens": new}, "on_unsupported": "fallback"}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            handle = as_stock(model, {"input_ids": ids}, drafter, **told)
        assert (handle.stats.tokens > 0) == (new == 13)
    with mmspec.enable(model), pytest.raises(UnsupportedError, match="may reach 33"):
        model.generate(ids, max_new_tokens=14, do_sample=False)
    with mmspec.enable(model, on_unsupported="fallback"), pytest.warns(UserWarning, match="may reach") as told:
        for new in (14, 15, 16):
            model.generate(ids, max_new_tokens=new, do_sample=False)
    assert len(told) == 1, "once, though each call would reach another position"


def test_rotary_frequencies_of_a_padded_batch() -> None:
    as_stock(GROWING["dynamic"](), padded(20, 3), Scripted(_random), call={"max_new_tokens": 13})


@pytest.mark.parametrize("drafter", ["random tree", "eagle tree"])
@pytest.mark.parametrize("name", ["exaone4_5", "hyperclovax_vision_v2"])
def test_padded_rows_of_models_that_drop_positions(name: str, drafter: str) -> None:
    """Models whose `prepare_inputs_for_generation` drops them; they then count slots, padding included."""
    model, ids = zoo.model(name), words(14, rows=3)
    mask = torch.ones_like(ids)
    mask[1, :5], mask[2, :9] = 0, 0
    as_stock(model, {"input_ids": ids * mask, "attention_mask": mask}, drafter, call=PLAIN)
    cache, theirs = T.DynamicCache(), T.DynamicCache()
    with mmspec.enable(model, drafter=DRAFTERS[drafter](model, Oracle({}))):
        first = model.generate(ids[:1], **{CACHE: cache}, **PLAIN)
    again = {"input_ids": torch.cat([first, ids[1:2, :4]], 1), **PLAIN}
    model.generate(ids[:1], **{CACHE: theirs}, **PLAIN)
    stock = model.generate(**again, **{CACHE: theirs})
    with mmspec.enable(model, drafter=DRAFTERS[drafter](model, Oracle.of(again["input_ids"], stock))):
        assert torch.equal(model.generate(**again, **{CACHE: cache}), stock)


# -- what is refused, or told ----------------------------------------------------------------------------------------


def test_a_model_that_is_its_own_assistant() -> None:
    model, call = tiny_vlms.text(), {"assistant_early_exit": 1, **PLAIN}
    with mmspec.enable(model), pytest.raises(UnsupportedError, match="assisted decoding"):
        model.generate(words(9), **call)
    with pytest.warns(UserWarning, match="assisted decoding"):
        as_stock(model, {"input_ids": words(9)}, call=call, on_unsupported="fallback")


def plain_loop(
    model: Any, input_ids: Tensor, logits_processor: Any, stopping_criteria: Any, generation_config: Any, **kwargs: Any
) -> Tensor:
    """A loop of the user's own."""
    out = model._prefill(input_ids, generation_config, kwargs)
    for _ in range(6):
        kwargs = model._update_model_kwargs_for_generation(out, kwargs)
        input_ids = torch.cat([input_ids, out.logits[:, -1].argmax(-1)[:, None]], 1)
        out = model(**model.prepare_inputs_for_generation(input_ids, next_sequence_length=1, **kwargs))
    return input_ids


def sample_then_look(model: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Goes on from the cache that `_sample` has filled."""
    tokens = model._sample(*args, **kwargs)
    logits = model(tokens[:, -1:], **{CACHE: kwargs[CACHE]}).logits
    return torch.cat([tokens, logits[:, -1].argmax(-1)[:, None]], 1)


def test_custom_generate(llava: Any) -> None:
    call = {"input_ids": words(9), **PLAIN}
    for custom, told in ((plain_loop, "custom_generate"), (sample_then_look, None)):
        stock = llava.generate(**call, custom_generate=custom)
        with mmspec.enable(llava) as handle, warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            assert torch.equal(llava.generate(**call, custom_generate=custom), stock)
        assert [told in str(w.message) for w in said if "mmspec" in str(w.message)] == [True] * (told is not None)
        assert (handle.stats.tokens > 0) == (told is None)


def ask_again(model: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Makes calls of its own, with caches of their own."""
    return model.generate(input_ids.repeat(2, 1), **PLAIN)


def test_custom_generate_that_calls_generate(llava: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        handle = as_stock(llava, {"input_ids": words(9)}, call={**PLAIN, "custom_generate": ask_again})
    assert handle.stats.tokens == 32


def test_custom_generate_over_several_rows(llava: Any) -> None:
    refused_or_stock(llava, {"input_ids": words(9, rows=2)}, "one row only", **PLAIN, custom_generate=sample_then_look)


# -- what has no effect, or is not accelerated -------------------------------------------------------------------------


def test_outputs_that_stock_leaves_out_are_left_out(llava: Any) -> None:
    call = {"max_new_tokens": 6, "output_hidden_states": True}
    assert as_stock(llava, tiny_vlms.prompt("llava", "text only"), "ngram", call=call).stats.rounds


def test_bad_words_that_are_all_ends_of_sequence(llava: Any) -> None:
    """Stock takes them off the list, and keeps a processor without any."""
    call = {**PLAIN, "bad_words_ids": [[7]], "eos_token_id": 7, "repetition_penalty": 1.3}
    as_stock(llava, {"input_ids": words(9)}, call=call)


def test_arguments_without_their_names(llava: Any) -> None:
    """A configuration in the second place may ask for drafts as one that is named does; one argument twice is none."""
    ids, config = words(9), T.GenerationConfig(**PLAIN, prompt_lookup_num_tokens=3)
    stock = llava.generate(ids, config)
    with mmspec.enable(llava) as handle:
        assert torch.equal(llava.generate(ids, config), stock) and handle.stats.rounds
        with pytest.raises(TypeError, match="multiple values"):
            llava.generate(ids, config, generation_config=config)


def test_numbers_that_are_no_ids(llava: Any) -> None:
    with mmspec.enable(llava), pytest.raises(RuntimeError, match="FloatTensor"):
        llava.generate(words(9).float(), **PLAIN)


@pytest.mark.parametrize("shape", [(1, 0), (0, 4)])
def test_prompts_without_tokens(llava: Any, shape: tuple[int, int]) -> None:
    with mmspec.enable(llava), pytest.raises(mmspec.UnsupportedError, match="input_ids is empty"):
        llava.generate(torch.zeros(shape, dtype=torch.long), max_new_tokens=2)


def test_stocks_continuous_batches_are_said_not_to_be_accelerated(llava: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(llava), "init_continuous_batching", lambda self: self)
    with mmspec.enable(llava), pytest.warns(UserWarning, match="does not accelerate generate_batch") as said:
        assert llava.init_continuous_batching() is llava.init_continuous_batching() is llava
    assert len(said) == 1
