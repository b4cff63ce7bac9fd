"""A streamer and a stopping criterion of transformers, to follow and to stop a call of `generate`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import StoppingCriteria
from transformers.generation.streamers import BaseStreamer


class StepStreamer(BaseStreamer):
    """Calls `each` with the new tokens of a step, one of each row; the prompt, which stock puts first, is skipped."""

    def __init__(self, each: Callable[[list[int]], None]) -> None:
        self._each, self._prompt_seen = each, False

    def put(self, value: Tensor) -> None:
        if self._prompt_seen:
            self._each(value.flatten().tolist())
        self._prompt_seen = True

    def end(self) -> None:
        pass


class Stopped(StoppingCriteria):
    """Ends every row once one of these events is set."""

    ignores_tokens = True  # see stopping.py

    def __init__(self, events: Sequence[threading.Event]) -> None:
        self.events = events

    def __call__(self, input_ids: Tensor, scores: object, **_: object) -> Tensor:
        ended = any(event.is_set() for event in self.events)
        return torch.full((len(input_ids),), ended, dtype=torch.bool, device=input_ids.device)
