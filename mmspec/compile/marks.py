"""Marks: what a version compares of attributes and tensors, by value or by an id that is unique while it is alive."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

PLAIN = {bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size}
CONTAINERS = (list, tuple, dict, set, frozenset)
_NESTED = 4  # levels of containers that are compared
_STEPS: dict[int, int] = {}  # how often an optimizer has written a parameter, by the parameter's id


def fixed(value: Any) -> bool:
    """Whether a value is the same as long as it is the same object."""
    return type(value) in PLAIN or (type(value) in (tuple, frozenset) and all(type(part) in PLAIN for part in value))


def parts(value: Any, levels: int = _NESTED) -> Any:
    """The parts of a list, tuple, set or dict that are compared: type, length, plain elements, containers in it."""
    inside = [*value, *value.values()] if isinstance(value, dict) else value
    plain = [part for part in inside if type(part) in PLAIN]
    if len(plain) == len(inside) or levels == 1:
        return type(value), len(value), plain
    return type(value), len(value), plain, [parts(p, levels - 1) for p in inside if isinstance(p, CONTAINERS)]


def all_plain(value: Any, levels: int = _NESTED) -> bool:
    """Whether a value is plain, or a container of such values, so that a copy can be compared with it."""
    if type(value) not in CONTAINERS or levels == 0:
        return type(value) in PLAIN
    inside = [*value, *value.values()] if isinstance(value, dict) else value
    return all(all_plain(part, levels - 1) for part in inside)


def is_holder(value: Any) -> bool:
    """Whether a value is an object whose attributes are compared, such as the settings of a control vector; not one of
    mmspec's, such as the options of a drafter, which are part of the keys of captures."""
    known = isinstance(value, (nn.Module, Tensor, *CONTAINERS)) or type(value) in PLAIN
    own = type(value).__module__.startswith("mmspec.")
    return not (known or own or callable(value)) and hasattr(value, "__dict__")


def held(holder: Any, identity: Callable[[Any], int]) -> Any:
    """The attributes of an object: plain values, containers, and tensors."""
    marks: list[Any] = [type(holder)]
    for name, value in vars(holder).items():
        marks.append(name)
        if isinstance(value, Tensor):
            marks += (identity(value), *laid_out(value), *written(value))
        elif isinstance(value, CONTAINERS):
            marks.append(parts(value))
        else:
            marks.append(value if type(value) in PLAIN else type(value))
    return marks


def laid_out(t: Tensor) -> tuple[Any, ...]:
    return t.dtype, t.device, t.shape, placed(t) and t.stride()


def written(t: Tensor) -> tuple[Any, ...]:
    """What differs after a write: the version counter, the address, an optimizer's steps; of tensors inside, too."""
    inner = () if type(t) in (Tensor, nn.Parameter) else [written(getattr(t, name)) for name in _tensors_inside(t)]
    return 0 if t.is_inference() else t._version, t.data_ptr() if placed(t) else 0, _STEPS.get(id(t), 0), *inner


def steps(tensors: list[Tensor]) -> list[int] | None:
    """How often optimizers have written each tensor: fused ones do not move torch's version counters."""
    return [_STEPS.get(id(t), 0) for t in tensors] if _STEPS else None


@cache
def count_steps() -> None:
    """From now on, count the steps of all optimizers."""

    @torch.compiler.disable
    def count(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                _STEPS[id(parameter)] = _STEPS.get(id(parameter), 0) + 1

    register_optimizer_step_post_hook(count)


def placed(t: Tensor) -> bool:
    """Whether a tensor has an address."""
    return type(t) in (Tensor, nn.Parameter) and t.layout is torch.strided


def alive_ref(thing: Any) -> ref[Any]:
    """A weak reference that ends with the thing. A tensor's is to its storage: torch refuses to swap the contents of
    tensors that have weak references, as `model.to()` does with quantized weights. TypeError: there is none."""
    if isinstance(thing, Tensor):
        try:
            return ref(thing.untyped_storage())
        except (NotImplementedError, RuntimeError):  # a sparse one
            pass
    return ref(thing)


def _tensors_inside(t: Tensor) -> list[str]:
    flatten = getattr(t, "__tensor_flatten__", None)
    return [] if flatten is None else flatten()[0]  # type: ignore[no-any-return]


def is_config(name: str, value: Any) -> bool:
    return name.endswith("config") and hasattr(value, "__dict__")


def with_nested(config: Any) -> Iterator[Any]:
    yield config
    for name, value in vars(config).items():
        if is_config(name, value):
            yield from with_nested(value)
