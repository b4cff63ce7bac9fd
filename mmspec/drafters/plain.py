"""Plain decoding: a drafter that proposes nothing, so that every round gives one token."""

from __future__ import annotations

from mmspec.config import Options, chosen
from mmspec.protocols import SessionView, Target, TargetInfo
from mmspec.tree import lone
from mmspec.types import Draft, Prompt


class Plain:
    """Decoding without speculation, to use `compile=True` or continuous batching alone."""

    features: tuple[int, ...] = ()
    nodes = 1

    def fit(self, target: TargetInfo, given: Options) -> Plain:
        """Fits any target. Raises ValueError: any drafter option."""
        if given:
            chosen(None, given, "plain decoding")
        return self

    def start(self, session: SessionView[None], target: Target, prompt: Prompt) -> None:
        return None

    def propose(self, session: SessionView[None], target: Target) -> Draft:
        return lone(session.pending[:, None])
