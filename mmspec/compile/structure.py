"""Arguments and results of captured functions: their tensors, and everything else."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten


class Structure:
    """Nested tuples, lists and dictionaries without their tensors.

    Attributes:
        constants: the values that are not tensors.
        kinds: shape, dtype and device of each tensor.
    """

    def __init__(self, leaves: Sequence[Any], spec: TreeSpec) -> None:
        self._leaves, self._spec = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec
        self._places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self.constants = [leaf for leaf in leaves if not isinstance(leaf, Tensor)]
        self.kinds = [(leaves[place].shape, leaves[place].dtype, leaves[place].device) for place in self._places]

    @property
    def key(self) -> Hashable:
        """Equal for values that differ in the contents of their tensors only."""
        return str(self._spec), *self._leaves, *self._places, *self.kinds

    def around(self, tensors: Sequence[Tensor]) -> Any:
        """The same value with these tensors."""
        leaves = list(self._leaves)
        for place, tensor in zip(self._places, tensors, strict=True):
            leaves[place] = tensor
        return tree_unflatten(leaves, self._spec)


def apart(value: object) -> tuple[list[Tensor], Structure]:
    """The tensors of a value, and its structure."""
    leaves, spec = tree_flatten(value)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)], Structure(leaves, spec)
