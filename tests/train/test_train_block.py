"""Training a block drafter: its blocks are those that decode, anchors are drawn, heads learn, the command runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_llava
import torch

import mmspec
from benchmarks.zoo.recipes.drafters import DRAFTERS
from mmspec.app.train import train
from mmspec.drafters.dflash import BlockDrafter
from mmspec.pipelines.teacher import Teacher
from mmspec.pipelines.untrained import build, check_block, layers_read
from mmspec.train.data import hold_out, read
from mmspec.train.objective import _anchors, losses
from mmspec.train.recipes import RECIPES
from tests.drafters.test_block import BLOCK, INFO, MADE, MASK, H, Table, put, rounds


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("questions")
    return tiny_llava.listed(folder, tiny_llava.noise(folder, 10))


@pytest.mark.parametrize("name", ["dflash", "sliding", "dflash2", "dspark"])
def test_blocks_in_training_are_those_that_decode(tmp_path, name):
    """Row 13 of a text, among other anchors, foretells what a round after the same features drafts from."""
    drafter, target = mmspec.load_drafter(put(tmp_path, *MADE[name][1]()), target=INFO).fit(INFO, {}), Table()
    features, embeds = torch.randn(1, 20, 2 * H), torch.randn(1, 20, H)
    embeds[0, 14] = target.table[7]
    rows = torch.zeros(1, 20, dtype=torch.bool).index_fill_(1, torch.tensor([4, 14, 17]), True)
    valid, steps = torch.ones_like(rows), drafter.config.most
    learnt = drafter(embeds, features, valid.long(), valid, steps, 0, rows, target.table[MASK])
    assert len(learnt) == steps == BLOCK - (not drafter.config.anchored)
    [decoded] = rounds(drafter, features[:, :15], [1], target)
    torch.testing.assert_close(torch.stack([z[0, 14] for z in learnt]), decoded[0], atol=1e-4, rtol=1e-3)
    assert all((z[0, 5] == 0).all() for z in learnt)


def test_anchors():
    rows = torch.rand(3, 50) < 0.7
    for drawn in (True, False):
        found = _anchors(rows, 8, drawn)
        assert (found.sum(1) == 8).all() and (rows | ~found).all()
    assert not torch.equal(_anchors(rows, 8, True), _anchors(rows, 8, True))
    assert torch.equal(_anchors(rows, 99, True), rows)


def test_layers_that_are_read():
    assert layers_read(36, 5) == (2, 10, 18, 26, 34)
    assert layers_read(3, 5) == (2,)
    assert layers_read(8, 1) == (5,)


def test_a_drafter_of_one_layer_reads_as_many_of_the_targets():
    deep = tiny_llava.model()
    decoder = deep.get_decoder()
    decoder.layers = torch.nn.ModuleList(decoder.layers[0] for _ in range(24))
    assert build("dflash", deep, layers=1).features == layers_read(24, 5) == (2, 7, 12, 17, 22)


def test_the_recipe_of_the_zoo_fits_its_drafter_and_its_size():
    recipe = DRAFTERS["scenes-video-block"]
    made = build(recipe.method, tiny_llava.model(), **recipe.whole_shape)
    check_block(made, RECIPES[recipe.recipe])
    assert RECIPES[recipe.recipe].unroll == made.config.most == recipe.drafts.depth
    whole = {"hidden": 192, "heads": 3, "kv_heads": 3, "head_dim": 64, "vocab": 2048}
    assert 2 * sum(p.numel() for p in BlockDrafter(replace(made.config, **whole)).parameters()) <= 2**21


def test_the_mask_is_a_token_that_has_an_embedding():
    """A padding token's is often zero; then no row of a block could tell where it stands."""
    model = tiny_llava.model()
    table = model.get_input_embeddings().weight
    assert not table[0].any() and build("dflash", model).config.mask_token == tiny_llava.IMAGE_TOKEN
    with pytest.raises(ValueError, match="--shape mask_token=ID"):
        build("dflash", model, mask_token=0)
    with torch.no_grad():
        table[0] = 0.1
    assert build("dflash", model).config.mask_token == 0


@pytest.mark.parametrize("method", ["dflash", "dspark"])
def test_it_learns_and_drafts(tmp_path, questions, method):
    torch.manual_seed(0)
    model, processor = tiny_llava.model(), tiny_llava.processor()
    recipe = RECIPES[method].with_(
        steps=4, batch=4, unroll=3, held_out=3, max_new_tokens=12, muon=True, lr=3e-3, anchors=3
    )
    shape = {"intermediate": 32, "block": 4, "layers": 2} | ({"markov_rank": 8} if method == "dspark" else {})
    made = train(model, processor, method, str(questions), tmp_path, recipe, shape=shape)
    assert isinstance(made, BlockDrafter) and made.config.sequential is (method == "dspark")
    assert json.loads((tmp_path / "report.json").read_text())["method"] == method
    mmspec.save_drafter(mmspec.load_drafter(tmp_path / "drafter"), tmp_path / "theirs", layout="dflash")
    mmspec.enable(model, drafter=tmp_path / "theirs").disable()


@pytest.mark.parametrize("method", ["dflash", "dspark"])
@pytest.mark.every(2)
def test_it_learns_texts_by_heart(tmp_path, questions, method):
    """After 200 steps on the same few answers, all rows of a block foretell the tokens at their own places."""
    model, processor = tiny_llava.model(), tiny_llava.processor()
    recipe = RECIPES[method].with_(
        steps=200, batch=7, unroll=4, held_out=3, max_new_tokens=12, muon=True, lr=1e-2, floor=0.1, sampled=0.0
    )
    shape = {"intermediate": 64, "layers": 1, "block": 5} | ({"markov_rank": 8} if method == "dspark" else {})
    made = train(model, processor, method, str(questions), tmp_path, recipe, shape=shape)
    with Teacher(model, processor, made.features) as teacher:
        everything = read(str(questions))
        held = hold_out(everything, recipe.held_out, recipe.seed)
        samples = [sample for i, sample in enumerate(everything) if i not in held]
        trace = teacher.trace(samples, teacher.answers(samples, recipe.max_new_tokens, 0.0))
        agree = losses(made, made, teacher, trace, recipe)[1]
    assert agree.float().mean(1).min() > 0.9


@pytest.mark.parametrize(
    ("change", "shape", "reason"),
    [
        ({"unroll": 9}, {}, "learns at most 3 steps"),
        ({"rollouts": 1}, {}, "no rollouts"),
        ({}, {"selector_rank": 4}, "cannot be trained here"),
        ({}, {"markov_rank": 4, "markov": "rnn"}, "cannot be trained here"),
    ],
)
def test_what_cannot_be_trained(tmp_path, questions, change, shape, reason):
    model, processor = tiny_llava.model(), tiny_llava.processor()
    recipe = replace(RECIPES["dflash"], **{"steps": 2, "unroll": 3, **change})
    with pytest.raises(ValueError, match=reason):
        train(model, processor, "dflash", str(questions), tmp_path, recipe, shape={"block": 4, **shape})
