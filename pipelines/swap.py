"""The one way mmspec touches a model: the instance's class is swapped for a subclass, and swapped back."""

from __future__ import annotations

import copyreg
from contextvars import ContextVar
from typing import Any

from torch import Tensor


def swap(instance: Any, mixin: type, **attributes: Any) -> None:
    """Put `mixin` in front of the instance's class; names are kept, so transformers' registries still find it.

    `attributes` live on the new class, not in `vars(instance)`, which stays as it was.
    """
    base = type(instance)
    if getattr(base, "_mmspec_stock", None) is not None:
        raise RuntimeError(f"{base.__name__} is already patched by mmspec; disable it first")
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    instance.__class__ = type(base.__name__, (mixin, _Swapped, base), {**names, **attributes, "_mmspec_stock": base})


def restore(instance: Any) -> None:
    """Give the instance its own class back; nothing happens where it was never swapped."""
    stock = getattr(type(instance), "_mmspec_stock", None)
    if stock is not None:
        instance.__class__ = stock


class _Swapped:
    """Pickles and copies as the stock class, so that a saved model knows nothing of mmspec."""

    _mmspec_stock: type

    def __reduce_ex__(self, protocol: Any) -> Any:
        _, _, *rest = super().__reduce_ex__(max(2, int(protocol)))
        return (copyreg._reconstructor, (self._mmspec_stock, object, None), *rest)  # type: ignore[attr-defined]


class Tap:
    """Mixin for a module whose call is overheard by the generation that runs in this context, and by no other."""

    _mmspec_name: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = super().__call__(*args, **kwargs)  # type: ignore[misc]
        heard = _listening.get()
        if heard is not None:
            heard[self._mmspec_name] = (args, kwargs, output)
        return output


_listening: ContextVar[dict[str, Any] | None] = ContextVar("mmspec_listening", default=None)


def note(name: str, value: Any) -> None:
    """Tell the generation that runs in this context something that no call of a tapped module says."""
    heard = _listening.get()
    if heard is not None:
        heard[name] = value


class listen:
    """Context manager: a dictionary of what the tapped modules were given and returned, by tap name."""

    def __enter__(self) -> dict[str, Any]:
        heard: dict[str, Any] = {}
        self._token = _listening.set(heard)
        return heard

    def __exit__(self, *_: Any) -> None:
        _listening.reset(self._token)


def final_hidden(call: tuple[Any, Any, Any]) -> Tensor:
    """The decoder's output features [B, N, H] from an overheard call."""
    output = call[2]
    return output.last_hidden_state if hasattr(output, "last_hidden_state") else output[0]


def layer_input(call: tuple[Any, Any, Any]) -> Tensor:
    """The features [B, N, H] that entered a layer, from an overheard call."""
    args, kwargs, _ = call
    return args[0] if args else kwargs["hidden_states"]
