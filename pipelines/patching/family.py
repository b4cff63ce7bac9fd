"""What is asked of a kind of model, so that it can be enabled: one class, with what most kinds have in common."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from torch import Tensor

from mmspec.pipelines.host.call import Call
from mmspec.pipelines.host.hooks import Taps
from mmspec.pipelines.host.processors.guidance import Guidance
from mmspec.pipelines.patching.obstacles import Obstacle
from mmspec.pipelines.target.request import Request
from mmspec.protocols import Target, TargetInfo
from mmspec.rules import Rule

M = TypeVar("M")  # the models of the kind, or pipelines


class Family(Generic[M]):
    """How models of one kind are patched; the table in pipelines/families/table.py says which family a class has."""

    mixin: type  # goes in front of the model's class
    drafter: str | None = None  # that drafts unless `enable` is told otherwise; None: what the model ships with
    captures_drafts = True  # whether `compile` captures what drafters do
    guided = False  # whether the forward of a negative prompt (`guidance_scale`) may share a batch with the prompt's

    def unsupported(self, model: M) -> str | None:
        """Why this model cannot be accelerated; None: it can."""
        return None

    def note(self, model: M) -> str | None:
        """A note for the log on how this model reads drafts; None: nothing to say."""
        return None

    def describe(self, model: M) -> TargetInfo:
        """What a drafter has to fit."""
        raise NotImplementedError

    def pictures(self, model: M) -> TargetInfo | None:
        """What a drafter has to fit that drafts for pictures alone; None: just what any has to."""
        return None

    def codebook(self, model: M) -> Tensor | None:
        """The code of each token of the head, [V, c], for rules that know which tokens look alike; text has none."""
        return None

    def embeddings(self, model: M) -> Tensor | None:
        """The input embedding of each token of the head, [V, H]; None: it has another vocabulary."""
        return None

    def taps(self, model: M, features: tuple[int, ...]) -> Taps:
        """What records the features that a drafter reads of the model.

        Raises:
            ValueError: it has no such features.
        """
        raise NotImplementedError

    def target(self, model: M, features: tuple[int, ...], guidance: Guidance | None) -> Target:
        """A session's view of the model, for one call."""
        raise NotImplementedError

    def request(self, request: Request) -> Request:
        """What this kind of model adds to what a call asks of its logits."""
        return request

    def rule(self, named: Rule, call: Call) -> Rule:
        """What is kept of a draft in this call; `named` is that of `enable`."""
        return named

    def decline(self, patch: Any, why: Obstacle) -> None:
        """Let a call run on the stock path, or raise."""
        patch.decline(why)
