"""Benchmarks of the Hub: files of the same fields, asked as the field asks them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pytest
from PIL import Image

from benchmarks.suites import vlm as _  # noqa: F401
from benchmarks.suites.published import LETTER, PROTOCOLS, SHORT
from mmspec.app.bench.command import BenchError
from mmspec.app.bench.questions import read_questions

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
