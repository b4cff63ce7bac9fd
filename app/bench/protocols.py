"""Published benchmarks: their data sets on the Hub, and the prompts and pictures of their rows."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import Any

from mmspec.app.bench import mvbench
from mmspec.app.bench.command import BenchError
from mmspec.app.media.hub import Dataset
from mmspec.app.media.tables import Columns
from mmspec.media import MediaError, dataset_folders

QUESTION, CAPTION = "{question}", "Provide a one-sentence caption for the provided image."
SHORT = "\nAnswer the question using a single word or phrase."
LETTER = "\nAnswer with the option's letter from the given choices directly."
FOUR = "{question}\nA. {choice_a}\nB. {choice_b}\nC. {choice_c}\nD. {choice_d}" + LETTER  # of SEED-Bench


def _choices(row: Mapping[str, Any]) -> str:
    """ScienceQA: the hint, if there is one, the question, and its choices by letter."""
    hint = f"Context: {row['hint']}\n" if row.get("hint") else ""
    return f"{hint}{row['question']}\n{_lettered(row['choices'])}{LETTER}"


def _lettered(choices: Sequence[str]) -> str:
    return "\n".join(f"{chr(ord('A') + i)}. {choice}" for i, choice in enumerate(choices))


def _exam(row: Mapping[str, Any]) -> str:
    """MMMU: the question, and its options by letter, if any; these are stored as a Python list."""
    if row["question_type"] == "multiple-choice":
        return f"{row['question']}\n{_lettered(ast.literal_eval(row['options']))}\n{LETTER}"
    return f"{row['question']}\n{SHORT}"


def _numbered(row: Mapping[str, object]) -> list[object]:
    """MMMU: the pictures that the question or its options mention as <image N>, in the order of N."""
    return [row[f"image_{n}"] for n in sorted(set(re.findall(r"<image (\d)>", f"{row['question']}{row['options']}")))]


@dataclass(frozen=True)
class Protocol:
    """A benchmark with the prompts of `lmms-eval` (0.7.3).

    Attributes:
        where: hf:owner/name[/config]:split.
        ask: a row's prompt, as a function of the row or with its {fields}; None: the row has the usual fields.
        category: the field whose values get separate rows in the bench's table.
        shown: a function that returns a row's picture or pictures; None: the row has a video.
        album: a separate data set with the pictures by `id`; a row's `imageId` names one.
    """

    where: str
    ask: str | Callable[[Mapping[str, Any]], str] | None = None
    category: str | None = None
    shown: Callable[[Mapping[str, object]], object] | None = itemgetter("image")
    album: str | None = None


PROTOCOLS: dict[str, Protocol] = {
    "scienceqa": Protocol("hf:lmms-lab-encoder/ScienceQA/ScienceQA-IMG:test", _choices, "subject"),
    "mm-vet": Protocol("hf:lmms-lab-encoder/MMVet:test", QUESTION),
    "textvqa": Protocol("hf:lmms-lab-encoder/textvqa:validation", QUESTION + SHORT),
    "mme": Protocol("hf:lmms-lab-encoder/MME:test", QUESTION + SHORT, "category"),
    "vizwiz": Protocol("hf:lmms-lab-encoder/VizWiz-VQA:val", QUESTION + SHORT),
    "seed-bench": Protocol("hf:lmms-lab-encoder/SEED-Bench:test", FOUR),
    "chartqa": Protocol("hf:lmms-lab-encoder/ChartQA:test", QUESTION + SHORT, "type"),
    "llava-bench": Protocol("hf:lmms-lab-encoder/llava-bench-in-the-wild:train", QUESTION, "category"),
    "coco-captions": Protocol("hf:lmms-lab-encoder/COCO-Caption2017:val", CAPTION),
    "gqa": Protocol(
        "hf:lmms-lab-encoder/GQA/testdev_balanced_instructions:testdev",
        QUESTION + SHORT,
        album="hf:lmms-lab-encoder/GQA/testdev_balanced_images:testdev",
    ),
    "mmmu": Protocol("hf:lmms-lab-encoder/MMMU:validation", _exam, shown=_numbered),
    "mvbench": Protocol(f"hf:{mvbench.NAME}", mvbench.ask, "task", shown=None),
}


class HubQuestions(Sequence[Mapping[str, Any]]):
    """The rows of a data set on the Hub as questions; read one by one."""

    def __init__(self, protocol: Protocol, copy: Path | None = None) -> None:
        """`copy`: a local folder with MVBench's files; None: the Hub's cache."""
        self.protocol, self.copy = protocol, copy

    @cached_property
    def rows(self) -> Any:
        return mvbench.rows(*self.folders) if self._of_files else _rows_of(self.protocol.where)

    @cached_property
    def folders(self) -> list[Path]:
        """The folders in which rows may name files."""
        if self._of_files:
            return [self.copy or mvbench.cached()]
        return dataset_folders(self.protocol.where.removeprefix("hf:").partition(":")[0])

    @property
    def _of_files(self) -> bool:
        return self.protocol is PROTOCOLS["mvbench"]

    @cached_property
    def album(self) -> tuple[Any, dict[Any, int]]:
        """The rows with the pictures, and the row number of each picture by its id."""
        assert self.protocol.album is not None, "pictures are in the rows themselves"
        rows = _rows_of(self.protocol.album)
        return rows, {name: number for number, name in enumerate(rows["id"])}

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: Any) -> Any:
        row, how = self.rows[number], self.protocol
        if how.ask is None:
            return row
        try:
            if how.album is not None:
                rows, numbers = self.album
                row = {**row, "image": rows[numbers[row["imageId"]]]["image"]}
            shown = {"video": row["video"]} if how.shown is None else {"image": how.shown(row)}
            question = {**shown, "prompt": how.ask.format_map(row) if isinstance(how.ask, str) else how.ask(row)}
        except KeyError as error:
            raise BenchError(f"{how.where} has no field {error}; its fields are {', '.join(row)}") from error
        return question | ({"category": row.get(how.category)} if how.category else {})


def _rows_of(where: str) -> Any:
    try:
        parts = Dataset(where, Columns()).parts
    except MediaError as error:
        raise BenchError(str(error)) from error
    if len(parts) > 1:
        raise BenchError(f"{where} has the splits {', '.join(parts)}; name one, as in owner/name:split")
    return next(iter(parts.values()))


def questions_of(path: Path) -> HubQuestions | None:
    """The questions of a published benchmark, hf:owner/name[/config][:split] or a local MVBench; None for others."""
    if path.exists():
        return HubQuestions(PROTOCOLS["mvbench"], path) if mvbench.tasks(path) else None
    name = str(path)
    protocol = PROTOCOLS.get(name) or (Protocol(name) if name.startswith("hf:") else None)
    return None if protocol is None else HubQuestions(protocol)
