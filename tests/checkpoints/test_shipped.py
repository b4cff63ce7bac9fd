"""What a newcomer gets without naming a drafter, and what stock's own arguments for assisted generation do."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import published_mtp
import pytest
import tiny_vlms
import torch
import transformers as T
from compared import as_alone, as_stock
from hostile_drafters import eagle
from safetensors.torch import load_file, save_file
from torch import Tensor

import mmspec
from mmspec.checkpoints.files import CONFIG, WEIGHTS
from mmspec.drafters.eagle import EagleDrafter
from mmspec.drafters.suffix import SuffixDrafter
from mmspec.pipelines.drafters.draft_model import ModelDrafter
from mmspec.pipelines.drafters.mtp import MtpDrafter
from mmspec.pipelines.patching import choose
from mmspec.registry import PUBLISHED

NAME = "qwen3_5"


def fresh(name: str = NAME) -> Any:
    return copy.deepcopy(tiny_vlms.model(name))


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    choose._log_fallback.cache_clear()
    caplog.set_level(logging.INFO, logger="mmspec")
    return caplog


def test_heads_in_the_folder_are_taken(tmp_path: Path, said: Any) -> None:
    model = fresh()
    published_mtp.shipped(model, tmp_path, published_mtp.qwen_heads(model))
    with mmspec.enable(model) as handle:
        assert isinstance(handle.drafter, MtpDrafter)
    assert [r.message for r in said.records if r.name == "mmspec"] == [
        f"mmspec drafts for {tmp_path} with the multi-token-prediction heads in its own files"
    ]


def test_a_drafter_in_the_folder_comes_first(tmp_path: Path, said: Any) -> None:
    model = fresh("llava")
    model.save_pretrained(tmp_path)
    mmspec.save_drafter(eagle(model), tmp_path / "eagle")
    model.config._name_or_path = str(tmp_path)
    handle = as_stock(model, tiny_vlms.prompt("llava", "ragged"), depth=3, width=2)
    assert isinstance(handle.drafter, EagleDrafter) and handle.drafter.options.depth == 3
    assert f"with the drafter in {tmp_path / 'eagle'}" in said.text


def test_the_folder_that_the_config_names(tmp_path: Path, said: Any) -> None:
    model = fresh("llava")
    model.save_pretrained(tmp_path)
    copy.deepcopy(tiny_vlms.model("llava")).save_pretrained(tmp_path / "small")
    model.config.drafter, model.config._name_or_path = "small", str(tmp_path)
    with mmspec.enable(model) as handle:
        assert isinstance(handle.drafter, ModelDrafter)
    model.config.drafter = "../elsewhere"
    with mmspec.enable(model) as handle:
        assert isinstance(handle.drafter, SuffixDrafter)


def test_what_is_broken_is_left_alone_and_told(tmp_path: Path, said: Any) -> None:
    model = fresh()
    heads = published_mtp.qwen_heads(model)
    del heads["mtp.fc.weight"]
    published_mtp.shipped(model, tmp_path, heads)
    (tmp_path / "dflash").mkdir()
    (tmp_path / "dflash" / "config.json").write_text(json.dumps({"architectures": ["NobodyKnows"]}))
    with mmspec.enable(model) as handle:
        assert isinstance(handle.drafter, SuffixDrafter)
    warned = [r.message for r in said.records if r.levelname == "WARNING" and r.name == "mmspec"]
    assert len(warned) == 2 and "dflash" in warned[0] and "missing: layers.0.eh_proj.weight" in warned[1]


def changed(**settings: Any) -> Callable[[dict[str, Tensor], dict[str, Any]], object]:
    return lambda tensors, config: config.update(settings)


REMOTE = {"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}}
DAMAGE: dict[str, tuple[Callable[[dict[str, Tensor], dict[str, Any]], object], str]] = {
    "no heads": (changed(num_attention_heads=0), "ZeroDivisionError"),
    "a word for a number": (changed(hidden_size="x"), "hidden_size"),
    "code of its own": (changed(**REMOTE), "runs no code of a checkpoint"),
    "another shape": (lambda tensors, _: tensors.update({"model.norm.weight": torch.ones(3)}), r"norm\.weight \(3,\)"),
    "a tensor missing": (lambda tensors, _: tensors.pop("model.norm.weight"), r"lack model\.norm\.weight"),
    "cut": (lambda tensors, _: tensors.clear(), "a file of its weights is damaged"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_draft_model_is_passed_over_and_refused_by_name(
    damage: str, tmp_path: Path, said: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is asked whether to run its code, either."""
    model, folder, (break_, words) = fresh("llava"), tmp_path / "assistant", DAMAGE[damage]
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a question on stdin"))
    model.config._name_or_path = str(tmp_path)
    tiny_vlms.text().save_pretrained(folder)
    tensors, config = load_file(folder / WEIGHTS), json.loads((folder / CONFIG).read_text())
    break_(tensors, config)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    if not tensors:
        (folder / WEIGHTS).write_bytes(b"cut off")
    (folder / CONFIG).write_text(json.dumps(config))
    with mmspec.enable(model) as handle:
        assert isinstance(handle.drafter, SuffixDrafter) and str(folder) in said.text
    with pytest.raises(ValueError, match=f"{folder}.*{words}"):
        mmspec.enable(model, "model", draft=folder)


def test_a_published_drafter_is_suggested_once_and_not_fetched(said: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = fresh("llava")
    model.config._name_or_path = "llava-hf/llava-1.5-7b-hf"
    for _ in range(2):
        with mmspec.enable(model) as handle:
            assert isinstance(handle.drafter, SuffixDrafter)
    warned = [r.message for r in said.records if r.levelname == "WARNING" and r.name == "mmspec"]
    assert len(warned) == 1 and "drafter='lucylyn/MSD-LLaVA1.5-7B'" in warned[0]


def test_published_drafters_are_found_by_names_in_small_letters() -> None:
    for base, name in PUBLISHED.items():
        assert base == base.lower() and "/" not in base and name.count("/") == 1 and name != name.lower()


# -- stock's own arguments -------------------------------------------------------------------------------------------


def small(name: str, noise: float = 0.02) -> Any:
    """A model that thinks nearly like the target."""
    made, g = fresh(name), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in made.parameters():
            weight.add_(torch.randn(weight.shape, generator=g) * noise * weight.abs().mean())
    return made


@pytest.mark.parametrize("kind", ["image first", "ragged", "text only"])
@pytest.mark.parametrize("name", ["llava", NAME])
@pytest.mark.every(4)
def test_stock_arguments_run_in_the_loop(name: str, kind: str) -> None:
    """Also with several rows and on hybrids, where stock raises; the same tokens, and drafts of what was asked for."""
    model, inputs = tiny_vlms.model(name), tiny_vlms.prompt(name, kind)
    full = tiny_vlms.generate(model, inputs)
    asked: dict[str, dict[str, Any]] = {
        "model": {"assistant_model": small(name)},
        "lookup": {"prompt_lookup_num_tokens": 3},
        "config": {"generation_config": T.GenerationConfig(prompt_lookup_num_tokens=2, pad_token_id=0)},
    }
    with mmspec.enable(model, "plain") as handle:
        for what, how in asked.items():
            before = handle.stats.drafted
            assert torch.equal(tiny_vlms.generate(model, inputs, **how), full), what
            assert what != "model" or handle.stats.drafted > before
        assert "generation_config" not in asked["model"]
        assert asked["config"]["generation_config"].prompt_lookup_num_tokens == 2
        drafted = handle.stats.drafted
        assert torch.equal(tiny_vlms.generate(model, inputs), full) and handle.stats.drafted == drafted


def test_use_mtp(tmp_path: Path) -> None:
    model, inputs = fresh(), tiny_vlms.prompt(NAME, "ragged")
    with mmspec.enable(model, "plain"), pytest.raises(mmspec.UnsupportedError, match="not on this machine"):
        tiny_vlms.generate(model, inputs, use_mtp=True)
    full = tiny_vlms.generate(model, inputs)
    published_mtp.shipped(model, tmp_path, published_mtp.qwen_heads(model))
    with mmspec.enable(model, "plain") as handle:
        assert torch.equal(tiny_vlms.generate(model, inputs, use_mtp=True), full)
        assert handle.stats.drafted > 0


OWN = {"use_mtp": True, "prompt_lookup_num_tokens": 3, "speculation_type": "dflash"}


@pytest.mark.parametrize("field", OWN)
def test_what_the_models_own_generation_config_asks_for(field: str, tmp_path: Path) -> None:
    """Stock fills in its fields where a call or a passed config leaves them open; None in a call turns them off."""
    model, inputs = fresh(), tiny_vlms.prompt(NAME, "several images")
    published_mtp.shipped(model, tmp_path, published_mtp.qwen_heads(model))
    call = {"assistant_model": block()} if field == "speculation_type" else {}
    full = tiny_vlms.generate(model, inputs)
    model.generation_config.update(**{field: OWN[field]})
    with mmspec.enable(model, "plain") as handle:
        for passed in ({}, {"generation_config": T.GenerationConfig(pad_token_id=0)}):
            before = handle.stats.drafted
            assert torch.equal(tiny_vlms.generate(model, inputs, **call, **passed), full)
            assert handle.stats.drafted > before
        drafted = handle.stats.drafted
        assert torch.equal(tiny_vlms.generate(model, inputs, **{field: None}), full)
        assert handle.stats.drafted == drafted and getattr(model.generation_config, field) == OWN[field]


def block(**more: Any) -> Any:
    """transformers' own DFlash drafter, with random weights: of `tiny_vlms.text`-sized models, layers 0 and 1."""
    torch.manual_seed(2)
    config = T.MuseGlimmerAssistantConfig(
        hidden_size=tiny_vlms.HIDDEN, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, sliding_window=9, block_size=4, mask_token_id=5, target_layer_ids=[0, 1],
        vocab_size=tiny_vlms.VOCAB, bos_token_id=1, eos_token_id=2, pad_token_id=0, **more,
    )  # fmt: skip
    return T.MuseGlimmerAssistantModel(config).eval()


@pytest.mark.parametrize("kind", ["image first", "ragged"])
@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl", NAME])
@pytest.mark.every(6)
def test_dflash(name: str, kind: str) -> None:
    """Also with several rows, on static caches and on hybrids, where stock raises."""
    model, inputs, assistant = tiny_vlms.model(name), tiny_vlms.prompt(name, kind), block()
    how: dict[str, Any] = {"assistant_model": assistant, "speculation_type": "dflash"}
    told = T.GenerationConfig(speculation_type="dflash", pad_token_id=0)
    answer = partial(tiny_vlms.generate, model, inputs)
    full = answer()
    torch.manual_seed(3)
    drawn = answer(do_sample=True)
    with mmspec.enable(model, "plain", reproducible=True) as handle:
        assert torch.equal(answer(**how), full)
        assert handle.stats.drafted == 3 * handle.stats.row_rounds  # a block, but its anchor
        torch.manual_seed(3)
        assert torch.equal(answer(do_sample=True, **how), drawn)
        config = {"assistant_model": assistant, "generation_config": told}
        assert torch.equal(answer(**config), full) and told.speculation_type == "dflash"
        assert name == NAME or torch.equal(answer(cache_implementation="static", **how), full)
        drafted = handle.stats.drafted
        assert torch.equal(answer(), full) and handle.stats.drafted == drafted
    assert len(full) > 1 or name != "llava" or torch.equal(answer(**how), full)  # stock's own
    with mmspec.enable(model, assistant, depth=2) as handle:
        assert torch.equal(answer(), full)
        assert handle.stats.drafted == 2 * handle.stats.row_rounds


def test_a_network_that_is_no_drafter_is_refused() -> None:
    model = tiny_vlms.model("llava")
    with mmspec.enable(model, "plain"), pytest.raises(mmspec.UnsupportedError, match="hidden size"):
        wrong = T.MuseGlimmerAssistantModel(T.MuseGlimmerAssistantConfig(**{**block().config.to_dict(),
                                                                            "hidden_size": 32}))  # fmt: skip
        tiny_vlms.generate(
            model, tiny_vlms.prompt("llava", "text only"), assistant_model=wrong, speculation_type="dflash"
        )


def test_an_assistants_scores_and_draws_are_the_targets() -> None:
    model, inputs = tiny_vlms.model("llava"), tiny_vlms.prompt("llava", "ragged")
    how: dict[str, Any] = {"do_sample": True, "return_dict_in_generate": True, "output_scores": True}
    torch.manual_seed(3)
    stock = tiny_vlms.generate(model, inputs, **how)
    with mmspec.enable(model, "plain", reproducible=True):
        torch.manual_seed(3)
        ours = tiny_vlms.generate(model, inputs, assistant_model=small("llava"), **how)
    assert torch.equal(ours.sequences, stock.sequences)
    assert torch.allclose(torch.stack(ours.scores), torch.stack(stock.scores), atol=1e-4)


# -- a smaller model --------------------------------------------------------------------------------------------------

OPTIONS: dict[str, dict[str, Any]] = {
    "chain": {},
    "tree": {"depth": 3, "width": 3, "size": 10},
    "drawn": {"tree": "mc_sim_7b_63", "draws": True},
    "pruned": {"prune": 0.5},
    "a pruned chain": {"prune": 0.6, "depth": 2, "width": 1},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl", NAME])
@pytest.mark.every(20)
def test_a_draft_model(name: str, options: str) -> None:
    model, draft = tiny_vlms.model(name), small(name)
    told = {"draft": draft, **OPTIONS[options]}
    for kind in ("image last", "ragged"):
        inputs = tiny_vlms.prompt(name, kind)
        assert as_stock(model, inputs, "model", **told).stats.tokens_per_target_call > 1.05
        eos = int(tiny_vlms.generate(model, inputs)[-1, inputs["input_ids"].shape[1] + 9])
        as_stock(model, inputs, "model", call={"eos_token_id": eos}, **told)
    assert type(draft) is type(fresh(name)) and type(draft.get_decoder()).__mro__[1].__module__ != "mmspec"


@pytest.mark.parametrize("name", tiny_vlms.FAMILIES)
@pytest.mark.parametrize("kind", ["ragged", "image last"])
@pytest.mark.every(4)
def test_the_target_itself_drafts_without_a_miss(name: str, kind: str) -> None:
    """It sees the same pictures at the same positions, and nothing that was refused."""
    inputs = tiny_vlms.prompt(name, kind)
    handle = as_stock(tiny_vlms.model(name), inputs, fresh(name), call={"max_new_tokens": 25}, depth=5)
    assert handle.stats.tokens_per_target_call == 6


def test_a_draft_model_in_flow() -> None:
    asked = [tiny_vlms.prompt("llava", "image first", seed=i) for i in range(5)]
    as_alone(tiny_vlms.model("llava"), asked, small("llava"), 2, {"max_new_tokens": 24, "do_sample": False})


def test_a_text_model_drafts_for_one_that_sees(tmp_path: Path) -> None:
    tiny_vlms.text().save_pretrained(tmp_path)
    as_stock(tiny_vlms.model("llava"), tiny_vlms.prompt("llava", "ragged"), "model", draft=tmp_path)


def test_several_answers_to_one_prompt() -> None:
    inputs, call = tiny_vlms.prompt("llava", "image first"), {"do_sample": True, "num_return_sequences": 3}
    as_stock(tiny_vlms.model("llava"), inputs, small("llava"), call=call, seed=3, reproducible=True)


def test_what_cannot_draft_is_refused(tmp_path: Path) -> None:
    model = tiny_vlms.model("llava")
    with pytest.raises(ValueError, match="needs draft="):
        mmspec.enable(model, "model")
    with pytest.raises(ValueError, match="no model on this machine"):
        mmspec.enable(model, "model", draft=tmp_path / "nowhere")
    with pytest.raises(ValueError, match="has 40 tokens"):
        mmspec.enable(model, T.LlamaForCausalLM(T.LlamaConfig(**{**tiny_vlms.TEXT, "vocab_size": 40})))
    with pytest.raises(ValueError, match="leave draft_vocab out"):
        mmspec.enable(model, small("llava"), draft_vocab=50)
