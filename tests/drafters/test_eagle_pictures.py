"""An eagle for the pictures of Janus, Emu3 and Anole: what its teacher sees is what their own calls see."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import tiny_image_models
import torch
from tiny_image_models import PAINTERS, PROMPTS

import mmspec
from mmspec.app import cli
from mmspec.app.train import train
from mmspec.config import UnsupportedError
from mmspec.pipelines.host.image_models import ImageModel
from mmspec.pipelines.image_teacher import ImageTeacher
from mmspec.pipelines.untrained import build_for_pictures
from mmspec.train.data import TrainingSample
from mmspec.train.recipes import IMAGE_EAGLE

MODELS = ["janus", "emu3", "chameleon", "chameleon guided"]
SAMPLES = [TrainingSample(list, str(row)) for row in range(3)]
TEMPERATURE = 1.0


def painted(name: str, model: Any = None) -> ImageModel:
    """The tiny model, whose prompts are the numbers of rows."""
    model = tiny_image_models.model(name) if model is None else model
    calls = PAINTERS[name].call(3)

    def draw(prompts: list[str], **settings: Any) -> list[Any]:
        rows = torch.tensor([int(prompt) for prompt in prompts])
        each = {k: v[rows] if isinstance(v, torch.Tensor) else v for k, v in calls.items()}
        model.generate(**{**each, "do_sample": True, "temperature": TEMPERATURE, "top_k": 0, **settings})
        return []

    return ImageModel(model, draw)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("piece", [512, 5])
def test_the_trace_is_what_drawing_saw(name: str, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy pictures of a plain call are the likeliest tokens of the trace, read at once or in pieces."""
    monkeypatch.setattr("mmspec.pipelines.image_teacher.PIECE", piece)
    model, painter = tiny_image_models.model(name), painted(name)
    with ImageTeacher(painter, (-1, 1), {"do_sample": False}) as teacher:
        answers = teacher.answers(SAMPLES, 0, 0.0)
        trace = teacher.trace(SAMPLES, answers)
        logits, S = teacher.head(trace.final), teacher.target.streams
    assert not type(model).__name__.startswith("Mmspec") and len({tuple(row) for row in answers}) == 3
    T = trace.ids.shape[1]
    assert (1 if name == "chameleon" else 2) == S and trace.features.shape == (3, T, 2 * S * 64)
    assert torch.equal(trace.features.unflatten(-1, (S, 2, 64))[..., 0, :].flatten(-2), trace.final)
    for row, answer in enumerate(answers):
        said = trace.answered[row].nonzero()[:, 0]
        assert trace.ids[row, said].tolist() == answer
        first, last = (0, None) if name == "janus" else (40, 104)  # the codes, and no marks
        found = (first + logits[row, said - 1, first:last].argmax(-1)).tolist()
        codes = [i for i, token in enumerate(answer) if last is None or first <= token < last]
        assert len(codes) >= 8
        assert [found[i] for i in codes] == [answer[i] for i in codes]


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_a_draft_reads_what_training_read(name: str) -> None:
    """The features along a picture are those that a drafter is given as the picture is drawn."""
    painter = painted(name)
    with ImageTeacher(painter, (-1,)) as teacher:
        torch.manual_seed(3)
        answers = teacher.answers(SAMPLES, 0, 0.0)
        trace = teacher.trace(SAMPLES, answers)
    seen: dict[int, torch.Tensor] = {}

    class Watch(mmspec.drafters.plain.Plain):  # type: ignore[name-defined, misc]
        features = (-1,)

        def start(self, session: Any, target: Any, prompt: Any) -> None:
            seen[-1] = prompt.hidden

        def propose(self, session: Any, target: Any) -> Any:
            if len(session.rows) == 3 and session.last.scores.hidden is not None:
                seen[int(session.emitted[0])] = session.last.scores.hidden
            return super().propose(session, target)

    with mmspec.enable(painter.target, drafter=Watch(), reproducible=True):
        torch.manual_seed(3)
        painter.draw(["0", "1", "2"])
    L = seen[-1].shape[1]
    torch.testing.assert_close(trace.features[:, :L], seen.pop(-1))
    assert len(seen) > 3
    for emitted, hidden in sorted(seen.items())[1:]:
        torch.testing.assert_close(trace.features[:, L + emitted - 2], hidden[:, 0], rtol=1e-4, atol=1e-4)


RECIPE = IMAGE_EAGLE.with_(
    steps=30, batch=4, lr=5e-3, held_out=3, unroll=2, writing=3, noise=0.0, token_weight=1.0
)  # fmt: skip


def trained(painter: ImageModel, folder: Path, steps: int = 2, **more: Any) -> Any:
    data = folder / "prompts.txt"
    data.write_text("0\n1\n2\n" * 6)
    recipe = RECIPE.with_(steps=steps, **more.pop("recipe", {}))
    return train(model=painter, processor=None, method="eagle", data=f"prompts:{data}", out=folder / "run",
                 recipe=recipe, shape={"intermediate": 64, **more.pop("shape", {})}, **more)  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.every(3)
def test_training_raises_tau_and_draws_the_same(name: str, tmp_path: Path) -> None:
    model = copy.deepcopy(tiny_image_models.model(name))
    made = trained(painted(name, model), tmp_path, 30)
    report = mmspec.load_drafter(tmp_path / "run" / "drafter")
    assert report.config == made.config and made.config.hidden == 64
    call = PAINTERS[name].call(3)
    with mmspec.enable(model, drafter="jacobi"):
        wanted = tiny_image_models.draw(model, call)
    with mmspec.enable(model, drafter=str(tmp_path / "run" / "drafter"), depth=3, width=2, size=6) as handle:
        assert torch.equal(tiny_image_models.draw(model, call), wanted)
    assert handle.stats.rounds


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.every(3)
def test_a_model_in_bfloat16_is_learnt_from(name: str, tmp_path: Path) -> None:
    model = copy.deepcopy(tiny_image_models.model(name)).bfloat16()
    made = trained(painted(name, model), tmp_path)
    assert next(made.parameters()).dtype == torch.float32
    with mmspec.enable(model, drafter=made) as handle:
        tiny_image_models.draw(model, PAINTERS[name].call(2))
    assert handle.stats.rounds


def test_a_call_for_each_picture_is_read_as_well(tmp_path: Path) -> None:
    """The same traces as of one call for all."""
    whole, answers = painted("chameleon guided"), [[*range(40, 50)], [*range(50, 60)], [*range(60, 70)]]

    def each(prompts: list[str], **settings: Any) -> list[Any]:
        return [image for prompt in prompts for image in whole.draw([prompt], **settings)]

    with ImageTeacher(whole, (-1,)) as teacher, ImageTeacher(ImageModel(whole.target, each), (-1,)) as single:
        once, apart = teacher.trace(SAMPLES, answers), single.trace(SAMPLES, answers)
        assert [len(answer) for answer in single.answers(SAMPLES, 0, 0.0)] == [18, 18, 18]
    for row, (a, b) in enumerate(zip(once.rows(), apart.rows(), strict=True)):
        assert a.ids[a.valid].tolist() == b.ids[b.valid].tolist(), row
        torch.testing.assert_close(a.final[a.answered], b.final[b.answered], rtol=1e-4, atol=1e-4)
    trained(ImageModel(whole.target, each), tmp_path)


def test_what_draws_has_to_draw(tmp_path: Path) -> None:
    janus = painted("janus")
    with pytest.raises(ValueError, match="made no call of `generate`"):
        trained(ImageModel(janus.target, lambda prompts, **how: []), tmp_path)
    twice = ImageModel(janus.target, lambda prompts, **how: [janus.draw(["0"]), janus.draw(["1"])])
    with ImageTeacher(twice, (-1,)) as teacher, pytest.raises(ValueError, match="3 prompts gave 2 pictures"):
        teacher.answers(SAMPLES, 0, 0.0)


def test_a_run_goes_on_with_a_head_of_its_own_and_with_nothing_else(tmp_path: Path) -> None:
    painter = painted("chameleon")
    own = {"shape": {"draft_vocab": 80}}
    trained(painter, tmp_path, **own)
    trained(painter, tmp_path, **own)
    with pytest.raises(ValueError, match="choose another --out"):
        trained(painter, tmp_path, drawing={"top_k": 7}, **own)
    with pytest.raises(ValueError, match="does not support guidance"):
        trained(painted("emu3"), tmp_path, **own)


def test_a_vocabulary_is_for_heads_that_have_words(tmp_path: Path) -> None:
    model = copy.deepcopy(tiny_image_models.model("chameleon guided"))
    made = trained(painted("chameleon guided", model), tmp_path, recipe={"vocabulary": 70})
    assert len(made.config.proposes) == 70
    with mmspec.enable(model, drafter=made) as handle:
        tiny_image_models.draw(model, PAINTERS["chameleon guided"].call(2))
    assert handle.stats.rounds
    with pytest.raises(ValueError, match="has codes alone"):
        trained(painted("janus"), tmp_path, recipe={"vocabulary": 70})


def test_a_drafter_that_does_not_fit_is_refused_before_anything_is_drawn(tmp_path: Path) -> None:
    called: list[int] = []
    silent = ImageModel(tiny_image_models.model("janus"), lambda prompts, **how: called.append(1) or [])
    with pytest.raises(ValueError, match="rotary positions '2d'"):
        trained(silent, tmp_path, shape={"rope": "2d", "grid": 4})
    assert not called


def test_a_drafter_for_pictures_leaves_text_alone() -> None:
    """Where there are other codes than words, it fits one of the two."""
    model = copy.deepcopy(tiny_image_models.small_janus())
    made = build_for_pictures("eagle", ImageModel(model, lambda prompts: []), intermediate=32).eval()
    assert made.config.vocab == 6
    picture = {**tiny_image_models.ragged([[*PROMPTS[0], tiny_image_models.BEGIN]]), "generation_mode": "image",
               "guidance_scale": 2.0}  # fmt: skip
    text = {**tiny_image_models.ragged(PROMPTS[:1]), "max_new_tokens": 6, "max_length": None}
    wanted = [tiny_image_models.draw(model, call) for call in (picture, text)]
    with mmspec.enable(model, drafter=made, depth=2, width=2, size=4) as handle:
        assert torch.equal(tiny_image_models.draw(model, picture), wanted[0]) and handle.stats.rounds
        with pytest.raises(UnsupportedError, match="for pictures, and this call generates text"):
            tiny_image_models.draw(model, text)
    fallback = mmspec.enable(model, drafter=made, on_unsupported="fallback", depth=2, width=2, size=4)
    with fallback, pytest.warns(UserWarning, match="generates text"):
        assert torch.equal(tiny_image_models.draw(model, text), wanted[1])
    with pytest.raises(ValueError, match="vocabulary 6 "):
        mmspec.enable(tiny_image_models.model("janus"), drafter=made)


OWN = """
from mmspec.pipelines.host import image_models

def load(device, dtype):
    global held
    held = image_models.load({folder!r}, device, dtype)
    return held.target

def draw(model, prompts, **settings):
    return held.draw(prompts, **settings)
"""


def commanded(target: Path, folder: Path, *more: str) -> int:
    """`mmspec train` for a target and a few prompts: its exit code."""
    (folder / "prompts.txt").write_text("red circle\nblue circle\nred circle blue\nblue circle red\n" * 2)
    words = ["train", "--target", target, "--data", f"prompts:{folder / 'prompts.txt'}", "--out", folder / "run"]
    return cli.main([*map(str, words), "--device", "cpu", *more])


@pytest.mark.parametrize("name", ["janus", "emu3", "chameleon", "own file"])
@pytest.mark.every(2)
def test_the_command_trains_for_a_folder(name: str, tmp_path: Path) -> None:
    kind = "janus" if name == "own file" else name
    folder = tiny_image_models.saved(kind, tmp_path / "target")
    target = folder
    if name == "own file":
        target = tmp_path / "own.py"
        target.write_text(OWN.format(folder=str(folder)))
    words = ["--shape", "intermediate=32", "--set", "steps=2", "batch=2", "held_out=2", "unroll=2", "writing=4"]
    words += ["--draw", "temperature=1.5", *([f"image_area={16 * 64}"] if name == "emu3" else [])]
    assert commanded(target, tmp_path, *words, *([] if name == "chameleon" else ["guidance_scale=2.0"])) == 0
    model = copy.deepcopy(tiny_image_models.model(kind))
    with mmspec.enable(model, drafter=str(tmp_path / "run" / "drafter")) as handle:
        tiny_image_models.draw(model, PAINTERS[kind].call(2))
    assert handle.stats.rounds


@pytest.mark.parametrize(
    ("own", "reason"),
    [("def load(device, dtype): return 1", "draw"), ("def draw(m, p): return []", "load"), (OWN + "    ,,", "syntax"),
     (None, "no file")],
)  # fmt: skip
def test_a_file_that_cannot_draw_is_said_to(
    own: str | None, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, file = tiny_image_models.saved("janus", tmp_path / "target"), tmp_path / "own.py"
    if own is not None:
        file.write_text(own.replace("{folder!r}", repr(str(folder))))
    assert commanded(file, tmp_path, "--set", "held_out=1") == 1
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize("draw", ["image_area=64", "guidance=3", "top_k=some"])
def test_settings_that_a_call_does_not_take(draw: str, tmp_path: Path) -> None:
    folder = tiny_image_models.saved("janus", tmp_path / "target")
    assert commanded(folder, tmp_path, "--set", "held_out=1", "--draw", draw) == 1
