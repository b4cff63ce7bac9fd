"""The options of one enabled model, as plain data."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from reprlib import repr as briefly
from typing import Any

ON_UNSUPPORTED = ("error", "fallback")
INITS = ("uniform", "horizontal", "vertical", "mixture")
COUPLINGS = ("none", "maximal", "gumbel")
PRUNE_BY = ("attention", "uniform")
TREE = ("depth", "width", "size", "tree", "draws")  # options of a drafter that grows a chain or a tree
FEATURE = (*TREE, "draft_vocab", "prune", "prune_by")  # of one that reads the prompt's features
WINDOW = ("window", "init", "coupling", "proactive")  # options of a drafter that refines a window


@dataclass(frozen=True)
class SpecConfig:
    """How to draft and what to keep. None means: what the drafter recommends.

    Attributes:
        depth: longest drafted path, in tokens (≥ 1).
        width: branches per node and size of the frontier; 1 drafts a chain.
        size: nodes sent to the target in a round, the root included.
        tree: "dynamic" (grown by likelihood), or the name of a static shape of mmspec/drafters/shapes.py.
        draws: fill a static tree by drawing without replacement from the draft law, not by rank.
        draft_vocab: tokens that a drafter on the target's head proposes from; it reads their rows of the head and no
            others. N: the first N tokens, which a BPE vocabulary learned first, and those that end an answer; or ids,
            kept as a sorted tuple.
        window: positions that a Jacobi drafter looks at in a round, the pending token's included; 1 drafts nothing.
        init: where a Jacobi drafter's first guesses come from, one of INITS.
        coupling: how it redraws a guess once the target has spoken, one of COUPLINGS.
        proactive: (K, D): its next D − 1 positions get a tree with K branches per node (K, D ≥ 2).
        prune: share of a prompt's image and video tokens that the drafter leaves out; the target reads them all.
        prune_by: which ones stay, one of PRUNE_BY: those that the target attended to most and some between them (the
            default), or evenly spaced ones.
        rule: what to keep: a rule's name, with its parameters where it has some, or a Rule.
        budget: distance in total variation that a relaxed rule may spend on one row; None: no limit.
        reproducible: fix the noise beforehand, so that a row is what plain decoding with its seed gives, whatever is
            drafted.
        auto: draft as much as pays, or nothing, by what rounds cost on this machine and how much of a draft stands:
            all of what `depth`, `size` or `window` says, a half or a quarter of it; a static tree, and with `compile`
            any draft, all or nothing. The law is kept. What a row draws from its seed may depend on the choice, and
            so on the clock, except where `reproducible` is set or nothing is drawn.
        compile: capture the target's forward and what a feature drafter does (for pictures of LlamaGen and Janus the
            forward alone) and compile them, once for each shape that comes up; the first call takes up to a minute.
            What cannot be compiled runs as it is, with a warning.
        on_unsupported: what a call does that cannot be accelerated: "error" refuses with the reason, "fallback" warns
            once and runs the stock path. Neither ever changes what is generated.
    """

    depth: int | None = None
    width: int | None = None
    size: int | None = None
    tree: str | None = None
    draws: bool | None = None
    draft_vocab: int | Sequence[int] | None = None
    window: int | None = None
    init: str | None = None
    coupling: str | None = None
    proactive: tuple[int, int] | None = None
    prune: float | None = None
    prune_by: str | None = None
    rule: Any = "exact"
    budget: float | None = None
    reproducible: bool = False
    auto: bool = False
    compile: bool = False
    on_unsupported: str = "error"

    def __post_init__(self) -> None:
        for name in ("depth", "width", "size", "window"):
            value = getattr(self, name)
            if value is not None and not _whole(value, 1):
                raise ValueError(f"{name} must be a whole number ≥ 1, or None for the drafter's own; got {value!r}")
        named = {"init": INITS, "coupling": COUPLINGS, "prune_by": PRUNE_BY, "on_unsupported": ON_UNSUPPORTED}
        for name, allowed in named.items():
            value = getattr(self, name)
            if value not in allowed and (value is not None or name == "on_unsupported"):
                raise ValueError(f"{name} must be one of {', '.join(allowed)}; got {value!r}")
        pair = self.proactive
        if pair is not None and not (isinstance(pair, tuple) and len(pair) == 2 and all(_whole(n, 2) for n in pair)):
            raise ValueError(f"proactive must be (branches, levels), both whole numbers ≥ 2, or None; got {pair!r}")
        if self.prune is not None and not 0 <= self.prune <= 1:
            raise ValueError(f"prune must be a share between 0 and 1, or None; got {self.prune!r}")
        if self.prune_by is not None and self.prune is None:
            raise ValueError(f"prune_by={self.prune_by!r} says which tokens stay, and prune how many; give both")
        object.__setattr__(self, "draft_vocab", _vocabulary(self.draft_vocab))
        if self.budget is not None and not self.budget >= 0:
            raise ValueError(f"budget must be a distance ≥ 0, or None for no limit; got {self.budget!r}")
        if self.budget is not None and getattr(self.rule, "name", self.rule) == "exact":
            raise ValueError("a budget limits what a relaxed rule spends, and rule='exact' spends nothing; name a rule")
        if self.reproducible and getattr(self.rule, "name", self.rule) != "exact":
            raise ValueError(
                f"reproducible=True gives what plain decoding gives for the seed, which rule={self.rule!r} would "
                "change; leave one of them out"
            )

    @classmethod
    def of(cls, options: dict[str, Any]) -> SpecConfig:
        """From keyword arguments, with an error that names what is allowed."""
        known = [f.name for f in fields(cls)]
        unknown = sorted(set(options) - set(known))
        if unknown:
            raise TypeError(f"unknown option {unknown[0]!r}; choose from {', '.join(known)}")
        return cls(**options)

    def filled(self, depth: int, width: int, size: int) -> SpecConfig:
        """The same options with the drafter's recommendations where the user said nothing, for drafters of trees.

        Raises:
            ValueError: a depth and a size that no chain has.
        """
        width = self.width or width
        if width > 1:
            depth = self.depth or depth
            return replace(self, depth=depth, width=width, size=self.size or max(size, depth + 1))
        depth = self.depth or (depth if self.size is None else self.size - 1)
        if depth < 1 or self.size not in (None, depth + 1):
            raise ValueError(
                f"a chain of depth d has d + 1 ≥ 2 nodes; got depth={self.depth}, size={self.size}: leave one of them "
                "out, or ask for a tree by width ≥ 2"
            )
        return replace(self, depth=depth, width=1, size=depth + 1)

    def only(self, known: Collection[str], drafter: str) -> None:
        """Refuse drafting options that this drafter has no use for, so that none is ignored silently.

        Raises:
            ValueError: an option was given that is not among the known ones.
        """
        useless = [name for name in (*FEATURE, *WINDOW) if getattr(self, name) is not None and name not in known]
        if useless:
            left = f"its options are {', '.join(known)}" if known else "it has no options of its own"
            raise ValueError(f"{drafter} has no use for {', '.join(useless)}; {left}")


def portions(whole: int, least: int) -> list[int]:
    """A quarter and a half of it, rounded up, as far as they are at least `least` and less than all of it."""
    return [part for part in sorted({-(-whole // 4), -(-whole // 2)}) if least <= part < whole]


def _whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _vocabulary(given: Any) -> int | tuple[int, ...] | None:
    """None, a number of tokens, or their ids, sorted and each once."""
    found = given.tolist() if hasattr(given, "tolist") else given  # a tensor, an array
    if found is None or _whole(found, 1):
        return found
    ids = list(found) if isinstance(found, Iterable) else []
    if not ids or not all(_whole(i, 0) for i in ids):
        raise ValueError(
            "draft_vocab must be a number of tokens ≥ 1, a list of token ids ≥ 0, or None for the whole vocabulary; "
            f"got {briefly(given)}"
        )
    return tuple(sorted({*ids}))
