"""What can be said to `enable`: the options that every drafter shares, and how a drafter takes its own."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

if TYPE_CHECKING:
    from mmspec.rules import Rule

ON_UNSUPPORTED = ("error", "fallback")
Options = Mapping[str, Any]  # what was said to `enable`, by name
T = TypeVar("T")


class UnsupportedError(ValueError):
    """A model or a call that mmspec cannot accelerate; the message says why and what to do."""


@dataclass(frozen=True)
class SpecConfig:
    """Options of `enable` that all drafters share: what to accept, and how to run. Each drafter has options of its own
    besides.

    Attributes:
        rule: which drafted tokens to accept: a rule's name, with its parameters if it has any, or a Rule.
        budget: distance in total variation that a relaxed rule may spend on one row; None: no limit.
        reproducible: fix the noise before anything is drafted, so that a row has the tokens that plain decoding gives
            for its seed.
        auto: turn drafting off where it does not pay, by the measured time of rounds and the number of accepted tokens,
            and try it again now and then. The distribution is kept. What a row draws from its seed may depend on the
            switch, and so on the clock, except with `reproducible` or greedy decoding. None: on for drafters of
            text without weights (ngram, suffix, recycle) under a lossless rule, whose seeds draw the same either way;
            they weigh each draft by the measured time of rounds of its size, and are not turned off.
        lookup: beside a trained drafter or a smaller model, copy what followed the end of a row's text where it stood
            in that text before, wherever that promises more than the drafts did. The distribution is kept.
        compile: capture the target's forward and a feature drafter's pass (for pictures of LlamaGen and Janus the
            forward only) and compile them, once for each shape; also the decoder's reading of prompts without padding,
            for the first four shapes of prompts that occur twice. The first calls take up to a minute. What cannot be
            compiled runs uncompiled, with a warning.
        prefix_cache: memory for the keys and values of prompts and answers, such as "512MB" (or a number of bytes), so
            that a prompt that begins like an earlier text with the same pictures is read only from where it differs;
            None: nothing is kept.
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
                f"compile must be True or False; got {self.compile!r}. Write True, which does what 'all' did, also in "
                "place of 'auto', which is no more"
            )
        if not isinstance(self.lookup, bool):
            raise ValueError(f"lookup must be True or False; got {self.lookup!r}")
        if self.budget is not None and not self.budget >= 0:
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
            raise ValueError(f"prefix_cache: {error}; None keeps nothing") from None

    @property
    def kept_bytes(self) -> int:
        """What `prefix_cache` comes to."""
        return size_in_bytes(self.prefix_cache or 0)

    @classmethod
    def split(cls, options: Options) -> tuple[SpecConfig, Options]:
        """Split keyword arguments into these options and the drafter's; of the drafter's, None is left out."""
        shared = [f.name for f in fields(cls)]
        own = {name: value for name, value in options.items() if name not in shared and value is not None}
        return cls(**{name: value for name, value in options.items() if name in shared}), own


def chosen(defaults: T, given: Options, drafter: str) -> T:
    """A drafter's options with the user's values in place of the defaults; the class of the options checks them.

    Args:
        defaults: a frozen dataclass, with what the drafter recommends.
        given: by name.
        drafter: what the message calls it.

    Raises:
        ValueError: an option that this drafter does not have, so that none is ignored silently, or a wrong value.
    """
    known = option_names(defaults)
    useless = [name for name in given if name not in known]
    if useless:
        left = f"its options are {', '.join(known)}" if known else "it has no options of its own"
        raise ValueError(f"{drafter} has no use for {', '.join(useless)}; {left}")
    return replace(defaults, **given)  # type: ignore[type-var]


def option_names(options: object) -> list[str]:
    """The names of a drafter's options; none where it brings none."""
    return [f.name for f in fields(options) if f.init] if is_dataclass(options) else []


def size_in_bytes(value: object) -> int:
    """A number of bytes, or a text such as 512MB, 2G or 1.5 GiB, all multiples of 1024.

    Raises:
        ValueError: it is none of these.
    """
    if is_whole(value, 0):
        return value
    size = re.fullmatch(r"(\d+(?:\.\d+)?) *([KMGT]?)(?:I?B)?", value.upper() if isinstance(value, str) else "")
    if not size:
        raise ValueError(f"{value!r} is no size, as 512M, 2G or a number of bytes")
    return int(float(size[1]) * 1024 ** " KMGT".index(size[2] or " "))


def is_whole(value: object, least: int) -> TypeGuard[int]:
    """Whether it is a whole number, and at least so large."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def whole(name: str, value: object) -> None:
    """Refuse an option that is no whole number ≥ 1."""
    if not is_whole(value, 1):
        raise ValueError(f"{name} must be a whole number ≥ 1, or None for the drafter's own; got {value!r}")


def one_of(name: str, value: object, allowed: Iterable[object]) -> None:
    """Refuse an option that is none of the allowed ones."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(str, allowed))}; got {value!r}")
