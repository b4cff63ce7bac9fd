"""Training: the loss is of the right tokens, a stopped run goes on."""

from __future__ import annotations

import copy
import itertools
import json
import signal
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_llava
import torch
from PIL import Image
from stopped import goes_on

import mmspec
from benchmarks.zoo import sources
from mmspec.app import cli
from mmspec.app.files import hold
from mmspec.app.train import _opened, train
from mmspec.checkpoints.save import save_drafter
from mmspec.drafters.eagle import EagleDrafter
from mmspec.drafters.feature import FeatureDrafter
from mmspec.drafters.growth import TargetHead
from mmspec.pipelines.host.training import Accelerator
from mmspec.pipelines.prompts import chat_inputs
from mmspec.pipelines.teacher import Teacher
from mmspec.pipelines.untrained import build
from mmspec.registry import DRAFTERS
from mmspec.train import data, gate
from mmspec.train.data import TrainingSample
from mmspec.train.distil import Distillation, expected_tokens, losses
from mmspec.train.recipes import MSD, RECIPES, VISPEC, Recipe
from mmspec.train.stop import Stop
from mmspec.train.trace import Trace

RECIPE = Recipe(
    steps=6, batch=4, lr=3e-3, unroll=3, muon=True, held_out=4, max_new_tokens=12, sampled=0.5, token_weight=1.0
)
METHODS = [n for n, e in DRAFTERS.items() if e.trained and n not in ("block", "heads")]  # these have files of their own
SHAPES: dict[str, dict[str, Any]] = {
    "flash": {"tokens": 3, "depth": 3, "tree": "dynamic"},
    "specvlm": {"gate_width": 8, "prune_ratio": 2},
}


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A JSONL of twelve pictures and prompts, one of them with two pictures."""
    folder = tmp_path_factory.mktemp("questions")
    lines = tiny_llava.noise(folder, 12)
    lines[3] = {"images": ["3.png", "4.png"], "question": "w7 w8"}
    return tiny_llava.listed(folder, lines)


def _drafter() -> EagleDrafter:
    torch.manual_seed(1)
    return build("eagle", tiny_llava.model())


def _made(method: str, **shape: Any) -> FeatureDrafter:
    """An untrained drafter of a method whose zeros are filled, so that every part of it matters."""
    torch.manual_seed(1)
    made = build(method, tiny_llava.model(), **{**SHAPES.get(method, {}), **shape})
    with torch.no_grad():
        for weight in made.parameters():
            weight.add_(0.05 * torch.randn_like(weight))
    return made


def _run(
    out: Path, questions: Path, recipe: Recipe = RECIPE, drafter: FeatureDrafter | None = None, **options: Any
) -> Distillation:
    model, processor = tiny_llava.model(), tiny_llava.processor()
    model.generation_config.eos_token_id = 2
    drafter = drafter or _drafter()
    teacher = Teacher(model, processor, drafter.features)
    teacher.__enter__()
    return Distillation(drafter, teacher, data.read(str(questions)), recipe, out, **options, accelerator=Accelerator())


def _watch(run: Distillation, seen: Callable[[Trace, float], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Show each step's trace and loss once it is made."""
    update = run.update

    def watched(trace: Trace) -> Any:
        loss, agree = update(trace)
        seen(trace, loss)
        return loss, agree

    monkeypatch.setattr(run, "update", watched)


def _most_frequent(ids: Sequence[int], run: Distillation) -> bool:
    """Whether these are nine tokens, in order, of which the answers have more than of others."""
    seen = Counter(token for answer in run.answers(run.samples, "train") for token in answer)
    others = [n for token, n in seen.items() if token not in ids]
    return [*ids] == sorted({*ids}) and len(ids) == 9 and min(seen[token] for token in ids) >= max(others)


def _split(run: Distillation) -> list[str]:
    return [sample.prompt for sample in (*run.held_out, *run.samples)]


def test_the_trace_is_what_generation_saw(questions: Path) -> None:
    model, processor = tiny_llava.model(), tiny_llava.processor()
    samples = data.read(str(questions))[2:4]
    with Teacher(model, processor, (-1,)) as teacher:
        answers = teacher.answers(samples, 8, 0.0)
        trace = teacher.trace(samples, answers)
        greedy = teacher.head(trace.final).argmax(-1)
    assert type(model.get_decoder()).__name__ == "LlamaModel" and "Tap" not in str(type(model.get_decoder()).__mro__)
    for b, answer in enumerate(answers):
        places = trace.answered[b].nonzero()[:, 0]
        assert trace.ids[b, places].tolist() == answer
        assert greedy[b, places - 1].tolist() == answer  # each answer token is the target's own choice before it
    inputs = chat_inputs(processor, [samples[1].prompt], [samples[1].load()])
    assert (trace.ids[1] == tiny_llava.IMAGE_TOKEN).sum() == (inputs["input_ids"] == tiny_llava.IMAGE_TOKEN).sum() == 8


def test_a_drafter_that_returns_the_targets_features_has_no_loss_to_learn(questions: Path) -> None:
    """Planted perfection: were step i the target's feature, every step would agree; shifted by one it would not."""
    run = _run(questions.parent / "perfect", questions)
    samples = run.samples[:3]
    trace = run.teacher.trace(samples, run.teacher.answers(samples, 10, 0.0))
    wanted = trace.final[:, 1:]

    class Perfect:
        def __init__(self, offset: int) -> None:
            self.offset = offset

        def __call__(self, *_: torch.Tensor) -> list[torch.Tensor]:
            return [torch.roll(wanted, -(i + self.offset), 1) for i in range(RECIPE.unroll)]

    class Head:
        masked = positioned = False
        logits = staticmethod(lambda z, teacher: teacher.head(z))
        head = TargetHead()

    _, agree = losses(Head, Perfect(0), run.teacher, trace, RECIPE)
    assert agree.all() and expected_tokens(agree) == 1 + RECIPE.unroll
    _, wrong = losses(Head, Perfect(1), run.teacher, trace, RECIPE)
    assert not wrong.all()


def test_a_stopped_run_goes_on_to_the_same_weights(questions: Path, tmp_path: Path) -> None:
    goes_on(lambda out: _run(out, questions), tmp_path, "update", 3, signal.SIGINT, measure_every=3)


def test_a_second_ctrl_c_stops_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt), Stop(Accelerator(), torch.device("cpu")) as stop:
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
            assert stop.asked() == stop.noted
            signal.raise_signal(number)
    assert stop.noted and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert capfd.readouterr().err.count("stopping after this step; Ctrl-C again stops at once") == 1


def test_another_recipe_does_not_take_over_a_run(
    questions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _run(tmp_path, questions).run()
    said = capsys.readouterr().err  # no terminal, and yet it says what it does
    assert "answers (held-out): " in said and "answers (train): " in said and "train: " in said
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ValueError, match="another recipe"):
        _run(tmp_path, questions, RECIPE.with_(lr=1e-3))
    for other, told in ((_made("msd"), "method 'eagle', and this"), (_made("eagle", rope_theta=9.0), "rope_theta 1")):
        with pytest.raises(ValueError, match=f"made for a drafter with {told}"):
            _run(tmp_path, questions, drafter=other)
    _run(tmp_path, questions, drafter=_made("eagle", depth=9))  # a recommendation
    (tmp_path / "checkpoint.pt").write_bytes(b"")
    with pytest.raises(ValueError, match=r"checkpoint.pt cannot be read \(.*delete it: the answers are kept"):
        _run(tmp_path, questions)
    assert sorted(tmp_path.iterdir()) == before


def test_weights_that_are_lost_are_not_saved(questions: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"the loss of step \d is nan, so training has diverged"):
        _run(tmp_path, questions, RECIPE.with_(lr=1e30, muon=False)).run(save_every=0.0)
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert saved["step"] == 1 and all(t.isfinite().all() for t in saved["drafter"].values())


@pytest.mark.full
def test_training_pays(questions: Path, tmp_path: Path) -> None:
    """From the command's own function to an enabled model: a trained drafter is accepted more than an untrained one."""
    model, processor = tiny_llava.model(), tiny_llava.processor()
    model.generation_config.eos_token_id = 2
    recipe = RECIPE.with_(steps=150, batch=8, lr=1e-2, sampled=0.0, max_new_tokens=24)
    learned = _run(tmp_path / "none", questions, recipe).samples  # a random target's habits carry over to no others
    asked = [chat_inputs(processor, [sample.prompt], [sample.load()]) for sample in learned]

    def answers() -> list[torch.Tensor]:
        return [model.generate(**inputs, max_new_tokens=24, do_sample=False) for inputs in asked]

    stock = answers()
    with mmspec.enable(model, drafter=_drafter(), depth=3, width=1) as before:
        answers()
    train(model, processor, "eagle", str(questions), tmp_path, recipe)
    with mmspec.enable(model, drafter=tmp_path / "drafter", depth=3, width=1) as after:
        assert all(map(torch.equal, answers(), stock))
    assert after.stats.tokens_per_target_call > before.stats.tokens_per_target_call + 0.5
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["held_out_tau"] > 1.0 and report["curve"][-1]["step"] == report["recipe"]["steps"]
    assert report["curve"][-1]["held_out_tau"] > 1.0 and report["curve"][-1]["loss"] > 0


def _damaged(folder: Path, names: tuple[str, ...] = ("0", "5", "7")) -> str:
    """A list of eight pictures: the first named is no picture, the second is cut short, the third is not there."""
    lines = tiny_llava.noise(folder, 8)
    torn = (folder / f"{names[1]}.png").read_bytes()[:-900]
    for name, content in zip(names, (b"no picture", torn, None), strict=True):
        path = folder / f"{name}.png"
        path.unlink() if content is None else path.write_bytes(content)
    return str(tiny_llava.listed(folder, [{**line, "prompt": f"w{5 + i} w9"} for i, line in enumerate(lines)]))


def test_pictures_that_cannot_be_read_are_left_out(tmp_path: Path) -> None:
    recipe = RECIPE.with_(held_out=2, writing=2)
    held = data.hold_out(data.read(_damaged(tmp_path)), 2, recipe.seed)
    bad = tuple(str(i) for i in range(8) if i not in held)[1::2]
    questions, shared = Path(_damaged(tmp_path, bad)), tmp_path / "answers"
    run = _run(tmp_path / "run", questions, recipe, answers=shared)
    with pytest.warns(
        UserWarning, match=rf"left out: 3 of 6 samples \(train\) cannot be read; the first: .*{bad[0]}\.png\S*: is n"
    ):
        found = run.answers(run.samples, "train")
    assert [bool(answer) for answer in found] == [True, False] * 3
    Image.new("RGB", (28, 28)).save(tmp_path / f"{bad[2]}.png")  # is there the next time
    with pytest.warns(UserWarning, match="left out: 2 of 6"):
        again = _run(tmp_path / "again", questions, recipe, answers=shared).answers(run.samples, "train")
    assert again[:5] == found[:5] and again[5]
    (path,) = shared.iterdir()
    written = path.read_text()
    Image.new("RGB", (56, 28), "red").save(tmp_path / f"{bad[2]}.png")  # another one in its place
    with pytest.warns(UserWarning, match="left out: 2 of 6"):
        last = _run(tmp_path / "last", questions, recipe, answers=shared).answers(run.samples, "train")
    assert last[:5] == found[:5]
    assert [*json.loads(path.read_text().removeprefix(written))] == [f"{run.samples[5].key} {run.samples[5].stamp()}"]


def test_training_goes_on_without_a_broken_picture(tmp_path: Path) -> None:
    model, processor = tiny_llava.model(), tiny_llava.processor()
    recipe = RECIPE.with_(steps=2, batch=2, held_out=2)
    with pytest.warns(UserWarning, match="left out: "):
        train(model, processor, "eagle", _damaged(tmp_path), tmp_path / "run", recipe)
    assert (tmp_path / "run" / "report.json").is_file()


def test_no_picture_that_can_be_read(tmp_path: Path) -> None:
    held = data.hold_out(data.read(_damaged(tmp_path)), 3, RECIPE.seed)
    _damaged(tmp_path, tuple(map(str, held)))
    run = _run(tmp_path / "run", tmp_path / "data.jsonl", RECIPE.with_(held_out=3))
    with pytest.raises(ValueError, match=rf"3 of 3 samples \(held-out\) cannot be read; the first: .*{held[0]}\.png"):
        run.run()


@pytest.mark.parametrize(
    ("source", "content", "told"),
    [
        ("nowhere", None, "unknown data source"),
        (".", None, "no samples"),
        ("x.jsonl", '{"image": ', "line 1"),
        ("x.jsonl", '{"prompt": "w5"}\n{"prompt": "w5", "video": "a.mp4"}',
         r"x.jsonl, line 2: 'video' holds a video, .*its frames as 'images'"),
        ("x.jsonl", '{"prompt": "w5"}\n' + "[" * 200_000, "line 2: a sample needs"),
        ("x.jsonl", '{"prompt": ""}', "line 1: .*the prompt must be a string that is not empty"),
    ],
    ids=["nowhere", "empty", "broken", "a video", "nested too deep", "no prompt"],
)  # fmt: skip
def test_bad_data(source: str, content: str | None, told: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / source).write_text(content)
    with pytest.raises(ValueError, match=told):
        data.read(str(tmp_path / source))


def test_a_data_set_without_its_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"pip install datasets"):
        data.read("hf:owner/name")


def test_training_opens_what_captioning_would_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Formats and limits are the captioner's: no EPS, which starts Ghostscript; no bomb of 400 million pixels."""
    (tmp_path / "0.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n")
    Image.new("1", (20_000, 8_000)).save(tmp_path / "1.png")
    monkeypatch.setattr("subprocess.check_call", lambda *_, **__: pytest.fail("a program was started"))
    eps, bomb = data.read(str(tmp_path))
    with pytest.raises(data.UnreadableError, match="is not an image that can be read here"):
        eps.load()
    with pytest.raises(data.UnreadableError, match=r"over 50 million|more pixels than can be opened safely"):
        bomb.load()


NAMED = ("{elsewhere}/0.png", "../elsewhere/0.png", "http://169.254.169.254/0.png", "in/../../elsewhere/0.png")


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("kind", ["jsonl", "hf"])
def test_rows_of_training_data_choose_no_file_and_no_address(kind: str, name: str, tmp_path: Path) -> None:
    elsewhere, own = tmp_path / "elsewhere", tmp_path / "own"
    for folder in (elsewhere, own):
        folder.mkdir()
        Image.new("RGB", (8, 8)).save(folder / "0.png")
    names = ["0.png", name.format(elsewhere=elsewhere)]
    if kind == "jsonl":
        source = str(own / "data.jsonl")
        Path(source).write_text("".join(json.dumps({"image": name, "prompt": "?"}) + "\n" for name in names))
    else:
        datasets = pytest.importorskip("datasets")
        arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        note = {"huggingface": json.dumps({"info": {"features": {"image": {"_type": "Image"}}}})}
        form = arrow.struct({"bytes": arrow.binary(), "path": arrow.string()})
        cells = [{"bytes": None, "path": str(path)} for path in (own / names[0], names[1])]
        made = arrow.table({"image": arrow.array(cells, form)})
        parquet.write_table(made.replace_schema_metadata(note), own / "train.parquet")
        table = datasets.load_dataset(str(own), split="train")
        assert table.features["image"].decode  # what the library would open by itself
        source = f"hf:{own}"
    mine, other = data.read(source)
    assert mine.load()[0].size == (8, 8)
    with pytest.raises(data.UnreadableError, match=r"lies outside of|is on the web"):
        other.load()


def _words(folder: Path, questions: Path) -> list[str]:
    target = tiny_llava.save(folder / "model")
    return ["train", "--target", f"{target}", "--data", f"{questions}", "--device", "cpu", "--out", f"{folder / 'run'}"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--device", "foo"], "no device 'foo' here"),
        (["--target", "nosuch"], "no folder 'nosuch'. A name on the Hub has the form owner/name"),
        (["--shape", "bogus=1"], "--shape: there is no 'bogus'; choose from adaptive, depth, draft_vocab"),
        (["--shape", "depth=deep"], "--shape: depth is a whole number from 0 on, such as 5; got 'depth=deep'"),
        (["--shape", "draft_vocab=-1"], "--shape: draft_vocab is a whole number from 0 on, such as 0; got"),
        (["--set", "held_out=4", "--shape", "draft_vocab=129"], "draft_vocab from 0 to the vocabulary's 128; got"),
        (["--set", "held_out=4", "--shape", "features=1,2"], "does not fit"),
        (["--set", "held_out=4", "confidence_weight=1.0"], "is for drafters with a confidence head"),
        (["--text", "scenes:4"], "has no stage on text, as those of msd and vispec have; leave --text out"),
        (["--set", "steps=1e3"], "--set: steps is a whole number from 0 on, such as 20000; got 'steps=1e3'"),
        (["--set", "lr=-1"], "--set: lr is a number from 0 on, such as 3e-05; got 'lr=-1'"),
        (["--set", "writing=0"], "writing must be at least 1; got 0"),
        (["--set", "muon"], "--set: muon is true or false, such as False; got 'muon'"),
        (["--set", "batch=0"], "batch must be at least 1; got 0"),
        (["--set", "gate_samples=0"], "gate_samples must be at least 1; got 0"),
        (["--set", "betas=[0.9]"], "betas must be two numbers; got (0.9,)"),
        (["--set", "betas=['a','b']"], "betas must be two numbers; got ('a', 'b')"),
        (["--set", "token_weight=nan"], "token_weight is a number from 0 on, such as 0.1; got"),
        (
            ["--set", "feature_weight=0", "token_weight=0"],
            "nothing is left to learn: confidence_weight, feature_weight",
        ),
        (["--set", "held_out=0"], "held_out must be at least 1; got 0"),
        (["--set", "speed=2"], "--set: there is no 'speed'; choose from anchors, batch, betas"),
        (["--out", __file__], "is a file; name a folder"),
        (["--limit", "3"], "3 samples are too few: this recipe holds 64 out to measure τ,"),
        (["--limit", "12"], "give more pictures or prompts, or hold fewer out: --set held_out=4"),
        (["--data", "nowhere"], "unknown data source 'nowhere'"),
    ],
)
def test_the_command_says_what_is_wrong(
    words: list[str], told: str, tmp_path: Path, questions: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*_words(tmp_path, questions), *words]) == 1
    last = capsys.readouterr().err.splitlines()[-1]  # below the bars of what was loaded
    assert last.startswith("mmspec train: ") and told in last


def test_one_run_at_a_time_trains_in_a_folder(
    tmp_path: Path, questions: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*_words(tmp_path, questions), "--set", "steps=1", "batch=2", "held_out=4", "max_new_tokens=8"]
    (tmp_path / "run").mkdir()
    with (tmp_path / "run" / ".lock").open("wb") as file:
        assert hold(file.fileno()) and cli.main(words) == 1
        assert "another run trains in" in capsys.readouterr().err
    assert cli.main(words) == 0


def test_a_signal_stops_the_command_after_its_step_and_the_same_command_resumes(
    tmp_path: Path, questions: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*_words(tmp_path, questions), "--set", "steps=4", "batch=2", "held_out=4", "max_new_tokens=8"]
    for part, told in (("answers", "stopped; run"), ("update", "stopped, step 1 of 4 is saved; run")):
        own = getattr(Distillation, part)
        with monkeypatch.context() as patch:
            patch.setattr(Distillation, part, lambda *args, own=own: signal.raise_signal(signal.SIGTERM) or own(*args))
            assert cli.main(words) == 130
        assert capsys.readouterr().err.endswith(f"mmspec train: {told} the same command again to resume\n")
    state = torch.load(tmp_path / "run" / "checkpoint.pt")
    torch.save({**state, "lasted": state["lasted"] + 600}, tmp_path / "run" / "checkpoint.pt")
    assert cli.main(words) == 0 and "resumes at step 1 of 4" in capsys.readouterr().out
    assert 10 < json.loads((tmp_path / "run" / "report.json").read_text())["minutes"] < 11


def test_all_is_on_the_targets_device(questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where accelerate would take another one; only of several processes it gives each its own."""
    Accelerator()  # has looked for other processes
    monkeypatch.setattr(Accelerator, "device", torch.device("meta"))
    words = [*_words(tmp_path, questions), "--set", "steps=1", "batch=2", "held_out=4", "max_new_tokens=8"]
    assert cli.main(words) == 0
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert _opened(words[2], False, "cpu")[0].device.type == "meta"


@pytest.mark.parametrize(
    ("fails", "error", "told"),
    [
        ("torch.save", RuntimeError("[enforce fail] . unexpected pos 64\nframe #0"),
         "cannot be written ([enforce fail] . unexpected pos 64): '{run}/checkpoint.pt'; free space and run the same "),
        ("mmspec.train.distil.losses", torch.OutOfMemoryError("CUDA out of memory. Tried to\nallocate"),
         "OutOfMemoryError: CUDA out of memory. Tried to\nlower batch or anchors by --set, or writing or max_new_"),
    ],
    ids=["a full disk", "a full GPU"],
)  # fmt: skip
def test_what_ends_a_run_is_told_with_what_to_do(
    fails: str, error: Exception, told: str, tmp_path: Path, questions: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def failing(*_: Any) -> None:
        raise error

    monkeypatch.setattr(fails, failing)
    words = [*_words(tmp_path, questions), "--set", "steps=1", "batch=2", "held_out=4", "max_new_tokens=8"]
    assert cli.main(words) == 1 and told.format(run=tmp_path / "run") in capsys.readouterr().err


def test_drawn_scenes_and_folders_are_sources(questions: Path) -> None:
    scenes = data.read("scenes:3", seed=1)
    assert [s.load()[0].size for s in scenes] == [(96, 96)] * 3
    assert len(data.read(str(questions.parent), limit=5)) == 5


def test_what_is_held_out_is_a_sample_of_all(tmp_path: Path) -> None:
    def held(source: object, seed: int = 0, count: int = 8) -> list[str]:
        samples = data.read(str(source))
        return [samples[i].name or samples[i].prompt for i in data.hold_out(samples, count, seed)]

    folder, rows = tmp_path / "set", tmp_path / "rows.jsonl"
    folder.mkdir()
    for number in range(40):
        (folder / f"b{number:02}.png").touch()
    first = held(folder)
    assert max(first) > "b30" and len({*first}) == 8 and held(folder, seed=1) != first
    (folder / "a.png").touch()  # the first by name
    assert len({*held(folder)} & {*first}) >= 7
    rows.write_text("".join(f'{{"image": "b{n // 4:02}.png", "prompt": "{n}"}}\n' for n in range(80)))
    assert len({*held(rows)}) == 2  # all four questions about each of two pictures
    assert len(held(rows, count=6)) == 8  # the second one's, too
    assert held("pictures:20") == [sample.prompt for sample in data.read("pictures:8")]
    texts = tmp_path / "texts"
    texts.write_text("\n".join(str(n % 20) for n in range(60)))
    assert len(held(f"prompts:{texts}", count=7)) == 9 and len({*held(f"prompts:{texts}", count=7)}) == 3


def test_what_shows_a_held_out_picture_is_held_out(tmp_path: Path) -> None:
    """Under another spelling, or beside another picture; what else is held out stays if others are added."""
    shown = [[name] for n in range(20) for name in (f"{n}.png", f"./{n}.png", f"in/../{n}.png")]
    shown += [[f"{n}.png", f"{n + 1}.png"] for n in range(0, 12, 3)]
    path = tmp_path / "data.jsonl"

    def split(count: int) -> tuple[set[str], set[str]]:
        """The pictures that are held out, and those to learn from."""
        path.write_text("".join(json.dumps({"images": images, "prompt": "?"}) + "\n" for images in shown))
        held = {*data.hold_out(data.read(str(path)), count, 0)}
        measured, learnt = (
            {Path(name).name for i, names in enumerate(shown) if (i in held) is side for name in names}
            for side in (True, False)
        )
        return measured, learnt

    measured, learnt = split(6)
    assert 2 <= len(measured) <= 4 and not measured & learnt and len(measured | learnt) == 20
    shown += [["21.png"], ["22.png", "23.png"]]
    assert len(split(6)[0] & measured) >= len(measured) - 2


def test_an_older_run_goes_on_with_what_it_held_out(questions: Path, tmp_path: Path) -> None:
    run = _run(tmp_path, questions)
    asked, first = data.read(str(questions)), RECIPE.held_out
    assert run.held_out != asked[:first] and _split(run) == _split(_run(tmp_path, questions))
    run.save()
    assert _split(run) == _split(_run(tmp_path, questions))
    state = torch.load(tmp_path / "checkpoint.pt")
    del state["named"]
    torch.save(state, tmp_path / "checkpoint.pt")
    older = _run(tmp_path, questions)
    older.save()
    assert _split(older) == _split(_run(tmp_path, questions)) == [sample.prompt for sample in asked]


def test_files_of_a_folder_that_are_hidden_or_no_pictures_are_left_out(tmp_path: Path) -> None:
    for name in ("a.png", "below/b.JPG", "c.tiff", "d.avif", "below/._b.JPG", ".cache/c.png", "notes.txt", "e.MP4"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    with pytest.warns(UserWarning, match=r"left out of .*, no pictures: videos: 1 \(a .*\), others: 1$"):
        assert len(data.read(str(tmp_path))) == 4


@pytest.mark.parametrize(
    ("begin", "why"),
    [
        (lambda *_: RECIPE.with_(speed=2), "unknown recipe value 'speed'"),
        (lambda *_: build("msd", tiny_llava.model(), num_q=3), "num_q"),
        (
            lambda data, out: train(tiny_llava.model(), tiny_llava.processor(), "flash", str(data), out, RECIPE),
            "unroll=5",
        ),
        (lambda data, out: _run(out, data, VISPEC.with_(held_out=4)), "--text none"),
        (lambda data, out: _run(out, data, RECIPE.with_(vocabulary=9), _made("eagle", draft_vocab=9)), "leave it out"),
    ],
)
def test_what_does_not_go_together_is_refused(begin: Any, why: str, questions: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=why):
        begin(questions, tmp_path)


# -- every method ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.every(4)
def test_every_method_learns_and_the_output_stays_the_targets(method: str, questions: Path, tmp_path: Path) -> None:
    model, processor = tiny_llava.model(), tiny_llava.processor()
    model.generation_config.eos_token_id = 2
    recipe = RECIPE.with_(steps=30, lr=1e-2, max_new_tokens=20, sampled=0.0, gate_samples=4)
    drafter, answers = _made(method), questions.parent / "answers"
    run = _run(tmp_path / "before", questions, recipe, drafter, answers=answers)
    trace = run.lesson(run.samples, "train").trace([0, 1, 2, 3])
    first = losses(drafter.eval(), drafter, run.teacher, trace, recipe)[0].item()
    train(model, processor, method, str(questions), tmp_path / "run", recipe, drafter=drafter, keep=0.01)
    assert losses(drafter.eval(), drafter, run.teacher, trace, recipe)[0].item() < 0.9 * first
    sample = data.read(str(questions))[3]  # two pictures
    inputs = chat_inputs(processor, [sample.prompt], [sample.load()])
    stock = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    with mmspec.enable(model, drafter=tmp_path / "run") as handle:  # what `--out` named
        assert torch.equal(model.generate(**inputs, max_new_tokens=16, do_sample=False), stock)
    assert handle.stats.drafted > 0


@torch.no_grad()
@pytest.mark.parametrize("method", METHODS)
def test_rows_that_are_not_asked_for_change_nothing(method: str, questions: Path) -> None:
    run = _run(questions.parent / "rows", questions, drafter=_made(method).eval())
    samples = run.samples[:4]
    trace = run.teacher.trace(samples, run.teacher.answers(samples, 10, 0.0))
    read = trace.embeds[:, 1:], trace.features[:, :-1], trace.visual[:, 1:], trace.valid[:, :-1]
    rows = torch.rand(read[3].shape, generator=torch.Generator().manual_seed(2)) < 0.4
    rows &= (read[2] == 0) & read[3]
    for whole, some in zip(run.drafter(*read, 3), run.drafter(*read, 3, 0, rows), strict=True):
        torch.testing.assert_close(some[rows], whole[rows], rtol=1e-4, atol=1e-5)
        assert not some[~rows].any() and whole[rows].any(-1).all()


# -- stages ----------------------------------------------------------------------------------------------------------


def _texts() -> list[TrainingSample]:
    return [TrainingSample(list, f"w{40 + i} w11", 0) for i in range(6)]


def test_msd_reads_text_first_and_pictures_at_last(
    questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = MSD.with_(steps=8, batch=2, held_out=4, max_new_tokens=12, noise=0.0)
    run, seen = _run(tmp_path, questions, recipe, _made("msd"), texts=_texts()), []
    _watch(run, lambda trace, _: seen.append({*(trace.visual > 0).any(1).tolist()}), monkeypatch)
    run.run()
    assert seen[:4] == [{False}] * 4 and seen[-1] == {True} and {True, False} not in seen  # a batch is of one kind


def test_vispec_leaves_its_vision_part_alone_on_text(
    questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = VISPEC.with_(steps=4, batch=2, held_out=4, max_new_tokens=12, suffix="w9 w9")
    run = _run(tmp_path, questions, recipe, _made("vispec"), texts=_texts())
    assert all(sample.prompt.endswith(" w9 w9") for sample in run.samples)
    states = [copy.deepcopy(run.drafter.state_dict())]
    _watch(run, lambda *_: states.append(copy.deepcopy(run.drafter.state_dict())), monkeypatch)
    run.run()
    vision = [name for name in states[0] if name.startswith(("img_fc", "adaptor"))]
    others = [name for name in states[0] if name.startswith(("fc", "block"))]
    for name in vision:
        assert torch.equal(states[0][name], states[2][name]) and not torch.equal(states[2][name], states[4][name])
    assert others and not any(torch.equal(states[0][name], states[2][name]) for name in others)


# -- answers and traces ----------------------------------------------------------------------------------------------


def test_methods_share_the_targets_answers(questions: Path, tmp_path: Path) -> None:
    shared = tmp_path / "answers"
    first = _run(tmp_path / "eagle", questions, answers=shared).lesson(_run(tmp_path, questions).samples, "train")
    second = _run(tmp_path / "msd", questions, drafter=_made("msd"), answers=shared)
    second.teacher.answers = None  # type: ignore[assignment, method-assign]
    assert second.lesson(second.samples, "train").answers == first.answers
    third = _run(tmp_path / "more", questions, RECIPE.with_(max_new_tokens=6), answers=shared)
    assert max(map(len, third.answers(third.samples, "train"))) <= 6


@pytest.mark.parametrize("damaged", [b'{"6', b"null", b'{"9": 5}', b'{"9": [null]}', b"\xff\xfe"])
def test_a_torn_or_damaged_line_is_written_again(damaged: bytes, questions: Path, tmp_path: Path) -> None:
    run = _run(tmp_path, questions, RECIPE.with_(writing=3))
    whole = run.answers(run.samples, "train")
    [file] = tmp_path.glob("answers-train-*")
    *lines, last = file.read_bytes().splitlines()
    file.write_bytes(b"\n".join([*lines, damaged]))
    assert last and run.answers(run.samples, "train") == whole == run.answers(run.samples, "train")


def test_the_answers_stay_where_samples_are_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with another number of processes; two samples that are the same have an answer each."""
    shared, lines, asked = tmp_path / "answers", tiny_llava.noise(tmp_path, 9), list[str]()

    def answered(out: str, lines: list[dict[str, Any]]) -> tuple[Distillation, list[list[int]]]:
        run = _run(tmp_path / out, tiny_llava.listed(tmp_path, lines), RECIPE.with_(writing=2), answers=shared)
        own = run.teacher.answers
        monkeypatch.setattr(
            run.teacher, "answers", lambda group, *how: asked.extend(s.key for s in group) or own(group, *how)
        )
        return run, run.answers(run.samples, "train")

    run, first = answered("first", [*lines[1:], lines[5]])
    assert sorted(asked) == sorted({s.key for s in run.samples}) and len(asked) == len(run.samples)
    known = {s.key: a for s, a in zip(run.samples, first, strict=True)}
    asked.clear()
    more, second = answered("second", [*lines, lines[5]])
    assert 0 < len(asked) <= 2 and not {*asked} & known.keys()
    assert all(known.get(s.key, a) == a for s, a in zip(more.samples, second, strict=True))
    asked.clear()
    monkeypatch.setattr(Accelerator, "num_processes", 2)
    assert answered("third", [*lines, lines[5]])[1] == [a if i % 2 == 0 else [] for i, a in enumerate(second)]
    assert not asked


def test_what_is_remembered_is_what_was_seen(questions: Path, tmp_path: Path) -> None:
    run = _run(tmp_path, questions, room=2**30)
    lesson = run.lesson(run.samples, "train")
    assert sorted(lesson.cache) == list(range(len(lesson.samples)))
    places = [0, 1, 2]
    kept = lesson.trace(places)
    fresh = run.teacher.trace([lesson.samples[i] for i in places], [lesson.answers[i] for i in places])
    for name in ("ids", "valid", "answered", "visual"):
        assert torch.equal(getattr(kept, name), getattr(fresh, name)), name
    for name in ("embeds", "features", "final"):
        real = fresh.valid
        torch.testing.assert_close(getattr(kept, name)[real], getattr(fresh, name)[real], rtol=1e-4, atol=1e-4)
    small = _run(tmp_path, questions, room=1)
    assert 0 < len(small.lesson(run.samples, "train").cache) < len(lesson.cache)
    assert not small.lesson(run.held_out, "held-out").cache  # there is one room for all lessons


def test_a_draft_vocabulary_is_the_answers_most_frequent_tokens(questions: Path, tmp_path: Path) -> None:
    drafter = _made("eagle", draft_vocab=9)
    run = _run(tmp_path, questions, RECIPE.with_(steps=0), drafter)
    run.run()
    ids = drafter.head.ids.tolist()
    head = run.teacher.model.get_output_embeddings().weight
    assert drafter.head.own and _most_frequent(ids, run)
    torch.testing.assert_close(drafter.head.weight, head[ids])


def test_a_vocabulary_is_learnt_written_and_proposed_from(questions: Path, tmp_path: Path) -> None:
    """On the target's head: the loss is over the most frequent tokens, and the file says which they are."""
    run = _run(tmp_path, questions, RECIPE.with_(steps=1, vocabulary=9), drafter := _made("eagle"))
    run.run()
    ids = drafter.config.proposes
    assert _most_frequent(ids, run)
    hidden = torch.randn(3, drafter.config.hidden)
    head = run.teacher.model.get_output_embeddings().weight
    torch.testing.assert_close(drafter.logits(hidden, run.teacher), (hidden @ head.T)[:, [*ids]])
    save_drafter(drafter, tmp_path / "drafter")
    handle = mmspec.enable(model := tiny_llava.model(), drafter=str(tmp_path / "drafter"))
    assert handle.drafter.options.draft_vocab == ids and handle.drafter.head.ids.tolist() == [*ids]
    mmspec.disable(model)
    assert drafter.chosen({"draft_vocab": "all"}).draft_vocab == "all"


@pytest.mark.parametrize("changes", [{"draft_vocab": 120}, {"proposes": tuple(range(3, 120))}])
def test_a_saved_drafter_goes_on_with_the_tokens_that_it_has(
    changes: dict[str, Any], questions: Path, tmp_path: Path
) -> None:
    save_drafter(first := _made("eagle", **changes), tmp_path / "first")
    recipe = RECIPE.with_(steps=1, batch=2, held_out=4, lr=1e-6, muon=False, vocabulary=len(first.config.proposes))
    before = {name: weight.clone() for name, weight in first.state_dict().items()}
    given = mmspec.load_drafter(tmp_path / "first")
    made = train(tiny_llava.model(), tiny_llava.processor(), "eagle", str(questions), tmp_path, recipe, drafter=given)
    after = made.state_dict()
    assert made.config.proposes == first.config.proposes and any(not torch.equal(after[k], before[k]) for k in before)
    for name, weight in before.items():
        torch.testing.assert_close(after[name], weight, rtol=0, atol=1e-5)
    assert made.head.own or made.head.ids.tolist() == [*first.config.proposes]
    if not made.head.own:
        with pytest.warns(UserWarning, match="goes on proposing from its 117 tokens; vocabulary=9"):
            _run(tmp_path / "other", questions, recipe.with_(vocabulary=9), given, trained=True)


def test_answers_of_all_processes_count_for_the_draft_vocabulary(
    questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = _made("eagle", draft_vocab=9)
    run, last = _run(tmp_path, questions, RECIPE.with_(steps=0), drafter), drafter.config.vocab - 1
    other = torch.eye(last + 1, dtype=torch.long)[last] * 999  # counts of another process
    monkeypatch.setattr(run.accelerator, "reduce", lambda mine, how: mine + other if len(mine) == len(other) else mine)
    run.run()
    assert last in drafter.head.ids and run._seen([[1, 1, last]])[1] == 2 and run._seen([[]])[last] == 999


def test_the_gate_learns_what_each_question_needs(questions: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: with two pictures only the third branch is cheap, with one only the second."""
    drafter = _made("specvlm")
    run = _run(questions.parent / "gate", questions, drafter=drafter)
    lesson = run.lesson(list(run.samples) + list(run.held_out), "all")
    names = drafter.config.branches

    def planted(fixed: Any, teacher: Any, trace: Trace, recipe: Recipe) -> torch.Tensor:
        cheap = names[2] if trace.visual.max() == 2 else names[1]
        return torch.tensor(float(fixed.config.gate != cheap))

    monkeypatch.setattr(gate, "_cost", planted)
    traces = (lesson.trace([i]) for i in range(len(lesson.samples)))
    shares = gate.learn(drafter, run.teacher, traces, RECIPE.with_(gate_steps=400))
    two = sum(sample.images == 2 for sample in lesson.samples) / len(lesson.samples)
    assert shares == pytest.approx({names[1]: 1 - two, names[2]: two})


@pytest.mark.parametrize("mode", ["select", "weight"])
def test_a_gate_learns_along_with_the_rest(mode: str, questions: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = _made("specvlm", gate=mode, branches=("prune", "pool", "conv"))
    before = {name: weight.detach().clone() for name, weight in drafter.gate.named_parameters()}
    recipe = RECIPE.with_(steps=12, gate_learns="along" if mode == "select" else "after")
    run = _run(questions.parent / f"along-{mode}", questions, recipe, drafter)
    monkeypatch.setattr(gate, "learn", lambda *_: pytest.fail("it has learnt"))
    seen: list[tuple[float, float]] = []
    _watch(run, lambda _, loss: seen.append((drafter.gate.heat, loss)), monkeypatch)
    run.run()
    heats, lost = map(list, zip(*seen, strict=True))
    assert max(lost[-4:]) < min(lost[:4])
    assert all(not torch.equal(weight, before[name]) for name, weight in drafter.gate.named_parameters())
    if mode == "select":
        assert heats == sorted(heats, reverse=True) and 0.95 < heats[0] < 1 and heats[-1] == 0.5


def test_the_gate_of_a_weighted_sum_lowers_the_loss_by_itself(questions: Path) -> None:
    drafter = _made("specvlm", gate="weight", branches=("prune", "pool", "conv")).eval()
    run = _run(questions.parent / "weighs", questions, drafter=drafter)
    trace = run.teacher.trace(run.samples[:4], run.teacher.answers(run.samples[:4], 12, 0.0))
    optimizer, lost = torch.optim.Adam(drafter.gate.parameters(), lr=0.01), list[float]()
    for _ in range(12):
        loss = losses(drafter, drafter, run.teacher, trace, RECIPE)[0]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        lost.append(loss.item())
    assert all(later < before for before, later in itertools.pairwise(lost))


def test_a_run_goes_on_that_was_begun_before_the_recipe_had_a_value(questions: Path) -> None:
    out = questions.parent / "older"
    run = _run(out, questions)
    run.save()
    state = torch.load(run.checkpoint, weights_only=True)
    recipe = json.loads(state["recipe"])
    del recipe["gate_learns"]
    torch.save({**state, "recipe": json.dumps(recipe), "step": 2}, run.checkpoint)
    run.resume()
    assert run.step == 2
    with pytest.raises(ValueError, match="another recipe"):
        _run(out, questions, RECIPE.with_(gate_learns="along")).resume()


def test_a_branch_is_charged_for_the_rows_that_it_leaves(questions: Path) -> None:
    run = _run(questions.parent / "charged", questions, drafter=_made("specvlm", prune_ratio=1).eval())
    trace = run.teacher.trace(run.samples[:1], [[5, 6, 7, 8, 9, 10]])
    costs = {}
    for branch in ("prune", "text"):
        fixed = build("specvlm", tiny_llava.model(), gate=branch, prune_ratio=1).eval()
        free, dear = (gate._cost(fixed, run.teacher, trace, RECIPE.with_(gate_cost=c)).item() for c in (0.0, 2.0))
        costs[branch] = dear - free
    assert costs == pytest.approx({"prune": 2.0, "text": 0.0}, abs=1e-4)


# -- data ------------------------------------------------------------------------------------------------------------


def test_drawn_clips_and_the_mixture_are_sources_in_the_workshop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "DRAWN", data.DRAWN | sources.DRAWN)
    clips = data.read("clips:2")
    assert [len(s.load()) for s in clips] == [s.images for s in clips] == [8, 8]
    assert clips[0].load()[0].tobytes() != clips[0].load()[-1].tobytes() or clips[1].load()[0] != clips[1].load()[-1]
    mixed = data.read("zoo:60")
    images = Counter(min(sample.images, 4) for sample in mixed)
    assert images == {1: 20, 2: 10, 4: 30} and max(s.images for s in mixed) == 8
    assert all(len(sample.load()) == sample.images for sample in mixed[:12])
    assert [s.prompt for s in data.read("zoo:60")] == [s.prompt for s in mixed]


@pytest.mark.parametrize("column", ["image", "images"])
def test_a_dataset_of_conversations_is_a_source(column: str, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    pictures = [Image.new("RGB", (8 + i, 8)) for i in range(3)]
    told = [{"from": "human", "value": "<image>\nWhat is this?"}, {"from": "gpt", "value": "A dot."}]
    kind = datasets.Image() if column == "image" else datasets.List(datasets.Image())
    features = datasets.Features({
        column: kind, "conversations": datasets.List({name: datasets.Value("string") for name in told[0]}),
    })  # fmt: skip
    shown = pictures if column == "image" else [pictures[:1], pictures[:2], []]
    table = datasets.Dataset.from_dict({column: shown, "conversations": [told] * 3}, features)
    table.to_parquet(tmp_path / "data" / "train.parquet")
    samples = data.read(f"hf:{tmp_path}")
    assert [s.prompt for s in samples] == ["What is this?"] * 3
    assert [s.images for s in samples] == ([1, 1, 1] if column == "image" else [1, 2, 0])
    assert [len(s.load()) for s in samples] == [s.images for s in samples]
    assert samples[1].load()[-1].size == (9, 8)


@pytest.mark.parametrize("several", [False, True])
def test_rows_of_a_dataset_about_one_picture_stand_on_one_side(several: bool, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    shown: list[Any] = [{"bytes": bytes([i]) * 9000, "path": "one.png"} for i in (1, 2, 1, 3, 2, 1)]
    shown.append({"bytes": None, "path": "1.png"})
    made = {"image": shown} if not several else {"images": [*[[each] for each in shown], None, []]}
    made |= {"question": [f"w{i}" for i in range(9 if several else 7)]}
    datasets.Dataset.from_dict(made).to_parquet(tmp_path / "data" / "train.parquet")
    samples = data.read(f"hf:{tmp_path}")
    one, two, _, three, _, _, named, *text = [sample.name for sample in samples]
    assert [s.name for s in samples] == [one, two, one, three, two, one, named, *text]
    assert len({one, two, three, named, *text}) == 4 + len(text) and text == ["w7", "w8"][: len(text)]
    assert [s.images for s in samples[7:]] == [0] * len(text) and all(not s.load() for s in samples[7:])
    assert len(data.read(f"hf:{tmp_path}", limit=2)) == 2


def test_batches_hold_what_is_alike_and_every_sample_comes() -> None:
    lengths = [(1 + i % 2, i % 7) for i in range(64)]
    order = data.batches(lengths, 4, seed=3, start=0)
    epoch = [next(order) for _ in range(16)]
    assert sorted(i for batch in epoch for i in batch) == list(range(64))
    assert sum(len({lengths[i][0] for i in batch}) == 1 for batch in epoch) >= 12
    resumed = data.batches(lengths, 4, seed=3, start=5)
    assert [next(resumed) for _ in range(11)] == epoch[5:]
    halves = [data.batches(lengths, 2, 3, 0, process, 2) for process in (0, 1)]
    assert sorted(i for half in halves for i in next(half)) == sorted(epoch[0])


@pytest.mark.parametrize("method", ["eagle", "vispec", "msd", "flash", "specvlm"])
def test_the_embedded_drafters_are_within_their_size(method: str) -> None:
    from benchmarks.zoo.recipes.drafters import DRAFTERS as ZOO

    recipe = ZOO[f"scenes-video-{method}"]
    assert recipe.recipe in RECIPES and recipe.method == method
    model = tiny_llava.model()
    config = replace(build(method, model, **recipe.whole_shape).config, hidden=192, heads=3, kv_heads=3,
                     head_dim=64, vocab=2048)  # fmt: skip
    from mmspec.registry import drafter_class

    assert 2 * sum(p.numel() for p in drafter_class(method)(config).parameters()) <= 1.45e6


@pytest.mark.parametrize("method", ["eagle", "msd", "vispec", "flash", "specvlm", "block"])
def test_a_target_in_bfloat16_is_learnt_from(method: str, questions: Path, tmp_path: Path) -> None:
    """As a GPU loads it: the weights that are learnt stay in float32, and draft for it afterwards."""
    model, processor = copy.deepcopy(tiny_llava.model()).bfloat16(), tiny_llava.processor()
    recipe = RECIPES[method].without_texts()
    unroll = recipe.unroll if method == "flash" else 2
    recipe = recipe.with_(steps=2, batch=2, held_out=2, max_new_tokens=8, unroll=unroll)
    shape = {"block": 4, "features": (0, 1), "layers": 1} if method == "block" else {}
    made = train(model, processor, method, str(questions), tmp_path, recipe, shape={"intermediate": 32, **shape})
    assert {weight.dtype for weight in made.parameters()} == {torch.float32}
    sample = data.read(str(questions))[0]
    inputs = chat_inputs(processor, [sample.prompt], [sample.load()]).to(dtype=torch.bfloat16)
    with mmspec.enable(model, made) as handle:
        model.generate(**inputs, max_new_tokens=6, do_sample=False)
    assert handle.stats.rounds


def test_steps_in_bfloat16_learn_and_leave_the_weights_in_float32(questions: Path) -> None:
    run = _run(questions.parent / "bf16", questions, RECIPE.with_(bf16=True))
    trace = run.lesson(run.samples, "train").trace([0, 1])
    before = [weight.detach().clone() for weight in run.drafter.parameters()]
    with run.computing():
        assert run.teacher.head(trace.final).dtype is torch.bfloat16
    loss, _ = run.update(trace)
    assert 0 < loss < float("inf") and {weight.dtype for weight in run.drafter.parameters()} == {torch.float32}
    assert any(not torch.equal(a, b) for a, b in zip(before, run.drafter.parameters(), strict=True))
