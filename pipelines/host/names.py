"""Names that differ between releases of transformers, found by signature and never by version number.

Up to 5.23 a model's KV cache is called `past_key_values` (`cache_params` in some layers), from 5.24 on `cache`
everywhere. Stock passes on only the name of its own release, and drops the other if it gets both.
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
    """Whether a function of transformers has this parameter."""
    return parameter in signature(function).parameters


CACHE = next((name for name in _CACHES if has(GenerationMixin.prepare_inputs_for_generation, name)), "")
if not CACHE:
    raise ImportError(f"prepare_inputs_for_generation takes no KV cache under a known name: {', '.join(_CACHES)}")

FEATURES = "last_hidden_state"  # in a decoder's output
LOGITS = "logits_to_keep"  # the tokens for which a forward returns logits: the number of last ones (0: all), or a list


def origin(model: Configured) -> tuple[str, str | None]:
    """The folder or hub name that a model or pipeline was loaded from ("" if unknown), and the revision."""
    config = model.config
    return getattr(config, "_name_or_path", None) or "", getattr(config, "_commit_hash", None)


def own_setting(model: Configured, name: str) -> object:
    """The value of one of mmspec's own settings in a model's config, or None."""
    return getattr(model.config, name, None)


def translated(kwargs: Mapping[str, object]) -> dict[str, Any]:
    """A user's keyword arguments, with the KV cache under the name of the installed release.

    For an older name there is a FutureWarning at the caller's caller, as from stock.
    """
    arguments = dict(kwargs)
    for old in _CACHES[1:]:
        if old in arguments and old != CACHE and CACHE not in arguments:
            what = f"`{old}` is deprecated in the installed transformers; use `{CACHE}` instead."
            warnings.warn(what, FutureWarning, stacklevel=3)
            arguments[CACHE] = arguments.pop(old)
    return arguments


def bound(method: Callable[..., Any], *args: object, **kwargs: object) -> dict[str, Any]:
    """The arguments of a stock method in this call by name, without `self`, with those of `**kwargs` merged in."""
    parameters = signature(method)
    call = parameters.bind(None, *args, **kwargs)
    call.apply_defaults()
    arguments = dict(list(call.arguments.items())[1:])
    for name, parameter in parameters.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            arguments |= arguments.pop(name)
    return arguments


def by_name(
    method: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, Any]
) -> tuple[tuple[object, ...], dict[str, Any]]:
    """The arguments of a stock method call, all but the first by name; unchanged if stock would refuse them."""
    names = list(signature(method).parameters)[2:]
    more = dict(zip(names, args[1:], strict=False))
    if len(more) < len(args) - 1 or more.keys() & kwargs.keys():
        return args, kwargs
    return args[:1], {**more, **kwargs}


def cache_name(function: Callable[..., object]) -> str:
    """The name of a stock function's parameter for the KV cache.

    Raises:
        TypeError: it has none with a name that mmspec knows.
    """
    for name in _CACHES:
        if has(function, name):
            return name
    raise TypeError(f"{function.__qualname__} takes no KV cache under a name that mmspec knows: {', '.join(_CACHES)}")
