"""The methods of the maintainers' image suite: plain paths, drafters in many settings, and relaxed rules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from mmspec.app.bench.image import BASE, PLAIN, fills_windows, with_rule
from mmspec.app.compare import Method

PUBLISHED_CODES = 16384  # size of the codebook for which LANTERN's k was published
COUPLINGS = ("none", "maximal", "gumbel")
# Shapes of a feature drafter: its own tree and, with sampled nodes, LANTERN++'s tree and a chain.
SHAPES = {"": {}, "-static": {"tree": "naive_extend_57", "draws": True}, "-chain": {"tree": "chain", "draws": True}}
Named = Sequence[tuple[str, object]]  # trained drafters by name
EXACT: dict[str, object] = {"reproducible": True}
COMPILED, AUTO = {"compile": True}, {"auto": True}


def jacobi(name: str, *options: Mapping[str, object], **more: object) -> Method:
    merged: dict[str, object] = {}
    for some in options:
        merged |= some
    return Method(f"jacobi-{name}", "jacobi", merged | more)


def lossless(drafters: Named) -> Iterator[Method]:
    """The plain paths and the lossless methods."""
    yield Method(PLAIN[0])
    yield from (Method(name, arguments={"plain": name.removeprefix("ar-")}) for name in PLAIN[1:])
    for coupling in COUPLINGS:
        yield from (jacobi(f"{coupling}-{window}", window=window, coupling=coupling) for window in (8, 16, 32))
    yield from (jacobi(f"{init}-16", BASE, init=init) for init in ("horizontal", "vertical", "mixture"))
    yield from (jacobi(f"exact-seed-{window}", EXACT, window=window) for window in (16, 32))
    for name in ("maximal", "gumbel", "exact-seed"):
        how: dict[str, object] = EXACT if name == "exact-seed" else {"coupling": name}
        yield from (jacobi(f"{name}-{window}-compiled", COMPILED, how, window=window) for window in (12, 16, 24, 32))
        if name != "gumbel":
            yield jacobi(f"{name}-32-auto", how, AUTO, window=32)
    yield jacobi("pac", window=32, coupling="maximal", proactive=(3, 3))
    yield from _feature(drafters)
    for name, drafter in drafters:
        if not fills_windows(name):
            yield Method(f"{name}-exact-seed", drafter, EXACT)
            continue
        for window in (12, 16, 32):
            own: dict[str, object] = {"window": window, **EXACT}
            yield Method(f"{name}-exact-seed-{window}", drafter, own)
            yield Method(f"{name}-exact-seed-{window}-compiled", drafter, own | COMPILED)


def _feature(drafters: Named) -> list[Method]:
    """Each feature drafter with each of SHAPES."""
    return [Method(f"{name}{kind}", drafter, options) for name, drafter in drafters if not fills_windows(name)
            for kind, options in SHAPES.items()]  # fmt: skip


def published(codes: int) -> dict[str, str]:
    """Rules with the settings of their papers or released code; LANTERN's k scales with the codebook."""
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


def relaxed(codes: int, drafters: Named, own: Sequence[str], budget: float | None) -> Iterator[Method]:
    """Every rule with the Jacobi drafter and each feature drafter; `own` has specifications of further rules.
    These and GSD are also measured with windows that are redrawn in each round, as in GSD's paper."""
    rules = {**published(codes), **ours(codes), **{spec: spec for spec in own}}
    for base in (Method("jacobi", "jacobi", BASE), *_feature(drafters)):
        yield from (with_rule(f"{base.name}+{name}", base, spec, budget) for name, spec in rules.items())
    redrawn = Method("jacobi-none", "jacobi", BASE | {"coupling": "none"})
    for name in ("gsd-published", *own):
        yield with_rule(f"jacobi-none+{name}", redrawn, rules[name], budget)


def published_k(codes: int) -> int:
    """LANTERN's k, 1000 of 16384 codes, scaled to another codebook."""
    return max(1, min(codes - 1, round(1000 * codes / PUBLISHED_CODES)))
