"""Plain decoding: the drafter that proposes nothing, one token a round."""

from __future__ import annotations

from typing import Any

from mmspec.config import SpecConfig
from mmspec.tree import lone
from mmspec.types import Draft, Prompt, Target, TargetInfo


class Plain:
    """What `compile=True` and continuous batches bring by themselves, without speculation."""

    features: tuple[int, ...] = ()
    nodes = 1

    def fit(self, target: TargetInfo, config: SpecConfig) -> Plain:
        """Any target will do.

        Raises:
            ValueError: an option that says how to draft.
        """
        config.only((), "plain decoding")
        return self

    def start(self, session: Any, target: Target, prompt: Prompt) -> None:
        return None

    def propose(self, session: Any, target: Target) -> Draft:
        return lone(session.pending[:, None])
