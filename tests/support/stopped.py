"""Training that is stopped and begun anew in the same folder."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch


def goes_on(
    begin: Callable[[Path], Any], folder: Path, part: str, at: int, by: signal.Signals | None = None, **how: Any
) -> None:
    """Asserts that a run which is interrupted in a step ends with the weights of one that is not.

    Args:
        begin: a run of a folder, new or begun before.
        part: the method of a run that makes a step; it is interrupted in that of step `at`.
        by: a signal, after which the step is made and saved; None: the run is killed, and the step not made.
        how: what a run is told.
    """
    whole, first = begin(folder / "whole"), begin(folder / "parts")
    whole.run(**how)
    step = getattr(first, part)

    def stopping(*given: Any) -> Any:
        if first.step == at:
            if by is None:
                raise KeyboardInterrupt
            signal.raise_signal(by)
        return step(*given)

    setattr(first, part, stopping)
    with pytest.raises(KeyboardInterrupt, match=f"step {at + 1} of" if by else None):
        first.run(**how)
    second = begin(folder / "parts")
    second.run(**how)
    for name, weight in whole.drafter.state_dict().items():
        assert torch.equal(weight, second.drafter.state_dict()[name]), name
