"""`mmspec generate`: whole runs on random pipelines of a few thousand weights, and what it says of bad input."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import tiny_llamagen
import torch
from PIL import Image

from mmspec.app import cli, embedded, generate
from mmspec.app.compare import Method
from mmspec.app.painter import NOTE, ImageSubject

PROMPT = "a small red circle"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llamagen.saved("text", tmp_path_factory)


@pytest.fixture(scope="module")
def classes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llamagen.saved("class", tmp_path_factory)


def run(*words: object) -> int:
    parser = argparse.ArgumentParser()
    generate.configure(parser)
    return generate.run(parser.parse_args(["--device", "cpu", *map(str, words)]))


def pixels(path: Path) -> bytes:
    with Image.open(path) as picture:
        return picture.convert("RGB").tobytes()


def test_draws_the_picture_of_its_seed(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [PROMPT, "--model", text, "--seed", 5]
    assert run(*words, "--drafter", "none", "-o", tmp_path / "plain.png") == 0
    told = capsys.readouterr().out
    assert "1 picture in" in told and "16.0 forwards of the model each, 1.00 tokens per forward" in told
    assert run(*words, "--enable", "reproducible=true", "window=4", "--compare", "-o", tmp_path / "fast.png") == 0
    assert "identical pictures: 1 of 1" in capsys.readouterr().out
    assert run(*words, "--drafter", "none", "--seed", 6, "-o", tmp_path / "other.png") == 0
    plain, fast, other = (pixels(tmp_path / f"{name}.png") for name in ("plain", "fast", "other"))
    assert plain == fast != other


def test_a_picture_that_is_there_is_kept(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [PROMPT, "--model", text]
    assert run(*words) == run(*words, "--seed", 1) == 0
    first, second = pixels(Path("picture.png")), pixels(Path("picture-2.png"))
    assert run(*words, "--seed", 1, "-o", "picture.png") == 1 and pixels(Path("picture.png")) == first != second
    assert "picture.png is there already; choose another -o, or --overwrite" in capsys.readouterr().err
    assert run(*words, "--seed", 1, "-o", "picture.png", "--overwrite") == 0 and pixels(Path("picture.png")) == second


def test_many_prompts_go_into_a_folder(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "list.txt").write_text("\ufeffa red circle\n\n a blue square \n", encoding="utf-8")
    words = ["--prompts", tmp_path / "list.txt", "--images", 2, "--batch-size", 3, "--model", text]
    assert run(*words, "-o", tmp_path / "out") == 0
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    wanted = ("0000-a-red-circle", "0001-a-red-circle", "0002-a-blue-square", "0003-a-blue-square")
    assert names == [f"{name}.png" for name in wanted]
    assert len({pixels(tmp_path / "out" / name) for name in names}) == 4  # each its own seed
    said = capsys.readouterr()
    assert "4 pictures in" in said.out
    assert f"loading {text}\ndrawing 4 pictures, 3 at a time\n" in said.err  # while it works


def test_a_relaxed_rule_says_that_it_is_one(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [PROMPT, "--model", text, "-o", tmp_path / "x.png", "--enable", "init=uniform"]
    assert run(*words) == 0
    assert "not lossless" not in capsys.readouterr().out
    assert run(*words, "rule=scaled(omega=3.0)", "budget=0.25", "--overwrite") == 0
    told = capsys.readouterr().out
    assert "not lossless: scaled(omega=3.0) changed the distribution" in told
    assert 0 <= float(told.partition("maximum ")[2].split()[0]) <= 0.25
    with pytest.warns(UserWarning, match="no effect on greedy calls"):
        assert run(*words, "rule=scaled(omega=3.0)", "--temperature", 0, "--compare", "--overwrite") == 0
    told = capsys.readouterr().out
    assert "identical pictures: 1 of 1" in told and "chang" not in told and "not lossless" not in told


def test_classes(classes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(3, 9, "--model", classes, "-o", tmp_path / "out") == 0
    assert len(list((tmp_path / "out").iterdir())) == 2
    for wrong in (10, "cat", "1.5"):
        assert run(wrong, "--model", classes, "-o", tmp_path / "none") == 1
        assert f"number from 0 to 9; '{wrong}' is none" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "no prompt; write one in quotes"),
        ([""], "no prompt"),
        ([PROMPT, "--enable", "window=0"], "window must be a whole number"),
        ([PROMPT, "--enable", "rule=landern(k=1)"], "unknown rule 'landern'"),
        ([PROMPT, "--enable", "budget=1"], "and rule='exact' spends nothing; name a rule"),
        ([PROMPT, "--enable", "rule=scaled(omega=2.0)", "reproducible=true"], "gives what plain decoding gives for"),
        ([PROMPT, "--drafter", "none", "--enable", "compile=true"], "compile needs a drafter"),
        ([PROMPT, "--drafter", "jacoby"], "unknown drafter 'jacoby'"),
        ([PROMPT, "--top-k", -1], "top_k must be a whole number"),
        ([" ".join(["red"] * 40)], "has 41 tokens"),
        ([PROMPT, "-o", "x.bmp"], "a picture is a file ending in .png"),
        ([PROMPT, "--images", 2, "-o", "x.png"], "2 pictures do not fit"),
        ([PROMPT, "--device", "abacus"], "no device 'abacus' here"),
    ],
)
def test_bad_input_is_told_in_one_line(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    words: list[object], told: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert run("--model", text, *words) == 1
    said = capsys.readouterr().err.strip().splitlines()
    assert told in said[-1] and said[-1].startswith("mmspec generate: ")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("place", "told"),
    [("/proc/nowhere/x.png", "'/proc/nowhere/x.png': No such file"), ("a.file/x.png", "Not a directory"),
     ("folder.png", "cannot write 'folder.png': it is a folder")],
)  # fmt: skip
def test_a_place_where_nothing_can_be_written_is_told_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], place: str, told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.file").touch()
    Path("folder.png").mkdir()
    assert run(PROMPT, "--model", "nowhere", "--overwrite", "-o", place) == 1
    assert told in capsys.readouterr().err


def test_a_list_of_prompts_that_is_absent(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run("--prompts", "/absent/list.txt")
    assert "cannot read the prompts of '/absent/list.txt'" in capsys.readouterr().err


def test_what_is_no_pipeline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(PROMPT, "--model", tmp_path) == 1
    assert "It must be a LlamaGenPipeline" in capsys.readouterr().err
    assert run(PROMPT, "--model", "nowhere") == 1
    assert "no folder 'nowhere'. A name on the Hub has the form owner/name" in capsys.readouterr().err


def test_pictures_that_are_there_stay_when_a_later_one_fails(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [PROMPT, " ".join(["red"] * 40), "--batch-size", 1, "--model", text, "-o", tmp_path / "out"]
    assert run(*words) == 1
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["0000-a-small-red-circle.png"]
    assert "41 tokens" in capsys.readouterr().err


def test_says_what_the_embedded_model_knows(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(embedded, "resolve", lambda name: str(text) if name == embedded.IMAGE_MODEL else name)
    assert run("a red cat", "-o", tmp_path / "x.png") == 0
    assert NOTE in capsys.readouterr().err


def test_a_painting_does_its_sums() -> None:
    painter = ImageSubject(tiny_llamagen.pipeline("class"))
    plain = painter.paint([1, 2, 3], [7, 8, 9])
    assert (plain.forwards, plain.compression, plain.spent) == (16, 1.0, [0.0] * 3)
    painter.go(Method("jacobi", "jacobi", {"window": 4, "reproducible": True}))
    fast = painter.paint([1, 2, 3], [7, 8, 9])
    assert torch.equal(fast.tokens, plain.tokens) and fast.compression >= 1
    assert fast.compression == pytest.approx(48 / (fast.stats.row_rounds + 3))
    assert 0 < fast.decode_seconds < fast.seconds
    alone = painter.paint([2], [8])
    assert torch.equal(alone.tokens[0], plain.tokens[1])


@pytest.mark.parametrize("guidance", ["-1", "nan", "inf", "much"])
def test_guidance_is_a_number_from_0_on(guidance: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["generate", PROMPT, f"--guidance={guidance}"])
    assert f"'{guidance}' is not a number from 0 on" in capsys.readouterr().err
