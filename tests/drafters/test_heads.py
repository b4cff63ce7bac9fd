"""Heads for pictures: what they see is what was drawn, what they propose changes nothing, and training pays."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny_llamagen
import torch
from PIL import Image
from stopped import goes_on

import mmspec
from mmspec.app import cli
from mmspec.compile import capture, capture_cache
from mmspec.drafters.heads import HeadsConfig, HeadsDrafter, View
from mmspec.pipelines.host.training import Accelerator
from mmspec.pipelines.image_teacher import ImageTeacher
from mmspec.pipelines.untrained import build_for_pictures
from mmspec.train.data import TrainingSample
from mmspec.train.heads import HeadsTraining, WindowRecorder
from mmspec.train.recipes import RECIPES
from mmspec.types import NO_TOKEN

GRID = tiny_llamagen.SIZES["grid"]
ASKED: dict[str, Any] = {"prompt": ["a red circle", "blue square on the left", "large"], "output_type": "latent"}
RECIPE = RECIPES["heads-image"].with_(steps=10, batch=8, held_out=3, writing=4)


def heads(seed: int = 0, **shape: Any) -> HeadsDrafter:
    """Random weights, lively enough that every input matters; shapes of the tiny LlamaGen."""
    torch.manual_seed(seed)
    told = {"hidden": 32, "intermediate": 24, "vocab": 64, "grid": GRID, "columns": 11, "window": 8}
    made = HeadsDrafter(HeadsConfig.of({**told, **shape}))
    tiny_llamagen.lively(made, seed)
    return made


def pipeline() -> Any:
    pipe = tiny_llamagen.pipeline("text")
    pipe.transformer.output.weight.data.mul_(0.2)  # distributions as broad as those of pictures
    return pipe


def draw(pipe: Any, **settings: Any) -> Any:
    seeds = [torch.Generator().manual_seed(seed) for seed in range(len(ASKED["prompt"]))]
    return pipe(**{**ASKED, **settings}, generator=seeds)


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.0}, {"guidance_scale": 1.0}, {"top_k": 9}])
@pytest.mark.parametrize("options", [{}, {"window": 12}, {"window": 2}, {"window": 1}, {"init": "uniform"}])
@pytest.mark.every(3)
def test_the_same_tokens_as_plain_drawing(settings: dict[str, Any], options: dict[str, Any]) -> None:
    pipe = pipeline()
    alone = draw(pipe, **settings).tokens
    with mmspec.enable(pipe, drafter=heads(), reproducible=True, **options):
        assert torch.equal(draw(pipe, **settings).tokens, alone)


def test_where_nothing_is_fixed_beforehand_the_window_is_that_of_jacobi() -> None:
    pipe = pipeline()
    with mmspec.enable(pipe, drafter="jacobi", window=8):
        wanted = draw(pipe)
    with mmspec.enable(pipe, drafter=heads()):
        found = draw(pipe)
    assert torch.equal(found.tokens, wanted.tokens) and found.stats.rounds == wanted.stats.rounds


def test_captured_heads_propose_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "inductor", lambda piece, examples: piece)
    pipe, made, calls = pipeline(), heads(), list[Any]()
    with mmspec.enable(pipe, drafter=made, reproducible=True):
        wanted = draw(pipe)
    function = capture.PiecewiseFunction
    monkeypatch.setattr(capture_cache, "PiecewiseFunction", lambda *parts: calls.append(1) or function(*parts))
    with mmspec.enable(pipe, drafter=made, reproducible=True, compile=True):
        found = draw(pipe)
        with torch.no_grad():
            pipe.transformer.output.weight.mul_(1.1)  # the target's, which no capture of heads holds
        draw(pipe)
    first = len(calls)
    with mmspec.enable(pipe, drafter=made, reproducible=True, compile=True):
        draw(pipe)
    assert torch.equal(found.tokens, wanted.tokens) and found.stats.rounds == wanted.stats.rounds
    assert 1 <= first <= 3, "one a shape"
    assert len(calls) == first, "what was captured is still there when they are enabled again"


def seen(pipe: Any, made: HeadsDrafter) -> tuple[list[tuple[int, int, View]], list[list[int]], torch.Tensor]:
    """What the heads see of some pictures, the tokens of these, and the target's features before each of them."""
    noted: list[tuple[int, int, View]] = []
    samples: Sequence[TrainingSample] = [TrainingSample(list, prompt) for prompt in ASKED["prompt"]]
    with ImageTeacher(pipe, made.features) as teacher:
        answers, _ = teacher.draw(samples, WindowRecorder(made, lambda *one: noted.append(one)), [0, 1, 2])
        final = teacher.trace(samples, answers).final
    return noted, answers, final[:, -(GRID**2) - 1 :]


def test_they_see_what_was_drawn() -> None:
    """Decided tokens and features stand where they belong; so do the target's words about guesses that were right."""
    noted, answers, final = seen(pipeline(), heads())
    for picture, emitted, view in noted:
        before = range(emitted - GRID, emitted)
        wanted = [answers[picture][i] if i >= 0 else NO_TOKEN for i in before]
        assert view.around[:GRID].tolist() == wanted
        # after token i, which `final` has at i + 1; the pending token, emitted − 1, has not been read
        for row, i in enumerate(range(emitted - 2 - GRID, emitted - 1)):
            expected = final[picture, i + 1] if i >= -1 else torch.zeros_like(final[picture, 0])
            torch.testing.assert_close(view.features[row], expected, rtol=1e-4, atol=1e-5)
        assert view.place.tolist() == [(emitted + c) % GRID for c in range(len(view.place))]
        unread = ~view.scored
        assert (view.fed[unread] == NO_TOKEN).all() and not view.features[GRID + 1 :][unread].any()
        assert emitted == 1 or not view.scored[0] or view.fed[0] != answers[picture][emitted - 1], "it was refused"
    assert {picture for picture, *_ in noted} == {0, 1, 2}
    assert any(bool(view.scored.any()) and not bool(view.own.all()) for *_, view in noted)


def test_a_guess_of_the_targets_own_stands() -> None:
    """Where the target has read the token that stands to the left, its own guess is kept, and only there."""
    pipe, made = pipeline(), heads()
    drafts: list[Any] = []
    better = HeadsDrafter.better

    def noted(self: Any, draft: Any, view: View, *rest: Any) -> Any:
        found = better(self, draft, view, *rest)
        drafts.append((draft.tokens[:, 1:], found.tokens[:, 1:], view.own))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HeadsDrafter, "better", noted)
        with mmspec.enable(pipe, drafter=made, reproducible=True):
            draw(pipe)
    assert all(torch.equal(before[own], after[own]) for before, after, own in drafts)
    assert any(bool(own.any()) for *_, own in drafts)
    assert any(bool((before != after).any()) for before, after, _ in drafts)


def test_another_grid_is_refused() -> None:
    pipe = pipeline()
    with (
        mmspec.enable(pipe, drafter=heads(grid=6), reproducible=True),
        pytest.raises(ValueError, match="pictures of 6 tokens in a row; this target has 4"),
    ):
        draw(pipe)


# -- training --------------------------------------------------------------------------------------------------------


def training(out: Path, recipe: Any = RECIPE, prompts: int = 13) -> HeadsTraining:
    pipe = pipeline()
    torch.manual_seed(1)
    made = build_for_pictures("heads", pipe, intermediate=24, columns=7, window=8)
    assert isinstance(made, HeadsDrafter) and made.config.streams == 2
    teacher = ImageTeacher(pipe, made.features)
    samples = tiny_llamagen.samples(prompts)
    teacher.__enter__().open(samples[0])
    return HeadsTraining(made, teacher, samples, recipe, out, accelerator=Accelerator())


def test_training_raises_what_a_forward_gives(tmp_path: Path) -> None:
    run = training(tmp_path, RECIPE.with_(steps=200, lr=5e-3), prompts=33)
    rounds, before = run._drawn(run.held_out, 0)
    loss = run.learn(*rounds.batch(torch.arange(len(rounds.picture)), run.device))
    assert run.run() > before
    assert run.learn(*rounds.batch(torch.arange(len(rounds.picture)), run.device)) < 0.9 * loss


@pytest.mark.parametrize(("part", "at", "by"), [("learn", 6, None), ("learn", 6, signal.SIGINT), ("save", 8, None)])
def test_a_stopped_run_goes_on_to_the_same_weights(
    part: str, at: int, by: signal.Signals | None, tmp_path: Path
) -> None:
    """It stops in the second part of three, or at its end, when its rounds are written and its weights are not."""
    goes_on(training, tmp_path, part, at, by)


def test_rounds_that_are_lost_stop_only_a_run_that_learns_from_them(tmp_path: Path) -> None:
    (whole := training(tmp_path)).run()
    (tmp_path / "rounds.pt").unlink()
    (again := training(tmp_path)).run()
    assert all(torch.equal(t, again.drafter.state_dict()[name]) for name, t in whole.drafter.state_dict().items())
    torch.save({**torch.load(tmp_path / "checkpoint.pt"), "step": 1}, tmp_path / "checkpoint.pt")
    for why in ("FileNotFound", "Unpickling"):
        with pytest.raises(ValueError, match=rf"(?s)rounds.pt cannot be read \({why}.*delete checkpoint.pt beside it"):
            training(tmp_path).run()
        (tmp_path / "rounds.pt").write_bytes(b"PK")


def test_each_part_needs_a_picture(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="in 3 parts, each from other pictures; 2 are left"):
        training(tmp_path, RECIPE.with_(held_out=1), prompts=3).run()


def test_the_command_trains_for_a_pipelines_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pipe = tiny_llamagen.pipeline("text")
    pipe.save_pretrained(tmp_path / "target")
    (tmp_path / "prompts.txt").write_text(
        "a red circle\nblue square on the left\na large striped square\na circle\n" * 3
    )
    paths = ["--target", str(tmp_path / "target"), "--data", f"prompts:{tmp_path / 'prompts.txt'}", "--method", "heads"]
    given = ["--device", "cpu", "--shape", "intermediate=24", "columns=7", "window=6"]
    settings = ["--set", "steps=5", "batch=4", "held_out=2", "writing=4"]
    assert cli.main(["train", *paths, "--out", str(tmp_path / "run"), *given, *settings]) == 0
    made: Any = mmspec.load_drafter(tmp_path / "run" / "drafter")
    assert (made.method, made.config.columns, made.config.window) == ("heads", 7, 6)
    assert "a window of 6 positions" in (tmp_path / "run" / "drafter" / "README.md").read_text()
    alone = draw(pipe).tokens
    with mmspec.enable(pipe, drafter=str(tmp_path / "run" / "drafter"), reproducible=True) as handle:
        assert torch.equal(draw(pipe).tokens, alone) and handle.drafter.options.window == 6
    capsys.readouterr()
    looking = ["--method", "heads", "--target", "nowhere", "--data", str(tmp_path), "--out", str(tmp_path / "x")]
    assert cli.main(["train", *looking]) == 1 and "'heads' is for models that draw" in capsys.readouterr().err
    Image.new("RGB", (8, 8)).save(tmp_path / "0.png")
    shown = ["train", "--target", str(tmp_path / "target"), "--data", str(tmp_path), "--out", str(tmp_path / "x")]
    assert cli.main(shown) == 1 and "has pictures; give prompts:FILE or pictures:N" in capsys.readouterr().err


def test_heads_survive_a_file(tmp_path: Path) -> None:
    made = heads(window=6)
    mmspec.save_drafter(made, tmp_path)
    back: Any = mmspec.load_drafter(tmp_path)
    assert back.config == made.config and back.method == "heads"
    assert all(torch.equal(t, back.state_dict()[name]) for name, t in made.state_dict().items())
    (tmp_path / "config.json").write_text((tmp_path / "config.json").read_text().replace('"grid": 4', '"grid": -4'))
    with pytest.raises(ValueError, match="grid = -4"):
        mmspec.load_drafter(tmp_path)
