"""enable, disable, stats: mmspec on a loaded model or pipeline, and off again without a trace."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import torch

from mmspec.config import SpecConfig
from mmspec.pipelines import devices, drafting, families
from mmspec.pipelines.swap import restore, swap
from mmspec.registry import resolve, resolve_rule
from mmspec.rules import Rule, exact
from mmspec.session import Stats
from mmspec.types import TargetInfo

MPS = "2.13"  # torch from which on attention under a mask of every row is right there


class UnsupportedError(ValueError):
    """A model or a call that mmspec cannot accelerate; the message says why and what to do."""


class Handle:
    """An enabled model, as `enable` returns it. Leaving it as a context manager disables it.

    Attributes:
        model: what was patched: the model inside a pipeline or a PEFT wrapper, or the pipeline itself.
        drafter: the one in use, fitted to the model; None where the model was left as it is.
        config: the options, as given.
        rule: what is kept of a draft.
        proposer: what the loop asks for drafts: the drafter, or what `compile` and `auto` make of it.
        target: what the drafter was fitted to; None where the model was left as it is.
        fitted: proposers for what a model draws beside its text, by what they have to fit.
        stats: what all calls did so far.
    """

    def __init__(
        self,
        model: Any,
        drafter: Any,
        config: SpecConfig,
        rule: Rule = exact,
        proposer: Any = None,
        target: TargetInfo | None = None,
    ) -> None:
        self.model = model
        self.drafter = drafter
        self.config = config
        self.rule = rule
        self.proposer = drafter if proposer is None else proposer
        self.target = target
        self.fitted: dict[TargetInfo, Any] = {}
        self.stats = Stats()
        self._lock = threading.Lock()
        self._warned: set[str] = set()

    def book(self, stats: Stats) -> None:
        with self._lock:
            self.stats.add(stats)

    def fitting(self) -> Any:
        """What a call asks for drafts: `proposer`, fitted anew where the model was moved or cast since."""
        now = families.home(self.model).describe(self.model)
        with self._lock:
            if self.target is not None and devices.moved(self.target, now):
                self.drafter, self.target = self.drafter.fit(now, self.config), now
                self.proposer = _proposer(self.model, self.drafter, self.config, now)
                self.fitted = {}
            return self.proposer

    def refuse(self, why: str) -> None:
        """Raise, or say once that the stock path runs; the law of what is generated is the same either way."""
        if self.config.on_unsupported == "error":
            raise UnsupportedError(
                f"mmspec cannot accelerate this call: {why}. Change it, call mmspec.disable(model), or enable with "
                f"on_unsupported='fallback' to run such calls on the stock path"
            )
        self.fall_back(why)

    def fall_back(self, why: str) -> None:
        if why not in self._warned:
            self._warned.add(why)
            warnings.warn(f"mmspec runs the stock path: {why}", stacklevel=4)

    def disable(self) -> None:
        """As `mmspec.disable(model)`."""
        disable(self.model)

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_: Any) -> None:
        self.disable()

    def __repr__(self) -> str:
        return f"<mmspec on {type(self.model).__name__}: {type(self.drafter).__name__}, {self.config}>"


def enable(model_or_pipe: Any, drafter: Any = None, **options: Any) -> Handle:
    """Accelerate a loaded model or pipeline in place; `generate` keeps its arguments, its output and its law.

    Args:
        model_or_pipe: a transformers model with `generate`, a `transformers.pipeline`, a PEFT-wrapped model, or a
            diffusers pipeline that generates tokens.
        drafter: "ngram" (no weights; the default), "jacobi" (no weights; the default of models that only draw
            pictures), a drafter's name on the hub, a folder, or a Drafter.
        options: fields of SpecConfig: depth, width, size, tree, draws, draft_vocab, prune, prune_by, window, init,
            coupling, proactive, rule, budget, reproducible, auto, compile, on_unsupported. A `rule` other than "exact"
            bends the law, by what `budget` allows; of models that both write and draw only that of pictures.

    Returns:
        A Handle; also a context manager that disables on leaving. Enabling again replaces what was there.

    Raises:
        UnsupportedError: the model cannot be accelerated; with `on_unsupported="fallback"` it is left as it is, with a
            warning.
        ValueError: an unknown drafter or rule, a drafter without its weights or made for another model, an option with
            a value that makes no sense or that this drafter has no use for. What was enabled before stays.
        TypeError: an unknown option, or nothing that generates tokens.
    """
    config = SpecConfig.of(options)
    model = families.unwrap(model_or_pipe)
    home = families.home(model)
    why = home.unsupported(model)
    if why is not None:
        if config.on_unsupported == "error":
            raise UnsupportedError(f"mmspec cannot accelerate {type(model).__name__}: {why}")
        warnings.warn(f"mmspec leaves {type(model).__name__} as it is: {why}", stacklevel=2)
        return Handle(model, None, config)
    drafter = getattr(home, "DRAFTER", None) if drafter is None else drafter
    target = home.describe(model)
    if target.device.type == "mps" and torch.__version__ < MPS:
        warnings.warn(f"torch {torch.__version__} may attend wrongly on MPS; use torch {MPS} or newer", stacklevel=2)
    ready = resolve(drafter, config, target)  # may fail: what was enabled before stays
    codes = None if config.rule == "exact" else home.codebook(model)
    rule = resolve_rule(config.rule, codes, config.budget)
    proposer = _proposer(model, ready, config, target)
    before = getattr(type(model), "_mmspec_handle", None)
    disable(model)
    try:
        return _put_on(home, Handle(model, ready, config, rule, proposer, target))
    except Exception:  # features that this model has not
        if before is not None:
            _put_on(home, before)
        raise


def _proposer(model: Any, drafter: Any, config: SpecConfig, target: TargetInfo) -> Any:
    return drafting.proposer(model, drafter, config, target, getattr(families.home(model), "CAPTURES_DRAFTS", True))


def _put_on(home: Any, handle: Handle) -> Handle:
    home.tap(handle.model, handle.drafter.features)
    swap(handle.model, home.Enabled, _mmspec_handle=handle)
    return handle


def disable(model_or_pipe: Any) -> None:
    """Give the model its stock behaviour and its class back; nothing happens where it was not enabled.

    Args:
        model_or_pipe: what was given to `enable`, or the model inside it.
    """
    model = families.unwrap(model_or_pipe)
    handle = getattr(type(model), "_mmspec_handle", None)
    if handle is not None:
        restore(model)
        families.home(model).untap(model, handle.drafter.features)


def stats(model_or_pipe: Any) -> Stats:
    """What the enabled model's calls did so far, summed up; they start anew when it is enabled again.

    Args:
        model_or_pipe: what was given to `enable`, or the model inside it.

    Raises:
        UnsupportedError: the model is not enabled.
    """
    model = families.unwrap(model_or_pipe)
    handle = getattr(type(model), "_mmspec_handle", None)
    if handle is None:
        raise UnsupportedError(f"{type(model).__name__} is not enabled; call mmspec.enable(model) first")
    return handle.stats
