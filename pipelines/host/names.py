"""What the installed transformers calls things, found by signature and never by version number.

Up to 5.23 a model's KV cache is called `past_key_values` (`cache_params` in some layers), from 5.24 on `cache`
everywhere. Stock passes on only the name of its release, and drops the other one where both arrive.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from transformers import GenerationMixin

from mmspec.pipelines.host.kinds import Configured

_CACHES = ("cache", "past_key_values", "cache_params")  # the newest name first


@cache
def signature(function: Callable[..., object]) -> inspect.Signature:
    return inspect.signature(function)


def has(function: Callable[..., object], parameter: str) -> bool:
    """Whether a function of the host has this parameter."""
    return parameter in signature(function).parameters


CACHE = next((name for name in _CACHES if has(GenerationMixin.prepare_inputs_for_generation, name)), "")
if not CACHE:
    raise ImportError(f"prepare_inputs_for_generation takes no KV cache under a known name: {', '.join(_CACHES)}")
# Kosmos-2.5 counts what is cached under another name
CACHED = "cache_length" if CACHE == "cache" else "past_key_values_length"

FEATURES = "last_hidden_state"  # of what a decoder gives
LOGITS = "logits_to_keep"  # of which tokens a forward gives logits: a number of last ones (0: all), or a list


def origin(model: Configured) -> tuple[str, str | None]:
    """The folder or hub name that a model or pipeline was loaded from, "" where nobody knows, and the revision."""
    config = model.config
    return getattr(config, "_name_or_path", None) or "", getattr(config, "_commit_hash", None)


def own_setting(model: Configured, name: str) -> object:
    """What a model's config says under a name of ours; None: nothing."""
    return getattr(model.config, name, None)


def translated(kwargs: Mapping[str, object]) -> dict[str, Any]:
    """A user's keyword arguments, the KV cache under the name of the installed release.

    An older name is warned of at the caller's caller, as stock would.
    """
    named = dict(kwargs)
    for old in _CACHES[1:]:
        if old in named and old != CACHE and CACHE not in named:
            what = f"`{old}` is deprecated in the installed transformers; use `{CACHE}` instead."
            warnings.warn(what, FutureWarning, stacklevel=3)
            named[CACHE] = named.pop(old)
    return named


def bound(method: Callable[..., Any], *args: object, **kwargs: object) -> dict[str, Any]:
    """What each parameter of a stock method gets in this call, by name, without `self`; further keywords beside."""
    which = signature(method)
    call = which.bind(None, *args, **kwargs)
    call.apply_defaults()
    arguments = dict(list(call.arguments.items())[1:])
    for name, parameter in which.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            arguments |= arguments.pop(name)
    return arguments


def by_name(
    method: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, Any]
) -> tuple[tuple[object, ...], dict[str, Any]]:
    """The arguments of a call of a stock method, all but the first by name; as they came where stock refuses them."""
    names = list(signature(method).parameters)[2:]
    more = dict(zip(names, args[1:], strict=False))
    if len(more) < len(args) - 1 or more.keys() & kwargs.keys():
        return args, kwargs
    return args[:1], {**more, **kwargs}


def cache_name(function: Callable[..., object]) -> str:
    """How a stock function calls the KV cache.

    Raises:
        TypeError: it takes none under a name that mmspec knows.
    """
    for name in _CACHES:
        if has(function, name):
            return name
    raise TypeError(f"{function.__qualname__} takes no KV cache under a name that mmspec knows: {', '.join(_CACHES)}")
