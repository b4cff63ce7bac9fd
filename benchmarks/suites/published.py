"""Published benchmarks by name: their datasets on the Hub, and the prompts and pictures of their rows."""

from __future__ import annotations

import ast
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

from mmspec.app.bench.command import BenchError
from mmspec.app.bench.questions import QuestionSource, Row, split_of
from mmspec.app.bench.report import Record
from mmspec.media import dataset_folders

QUESTION, CAPTION = "{question}", "Provide a one-sentence caption for the provided image."
SHORT = "\nAnswer the question using a single word or phrase."
NO_DATA = ("data", "picture", "pair", "clip")  # kinds of questions that are not dataset names
LETTER = "\nAnswer with the option's letter from the given choices directly."
FOUR = "{question}\nA. {choice_a}\nB. {choice_b}\nC. {choice_c}\nD. {choice_d}" + LETTER  # of SEED-Bench


def _lettered(choices: Sequence[str]) -> str:
    return "\n".join(f"{chr(ord('A') + i)}. {choice}" for i, choice in enumerate(choices))


def _choices(row: Row) -> str:
    """ScienceQA: the hint, if there is one, the question, and its choices by letter."""
    hint = f"Context: {row['hint']}\n" if row.get("hint") else ""
    return f"{hint}{row['question']}\n{_lettered(row['choices'])}{LETTER}"


def _exam(row: Row) -> str:
    """MMMU: the question, and its options by letter, if any; these are stored as a Python list."""
    if row["question_type"] == "multiple-choice":
        return f"{row['question']}\n{_lettered(ast.literal_eval(row['options']))}\n{LETTER}"
    return f"{row['question']}\n{SHORT}"


def _numbered(row: Row) -> list[object]:
    """MMMU: the pictures that the question or its options mention as <image N>, in the order of N."""
    return [row[f"image_{n}"] for n in sorted(set(re.findall(r"<image (\d)>", f"{row['question']}{row['options']}")))]


@dataclass(frozen=True)
class Protocol:
    """A benchmark with the prompts of `lmms-eval` (0.7.3).

    Attributes:
        where: owner/name[/config]:split on the Hub.
        prompt: a row's prompt, as a function of the row or with its {fields}.
        category: the field whose values get separate rows in the bench's table.
        shown: a function that returns a row's picture or pictures.
        album: a separate data set with the pictures by `id`; a row's `imageId` names one.
    """

    where: str
    prompt: str | Callable[[Row], str]
    category: str | None = None
    shown: Callable[[Row], object] = itemgetter("image")
    album: str | None = None

    def source(self) -> QuestionSource:
        folders = dataset_folders(self.where.partition(":")[0])
        pictures = None if self.album is None else split_of(self.album)
        numbers = {} if pictures is None else {name: number for number, name in enumerate(pictures["id"])}

        def ask(row: Row) -> Row:
            try:
                if pictures is not None:
                    row = {**row, "image": pictures[numbers[row["imageId"]]]["image"]}
                prompt = self.prompt.format_map(row) if isinstance(self.prompt, str) else self.prompt(row)
                question = {"image": self.shown(row), "prompt": prompt}
            except KeyError as error:
                raise BenchError(f"{self.where} has no field {error}; its fields are {', '.join(row)}") from error
            return question | ({"category": row.get(self.category)} if self.category else {})

        return QuestionSource(split_of(self.where), folders, ask)


PROTOCOLS: dict[str, Protocol] = {
    "scienceqa": Protocol("lmms-lab-encoder/ScienceQA/ScienceQA-IMG:test", _choices, "subject"),
    "mm-vet": Protocol("lmms-lab-encoder/MMVet:test", QUESTION),
    "textvqa": Protocol("lmms-lab-encoder/textvqa:validation", QUESTION + SHORT),
    "mme": Protocol("lmms-lab-encoder/MME:test", QUESTION + SHORT, "category"),
    "vizwiz": Protocol("lmms-lab-encoder/VizWiz-VQA:val", QUESTION + SHORT),
    "seed-bench": Protocol("lmms-lab-encoder/SEED-Bench:test", FOUR),
    "chartqa": Protocol("lmms-lab-encoder/ChartQA:test", QUESTION + SHORT, "type"),
    "llava-bench": Protocol("lmms-lab-encoder/llava-bench-in-the-wild:train", QUESTION, "category"),
    "coco-captions": Protocol("lmms-lab-encoder/COCO-Caption2017:val", CAPTION),
    "gqa": Protocol(
        "lmms-lab-encoder/GQA/testdev_balanced_instructions:testdev",
        QUESTION + SHORT,
        album="lmms-lab-encoder/GQA/testdev_balanced_images:testdev",
    ),
    "mmmu": Protocol("lmms-lab-encoder/MMMU:validation", _exam, shown=_numbered),
}


def find(path: Path) -> QuestionSource | None:
    """The questions of a benchmark by its name; None for others."""
    return PROTOCOLS[str(path)].source() if str(path) in PROTOCOLS else None


def data_tables(records: Sequence[Record]) -> dict[str, list[list[str]]]:
    """Tables of several data sets as in papers, by condition: rows are methods, columns are data sets and their mean.

    A cell has tokens per target call and the speed-up over stock. A condition with only one data set has no table.
    """
    conditions: dict[str, dict[str, dict[str, Record]]] = {}  # condition → data set → method → record
    for record in records:
        if record["suite"] == "vlm" and record["category"] == "all" and record["kind"] not in NO_DATA:
            prompt = f", {record['prompt']} prompt" if record["prompt"] else ""
            title = f"tokens/call, speedup: batch {record['batch']}, temperature {record['temperature']:g}{prompt}"
            conditions.setdefault(title, {}).setdefault(record["kind"], {})[record["method"]] = record
    tables = {}
    for title, sets in conditions.items():
        methods = {name: [one.get(name) for one in sets.values()] for each in sets.values() for name in each}
        rows = [[name, *(_mean([one]) for one in found), _mean(found)] for name, found in methods.items()]
        tables[title] = [["method", *sets, "mean"], *rows]
    return {title: rows for title, rows in tables.items() if len(conditions[title]) > 1}


def _mean(records: Sequence[Record | None]) -> str:
    """The means over these records; a dash if a value is missing."""
    pairs = [(r["tokens_per_target_call"], r["speedup_e2e"]) for r in records if r is not None]
    if len(pairs) < len(records) or not all(map(all, pairs)):
        return "-"
    return "{:.2f}, {:.2f}x".format(*map(statistics.fmean, zip(*pairs, strict=True)))
