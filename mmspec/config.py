"""The options of one enabled model, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

ON_UNSUPPORTED = ("error", "fallback")


@dataclass(frozen=True)
class SpecConfig:
    """How to draft. None means: what the drafter recommends.

    Attributes:
        depth: longest drafted path, in tokens (≥ 1).
        width: branches per node and size of the frontier; 1 drafts a chain.
        size: nodes sent to the target in a round, the root included.
        on_unsupported: what a call does that cannot be accelerated: "error" refuses with the reason, "fallback" warns
            once and runs the stock path. Neither ever changes what is generated.
    """

    depth: int | None = None
    width: int | None = None
    size: int | None = None
    on_unsupported: str = "error"

    def __post_init__(self) -> None:
        for name in ("depth", "width", "size"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} must be a whole number ≥ 1, or None for the drafter's own; got {value!r}")
        if self.on_unsupported not in ON_UNSUPPORTED:
            raise ValueError(f"on_unsupported must be one of {', '.join(ON_UNSUPPORTED)}; got {self.on_unsupported!r}")

    @classmethod
    def of(cls, options: dict[str, Any]) -> SpecConfig:
        """From keyword arguments, with an error that names what is allowed."""
        known = [f.name for f in fields(cls)]
        unknown = sorted(set(options) - set(known))
        if unknown:
            raise TypeError(f"unknown option {unknown[0]!r}; choose from {', '.join(known)}")
        return cls(**options)

    def filled(self, depth: int, width: int, size: int) -> SpecConfig:
        """The same options with the drafter's recommendations where the user said nothing."""
        depth, width = self.depth or depth, self.width or width
        recommended = depth + 1 if width == 1 else max(size, depth + 1)
        return replace(self, depth=depth, width=width, size=self.size or recommended)
