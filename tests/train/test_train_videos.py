"""Videos in training data and in a bench's questions: decoded as the captioner does, shown as clips or as frames."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import clips
import pytest
import tiny_llava
import transformers as T
from PIL import Image

from mmspec.app.bench import command as bench
from mmspec.app.bench.answers import VlmBench
from mmspec.app.bench.questions import BenchError, Question, read_questions
from mmspec.app.media.decoder import VideoReader
from mmspec.app.media.video import FramePolicy
from mmspec.app.train import train
from mmspec.pipelines.teacher import Teacher
from mmspec.train import data
from mmspec.train.recipes import Recipe

RECIPE = Recipe(steps=2, batch=3, lr=3e-3, unroll=2, held_out=2, max_new_tokens=6, token_weight=1.0)


@pytest.fixture(scope="module")
def reader() -> Iterator[VideoReader]:
    with VideoReader(FramePolicy.parse("uniform:4")) as made:
        yield made


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six clips of grey frames that say their places, and a list that asks about them; the fourth is no video."""
    folder = tmp_path_factory.mktemp("videos")
    lines = []
    for i in range(6):
        clips.write_clip(folder / f"{i}.mp4", clips.grey_steps(8 + i))
        lines.append({"video": f"{i}.mp4", "prompt": f"w{5 + i} w9"})
    (folder / "3.mp4").write_bytes(b"#EXTM3U\nhttp://169.254.169.254/\n")
    return tiny_llava.listed(folder, lines)


def test_a_line_with_a_video_gives_its_frames(questions: Path, reader: VideoReader) -> None:
    samples = data.read(str(questions), clips=reader)
    assert [(s.images, s.clip) for s in samples] == [(4, True)] * 6
    assert [clips.place_of(frame) for frame in samples[0].load()] == [1, 3, 5, 7]
    with pytest.raises(data.UnreadableError, match=r"data\.jsonl, line 4: .*no video"):
        samples[3].load()
    assert len(samples[4].load()) == 4  # after a bad one


def test_a_data_set_with_a_column_of_videos(questions: Path, reader: VideoReader, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    held = {"bytes": (questions.parent / "0.mp4").read_bytes(), "path": None}
    made = datasets.Dataset.from_list([{"video": held, "question": "w5?"}] * 2)
    made.cast_column("video", datasets.Video()).to_parquet(tmp_path / "set" / "train.parquet")
    sample = data.read(f"hf:{tmp_path / 'set'}", clips=reader)[1]
    assert (sample.prompt, sample.clip, len(sample.load())) == ("w5?", True, 4)
    (question,) = read_questions(Path(f"hf:{tmp_path / 'set'}:train"), 1, clips=reader)
    assert question.clip and [clips.place_of(frame) for frame in question.images] == [1, 3, 5, 7]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ({"videos": ["0.mp4", "1.mp4"]}, "this one shows 2 videos"),
        ({"video": "0.mp4", "image": "0.png"}, "this one shows a video beside 'image'"),
    ],
)
def test_one_video_or_pictures(line: dict[str, Any], told: str, tmp_path: Path, reader: VideoReader) -> None:
    (tmp_path / "x.jsonl").write_text(json.dumps({"prompt": "w5", **line}))
    with pytest.raises(ValueError, match=f"line 1: .*{told}"):
        data.read(str(tmp_path / "x.jsonl"), clips=reader)
    with pytest.raises(BenchError, match=f"question 1: .*{told}"):
        read_questions(tmp_path / "x.jsonl", 1, clips=reader)


def test_a_video_elsewhere_is_not_opened(questions: Path, tmp_path: Path, reader: VideoReader) -> None:
    (tmp_path / "x.jsonl").write_text(json.dumps({"prompt": "w5", "video": str(questions.parent / "0.mp4")}))
    (sample,) = data.read(str(tmp_path / "x.jsonl"), clips=reader)
    with pytest.raises(data.UnreadableError, match="lies outside of"):
        sample.load()
    with pytest.raises(BenchError, match=r"question 1: its video names .* lies outside of"):
        read_questions(tmp_path / "x.jsonl", 1, clips=reader)


@pytest.mark.parametrize("method", ["vispec", "flash"])
def test_a_drafter_learns_from_videos(method: str, questions: Path, tmp_path: Path) -> None:
    shape = {"tokens": 2, "depth": 2, "tree": "dynamic"} if method == "flash" else {}
    with pytest.warns(UserWarning, match="left out: 1 of 4 samples"):
        train(
            tiny_llava.model(), tiny_llava.processor(), method, str(questions), tmp_path, RECIPE, shape=shape,
            text=None, frames=FramePolicy.parse("uniform:3"),
        )  # fmt: skip
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["samples"] == 6 and report["held_out_tau"] >= 1.0


def test_the_bench_asks_about_videos(questions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    bench.configure(parser)
    few = tmp_path / "few.jsonl"
    few.write_text(json.dumps({"video": "0.mp4", "question": "w5"}))
    (tmp_path / "0.mp4").write_bytes((questions.parent / "0.mp4").read_bytes())
    words = ["vlm", "--model", tiny_llava.save(tmp_path / "model"), "--data", few, "--images", 1, "--batch", 1]
    words += ["--temperature", 0, "--max-new-tokens", 6, "--without", "stock-static", "hf-*", "--device", "cpu"]
    words += ["--json", tmp_path / "out.json", "--video-frames"]
    assert bench.run(parser.parse_args([*map(str, words), "uniform:3"])) == 0
    three = json.loads((tmp_path / "out.json").read_text())["records"][1]
    assert bench.run(parser.parse_args([*map(str, words), "uniform:6"])) == 0
    six = json.loads((tmp_path / "out.json").read_text())["records"][1]
    assert six["visual_tokens"] == 2 * three["visual_tokens"] > 0 and six["identical_rate"] == 1
    with pytest.raises(SystemExit):
        parser.parse_args([*map(str, words), "eight"])
    assert "choose N (frames" in capsys.readouterr().err


# -- models that know videos -----------------------------------------------------------------------------------------

TEMPLATE = (
    "{% for m in messages %}{% for c in m['content'] %}{% if c['type'] == 'image' %}<img> "
    "{% elif c['type'] == 'video' %}<vid> {% else %}{{ c['text'] }} {% endif %}{% endfor %}{% endfor %}"
)


def qwen() -> Any:
    """Qwen2-VL's own processor on a vocabulary of words."""
    vocab = {f"w{i}": i for i in range(3, 110)} | {"<pad>": 0, "<unk>": 1, "<img>": 120, "<vid>": 121}
    words = tiny_llava.tokenizer(vocab, extra_special_tokens={"image_token": "<img>", "video_token": "<vid>"})
    size = {"shortest_edge": 28 * 28, "longest_edge": 56 * 56}
    return T.Qwen2VLProcessor(
        T.Qwen2VLImageProcessor(size=size), words, T.Qwen2VLVideoProcessor(size=size, do_sample_frames=False),
        chat_template=TEMPLATE,
    )  # fmt: skip


def test_a_processor_that_knows_videos_gets_them_as_one() -> None:
    processor = qwen()
    frames, picture = [Image.new("RGB", (28, 28))] * 4, [Image.new("RGB", (28, 28))]
    model: Any = type("Fake", (), {"device": "cpu", "dtype": None})()
    teacher: Any = Teacher.__new__(Teacher)
    teacher.model, teacher.processor = model, processor
    clip, shown = data.TrainingSample(lambda: frames, "w5", 4, clip=True), data.TrainingSample(lambda: picture, "w6", 1)
    inputs = teacher._inputs([clip, shown])
    assert inputs["video_grid_thw"].tolist() == [[2, 2, 2]] and inputs["image_grid_thw"].tolist() == [[1, 2, 2]]
    assert "video_grid_thw" not in teacher._inputs([data.TrainingSample(lambda: frames, "w5", 4)])
    made = VlmBench(model, processor, 1, 0)
    model.dtype = None
    assert made.inputs([Question(tuple(frames), "w5", clip=True)])["video_grid_thw"].tolist() == [[2, 2, 2]]
