"""The options of `enable`: those that all drafters share, and helpers that check a drafter's own options."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

if TYPE_CHECKING:
    from mmspec.rules import Rule

ON_UNSUPPORTED = ("error", "fallback")
Options = Mapping[str, Any]  # keyword arguments of `enable`, by name
T = TypeVar("T")


class UnsupportedError(ValueError):
    """A model or a call that mmspec cannot accelerate; the message says why and what to do."""


@dataclass(frozen=True)
class SpecConfig:
    """Options of `enable` that all drafters share: what to accept, and how to run. Each drafter also has its own.

    Attributes:
        rule: which drafted tokens to accept: a rule's name, with its parameters if it has any, or a Rule.
        budget: total-variation distance that a relaxed rule may spend on one row; None: no limit.
        reproducible: fix the noise before anything is drafted, so that a row gets exactly the tokens that plain
            decoding gives for its seed.
        auto: turn drafting off while it does not pay, judged by the measured time of rounds and the number of accepted
            tokens, and try it again now and then. The output distribution does not change. Which tokens a seed gives
            may depend on the switch, and so on timing, except with `reproducible` or greedy decoding. None: on for the
            text drafters without weights (ngram, suffix, recycle) under a lossless rule, where a seed gives the same
            tokens either way; they compare each draft with the measured time of rounds of its size, and stay on.
        lookup: beside a trained drafter or a smaller model, also find the end of a row's text earlier in that text and
            copy what followed, wherever that promises more than the drafts did. The distribution does not change.
        compile: capture and compile the target's forward and a feature drafter's pass (for LlamaGen and Janus images
            the forward only), once for each shape; also the decoder's prefill of prompts without padding, for the first
            four prompt shapes that occur twice in a row, or four times. The first calls take up to a minute. What
            cannot be compiled runs uncompiled, with a warning.
        prefix_cache: memory for the keys and values of prompts and answers, such as "512MB" (or a number of bytes). A
            prompt that begins like an earlier text with the same pictures is then read only from where it differs.
            None: no prefix cache.
        on_unsupported: what happens to a call that cannot be accelerated: "error" raises with the reason, "fallback"
            warns once and runs the stock path, whose output is the same.
    """

    rule: str | Rule = "exact"
    budget: float | None = None
    reproducible: bool = False
    auto: bool | None = None
    lookup: bool = False
    compile: bool = False
    prefix_cache: str | int | None = None
    on_unsupported: str = "error"

    def __post_init__(self) -> None:
        one_of("on_unsupported", self.on_unsupported, ON_UNSUPPORTED)
        if not isinstance(self.compile, bool):
            raise ValueError(
                f"compile must be True or False; got {self.compile!r}. Write True in place of 'all', which it equals, "
                "and of 'auto', which was removed"
            )
        for name in ("lookup", "reproducible"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False; got {getattr(self, name)!r}")
        if not isinstance(self.auto, bool | None):
            raise ValueError(f"auto must be True, False or None; got {self.auto!r}")
        if self.budget is not None and not (isinstance(self.budget, int | float) and self.budget >= 0):
            raise ValueError(f"budget must be a distance ≥ 0, or None for no limit; got {self.budget!r}")
        if self.budget is not None and getattr(self.rule, "name", self.rule) == "exact":
            raise ValueError("a budget limits what a relaxed rule spends, and rule='exact' spends nothing; name a rule")
        if self.reproducible and getattr(self.rule, "name", self.rule) != "exact":
            raise ValueError(
                f"reproducible=True gives what plain decoding gives for the seed, which rule={self.rule!r} would "
                "change; leave one of them out"
            )
        try:
            size_in_bytes(self.prefix_cache or 0)
        except ValueError as error:
            raise ValueError(f"prefix_cache: {error}; None turns it off") from None

    @property
    def kept_bytes(self) -> int:
        """`prefix_cache` in bytes."""
        return size_in_bytes(self.prefix_cache or 0)

    @classmethod
    def split(cls, options: Options) -> tuple[SpecConfig, Options]:
        """Split keyword arguments into these options and the drafter's own, dropping those that are None."""
        shared = [f.name for f in fields(cls)]
        own = {name: value for name, value in options.items() if name not in shared and value is not None}
        return cls(**{name: value for name, value in options.items() if name in shared}), own


def chosen(defaults: T, given: Options, drafter: str) -> T:
    """A drafter's options with the user's values in place of the defaults; the options class checks the values.

    Args:
        defaults: a frozen dataclass with the values that the drafter recommends.
        given: the user's values, by option name.
        drafter: the drafter's name in the error message.

    Raises:
        ValueError: an option that this drafter does not have, so that none is ignored silently, or a wrong value.
    """
    names = option_names(defaults)
    unknown = [name for name in given if name not in names]
    if unknown:
        hint = f"its options are {', '.join(names)}" if names else "it has no options of its own"
        raise ValueError(f"{drafter} has no use for {', '.join(unknown)}; {hint}")
    return replace(defaults, **given)  # type: ignore[type-var]


def option_names(options: object) -> list[str]:
    """The names of a drafter's options; empty if it has none."""
    return [f.name for f in fields(options) if f.init] if is_dataclass(options) else []


def size_in_bytes(value: object) -> int:
    """The number of bytes in an int, or in a string such as 512MB, 2G or 1.5 GiB, whose units are powers of 1024.

    Raises ValueError: any other value.
    """
    if is_whole(value, 0):
        return value
    size = re.fullmatch(r"(\d+(?:\.\d+)?) *([KMGT]?)(?:I?B)?", value.upper() if isinstance(value, str) else "")
    if not size:
        raise ValueError(f"{value!r} is not a size; write one like 512M or 2G, or a number of bytes")
    return int(float(size[1]) * 1024 ** " KMGT".index(size[2] or " "))


def is_whole(value: object, least: int) -> TypeGuard[int]:
    """Whether `value` is a whole number, of Python or NumPy (not a bool), and at least `least`."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least


def is_number(value: object, least: float = -math.inf) -> bool:
    """Whether `value` is a finite real number, of Python or NumPy, and at least `least`."""
    return isinstance(value, Real) and math.isfinite(value) and float(value) >= least


def whole(name: str, value: object) -> None:
    """Raise a ValueError if an option is not a whole number ≥ 1."""
    if not is_whole(value, 1):
        raise ValueError(f"{name} must be a whole number ≥ 1, or None for the drafter's own; got {value!r}")


def one_of(name: str, value: object, allowed: Iterable[object]) -> None:
    """Raise a ValueError if an option is not one of the allowed values."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(str, allowed))}; got {value!r}")
