"""The public functions enable, disable, refresh and stats: patch a loaded model or pipeline and restore it."""

from __future__ import annotations

import logging
import warnings
from contextlib import suppress
from typing import Any

import torch
from torch.nn import Module

from mmspec.compile import version
from mmspec.config import Options, SpecConfig, UnsupportedError
from mmspec.pipelines import untested
from mmspec.pipelines.families import table as families
from mmspec.pipelines.host import adapters, release, wrappers
from mmspec.pipelines.patching import choose, drafting
from mmspec.pipelines.patching.family import Family
from mmspec.pipelines.patching.handle import Handle, Patch, put_on
from mmspec.protocols import TargetInfo
from mmspec.registry import resolve_rule
from mmspec.rules import Rule
from mmspec.statistics import Stats

__all__ = ["Handle", "UnsupportedError", "disable", "enable", "refresh", "stats"]

_log = logging.getLogger("mmspec")
MPS = "2.13"  # the first torch release whose attention handles a separate mask for each row correctly on MPS


@release.guarded
def enable(model_or_pipe: object, drafter: Any = None, **options: Any) -> Handle:
    """Accelerate a loaded model or pipeline in place; `generate` keeps its arguments, its output and its distribution.

    Args:
        model_or_pipe: a transformers model with `generate`, a `transformers.pipeline`, a model wrapped by PEFT or by
            `torch.compile`, or a diffusers pipeline that generates tokens. The model inside is what is patched.
        drafter: "suffix", "recycle" or "ngram" (no weights), "jacobi" (no weights; the default for models that only
            generate images), "mtp" (the heads in the model's own files), "model" with `draft=` a smaller model or its
            folder, a drafter's name on the hub, a folder, a Drafter, or a draft model. None: the drafter in the model's
            folder, else the MTP heads among its tensors, else "suffix"; the log says which was chosen, and why.
        options: fields of SpecConfig (rule, budget, reproducible, auto, lookup, compile, prefix_cache, on_unsupported),
            and the drafter's own options, where None means its recommendation: TreeOptions (a trained drafter: depth,
            width, size, tree, draws, adaptive, draft_vocab, prune), BlockOptions ("block": also confidence),
            Sizes ("ngram", "recycle": depth, width, size), SuffixOptions ("suffix": also memory) or
            WindowOptions ("jacobi", "heads": window, init, coupling, proactive). A `rule` other than "exact" changes
            the distribution, within `budget`; for models that generate both text and images, only that of images.

    Returns:
        A Handle, which is also a context manager: leaving it restores the model's previous state, unless something
            else was enabled in the meantime. Enabling again replaces the settings; calls that are running in other
            threads keep the settings that they started with.

    Raises:
        UnsupportedError: the model cannot be accelerated; with `on_unsupported="fallback"` it stays unchanged, with a
            warning.
        ValueError: an unknown drafter or rule, a drafter without weights or made for another model, an invalid value of
            an option, or an option that this drafter does not use. What was enabled before stays enabled.
        TypeError: an unknown option, or an object that does not generate tokens.
    """
    config, given = SpecConfig.split(options)
    *around, model = wrappers.unwrap_all(model_or_pipe)
    family = families.of(model)
    why = next(filter(None, map(adapters.unsupported, around)), None) or family.unsupported(model)
    if why is None and not release.tested():
        why = untested.refusal(model, drafter, enable)
    if why is not None:
        release.leave(model, why, config, above=4)  # above `release.guarded`
        return Handle(model, Patch(family, None, config), Patch.of(model))
    if config.kept_bytes and not family.keeps_prefixes:
        raise ValueError(f"prefix_cache has no effect on {type(model).__name__}, which draws pictures; leave it out")
    target = family.describe(model)
    if target.device.type == "mps" and torch.__version__ < MPS:
        warnings.warn(f"torch {torch.__version__} may attend wrongly on MPS; use torch {MPS} or newer", stacklevel=3)
    drafter = family.drafter if drafter is None else drafter
    ready, given, target = _chosen(drafter, given, target, family, model)  # may raise: nothing is patched yet
    rule = _rule(config, family, model)
    proposer = drafting.proposer(model, ready, config, target, family.captures_drafts)
    patch = Patch(family, ready, config, rule, proposer, given, target)
    if (note := family.note(model)) is not None:
        _log.warning("mmspec: %s", note)
    before = put_on(model, patch)
    for module in (model, patch.drafter) if config.compile else (model,):
        if isinstance(module, Module):
            version.version(module)  # takes longer than seeing, in a call, that it has not changed
    return Handle(model, patch, before)


def _chosen(drafter: Any, given: Options, target: TargetInfo, family: Family, model: Any) -> Any:
    """The fitted drafter, its options, and the TargetInfo that it fits: the model's text, or else its images."""
    try:
        return *choose.chosen(drafter, given, target, model), target
    except ValueError:
        pictures = family.pictures(model)
        if pictures is not None:
            with suppress(ValueError):  # report the first error, not this one
                return *choose.chosen(drafter, given, pictures, model), pictures
        raise


def _rule(config: SpecConfig, family: Family, model: Any) -> Rule:
    """The acceptance rule; ValueError if it compares codes of another vocabulary than the model's."""
    codes, table = (None, None) if config.rule == "exact" else (family.codebook(model), family.embeddings(model))
    rule = resolve_rule(config.rule, codes, config.budget, table)
    if rule.vocab is not None:
        known = [one.vocab for one in (family.describe(model), family.pictures(model)) if one is not None]
        if rule.vocab not in known:
            raise ValueError(
                f"the rule {rule.name} compares codes of {rule.vocab} tokens, but the model draws from {known[-1]}; "
                "its codebook needs a row for every token id"
            )
    return rule


def disable(model_or_pipe: object) -> None:
    """Restore the model's stock class and behaviour; does nothing if it is not enabled.

    Calls that are running in other threads finish with the settings that they started with.

    Args:
        model_or_pipe: what was passed to `enable`, or the model inside it.
    """
    put_on(wrappers.unwrap(model_or_pipe), None)


def refresh(model_or_pipe: object) -> None:
    """Discard captured graphs and cached prefixes of the model. Call it after weights were changed in a way that torch
    does not track (through `.data`, a numpy view or another process), since `compile` and `prefix_cache` cannot see it.

    Args:
        model_or_pipe: a module, such as a model or a drafter, enabled or not; or a pipeline, with all of its modules.
    """
    components = getattr(model_or_pipe, "components", None)  # of a diffusers pipeline
    parts = list(components.values()) if isinstance(components, dict) else [model_or_pipe]
    modules = [part for part in parts if isinstance(part, Module)] or [wrappers.unwrap(model_or_pipe)]
    version.refresh(*(part for part in modules if isinstance(part, Module)))


def stats(model_or_pipe: object) -> Stats:
    """The sum of the statistics of all calls since the model was enabled; enabling it again resets them.

    Args:
        model_or_pipe: what was passed to `enable`, or the model inside it.

    Raises:
        UnsupportedError: the model is not enabled.
    """
    model = wrappers.unwrap(model_or_pipe)
    patch = Patch.of(model)
    if patch is None:
        raise UnsupportedError(f"{type(model).__name__} is not enabled; call mmspec.enable(model) first")
    return patch.stats
