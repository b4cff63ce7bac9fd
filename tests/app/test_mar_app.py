"""A MAR on the command line and on the demo's page: real runs on a tiny pipeline."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import tiny_mar as tiny

from mmspec.app.demo import command as demo
from mmspec.app.demo import image_tab
from mmspec.app.demo.images import CSPD, OWN_DRAFTS, SMALL_DRAFTS, Drawing, MarRace
from mmspec.app.demo.race import DONE, MODELS, TIMED_OUT
from mmspec.app.image_model import MarSubject
from tests.app import test_generate_image


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mar")
    tiny.pipeline().save_pretrained(path)
    tiny.transformer(2).save_pretrained(path / "draft")
    return path


@pytest.fixture(scope="module")
def race() -> MarRace:
    return MarRace(MarSubject(tiny.pipeline(), tiny.transformer(2)))


def run(folder: Path, *words: object) -> int:
    return test_generate_image.run("--model", folder, *words)


# -- mmspec generate --------------------------------------------------------------------------------------------------


def test_classes_by_name_and_number(folder, tmp_path, capsys):
    assert run(folder, "blue star", "3", "--images", 2, "-o", tmp_path / "out") == 0
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["0000-blue-star.png", "0001-blue-star.png", "0002-3.png", "0003-3.png"]
    told = capsys.readouterr().out
    assert "4 pictures in" in told and "head evaluations" in told
    assert run(folder, "1", "--drafter", "none", "--compare", "-o", tmp_path / "one.png", "--overwrite") == 0
    assert capsys.readouterr().out.count("16.0 passes per batch") == 2
    draft = ["--drafter", folder / "draft", "--enable", "ahead=3", "-o", tmp_path / "drafted"]
    assert run(folder, "red circle", "4", *draft) == 0 and len(list((tmp_path / "drafted").iterdir())) == 2


def test_what_is_drawn_instead_of_the_published_sampler_is_told(tmp_path, capsys):
    pipe = tiny.pipeline(final_noise=False, skip_terminal=False)
    pipe.register_to_config(defaults={"num_inference_steps": 4, "num_diffusion_steps": 9})
    pipe.save_pretrained(tmp_path / "model")
    tiny.transformer(2).save_pretrained(tmp_path / "draft")
    bent = ["--drafter", tmp_path / "draft", "--enable", "rule=cspd"]
    singly, noise = "one token per iteration, not 16 in 4", "noise at the last denoising step"
    for words, notes, out in (
        (["--drafter", "none"], [], "4.0 passes per batch"),
        ([], [singly, noise], "head evaluations"),
        (bent, [], "not lossless: cspd changes the distribution"),
        (bent, [], "; 1.0 passes per batch"),
        ([*bent, "prefill=0.5"], [], "; 4.0 passes per batch"),  # ⌊0.5 · 4⌋ + 1 of 4, then a block
    ):
        assert run(tmp_path / "model", "1", *words, "-o", tmp_path / "one.png", "--overwrite") == 0
        said = capsys.readouterr()
        assert [note for note in (singly, noise) if note in said.err] == notes and out in said.out
    assert run(tmp_path / "model", "1", "2", *bent, "--compare", "-o", tmp_path / "two") == 0
    assert "same distribution" not in capsys.readouterr().out


@pytest.mark.parametrize(("words", "why"), [
    (["teapot"], "by name or by number from 0 to 4; 'teapot' is none. Choose from red circle, blue star"),
    (["5"], "'5' is none"),
    (["1", "--top-k", 0], "--top-k is for models that draw token ids"),
    (["1", "--enable", "depth=3"], "speculation has no setting 'depth'"),
    (["1", "--drafter", "none", "--enable", "ahead=4"], "needs a drafter"),
    (["1", "--drafter", "nowhere"], "cannot load the draft nowhere"),
    (["1", "--enable", "draft=nowhere"], "cannot load the draft nowhere"),
    (["1", "--enable", "draft=scenes-mar-draft"], "a draft must have the model's"),
])  # fmt: skip
def test_bad_input_says_why(folder, words, why, tmp_path, capsys):
    assert run(folder, *words, "-o", tmp_path / "x.png") == 1
    assert why in capsys.readouterr().err and not list(tmp_path.iterdir())


# -- the demo ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [OWN_DRAFTS, SMALL_DRAFTS, CSPD])
def test_two_pictures_side_by_side(race, method):
    drawing = Drawing(prompt="blue star", method=method, window=3, seed=5, guidance=1.5)
    *_, two = race.run(race.pair(drawing))
    assert two.over and two.plain.state == two.fast.state == DONE and two.speed_up > 0
    assert len(two.plain.calls) == 16 == two.fast.count and all(two.fast.at) and two.fast.image is not None
    assert len(two.fast.calls) <= two.fast.forwards == two.fast.result.work["passes"] < 17
    assert two.plain.result.stats == {} and two.fast.result.stats["tested"] > 0
    stage = image_tab.show_pictures(two)
    assert stage.count("16 of 16 tokens drawn") == 2 and "mm-call" not in stage
    assert f"16 tokens in {two.fast.forwards} forwards" in stage
    said = image_tab.show_headline(two)
    assert ("lossless" in said) == ("keeps the distribution" in said) == (method != CSPD)
    assert ("mm-lossy" in said) == ("does not bound the distortion" in said) == (method == CSPD)
    assert f"16 → {two.fast.result.work['passes']}" in said or method == CSPD
    assert ("mm-gain" in said) == (two.speed_up >= 1)


def test_a_run_can_be_stopped(race):
    two = race.pair(Drawing(prompt="0", method=OWN_DRAFTS))
    looks = race.run(two)
    next(looks)
    looks.close()
    MODELS.submit(int).result()
    assert not two.over and "nothing to compare" in image_tab.show_headline(two)
    late = MarRace(race.subject, time_limit=0.0)
    *_, two = late.run(late.pair(Drawing(prompt="0", method=OWN_DRAFTS)))
    assert two.plain.state == TIMED_OUT


VALUES = {"prompt": "red circle", "method": OWN_DRAFTS, "window": 4, "seed": 7, "guidance": 2.0}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"prompt": "teapot"}, "&#x27;teapot&#x27; is none"),
        ({"window": 99}, "window: Input should be less than or equal to 64."),
    ],
)
def test_a_picture_that_is_not_drawn_says_why(race, change, why):
    *_, refused = image_tab.run(race, *{**VALUES, **change}.values())
    assert 'role="alert"' in refused[0] and why in refused[0]


def test_the_tabs_events(race):
    *_, (summary, stage) = image_tab.run(race, *VALUES.values())
    assert "same distribution" in summary and stage.count('src="data:image/png;base64,') == 2


def test_the_tab_is_there_where_the_model_is(folder):
    parser = argparse.ArgumentParser()
    demo.configure(parser)
    tabs = demo.load_images(parser.parse_args(["--image-model", str(folder), "--device", "cpu"]))
    assert list(tabs) == ["Image"] and tabs["Image"].args[0].methods == [OWN_DRAFTS]
    assert demo.load_images(parser.parse_args(["--image-model", "none"])) == {}
