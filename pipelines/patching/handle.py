"""The state of an enabled model: what its calls share (`Patch`), and what `enable` returns (`Handle`)."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from mmspec.config import Options, SpecConfig, UnsupportedError
from mmspec.pipelines.host import devices
from mmspec.pipelines.host.call import Call
from mmspec.pipelines.host.hooks import restore, swap
from mmspec.pipelines.patching import drafting
from mmspec.pipelines.patching.family import Family
from mmspec.pipelines.patching.obstacles import Obstacle
from mmspec.prefix_store import PrefixStore
from mmspec.protocols import Proposer, TargetInfo
from mmspec.rules import Rule, exact
from mmspec.statistics import Stats

_switching = threading.RLock()  # enable and disable may come from any thread


class Patch:
    """What all calls on an enabled model share. It is an attribute of the swapped class, and keeps no model alive."""

    def __init__(
        self, family: Family, drafter: Any, config: SpecConfig, rule: Rule = exact, proposer: Proposer | None = None,
        given: Options | None = None, target: TargetInfo | None = None,
    ) -> None:  # fmt: skip
        self.family, self.rule = family, rule
        self.config, self.given = config, dict(given or {})  # options that every drafter shares, and this one's
        # fitted to `target`; both None where the model was left as it is
        self.drafter, self.target = drafter, target
        # what the loop asks for drafts: the drafter, or what `compile` and `auto` make of it
        self.proposer = drafter if proposer is None else proposer
        self.fitted: dict[TargetInfo, Proposer] = {}  # for what a model draws beside its text
        self.stats = Stats()  # of all calls so far
        self.by_request: dict[Hashable, Patch] = {}  # for calls that name another drafter, see assisted.py
        self.prefixes = PrefixStore(config.kept_bytes) if config.kept_bytes else None  # of prompts and answers
        self.keeps: object = None  # what a patch for such a call was made of
        self.handle: Callable[[], Handle | None] = lambda: None  # what the user holds of it; None once that is gone
        self._lock = threading.Lock()
        self._warned: set[str] = set()

    @classmethod
    def of(cls, model: object) -> Patch | None:
        """That of a model; None: it is not enabled, or not any more."""
        return getattr(type(model), "_mmspec_patch", None)

    @contextmanager
    def running(self, model: object) -> Iterator[None]:
        """A call: its feature hooks stay to its end, whoever disables the model meanwhile."""
        with self.family.taps(model, self.drafter.features):
            yield

    def fitting(self, model: object) -> Proposer:
        """What drafts for a call: `proposer`, fitted anew where the model was moved or cast since."""
        now = self.family.describe(model)
        with self._lock:
            if self.target is not None and devices.moved(self.target, now):
                now = replace(self.target, device=now.device, dtype=now.dtype)
                self.drafter, self.target = self.drafter.fit(now, self.given), now
                self.proposer = drafting.proposer(model, self.drafter, self.config, now, self.family.captures_drafts)
                self.fitted = {}
            return self.proposer

    def book(self, stats: Stats) -> None:
        with self._lock:
            self.stats.add(stats)

    def keeps_by(self, call: Call, sample: bool) -> Rule:
        """The rule of a call; it is said once where that is `exact`, though `enable` named another."""
        rule = self.family.rule(self.rule, call)
        self.relaxes(sample)
        if rule.lossless and not self.rule.lossless and (sample or self.rule.greedy is not None):
            self.say(
                f"mmspec keeps drafts of this call by 'exact', not by {self.rule.name!r}: a relaxed rule is for "
                "pictures, and to mmspec this call writes text; where it writes both, the rule must leave the ordinary "
                "residual"
            )
        return rule

    def relaxes(self, sample: bool) -> None:
        """Say once that a relaxed rule has no effect on a call that takes the likeliest tokens."""
        if not sample and not self.rule.lossless and self.rule.greedy is None:
            self.say(
                f"the rule {self.rule.name!r} has no effect on greedy calls, which keep drafts by 'exact'; sample "
                "(do_sample=True, or temperature above 0) for it"
            )

    def decline(self, why: Obstacle) -> None:
        """Raise, or say once that the stock path runs; the distribution of what is generated is the same either way."""
        if self.config.on_unsupported == "error" and not why.always_falls_back:
            raise UnsupportedError(
                f"mmspec cannot accelerate this call: {why.reason}. Change it, call mmspec.disable(model), or enable "
                f"with on_unsupported='fallback' to run such calls on the stock path"
            )
        self.say(f"mmspec runs the stock path: {why.reason}")

    def say(self, what: str) -> None:
        """Warn, once for each enabled model."""
        if what not in self._warned:
            self._warned.add(what)
            warnings.warn(what, stacklevel=5)


def put_on(model: object, patch: Patch | None) -> Patch | None:
    """Put a patch on a model, in place of the one that is there, which is returned; None: give its own class back.

    Raises:
        Exception: features that this model has not; what was there before stays.
    """
    with _switching:
        before, tapped = Patch.of(model), getattr(type(model), "_mmspec_taps", None)
        if patch is None:
            restore(model)
        else:
            taps = patch.family.taps(model, patch.drafter.features)
            taps.__enter__()
            swap(model, patch.family.mixin, _mmspec_patch=patch, _mmspec_taps=taps)
        if tapped is not None:
            tapped.__exit__()
        handle = None if before is None else before.handle()
        if handle is not None and handle is not (patch and patch.handle()):
            handle.let_go()
    return before


class Handle:
    """An enabled model, as `enable` returns it.

    As a context manager it leaves the model as it was before `enable`, with what was enabled then, or stock; a model
    for which it is no longer in force stays as it is. It keeps the model alive while it is in force, and in its `with`.

    Attributes:
        drafter: the one in use, fitted to the model; None where the model was left as it is.
        config: the options that every drafter shares.
        given: those of the drafter, as they were given.
        rule: what is kept of a draft.
        proposer: what the loop asks for drafts: the drafter, or what `compile` and `auto` make of it.
        stats: what all calls did so far.
    """

    def __init__(self, model: object, patch: Patch, before: Patch | None) -> None:
        self._model = weakref.ref(model)
        self._held: object = model
        self._patch, self._before, self._inside = patch, before, False
        patch.handle = weakref.ref(self)
        self.config, self.given, self.rule, self.stats = patch.config, patch.given, patch.rule, patch.stats

    @property
    def drafter(self) -> Any:
        return self._patch.drafter

    @property
    def proposer(self) -> Proposer:
        return self._patch.proposer

    @property
    def target(self) -> TargetInfo | None:
        """What the drafter is fitted to; None where the model was left as it is."""
        return self._patch.target

    @property
    def model(self) -> Any:
        """What was patched: the model inside a pipeline or a wrapper, or the pipeline itself.

        Raises:
            ReferenceError: it is gone; the handle keeps it no longer than it is in force.
        """
        model = self._model()
        if model is None:
            raise ReferenceError("the model of this handle is gone; keep the model itself where it is still needed")
        return model

    def disable(self) -> None:
        """As `mmspec.disable(model)`."""
        model = self._model()
        if model is not None:
            put_on(model, None)
        self.let_go()

    def let_go(self) -> None:
        """Drop the reference to the model, unless inside a `with` block."""
        if not self._inside:
            self._held = None

    def __enter__(self) -> Handle:
        self._held, self._inside = self.model, True
        return self

    def __exit__(self, *_: object) -> None:
        model, self._held, self._inside = self._held, None, False
        with _switching:
            if Patch.of(model) is self._patch:
                put_on(model, self._before)

    def __repr__(self) -> str:
        model = self._model()
        name = "a model that is gone" if model is None else type(model).__name__
        return f"<mmspec on {name}: {type(self.drafter).__name__}, {self.given}, {self.config}>"
