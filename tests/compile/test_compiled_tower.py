"""`compile=True`: pictures of a shape that comes up again are read by a capture of the vision tower, to the same."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import tiny_vlms
import torch
import uncompiled
from compared import as_stock

import mmspec
from mmspec.compile import version
from mmspec.pipelines.target import captured_prompt, captured_tower
from tests.compile.test_compiled_prompt import SIX, pictures, same


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Towers alone are captured."""
    uncompiled.pieces(monkeypatch, forwards=False, prompts=True)
    monkeypatch.setattr(captured_prompt, "reader", lambda *told: None)


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    return uncompiled.encodings(monkeypatch)


@pytest.mark.parametrize("name", tiny_vlms.FAMILIES)
@pytest.mark.every(3)
def test_a_shape_that_comes_up_again_is_replayed(name: str, replays: list[int]):
    calls = pictures(name)
    same(tiny_vlms.model(name), *calls)
    assert len(replays) == len(calls) - captured_prompt.AGAIN


def test_the_features_are_those_of_the_tower(replays: list[int]):
    model, (one, *_) = tiny_vlms.model("qwen3_5"), pictures("qwen3_5", 1)
    given = {name: one[name] for name in ("pixel_values", "image_grid_thw")}
    found = []
    for _ in range(4):
        with torch.no_grad(), captured_tower.encoding(model):
            found.append(model.model.get_image_features(**given, return_dict=True).pooler_output)
    assert len(replays) == 2
    for features in found[1:]:
        torch.testing.assert_close(torch.cat(list(features)), torch.cat(list(found[0])), rtol=1e-5, atol=1e-5)


def test_without_compile_or_a_repeated_shape_the_tower_reads_by_itself(replays: list[int]):
    as_stock(tiny_vlms.model("llava"), pictures("llava"), "ngram", call=SIX)
    same(tiny_vlms.model("llava"), *pictures("llava", 1), *pictures("llava", 1, "text only"))
    assert not replays


def test_other_grids_of_as_many_patches_are_captured_apart(replays: list[int]):
    model, calls = tiny_vlms.model("qwen3_vl"), pictures("qwen3_vl", 3)
    turned = []
    for call in calls:
        grid = call["image_grid_thw"]
        turned.append({**call, "image_grid_thw": grid[:, [0, 2, 1]]})
        assert not torch.equal(turned[-1]["image_grid_thw"], grid)
    same(model, *calls, *turned)
    assert len(replays) == 2


def test_a_tower_that_attends_by_itself_is_not_captured(replays: list[int]):
    model = copy.deepcopy(tiny_vlms.model("llava"))
    model.get_encoder(modality="image").set_attn_implementation("eager")
    same(model, *pictures("llava"))
    assert not replays


def test_two_models_share_a_tower(replays: list[int]):
    calls = pictures("qwen2_5_vl", 5)
    one, two = (copy.deepcopy(tiny_vlms.model("qwen2_5_vl")) for _ in range(2))
    stock = [tiny_vlms.generate(one, call, **SIX) for call in calls]
    two.model.visual = one.model.visual
    with mmspec.enable(one, "ngram", compile=True), mmspec.enable(two, "ngram", compile=True):
        for call, want in zip(calls, stock, strict=True):
            assert all(torch.equal(tiny_vlms.generate(model, call, **SIX), want) for model in (one, two))
    assert len(replays) == 2 * (len(calls) - captured_prompt.AGAIN)


def test_a_tower_is_taken_away_and_put_back(replays: list[int]):
    calls, model = pictures("qwen2_5_vl", 3), copy.deepcopy(tiny_vlms.model("qwen2_5_vl"))
    first, other = model.model.visual, copy.deepcopy(model.model.visual)
    torch.nn.init.normal_(next(other.parameters()))
    with mmspec.enable(model, "ngram", compile=True):
        for tower in (first, other, first):
            model.model.visual = tower
            got = [tiny_vlms.generate(model, call, **SIX) for call in calls]
            with mmspec.enable(copy.deepcopy(model), "plain") as plain:
                assert all(map(torch.equal, got, [tiny_vlms.generate(plain.model, call, **SIX) for call in calls]))
    assert replays


def test_a_call_with_pictures_reads_the_model_s_version_once(monkeypatch: pytest.MonkeyPatch):
    reads: list[Any] = []
    latest = version._latest
    monkeypatch.setattr(version, "_latest", lambda root: (reads.append(root), latest(root))[1])
    model, (one, *_) = tiny_vlms.model("qwen3_5"), pictures("qwen3_5", 1)
    with mmspec.enable(model, "ngram", compile=True):
        reads.clear()
        tiny_vlms.generate(model, one, max_new_tokens=6)
    assert reads == [model]
