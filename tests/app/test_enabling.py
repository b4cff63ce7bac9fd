"""`--enable`: one way for all verbs to say what `mmspec.enable` takes, with errors that name what there is."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path
from typing import Any

import pytest
import tiny_llava
from PIL import Image

import mmspec
from benchmarks.suites import SUITES
from mmspec.app import cli, embedded, enabling
from mmspec.app.bench import drafters as named
from mmspec.app.bench.command import BenchError
from mmspec.app.enabling import EnableError
from mmspec.drafters import own_options

VERBS = ("caption", "verify", "demo", "generate")
OPTIONS = {"compile": True, "depth": 3}


@pytest.mark.parametrize(
    ("word", "drafter", "value"),
    [
        ("compile=true", None, True), ("auto=off", "ngram", False), ("depth=6", "eagle", 6), ("prune=0.5", "msd", 0.5),
        ("draft-vocab=512", "scenes-video-eagle", 512), ("proactive=3,3", "jacobi", (3, 3)),
        ("tree=chain", None, "chain"),
        ("confidence=0.2", "block", 0.2), ("rule=typical(epsilon=0.3, delta=0.05)", "jacobi", None),
        ("budget=none", "jacobi", None), ("window=24", "heads", 24), ("window=24", "scenes-llamagen-heads", 24),
    ],
)  # fmt: skip
def test_words_become_values(word: str, drafter: str | None, value: Any) -> None:
    name = word.partition("=")[0].replace("-", "_")
    assert enabling.given([word], drafter) == {name: word.partition("=")[2] if name == "rule" else value}


@pytest.mark.parametrize(
    ("word", "drafter", "said"),
    [
        ("dept=6", "eagle", "no 'dept' with the drafter eagle. It takes rule, budget,"),
        ("window=8", "eagle", "no 'window' with the drafter eagle"),
        ("depth=3", "heads", "no 'depth' with the drafter heads"),
        ("tree=chain", "ngram", "no 'tree' with the drafter ngram"),
        ("compile=maybe", None, "compile must be True or False; got 'maybe'. Write True"),
        ("budget=-1", None, "budget must be a distance ≥ 0"),
        ("depth=deep", None, "depth must be a whole number from 1 to 128"),
        ("prune=9", "eagle", "prune must be a share from 0 to 1"),
        ("confidence=high", "block", "confidence must be a probability from 0 to below 1; got 'high'"),
        ("window=0", "jacobi", "window must be a whole number ≥ 1"),
        ("depth", None, "takes NAME=VALUE, such as depth=6; got 'depth'"),
        ("depth=2", "model", "--drafter model needs --enable draft=FOLDER, the smaller model"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_says_what_can(word: str, drafter: str | None, said: str) -> None:
    with pytest.raises(EnableError) as error:
        enabling.given([word], drafter)
    assert said in str(error.value)


def test_values_are_judged_together() -> None:
    assert enabling.given(["proactive=2,20", "window=32"], "jacobi") == {"proactive": (2, 20), "window": 32}


def test_no_word_needs_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_options, "options_of", lambda _: pytest.fail("looked up"))
    assert enabling.given([]) == {}


def test_every_verb_takes_it() -> None:
    for verb in VERBS:
        parser = argparse.ArgumentParser()
        importlib.import_module(cli.COMMANDS[verb][0]).configure(parser)
        first = {"caption": ["x"], "verify": ["x.png"], "generate": ["x"]}.get(verb, [])
        args = parser.parse_args([*first, "--enable", "compile=true", "--enable", "depth=3"])
        assert args.enable == ["compile=true", "depth=3"]
    for suite in ("vlm", "caption", "image"):
        parser = argparse.ArgumentParser()
        importlib.import_module(cli.COMMANDS["bench"][0]).configure(parser, SUITES)
        args = parser.parse_args([suite, "--enable", "compile=true", "depth=3"])
        assert enabling.given(args.enable) == OPTIONS
    with pytest.raises(EnableError, match=r"no 'dept'\. It takes .*depth"):
        enabling.given(["dept=3"])


@pytest.fixture
def enabled(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What `mmspec.enable` is told from now on."""
    real, told = mmspec.enable, []

    def enable(model: Any, drafter: Any = None, **options: Any) -> Any:
        told.append(options)
        return real(model, drafter, **{k: v for k, v in options.items() if k != "compile"})

    monkeypatch.setattr(mmspec, "enable", enable)
    return told


def test_it_reaches_enable(tmp_path: Path, enabled: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = str(tiny_llava.save(tmp_path / "model"))
    Image.new("RGB", (40, 30), "red").save("a.png")
    said = ["--model", folder, "--drafter", "ngram", "--max-new-tokens", "4", "--enable", "compile=true", "depth=3"]
    assert cli.main(["verify", "a.png", "--prompt", "w5 w6", *said]) == 0
    assert enabled and enabled[0].items() >= OPTIONS.items()
    enabled.clear()
    assert cli.main(["caption", "a.png", "--prompt", "w5 w6", "--no-compare", *said]) == 0
    assert enabled and enabled[0].items() >= OPTIONS.items()


def test_a_wrong_word_ends_a_verb_before_its_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (40, 30), "red").save("a.png")
    for words in (["verify", "a.png"], ["caption", "a.png"], ["generate", "a ring"], ["demo"]):
        assert cli.main([*words, "--model", "/nowhere", "--enable", "dept=3"]) in (1, 2)
        assert "has no 'dept'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["caption", "--modle", "x"], "mmspec caption: error: unrecognized arguments: --modle\n"),
        (["bench", "vlm", "--drafers=eagle"], "bench vlm: error: unrecognized arguments: --drafers=eagle\n"),
        (["bench", "vlm", "--repeats", "2"], "bench vlm: error: unrecognized arguments: --repeats 2\n"),
        (["captoin"], "argument VERB: invalid choice: 'captoin' (choose from"),
        (["demo", "--port", "99999"], "'99999' is not a port; one is a number from 1 to 65535"),
        (["generate", "a star", "--seed", "-1"], "'-1' is not a seed; one is a whole number from 0 on, below 2**62"),
        (["demo", "--time-limit", "-1"], "'-1' is not a number above 0"),
        ([], "mmspec: lossless speculative decoding"),
        (["bench"], "answers of a vision-language model"),
    ],
)  # fmt: skip
def test_wrong_words_are_told_in_two_lines(words: list[str], told: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(words)
    said = capsys.readouterr().err
    assert end.value.code == 2 and told in said
    assert "error" not in said or (len(said.splitlines()) == 2 and "--help` explains" in said)


def test_a_methods_name_is_the_embedded_drafter_of_the_model() -> None:
    def read(*words: str) -> dict[str, Any]:
        return named.read(argparse.Namespace(model=words[0], drafters=[*words[1:]], enable=[]))

    assert list(read("scenes-video", "eagle")) == ["eagle"]
    assert embedded.fitting("eagle", "scenes-video") == "scenes-video-eagle"
    assert embedded.fitting("ngram", "scenes-video") == "ngram" and embedded.fitting("eagle", "else") == "eagle"
    assert list(read("scenes-llamagen", "heads")) == ["heads"]
    with pytest.raises(BenchError, match=r"--drafters: .*'msd'.*; available by name: heads"):
        read("scenes-llamagen", "msd")
