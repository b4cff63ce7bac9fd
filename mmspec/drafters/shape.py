"""The shape of a draft: how deep, how wide, how many nodes, in which form. What may be said of it is checked here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from reprlib import repr as briefly
from typing import Literal, Self

from mmspec.config import Options, chosen, is_whole, option_names
from mmspec.drafters.static_trees import CHAIN, DYNAMIC, SHAPES, Paths, own_paths, paths_of

ALL: Literal["all"] = "all"
MOST = {"depth": 128, "width": 256, "size": 4096}  # of what is done one after the other, or kept for each node


@dataclass(frozen=True)
class Shape:
    """How a drafter drafts; a file recommends one, and options of `enable` take the place of what they name.

    Attributes:
        depth: longest drafted path, in tokens (≥ 1).
        width: branches per node and size of the frontier; 1 drafts a chain.
        size: nodes sent to the target in a round at most, the root included.
        tree: "dynamic" (grown by likelihood), the name of a static shape of mmspec/drafters/static_trees.py, or a list
            of paths of ranks, [[0], [0, 0], [1]]: the best child, its best child, the second best.
        draws: fill a static tree by drawing without replacement from the drafter's distribution, not by rank.
        adaptive: draft chains of a quarter, half or all of `depth`: longer ones for a row whose last draft was accepted
            whole, shorter ones where most of it was refused.
    """

    depth: int = 5
    width: int = 8
    size: int = 32
    tree: str | Paths = DYNAMIC
    draws: bool = False
    adaptive: bool = False

    def __post_init__(self) -> None:
        for name, most in MOST.items():
            value = getattr(self, name)
            if not is_whole(value, 1) or value > most:
                own = "or None for the drafter's own"
                raise ValueError(f"{name} must be a whole number from 1 to {most}, {own}; got {briefly(value)}")
        for name in ("draws", "adaptive"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False; got {briefly(getattr(self, name))}")
        tree = self.tree if isinstance(self.tree, str) else own_paths(self.tree)
        if tree != DYNAMIC:
            paths_of(tree)  # there is one of that name
        object.__setattr__(self, "tree", tree)

    @classmethod
    def like(cls, shape: Shape) -> Self:
        """Options of this class that recommend a shape."""
        return cls(**{name: getattr(shape, name) for name in option_names(USUAL)})

    @classmethod
    def chain(cls, depth: int) -> Self:
        """A chain of so many tokens."""
        return cls(depth, 1, depth + 1, CHAIN)

    @property
    def branches(self) -> int:
        """The most children that a node has."""
        return self.width if self.tree == DYNAMIC else 1 + max(path[-1] for path in paths_of(self.tree))

    def with_(self, given: Options, drafter: str) -> Self:
        """What was given, elsewhere what is recommended here, with sizes that agree with each other.

        Args:
            given: by name.
            drafter: what a message calls it.

        Raises:
            ValueError: an option that such drafters do not have, a wrong value, sizes for a form that has its own, or
                that no chain has, or draws in a tree that grows by likelihood.
        """
        options = chosen(self, given, drafter)
        said = {name: getattr(options, name) for name in given}
        if said.get("adaptive") and not {"tree", "width", "size"} & said.keys():
            said["tree"] = CHAIN
        sizes = [name for name in MOST if name in said]
        tree = said.get("tree", DYNAMIC if sizes else self.tree)
        draws = said.get("draws", self.draws and tree != DYNAMIC)
        if tree in (DYNAMIC, CHAIN):
            values = {**self._sizes({**said, "width": 1} if tree == CHAIN else said)}
            tree = CHAIN if values["width"] == 1 else tree
        elif sizes:
            raise ValueError(f"the tree {briefly(tree)} has a shape of its own; leave out {', '.join(sizes)}")
        else:
            paths = paths_of(tree)
            values = {"depth": max(map(len, paths)), "width": self.width, "size": 1 + len(paths)}
        if draws and tree == DYNAMIC:
            raise ValueError(
                "draws=True needs a static tree: what a dynamic tree keeps depends on what was drawn. Choose tree from "
                f"{', '.join(SHAPES)}"
            )
        adaptive = said.get("adaptive", self.adaptive and tree == CHAIN and not sizes)
        if adaptive and tree != CHAIN:
            raise ValueError(f"adaptive=True drafts chains; leave it out, or tree={briefly(tree)}, or ask for width=1")
        values |= {"tree": tree, "draws": draws, "adaptive": adaptive}
        return replace(options, **{name: values[name] for name in option_names(self) if name in values})

    def _sizes(self, said: Options) -> Options:
        """Depth, width and size of a dynamic tree or a chain."""
        width, size = said.get("width", self.width), said.get("size")
        if width > 1:
            depth = said.get("depth", self.depth)
            return {"depth": depth, "width": width, "size": size or max(self.size, depth + 1)}
        depth = said.get("depth", self.depth if size is None else size - 1)
        if depth < 1 or size not in (None, depth + 1):
            raise ValueError(
                f"a chain of depth d has d + 1 ≥ 2 nodes; got depth={said.get('depth')}, size={size}: leave one of "
                "them out, or ask for a tree by width ≥ 2"
            )
        return {"depth": depth, "width": 1, "size": depth + 1}


USUAL = Shape()  # EAGLE-2's tree


@dataclass(frozen=True)
class Sizes(Shape):
    """The shape of a drafter that grows its trees on the host, in a form of its own: only sizes can be chosen."""

    tree: str | Paths = field(default=DYNAMIC, init=False, repr=False)
    draws: bool = field(default=False, init=False, repr=False)
    adaptive: bool = field(default=False, init=False, repr=False)


@dataclass(frozen=True)
class TreeOptions(Shape):
    """How a drafter on features, or a model, drafts, and what it reads.

    Attributes:
        draft_vocab: tokens that a drafter on the target's head proposes from; it reads their rows of the head and no
            others. "all"; or N: the first N tokens, which a BPE vocabulary learned first, and those that end an
            answer; or ids, kept as a sorted tuple.
        prune: share of a prompt's image and video tokens that the drafter leaves out, evenly spaced ones being kept;
            the target reads them all.
    """

    draft_vocab: int | tuple[int, ...] | Literal["all"] = ALL
    prune: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.prune <= 1:
            raise ValueError(f"prune must be a share from 0 to 1; got {self.prune!r}")
        object.__setattr__(self, "draft_vocab", _vocabulary(self.draft_vocab))


def _vocabulary(given: object) -> int | tuple[int, ...] | Literal["all"]:
    """ALL, a number of tokens, or their ids, sorted and each once."""
    vocabulary = given.tolist() if hasattr(given, "tolist") else given  # a tensor, an array
    if is_whole(vocabulary, 1) or (isinstance(vocabulary, str) and vocabulary == ALL):
        return vocabulary  # type: ignore[no-any-return]
    ids = list(vocabulary) if isinstance(vocabulary, Iterable) else []
    if not ids or not all(is_whole(i, 0) for i in ids):
        raise ValueError(
            "draft_vocab must be a number of tokens ≥ 1, a list of token ids ≥ 0, or 'all' for the whole vocabulary; "
            f"got {briefly(given)}"
        )
    return tuple(sorted({*ids}))
