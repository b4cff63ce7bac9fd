"""Every image-text-to-text class of transformers: token-identical to stock `generate`, or refused with its reason."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import survey
import torch
import transformers
import vlm_classes as zoo
from accelerate import dispatch_model
from compared import as_alone, as_stock
from hostile_drafters import DRAFTERS, eagle

import mmspec
from mmspec.pipelines.families import table as families
from mmspec.pipelines.families.surveyed import FOUND, VERSION
from mmspec.pipelines.host import loading
from mmspec.pipelines.host.model import HostModel
from mmspec.pipelines.host.names import CACHE
from mmspec.pipelines.serving.stream import stream

TALKING = [case for case in zoo.CASES if zoo.picture_of(case) is not None and FOUND[survey.name_of(case)] is None]


DEAR = {"dots3_note", "llama4"}  # only --full waits for these


@pytest.mark.parametrize("case", [pytest.param(c, marks=pytest.mark.full) if c in DEAR else c for c in zoo.CASES])
@pytest.mark.every(3)
def test_identical_or_refused_as_the_table_says(case: str) -> None:
    found, known = survey.acceptance(case), FOUND[survey.name_of(case)] or survey.SAME
    if transformers.__version__ != VERSION and survey.STOCK in known + found:  # one of them cannot be compared
        return
    assert found == known


READERS = [  # classes with modules whose forward has to be another one while a draft is read
    "mistral_large4", "minicpmv4_6", "qwen3_5_moe", "qwen4_exp", "glm5_next", "lfm3_vl", "minimax_m3_vl", "inkling2",
    "inkling_mm_model", "nemotron_h_omni", "kosmos-2.5",
]  # fmt: skip


@pytest.mark.parametrize("case", READERS)
@pytest.mark.every(3)
def test_identical_with_hooks_of_accelerate(case: str) -> None:
    """As a model has them that is spread over several devices, or in part offloaded."""
    assert HostModel.of(zoo.model(case)).readers
    hooked = copy.deepcopy(zoo.model(case))
    dispatch_model(hooked, {name: "cpu" for name, _ in hooked.named_children()}, force_hooks=True)
    as_stock(hooked, zoo.prompt(case), "recycle", call={"max_new_tokens": 8}, draw=zoo.generate, auto=False)


@pytest.mark.parametrize("case", TALKING)
@pytest.mark.every(9)
def test_another_picture_changes_the_text(case: str) -> None:
    """A model that ignores its pictures would prove little."""
    model = zoo.model(case)
    first, second = (zoo.generate(model, zoo.prompt(case, picture=seed)) for seed in (1, 9))
    assert not torch.equal(first, second)


@pytest.fixture(autouse=True)
def stock_generates(request: pytest.FixtureRequest) -> None:
    """Where stock fails there is nothing to compare with; which classes these are is in the table."""
    case = getattr(request.node, "callspec", None) and request.node.callspec.params.get("case")
    if case in zoo.CASES and "table_says" not in request.node.name and (failed := zoo.stock_error(case)) is not None:
        pytest.skip(failed)


def test_no_class_is_left_out() -> None:
    """Of the release that was surveyed; `mmspec.supported()` names as untested what a newer one brings."""
    left_out = {"PI0ForConditionalGeneration"}  # it acts, and does not generate
    left_out |= {"Apertus1p5ForConditionalGeneration", "HYV4VLForConditionalGeneration"}
    left_out |= {"Inkling2LoopForConditionalGeneration"}
    assert transformers.__version__ != VERSION or set(families.untested()) == left_out


def test_the_page_says_what_the_table_says() -> None:
    assert survey.PAGE.read_text() == survey.page(FOUND, VERSION)
    tried = {survey.name_of(case) for case in zoo.CASES} | set(survey.families())
    assert tried <= FOUND.keys() and (transformers.__version__ != VERSION or tried == FOUND.keys())


def test_every_page_tells_the_same_of_what_is_proved() -> None:
    pages = {"models": survey.PAGE.read_text(), "README": (survey.ROOT / "README.md").read_text()}
    same = sum(why is None for why in FOUND.values())
    assert len(families.PROVED) == 12
    for page, text in pages.items():
        text = " ".join(text.split())
        for said in ("tiny random models of these very classes", "one row and three rows of unequal length", str(same)):
            assert said in text, f"{page} lacks: {said}"
        assert "twelve families also with sdpa and eager attention, one row and four" in text, page


def test_a_class_that_is_new_is_called_untested(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {*loading.WITH_PICTURES, "TomorrowForConditionalGeneration"}
    monkeypatch.setattr(loading, "WITH_PICTURES", names)
    mmspec.supported()
    assert "TomorrowForConditionalGeneration" in capsys.readouterr().out


# -- conditions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", ["ngram", "random tree"])
@pytest.mark.parametrize("case", ["mistral_large4", "glm5_next"])
@pytest.mark.every(4)
def test_scores_of_an_indexer_that_tie(case: str, drafter: str) -> None:
    """Of two heads both are often 0, and of equal scores stock's `topk` takes others in a wider tensor."""
    model = zoo.model(case)
    for rows in zoo.ROWS:
        inputs = zoo.prompt(case, rows)
        assert as_stock(model, inputs, drafter, call={"max_new_tokens": 40}, draw=zoo.generate).stats.rounds


@pytest.mark.parametrize(
    ("name", "rows", "padding", "call", "why"),
    [
        ("glm5_next", "one", 2, {}, "counts pools from the first slot"),
        ("minimax_m3_vl", "ragged", 8, {}, "differ by fewer than 8 tokens"),  # keys of padding tie: up to stock's sort
        ("llama4", "one", 0, {"max_new_tokens": 8100}, "scales change past 8064"),
    ],
)
def test_what_depends_on_slots_is_refused_in_words(name: str, rows: str, padding: int, call: Any, why: str) -> None:
    """Pools and scales that are counted in slots of the cache, padding before all rows included."""
    model, inputs = zoo.model(name), zoo.prompt(name, rows)
    padded = [key for key, t in inputs.items() if t.shape == inputs["input_ids"].shape]
    inputs |= {key: torch.nn.functional.pad(inputs[key], (padding, 0)) for key in padded}
    with mmspec.enable(model), pytest.raises(mmspec.UnsupportedError, match=why):
        zoo.generate(model, inputs, **call)


def test_scales_that_change_at_once_are_refused_in_words() -> None:
    model = copy.deepcopy(zoo.model("llama4"))
    for module in model.modules():
        if hasattr(module, "attn_temperature_tuning"):
            module.attn_temperature_tuning, module.floor_scale = True, 16.0
    with mmspec.enable(model), pytest.raises(mmspec.UnsupportedError, match="within the first 128"):
        zoo.generate(model, zoo.prompt("llama4"))


# -- beyond greedy decoding ------------------------------------------------------------------------------------------

LAYERS = {
    "gated delta": "qwen3_5_moe",
    "convolutions and windows": "lfm3_vl",
    "state space duality": "nemotron_h_omni",
    "chunks": "llama4",
    "an indexer": "mistral_large4",
    "blocks of keys": "minimax_m3_vl",
    "pools of keys": "glm5_next",
    "blocks of what is seen, and the last few tokens": "qwen4_exp",
    "distances by slots": "inkling2",
    "a window beside the prompt": "unlimited_ocr",
    "a picture in the cache": "mllama",
}


@pytest.mark.parametrize("case", LAYERS.values(), ids=LAYERS)
@pytest.mark.every(12)
def test_a_seed_gives_what_it_gives_stock(case: str) -> None:
    model, inputs = zoo.model(case), zoo.prompt(case, "ragged")
    call = {"do_sample": True, "temperature": 0.8, "top_k": 40}
    for seed in range(3):
        assert as_stock(model, inputs, call=call, seed=seed, draw=zoo.generate, reproducible=True).stats.rounds


@pytest.mark.parametrize("case", [*LAYERS.values(), "blip-2", "idefics", "phi4_multimodal"])
@pytest.mark.every(6)
def test_prompts_that_share_their_rows_answer_as_if_alone(case: str) -> None:
    model, options = zoo.model(case), {"max_new_tokens": 12, "do_sample": False, "eos_token_id": list(range(5, 20))}
    asked = [zoo.prompt(case, rows, picture) for picture, rows in enumerate(("one", "early", "late", "one", "early"))]
    as_alone(model, asked, DRAFTERS["random tree"](model, None), 2, options, zoo.generate)


def test_a_model_whose_generate_delegates_is_verified_and_streamed_with_its_pictures() -> None:
    model, inputs = zoo.model("blip-2"), zoo.prompt("blip-2")
    want = zoo.generate(model, inputs)[0, inputs["input_ids"].shape[1] :].tolist()
    with mmspec.enable(model):
        report = mmspec.verify(model, inputs)
        steps = list(stream(model, inputs, max_new_tokens=20, do_sample=False))
    assert report.ok and report.image_matters and [token for step in steps for token in step.tokens] == want


@pytest.mark.parametrize("case", ["mistral_large4", "mllama"])
def test_a_cache_that_keys_and_states_would_not_fill_is_left_to_stock(case: str) -> None:
    model, inputs = zoo.model(case), zoo.prompt(case)
    full = zoo.generate(model, inputs)
    with mmspec.enable(model):
        with pytest.warns(UserWarning, match="no KV cache"):
            told = zoo.generate(model, inputs, return_dict_in_generate=True)
        assert torch.equal(told.sequences, full) and getattr(told, CACHE) is None
        own = transformers.DynamicCache(config=model.config.get_text_config())
        with pytest.raises(mmspec.UnsupportedError, match="these layers keep more"):
            zoo.generate(model, inputs, **{CACHE: own})


COMPILED = {"qwen3_5_moe", "lfm3_vl", "nemotron_h_omni", "unlimited_ocr"}  # see test_recurrent.py


@pytest.mark.parametrize("case", [case for case in LAYERS.values() if case not in COMPILED])
@pytest.mark.full
def test_left_uncompiled_the_text_is_the_same(case: str) -> None:
    """From the first round on, whose draft a capture would be compared on."""
    with pytest.warns(UserWarning, match="uncompiled"):
        as_stock(zoo.model(case), zoo.prompt(case, "ragged"), draw=zoo.generate, compile=True)


@pytest.mark.parametrize("case", ["qwen4_exp", "glm5_next"])
def test_drafters_of_inner_layers_are_refused_where_these_carry_several_streams(case: str) -> None:
    """What was enabled before stays; the last features are one stream."""
    model, inputs = zoo.model(case), zoo.prompt(case)
    want = zoo.generate(model, inputs)
    with mmspec.enable(model, eagle(model, depth=3, width=1)) as handle:
        with pytest.raises(ValueError, match="carries 4 streams between its layers"):
            mmspec.enable(model, eagle(model, draft_vocab=50))
        assert torch.equal(zoo.generate(model, inputs), want) and handle.stats.rounds > 0
    assert not [module for module in model.modules() if hasattr(type(module), "_mmspec_stock")]
