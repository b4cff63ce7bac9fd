"""Benchmarks of the field: which data set of the Hub a name stands for, and how one of its rows is asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mmspec.app.bench.command import BenchError
from mmspec.app.media.hub import Dataset
from mmspec.app.media.tables import Columns
from mmspec.media import MediaError

SHORT = "\nAnswer the question using a single word or phrase."
LETTER = "\nAnswer with the option's letter from the given choices directly."


def _short(row: dict[str, Any]) -> str:
    return f"{row['question']}{SHORT}"


def _plain(row: dict[str, Any]) -> str:
    return str(row["question"])


def _choices(row: dict[str, Any]) -> str:
    """ScienceQA: a hint, where there is one, the question, and its choices by letter."""
    hint = f"Context: {row['hint']}\n" if row.get("hint") else ""
    return f"{hint}{row['question']}\n{_lettered(row['choices'])}{LETTER}"


def _four(row: dict[str, Any]) -> str:
    """SEED-Bench: the question and its four choices."""
    return f"{row['question']}\n{_lettered([row[f'choice_{letter}'] for letter in 'abcd'])}{LETTER}"


def _lettered(choices: Sequence[str]) -> str:
    return "\n".join(f"{chr(ord('A') + i)}. {choice}" for i, choice in enumerate(choices))


@dataclass(frozen=True)
class Protocol:
    """A benchmark as `lmms-eval` asks it.

    Attributes:
        where: hf:owner/name[/config]:split.
        ask: a row's prompt; None: the row has fields of the usual names.
        category: the field whose values are rows of the bench's table.
    """

    where: str
    ask: Callable[[dict[str, Any]], str] | None = None
    category: str | None = None


PROTOCOLS: dict[str, Protocol] = {
    "scienceqa": Protocol("hf:lmms-lab/ScienceQA/ScienceQA-IMG:test", _choices, "subject"),
    "mm-vet": Protocol("hf:lmms-lab/MMVet:test", _plain),
    "textvqa": Protocol("hf:lmms-lab/textvqa:validation", _short),
    "mme": Protocol("hf:lmms-lab/MME:test", _short, "category"),
    "vizwiz": Protocol("hf:lmms-lab/VizWiz-VQA:val", _short),
    "seed-bench": Protocol("hf:lmms-lab/SEED-Bench:test", _four),
    "chartqa": Protocol("hf:lmms-lab/ChartQA:test", _short, "type"),
    "llava-bench": Protocol("hf:lmms-lab/llava-bench-in-the-wild:train", _plain, "category"),
}


class HubQuestions(Sequence[dict[str, Any]]):
    """The rows of a data set of the Hub, with the fields that questions have; read one by one."""

    def __init__(self, protocol: Protocol) -> None:
        self.protocol = protocol

    @cached_property
    def rows(self) -> Any:
        try:
            parts = Dataset(self.protocol.where, Columns()).parts
        except MediaError as error:
            raise BenchError(str(error)) from error
        if len(parts) > 1:
            raise BenchError(
                f"{self.protocol.where} has the splits {', '.join(parts)}; name one, as in owner/name:split"
            )
        return next(iter(parts.values()))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: Any) -> Any:
        row, how = self.rows[number], self.protocol
        if how.ask is None:
            return row
        try:
            asked = {"image": row["image"], "prompt": how.ask(row)}
        except KeyError as error:
            raise BenchError(f"{how.where} has no field {error}; its fields are {', '.join(row)}") from error
        return asked | ({"category": row.get(how.category)} if how.category else {})


def questions_of(name: str) -> HubQuestions | None:
    """Those of a benchmark, or of hf:owner/name[/config][:split]; None: it is neither."""
    found = PROTOCOLS.get(name) or (Protocol(name) if name.startswith("hf:") else None)
    return None if found is None else HubQuestions(found)
