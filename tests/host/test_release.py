"""Releases of transformers that mmspec does not know: right, or declined with the version; never a crash."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import made_up_releases as releases
import pytest
import tiny_vlms
import torch

import mmspec
from mmspec.pipelines import untested
from mmspec.pipelines.families.decoder_only import DecoderOnlyPatch
from mmspec.pipelines.host import release
from mmspec.pipelines.target.vlm import VlmTarget
from tests.host.test_generate import Columns, streamed_as_stock

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What became of the releases that are tried here, by name; one process tries them all."""
    mine = [item for item in request.session.items if getattr(item, "originalname", "") == "test_a_made_up_release"]
    names = [item.callspec.params["name"] for item in mine]  # type: ignore[attr-defined]
    command = [sys.executable, releases.__file__, str(tmp_path_factory.mktemp("releases")), *names]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=releases.environment())
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {line["release"]: line for line in lines}


@pytest.mark.parametrize("name", releases.RELEASES)
@pytest.mark.every(4)
def test_a_made_up_release(outcomes: dict[str, dict[str, Any]], name: str) -> None:
    found = outcomes[name]
    assert "crash" not in found, found["crash"]
    assert found["same"]
    if found["rounds"]:
        assert name == "nothing" and not found["refused"]
        assert any(f"untested with transformers {releases.VERSION}" in what for what in found["said"])
    else:
        tested = release.contract.TESTED["transformers"]
        for what in (found["refused"], *found["said"][:1]):
            assert releases.VERSION in what and f'pip install "transformers{tested}"' in what, found


def test_an_interrupted_self_test_is_done_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = []

    def interrupted(*_: object) -> None:
        tries.append(1)
        raise KeyboardInterrupt

    monkeypatch.setattr(untested, "_self_test", interrupted)
    monkeypatch.setattr(untested, "_results", {})
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            untested.refusal(tiny_vlms.model("llava"), "ngram", mmspec.enable)
    assert len(tries) == 2


# -- within one call -------------------------------------------------------------------------------------------------


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the installed release were a later one that keeps the contract."""
    monkeypatch.setattr(release, "tested", lambda: False)
    monkeypatch.setattr("mmspec.pipelines.untested.refusal", lambda *_: None)


@pytest.mark.parametrize("at", ["first", "read"])
@pytest.mark.parametrize("sample", [False, True])
def test_what_fails_before_the_first_token_is_out_runs_stock(
    monkeypatch: pytest.MonkeyPatch, later: None, at: str, sample: bool
) -> None:
    model, inputs = tiny_vlms.model("llava"), tiny_vlms.prompt("llava", "image first")

    def run() -> tuple[torch.Tensor, list[list[int]]]:
        torch.manual_seed(3)
        streamer = Columns()
        return tiny_vlms.generate(model, inputs, streamer=streamer, do_sample=sample), streamer.put_

    want = run()

    def fails(*_: Any, **__: Any) -> Any:
        raise AttributeError("'Cache' object has no attribute 'get_mask_sizes'")

    with mmspec.enable(model, drafter="ngram"):
        monkeypatch.setattr(VlmTarget, at, fails)
        with pytest.warns(
            UserWarning, match=r"runs the stock path: .*get_mask_sizes.* is installed, and mmspec is tested"
        ):
            found = run()
    assert torch.equal(found[0], want[0]) and found[1] == want[1]


def test_on_a_tested_release_it_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = tiny_vlms.model("llava"), tiny_vlms.prompt("llava", "image first")
    with mmspec.enable(model, drafter="ngram"):
        monkeypatch.setattr(VlmTarget, "first", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            tiny_vlms.generate(model, inputs)


def test_a_streamer_gets_every_token_once_on_an_untested_release(later: None) -> None:
    streamed_as_stock(tiny_vlms.model("llava"), tiny_vlms.prompt("llava", "image first"), "ngram")


def test_a_patch_that_is_not_reached_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = tiny_vlms.model("llava"), tiny_vlms.prompt("llava", "image first")
    want = tiny_vlms.generate(model, inputs)
    with mmspec.enable(model, drafter="ngram") as handle:
        monkeypatch.delattr(DecoderOnlyPatch.__mro__[1], "_sample")
        with pytest.warns(UserWarning, match="took no part in this call"):
            assert torch.equal(tiny_vlms.generate(model, inputs), want)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            tiny_vlms.generate(model, inputs)  # it was said
    assert handle.stats.rounds == 0


def test_what_does_not_load_is_said_by_the_function_that_needs_it() -> None:
    error = ImportError("cannot import name 'DynamicLayer'")
    with pytest.raises(ImportError, match="DynamicLayer"):
        release.missing("enable", error)  # a tested release: a fault of ours


def test_and_leaves_the_model_where_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release, "tested", lambda: False)
    enable = release.missing("enable", ImportError("cannot import name 'DynamicLayer'"))
    model = tiny_vlms.model("llava")
    with pytest.raises(mmspec.UnsupportedError, match=r"DynamicLayer.*pip install"):
        enable(model)
    with (
        pytest.warns(UserWarning, match="leaves .* as it is: .*DynamicLayer") as said,
        enable(model, on_unsupported="fallback") as left,
    ):
        assert left.model is model and left.drafter is None and said[0].filename == __file__
    release.missing("disable", ImportError())(model)
    with pytest.raises(mmspec.UnsupportedError, match=r"mmspec\.verify is not available"):
        release.missing("verify", ImportError())(model)
