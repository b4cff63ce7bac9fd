"""The state of an enabled model: `Patch`, which all its calls share, and `Handle`, which `enable` returns."""

from __future__ import annotations

import re
import threading
import warnings
import weakref
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

from torch.nn import Module

from mmspec.config import Options, SpecConfig, UnsupportedError
from mmspec.pipelines.host import devices
from mmspec.pipelines.host.assisted import DraftRequest
from mmspec.pipelines.host.call import Call
from mmspec.pipelines.host.hooks import Taps, restore, swap
from mmspec.pipelines.patching import choose, drafting
from mmspec.pipelines.patching.family import Family
from mmspec.pipelines.patching.obstacles import Obstacle
from mmspec.prefix_store import PrefixStore
from mmspec.protocols import Proposer, TargetInfo
from mmspec.rules import Rule, exact
from mmspec.statistics import Stats

ENOUGH, LITTLE = 256, 1.2  # rounds until drafts are judged, and tokens a round below which hardly any was accepted
# the maximum number of drafters that are kept because calls have named them, and of draft models among these
REQUESTED, MODELS = 8, 2
_switching = threading.RLock()  # enable and disable may be called from any thread


class Patch:
    """The state that all calls on an enabled model share. It is an attribute of the swapped class, and does not keep
    the model alive."""

    def __init__(
        self, family: Family, drafter: Any, config: SpecConfig, rule: Rule = exact, proposer: Proposer | None = None,
        given: Options | None = None, target: TargetInfo | None = None,
    ) -> None:  # fmt: skip
        self.family, self.rule = family, rule
        self.config, self.given = config, dict(given or {})  # options that every drafter shares, and this drafter's
        self.drafter, self.target = drafter, target  # fitted to `target`; both None if the model stays unchanged
        self.proposer = drafter if proposer is None else proposer  # see Handle
        self.fitted: dict[TargetInfo, Proposer] = {}  # for images, where the model generates these besides text
        self.stats, self.own_stats = Stats(), Stats()  # of all calls so far; of those that this drafter drafted for
        self.by_request: dict[Hashable, Patch] = {}  # for calls that name another drafter, see `for_request`
        self.prefixes = PrefixStore(config.kept_bytes) if config.kept_bytes else None  # the prefix cache
        self.source: object = None  # in a patch of `by_request`: keeps the object alive that the drafter was made of
        self.handle: Callable[[], Handle | None] = lambda: None  # the user's Handle; None once that is gone
        self._lock = threading.Lock()
        self._warned: set[str] = set()

    @classmethod
    def of(cls, model: object) -> Patch | None:
        """The model's current patch; None: it is not enabled."""
        return getattr(type(model), "_mmspec_patch", None)

    def running(self, model: object) -> Taps:
        """A context that keeps the feature hooks for a call, even if another thread disables the model meanwhile."""
        return self.family.taps(model, self.drafter.features)

    def fitted_proposer(self, model: object) -> Proposer:
        """The proposer for a call; the drafter is fitted again first if the model was moved, cast or resized."""
        now = self.family.describe(model)
        with self._lock:
            old = self.target
            if old is not None and (now.vocab != old.vocab or devices.moved(old, now)):
                self.target = replace(old, device=now.device, dtype=now.dtype, vocab=now.vocab)
                if devices.moved(old, now) or getattr(self.drafter, "shares", False):  # else only its head is another
                    self.drafter = self.drafter.fit(self.target, self.given)
                self.proposer = drafting.proposer(
                    model, self.drafter, self.config, self.target, self.family.captures_drafts
                )
                self.fitted = {}
            return self.proposer

    def for_request(self, model: Any, request: DraftRequest) -> Patch:
        """This patch with the requested drafter in place of its own, for one call; built once for each key.

        Raises:
            UnsupportedError: the drafter does not fit this model. If `on_unsupported` is "fallback" this is a warning,
                and this patch itself is used, which gives the same tokens.
        """
        special = self.by_request.get(request.key)
        if special is None:
            target = self.family.describe(model)
            try:
                ready, given = choose.chosen(request.drafter, request.given, target, model)
                config = replace(self.config, lookup=False)  # which `enable` was given for its own drafter
                proposer = drafting.proposer(model, ready, config, target, self.family.captures_drafts)
            except (ValueError, OSError) as error:
                self.decline(Obstacle(str(error)))
                return self
            special = Patch(self.family, ready, config, self.rule, proposer, given, target)
            special.stats, special.source, special._warned = self.stats, request.drafter, self._warned
        with self._lock:
            self.by_request.pop(request.key, None)
            if Patch.of(model) is self:  # else it was disabled meanwhile
                models = [key for key, one in self.by_request.items() if isinstance(one.source, Module)]
                full = len(models) >= MODELS and isinstance(special.source, Module)
                if full or len(self.by_request) >= REQUESTED:
                    del self.by_request[models[0] if full else next(iter(self.by_request))]
                self.by_request[request.key] = special
        return special

    def close(self) -> None:
        """Drop what it keeps for later calls: draft models, prefixes. A Handle may keep it after `disable`."""
        with self._lock:
            self.by_request.clear()
        if self.prefixes is not None:
            self.prefixes.clear()

    def add_stats(self, stats: Stats) -> None:
        """Add the statistics of a call; warns once for each kind of drafter whose drafts have hardly been accepted."""
        own = self.own_stats
        with self._lock:
            self.stats.add(stats)
            own.add(stats)
        judged = own.drafted and own.row_rounds >= ENOUGH and not drafting.switches(self.proposer)
        if judged and own.tokens_per_target_call < LITTLE:
            self.warn_once(
                f"drafts are hardly accepted: {own.row_rounds} rounds gained {own.tokens_per_target_call:.2f} tokens "
                f"each with {type(self.drafter).__name__}. Was it made for this model, and for such prompts? With "
                "auto=True drafting is turned off while it does not pay"
            )

    def rule_of(self, call: Call, sample: bool) -> Rule:
        """The rule of a call; warns once if it is `exact` although `enable` named another."""
        named = self.heeded(sample)
        rule = self.family.rule(named, call)
        if rule.lossless and not named.lossless:
            self.warn_once(
                f"mmspec accepts drafts of this call by the rule 'exact', not by {self.rule.name!r}: a relaxed rule is "
                "for pictures, and this call generates text as far as mmspec knows; for calls that generate both, the "
                "rule must use the ordinary residual"
            )
        return rule

    def heeded(self, sample: bool) -> Rule:
        """The rule; or `exact`, with a warning once, if this is a greedy call, on which most relaxed rules have no
        effect."""
        if sample or self.rule.lossless or self.rule.greedy is not None:
            return self.rule
        self.warn_once(
            f"the rule {self.rule.name!r} has no effect on greedy calls, which accept drafts by 'exact'; to use it, "
            "sample (do_sample=True, or temperature above 0)"
        )
        return exact

    def decline(self, why: Obstacle) -> None:
        """Raise UnsupportedError, or warn once that the stock path runs, which keeps the distribution of the output."""
        if self.config.on_unsupported == "error" and not why.always_falls_back:
            raise UnsupportedError(
                f"mmspec cannot accelerate this call: {why.reason}. Change it, call mmspec.disable(model), or enable "
                f"with on_unsupported='fallback' to run such calls on the stock path"
            )
        self.warn_once(f"mmspec runs the stock path: {why.reason}")

    def warn_once(self, message: str) -> None:
        """Warn, once for each enabled model and message, whatever numbers are in it: those of the first call."""
        topic = re.sub(r"\d+", "", message)
        if topic not in self._warned:
            self._warned.add(topic)
            warnings.warn(message, stacklevel=5)


def put_on(model: object, patch: Patch | None) -> Patch | None:
    """Replace the model's patch, and return the previous one; None: restore the model's own class.

    Raises:
        Exception: the drafter needs features that this model does not have; the previous patch stays.
    """
    with _switching:
        before, tapped = Patch.of(model), getattr(type(model), "_mmspec_taps", None)
        if patch is None:
            restore(model)
        else:
            taps = patch.running(model)
            taps.__enter__()
            swap(model, patch.family.mixin, _mmspec_patch=patch, _mmspec_taps=taps)
        if tapped is not None:
            tapped.__exit__()
        if before is not None and before is not patch:
            before.close()
        handle = None if before is None else before.handle()
        now = None if patch is None else patch.handle()
        if now is not None:
            now.hold(model)
        if handle is not None and handle is not now:
            handle.let_go()
    return before


class Handle:
    """An enabled model, as `enable` returns it.

    As a context manager, on exit it restores what the model had before `enable`: an earlier patch, or none. It does
    nothing on exit if the model's patch was replaced since. It keeps the model alive while its patch is active, and
    inside its `with` block.

    Attributes:
        drafter: the drafter in use, fitted to the model; None if the model was left unchanged.
        config: the options that every drafter shares.
        given: the options of the drafter that the user passed.
        rule: the acceptance rule.
        proposer: what the loop calls for drafts: the drafter, or its wrapper for `compile`, `auto` and `lookup`.
        stats: the statistics of all calls so far.
    """

    def __init__(self, model: object, patch: Patch, before: Patch | None) -> None:
        self._model = weakref.ref(model)
        self._strong: object = model  # keeps it alive
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
        """What the drafter is fitted to; None if the model was left unchanged."""
        return self._patch.target

    @property
    def model(self) -> Any:
        """The patched object: the model inside a pipeline or a wrapper, or a diffusers pipeline itself.

        Raises:
            ReferenceError: it was garbage-collected; a handle keeps it alive only while its patch is active.
        """
        model = self._model()
        if model is None:
            raise ReferenceError("the model of this handle is gone; keep the model itself while it is needed")
        return model

    def disable(self) -> None:
        """Same as `mmspec.disable(model)`."""
        model = self._model()
        if model is not None:
            put_on(model, None)
        self.let_go()

    def hold(self, model: object) -> None:
        """Keep the model alive."""
        self._strong = model

    def let_go(self) -> None:
        """Drop the reference to the model, unless inside a `with` block."""
        if not self._inside:
            self._strong = None

    def __enter__(self) -> Handle:
        self._strong, self._inside = self.model, True
        return self

    def __exit__(self, *_: object) -> None:
        model, self._strong, self._inside = self._strong, None, False
        with _switching:
            if Patch.of(model) is self._patch:
                put_on(model, self._before)

    def __repr__(self) -> str:
        model = self._model()
        name = "a model that is gone" if model is None else type(model).__name__
        return f"<mmspec on {name}: {type(self.drafter).__name__}, {self.given}, {self.config}>"
