"""A MAR on the command line and on the demo's page: real runs on a tiny pipeline."""

from __future__ import annotations

import argparse
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_mar as tiny
from PIL import Image

from mmspec.app import generate, mar
from mmspec.app.demo import command as demo
from mmspec.app.demo import image_tab, image_view, records
from mmspec.app.demo.desk import Desk, RefusedError
from mmspec.app.demo.easel import CSPD, ITSELF, SMALLER, Studio, Wish
from mmspec.app.demo.race import DONE, STOPPED, TIMED_OUT

VISIT: Any = SimpleNamespace(session_hash="me")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mar")
    tiny.pipeline().save_pretrained(path)
    tiny.transformer(2).save_pretrained(path / "draft")
    return path


@pytest.fixture(scope="module")
def studio() -> Studio:
    return Studio(mar.MarSubject(tiny.pipeline(), tiny.transformer(2)))


def run(folder: Path, *words: object) -> int:
    parser = argparse.ArgumentParser()
    generate.configure(parser)
    return generate.run(parser.parse_args([*map(str, words), "--device", "cpu", "--model", str(folder)]))


# -- mmspec generate --------------------------------------------------------------------------------------------------


def test_classes_by_name_and_number(folder, tmp_path, capsys):
    assert run(folder, "blue star", "3", "--images", 2, "-o", tmp_path / "out") == 0
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["0000-blue-star.png", "0001-blue-star.png", "0002-3.png", "0003-3.png"]
    told = capsys.readouterr().out
    assert "4 pictures in" in told and "head evaluations" in told
    assert run(folder, "1", "--drafter", "none", "--compare", "-o", tmp_path / "one.png") == 0
    assert capsys.readouterr().out.count("16.0 passes per batch") == 2
    draft = ["--drafter", folder / "draft", "--window", 3, "--grid", "-o", tmp_path / "grid.png"]
    assert run(folder, "red circle", "4", *draft) == 0
    with Image.open(tmp_path / "grid.png") as sheet:
        assert sheet.size[1] > 2 * 16


def test_what_is_drawn_instead_of_the_published_sampler_is_told(tmp_path, capsys):
    pipe = tiny.pipeline(final_noise=False, skip_terminal=False)
    pipe.register_to_config(defaults={"num_inference_steps": 4, "num_diffusion_steps": 9})
    pipe.save_pretrained(tmp_path / "model")
    tiny.transformer(2).save_pretrained(tmp_path / "draft")
    bent = ["--rule", "cspd", "--drafter", tmp_path / "draft"]
    singly, noise = "one token per iteration, not 16 in 4", "noise at the last denoising step"
    for words, notes, out in (
        (["--drafter", "none"], [], "4.0 passes per batch"),
        ([], [singly, noise], "head evaluations"),
        (bent, [], "not lossless: cspd(width=42) changes the distribution"),
        (bent, [], "; 1.0 passes per batch"),
        ([*bent, "--enable", "prefill=0.5"], [], "; 4.0 passes per batch"),  # ⌊0.5 · 4⌋ + 1 of 4, then a block
    ):
        assert run(tmp_path / "model", "1", *words, "-o", tmp_path / "one.png") == 0
        said = capsys.readouterr()
        assert [note for note in (singly, noise) if note in said.err] == notes and out in said.out
    assert run(tmp_path / "model", "1", "2", *bent, "--compare", "--grid", "-o", tmp_path / "two.png") == 0
    assert "same distribution" not in capsys.readouterr().out
    with Image.open(tmp_path / "two.png") as sheet:
        assert sheet.size[1] > 4 * 16  # plain rows below


@pytest.mark.parametrize(("words", "why"), [
    (["teapot"], "by name or by number from 0 to 4; 'teapot' is none. Choose from red circle, blue star"),
    (["5"], "'5' is none"),
    (["1", "--top-k", 0], "--top-k is for models that draw token ids"),
    (["1", "--reproducible"], "reproducible is for models that draw token ids; this one is a MAR, which takes window"),
    (["1", "--enable", "depth=3"], "depth is for models"),
    (["1", "--window", 0], "ahead must be a whole number ≥ 1"),
    (["1", "--drafter", "none", "--window", 4], "need a drafter"),
    (["1", "--rule", "lantern"], "rule must be one of gaussian_path, cspd"),
    (["1", "--drafter", "nowhere"], "nowhere"),
])  # fmt: skip
def test_bad_input_says_why(folder, words, why, tmp_path, capsys):
    assert run(folder, *words, "-o", tmp_path / "x.png") == 1
    assert why in capsys.readouterr().err and not list(tmp_path.iterdir())


# -- the demo ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [ITSELF, SMALLER, CSPD])
def test_two_pictures_side_by_side(studio, mode):
    *_, two = studio.run(Wish("blue star", mode, 3, prefill=0.2, seed=5, guidance=1.5), threading.Event())
    assert two.over and two.plain.state == two.fast.state == DONE and two.speed_up > 0
    assert len(two.plain.calls) == 16 == two.fast.count and all(two.fast.at) and two.fast.image is not None
    assert len(two.fast.calls) <= image_view.forwards(two.fast) == two.fast.result.work["passes"] < 17
    assert two.plain.result.stats == {} and two.fast.result.stats["tested"] > 0
    assert image_view.stage(two, marked=False).count("16 of 16 tokens drawn") == 2
    assert f"{two.fast.result.work['rows']:,}" in image_view.figures(two)
    measured = {"cspd-3": {"n": 128, "fd_all": 7.3, "noise": 9.8, "fd_real": 20.4}}
    said = image_view.headline(two, measured)
    assert ("lossless" in said) == ("keeps the distribution" in said) == (mode != CSPD)
    assert ("mm-lossy" in said) == ("Fréchet distance 7.3 to plain drawing" in said) == (mode == CSPD)
    assert "no record" in image_view.headline(two, {}) or mode != CSPD
    assert f"16 → {two.fast.result.work['passes']}" in said or mode == CSPD
    assert ("mm-gain" in said) == (two.speed_up >= 1)
    assert two.fewer[0] == 4 and "Plain drawing in 4 forwards" in said  # what such models are drawn with otherwise


def test_a_run_can_be_stopped(studio):
    stop = threading.Event()
    looks = studio.run(Wish("0", ITSELF), stop)
    next(looks)
    stop.set()
    *_, two = looks
    assert two.plain.state == two.fast.state == STOPPED and "nothing to compare" in image_view.headline(two, {})
    *_, late = Studio(studio.subject, time_limit=0.0).run(Wish("0", ITSELF), threading.Event())
    assert late.plain.state == TIMED_OUT


@pytest.mark.parametrize(
    ("wish", "why"),
    [
        (Wish("teapot", ITSELF), "'teapot' is none"),
        (Wish("0", "magic"), "choose from exact, own drafts; exact, drafts of a smaller MAR"),
        (Wish("0", ITSELF, 99), "between 1 and 16"),
        (Wish("0", ITSELF, prefill=1.5), "between 0 and 1"),
    ],
)
def test_a_wish_that_is_not_drawn_says_why(studio, wish, why):
    with pytest.raises(RefusedError, match=why):
        list(studio.run(wish, threading.Event()))


def test_the_tabs_events(studio):
    tab = image_tab.Image(studio, Desk())
    assert len(tab.begin(VISIT)) == 5
    *_, (summary, stage, _) = tab.run(VISIT, "red circle", ITSELF, 4, 0.1, 7, 2.0)
    assert "same distribution" in summary and stage.count('src="data:image/png;base64,') == 2
    (refused,) = tab.run(VISIT, "red circle", "magic", 4, 0.1, 7, 2.0)
    assert 'role="alert"' in refused[0]


def test_the_tab_is_there_where_the_model_is(folder, tmp_path):
    parser = argparse.ArgumentParser()
    demo.configure(parser)
    args = parser.parse_args(["--image-model", str(folder), "--device", "cpu"])
    bench = records.read(tmp_path)
    found = demo._classes(args, bench)
    assert found.methods == [ITSELF] and demo._pictures(args) is None
    assert demo._classes(parser.parse_args(["--image-model", "none"]), bench) is None
