"""Modules that keep the interface of lmms-eval 0.7 that `--model mmspec` uses; for tests where it is not installed.

`tests/benchmarks/test_lmms.py` compares these signatures with lmms-eval's own where it is.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

LOGGED: list[dict[str, Any]] = []  # what `log_metrics` was told


class CacheHook:
    def __init__(self, cachinglm=None) -> None:
        self.kept: list[tuple[Any, ...]] = []

    def add_partial(self, attr, req, res) -> None:
        self.kept.append((attr, req, res))


class lmms(abc.ABC):
    is_simple: bool = True

    def __init__(self) -> None:
        self._rank, self._world_size = 0, 1
        self.cache_hook, self.task_dict = CacheHook(None), {}

    @staticmethod
    def _resolve_system_prompt(value: str) -> str:
        return value

    def _apply_system_prompt(self, messages: list, system_prompt: str) -> list:
        said = {"role": "system", "content": [{"type": "text", "text": system_prompt}]}
        return [said, *messages] if system_prompt else messages

    @abc.abstractmethod
    def loglikelihood(self, requests): ...

    @abc.abstractmethod
    def generate_until(self, requests): ...

    @abc.abstractmethod
    def generate_until_multi_round(self, requests): ...

    @property
    def rank(self):
        return self._rank

    @property
    def world_size(self):
        return self._world_size

    def clean(self):
        return None


@dataclass
class TokenCounts:
    input_tokens: int | None = None
    output_tokens: int | None = None
    reasoning_tokens: int | None = None


@dataclass
class GenerationResult:
    text: str
    token_counts: TokenCounts | None = None


@dataclass
class Instance:
    request_type: str
    arguments: tuple
    idx: int
    metadata: dict = field(default_factory=dict)

    @property
    def args(self):
        return self.arguments


def log_metrics(total_elapsed_time, total_gen_tokens, avg_speed, additional_metrics=None):
    LOGGED.append(
        {"total_elapsed_time": total_elapsed_time, "total_gen_tokens": total_gen_tokens, "avg_speed": avg_speed}
        | (additional_metrics or {})
    )


HELD = {
    "lmms_eval.api.model": (lmms, CacheHook),
    "lmms_eval.api.instance": (Instance, GenerationResult, TokenCounts),
    "lmms_eval.models.model_utils.gen_metrics": (log_metrics,),
}


def modules() -> dict[str, ModuleType]:
    """By name, the packages around them too."""
    names = {".".join(name.split(".")[:n]) for name in HELD for n in range(1, name.count(".") + 2)}
    made = {name: ModuleType(name) for name in names}
    for name, held in HELD.items():
        vars(made[name]).update({one.__name__: one for one in held})
    return made
