"""Benchmarks of the Hub: files of the same fields, asked as the field asks them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import clips
import datasets
import huggingface_hub
import pytest
from PIL import Image

from benchmarks.suites import vlm as _  # noqa: F401
from benchmarks.suites.published import COMMAND, LETTER, PROTOCOLS, SHORT
from mmspec.app.bench.command import BenchError
from mmspec.app.bench.questions import read_questions
from mmspec.app.media.decoder import VideoReader
from mmspec.app.media.video import FramePolicy

PICTURE = Image.new("RGB", (8, 6), "red")
FIELDS: dict[str, dict[str, Any]] = {  # a row of each data set, and nothing of what it holds besides
    "scienceqa": {"hint": "", "choices": ["a cat", "a dog"], "subject": "biology"},
    "mm-vet": {"capability": "rec,ocr"},
    "textvqa": {"ocr_tokens": ["exit"]},
    "mme": {"category": "code"},
    "vizwiz": {"answers": ["none"]},
    "seed-bench": {**{f"choice_{letter}": f"choice {letter}" for letter in "abcd"}, "image": [PICTURE, PICTURE]},
    "chartqa": {"type": "human_test"},
    "llava-bench": {"category": "detail"},
    "coco-captions": {"answer": ["a red square"]},
    "gqa": {"imageId": "n7"},
    "mmmu": {
        "question": "is <image 2> <image 1>?",
        "question_type": "multiple-choice",
        "options": "['yes', '<image 3>']",
        **{f"image_{n}": PICTURE if n < 4 else None for n in range(1, 8)},
    },
}
ASKED = {
    "scienceqa": f"what is it?\nA. a cat\nB. a dog{LETTER}",
    "seed-bench": f"what is it?\nA. choice a\nB. choice b\nC. choice c\nD. choice d{LETTER}",
    "mm-vet": "what is it?",
    "llava-bench": "what is it?",
    "coco-captions": "Provide a one-sentence caption for the provided image.",
    "mmmu": f"is <image 2> <image 1>?\nA. yes\nB. <image 3>\n{LETTER}",
}


@pytest.mark.parametrize("name", PROTOCOLS)
def test_a_row_is_asked_as_the_field_asks_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []

    def load(where: str, config: str | None, split: str) -> datasets.Dataset:
        asked.append((where, config, split))
        row = {"image": PICTURE, "question": "what is it?", **FIELDS[name]}
        if config == "testdev_balanced_images":
            row = {"id": "n7", "image": PICTURE}
        elif name == "gqa":
            del row["image"]
        made, one = datasets.Dataset.from_list([row] * 4), datasets.Image()
        for field, held in row.items():
            if field.startswith("image") and field != "imageId":
                made = made.cast_column(field, [one] if isinstance(held, list) else one)
        return made

    monkeypatch.setattr(datasets, "load_dataset", load)
    measured = read_questions(Path(name), 3)
    assert len(measured) == 3 and {q.prompt for q in measured} == {ASKED.get(name, f"what is it?{SHORT}")}
    shown = FIELDS[name].get("image", [PICTURE] * (3 if name == "mmmu" else 1))
    assert [picture.size for picture in measured[0].images] == [(8, 6)] * len(shown)
    assert measured[0].category == FIELDS[name].get(PROTOCOLS[name].category or "", "all")
    assert (
        len(asked) == 1 + (name == "gqa")
        and asked[0][0] in PROTOCOLS[name].where
        and asked[0][2] in PROTOCOLS[name].where
    )


def test_any_data_set_with_the_usual_fields(tmp_path: Path) -> None:
    rows = [{"image": PICTURE, "prompt": f"question {i}", "task": "ocr"} for i in range(3)]
    made = datasets.Dataset.from_list(rows).cast_column("image", datasets.Image())
    for split in ("test", "train"):
        made.to_parquet(tmp_path / "set" / f"{split}.parquet")
    (question,) = read_questions(Path(f"hf:{tmp_path / 'set'}:test"), 1)
    assert question.prompt == "question 0" and question.category == "ocr" and question.images[0].size == (8, 6)
    with pytest.raises(BenchError, match=r"has the splits \w+, \w+; name one"):
        read_questions(Path(f"hf:{tmp_path / 'set'}"), 1)
    with pytest.raises(BenchError, match="cannot be loaded"):
        read_questions(Path(f"hf:{tmp_path / 'nowhere'}"), 1)
    with pytest.raises(BenchError, match="scienceqa, mm-vet, textvqa"):
        read_questions(Path("scienceqb"), 1)


def test_an_open_question_of_mmmu_has_no_options() -> None:
    row = {"question": "how many?", "options": "[]", "question_type": "open", "image_1": PICTURE}
    how = PROTOCOLS["mmmu"]
    assert how.prompt(row) == f"how many?\n{SHORT}"


def test_mvbench_is_read_from_a_copy_with_its_videos(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    (tmp_path / "json").mkdir()
    for task in ("action_count", "episodic_reasoning", "object_shuffle"):
        row = {"video": f"{task}.mp4", "question": "what?", "candidates": ["a ball", "none"], "answer": "none"}
        (tmp_path / "json" / f"{task}.json").write_text(json.dumps([row] * 2))
    with pytest.raises(BenchError, match=f"no videos in perception/videos; download it: {COMMAND}"):
        read_questions(tmp_path, 2)
    (tmp_path / "perception" / "videos").mkdir(parents=True)
    film = clips.write_clip(tmp_path / "perception" / "videos" / "action_count.mp4", 6)
    with pytest.raises(BenchError, match=r"has no perception/videos/object_shuffle\.mp4; download it"):
        read_questions(tmp_path, 2)
    shutil.copy(film, film.with_name("object_shuffle.mp4"))
    cached = list[dict[str, Any]]()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **how: cached.append(how) or str(tmp_path))
    for path in (tmp_path, Path("mvbench")):
        with VideoReader(FramePolicy("uniform", 3)) as reader:
            measured = read_questions(path, 2, clips=reader)
        assert [q.category for q in measured] == ["action_count", "object_shuffle"]
        assert {q.prompt for q in measured} == {
            "Question:what?\nOption:\n(A) a ball\n(B) none\nOnly give the best option.\n"
        }
        assert all(q.clip and len(q.images) == 3 for q in measured)
        assert "left out, since their videos are not in" in capsys.readouterr().err
    assert cached == [{"repo_type": "dataset", "revision": "video", "local_files_only": True}]


def test_mvbench_is_not_fetched_unasked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(BenchError, match="mvbench is not on this machine; download it: hf download OpenGVLab/MVBench"):
        read_questions(Path("mvbench"), 1)
