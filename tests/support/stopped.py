"""Training that is stopped and begun anew in the same folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch


def goes_on(begin: Callable[[Path], Any], folder: Path, part: str, at: int, **how: Any) -> None:
    """Asserts that a run which is interrupted in a step ends with the weights of one that is not.

    Args:
        begin: a run of a folder, new or begun before.
        part: the method of a run that makes a step; it is interrupted in that of step `at`, which is not made.
        how: what a run is told.
    """
    whole, first = begin(folder / "whole"), begin(folder / "parts")
    whole.run(**how)
    step = getattr(first, part)

    def stopping(*given: Any) -> Any:
        if first.step == at:
            if part == "update":
                first.save()
            raise KeyboardInterrupt
        return step(*given)

    setattr(first, part, stopping)
    with pytest.raises(KeyboardInterrupt):
        first.run(**how)
    second = begin(folder / "parts")
    second.run(**how)
    for name, weight in whole.drafter.state_dict().items():
        assert torch.equal(weight, second.drafter.state_dict()[name]), name
