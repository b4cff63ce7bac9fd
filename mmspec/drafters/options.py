"""Options of drafters that grow a chain or a tree: the user's override what the drafter recommends."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from reprlib import repr as briefly
from typing import Any, Literal, Protocol, TypeVar

from mmspec.config import chosen, is_whole, whole
from mmspec.drafters.static_trees import DYNAMIC, SHAPES, Paths, own_shape, paths_of

ALL: Literal["all"] = "all"
SIZES = ("depth", "width", "size")


class Recommended(Protocol):
    """How a drafter recommends to draft; the config of a trained one does."""

    @property
    def depth(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def tree(self) -> str | Paths: ...
    @property
    def draws(self) -> bool: ...
    @property
    def adaptive(self) -> bool: ...


@dataclass(frozen=True)
class ChainOptions:
    """How long a chain is.

    Attributes:
        depth: longest drafted path, in tokens (≥ 1).
        width: branches per node; 1 drafts a chain.
        size: nodes sent to the target in a round, the root included.
    """

    depth: int = 5
    width: int = 1
    size: int = 6

    def __post_init__(self) -> None:
        for name in SIZES:
            whole(name, getattr(self, name))


@dataclass(frozen=True)
class TreeOptions(ChainOptions):
    """How a drafter on features drafts, and what it reads.

    Attributes:
        depth: longest drafted path, in tokens (≥ 1).
        width: branches per node and size of the frontier; 1 drafts a chain.
        size: nodes sent to the target in a round, the root included.
        tree: "dynamic" (grown by likelihood), the name of a static shape of mmspec/drafters/static_trees.py, or a list
            of paths of ranks, [[0], [0, 0], [1]]: the best child, its best child, the second best.
        draws: fill a static tree by drawing without replacement from the drafter's distribution, not by rank.
        adaptive: draft chains of a quarter, half or all of `depth`: longer ones for a row whose last draft was accepted
            whole, shorter ones where most of it was refused.
        draft_vocab: tokens that a drafter on the target's head proposes from; it reads their rows of the head and no
            others. "all"; or N: the first N tokens, which a BPE vocabulary learned first, and those that end an
            answer; or ids, kept as a sorted tuple.
        prune: share of a prompt's image and video tokens that the drafter leaves out, evenly spaced ones being kept;
            the target reads them all.
    """

    width: int = 8
    size: int = 32
    tree: str | Paths = DYNAMIC
    draws: bool = False
    adaptive: bool = False
    draft_vocab: int | tuple[int, ...] | Literal["all"] = ALL
    prune: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.prune <= 1:
            raise ValueError(f"prune must be a share from 0 to 1; got {self.prune!r}")
        object.__setattr__(self, "draft_vocab", _vocabulary(self.draft_vocab))

    @property
    def branches(self) -> int:
        """The most children that a node has."""
        return self.width if self.tree == DYNAMIC else 1 + max(path[-1] for path in paths_of(self.tree))


Grown = TypeVar("Grown", bound=TreeOptions)


def sized(advice: Any, given: Mapping[str, Any]) -> dict[str, int]:
    """Depth, width and size where the user gave some of them.

    Raises:
        ValueError: a depth and a size that no chain has.
    """
    width, size = given.get("width", advice.width), given.get("size")
    if width > 1:
        depth = given.get("depth", advice.depth)
        return {"depth": depth, "width": width, "size": size or max(advice.size, depth + 1)}
    depth = given.get("depth", advice.depth if size is None else size - 1)
    if depth < 1 or size not in (None, depth + 1):
        raise ValueError(
            f"a chain of depth d has d + 1 ≥ 2 nodes; got depth={given.get('depth')}, size={size}: leave one of them "
            "out, or ask for a tree by width ≥ 2"
        )
    return {"depth": depth, "width": 1, "size": depth + 1}


def grown(advice: Recommended, given: Mapping[str, Any], drafter: str, defaults: Grown) -> Grown:
    """The options of a tree: what was given, elsewhere what is recommended, and sizes that agree with each other.

    Raises:
        ValueError: an option that such drafters do not have, a wrong value, an unknown tree, sizes for a shape that has
            its own, or draws in a tree that grows by likelihood.
    """
    options = chosen(defaults, given, drafter)
    if given.get("adaptive") and not {"tree", "width", "size"} & given.keys():
        given = {**given, "tree": "chain"}
    sizes = [name for name in SIZES if name in given]
    tree = given.get("tree", DYNAMIC if sizes else advice.tree)
    tree = tree if isinstance(tree, str) else own_shape(tree)
    draws = given.get("draws", advice.draws and tree != DYNAMIC)
    if tree in (DYNAMIC, "chain"):
        held: dict[str, Any] = sized(advice, {**given, "width": 1} if tree == "chain" else given)
        tree = "chain" if held["width"] == 1 else tree
    else:
        paths = paths_of(tree)
        if sizes:
            raise ValueError(f"the tree {briefly(tree)} has a shape of its own; leave out {', '.join(sizes)}")
        held = {"depth": max(map(len, paths)), "width": advice.width, "size": 1 + len(paths)}
    if draws and tree == DYNAMIC:
        raise ValueError(
            "draws=True needs a static tree: what a dynamic tree keeps depends on what was drawn. Choose tree from "
            f"{', '.join(SHAPES)}"
        )
    adaptive = given.get("adaptive", advice.adaptive and tree == "chain" and not sizes)
    if adaptive and tree != "chain":
        raise ValueError(f"adaptive=True drafts chains; leave it out, or tree={briefly(tree)}, or ask for width=1")
    found = {**held, "tree": tree, "draws": draws, "adaptive": adaptive}
    return replace(options, **found)


def _vocabulary(given: Any) -> int | tuple[int, ...] | Literal["all"]:
    """ALL, a number of tokens, or their ids, sorted and each once."""
    found = given.tolist() if hasattr(given, "tolist") else given  # a tensor, an array
    if is_whole(found, 1) or (isinstance(found, str) and found == ALL):
        return found  # type: ignore[no-any-return]
    ids = list(found) if isinstance(found, Iterable) else []
    if not ids or not all(is_whole(i, 0) for i in ids):
        raise ValueError(
            "draft_vocab must be a number of tokens ≥ 1, a list of token ids ≥ 0, or 'all' for the whole vocabulary; "
            f"got {briefly(given)}"
        )
    return tuple(sorted({*ids}))
