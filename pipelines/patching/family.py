"""The base class of families: what mmspec has to know of one kind of model to enable it, with common defaults."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from torch import Tensor

from mmspec.pipelines.host.call import Call
from mmspec.pipelines.host.hooks import Taps
from mmspec.pipelines.host.processors.guidance import Guidance
from mmspec.pipelines.patching.obstacles import Obstacle
from mmspec.pipelines.target.model import Request
from mmspec.protocols import Target, TargetInfo
from mmspec.rules import Rule

M = TypeVar("M")  # the class of the models or pipelines


class Family(Generic[M]):
    """How models of one kind are patched; the table in pipelines/families/table.py says which family a class has."""

    mixin: type  # the class that `enable` puts in front of the model's class
    drafter: str | None = None  # the default drafter of `enable`; None: what the model ships with
    captures_drafts = True  # whether `compile` captures the forwards of drafters
    keeps_prefixes = True  # whether its prompts can be cached (`prefix_cache`)
    guided = False  # whether the forward of a negative prompt (`guidance_scale`) may share a batch with the prompt's

    def unsupported(self, model: M) -> str | None:
        """Why this model cannot be accelerated; None: it can."""
        return None

    def note(self, model: M) -> str | None:
        """A log message on how this model reads drafts, or None."""
        return None

    def describe(self, model: M) -> TargetInfo:
        """The target's properties that a drafter has to fit."""
        raise NotImplementedError

    def pictures(self, model: M) -> TargetInfo | None:
        """The properties that a drafter only for images has to fit; None: the same as `describe`."""
        return None

    def codebook(self, model: M) -> Tensor | None:
        """The codebook vector of each token of the head, [V, c], for rules that compare image tokens; None for text."""
        return None

    def embeddings(self, model: M) -> Tensor | None:
        """The input embedding of each token of the head, [V, H]; None: the head has another vocabulary."""
        return None

    def taps(self, model: M, features: tuple[int, ...]) -> Taps:
        """The hooks that record the model's features for a drafter.

        Raises:
            ValueError: the model does not have these features.
        """
        raise NotImplementedError

    def target(self, model: M, features: tuple[int, ...], guidance: Guidance | None) -> Target:
        """A session's view of the model, for one call."""
        raise NotImplementedError

    def request(self, request: Request) -> Request:
        """The call's request, to which this kind of model may add how its logits are processed."""
        return request

    def rule(self, named: Rule, call: Call) -> Rule:
        """The acceptance rule of this call; `named` is the rule of `enable`."""
        return named

    def decline(self, patch: Any, why: Obstacle) -> None:
        """Let a call fall back to the stock path, or raise UnsupportedError."""
        patch.decline(why)
