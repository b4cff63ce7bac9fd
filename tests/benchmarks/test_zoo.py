"""The zoo: pictures and texts agree, training resumes exactly, and the embedded model loads and captions."""

import re
from collections import Counter
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks.zoo import clips, evaluate, language, pack, qwen, score, tower, watch
from benchmarks.zoo import fit as zoo_fit
from benchmarks.zoo import vlm as zoo_vlm
from benchmarks.zoo.recipes.schedule import Schedule
from benchmarks.zoo.recipes.vlm import (
    SCENES_VIDEO,
    SCENES_VLM,
    DialogueTurn,
    Hybrid,
    Language,
    Mix,
    Vision,
    VlmRecipe,
    Watching,
    ZooStage,
)
from mmspec import zoo
from mmspec.zoo import scenes

TINY = VlmRecipe(
    "tiny",
    tuple(
        ZooStage(
            name,
            3 + place,
            Schedule(4, 2, 1e-3),
            Mix(),
            (DialogueTurn("picture", 1, 256), DialogueTurn("pair", 2, 192)),
        )
        for place, name in enumerate(("decoder", "polish", "settle"))
    ),
    vision=Vision(32, 2, 2, 64),
    language=Language(32, 2, 2, 64, 1024, 1024),
    tower=Schedule(4, 2, 1e-3),
    tokenizer_scenes=40,
)
TINY_HYBRID = replace(
    TINY, vision=Vision(32, 2, 2, 64, 16),
    language=Hybrid(32, 4, 2, 64, 1024, 1024, head=16, kv_heads=1, delta_heads=2, delta_head=8),
)  # fmt: skip
_TURNS = (DialogueTurn("clip", 3, 128), DialogueTurn("picture", 1, 256))
TINY_VIDEO = replace(
    TINY, start="tiny", stages=(ZooStage("clips", 7, Schedule(4, 2, 1e-3), SCENES_VIDEO.stages[0].mix, _TURNS),)
)


def drawn(count: int, seed: int = 11) -> list[scenes.Scene]:
    rng = np.random.default_rng(seed)
    return [scenes.draw(rng) for _ in range(count)]


@pytest.fixture(scope="module")
def tokenizer():
    return zoo_vlm.build_tokenizer(TINY)


def test_the_same_seed_draws_the_same_picture_and_text():
    for first, again in zip(drawn(5), drawn(5), strict=True):
        assert first == again
        assert scenes.render(first).tobytes() == scenes.render(again).tobytes()
        told = [language.long(np.random.default_rng(3), scene, TINY.texts) for scene in (first, again)]
        assert told[0] == told[1]


def middle_of(scene: scenes.Scene, thing: scenes.Thing) -> np.ndarray:
    """Mean (x, y) of the pixels of the thing's colour, looked for in the whole picture."""
    distance = np.abs(np.asarray(scenes.render(scene)).astype(int) - scenes.COLOURS[thing.colour]).max(-1)
    rows, columns = np.nonzero(distance < 6)
    return np.array([columns.mean(), rows.mean()])


def test_relations_hold_between_the_pixels():
    checked: Counter = Counter()
    for scene in drawn(80):
        if len(scenes.counts(scene, "colour")) < len(scene.things) or scene.background == "grainy":
            continue
        for first, second in pairwise(scene.things):
            (ax, ay), (bx, by) = middle_of(scene, first), middle_of(scene, second)
            seen = {"left of": ax < bx - 16, "right of": ax > bx + 16, "above": ay < by - 16, "below": ay > by + 16}
            assert {relation for relation, holds in seen.items() if holds} == set(scenes.relations(first, second))
            checked.update(scenes.relations(first, second))
            checked.update(scenes.relations(second, first))
    assert set(checked) == set(scenes.RELATIONS)


def test_counts_and_relations_are_consistent():
    for scene in drawn(50):
        for attribute in ("shape", "colour", "texture", "size"):
            assert sum(scenes.counts(scene, attribute).values()) == len(scene.things)
        for first in scene.things:
            for second in scene.things:
                assert bool(scenes.relations(first, second)) == (first.cell != second.cell)


@pytest.mark.parametrize("style", ["short", "long"])
def test_texts_name_what_is_in_the_scene(style):
    rng, tally = np.random.default_rng(5), Counter()
    for scene in drawn(120):
        tally += score.score_caption(getattr(language, style)(rng, scene, TINY.texts).answer, scene)
    facts = {fact for fact, _ in tally}
    assert {"object precision", "object recall", "relations", "counts", "size", "texture"} <= facts
    assert all(tally[fact, "right"] == tally[fact, "of"] for fact in facts)


def test_the_score_sees_errors():
    scene = next(s for s in drawn(50) if len(s.things) == 3)
    text, thing = language.short_caption(scene), scene.things[1]
    wrong = next(shape for shape in scenes.SHAPES if shape not in text)
    tally = score.score_caption(
        text.replace(language.full_name(thing), f"{thing.size} {thing.texture} {thing.colour} {wrong}").replace(
            "shows three", "shows four"
        ),
        scene,
    )
    assert tally["object recall", "of"] - tally["object recall", "right"] == 1
    assert tally["object precision", "of"] - tally["object precision", "right"] == 1
    assert tally["counts", "of"] - tally["counts", "right"] == 1


def test_long_descriptions_use_a_thousand_words():
    rng, used = np.random.default_rng(0), set()
    for scene in drawn(1200):
        used |= set(re.findall(r"[a-z-]+", language.long(rng, scene, TINY.texts).answer.lower()))
    assert len(used) >= 1000


def test_every_question_has_an_answer():
    rng = np.random.default_rng(1)
    for scene in drawn(40):
        for kind in language.QUESTIONS:
            exchange = language.question(rng, scene, kind)
            assert exchange.kind == kind and exchange.prompt.endswith(("?", ".")) and exchange.answer.endswith(".")
        assert language.pair_question(rng, (scene, drawn(1)[0]), TINY.texts).answer


def test_patches_are_those_of_the_image_processor():
    processor = zoo_vlm.build_processor(TINY_HYBRID, zoo_vlm.build_tokenizer(TINY_HYBRID))
    shown = drawn(2)
    theirs = processor.image_processor([scenes.render(scene) for scene in shown], return_tensors="pt")
    assert theirs["image_grid_thw"].tolist() == [[1, 12, 12]] * 2
    assert torch.equal(theirs["pixel_values"], qwen.patches(tower.pixels(shown), 8))


@pytest.mark.parametrize("recipe", [TINY, TINY_HYBRID], ids=["llava", "qwen"])
@pytest.mark.parametrize("pair", [False, True])
def test_a_packed_branch_has_the_logits_of_the_chat(recipe, pair):
    tokenizer, kind = zoo_vlm.build_tokenizer(recipe), zoo_vlm.kind(recipe)
    processor, model = zoo_vlm.build_processor(recipe, tokenizer), zoo_vlm.build_model(recipe).eval()
    rng, shown = np.random.default_rng(2), drawn(1 + pair)
    talks = [[language.any_question(rng, shown[0], TINY.texts) for _ in range(turns)] for turns in (1, 2)]
    talks.append([language.short(rng, shown[0], TINY.texts)])
    branches = [pack.branch(talk, lambda text: tokenizer.encode(text, add_special_tokens=False)) for talk in talks]
    batch = pack.pack([branches], len(shown), (scenes.SIDE // recipe.vision.patch) ** 2, 320, kind.FRAME)
    kind.branching(model, True)
    with torch.no_grad():
        packed = model.lm_head(kind.packed_hidden(model, batch, tower.pixels(shown)))[0]
    kind.branching(model, False)
    for number, talk in enumerate(talks, 1):
        chat = []
        for turn, exchange in enumerate(talk):
            pictures = [{"type": "image", "image": scenes.render(s)} for s in shown] if turn == 0 else []
            chat.append({"role": "user", "content": [*pictures, {"type": "text", "text": exchange.prompt}]})
            chat.append({"role": "assistant", "content": [{"type": "text", "text": exchange.answer}]})
        inputs = processor.apply_chat_template(chat, tokenize=True, return_dict=True, return_tensors="pt")
        own, start = batch.branches[0] == number, int((batch.branches[0] == 0).sum())
        assert inputs["input_ids"][0, start:].tolist() == batch.ids[0, own].tolist()
        with torch.no_grad():
            plain = model(**inputs).logits[0, start:]
        torch.testing.assert_close(packed[own], plain, rtol=0, atol=1e-5)


def drawn_clips(count: int, seed: int = 12) -> list[clips.Clip]:
    rng = np.random.default_rng(seed)
    return [clips.draw(rng) for _ in range(count)]


def test_frames_show_the_motion_that_the_caption_tells():
    checked: Counter = Counter()
    for clip in drawn_clips(80):
        colours = [thing.colour for thing in clip.scene.things]
        ends = [clips.at(clip, time) for time in (0.0, 1.0)]
        for number, told in enumerate(clips.read(clips.caption(clip)).told):
            if colours.count(told.colour) > 1 or clip.scene.background == "grainy":
                continue
            seen = [[t for t in scene.things if t.colour == told.colour] for scene in ends]
            checked[told.kind] += 1
            assert [len(things) for things in seen] == [told.kind != "appears", told.kind != "vanishes"]
            if all(seen):
                start, end = (middle_of(scene, things[0]) for scene, things in zip(ends, seen, strict=True))
                expected = np.array(clips.WAYS.get(told.kind, (0, 0))) * scenes.CELL * clip.motions[number].steps
                assert np.abs(end - start - expected).max() < 2 and told.cell == seen[0][0].cell
    assert set(checked) == set(clips.TOLD)


def test_cells_of_a_clip_say_what_was_there_and_what_became_of_it():
    labels, shown = watch.cell_labels(drawn_clips(60)), drawn_clips(60)
    assert set(labels[:, :, 2].unique().tolist()) == {pack.IGNORED, *range(len(watch.KINDS))} - {5}, "5: appears"
    for clip, cells in zip(shown, labels, strict=True):
        assert watch.KINDS[5] == "appears"
        first, last = ({t.cell: t for t in clips.at(clip, time).things} for time in (0.0, 1.0))
        for cell, (was, colour, went, came) in enumerate(cells.tolist()):
            thing = first.get(cell)
            assert watch.FIELDS["was"][was] == ("none" if thing is None else thing.shape)
            assert (colour == went == pack.IGNORED) if thing is None else watch.FIELDS["colour"][colour] == thing.colour
            assert (came == pack.IGNORED) == (cell not in last)
            if thing is not None and watch.KINDS[went] == "still":
                assert came == went and last[cell].shape == thing.shape


@pytest.mark.full
def test_the_stage_before_clips_learns_and_leaves_tower_and_upper_layers_alone(tmp_path: Path):
    torch.manual_seed(0)
    model = zoo_vlm.build_model(TINY)
    plan = Watching(1, (2, 4), Schedule(6, 4, 3e-3))
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    said: list[str] = []
    watch.train(replace(TINY_VIDEO, watching=plan), model, tmp_path, said.append)
    changed = {name for name, weight in model.state_dict().items() if not torch.equal(weight, before[name])}
    assert any(".layers.0." in name and "language_model" in name for name in changed)
    assert not any("vision_tower" in name or "language_model.layers.1." in name for name in changed)
    assert (tmp_path / "watching.pt").is_file() and said
    again = zoo_vlm.build_model(TINY)
    watch.train(replace(TINY_VIDEO, watching=plan), again, tmp_path, said.append)
    assert all(torch.equal(weight, again.state_dict()[name]) for name, weight in model.state_dict().items())


def test_objects_of_a_clip_never_share_a_cell():
    for clip in drawn_clips(100):
        for time in clips.moments(9):
            for first, second in combinations(clips.at(clip, time).things, 2):
                assert max(abs(first.x - second.x), abs(first.y - second.y)) > scenes.CELL - 3 * scenes.JITTER


def test_a_clip_caption_is_read_back_and_its_errors_are_seen():
    for clip in drawn_clips(60):
        assert clips.read(clips.caption(clip)) == clips.facts(clip)
        tally = score.score_clip(clips.caption(clip), clip)
        assert all(tally[fact, "right"] == tally[fact, "of"] for fact, _ in tally)
    clip = next(c for c in drawn_clips(60) if "right" in {m.kind for m in c.motions} and len(c.motions) == 3)
    wrong = score.score_clip(clips.caption(clip).replace("moves to the right", "moves to the left"), clip)
    turned = sum(motion.kind == "right" for motion in clip.motions)
    for fact, lost in (("motion", turned), ("moving", turned), ("all", 1), ("object recall", 0), ("background", 0)):
        assert wrong[fact, "of"] - wrong[fact, "right"] == lost
    assert score.score_clip("Nothing.", clip)["motion", "right"] == 0


def test_every_caption_of_a_clip_fits_into_its_turn(tokenizer):
    rng = np.random.default_rng(4)
    for turn in _TURNS:
        shown, batch = pack.draw_batch(
            TINY_VIDEO, TINY_VIDEO.stages[0].mix, turn, 8, lambda t: tokenizer.encode(t)[:], [7, 1]
        )
        assert len(shown) == 8 * turn.pictures
        assert (batch.labels != pack.IGNORED).any(1).all()
    assert len({clips.question(rng, clip).kind for clip in drawn_clips(80)}) == 5


def test_clips_are_trained_on_from_any_weights(tokenizer, tmp_path: Path):
    model = zoo_vlm.build_model(TINY)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    last = {"say": lambda line: None, "compiled": False}
    zoo_vlm.train_decoder(TINY_VIDEO, model, tokenizer, tmp_path, **last)
    assert [file.name for file in tmp_path.iterdir()] == ["clips.pt"]
    after = model.state_dict()
    changed = {name.split(".")[1] for name, weight in after.items() if not torch.equal(weight, before[name])}
    assert "language_model" in changed and "vision_tower" not in changed
    halves = zoo_vlm.build_model(TINY)
    for stop in (1, None):
        zoo_vlm.train_decoder(TINY_VIDEO, halves, tokenizer, tmp_path / "halves", stop=stop, **last)
    assert all(torch.equal(weight, after[name]) for name, weight in halves.state_dict().items())


@pytest.mark.parametrize("recipe", [TINY, TINY_HYBRID], ids=["llava", "qwen"])
@pytest.mark.every(2)
def test_training_resumes_bit_exactly(recipe, tmp_path: Path):
    ends, tokenizer, kind = [], zoo_vlm.build_tokenizer(recipe), zoo_vlm.kind(recipe)
    for folder, stops in ((tmp_path / "whole", (None,)), (tmp_path / "halves", (2, None))):
        for stop in stops:
            tower = zoo_vlm.train_tower(recipe, folder, lambda line: None, stop)
            model = zoo_vlm.build_model(recipe)
            kind.tower_of(model).load_state_dict(tower.state_dict())
        for stop in stops:
            zoo_vlm.train_decoder(recipe, model, tokenizer, folder, lambda line: None, stop=stop, compiled=False)
            ends.append(model.state_dict())
            model = zoo_vlm.build_model(recipe)
        assert zoo_fit.seconds(folder / "decoder.pt") > 0
    assert all(torch.equal(ends[0][name], ends[-1][name]) for name in ends[0])
    assert any(not torch.equal(ends[0][name], weight) for name, weight in model.state_dict().items())


def test_the_rate_warms_up_and_falls_to_nothing():
    plan = Schedule(1000, 1, 1.0, warmup=0.1, decay=0.5)
    rates = [round(zoo_fit.rate(plan, step), 2) for step in (0, 49, 99, 499, 749, 999)]
    assert rates == [0.01, 0.5, 1.0, 1.0, 0.5, 0.0]


def test_an_unknown_model_is_refused_with_the_known_ones():
    with pytest.raises(FileNotFoundError, match="no embedded model 'nothing'; choose from"):
        zoo.path("nothing")


def test_sample_pictures_are_small_and_held_out():
    files = sorted(zoo.samples().glob("*.png"))
    assert len(files) == evaluate.SAMPLES
    for file, scene in zip(files, evaluate.held_out(SCENES_VLM, len(files), stream=2), strict=True):
        assert file.stat().st_size < 20_000
        assert Image.open(file).convert("RGB").tobytes() == scenes.render(scene).tobytes()


@pytest.mark.skipif(
    not (zoo.weights() / "scenes-video" / "config.json").is_file(),
    reason="the weights of scenes-video are not here; train them with `make zoo ARGS=scenes-video`",
)
def test_the_embedded_model_captions_held_out_scenes():
    from transformers import AutoModelForImageTextToText, AutoProcessor

    folder = zoo.path("scenes-video")
    processor = AutoProcessor.from_pretrained(folder)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    shown = evaluate.held_out(SCENES_VLM, 4, stream=2)
    texts, tokens = evaluate.answer(model, processor, [([scene], zoo.PROMPTS["short"]) for scene in shown])
    tally = sum((score.score_caption(text, scene) for text, scene in zip(texts, shown, strict=True)), Counter())
    assert tokens > 25
    assert tally["object recall", "right"] >= 0.8 * tally["object recall", "of"]
    assert sum(file.stat().st_size for file in folder.iterdir()) < 26_000_000
