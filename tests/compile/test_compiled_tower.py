"""`compile=True`: pictures of a shape that comes up again are read by a capture of the vision tower, to the same."""

from __future__ import annotations

import copy
import warnings
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import tiny_vlms
import torch

import mmspec
from mmspec.compile import capture, capture_cache, version
from mmspec.pipelines.target import captured_prompt, captured_tower, captures


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Towers alone are captured, and their pieces run as they are; nothing is known of any model."""
    monkeypatch.setattr(capture, "inductor", lambda piece, examples: piece)
    monkeypatch.setattr(captures.Forward, "read", lambda self, target, *told: target.read(*told))
    monkeypatch.setattr(captured_prompt, "reader", lambda *told: None)
    for module in (capture_cache, captured_tower):
        monkeypatch.setattr(module, "_OF", WeakKeyDictionary())
    warnings.simplefilter("error", UserWarning)


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """An entry for each time that a capture has read pictures."""
    found: list[int] = []
    of = captured_tower._TowerOutput.of
    monkeypatch.setattr(
        captured_tower._TowerOutput, "of", lambda output, tensors: (found.append(1), of(output, tensors))[1]
    )
    return found


def pictures(name: str, count: int = 4, kind: str = "image first") -> list[dict[str, Any]]:
    """Prompts of the same shape, whose pictures differ."""
    return [tiny_vlms.prompt(name, kind, picture_seed=seed) for seed in range(count)]


def same(model: Any, *calls: dict[str, Any], **options: Any) -> None:
    """Calls of an enabled model give what they give without."""
    wanted = [tiny_vlms.generate(model, inputs, max_new_tokens=6) for inputs in calls]
    with mmspec.enable(model, "ngram", **{"compile": True, **options}):
        for inputs, want in zip(calls, wanted, strict=True):
            assert torch.equal(tiny_vlms.generate(model, inputs, max_new_tokens=6), want)


@pytest.mark.parametrize("name", tiny_vlms.FAMILIES)
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
    same(tiny_vlms.model("llava"), *pictures("llava"), compile=False)
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


def test_weights_that_were_written_to_are_read(replays: list[int]):
    model, calls = copy.deepcopy(tiny_vlms.model("llava")), pictures("llava", 3)
    same(model, *calls)
    for weight in model.get_encoder(modality="image").parameters():
        weight.data = weight.data.roll(1, 0)
    same(model, *calls)
    assert replays


def test_hooks_see_the_pictures(replays: list[int]):
    model, calls, seen = copy.deepcopy(tiny_vlms.model("llava")), pictures("llava", 3), list[int]()
    same(model, *calls)
    layer = next(m for m in model.get_encoder(modality="image").modules() if isinstance(m, torch.nn.LayerNorm))
    handle = layer.register_forward_hook(lambda module, told, out: seen.append(told[0].shape[1]))
    before = len(replays)
    same(model, calls[0])
    handle.remove()
    assert seen and len(replays) == before


def test_a_tower_that_attends_by_itself_is_not_captured(replays: list[int]):
    model = copy.deepcopy(tiny_vlms.model("llava"))
    model.get_encoder(modality="image").set_attn_implementation("eager")
    same(model, *pictures("llava"))
    assert not replays


def test_a_call_with_pictures_reads_the_model_s_version_once(monkeypatch: pytest.MonkeyPatch):
    reads: list[Any] = []
    latest = version._latest
    monkeypatch.setattr(version, "_latest", lambda root: (reads.append(root), latest(root))[1])
    model, (one, *_) = tiny_vlms.model("qwen3_5"), pictures("qwen3_5", 1)
    with mmspec.enable(model, "ngram", compile=True):
        reads.clear()
        tiny_vlms.generate(model, one, max_new_tokens=6)
    assert reads == [model]
