"""enable, disable, stats: mmspec on a loaded model or pipeline, and off again without a trace."""

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
from mmspec.pipelines.host import adapters, release
from mmspec.pipelines.patching import choose, drafting
from mmspec.pipelines.patching.family import Family
from mmspec.pipelines.patching.handle import Handle, Patch, put_on
from mmspec.protocols import TargetInfo
from mmspec.registry import resolve_rule
from mmspec.statistics import Stats

__all__ = ["Handle", "UnsupportedError", "disable", "enable", "refresh", "stats"]

_log = logging.getLogger("mmspec")
MPS = "2.13"  # torch from which on attention under a mask of every row is right there


@release.guarded
def enable(model_or_pipe: object, drafter: Any = None, **options: Any) -> Handle:
    """Accelerate a loaded model or pipeline in place; `generate` keeps its arguments, its output and its distribution.

    Args:
        model_or_pipe: a transformers model with `generate`, a `transformers.pipeline`, a model wrapped by PEFT or by
            `torch.compile`, or a diffusers pipeline that generates tokens. The model inside is what is patched.
        drafter: "suffix", "recycle" or "ngram" (no weights), "jacobi" (no weights; the default of models that only draw
            pictures), "mtp" (the heads in the model's own files), "model" with `draft=` a smaller model or its folder,
            a drafter's name on the hub, a folder, a Drafter, or a model that drafts. None: what the model ships with, a
            drafter in its folder or heads among its tensors, else "suffix"; the log says which, and why.
        options: fields of SpecConfig (rule, budget, reproducible, auto, compile, prefix_cache, on_unsupported), and the
            drafter's own options, where None means its recommendation: TreeOptions (a trained drafter: depth, width,
            size, tree, draws, adaptive, draft_vocab, prune), BlockOptions ("block": also confidence),
            ChainOptions ("ngram", "recycle": depth, width, size), SuffixOptions ("suffix": also memory) or
            WindowOptions ("jacobi", "heads": window, init, coupling, proactive). A `rule` other than "exact" changes
            the distribution, within `budget`; for models that both write and draw, only that of pictures.

    Returns:
        A Handle, which is also a context manager: on leaving it the model is as it was before, unless something else
            was enabled since. Enabling again replaces the settings; calls that run in other threads keep those that
            they began with.

    Raises:
        UnsupportedError: the model cannot be accelerated; with `on_unsupported="fallback"` it is left as it is, with a
            warning.
        ValueError: an unknown drafter or rule, a drafter without its weights or made for another model, an option with
            a value that makes no sense or that this drafter has no use for. What was enabled before stays.
        TypeError: an unknown option, or nothing that generates tokens.
    """
    config, given = SpecConfig.split(options)
    *wrappers, model = families.opened(model_or_pipe)
    family = families.of(model)
    why = next(filter(None, map(adapters.soft_prompt, wrappers)), None) or family.unsupported(model)
    if why is None and not release.tested():
        why = untested.refusal(model, drafter, enable)
    if why is not None:
        if config.on_unsupported == "error":
            raise UnsupportedError(f"mmspec cannot accelerate {type(model).__name__}: {why}")
        warnings.warn(f"mmspec leaves {type(model).__name__} as it is: {why}", stacklevel=2)
        return Handle(model, Patch(family, None, config), Patch.of(model))
    target = family.describe(model)
    if target.device.type == "mps" and torch.__version__ < MPS:
        warnings.warn(f"torch {torch.__version__} may attend wrongly on MPS; use torch {MPS} or newer", stacklevel=2)
    drafter = family.drafter if drafter is None else drafter
    ready, given, target = _chosen(drafter, given, target, family, model)  # may fail: what was enabled before stays
    codes, table = (None, None) if config.rule == "exact" else (family.codebook(model), family.embeddings(model))
    rule = resolve_rule(config.rule, codes, config.budget, table)
    proposer = drafting.proposer(model, ready, config, target, family.captures_drafts)
    patch = Patch(family, ready, config, rule, proposer, given, target)
    if (note := family.note(model)) is not None:
        _log.warning("mmspec: %s", note)
    return Handle(model, patch, put_on(model, patch))


def _chosen(drafter: Any, given: Options, target: TargetInfo, family: Family, model: Any) -> Any:
    """The drafter, the options that are left and what it was fitted to: what the model writes, or what it draws."""
    try:
        return *choose.chosen(drafter, given, target, model), target
    except ValueError:
        pictures = family.pictures(model)
        if pictures is not None:
            with suppress(ValueError):  # the other message is the one to give
                return *choose.chosen(drafter, given, pictures, model), pictures
        raise


def disable(model_or_pipe: object) -> None:
    """Give the model its stock behaviour and its class back; nothing happens where it was not enabled.

    Calls that run in other threads end as they began.

    Args:
        model_or_pipe: what was given to `enable`, or the model inside it.
    """
    put_on(families.unwrap(model_or_pipe), None)


def refresh(model_or_pipe: object) -> None:
    """Have the next calls capture the model and read its prompts anew: for those who write to weights behind torch's
    back (through `.data`, a numpy view or another process), which `compile` and `prefix_cache` do not see.

    Args:
        model_or_pipe: a module, such as a model or a drafter, enabled or not; or a pipeline, with all of its modules.
    """
    parts = getattr(model_or_pipe, "components", None)  # of diffusers
    each = list(parts.values()) if isinstance(parts, dict) else [model_or_pipe]
    modules = [part for part in each if isinstance(part, Module)] or [families.unwrap(model_or_pipe)]
    version.refresh(*(part for part in modules if isinstance(part, Module)))


def stats(model_or_pipe: object) -> Stats:
    """What the enabled model's calls did so far, summed up; they start anew when it is enabled again.

    Args:
        model_or_pipe: what was given to `enable`, or the model inside it.

    Raises:
        UnsupportedError: the model is not enabled.
    """
    model = families.unwrap(model_or_pipe)
    patch = Patch.of(model)
    if patch is None:
        raise UnsupportedError(f"{type(model).__name__} is not enabled; call mmspec.enable(model) first")
    return patch.stats
