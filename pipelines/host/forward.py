"""One forward of a model, as a generation makes it: what is read off it, and what its modules are told meanwhile.

All of it is kept in one context variable, so that several threads may run the same model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor

from mmspec.pipelines.host.hooks import stock
from mmspec.types import FINAL


@dataclass
class Read:
    """What one forward gave.

    Attributes:
        told: what the decoder was called with, by name.
        final: its output features [B·S, N, H].
        layers: what entered a layer, by its number, [B·S, N, H].
        listed: positions of the tokens to come, where the model lists them itself (GLM-Image).
    """

    told: dict[str, Any] = field(default_factory=dict)
    final: Tensor = None  # type: ignore[assignment]  # until the decoder has run
    layers: dict[int, Tensor] = field(default_factory=dict)
    listed: Tensor | None = None

    def features(self, wanted: tuple[int, ...]) -> list[Tensor]:
        """The features that a drafter reads, [B·S, N, H] each."""
        return [self.final if i == FINAL else self.layers[i] for i in wanted]


@dataclass(frozen=True)
class ForwardContext:
    """What the modules of a model are told in a forward.

    Attributes:
        read: is filled by the modules that are tapped.
        decode: is called in the place of the decoder, with the decoder's own call before its arguments.
        draft: the tree that layers with a recurrent state read (see recurrent.py).
        paths: the same, as a row for each node (see by_path.py).
        attention: the implementation that attention modules use, in place of the one that their config names.
    """

    read: Read | None = None
    decode: Callable[..., Any] | None = None
    draft: Any = None
    paths: Any = None
    attention: str | None = None


_forward: ContextVar[ForwardContext] = ContextVar("mmspec_forward", default=ForwardContext())  # noqa: B039 it is frozen
now = _forward.get


@contextmanager
def during(**told: Any) -> Iterator[ForwardContext]:
    """Within, forwards tell their modules this as well."""
    token = _forward.set(made := replace(now(), **told))
    try:
        yield made
    finally:
        _forward.reset(token)


@contextmanager
def reading(decode: Callable[..., Any] | None = None) -> Iterator[Read]:
    """Within, a forward fills the Read."""
    with during(read=(read := Read()), decode=decode):
        yield read


class Tap:
    """Mixin of a module that is read: the decoder (`_mmspec_layer` is None), or one of its layers."""

    _mmspec_layer: int | None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        under_way, run = now(), partial(stock(self).__call__, self)
        read, layer = under_way.read, self._mmspec_layer
        if read is None:
            return run(*args, **kwargs)
        if layer is not None:
            read.layers[layer] = args[0] if args else kwargs["hidden_states"]
            return run(*args, **kwargs)
        output = run(*args, **kwargs) if under_way.decode is None else under_way.decode(run, *args, **kwargs)
        final = getattr(output, "last_hidden_state", None)
        read.told, read.final = kwargs, output[0] if final is None else final
        return output
