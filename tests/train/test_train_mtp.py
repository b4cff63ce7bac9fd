"""Training a multi-token-prediction head: what it learns is what decodes, and its file is as a checkpoint holds it."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import published_mtp
import pytest
import tiny_vlms
import torch
from safetensors.torch import load_file

import mmspec
from benchmarks.zoo import vlm
from benchmarks.zoo.recipes.vlm import SCENES_HYBRID, Hybrid, Vision
from mmspec.app.train import train
from mmspec.pipelines.drafters.mtp import MtpDrafter
from mmspec.train.recipes import RECIPES

TINY = replace(
    SCENES_HYBRID, tokenizer_scenes=40, vision=Vision(width=24, layers=1, heads=2, feed_forward=32),
    language=Hybrid(
        width=32, layers=4, heads=2, feed_forward=32, head=16, delta_heads=2, delta_head=8, vocabulary=400
    ),
)  # fmt: skip


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tiny Qwen3.5 in a folder of its own, as loaded from there, with its processor."""
    folder = tmp_path_factory.mktemp("hybrid")
    processor = vlm.build_processor(TINY, vlm.build_tokenizer(TINY))
    vlm.export(tiny_vlms.enlarged(vlm.build_model(TINY)), processor, folder)
    model = type(vlm.build_model(TINY)).from_pretrained(folder, dtype=torch.float32)
    return model, processor


@pytest.mark.parametrize("kind", ["image first", "several images"])
def test_steps_in_training_are_those_that_decode(kind: str, tmp_path: Path) -> None:
    """Step i at a row says what a chain drafts i tokens later, as long as the chain before is the text itself."""
    model, inputs = copy.deepcopy(tiny_vlms.model("qwen3_5")), tiny_vlms.prompt("qwen3_5", kind)
    heads = published_mtp.qwen_heads(model)
    published_mtp.agreeing(model, heads)
    published_mtp.shipped(model, tmp_path, heads)
    with mmspec.enable(model, "mtp", depth=4) as handle:
        drafter, drafts = handle.drafter, published_mtp.drafts_of(handle.drafter)
        whole = tiny_vlms.generate(model, inputs)
    embeds, features, positions = published_mtp.read_at_once(model, inputs, whole)
    valid, places = torch.ones_like(whole, dtype=torch.bool), positions.movedim(0, -1)[:, :-1]
    with torch.no_grad():
        steps = drafter(embeds[:, 1:], features[:, :-1], valid.long(), valid[:, :-1], 4, positions=places)
        said = torch.stack([model.lm_head(z)[0].argmax(-1) for z in steps])
    compared = 0
    for (text,), (chain,) in drafts:
        n = len(text)
        for i, token in enumerate(chain):
            if chain[:i] != whole[0, n : n + i].tolist() or n - 2 + i >= whole.shape[1] - 2:
                break
            assert int(said[i, n - 2]) == token
            compared += i > 0
    assert compared > 3


def test_it_learns_is_written_and_drafts(hybrid: Any, tmp_path: Path) -> None:
    model, processor = hybrid
    recipe = RECIPES["mtp"].with_(steps=6, batch=4, held_out=3, max_new_tokens=12, muon=True, lr=3e-3, unroll=3)
    made = train(model, processor, "mtp", "scenes:9", tmp_path, recipe)
    assert isinstance(made, MtpDrafter)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["method"] == "mtp"
    written = load_file(tmp_path / "drafter" / "model.safetensors")
    assert {"mtp.fc.weight", "mtp.norm.weight", "mtp.layers.0.self_attn.q_proj.weight"} <= set(written)
    chat = [{"role": "user", "content": [{"type": "text", "text": "Describe this image."}]}]
    inputs = processor.apply_chat_template(
        [chat], add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )
    stock = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    with mmspec.enable(model, tmp_path / "drafter") as handle:
        assert isinstance(handle.drafter, MtpDrafter)
        for name, weight in made.heads.state_dict().items():
            assert torch.equal(handle.drafter.heads.state_dict()[name], weight)
        assert torch.equal(model.generate(**inputs, max_new_tokens=24, do_sample=False), stock)


def test_a_head_has_the_targets_shape(hybrid: Any, tmp_path: Path) -> None:
    model, processor = hybrid
    with pytest.raises(ValueError, match="in its shape; leave --shape out"):
        train(model, processor, "mtp", "scenes:9", tmp_path, RECIPES["mtp"], shape={"intermediate": 8})


def test_several_heads_are_not_trained(tmp_path: Path) -> None:
    model = copy.deepcopy(tiny_vlms.model("qwen3_5"))
    published_mtp.shipped(model, tmp_path, published_mtp.qwen_heads(model, 3))
    drafter = MtpDrafter.untrained(model)
    x = torch.zeros(1, 3, drafter.config.hidden)
    valid = torch.ones(1, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match="only a single head with full attention"):
        drafter(x, x, valid.long(), valid, 1, positions=valid.long()[..., None])
