"""verify: the same tokens with one picture and with another, what differs and where, and calls that make no sense."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import clips
import pytest
import tiny_llamagen
import tiny_llava
import tiny_vlms
import torch
from PIL import Image

import mmspec
from mmspec.app import cli
from mmspec.pipelines.families.decoder_only import DecoderOnly
from mmspec.pipelines.serving.verify import _first_difference


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tiny_llava.save(tmp_path_factory.mktemp("tiny"))
    Image.new("RGB", (28, 28), (200, 40, 90)).save(place / "photo.png")
    return place


def verify(folder: Path, *words: object) -> int:
    base = ["verify", folder / "photo.png", "--model", folder, "--drafter", "ngram", "--device", "cpu"]
    return cli.main([str(word) for word in (*base, *words)])


def test_identical_and_the_picture_matters() -> None:
    model, inputs = tiny_llava.model(), tiny_vlms.prompt("llava", "image first", 0)
    with mmspec.enable(model):
        report = mmspec.verify(model, inputs, 12)
    assert (report.ok, report.image_matters, report.tokens, report.rows) == (True, True, 12, 1)
    assert "identical to stock generate on 1 of 1 rows; another picture changes the answer" in str(report)


def test_what_a_model_is_configured_to_return_does_not_matter() -> None:
    model, inputs = tiny_llava.model(), tiny_vlms.prompt("llava", "image first", 0)
    model.generation_config.update(return_dict_in_generate=True, do_sample=True, num_return_sequences=2)
    with mmspec.enable(model):
        assert mmspec.verify(model, inputs, 4).ok


def test_an_answer_that_no_picture_changes_is_no_fault() -> None:
    model, inputs = tiny_llava.model(), tiny_vlms.prompt("llava", "image first", 0)
    for weight in model.model.multi_modal_projector.parameters():
        torch.nn.init.zeros_(weight)
    with mmspec.enable(model):
        report = mmspec.verify(model, inputs, 4)
    assert (report.ok, report.image_matters) == (True, False)
    assert "identical" in str(report) and "made no difference to these 4 tokens; ask for more" in str(report)


def test_a_picture_that_is_lost_is_a_difference() -> None:
    """The patch reads one picture whatever is given; with that one the stock path answers alike."""
    model, inputs = tiny_llava.model(), tiny_vlms.prompt("llava", "image first", 0)
    with mmspec.enable(model):

        def generate(pixel_values: Any = None, **given: Any) -> Any:
            seen = inputs["pixel_values"] if hasattr(type(model), "_mmspec_patch") else pixel_values
            return type(model).generate(model, pixel_values=seen, **given)

        model.generate = generate
        report = mmspec.verify(model, inputs, 12)
    assert (report.ok, report.image_matters) == (False, False) and report.gap is not None
    assert "DIFFERS" in str(report) and "ANOTHER PICTURE CHANGES NOTHING" in str(report)


@pytest.mark.parametrize(
    ("fast", "other", "where"),
    [
        ([[9, 5, 2, 0], [9, 5, 6, 7]], [[9, 5, 2], [9, 5, 6]], (1, 2)),  # the second row went on
        ([[9, 5, 2], [9, 5, 6]], [[9, 5, 2, 0], [9, 5, 6, 7]], (1, 2)),
        ([[9, 5, 2], [9, 6, 2]], [[9, 5, 2, 0], [9, 6, 2, 0]], None),  # both have ended
        ([[9, 5, 6], [9, 4, 6]], [[9, 5, 7], [9, 8, 6]], (1, 0)),  # the earliest token, not the first row
    ],
)
def test_where_two_batches_differ(fast: list[list[int]], other: list[list[int]], where: tuple[int, int] | None) -> None:
    assert _first_difference(torch.tensor(fast), torch.tensor(other), 1, 0) == where


def test_a_pipeline_that_draws_is_told_what_to_call() -> None:
    with pytest.raises(TypeError, match="mmspec generate PROMPT --model FOLDER --compare --enable reproducible=true"):
        mmspec.verify(tiny_llamagen.pipeline(), {})


# -- the command -----------------------------------------------------------------------------------------------------


def test_the_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify(folder, "--dtype", "float32", "--max-new-tokens", 8) == 0
    said = capsys.readouterr().out
    assert said.count("identical to stock generate") == said.count("another picture") == len(said.splitlines()) == 1


def test_a_smaller_model_drafts(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Here the model itself: all that it drafts is accepted."""
    assert verify(folder, "--drafter", "model", "--enable", f"draft={folder}", "--max-new-tokens", 8) == 0
    said = capsys.readouterr().out
    assert "identical" in said and float(re.findall(r"([\d.]+) tokens per target call", said)[0]) > 3
    assert verify(folder, "--drafter", folder) == 1
    assert "whole model (LlavaForConditionalGeneration), name it so: drafter='model'" in capsys.readouterr().err


@pytest.mark.parametrize("number", ["0", "-3", "many"])
def test_a_length_that_is_none(folder: Path, number: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        verify(folder, f"--max-new-tokens={number}")
    assert "not a whole number from 1 on" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--drafter", "none"], "nothing to compare: no drafter was given"),
        (["--drafter", "nosuch"], "unknown drafter 'nosuch'"),
        (["--device", "foo"], "no device 'foo' here"),
        (["--model", "nosuch"], "no folder 'nosuch'"),
        (["--model", "no/such"], "cannot load the model 'no/such'. OSError"),
        (["--model", "scenes-llamagen"], "is a pipeline that draws; see `mmspec generate --help`"),
    ],
)
def test_refusals(folder: Path, words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify(folder, *words) == 1 and told in capsys.readouterr().err


@pytest.mark.parametrize(("words", "hint"), [(["photo.png"], True), (["--size", "3"], False)])
def test_a_model_that_is_not_named_by_its_option(
    folder: Path, words: list[str], hint: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        verify(folder, *words)
    said = capsys.readouterr().err
    assert f"unrecognized arguments: {' '.join(words)}" in said and ("; inputs come before options" in said) == hint


def test_a_model_that_cannot_be_accelerated(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(DecoderOnly, "unsupported", lambda family, model: "it has linear attention")
    assert verify(folder) == 1 and "it has linear attention" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("absent.png", "absent.png"),
        (".", "is a folder, not an image; name a picture in it"),
        ("clip.mp4", "clip.mp4: is a video, not an image; give a picture, such as a frame of it"),
    ],
)
def test_what_is_no_picture(name: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    clips.write_clip(tmp_path / "clip.mp4", clips.grey_steps(4))
    assert cli.main(["verify", str(tmp_path / name), "--model", "nosuch"]) == 1  # read before the model
    assert told in capsys.readouterr().err
