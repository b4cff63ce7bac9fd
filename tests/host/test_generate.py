"""`generate` as users call it: everything that stock generate takes and gives still works, and has the same
distribution."""

from __future__ import annotations

import contextlib
import copy
import io
import math
import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tiny_llava
import tiny_vlms
import torch
import transformers as T
from compared import as_stock, refused_or_stock
from hostile_drafters import DRAFTERS, Oracle, Scripted, _random, eagle
from table_targets import chi_square
from tokenizers import Tokenizer, decoders, models
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer
from transformers.generation.streamers import BaseStreamer

import mmspec
from mmspec.drafters.plain import Plain
from mmspec.pipelines.host.names import CACHE
from mmspec.pipelines.patch import UnsupportedError
from mmspec.registry import OF_TEXT
from mmspec.types import Categorical, Draft

VOCAB = tiny_vlms.VOCAB


@pytest.fixture
def llava() -> Iterator[Any]:
    """A tiny LLaVA, given back as stock."""
    model = tiny_vlms.model("llava")
    yield model
    mmspec.disable(model)
    assert type(model) is T.LlavaForConditionalGeneration


def prompt(kind: str = "image first", name: str = "llava", **more: Any) -> dict[str, Tensor]:
    return tiny_vlms.prompt(name, kind, **more)


def stock_and_fast(
    model: Any, inputs: dict[str, Tensor], drafter: str = "right within", **options: Any
) -> tuple[Any, Any]:
    """What stock `generate` returns, and what the same call returns once the model is enabled."""
    stock = tiny_vlms.generate(model, inputs, **options)
    oracle = Oracle.of(inputs["input_ids"], getattr(stock, "sequences", stock))
    with mmspec.enable(model, drafter=DRAFTERS[drafter](model, oracle)) as handle:
        fast = tiny_vlms.generate(model, inputs, **options)
        assert handle.stats.tokens > 0, "the call was not accelerated"
    return stock, fast


# -- sampling: the distribution --------------------------------------------------------------------------------------

SAMPLING: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7, "top_k": 0},
    "hot": {"temperature": 1.2, "top_k": 0},
    "top-k": {"top_k": 5, "temperature": 1.5},
    "top-p": {"top_p": 0.7, "top_k": 0},
    "min-p": {"min_p": 0.15, "top_k": 0},
    "top-k, top-p, penalty": {"top_k": 20, "top_p": 0.9, "temperature": 1.4, "repetition_penalty": 1.5},
}
SAMPLES = 2000
# standard deviations of χ²: a true distribution passes with certainty for these fixed seeds, a false one does not
EXCESS = 5.0


def joint_law(model: Any, inputs: dict[str, Tensor], **options: Any) -> Tensor:
    """The distribution of the first two tokens, [V, V], from stock scores after every possible first token."""
    told = dict(do_sample=True, max_new_tokens=1, return_dict_in_generate=True, output_scores=True, **options)
    first = model.generate(**inputs, **told).scores[0][0].double().softmax(-1)
    possible = first.nonzero()[:, 0]
    n = len(possible)
    longer = {k: v.repeat(n, *[1] * (v.dim() - 1)) for k, v in inputs.items()}
    longer["input_ids"] = torch.cat([longer["input_ids"], possible[:, None]], 1)
    longer["attention_mask"] = torch.ones_like(longer["input_ids"])
    second = model.generate(**longer, **told).scores[0].double().softmax(-1)
    distribution = torch.zeros(VOCAB, VOCAB, dtype=torch.float64)
    distribution[possible] = first[possible, None] * second
    return distribution


def shares(marginal: Tensor, count: int = 8) -> Tensor:
    """Tokens in `count` groups of about the same probability."""
    return ((marginal.cumsum(0) - marginal / 2) * count).long().clamp(max=count - 1)


def excess(samples: Tensor, distribution: Tensor) -> float:
    """By how many standard deviations χ² is too large, by pairs, by first and second token, and by groups of both."""
    assert float(distribution[samples[:, 0], samples[:, 1]].min()) > 0, "something impossible was drawn"
    one, two = torch.arange(VOCAB)[:, None].expand(-1, VOCAB), torch.arange(VOCAB).expand(VOCAB, -1)
    first, second = shares(distribution.sum(1))[one], shares(distribution.sum(0))[two]
    found = []
    for view in (one * VOCAB + two, one, two, first * 8 + second):  # [V, V]: each pair's cell
        counts = torch.bincount(view[samples[:, 0], samples[:, 1]], minlength=int(view.max()) + 1)
        expected = torch.bincount(view.flatten(), distribution.flatten()) * len(samples)
        found.append(chi_square(counts, expected, least=10))
    return max(found)


def sampled(model: Any, inputs: dict[str, Tensor], drafter: Any, **options: Any) -> Tensor:
    """[SAMPLES, 2]; three tokens are decoded, so that the second may come out of a draft or out of what it left."""
    start = inputs["input_ids"].shape[1]
    many = dict(do_sample=True, num_return_sequences=SAMPLES, max_new_tokens=3, **options)
    torch.manual_seed(1)
    with mmspec.enable(model, drafter=drafter):
        return model.generate(**inputs, **many)[:, start : start + 2]


@pytest.mark.parametrize("drafter", ["ngram", "random tree", "right within", "drawn", "eagle tree"])
@pytest.mark.parametrize("how", SAMPLING)
@pytest.mark.every(24)
def test_sampling_has_the_stock_law(llava: Any, how: str, drafter: str) -> None:
    inputs, options = prompt("text only"), SAMPLING[how]
    oracle = Oracle.of(
        inputs["input_ids"], tiny_vlms.generate(llava, inputs, repetition_penalty=options.get("repetition_penalty"))
    )
    samples = sampled(llava, inputs, DRAFTERS[drafter](llava, oracle), **options)
    assert excess(samples, joint_law(llava, inputs, **options)) < EXCESS


def test_a_planted_error_in_the_law_is_seen(llava: Any) -> None:
    """A drafter that says it drew from another distribution than it did: the output's distribution bends, and the test
    above sees it."""

    class Liar(Scripted):
        def draft(self, tokens: Tensor, tree: Any) -> Draft:
            return Draft(tokens, tree, Categorical(torch.zeros(*tokens.shape, VOCAB)))  # "drawn uniformly"

    inputs, options = prompt("text only"), SAMPLING["hot"]
    samples = sampled(llava, inputs, Liar(lambda row, g: ([7, 7], [0, 1])), **options)
    assert excess(samples, joint_law(llava, inputs, **options)) > 2 * EXCESS


def test_set_seed_reproduces_a_sample_and_another_seed_does_not(llava: Any) -> None:
    with mmspec.enable(llava):
        out = []
        for seed in (1, 1, 2):
            T.set_seed(seed)
            out.append(tiny_vlms.generate(llava, prompt("ragged"), do_sample=True, num_return_sequences=2))
    assert torch.equal(out[0], out[1]) and not torch.equal(out[0], out[2])
    assert out[0].shape[0] == 8 and len({tuple(row) for row in out[0].tolist()}) == 8


@contextlib.contextmanager
def overflowing(model: Any, value: float, after: int) -> Iterator[None]:
    """A head whose numbers are no longer numbers from some forward on, as float16 may have them."""
    left = [after]

    def spoil(head: Any, inputs: Any, logits: Tensor) -> Tensor | None:
        left[0] -= 1
        return None if left[0] >= 0 else logits.index_fill(-1, torch.tensor([5]), value)

    hook = model.get_output_embeddings().register_forward_hook(spoil)
    yield
    hook.remove()


@pytest.mark.parametrize("drafter", ["ngram", "right within", "random tree", "drawn", "eagle tree"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.every(4)
def test_logits_that_are_no_law_raise_as_in_stock(llava: Any, value: float, drafter: str) -> None:
    inputs = prompt("ragged")
    oracle = Oracle.of(inputs["input_ids"], tiny_vlms.generate(llava, inputs))
    for after, how in ((0, {}), (3, {}), (1, {"reproducible": True})):
        with overflowing(llava, value, after), pytest.raises(RuntimeError, match="inf"):
            tiny_vlms.generate(llava, inputs, do_sample=True)
        with (
            mmspec.enable(llava, drafter=DRAFTERS[drafter](llava, oracle), **how),
            overflowing(llava, value, after),
            pytest.raises(RuntimeError, match="logits hold nan or inf"),
        ):
            tiny_vlms.generate(llava, inputs, do_sample=True)
    with overflowing(llava, value, 0):
        as_stock(llava, inputs, "right within")  # stock takes the likeliest of them all the same


# -- processors that read history ------------------------------------------------------------------------------------

HISTORY: dict[str, dict[str, Any]] = {
    "repetition penalty": {"repetition_penalty": 1.4},
    "no repeated n-gram": {"no_repeat_ngram_size": 1},
    "min length": {"min_length": 30, "eos_token_id": list(range(5, 60))},
    "min new tokens": {"min_new_tokens": 11, "eos_token_id": list(range(5, 60))},
    "forced EOS": {"forced_eos_token_id": 77, "eos_token_id": 77},
    "suppressed tokens": {"suppress_tokens": list(range(20, 70))},
    "suppressed at the beginning": {"begin_suppress_tokens": list(range(3, 100))},
    "bad words": {
        "bad_words_ids": [[i] for i in range(10, 50)] + [[i, j] for i in range(50, 90) for j in (60, 70, 95)]
    },
    "sequence bias": {"sequence_bias": [[[i], 3.0] for i in range(30, 40)] + [[[i, 99], 9.0] for i in range(30, 60)]},
    "decaying length": {"exponential_decay_length_penalty": (4, 1.6), "eos_token_id": 2},
    "renormalised": {"renormalize_logits": True, "repetition_penalty": 0.8},
    "many at once": {
        "repetition_penalty": 1.2,
        "no_repeat_ngram_size": 2,
        "min_new_tokens": 6,
        "eos_token_id": [7, 8, 9, 10],
    },
}


@pytest.mark.parametrize("drafter", ["ngram", "right within", "holes", "random tree"])
@pytest.mark.parametrize("how", HISTORY)
@pytest.mark.every(12)
def test_processors_see_every_node_with_its_own_prefix(llava: Any, how: str, drafter: str) -> None:
    stock, fast = stock_and_fast(llava, prompt("ragged"), drafter, **HISTORY[how])
    assert torch.equal(stock, fast)
    free = tiny_vlms.generate(llava, prompt("ragged"), eos_token_id=HISTORY[how].get("eos_token_id"))
    assert not torch.equal(stock, free), "the processor has something to do"


@pytest.mark.parametrize("how", ["repetition penalty", "many at once"])
def test_processors_on_positions_with_three_axes(how: str) -> None:
    inputs = prompt("ragged video", "qwen2_5_vl")
    as_stock(tiny_vlms.model("qwen2_5_vl"), inputs, "right within", call=HISTORY[how])


class Counting(T.LogitsProcessor):
    """Keeps a count of its own calls, as a grammar keeps its place: rejected drafts would disturb it."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        return scores.index_fill(1, torch.tensor([(self.calls * 7 + i) % VOCAB for i in range(60)]), -math.inf)


@pytest.mark.parametrize("policy", ["error", "fallback"])
def test_an_unknown_processor_runs_the_stock_path_with_a_warning(llava: Any, policy: str) -> None:
    def draw(*told: Any) -> Tensor:
        return tiny_vlms.generate(*told, logits_processor=T.LogitsProcessorList([Counting()]))

    with pytest.warns(UserWarning, match="Counting"):
        as_stock(llava, prompt(), draw=draw, on_unsupported=policy)


class Clerk:
    """A grammar that counts its calls: what is lawful depends on how often it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, list[int]]] = []

    def __call__(self, row: int, ids: Tensor) -> list[int]:
        self.asked.append((row, ids.tolist()))
        return [(7 * len(self.asked) + i) % VOCAB for i in range(60)]


def spelling(row: int, ids: Tensor) -> list[int]:
    """Answers by its arguments alone, and another thing for every row."""
    return [i for i in range(3, VOCAB) if (i + int(ids[-1]) + row) % 3]


@pytest.mark.parametrize("kind", ["image first", "ragged"])
def test_a_grammar_with_a_memory_is_asked_what_stock_asks(llava: Any, kind: str) -> None:
    clerks = [Clerk(), Clerk()]
    stock = tiny_vlms.generate(llava, prompt(kind), prefix_allowed_tokens_fn=clerks[0])
    with mmspec.enable(llava), pytest.warns(UserWarning, match="prefix_allowed_tokens_fn.mmspec_pure = True"):
        fast = tiny_vlms.generate(llava, prompt(kind), prefix_allowed_tokens_fn=clerks[1])
    assert torch.equal(stock, fast) and clerks[0].asked == clerks[1].asked


@pytest.mark.parametrize("drafter", ["ngram", "right within", "holes", "random tree"])
@pytest.mark.every(2)
def test_a_grammar_that_says_it_has_none_is_asked_about_drafts(
    llava: Any, drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spelling, "mmspec_pure", True, raising=False)
    for more in ({}, {"repetition_penalty": 1.3}):
        as_stock(llava, prompt("ragged"), drafter, call={"prefix_allowed_tokens_fn": spelling, **more})


# -- where a text ends -----------------------------------------------------------------------------------------------


def letters() -> T.PreTrainedTokenizerFast:
    """One character for every id: a byte-level vocabulary without merges."""
    characters = {(chr(i) if 33 <= i < 127 else chr(0x100 + i)): i for i in range(3, VOCAB)}
    vocab = {"<pad>": 0, "<s>": 1, "</s>": 2, **characters}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.decoder = decoders.Fuse()
    return T.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


@pytest.mark.parametrize("where", [0, 1, 4, 9])
@pytest.mark.parametrize("drafter", ["ngram", "always right", "right within"])
@pytest.mark.every(2)
def test_stop_strings(llava: Any, drafter: str, where: int) -> None:
    """A string of two tokens, found inside drafts; of four rows each ends at its own place."""
    tokenizer, inputs = letters(), prompt("ragged")
    full = tiny_vlms.generate(llava, inputs)[:, inputs["input_ids"].shape[1] :]
    strings = [tokenizer.decode(row[where : where + 2]) for row in full[:3]]
    options = {"stop_strings": strings, "tokenizer": tokenizer, "eos_token_id": 2}
    stock, fast = stock_and_fast(llava, inputs, drafter, **options)
    assert torch.equal(stock, fast) and bool((stock[:, -1] == 0).any())


def test_stop_strings_without_an_end_of_sequence(llava: Any) -> None:
    """Where no end-of-sequence token is set, stock decoding goes on with the rows that have stopped until all have."""
    tokenizer, inputs = letters(), prompt("ragged")
    full = tiny_vlms.generate(llava, inputs)[:, inputs["input_ids"].shape[1] :]
    for string in (tokenizer.decode(full[0, 3:5]), ""):
        as_stock(llava, inputs, "right within", call={"stop_strings": [string], "tokenizer": tokenizer})


@pytest.mark.parametrize("drafter", ["always right", "right within", "ngram"])
def test_end_of_sequence_inside_a_draft_with_pads(llava: Any, drafter: str) -> None:
    inputs = prompt("ragged")
    full = tiny_vlms.generate(llava, inputs)[:, inputs["input_ids"].shape[1] :]
    for ids in ([int(full[0, 3])], [int(full[1, 6]), int(full[2, 1])], full[:, 5].tolist()):
        as_stock(llava, inputs, drafter, call={"eos_token_id": ids, "pad_token_id": 4})


class Odd(T.StoppingCriteria):
    """Keeps what it was asked about, and what it was given as scores."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[int], Any]] = []

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        self.asked.append((input_ids[0].tolist(), scores))
        return (input_ids[:, -1] % 8 == 3) & (input_ids.shape[1] > 20)


class FirstRow(Odd):
    """Ends all rows by what stands in the first, as the `StopOnTokens` of many model cards does."""

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Any:
        return bool(super().__call__(input_ids, scores)[0])


class EveryRow(Odd):
    """Ends once all rows have stopped, as LLaVA's `KeywordsStoppingCriteria` does."""

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Any:
        return all(super().__call__(input_ids, scores).tolist())


class Sure(Odd):
    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Any:
        return len(scores) > 5 and bool(scores[-1].softmax(-1).amax() > 0)


CRITERIA = (Odd, FirstRow, EveryRow)


@pytest.mark.parametrize("drafter", ["right within", "always right", "random tree"])
@pytest.mark.parametrize("kind", CRITERIA)
@pytest.mark.every(2)
def test_a_condition_of_the_users_own_hears_what_stock_tells_it(llava: Any, kind: type[Odd], drafter: str) -> None:
    told = []
    for options in ({"eos_token_id": 2}, {}):
        criteria = [kind(), kind()]
        inputs = prompt()
        stock = tiny_vlms.generate(llava, inputs, stopping_criteria=T.StoppingCriteriaList(criteria[:1]), **options)
        with mmspec.enable(llava, drafter=DRAFTERS[drafter](llava, Oracle.of(inputs["input_ids"], stock))) as handle:
            fast = tiny_vlms.generate(llava, inputs, stopping_criteria=T.StoppingCriteriaList(criteria[1:]), **options)
            assert handle.stats.tokens > 0
        assert torch.equal(stock, fast) and criteria[0].asked == criteria[1].asked
        told.append(len(criteria[0].asked))
    assert min(told) > 2


@pytest.mark.parametrize("eos", [2, None])
@pytest.mark.parametrize("kind", CRITERIA)
def test_a_condition_on_several_rows_runs_the_stock_path_with_a_warning(llava: Any, kind: Any, eos: Any) -> None:
    """It may look at all rows at once, all of one length, which only stock decoding has."""
    call = {"eos_token_id": eos, "stopping_criteria": [kind()]}
    with pytest.warns(UserWarning, match=f"{kind.__name__} may read all 4 rows"):
        as_stock(llava, prompt("ragged"), call=call)


def test_a_condition_on_scores_gets_those_of_stock(llava: Any) -> None:
    told = {"return_dict_in_generate": True, "output_scores": True}
    stock = tiny_vlms.generate(llava, prompt(), stopping_criteria=[Sure()], **told)
    with mmspec.enable(llava), pytest.warns(UserWarning, match="Sure may read the scores"):
        fast = tiny_vlms.generate(llava, prompt(), stopping_criteria=[Sure()], **told)
    assert torch.equal(stock.sequences, fast.sequences) and len(stock.scores) == 6
    with mmspec.enable(llava), pytest.raises(TypeError):  # as in stock, which has collected none
        tiny_vlms.generate(llava, prompt(), stopping_criteria=[Sure()])


def test_max_time_ends_the_call(llava: Any) -> None:
    full, start = tiny_vlms.generate(llava, prompt()), prompt()["input_ids"].shape[1]
    with mmspec.enable(llava):
        at_once = tiny_vlms.generate(llava, prompt(), max_time=1e-9)
        in_time = tiny_vlms.generate(llava, prompt(), max_time=1000.0)
    assert at_once.shape[1] == start + 1 and torch.equal(at_once, full[:, : start + 1])
    assert torch.equal(in_time, full)


# -- what comes back -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["image first", "ragged"])
@pytest.mark.parametrize("drafter", ["right within", "always right", *OF_TEXT])
def test_scores_and_logits_come_back_as_stock_gives_them(llava: Any, drafter: str, kind: str) -> None:
    eos = int(tiny_vlms.generate(llava, prompt(kind))[-1, -10])
    told = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "repetition_penalty": 1.2}
    stock, fast = stock_and_fast(llava, prompt(kind), drafter, eos_token_id=eos, **told)
    assert type(stock) is type(fast) and torch.equal(stock.sequences, fast.sequences)
    start = prompt(kind)["input_ids"].shape[1]
    for name in ("scores", "logits"):
        mine, theirs = getattr(fast, name), getattr(stock, name)
        assert isinstance(mine, tuple) and len(mine) == len(theirs) == stock.sequences.shape[1] - start
        for step, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            assert a.dtype == b.dtype == torch.float32 and a.shape == b.shape
            live = (stock.sequences[:, start : start + step] != eos).all(1)
            torch.testing.assert_close(a[live], b[live], rtol=1e-4, atol=1e-4)
    probabilities = [m.compute_transition_scores(o.sequences, o.scores)[0] for m, o in ((llava, stock), (llava, fast))]
    if kind == "image first":
        torch.testing.assert_close(*probabilities, rtol=1e-4, atol=1e-4)


def test_a_dictionary_without_scores(llava: Any) -> None:
    stock, fast = stock_and_fast(llava, prompt(), return_dict_in_generate=True)
    assert torch.equal(stock.sequences, fast.sequences) and fast.scores is None and fast.logits is None
    assert getattr(fast, CACHE).get_seq_length() == getattr(stock, CACHE).get_seq_length()
    for mine, theirs in zip(getattr(fast, CACHE).layers, getattr(stock, CACHE).layers, strict=True):
        torch.testing.assert_close(mine.keys, theirs.keys, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(mine.values, theirs.values, rtol=1e-4, atol=1e-4)


class Columns(BaseStreamer):
    """Records what is put."""

    def __init__(self) -> None:
        self.put_: list[list[int]] = []
        self.ended = 0

    def put(self, value: Tensor) -> None:
        assert not self.ended and value.device.type == "cpu"
        self.put_.append(value.tolist())

    def end(self) -> None:
        self.ended += 1


def streamed_as_stock(model: Any, inputs: dict[str, Tensor], drafter: str, **options: Any) -> Tensor:
    """Asserts that a streamer is given the same columns; the answer."""
    mine, theirs = Columns(), Columns()
    stock = tiny_vlms.generate(model, inputs, streamer=theirs, **options)
    with mmspec.enable(model, drafter=DRAFTERS[drafter](model, Oracle.of(inputs["input_ids"], stock))):
        assert torch.equal(tiny_vlms.generate(model, inputs, streamer=mine, **options), stock)
    assert mine.put_ == theirs.put_ and mine.ended == theirs.ended == 1
    return stock


@pytest.mark.parametrize("kind", ["image first", "ragged"])
@pytest.mark.parametrize("drafter", ["ngram", "always right", "right within"])
def test_streamers_get_the_same_columns(llava: Any, drafter: str, kind: str) -> None:
    eos = int(tiny_vlms.generate(llava, prompt(kind))[-1, -9])
    streamed_as_stock(llava, prompt(kind), drafter, eos_token_id=eos)


def test_streamers_get_no_column_after_the_common_end(llava: Any) -> None:
    """Without an end-of-sequence token all rows go on until the last one has met a stop string."""
    tokenizer, full = letters(), tiny_vlms.generate(llava, prompt("ragged"))
    answers = full[:, prompt("ragged")["input_ids"].shape[1] :]
    strings = [tokenizer.decode(row[at : at + 2]) for row, at in zip(answers, (3, 5, 2, 4), strict=True)]
    stock = streamed_as_stock(llava, prompt("ragged"), "always right", stop_strings=strings, tokenizer=tokenizer)
    assert stock.shape[1] < full.shape[1]


def test_the_first_token_does_not_wait_for_the_drafter(llava: Any) -> None:
    """And with one token there is nothing to draft, so the drafter does not read the prompt."""
    seen: list[int] = []
    columns = Columns()

    class Late(Plain):
        def start(self, *_: object) -> None:
            seen.append(len(columns.put_))

    with mmspec.enable(llava, drafter=Late()):
        tiny_vlms.generate(llava, prompt(), streamer=columns)
        tiny_vlms.generate(llava, prompt(), max_new_tokens=1)
    assert seen == [2]  # the prompt, and the first token


def test_text_iterator_streamer_in_a_thread(llava: Any) -> None:
    tokenizer, inputs = letters(), prompt()
    full = tiny_vlms.generate(llava, inputs)
    oracle = Oracle.of(inputs["input_ids"], full)
    with mmspec.enable(llava, drafter=DRAFTERS["right within"](llava, oracle)):
        streamer = T.TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=300)
        thread = threading.Thread(target=tiny_vlms.generate, args=(llava, inputs), kwargs={"streamer": streamer})
        thread.start()
        text = "".join(streamer)
        thread.join()
    assert text == tokenizer.decode(full[0, inputs["input_ids"].shape[1] :])


# -- caches ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl", "gemma3"])
@pytest.mark.parametrize("how", ["static", "dynamic"])
def test_cache_implementation(name: str, how: str) -> None:
    as_stock(tiny_vlms.model(name), prompt("ragged", name), "right within", call={"cache_implementation": how})


CACHES = {
    "dynamic": lambda model: T.DynamicCache(),
    "dynamic with config": lambda model: T.DynamicCache(config=model.config),
    "static": lambda model: T.StaticCache(config=model.config, max_cache_len=160),
}


def second_turn(sequences: Tensor, name: str) -> dict[str, Tensor]:
    """The whole conversation so far and a new question, as a chat sends it; the pictures are in the cache."""
    ids = torch.cat([sequences, torch.tensor([[11, 12, 13, 14]])], 1)
    types = tiny_vlms.FAMILIES[name].types
    text = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return {**text, types: torch.zeros_like(ids)} if types else text


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("turns", ["both", "only the first", "only the second"])
@pytest.mark.every(2)
def test_a_cache_of_the_users_over_two_turns(llava: Any, kind: str, turns: str) -> None:
    """The first turn fills the user's cache, the second goes on from it; either may run enabled or stock."""

    def conversation(first: bool, second: bool) -> tuple[Tensor, Tensor, int]:
        cache, out = CACHES[kind](llava), []
        for enabled, ask in ((first, lambda: prompt()), (second, lambda: second_turn(out[0], "llava"))):
            if enabled:
                mmspec.enable(llava, drafter=Scripted(_random))
            out.append(tiny_vlms.generate(llava, ask(), **{CACHE: cache}))
            mmspec.disable(llava)
        return (*out, int(cache.get_seq_length()))

    stock = conversation(False, False)
    fast = conversation(turns != "only the second", turns != "only the first")
    assert torch.equal(stock[0], fast[0]), "first turn"
    assert torch.equal(stock[1], fast[1]), "second turn"
    assert stock[2] == fast[2], "length of the user's cache"


def test_the_users_cache_object_comes_back(llava: Any) -> None:
    cache = T.DynamicCache(config=llava.config)
    with mmspec.enable(llava):
        out = tiny_vlms.generate(llava, prompt(), **{CACHE: cache}, return_dict_in_generate=True)
    assert getattr(out, CACHE) is cache and cache.get_seq_length() == out.sequences.shape[1] - 1


class Halved(DynamicLayer):
    """A layer that compresses what it is given, as methods for long texts do."""

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return super().update(keys, values / 2, *args, **kwargs)


class HalvedCache(T.DynamicCache):
    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return super().update(keys, values / 2, *args, **kwargs)


@pytest.mark.parametrize("kind", [HalvedCache, lambda: Cache(layer_class_to_replicate=Halved)])
def test_a_cache_of_the_users_own_class(llava: Any, kind: Callable[[], Any]) -> None:
    def answer(target: Any, inputs: dict[str, Tensor], **call: Any) -> Tensor:
        return tiny_vlms.generate(target, inputs, **call, **{CACHE: kind()})

    refused_or_stock(llava, prompt(), "plain classes", draw=answer)


def test_a_filled_cache_with_sliding_windows() -> None:
    """Its layers have dropped what no later token sees."""
    model = tiny_vlms.model("gemma3")
    filled = T.DynamicCache(config=model.config)
    first = tiny_vlms.generate(model, prompt(name="gemma3"), **{CACHE: filled})

    def answer(target: Any, inputs: dict[str, Tensor], **call: Any) -> Tensor:
        return tiny_vlms.generate(target, inputs, **call, **{CACHE: copy.deepcopy(filled)})

    as_stock(model, second_turn(first, "gemma3"), draw=answer)


# -- on and off ------------------------------------------------------------------------------------------------------


def anatomy(model: Any) -> dict[str, Any]:
    """Types of all modules, and the names of everything that lies on them."""
    return {name: (type(part), sorted(vars(part))) for name, part in model.named_modules()}


@pytest.mark.parametrize("name", ["llava", "gemma3", "qwen3_5", "lfm2_vl"])
@pytest.mark.parametrize("drafter", ["ngram", "eagle tree", "eagle-3"])
@pytest.mark.every(3)
def test_disable_leaves_no_trace(name: str, drafter: str) -> None:
    model = tiny_vlms.model(name)
    tiny_vlms.generate(model, prompt(name=name))
    before, state = anatomy(model), {k: v.clone() for k, v in model.state_dict().items()}
    handle = mmspec.enable(model, drafter=DRAFTERS[drafter](model, Oracle({})))
    assert type(model) is not before[""][0] and isinstance(model, before[""][0])
    assert vars(model).keys() == set(before[""][1]), "nothing is written on the instance"
    assert type(model).__name__ == before[""][0].__name__ and repr(model) and "mmspec" in repr(handle)
    tiny_vlms.generate(model, prompt(name=name))
    handle.disable()
    assert anatomy(model) == before
    assert all(torch.equal(v, model.state_dict()[k]) for k, v in state.items())
    mmspec.disable(model)  # a second time: nothing happens


def test_enabling_again_replaces(llava: Any) -> None:
    first = mmspec.enable(llava, drafter=eagle(llava, width=1, depth=2, size=3))
    second = mmspec.enable(llava, drafter="ngram", depth=3)
    tiny_vlms.generate(llava, prompt())
    assert first.stats.tokens == 0 and second.stats.tokens == 24 and mmspec.stats(llava) is second.stats
    assert len([c for c in type(llava).__mro__ if c.__name__ == "LlavaForConditionalGeneration"]) == 2
    first.disable()
    assert type(llava) is T.LlavaForConditionalGeneration


@pytest.mark.parametrize("name", ["llava", "qwen3_5"])
@pytest.mark.parametrize("drafter", ["ngram", "eagle tree"])
def test_copies_are_stock(name: str, drafter: str, tmp_path: Path) -> None:
    """Pickled, deep-copied, saved or torch.saved while enabled: what comes out knows nothing of mmspec."""
    want = tiny_vlms.generate(tiny_vlms.model(name), prompt(name=name))
    fresh = tiny_vlms.model.__wrapped__(name)  # once it has run, even a stock model's own hooks cannot be pickled
    before, kind = anatomy(fresh), type(fresh)
    mmspec.enable(fresh, drafter=DRAFTERS[drafter](fresh, Oracle({})))
    fresh.save_pretrained(tmp_path)
    stream = io.BytesIO()
    torch.save(fresh, stream)
    stream.seek(0)
    made = {
        "pickle": pickle.loads(pickle.dumps(fresh)),
        "deepcopy": copy.deepcopy(fresh),
        "torch.save": torch.load(stream, weights_only=False),
        "save_pretrained": kind.from_pretrained(tmp_path),
    }
    for how, model in made.items():
        if how != "save_pretrained":
            assert anatomy(model) == before, how
        assert {type(part) for part in model.modules()} == {kind for kind, _ in before.values()}, how
        model.generation_config.eos_token_id = None
        assert torch.equal(tiny_vlms.generate(model.eval(), prompt(name=name)), want), how
    assert "mmspec" not in "".join(path.read_text() for path in tmp_path.glob("*.json"))
    assert f'"{kind.__name__}"' in (tmp_path / "config.json").read_text()


@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl", "qwen3_5"])
@pytest.mark.parametrize("drafter", ["ngram", "suffix", "recycle", "eagle tree"])
@pytest.mark.every(4)
def test_threads_on_one_model(name: str, drafter: str) -> None:
    model, kinds = tiny_vlms.model(name), ("image first", "several images", "text only")
    prompts = [tiny_vlms.prompt(name, kind, seed=seed) for kind in kinds for seed in (1, 2)]
    want = [tiny_vlms.generate(model, inputs) for inputs in prompts]
    with (
        mmspec.enable(model, drafter=DRAFTERS[drafter](model, Oracle({}))) as handle,
        ThreadPoolExecutor(len(prompts)) as pool,
    ):
        found = list(pool.map(lambda inputs: tiny_vlms.generate(model, inputs), prompts))
    assert all(map(torch.equal, found, want))
    assert handle.stats.tokens == 24 * len(prompts)


def test_transformers_pipeline() -> None:
    model, processor = tiny_llava.model(), tiny_llava.processor()
    pipe = T.pipeline("image-text-to-text", model=model, processor=processor)
    from PIL import Image

    image = Image.new("RGB", (28, 28), (200, 30, 60))
    chat = [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": "w5 w6 w7"}]}]

    def run() -> Any:
        options = {"generate_kwargs": {"max_new_tokens": 12, "do_sample": False}}
        return pipe(text=chat, return_full_text=False, **options), pipe(images=image, text="<image> w9 w4", **options)

    stock = run()
    with mmspec.enable(pipe) as handle:
        fast = run()
    assert [out[0]["generated_text"] for out in stock] == [out[0]["generated_text"] for out in fast]
    assert handle.stats.tokens > 12 and type(pipe.model) is T.LlavaForConditionalGeneration


@pytest.mark.parametrize("order", ["wrapped, then enabled", "enabled, then wrapped"])
@pytest.mark.parametrize("drafter", ["ngram", "eagle tree"])
@pytest.mark.every(2)
def test_peft(order: str, drafter: str) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")

    def wrapped(model: Any) -> Any:
        torch.manual_seed(3)
        return peft.get_peft_model(model, config).eval()

    plain = tiny_vlms.generate(tiny_vlms.model("llava"), prompt())
    stock = tiny_vlms.generate(wrapped(copy.deepcopy(tiny_vlms.model("llava"))), prompt())
    assert not torch.equal(plain, stock), "the adapter does something"
    model = copy.deepcopy(tiny_vlms.model("llava"))
    made = DRAFTERS[drafter](model, Oracle({}))
    if order == "wrapped, then enabled":
        model = wrapped(model)
        handle = mmspec.enable(model, drafter=made)
    else:
        handle = mmspec.enable(model, drafter=made)
        model = wrapped(model)
    assert torch.equal(tiny_vlms.generate(model, prompt()), stock) and handle.stats.tokens == 24
    with model.disable_adapter():
        assert torch.equal(tiny_vlms.generate(model, prompt()), plain)
    mmspec.disable(model)
    assert type(model.get_base_model()) is T.LlavaForConditionalGeneration
    assert torch.equal(tiny_vlms.generate(model, prompt()), stock) and handle.stats.tokens == 48


# -- what is refused -------------------------------------------------------------------------------------------------

CALLS: dict[str, tuple[dict[str, Any], str]] = {
    "beam search": ({"num_beams": 3}, "beam search"),
    "beam sampling": ({"num_beams": 2, "do_sample": True}, "beam search"),
    "no cache": ({"use_cache": False}, "use_cache"),
    "attention maps": ({"return_dict_in_generate": True, "output_attentions": True}, "attention maps"),
    "hidden states": ({"return_dict_in_generate": True, "output_hidden_states": True}, "output_hidden_states"),
}


@pytest.mark.parametrize("what", CALLS)
def test_a_call_that_cannot_be_accelerated(what: str) -> None:
    model = copy.deepcopy(tiny_vlms.model("llava"))
    model.set_attn_implementation("eager")  # the only one with attention maps
    options, reason = CALLS[what]
    refused_or_stock(model, prompt(), reason, **options)


def test_an_assistant_of_other_tokens() -> None:
    model, assistant = tiny_vlms.model("llava"), tiny_vlms.text(vocab_size=40)
    with mmspec.enable(model), pytest.raises(UnsupportedError, match="has 40 tokens"):
        tiny_vlms.generate(model, prompt("text only"), assistant_model=assistant)
    stock = tiny_vlms.generate(model, prompt("text only"))
    with mmspec.enable(model, on_unsupported="fallback"), pytest.warns(UserWarning, match="has 40 tokens"):
        assert torch.equal(tiny_vlms.generate(model, prompt("text only"), assistant_model=assistant), stock)


WINDOWED: dict[str, dict[str, Any]] = {
    "Mistral": {},
    "Phi3": {"head_dim": None},
    "Starcoder2": {"head_dim": None},
    "Gemma2": {},
    "Qwen2": {"head_dim": None, "use_sliding_window": True, "max_window_layers": 1},
}


@pytest.mark.parametrize("name", WINDOWED)
def test_sliding_windows_however_they_are_declared(name: str) -> None:
    """Identical or refused: some models have a window on every layer and say so with `sliding_window` alone."""
    model = tiny_vlms.text(name, sliding_window=8, **WINDOWED[name])
    with contextlib.suppress(UnsupportedError):
        as_stock(model, {"input_ids": torch.randint(5, 100, (1, 12))}, Scripted(_random))


def mamba() -> Any:
    return T.MambaForCausalLM(T.MambaConfig(vocab_size=64, hidden_size=16, state_size=4, num_hidden_layers=1))


def own_loop() -> Any:
    class Own(T.LlamaForCausalLM):
        def _sample(self, *args: Any, **kwargs: Any) -> Any:
            return super()._sample(*args, **kwargs) * 0

    return Own(tiny_vlms.text().config)


def own_update() -> Any:
    class Own(T.LlamaForCausalLM):
        def _update_model_kwargs_for_generation(self, outputs: Any, model_kwargs: Any, **more: Any) -> Any:
            arguments = super()._update_model_kwargs_for_generation(outputs, model_kwargs, **more)
            return {**arguments, "step": model_kwargs.get("step", 0) + 1}

    return Own(tiny_vlms.text().config)


def test_a_step_of_only_the_last_token_is_refused() -> None:
    class Own(T.LlamaForCausalLM):
        def prepare_inputs_for_generation(self, input_ids: Tensor, attention_mask: Any = None, **more: Any) -> Any:
            past = more[CACHE].get_seq_length() > 0
            return {"input_ids": input_ids[:, -1:] if past else input_ids, CACHE: more[CACHE], "use_cache": True}

    model, ids = tiny_vlms.enlarged(Own(tiny_vlms.text().config)), torch.randint(5, 100, (1, 9))
    oracle = Oracle.of(ids, tiny_vlms.generate(model, {"input_ids": ids}))
    with mmspec.enable(model, DRAFTERS["always right"](model, oracle)), pytest.raises(RuntimeError, match="1 of the 7"):
        tiny_vlms.generate(model, {"input_ids": ids})


REFUSED = {
    "own loop": (own_loop, "decoding loop of its own"),
    "own update": (own_update, "changes the arguments of every step"),
    "no positions": (mamba, "position_ids"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_model_that_cannot_be_accelerated_says_why(what: str) -> None:
    build, reason = REFUSED[what]
    model = build()
    before = type(model)
    with pytest.raises(UnsupportedError, match=reason):
        mmspec.enable(model)
    assert type(model) is before
    with pytest.warns(UserWarning, match=reason):
        handle = mmspec.enable(model, on_unsupported="fallback")
    assert type(model) is before
    handle.disable()


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "unknown option": ({"dept": 3}, TypeError, "unknown option 'dept'; choose from depth, .*on_unsupported"),
    "a depth of nothing": ({"depth": 0}, ValueError, "depth must be a whole number"),
    "a policy that is none": ({"on_unsupported": "maybe"}, ValueError, "error, fallback.*'maybe'"),
    "unknown drafter": ({"drafter": "vispc"}, ValueError, "unknown drafter 'vispc'; choose from .*ngram"),
    "a drafter that needs weights": ({"drafter": "eagle"}, ValueError, "needs weights"),
    "something that is no drafter": ({"drafter": 3}, ValueError, "int has no features, nodes, fit, start, propose"),
    "a drafter's class": ({"drafter": Scripted}, ValueError, r"pass an instance of it, as Scripted\(\)"),
}


@pytest.mark.parametrize("what", WRONG)
def test_errors_say_what_is_allowed(llava: Any, what: str) -> None:
    arguments, kind, words = WRONG[what]
    with pytest.raises(kind, match=words):
        mmspec.enable(llava, **arguments)
    assert type(llava) is T.LlavaForConditionalGeneration


def test_a_drafter_for_another_target(llava: Any) -> None:
    for options, words in (({"vocab": 99}, "vocabulary 99"), ({"hidden": 32}, "hidden size 32")):
        with pytest.raises(ValueError, match=f"does not fit.*{words}"):
            mmspec.enable(llava, eagle(llava, **options))
    assert type(llava) is T.LlavaForConditionalGeneration


def test_a_failed_call_does_not_spoil_the_next(llava: Any) -> None:
    """A drafter that breaks in the middle: its error reaches the user, and the model goes on."""
    want = tiny_vlms.generate(llava, prompt())

    def breaks(row: Any, _: Any) -> Any:
        if row.generated > 5:
            raise RuntimeError("the drafter is broken")
        return [3], [0]

    with mmspec.enable(llava, drafter=Scripted(breaks)), pytest.raises(RuntimeError, match="is broken"):
        tiny_vlms.generate(llava, prompt())
    with mmspec.enable(llava):
        assert torch.equal(tiny_vlms.generate(llava, prompt()), want)
