"""`prefix_cache`: what a prompt shares with an earlier one is not read again, and nothing that is generated changes."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import tiny_vlms
import torch
import transformers as T
import vlm_classes as zoo
from compared import as_alone, as_stock
from hostile_drafters import eagle, feature_drafter
from PIL import Image
from tiny_vlms import CLOSE, IMAGE, OPEN, VIDEO
from torch import Tensor

import mmspec
from mmspec import zoo as embedded
from mmspec.config import SpecConfig, size_in_bytes
from mmspec.pipelines.host.names import CACHE
from mmspec.pipelines.serving.stream import stream
from mmspec.pipelines.target import prefix_keys

Inputs = dict[str, Tensor]
DRAFTERS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda model: "plain",
    "suffix": lambda model: "suffix",
    "eagle tree": lambda model: eagle(model, depth=3, width=3, size=9),
    "vispec": lambda model: feature_drafter("vispec", model, depth=3, width=1, size=4),
}
SAID = {"suppress_tokens": [IMAGE, VIDEO, OPEN, CLOSE]}  # no answer may hold what stands for a picture
WORDS = (20, 9, 12)


def further(inputs: Inputs, words: Tensor) -> Inputs:
    """The same prompts with these words [B, n] behind them."""
    longer = {"input_ids": words, "attention_mask": torch.ones_like(words)}
    longer |= {name: torch.zeros_like(words) for name in inputs if name.endswith("token_type_ids")}
    return inputs | {name: torch.cat([inputs[name], more], 1) for name, more in longer.items()}


def asks(inputs: Inputs, lengths: tuple[int, ...] = WORDS) -> list[Inputs]:
    """Several questions behind the same prompt."""
    drawn = torch.Generator().manual_seed(3)
    rows = len(inputs["input_ids"])
    return [further(inputs, torch.randint(5, 100, (rows, n), generator=drawn)) for n in lengths]


def talks(model: Any, inputs: Inputs) -> list[Inputs]:
    """Three questions, and a second turn behind what stock says to the first one."""
    asked = asks(inputs)
    answer = tiny_vlms.generate(model, asked[0], **SAID)[:, asked[0]["input_ids"].shape[1] :]
    return [*asked, *asks(further(asked[0], answer), (5,))]


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("kind", ["image first", "ragged"])
@pytest.mark.parametrize("name", ["llava", "qwen2_vl", "qwen3_5"])
@pytest.mark.every(24)
def test_later_questions_and_turns_are_answered_as_stock_answers_them(name: str, kind: str, drafter: str) -> None:
    model, inputs = tiny_vlms.model(name), tiny_vlms.prompt(name, kind)
    asked = talks(model, inputs)
    stats = as_stock(model, asked, DRAFTERS[drafter](model), call=SAID, prefix_cache="64MB").stats
    lengths = [int(one["attention_mask"].sum()) for one in asked]
    assert stats.prefix["tokens"] == sum(lengths) and not stats.read_whole
    least = lengths[0] - 20 * len(inputs["input_ids"])  # all but the last words of one question at least
    assert stats.prefix["reused tokens"] >= least and 0 < stats.kept_bytes < 64 * 2**20
    assert "not read again" in str(stats)


@pytest.mark.parametrize("name", [name for name in tiny_vlms.FAMILIES if name not in ("llava", "qwen2_vl", "qwen3_5")])
@pytest.mark.every(12)
def test_every_family(name: str) -> None:
    model = tiny_vlms.model(name)
    for kind in ("several images", "ragged"):
        asked = talks(model, tiny_vlms.prompt(name, kind))
        handle = as_stock(model, asked, "plain", call=SAID, prefix_cache="64MB")
        both_ways = "its prompts are read in both directions" in handle.stats.read_whole
        assert both_ways == (name == "paligemma")
        assert handle.stats.prefix.get("reused tokens", 0) > 0 or both_ways or kind == "ragged"


APART = {
    "hyperclovax_vision_v2": "its positions count the padding of the batch",
    "exaone4_5": "its positions count the padding of the batch",
    "nemotron_h_omni": "its layers read prompts otherwise than answers",
    "qwen3_vl_moe": "its layers read prompts otherwise than answers",
    "unlimited_ocr": "its layers read prompts otherwise than answers",
}


@pytest.mark.parametrize("name", APART)
@pytest.mark.every(2)
def test_what_stock_would_read_otherwise_in_another_prompt_is_not_kept(name: str) -> None:
    """Rows of unequal length; the first ones again have two words more, which are read like a draft."""
    ragged = zoo.prompt(name, "ragged")
    asked = [ragged, further(ragged, torch.tensor([[5, 6]] * 3)), zoo.prompt(name), zoo.prompt(name, "early")]
    handle = as_stock(zoo.model(name), asked, draw=zoo.generate, times=2, prefix_cache="64MB")
    assert APART[name] in handle.stats.read_whole
    assert (handle.stats.prefix.get("reused tokens", 0) > 0) == ("padding" in APART[name])


@pytest.mark.parametrize("name", ["llava", "qwen3_5"])
def test_seeds_draw_the_same(name: str) -> None:
    model, drawn = tiny_vlms.model(name), {"do_sample": True, "temperature": 1.3}
    for seed, one in enumerate(asks(tiny_vlms.prompt(name, "image first"))):
        told = {"call": {**SAID, **drawn}, "seed": seed, "times": 2, "reproducible": True, "prefix_cache": "1MB"}
        assert as_stock(model, one, "plain", **told).stats.prefix["reused tokens"] > 0


def reused(model: Any, *asked: Inputs, between: Callable[[Any], Any] = lambda model: None) -> float:
    """Tokens that are not read again when the last is asked, after `between`; it is answered as stock answers it."""
    with mmspec.enable(model, "plain", prefix_cache="64MB") as handle:
        for one in asked[:-1]:
            tiny_vlms.generate(model, one, **SAID)
        before = handle.stats.prefix["reused tokens"]
        between(model)
        found = tiny_vlms.generate(model, asked[-1], **SAID)
    assert torch.equal(found, tiny_vlms.generate(model, asked[-1], **SAID))
    return float(handle.stats.prefix["reused tokens"] - before)


@pytest.mark.parametrize("name", ["llava", "qwen2_vl", "qwen3_5"])
def test_another_picture_is_read(name: str) -> None:
    model = tiny_vlms.model(name)
    mine, other = (tiny_vlms.prompt(name, "image last", picture_seed=seed) for seed in (1, 2))
    assert torch.equal(mine["input_ids"], other["input_ids"])
    words = int((mine["input_ids"] != IMAGE).long().cumprod(1).sum())
    assert reused(model, *asks(mine, (9,)), *asks(other, (9,))) <= words
    assert reused(model, *asks(mine, (9, 9))) >= mine["input_ids"].shape[1] - (name == "qwen3_5")


CHANGES: dict[str, Callable[[Any], Any]] = {
    "in place": lambda layer: layer.weight.detach().mul_(1.01),
    "of one number": lambda layer: layer.weight.detach()[:1, :1].add_(0.5),
    "unseen by torch": lambda layer: (layer.weight.data.mul_(1.01), mmspec.refresh(layer)),
    "replaced": lambda layer: setattr(layer, "weight", torch.nn.Parameter(layer.weight * 1.01)),
    "other data": lambda layer: setattr(layer.weight, "data", layer.weight.data * 1.01),
    "by a fused optimizer": lambda layer: stepped(layer.weight),  # torch does not count its writes
}


def stepped(weight: torch.nn.Parameter) -> None:
    weight.grad = torch.ones_like(weight)
    torch.optim.AdamW([weight], lr=0.01, fused=True).step()


@pytest.mark.parametrize("how", CHANGES)
@pytest.mark.every(3)
def test_what_other_weights_left_is_not_used(how: str) -> None:
    model = copy.deepcopy(tiny_vlms.model("llava"))
    asked = asks(tiny_vlms.prompt("llava", "image first"))
    change = lambda model: CHANGES[how](model.get_decoder().layers[1].mlp.down_proj)  # noqa: E731
    assert reused(model, *asked[:2], between=change) == 0
    assert reused(model, *asked[:2]) > 0


def test_weights_whose_writes_torch_does_not_count() -> None:
    model, asked = copy.deepcopy(tiny_vlms.model("llava")), tiny_vlms.prompt("llava", "image first")
    with torch.inference_mode():
        model.load_state_dict({name: t.clone() for name, t in model.state_dict().items()}, assign=True)
    with mmspec.enable(model, "ngram", prefix_cache="1MB") as handle:
        tiny_vlms.generate(model, asked, max_new_tokens=2)
    assert [why for why in handle.stats.read_whole if "made in inference mode" in why]


def test_what_is_read_under_other_conditions_is_not_used() -> None:
    model = copy.deepcopy(tiny_vlms.model("llava"))
    asked = asks(tiny_vlms.prompt("llava", "image first"))
    assert reused(model, *asked[:2], between=lambda model: model.set_attn_implementation("eager")) == 0
    assert reused(model, *asked[:2], between=lambda model: model.double()) == 0
    with mmspec.enable(model, "plain", prefix_cache="64MB") as handle:
        hook = model.get_decoder().layers[0].register_forward_hook(lambda *_: None)
        for one in asked[:2]:
            tiny_vlms.generate(model, one, **SAID)
        hook.remove()
    assert not handle.stats.prefix and "has forward hooks" in next(iter(handle.stats.read_whole))


def test_the_tower_is_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model, asked, seen = tiny_vlms.model("qwen2_vl"), asks(tiny_vlms.prompt("qwen2_vl", "image first")), []
    tower, forward = model.model.visual, type(model.model.visual).forward
    monkeypatch.setattr(type(tower), "forward", lambda *args, **more: seen.append(1) or forward(*args, **more))
    with mmspec.enable(model, "plain", prefix_cache="64MB"):
        for one in asked:
            tiny_vlms.generate(model, one, **SAID)
    assert len(seen) == 1


def test_the_budget_holds_and_the_latest_stay() -> None:
    model = tiny_vlms.model("llava")
    prompts = [asks(tiny_vlms.prompt("llava", "image first", seed), (9, 9)) for seed in range(4)]
    with mmspec.enable(model, "plain", prefix_cache="64MB") as handle:
        tiny_vlms.generate(model, prompts[0][0], **SAID)
        one = handle.stats.kept_bytes
    assert one > 1000
    with mmspec.enable(model, "plain", prefix_cache=int(2.5 * one)) as handle:
        for first, _ in prompts:
            tiny_vlms.generate(model, first, **SAID)
            assert handle.stats.kept_bytes <= 2.5 * one
        assert handle.stats.prefix["reused tokens"] == 0
        for place, read in ((3, False), (0, True)):  # the latest is kept, the first has gone
            before = handle.stats.prefix["reused tokens"]
            tiny_vlms.generate(model, prompts[place][1], **SAID)
            assert (handle.stats.prefix["reused tokens"] == before) == read
    with mmspec.enable(model, "plain", prefix_cache=100) as handle:
        for question in prompts[0]:
            tiny_vlms.generate(model, question, **SAID)
    assert handle.stats.kept_bytes == 0 and handle.stats.prefix["reused tokens"] == 0


def test_nothing_is_kept_once_it_is_off() -> None:
    model = copy.deepcopy(tiny_vlms.model("llava"))
    first, second = asks(tiny_vlms.prompt("llava", "image first"), (9, 9))
    handle = mmspec.enable(model, "plain", prefix_cache="64MB")
    tiny_vlms.generate(model, first, **SAID)
    store, alive = weakref.ref(type(model)._mmspec_patch.prefixes), weakref.ref(model)
    assert store().bytes > 0
    mmspec.disable(model)
    assert store().bytes == 0, "whoever still has the handle keeps none of it"
    del handle
    gc.collect()
    assert store() is None
    handle = mmspec.enable(model, "plain", prefix_cache="64MB")
    tiny_vlms.generate(model, second, **SAID)
    assert handle.stats.prefix["reused tokens"] == 0
    mmspec.disable(model)
    mmspec.enable(model, "plain", prefix_cache="64MB")
    tiny_vlms.generate(model, first, **SAID)
    del model
    gc.collect()
    assert alive() is None
    with mmspec.enable(tiny_vlms.model("llava"), "plain") as handle:
        tiny_vlms.generate(tiny_vlms.model("llava"), first, **SAID)
    assert not handle.stats.prefix and not handle.stats.kept_bytes


def test_two_threads() -> None:
    model, (mine, other) = tiny_vlms.model("qwen3_5"), (tiny_vlms.prompt("qwen3_5", "image last", n) for n in (1, 2))
    asked = [asks(mine, (9, 12, 7, 11)), asks(other, (10, 8, 13, 9))]

    def ask(some: list[Inputs]) -> list[Tensor]:
        return [tiny_vlms.generate(model, one, **SAID) for one in some]

    want = list(map(ask, asked))
    with mmspec.enable(model, "suffix", prefix_cache="64MB") as handle, ThreadPoolExecutor(2) as pool:
        found = list(pool.map(ask, asked))
    assert all(all(map(torch.equal, *pair)) for pair in zip(found, want, strict=True))
    assert handle.stats.prefix["reused tokens"] > 0


def test_continuous_batches_share_what_they_read() -> None:
    model = tiny_vlms.model("qwen3_5")
    asked = asks(tiny_vlms.prompt("qwen3_5", "image last"), (9, 12, 7, 11, 9))
    call, drafter = {"max_new_tokens": 24, "do_sample": False, **SAID}, eagle(model, depth=3, width=3, size=9)
    flow = as_alone(model, asked, drafter, 2, call, prefix_cache="64MB")
    assert flow.stats.prefix["reused tokens"] >= 4 * (asked[0]["input_ids"].shape[1] - 10)


def test_calls_that_are_left_alone_say_why() -> None:
    model, inputs = tiny_vlms.model("llava"), tiny_vlms.prompt("llava", "image first")
    cache = getattr(tiny_vlms.generate(model, inputs, **SAID, return_dict_in_generate=True), CACHE)
    turn = further({name: inputs[name] for name in ("input_ids", "attention_mask")}, torch.full((1, 24), 7))
    want = tiny_vlms.generate(model, turn, **SAID, **{CACHE: copy.deepcopy(cache)})
    with mmspec.enable(model, "plain", prefix_cache="64MB") as handle:
        assert torch.equal(tiny_vlms.generate(model, turn, **SAID, **{CACHE: cache}), want)
        tiny_vlms.generate(model, inputs, **SAID, num_return_sequences=2, do_sample=True)
    assert list(handle.stats.read_whole.items()) == [
        ("the cache is the caller's own", 1),
        ("its pictures were encoded before the prefill", 2),
    ]


def test_what_the_tower_is_told_beside_tensors_is_heard() -> None:
    model, inputs = tiny_vlms.model("llava"), tiny_vlms.prompt("llava", "image first")
    want = [tiny_vlms.generate(model, inputs, vision_feature_layer=layer) for layer in (-1, -2)]
    with mmspec.enable(model, "plain", prefix_cache="64MB") as handle:
        found = [tiny_vlms.generate(model, inputs, vision_feature_layer=layer) for layer in (-1, -2)]
    assert all(map(torch.equal, found, want)) and not torch.equal(*want)
    assert dict(handle.stats.read_whole) == {"its vision tower is given more than tensors": 2}


def test_lists_of_tensors_are_told_apart_by_all_of_them() -> None:
    large = torch.zeros(5000)
    other = large.index_fill(0, torch.tensor([2500]), 1)
    assert repr(large) == repr(other) and prefix_keys._digest({"x": [large]}) != prefix_keys._digest({"x": [other]})


def test_a_streamed_call_keeps_and_finds() -> None:
    """What watches for the end of the prefill is no hook that might change it."""
    model, inputs = tiny_vlms.model("llava"), tiny_vlms.prompt("llava", "image first")
    want = tiny_vlms.generate(model, inputs, max_new_tokens=6)[0, inputs["input_ids"].shape[1] :].tolist()
    with mmspec.enable(model, prefix_cache="64MB") as handle:
        for _ in range(2):
            steps = list(stream(model, inputs, max_new_tokens=6, do_sample=False))
            assert [token for step in steps for token in step.tokens] == want and steps[0].tokens == ()
    assert handle.stats.prefix["reused tokens"] > 0 and not handle.stats.read_whole


@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl"])
def test_prefill_in_pieces_on_the_stock_path(name: str) -> None:
    """Stock takes no pictures there that are not encoded yet."""
    model, inputs = tiny_vlms.model(name), tiny_vlms.prompt(name, "image first")
    options = {"prefill_chunk_size": 4, "encoder_repetition_penalty": 1.3}
    with pytest.warns(UserWarning, match="stock path"):
        as_stock(model, inputs, call=options, prefix_cache="64MB")


def test_pictures_beside_embeddings_are_encoded_as_in_stock() -> None:
    """Llama-4 takes them beside embeddings only so."""
    if (failed := zoo.stock_error("llama4")) is not None:
        pytest.skip(failed)
    model, inputs = zoo.model("llama4"), zoo.prompt("llama4")
    inputs |= {"inputs_embeds": model.get_input_embeddings()(inputs["input_ids"]).detach()}
    as_stock(model, inputs, draw=zoo.generate, prefix_cache="64MB")


@pytest.mark.parametrize(("said", "size"), [("512MB", 2**29), ("1.5 GiB", 3 * 2**29), (7, 7), ("2k", 2048), (None, 0)])
def test_sizes(said: Any, size: int) -> None:
    assert SpecConfig(prefix_cache=said).kept_bytes == size


@pytest.mark.parametrize("said", ["much", -1, True, "3 XB", 1.5])
def test_sizes_that_are_none(said: Any) -> None:
    with pytest.raises(ValueError, match=r"prefix_cache: .* is not a size; write one like 512M"):
        SpecConfig(prefix_cache=said)
    with pytest.raises(ValueError, match="is not a size"):
        size_in_bytes(said)


# -- heads that the model ships with, on a hybrid ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def hybrid() -> tuple[Any, Any]:
    """The embedded model with recurrent layers and a head of its own, and its processor."""
    folder = embedded.path("scenes-hybrid")
    model = T.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    return model.eval(), T.AutoProcessor.from_pretrained(folder)


Turn = tuple[str, tuple[int, ...], str]  # who, the pictures shown, the words

FIRST: list[list[Turn]] = [
    [("user", (1,), "Describe this image.")],
    [("user", (1,), "Describe this image in detail.")],
    [("user", (2,), "Describe this image.")],
    [("user", (1, 2), "Describe this image.")],
    [("user", (2, 1), "Describe this image in detail.")],
]


def chat(processor: Any, talks: list[list[Turn]]) -> Inputs:
    """The inputs of these conversations, one a row."""

    def message(who: str, shown: tuple[int, ...], words: str) -> dict[str, Any]:
        return {"role": who, "content": [*({"type": "image"} for _ in shown), {"type": "text", "text": words}]}

    messages = [[message(*turn) for turn in talk] for talk in talks]
    texts = [processor.apply_chat_template(talk, add_generation_prompt=True) for talk in messages]
    numbers = [[number for _, shown, _ in talk for number in shown] for talk in talks]
    pictures = [[Image.open(embedded.samples() / f"scene-{n:02d}.png").convert("RGB") for n in row] for row in numbers]
    made = processor(text=texts, images=pictures, padding=True, padding_side="left", return_tensors="pt")
    return dict(made)


def told(hybrid: tuple[Any, Any], batch: int) -> list[list[str]]:
    """First turns, then second ones behind them, and the first ones again; they share pictures and beginnings."""
    model, processor = hybrid

    def said(talks: list[list[Turn]]) -> list[str]:
        inputs = chat(processor, talks)
        out = model.generate(**inputs, max_new_tokens=16, do_sample=False)
        return processor.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)  # type: ignore[no-any-return]

    groups = [[FIRST[(at + i) % len(FIRST)] for i in range(batch)] for at in range(len(FIRST))]
    found = [said(group) for group in groups]
    second: Turn = ("user", (), "Describe this image in detail.")
    for group, answers in zip(groups, list(found), strict=True):
        turns = zip(group, answers, strict=True)
        found.append(said([[*talk, ("assistant", (), words), second] for talk, words in turns]))
    return [*found, *map(said, groups)]


@pytest.mark.parametrize("options", [{"depth": 4, "width": 3, "size": 12}, {}], ids=["tree", "as chosen"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.every(8)
def test_heads_of_a_hybrid_say_what_stock_says_over_many_calls(
    hybrid: tuple[Any, Any], batch: int, options: dict[str, int]
) -> None:
    want = told(hybrid, batch)
    with mmspec.enable(hybrid[0], "mtp", prefix_cache="64MB", **options) as handle:
        assert told(hybrid, batch) == want
    stats = handle.stats
    assert stats.accepted > stats.rounds / 2 and stats.prefix["reused tokens"] > 0
