"""Prompts that flow through a few rows: each gets what it would have got alone, and what fails, fails alone."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import compared
import pytest
import tiny_image_models
import tiny_llava
import tiny_vlms
import torch
from compared import answers, drain
from hostile_drafters import eagle, feature_drafter
from PIL import Image
from tiny_vlms import FAMILIES, IMAGE
from torch import Tensor
from transformers import AutoProcessor, AutoTokenizer, GenerationConfig, LogitsProcessor, StoppingCriteria

import mmspec
from mmspec import zoo
from mmspec.app import engine as engines
from mmspec.app.engine import Engine
from mmspec.app.prompt import PromptChoice as Asked
from mmspec.compile import version
from mmspec.drafters import lookup
from mmspec.drafters.plain import Plain
from mmspec.pipelines.families import decoder_only
from mmspec.pipelines.host.cache import RaggedCache
from mmspec.pipelines.prompts import chat_inputs
from mmspec.pipelines.serving import batcher as intake
from mmspec.pipelines.serving import continuous as batching
from mmspec.pipelines.serving.batcher import Batcher, StaticBatcher
from mmspec.pipelines.serving.continuous import ContinuousBatcher
from mmspec.registry import OF_TEXT

KINDS = ("image first", "image first", "text only", "several images", "image last", "image first", "image last")
GUESTS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda model: Plain(),
    **{name: lambda model, name=name: name for name in OF_TEXT},
    "eagle chain": lambda model: eagle(model, depth=3, width=1, size=4),
    "eagle tree": lambda model: eagle(model, depth=3, width=3, size=9),
    "adaptive": lambda model: eagle(model, depth=8, width=1, size=9, adaptive=True),
    "vispec": lambda model: feature_drafter("vispec", model, depth=3, width=3, size=9),
}
ENDS = list(range(5, 30))  # so many end-of-sequence ids that answers have very different lengths


def prompts(name: str, kinds: tuple[str, ...] = KINDS) -> list[dict[str, Tensor]]:
    return [tiny_vlms.prompt(name, kind, seed) for seed, kind in enumerate(kinds)]


def settings(**options: Any) -> dict[str, Any]:
    return {"max_new_tokens": 10, "do_sample": False, **options}


def alone(model: Any, inputs: dict[str, Tensor], **options: Any) -> list[int]:
    return compared.alone(model, inputs, **settings(**options))


def as_alone(
    model: Any, asked: list[dict[str, Tensor]], guest: str, call: dict[str, Any], rows: int = 3, **options: Any
) -> ContinuousBatcher:
    return compared.as_alone(model, asked, GUESTS[guest](model), rows, call, **options)


@pytest.mark.parametrize(
    "name",
    [n if n in ("llava", "qwen2_5_vl", "smolvlm") else pytest.param(n, marks=pytest.mark.full) for n in FAMILIES],
)
def test_every_family_answers_as_if_alone(name: str) -> None:
    call = settings(eos_token_id=ENDS, max_new_tokens=16)
    as_alone(tiny_vlms.model(name), prompts(name), "eagle tree", call, lengths=3)


@pytest.mark.parametrize("drafter", GUESTS)
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.every(4)
def test_every_drafter_in_any_number_of_rows(drafter: str, rows: int) -> None:
    flow = as_alone(tiny_vlms.model("llava"), prompts("llava"), drafter, settings(eos_token_id=ENDS), rows)
    assert flow.stats.tokens > 0 and flow.stats.row_rounds <= rows * flow.stats.rounds


@pytest.mark.parametrize("drafter", ["plain", "ngram", "eagle tree", None])
@pytest.mark.parametrize("warmth", [0.0, 0.7])
def test_answers_are_scored_as_a_stock_forward_scores_them(drafter: str | None, warmth: float) -> None:
    """Of the model itself: neither the temperature nor a penalty changes what an answer is given."""
    model, asked = tiny_vlms.model("llava"), prompts("llava", KINDS[:4])
    options = settings(eos_token_id=ENDS, repetition_penalty=1.3)
    if warmth:
        options |= {"do_sample": True, "temperature": warmth}
    with contextlib.ExitStack() as stack:
        if drafter is not None:
            stack.enter_context(mmspec.enable(model, drafter=GUESTS[drafter](model)))
        kind = StaticBatcher if drafter is None else ContinuousBatcher
        ends = drain(kind(model, None, 2, scored=True, **options), asked, [1, 2, 3, 4])
        assert drain(kind(model, None, 2, **options), asked, [1, 2, 3, 4])[0].logprob is None
    for one, end in zip(asked, ends, strict=True):
        whole = torch.cat([one["input_ids"], torch.tensor([end.tokens])], 1)
        shown = {name: value for name, value in one.items() if name not in ("input_ids", "attention_mask")}
        with torch.no_grad():
            logits = model(input_ids=whole, **shown).logits
        law = logits[0, -len(end.tokens) - 1 : -1].log_softmax(-1)
        scored = float(law.gather(1, torch.tensor(end.tokens)[:, None]).sum())
        assert end.error is None and end.logprob == pytest.approx(scored, abs=1e-4)


@pytest.mark.parametrize(
    ("name", "kinds"), [("llava_next", ("image first",) * 5), ("qwen3_vl", ("video", "image first") * 2)]
)
def test_pictures_of_any_size_and_clips(name: str, kinds: tuple[str, ...]) -> None:
    asked = prompts(name, kinds)
    assert len({one["input_ids"].shape[1] for one in asked}) > 1
    as_alone(tiny_vlms.model(name), asked, "suffix", settings())


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.5, "pad_token_id": 7},  # padding must not count as text
        {"min_new_tokens": 6, "eos_token_id": ENDS},
        {"max_new_tokens": None, "max_length": 30},
        {"max_new_tokens": 1},
        {"bad_words_ids": [[9], [11, 12]], "no_repeat_ngram_size": 2},
    ],
    ids=lambda options: next(iter(options)),
)
def test_generation_settings_hold_for_each_row(options: dict[str, Any]) -> None:
    as_alone(tiny_vlms.model("llava"), prompts("llava", KINDS[:5]), "eagle tree", settings(**options))


@pytest.mark.parametrize("drafter", [*OF_TEXT, "eagle tree", "adaptive"])
@pytest.mark.every(4)
def test_sampled_rows_are_fixed_by_their_seeds(drafter: str) -> None:
    """Whoever the neighbours are, and whatever number of rows and order they come in."""
    model, asked = tiny_vlms.model("llava"), prompts("llava")
    options = {"do_sample": True, "temperature": 1.3, "max_new_tokens": 12, "eos_token_id": ENDS[:8]}
    seeds = [11, 12, 13, 14, 15, 16, 17]
    with mmspec.enable(model, drafter=GUESTS[drafter](model)):
        want = one_by_one(model, asked, seeds, **options)
        assert answers(ContinuousBatcher(model, None, 3, **options), asked, seeds) == want
        assert answers(ContinuousBatcher(model, None, 4, **options), asked[::-1], seeds[::-1]) == want[::-1]
        other = answers(ContinuousBatcher(model, None, 3, **options), asked, [s + 1 for s in seeds])
    assert sum(a != b for a, b in zip(other, want, strict=True)) > 3


def one_by_one(model: Any, asked: list[Any], seeds: list[int], **options: Any) -> list[list[int]]:
    """The answers of an enabled model in a flow of one row, each alone."""
    flows = (ContinuousBatcher(model, None, 1, **options) for _ in asked)
    return [answers(flow, [one], [seed])[0] for flow, one, seed in zip(flows, asked, seeds, strict=True)]


def test_waiting_prompts_of_one_shape_are_read_together(monkeypatch: pytest.MonkeyPatch) -> None:
    model, asked = tiny_vlms.model("llava"), prompts("llava", ("image first",) * 9)
    read: list[int] = []
    unhurt = batching.start
    monkeypatch.setattr(batching, "start", lambda *a: read.append(len(a[3].input_ids)) or unhurt(*a))
    with mmspec.enable(model, drafter=Plain()):
        answers(ContinuousBatcher(model, None, 4, **settings(max_new_tokens=3)), asked)
    assert read == [1, 3, 4, 1]


# -- memory ----------------------------------------------------------------------------------------------------------


def slots_held(flow: ContinuousBatcher) -> int:
    cache = flow._session.cache
    return max(layer.keys.shape[2] for layer in cache.cache.slots) if cache is not None else 0


@pytest.mark.parametrize("drafter", ["ngram", "eagle tree"])
@pytest.mark.every(3)
def test_the_cache_does_not_grow_with_the_number_of_prompts(drafter: str) -> None:
    """Short and long answers in turn, one after the other into three rows that never run empty."""
    model = tiny_vlms.model("llava")
    asked = prompts("llava", KINDS[:3] * 20)
    with mmspec.enable(model, drafter=GUESTS[drafter](model)):
        flow, held = ContinuousBatcher(model, None, 3, **settings(eos_token_id=ENDS, max_new_tokens=12)), []
        longest = max(one["input_ids"].shape[1] for one in asked) + 12 + flow._handle.drafter.nodes
        for number, inputs in enumerate(asked):
            flow.add(number, inputs)
            while not flow.free:
                flow.step()
                held.append(slots_held(flow))
                memory = getattr(flow._session.memory, "slots", None)
                assert memory is None or memory.keys.shape[2] <= longest + 256
        while flow.busy:
            flow.step()
    assert 0 < max(held) <= longest * 5 // 4


def test_one_huge_prompt_does_not_widen_the_cache_for_ever() -> None:
    model = tiny_vlms.model("llava")
    short, long = tiny_vlms.prompt("llava", "text only"), tiny_vlms.prompt("llava", "text only")
    long["input_ids"] = torch.randint(5, 100, (1, 300), generator=torch.Generator().manual_seed(0))
    long["attention_mask"] = torch.ones_like(long["input_ids"])
    with mmspec.enable(model, drafter=Plain()):
        flow = ContinuousBatcher(model, None, 2, **settings(max_new_tokens=8))
        flow.add("short", short)
        flow.step()
        flow.add("long", long)
        flow.step()
        assert slots_held(flow) >= 300
        for number in range(6):
            while not flow.free:
                flow.step()
            flow.add(number, short)
            flow.step()
        assert slots_held(flow) < 100


def caches() -> set[RaggedCache]:
    """All that there are."""
    gc.collect()
    return {thing for thing in gc.get_objects() if issubclass(type(thing), RaggedCache)}


def test_nothing_is_held_once_all_rows_have_ended() -> None:
    model, others = tiny_vlms.model("llava"), caches()  # of other tests
    with mmspec.enable(model, drafter=GUESTS["eagle tree"](model)):
        flow = ContinuousBatcher(model, None, 3, **settings(max_new_tokens=6))
        asked = prompts("llava", KINDS[:4])
        pixels = weakref.ref(asked[0]["pixel_values"])
        drain(flow, asked)
        del asked
        assert caches() <= others and pixels() is None and flow._session.memory is None


def test_a_change_of_the_model_is_looked_for_when_prompts_join(monkeypatch: pytest.MonkeyPatch) -> None:
    model, asked, read = tiny_vlms.model("llava"), prompts("llava", KINDS[:3]), list[int]()
    latest = version._latest
    with mmspec.enable(model, drafter=GUESTS["eagle tree"](model)):
        flow = ContinuousBatcher(model, None, 2, **settings(max_new_tokens=8))
        for number, inputs in enumerate(asked):
            flow.add(number, inputs)
        rounds, lens = 0, list[int]()
        monkeypatch.setattr(version, "_latest", lambda root: read.append(rounds) or latest(root))
        while flow.busy:
            lens.append(len(flow.running))
            flow.step()
            rounds += 1
    assert set(read) == {0, lens.index(1)} and rounds > len(set(read)), "as often as prompts have joined"


# -- failures --------------------------------------------------------------------------------------------------------


def broken(name: str = "llava") -> dict[str, Tensor]:
    """A picture too few for its placeholders."""
    inputs = tiny_vlms.prompt(name, "image first")
    inputs["input_ids"] = inputs["input_ids"].clone()
    inputs["input_ids"][0, -1] = IMAGE
    return inputs


@pytest.mark.parametrize("kind", [ContinuousBatcher, StaticBatcher])
def test_a_prompt_that_cannot_be_read_fails_alone(kind: type[Batcher]) -> None:
    model = tiny_vlms.model("llava")
    asked = prompts("llava", ("image first",) * 6)
    asked[3] = broken()
    with mmspec.enable(model):
        ends = drain(kind(model, None, 4, **settings(max_new_tokens=8)), asked)
    assert [end.ticket for end in ends if end.error is not None] == [3]
    assert isinstance(ends[3].error, (ValueError, IndexError, RuntimeError)) and not ends[3].tokens
    for number in (0, 1, 2, 4, 5):
        assert ends[number].tokens == alone(model, asked[number], max_new_tokens=8)


class Fussy(Plain):
    """Breaks a round as soon as one text has three tokens more than its prompt and begins in a certain way."""

    def __init__(self, start: list[int]) -> None:
        self.start_of_text = start

    def propose(self, session: Any, target: Any) -> Any:
        if any(row.generated > 2 and row.tokens[: row.start] == self.start_of_text for row in session.rows):
            raise RuntimeError("one text breaks the round of all")
        return super().propose(session, target)


@pytest.mark.parametrize("drafter", ["eagle chain", "eagle tree", "adaptive"])
def test_rows_that_copy_their_texts_come_and_go(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "EDGE", 0.0)
    call = settings(eos_token_id=ENDS, max_new_tokens=16)
    as_alone(tiny_vlms.model("llava"), prompts("llava"), drafter, call, lookup=True)


def test_a_prompt_that_breaks_a_round_fails_alone() -> None:
    model, asked = tiny_vlms.model("llava"), prompts("llava")
    guilty = asked[2]["input_ids"][0].tolist()
    want = [alone(model, one) for one in asked]
    with mmspec.enable(model, drafter=Fussy(guilty)):
        ends = drain(ContinuousBatcher(model, None, 3, **settings()), asked)
    assert [str(end.error) for end in ends if end.error] == ["one text breaks the round of all"]
    assert [end.tokens for end in ends] == [[] if n == 2 else tokens for n, tokens in enumerate(want)]


@pytest.mark.parametrize("where", ["read", "join", "round"])
def test_rows_are_halved_when_memory_runs_out(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for two rows only, wherever it shows; nothing is lost."""
    model, asked = tiny_vlms.model("llava"), prompts("llava")
    want = [alone(model, one) for one in asked]

    with mmspec.enable(model) as handle:
        flow = ContinuousBatcher(model, None, 5, **settings())
        owner, name, count = {
            "read": (batching, "start", lambda *a: len(a[3].input_ids) + len(flow.running)),
            "join": (RaggedCache, "join", lambda a, b: len(a.lengths.host) + len(b.lengths.host)),
            "round": (type(handle.drafter), "propose", lambda drafter, session, target: len(session.rows)),
        }[where]
        unhurt = getattr(owner, name)

        def short(*given: Any) -> Any:
            if count(*given) > 2:
                raise torch.OutOfMemoryError("out of memory")
            return unhurt(*given)

        monkeypatch.setattr(owner, name, short)
        assert answers(flow, asked) == want
    assert flow.rows in (1, 2)


def test_a_prompt_too_large_by_itself_costs_only_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    model, asked = tiny_vlms.model("llava"), prompts("llava")
    unhurt = batching.start

    def start(*args: Any) -> Any:
        if asked[3]["input_ids"].shape[1] == args[3].input_ids.shape[1]:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")
        return unhurt(*args)

    monkeypatch.setattr(batching, "start", start)
    with mmspec.enable(model):
        flow = ContinuousBatcher(model, None, 4, **settings())
        ends = drain(flow, asked)
    assert [n for n, end in enumerate(ends) if end.error] == [3] and flow.rows == 4
    assert all(end.tokens == alone(model, one) for n, (end, one) in enumerate(zip(ends, asked, strict=True)) if n != 3)


class Keeps(LogitsProcessor):
    """Unknown to mmspec, so that it may keep state."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.roll(1, -1)


@pytest.mark.parametrize(
    ("call", "options", "why"),
    [
        ({"logits_processor": [Keeps()]}, {}, "stock path: the logits processor Keeps"),
        ({"num_beams": 2, "eos_token_id": ENDS}, {"on_unsupported": "fallback"}, "beam search"),
    ],
)
def test_calls_that_cannot_be_accelerated_are_answered_all_the_same(call: Any, options: Any, why: str) -> None:
    with pytest.warns(UserWarning, match=why):
        as_alone(tiny_vlms.model("llava"), prompts("llava", KINDS[:3]), "suffix", settings(**call), **options)


class Odd(StoppingCriteria):
    """Ends a row at a multiple of seven."""

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return input_ids[:, -1] % 7 == 0


@pytest.mark.parametrize("sampled", [False, True])
def test_a_criterion_of_the_users_ends_each_row_as_if_alone(sampled: bool) -> None:
    model, asked, seeds = tiny_vlms.model("llava"), prompts("llava", ("image first",) * 5), [1, 2, 3, 4, 5]
    options = settings(stopping_criteria=[Odd()], eos_token_id=ENDS, do_sample=sampled, max_new_tokens=16)
    with mmspec.enable(model, drafter="ngram"):
        want = one_by_one(model, asked, seeds, **options)
        flow = ContinuousBatcher(model, None, 3, **options)
        assert answers(flow, asked, seeds) == want and flow.stats.tokens == sum(map(len, want))
    assert sampled or want == [alone(model, one, **options) for one in asked]


@pytest.mark.parametrize("kind", [ContinuousBatcher, StaticBatcher])
def test_stop_strings_are_read_by_the_processor(kind: type[Batcher]) -> None:
    """Of the call, or of a configuration; stock gives a `custom_generate` no tokenizer."""
    model, asked = tiny_vlms.model("llava"), prompts("llava", KINDS[:2])
    tokenizer = AutoTokenizer.from_pretrained(zoo.path("scenes-video"))
    how = {"max_new_tokens": 8, "stop_strings": [tokenizer.decode(alone(model, one)[3:5]) for one in asked]}
    want = [alone(model, one, **how, tokenizer=tokenizer) for one in asked]
    assert max(map(len, want)) < 8
    with mmspec.enable(model, drafter=eagle(model, depth=3, width=3, size=9)):
        for options in (settings(**how), {"generation_config": GenerationConfig(**how, do_sample=False)}):
            assert answers(kind(model, tokenizer, 2, **options), asked) == want


@pytest.mark.parametrize("kind", [ContinuousBatcher, StaticBatcher])
def test_a_model_that_returns_dictionaries(kind: type[Batcher]) -> None:
    model, asked = tiny_vlms.model("llava"), prompts("llava", KINDS[:2])
    want = [alone(model, one) for one in asked]
    with mmspec.enable(model):
        for scored in (False, True):
            flow = kind(model, None, 1, scored=scored, **settings(return_dict_in_generate=True))
            assert answers(flow, asked) == want


class Key(StoppingCriteria):
    """Somebody presses Ctrl-C once, while rows take the tokens of a round."""

    pressed = False

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> bool:
        if not self.pressed and input_ids.shape[1] > 15:
            self.pressed = True
            raise KeyboardInterrupt
        return False


@pytest.mark.parametrize("kind", [ContinuousBatcher, StaticBatcher])
def test_an_interruption_costs_no_prompt_and_no_token(kind: type[Batcher]) -> None:
    model, asked, key = tiny_vlms.model("llava"), prompts("llava", KINDS[:4]), Key()
    want = [alone(model, one) for one in asked]
    with mmspec.enable(model, drafter=eagle(model, depth=3, width=3, size=9)):
        rows = 1 + (kind is ContinuousBatcher)  # stock asks a criterion about several rows at once
        flow, ends = kind(model, None, rows, **settings(stopping_criteria=[key])), {}
        for number, inputs in enumerate(asked):
            flow.add(number, inputs)
        while flow.busy:
            with contextlib.suppress(KeyboardInterrupt):
                ends |= {end.ticket: end.tokens for end in flow.step()}
    assert key.pressed and [ends[number] for number in range(4)] == want


def test_refusals() -> None:
    model = tiny_vlms.model("llava")
    with pytest.raises(ValueError, match="not enabled"):
        ContinuousBatcher(model, None, 2)
    with mmspec.enable(model):
        with pytest.raises(ValueError, match="rows must be a whole number of at least 1; got 0"):
            ContinuousBatcher(model, None, 0)
        with pytest.raises(ValueError, match="one answer here; got num_return_sequences=2"):
            ContinuousBatcher(model, None, 2, num_return_sequences=2)
        for odd in (tiny_vlms.prompt("llava", "ragged"), {"input_ids": [[5, 6]]}, {}, torch.ones(1, 3), None):
            with pytest.raises(ValueError, match=r"add takes the inputs of one prompt, .* input_ids \[1, T\]; got"):
                ContinuousBatcher(model, None, 2).add(0, odd)
        with pytest.raises(ValueError, match="one answer here; got num_return_sequences=3"):
            ContinuousBatcher(model, None, 2).add(0, tiny_vlms.prompt("llava", "text only"), num_return_sequences=3)
    with mmspec.enable(model, reproducible=True), pytest.raises(ValueError, match="each row has its own seed"):
        ContinuousBatcher(model, None, 2)


# -- static batches --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampled", [True, False])
def test_static_batches_leave_the_callers_noise_alone(sampled: bool) -> None:
    model, asked = tiny_vlms.model("llava"), prompts("llava", KINDS[:3])
    options = settings(do_sample=sampled)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    want = answers(StaticBatcher(model, None, 1, **options), asked, [1, 2, 3])
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    assert answers(StaticBatcher(model, None, 1, **options), asked, [1, 2, 3]) == want
    assert (answers(StaticBatcher(model, None, 1, **options), asked, [4, 5, 6]) != want) is sampled


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("ends", [
    {}, {"eos_token_id": ENDS}, {"generation_config": GenerationConfig(eos_token_id=ENDS, pad_token_id=0)},
], ids=["of the model", "of the call", "of the call's configuration"])  # fmt: skip
def test_static_batches_give_the_same_answers(ends: Any, enabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, asked = tiny_vlms.model("llava"), prompts("llava")
    monkeypatch.setattr(model.generation_config, "eos_token_id", None if ends else ENDS)
    want = [alone(model, one, **ends) for one in asked]
    with mmspec.enable(model) if enabled else contextlib.nullcontext():
        assert answers(StaticBatcher(model, None, 3, **settings(**ends)), asked) == want


def test_static_batches_are_halved_when_memory_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model, asked = tiny_vlms.model("llava"), prompts("llava", ("image first",) * 5)
    want = [alone(model, one) for one in asked]
    unhurt = Batcher._generate

    def generate(self: Batcher, group: list[intake.QueuedPrompt], **how: Any) -> Any:
        if len(group) > 1:
            raise MemoryError
        return unhurt(self, group, **how)

    monkeypatch.setattr(Batcher, "_generate", generate)
    flow = StaticBatcher(model, None, 4, **settings())
    assert answers(flow, asked) == want and flow.rows == 1


# -- the engine ------------------------------------------------------------------------------------------------------


def picture(seed: int, size: tuple[int, int] = (30, 40)) -> Image.Image:
    noise = torch.randint(0, 256, (*size, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    return Image.fromarray(noise.numpy())


def captioned(flow: Any, asked: list[tuple[list[Image.Image], Asked]]) -> list[Any]:
    for number, (frames, question) in enumerate(asked):
        flow.add(number, frames, question, seed=number)
    found = []
    while flow.busy:
        found += flow.step()
    return sorted(found, key=lambda answer: answer.ticket)


QUESTIONS = [
    ([picture(0)], Asked("w5 w6")),
    ([picture(1, (50, 20))], Asked("w7 w8 w9 w10", system="w11 w12")),
    ([picture(2)], Asked("w5")),
    ([picture(3), picture(4), picture(5)], Asked("w5 w6")),
    ([picture(6)], Asked("w5 w6", system="w9")),
]


@pytest.mark.parametrize("drafter", [None, "ngram"])
def test_engine_captions_continuously(drafter: str | None) -> None:
    """Each as stock generate captions it alone."""
    model, processor = tiny_llava.model(), tiny_llava.processor()
    want = []
    for frames, asked in QUESTIONS:
        inputs = chat_inputs(processor, [asked.text], [frames], asked.system)
        out = model.generate(**inputs, max_new_tokens=9, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        want.append(processor.decode(out, skip_special_tokens=True).strip())
    engine = Engine(model, processor, drafter, 9)
    found = captioned(engine.flow(3), QUESTIONS)
    assert [answer.text for answer in found] == want and [answer.error for answer in found] == [None] * 5
    assert all(answer.tokens == 9 and answer.seconds > 0 for answer in found)
    assert len(set(want)) == 5


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_engine_falls_back_to_static_batches(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder_only.DecoderOnly, "unsupported", lambda self, model: "it is not what it seems")
    engine = Engine(tiny_llava.model(), tiny_llava.processor(), "ngram", 9, temperature)
    assert engine.drafter is None and engine.notes == [
        "mmspec leaves LlavaForConditionalGeneration as it is: it is not what it seems"
    ]
    found = captioned(engine.flow(2), QUESTIONS)
    monkeypatch.undo()
    again = captioned(Engine(tiny_llava.model(), tiny_llava.processor(), "ngram", 9).flow(2), QUESTIONS)
    assert [a.error for a in found] == [None] * 5
    assert ([a.text for a in found] == [a.text for a in again]) is (temperature == 0)


def test_engine_fails_items_alone() -> None:
    """Those whose pictures are none."""
    engine = Engine(tiny_llava.model(), tiny_llava.processor(), "ngram", 5)
    bad: list[Any] = [([picture(1), None], Asked("w5")), ([7], Asked("w5"))]
    found = captioned(engine.flow(2), [QUESTIONS[0], *bad, QUESTIONS[2]])
    assert [answer.ticket for answer in found if answer.error] == [1, 2]
    assert found[0].text and found[3].text and not found[1].text


def test_rows_follow_from_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(tiny_llava.model(), tiny_llava.processor(), "ngram", 9)
    rows = []
    for free in (2**40, 60 * 2**20, 1, None):
        monkeypatch.setattr(engines, "free_memory", lambda device, free=free: free)
        rows.append(engine.suggest_rows())
    assert rows[0] == rows[3] == 8 and rows[2] == 1 and 1 <= rows[1] <= 8  # 8 nodes a row
    monkeypatch.undo()
    assert engine.suggest_rows(frames=4) >= 1
    many = Engine(tiny_llava.model(), tiny_llava.processor(), eagle(engine.model, depth=4, width=8, size=32), 9)
    assert many.suggest_rows() == 2  # 64 nodes a forward


def test_frames_are_a_clip_where_the_processor_knows_clips() -> None:
    shown: list[Any] = []

    class Template:
        chat_template, image_processor, video_processor = "there is one", object(), object()

        def apply_chat_template(self, chats: Any, tokenize: bool, **_: Any) -> str:
            if tokenize:
                shown.append([part["type"] for part in chats[0][-1]["content"]])
            return str(chats)

    for frames in (1, 3):
        chat_inputs(Template(), ["what?"], [[picture(n) for n in range(frames)]], clips=True)
    chat_inputs(Template(), ["what?"], [[picture(n) for n in range(3)]])
    assert shown == [["image", "text"], ["video", "text"], ["image", "image", "image", "text"]]
    hybrid = AutoProcessor.from_pretrained(zoo.path("scenes-hybrid"))  # reads videos, and its template shows none
    made = chat_inputs(hybrid, ["what?"], [[picture(n) for n in range(3)]], clips=True)
    assert len(made["image_grid_thw"]) == 3


def test_each_prompt_has_settings_of_its_own() -> None:
    """Greedy and drawn rows, of any length, side by side; each as if alone, with statistics of its own."""
    model, asked = tiny_vlms.model("llava"), prompts("llava")[:5]
    own: list[dict[str, Any]] = [
        {"max_new_tokens": 12},
        {"do_sample": True, "temperature": 0.7},
        {"do_sample": True, "top_p": 0.5, "max_new_tokens": 7},
        {"repetition_penalty": 1.5},
        {},
    ]
    with mmspec.enable(model, drafter=eagle(model, depth=3, width=3, size=9)):
        found = []
        for rows in (1, 5):
            flow = ContinuousBatcher(model, None, rows, **settings())
            ends = drain(flow, asked, list(range(5)), own)
            found.append([end.tokens for end in ends])
            total = [sum(getattr(end.stats, name) for end in ends) for name in ("row_rounds", "accepted")]
            assert total == [flow.stats.row_rounds, flow.stats.accepted]
    assert found[0] == found[1]
    for number in (0, 3, 4):
        assert found[0][number] == alone(model, asked[number], **own[number])
    assert [len(tokens) for tokens in found[0]] == [12, 10, 7, 10, 10]


def test_prompts_of_another_rule_guidance_or_greed_run_apart() -> None:
    """Pictures by a relaxed rule between text, with two guidances, drawn and greedy: each as if alone."""
    model, call = tiny_image_models.model("emu3"), tiny_image_models.PAINTERS["emu3"].call(1)
    inputs = {name: call.pop(name) for name in ("input_ids", "attention_mask")}
    drawn = {"do_sample": True, "temperature": 2.0}
    own = [call | drawn, {"max_new_tokens": 12, **drawn}, call | drawn | {"guidance_scale": 3.5}, call, call | drawn]
    found = []
    with mmspec.enable(model, drafter="jacobi", window=4, rule="lantern(k=8, lam=4.0)"):
        for rows in (1, 5):
            ends = drain(ContinuousBatcher(model, None, rows), [inputs] * 5, list(range(5)), own)
            assert [end.error for end in ends] == [None] * 5
            assert [end.stats.lossless for end in ends] == [False, True, False, False, False]
            assert [end.stats.tokens for end in ends] == [len(end.tokens) for end in ends]
            assert [end.stats.spent > 0 for end in ends] == [True, False, True, False, True]
            found.append([end.tokens for end in ends])
    assert found[0] == found[1]


def test_rows_are_free_again_once_the_prompt_that_waits_for_them_is_cancelled() -> None:
    model, call = tiny_image_models.model("emu3"), tiny_image_models.PAINTERS["emu3"].call(1)
    inputs = {name: call.pop(name) for name in ("input_ids", "attention_mask")}
    with mmspec.enable(model, drafter="jacobi", rule="lantern(k=8, lam=4.0)"):
        flow = ContinuousBatcher(model, None, 3, max_new_tokens=50)
        for ticket, own in (("text", {}), ("picture", call), ("more", {})):
            flow.add(ticket, inputs, **own)
            flow.step()
        assert [one.ticket for one in flow.running] == ["text"]
        flow.cancel("picture")
        flow.step()
        assert [one.ticket for one in flow.running] == ["text", "more"]


def test_chameleons_own_mode_for_pictures_is_refused_by_prompt() -> None:
    model, call = tiny_image_models.model("chameleon"), tiny_image_models.PAINTERS["chameleon"].call(1)
    inputs = {name: call.pop(name) for name in ("input_ids", "attention_mask")}
    with mmspec.enable(model):
        ends = drain(ContinuousBatcher(model, None, 2, max_new_tokens=4), [inputs] * 2, own=[call, {}])
    assert "call model.generate for them" in str(ends[0].error) and ends[1].error is None and len(ends[1].tokens) == 4


@pytest.mark.parametrize("kind", [ContinuousBatcher, StaticBatcher])
def test_settings_may_be_tensors(kind: type[Batcher]) -> None:
    """Which say of two of them neither that they are equal nor that they are not."""
    model, asked = tiny_vlms.model("llava"), prompts("llava", ("image first",) * 4)
    ends = [torch.tensor(ENDS), torch.tensor(ENDS), torch.tensor(ENDS[:3]), torch.tensor(ENDS[3:])]
    with mmspec.enable(model, drafter=Plain()):
        found = drain(kind(model, None, 3, **settings()), asked, own=[{"eos_token_id": end} for end in ends])
    want = [alone(model, one, eos_token_id=end.tolist()) for one, end in zip(asked, ends, strict=True)]
    assert [end.tokens for end in found] == want


@pytest.mark.parametrize("kind", [ContinuousBatcher, StaticBatcher])
def test_a_cancelled_prompt_frees_its_row(kind: type[Batcher]) -> None:
    model, asked = tiny_vlms.model("llava"), prompts("llava")[:4]
    with mmspec.enable(model, drafter=Plain()):
        flow = kind(model, None, 2, **settings())
        for number, inputs in enumerate(asked):
            flow.add(number, inputs)
        if kind is ContinuousBatcher:
            assert not flow.step()
            assert [(ticket, len(tokens)) for ticket, tokens, _ in flow.written()] == [(0, 2), (1, 2)]
        flow.cancel(0)
        flow.cancel(3)
        ends = {}
        while flow.busy:
            ends |= {end.ticket: end.tokens for end in flow.step()}
            assert len(flow.running) <= 2
        assert ends == {number: alone(model, asked[number]) for number in (1, 2)}
        flow.add(5, asked[0])
        flow.step()
        for ticket in (5, 1):  # the last row, and a prompt that is not there
            flow.cancel(ticket)
        assert kind is StaticBatcher or flow._session.cache is None  # its keys are not kept until the next prompt
        assert flow.step() == [] and not flow.busy


@pytest.mark.parametrize("kind", [ContinuousBatcher, StaticBatcher])
@pytest.mark.parametrize("pad", [None, 2])
def test_prompts_without_a_mask_are_padded_with_one(kind: type[Batcher], pad: int | None) -> None:
    """transformers infers a mask only from a padding token that is not an end-of-sequence token."""
    model = copy.deepcopy(tiny_vlms.text())
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = pad, 2
    asked = [torch.randint(5, 90, (1, 5 + 3 * i)) for i in range(4)]
    wanted = [alone(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}) for ids in asked]
    with mmspec.enable(model, "plain"):
        assert answers(kind(model, None, 2, **settings()), [{"input_ids": ids} for ids in asked]) == wanted
