"""The methods that `mmspec bench image` compares: plain paths, drafters, and relaxed rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from mmspec.app.painter import PLAIN, DrawingMethod
from mmspec.drafters.jacobi import JacobiDrafter
from mmspec.protocols import SessionView, Target
from mmspec.types import NO_TOKEN, Draft

WINDOWS = (8, 16, 32)
COUPLINGS = ("none", "maximal", "gumbel")
INITS = ("horizontal", "vertical", "mixture")
BASE = {"window": 16, "coupling": "maximal"}  # the Jacobi drafter of every relaxed rule
# The shapes of a feature drafter: its own tree; and, with sampled nodes, LANTERN++'s tree and a chain.
SHAPES = {"": {}, "-static": {"tree": "naive_extend_57", "draws": True}, "-chain": {"tree": "chain", "draws": True}}
PUBLISHED_CODES = 16384  # size of the codebook for which LANTERN's k was published


@dataclass(frozen=True)
class ImageMethod:
    """One method, with its name in the tables.

    Attributes:
        plain: "static" or "compiled" for the plain loop with fixed shapes; empty: the pipeline's own loop.
        curve: in a sweep, the rule's family and its parameter.
    """

    name: str
    way: DrawingMethod = field(default_factory=DrawingMethod)
    plain: str = ""
    curve: tuple[str, float] | None = None

    @property
    def lossless(self) -> bool:
        return str(self.way.options.get("rule", "exact")) == "exact"

    @property
    def exact_seed(self) -> bool:
        """Whether it must draw the same picture as plain decoding with the same seed."""
        return self.way.drafter == PLAIN or bool(self.way.options.get("reproducible"))

    @property
    def setting(self) -> str:
        return " ".join(f"{name} {value}" for name, value in self.way.options.items())

    @property
    def facts(self) -> dict[str, object]:
        family, value = self.curve or (None, None)
        return {"method": self.name, "lossless": self.lossless, "exact_seed": self.exact_seed, "family": family,
                "parameter": value, "setting": self.setting}  # fmt: skip


class Hostile(JacobiDrafter):
    """Drafts windows of guesses that are almost always wrong, for targets whose distribution is a point mass."""

    def propose(self, session: SessionView, target: Target) -> Draft:
        draft = super().propose(session, target)
        if draft.tree.size == 1:
            return draft
        assert draft.q is None, "changed tokens do not follow q, which would break the distribution"
        others = torch.where(draft.tokens == NO_TOKEN, NO_TOKEN, (draft.tokens + self.vocab // 2) % self.vocab)
        return replace(draft, tokens=torch.cat([draft.tokens[:, :1], others[:, 1:]], 1))


def lossless(drafters: Sequence[tuple[str, object]]) -> list[ImageMethod]:
    """The lossless methods; `drafters` are (name, folder or drafter) of trained drafters."""

    exact, auto, compiled = ({name: True} for name in ("reproducible", "auto", "compile"))
    drawn: dict[str, dict[str, Any]] = {f"{c}-{w}": {"window": w, "coupling": c} for c in COUPLINGS for w in WINDOWS}
    drawn |= {f"{init}-16": {**BASE, "init": init} for init in INITS}
    drawn |= {f"exact-seed-{w}": {"window": w, **exact} for w in (16, 32)}
    coupled: dict[str, dict[str, Any]] = {c: {"coupling": c} for c in ("maximal", "gumbel")} | {"exact-seed": exact}
    drawn |= {f"{name}-{w}-compiled": {"window": w, **compiled, **how}
              for name, how in coupled.items() for w in (12, 16, 24, 32)}  # fmt: skip
    drawn |= {f"{name}-32-auto": {"window": 32, **coupled[name], **auto} for name in ("maximal", "exact-seed")}
    drawn |= {"pac": {"window": 32, "coupling": "maximal", "proactive": (3, 3)}}
    hostile = {"window": 16, **exact}
    ways = [(f"jacobi-{name}", DrawingMethod("jacobi", options)) for name, options in drawn.items()]
    ways += [
        (f"hostile-16{kind}", DrawingMethod(Hostile(), hostile | more)) for kind, more in (("", {}), ("-auto", auto))
    ]
    ways += _feature(drafters)
    trees, windows = _split(drafters)
    ways += [(f"{name}-exact-seed", DrawingMethod(drafter, exact)) for name, drafter in trees]
    both = [(w, how, more) for how, more in (("", {}), ("-compiled", compiled)) for w in (12, 16, 32)]
    ways += [(f"{name}-exact-seed-{w}{how}", DrawingMethod(drafter, {"window": w, **exact, **more}))
             for name, drafter in windows for w, how, more in both]  # fmt: skip
    plain = [ImageMethod("ar"), ImageMethod("ar-static", plain="static"), ImageMethod("ar-compiled", plain="compiled")]
    return plain + [ImageMethod(name, way) for name, way in ways]


def published(codes: int) -> dict[str, str]:
    """Rules with the settings of their papers or released code; LANTERN's k is scaled with the codebook."""
    return {
        "lantern-published": f"lantern(k={published_k(codes)}, delta=0.1)",
        "lantern++-published": f"lantern(k={min(10, codes - 1)}, lam=5.0)",
        "gsd-published": f"gsd(group={min(14, codes)}, distance=0.7071, gap=0.15)",
        "cool-sd-published": "scaled(omega=1.1, nu=0.7)",
    }


def ours(codes: int) -> dict[str, str]:
    """The same rules at milder settings, and rules that have no published settings."""
    return {
        "lantern++": f"lantern(k={min(10, codes - 1)}, lam=1.5)",
        "gsd": f"gsd(group={min(5, codes)})",
        "scaled": "scaled(omega=1.5)",
        "typical": "typical(epsilon=0.3, delta=0.05)",
        "grouped": f"grouped(cells={max(1, codes // 2)})",
        "pooled": f"pooled(cells={max(1, codes // 2)})",
    }


def sweeps(codes: int) -> dict[str, list[tuple[float, str]]]:
    """For each family of rules, values of its parameter from mild to aggressive, each with the rule."""
    k = min(10, codes - 1)
    shares = [cells for share in (0.75, 0.5, 0.25, 0.125, 0.0625) if (cells := int(codes * share)) > 0]
    groups = [g for g in (3, 5, 10, 25, 50) if g <= codes]
    return {
        "typical": [(d, f"typical(epsilon=0.3, delta={d})") for d in (0.5, 0.2, 0.05, 0.01, 0.002)],
        "scaled": [(w, f"scaled(omega={w})") for w in (1.25, 1.5, 2.0, 3.0, 6.0)],
        "lantern": [(d, f"lantern(k={published_k(codes)}, delta={d})") for d in (0.02, 0.05, 0.1, 0.2, 0.4)],
        "lantern++": [(lam, f"lantern(k={k}, lam={lam})") for lam in (1.5, 2.0, 5.0, 10.0, 20.0)],
        "gsd": [(float(g), f"gsd(group={g})") for g in groups],
        "grouped": [(float(c), f"grouped(cells={c})") for c in shares],
        "pooled": [(float(c), f"pooled(cells={c})") for c in shares],
    }


def published_k(codes: int) -> int:
    """LANTERN's k, 1000 of 16384 codes, scaled to another codebook."""
    return max(1, min(codes - 1, round(1000 * codes / PUBLISHED_CODES)))


def _split(drafters: Sequence[tuple[str, object]]) -> tuple[list[tuple[str, object]], list[tuple[str, object]]]:
    """Split into feature drafters, which draft trees, and heads, which fill windows."""
    windows = [(name, drafter) for name, drafter in drafters if name.partition(":")[0] == "heads"]
    return [one for one in drafters if one not in windows], windows


def _feature(drafters: Sequence[tuple[str, object]]) -> list[tuple[str, DrawingMethod]]:
    """Each feature drafter with each of SHAPES."""
    return [(f"{name}{kind}", DrawingMethod(drafter, options)) for name, drafter in _split(drafters)[0]
            for kind, options in SHAPES.items()]  # fmt: skip


def relaxed(
    codes: int, drafters: Sequence[tuple[str, object]], own: Sequence[str], budget: float | None
) -> list[ImageMethod]:
    """Every rule with the Jacobi drafter and each feature drafter; `own` are further rules, by their specification.
    These and GSD also with windows that are redrawn in each round, as in GSD's paper."""
    rules = {**published(codes), **ours(codes), **{spec: spec for spec in own}}
    bases = [("jacobi", DrawingMethod("jacobi", dict(BASE))), *_feature(drafters)]
    redrawn = DrawingMethod("jacobi", BASE | {"coupling": "none"})
    ways = [with_rule(f"{base}+{name}", way, spec, budget) for base, way in bases for name, spec in rules.items()]
    return ways + [with_rule(f"jacobi-none+{name}", redrawn, rules[name], budget) for name in ("gsd-published", *own)]


def with_rule(
    name: str, way: DrawingMethod, spec: str, budget: float | None, curve: tuple[str, float] | None = None
) -> ImageMethod:
    limit = {} if budget is None else {"budget": budget}
    return ImageMethod(name, DrawingMethod(way.drafter, {**way.options, "rule": spec, **limit}), curve=curve)
