"""The shape options of drafts (depth, width, size, kind of tree), their defaults and their checks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from reprlib import repr as briefly
from typing import Literal, Self

from mmspec.config import Options, chosen, is_whole, option_names
from mmspec.drafters.static_trees import CHAIN, DYNAMIC, SHAPES, Paths, own_paths, paths_of

ALL: Literal["all"] = "all"
AUTO: Literal["auto"] = "auto"
MOST = {"depth": 128, "width": 256, "size": 4096}  # upper limits


@dataclass(frozen=True)
class Shape:
    """The shape of a drafter's drafts; a drafter's file recommends one, and options of `enable` override it.

    Attributes:
        depth: longest drafted path, in tokens (≥ 1).
        width: branches per node and size of the frontier; 1 drafts a chain.
        size: the largest number of nodes verified in a round, the root included.
        tree: "dynamic" (grown by likelihood), the name of a static shape of mmspec/drafters/static_trees.py, or a list
            of paths of ranks, [[0], [0, 0], [1]]: the best child, its best child, the second best.
        draws: fill a static tree by drawing without replacement from the drafter's distribution, not by rank.
        adaptive: draft chains of a quarter, half or all of `depth`: a longer one if a row's last draft was accepted
            whole, a shorter one if most of it was rejected.
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
            paths_of(tree)  # raises for an unknown name
        object.__setattr__(self, "tree", tree)

    @classmethod
    def like(cls, shape: Shape) -> Self:
        """Options of this class with the values of a shape."""
        return cls(**{name: getattr(shape, name) for name in option_names(USUAL)})

    @classmethod
    def chain(cls, depth: int) -> Self:
        """A chain of `depth` tokens."""
        return cls(depth, 1, depth + 1, CHAIN)

    @property
    def branches(self) -> int:
        """The largest number of children of a node."""
        return self.width if self.tree == DYNAMIC else 1 + max(path[-1] for path in paths_of(self.tree))

    def check_branches(self, tokens: int) -> None:
        """Raise ValueError if a node has more branches than there are tokens to propose."""
        if tokens < self.branches:
            raise ValueError(
                f"a tree with {self.branches} branches per node needs at least as many tokens to propose; got "
                f"{tokens}, so lower width, or choose another tree"
            )

    def with_(self, given: Options, drafter: str) -> Self:
        """These options with the user's values in place of the defaults; depth, width and size are made consistent.

        Args:
            given: the user's values, by option name.
            drafter: the drafter's name in error messages.

        Raises:
            ValueError: an option that such drafters do not have, a wrong value, sizes for a static tree, sizes that do
                not make a chain, or `draws` with a dynamic tree.
        """
        options = chosen(self, given, drafter)
        user = {name: getattr(options, name) for name in given}
        if user.get("adaptive") and not {"tree", "width", "size"} & user.keys():
            user["tree"] = CHAIN
        sizes = [name for name in MOST if name in user]
        tree = user.get("tree", DYNAMIC if sizes else self.tree)
        draws = user.get("draws", self.draws and tree != DYNAMIC)
        if tree in (DYNAMIC, CHAIN):
            values = {**self._sizes({**user, "width": 1} if tree == CHAIN else user)}
            tree = CHAIN if values["width"] == 1 else tree
        elif sizes:
            raise ValueError(f"the tree {briefly(tree)} has a shape of its own; leave out {', '.join(sizes)}")
        else:
            paths = paths_of(tree)
            values = {"depth": max(map(len, paths)), "width": self.width, "size": 1 + len(paths)}
        if draws and tree == DYNAMIC:
            raise ValueError(
                "draws=True needs a static tree: the nodes of a dynamic tree depend on the drawn tokens. Choose tree "
                f"from {', '.join(SHAPES)}"
            )
        adaptive = user.get("adaptive", self.adaptive and tree == CHAIN and not sizes)
        if adaptive and tree != CHAIN:
            raise ValueError(f"adaptive=True drafts chains; leave out it or tree={briefly(tree)}, or set width=1")
        values |= {"tree": tree, "draws": draws, "adaptive": adaptive}
        return replace(options, **{name: values[name] for name in option_names(self) if name in values})

    def _sizes(self, user: Options) -> Options:
        """Depth, width and size of a dynamic tree or a chain."""
        width, size = user.get("width", self.width), user.get("size")
        if width > 1:
            depth = user.get("depth", self.depth)
            return {"depth": depth, "width": width, "size": size or max(self.size, depth + 1)}
        depth = user.get("depth", self.depth if size is None else size - 1)
        if depth < 1 or size not in (None, depth + 1):
            raise ValueError(
                f"a chain of depth d has d + 1 ≥ 2 nodes; got depth={user.get('depth')}, size={size}: leave one of "
                "them out, or set width ≥ 2 for a tree"
            )
        return {"depth": depth, "width": 1, "size": depth + 1}


USUAL = Shape()  # EAGLE-2's tree


@dataclass(frozen=True)
class Sizes(Shape):
    """The shape options of a drafter that grows its own trees on the host: only depth, width and size can be set."""

    tree: str | Paths = field(default=DYNAMIC, init=False, repr=False)
    draws: bool = field(default=False, init=False, repr=False)
    adaptive: bool = field(default=False, init=False, repr=False)


@dataclass(frozen=True)
class TreeOptions(Shape):
    """Options of feature drafters and draft models: the shape of drafts, and what the drafter reads.

    Attributes:
        draft_vocab: tokens that a drafter with the target's head may propose; it computes only their rows of the head.
            "all"; or N: the first N tokens, which a BPE vocabulary learned first, and those that end an answer; or ids,
            stored as a sorted tuple; or "auto": of a vocabulary of at least 65,536 tokens the 32,768 that the model's
            texts have most (see frequent.py), of a smaller one all.
        prune: share of a prompt's image and video tokens that the drafter skips, so that evenly spaced ones remain; the
            target reads them all.
    """

    draft_vocab: int | tuple[int, ...] | Literal["all", "auto"] = AUTO
    prune: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (isinstance(self.prune, int | float) and 0 <= self.prune <= 1):
            raise ValueError(f"prune must be a share from 0 to 1; got {self.prune!r}")
        object.__setattr__(self, "draft_vocab", _vocabulary(self.draft_vocab))

    @property
    def named(self) -> int | tuple[int, ...] | None:
        """The tokens that the user named in `draft_vocab`; None: none were."""
        return None if isinstance(self.draft_vocab, str) else self.draft_vocab


def _vocabulary(given: object) -> int | tuple[int, ...] | Literal["all", "auto"]:
    """ALL, AUTO, a number of tokens, or sorted unique token ids."""
    vocabulary = given.tolist() if hasattr(given, "tolist") else given  # a tensor, an array
    if is_whole(vocabulary, 1) or (isinstance(vocabulary, str) and vocabulary in (ALL, AUTO)):
        return vocabulary  # type: ignore[no-any-return]
    ids = list(vocabulary) if isinstance(vocabulary, Iterable) else []
    if not ids or not all(is_whole(i, 0) for i in ids):
        raise ValueError(
            "draft_vocab must be a number of tokens ≥ 1, a list of token ids ≥ 0, 'all', or 'auto'; "
            f"got {briefly(given)}"
        )
    return tuple(sorted({*ids}))
