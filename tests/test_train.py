"""Training: the unrolled drafter is the one that decodes, the loss is of the right tokens, a stopped run goes on."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tiny_llava
import torch
from PIL import Image

import mmspec
from mmspec.app.train import build, train
from mmspec.drafters.eagle import EagleDrafter
from mmspec.pipelines.prompts import chat_inputs
from mmspec.pipelines.teacher import Teacher
from mmspec.slots import Lengths, Slots
from mmspec.train import data
from mmspec.train.distil import Distillation, expected_tokens, losses
from mmspec.train.recipes import EagleRecipe

RECIPE = EagleRecipe(
    steps=6, batch=4, lr=3e-3, unroll=3, muon=True, held_out=4, max_new_tokens=12, sampled=0.5, token_weight=1.0
)


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A JSONL of twelve pictures and prompts, one of them with two pictures."""
    folder = tmp_path_factory.mktemp("questions")
    g = np.random.default_rng(0)
    lines = []
    for i in range(12):
        Image.fromarray(g.integers(0, 255, (28, 28, 3), dtype=np.uint8)).save(folder / f"{i}.png")
        lines.append({"image": f"{i}.png", "prompt": f"w{5 + i} w9 w{30 + i}"})
    lines[3] = {"images": ["3.png", "4.png"], "question": "w7 w8"}
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder / "data.jsonl"


def _drafter() -> EagleDrafter:
    torch.manual_seed(1)
    return build("eagle", tiny_llava.model(), None)


def _run(out: Path, questions: Path, recipe: EagleRecipe = RECIPE, drafter: EagleDrafter | None = None) -> Distillation:
    model, processor = tiny_llava.model(), tiny_llava.processor()
    model.generation_config.eos_token_id = 2
    drafter = drafter or _drafter()
    teacher = Teacher(model, processor, drafter.features)
    teacher.__enter__()
    return Distillation(drafter, teacher, data.read(str(questions)), recipe, out)


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


def test_training_unroll_equals_decoding(questions: Path) -> None:
    """Row j of step i is what decoding computes when it has read rows 0..j and goes on i times by itself."""
    run = _run(questions.parent / "unroll", questions)
    drafter = run.drafter
    samples = run.samples[:1]
    trace = run.teacher.trace(samples, run.teacher.answers(samples, 10, 0.0))
    embeds, features = trace.embeds[:, 1:], trace.features[:, :-1]
    steps, j = 3, 6
    with torch.no_grad():
        trained = drafter(embeds, features, trace.valid[:, :-1], steps)
        from mmspec.drafters.blocks import Memory

        valid = torch.ones(1, 0, dtype=torch.bool)
        zero = Lengths.of([0], torch.device("cpu"))
        memory = Memory(Slots(), zero, torch.zeros(1, dtype=torch.long), valid, False)
        seen = torch.ones(j + 1, j + 1, dtype=torch.bool).tril()[None]
        f = drafter._read(memory, embeds[:, : j + 1], features[:, : j + 1], zero, 0, seen)[:, -1:]
        memory.lengths = Lengths.of([j + 1], torch.device("cpu"))
        memory.positions = memory.positions + j + 1
        for i in range(steps):
            torch.testing.assert_close(f[:, 0], trained[i][:, j], rtol=1e-4, atol=1e-5)
            if i + 1 < steps:
                at = Lengths.of([j + 1 + i], torch.device("cpu"))
                f = drafter._read(memory, embeds[:, j + 1 + i : j + 2 + i], f, at, torch.tensor([i]), None)


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
        logits = staticmethod(lambda z, teacher: teacher.head(z))
        to_draft = staticmethod(lambda logits: logits)

    _, agree = losses(Head, Perfect(0), run.teacher, trace, RECIPE)
    assert agree.all() and expected_tokens(agree) == 1 + RECIPE.unroll
    _, wrong = losses(Head, Perfect(1), run.teacher, trace, RECIPE)
    assert not wrong.all()


def test_a_stopped_run_goes_on_to_the_same_weights(questions: Path, tmp_path: Path) -> None:
    whole = _run(tmp_path / "whole", questions)
    whole.run(measure_every=3)
    first = _run(tmp_path / "parts", questions)
    stop = first.update

    def update(trace: object) -> object:
        if first.step == 3:
            first.save()
            raise KeyboardInterrupt
        return stop(trace)  # type: ignore[arg-type]

    first.update = update  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        first.run(measure_every=3)
    second = _run(tmp_path / "parts", questions)
    second.run(measure_every=3)
    for name, weight in whole.drafter.state_dict().items():
        assert torch.equal(weight, second.drafter.state_dict()[name]), name


def test_another_recipe_does_not_take_over_a_run(questions: Path, tmp_path: Path) -> None:
    _run(tmp_path, questions).run()
    with pytest.raises(ValueError, match="another recipe"):
        _run(tmp_path, questions, RECIPE.with_(lr=1e-3)).run()


def test_training_pays(questions: Path, tmp_path: Path) -> None:
    """From the command's own function to an enabled model: a trained drafter is accepted more than an untrained one."""
    model, processor = tiny_llava.model(), tiny_llava.processor()
    model.generation_config.eos_token_id = 2
    recipe = RECIPE.with_(steps=150, batch=8, lr=1e-2, sampled=0.0, max_new_tokens=24)
    learned = data.read(str(questions))[4:]  # not the held-out ones: a random target has no habits to carry over
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
    assert json.loads((tmp_path / "report.json").read_text())["held_out_tau"] > 1.0


@pytest.mark.parametrize(
    ("source", "word"), [("nowhere", "unknown data source"), ("empty", "no samples"), ("broken.jsonl", "line 1")]
)
def test_bad_data(source: str, word: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.jsonl").write_text('{"image": ')
    with pytest.raises(ValueError, match=word):
        data.read(str(tmp_path / source))


def test_drawn_scenes_and_folders_are_sources(questions: Path) -> None:
    scenes = data.read("scenes:3", seed=1)
    assert [s.load()[0].size for s in scenes] == [(96, 96)] * 3
    assert len(data.read(str(questions.parent), limit=5)) == 5


def test_recipe_names_are_checked() -> None:
    with pytest.raises(ValueError, match="unknown recipe value 'speed'"):
        RECIPE.with_(speed=2)
