"""A pretended CUDA for machines without one: tensors lie on the CPU and say that they are on cuda:N.

Within `Pretend()` each torch function is judged as torch would judge it: two devices in one operation raise torch's own
error (single numbers and indices on the CPU are allowed). What would make the host wait for the device is counted by
the line of code that asks for it: `reads` (item, tolist, bool, nonzero, boolean indexing, copies to the host) and
`copies` (from ordinary host memory). Kernels run in Triton's interpreter. Nothing here tells of time.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")
_MAKERS = {
    torch.zeros, torch.ones, torch.full, torch.empty, torch.arange, torch.tensor, torch.eye, torch.linspace, torch.rand,
    torch.randn, torch.randint, torch.randperm, torch.scalar_tensor, torch.empty_strided, torch.as_tensor, torch.asarray,
}  # fmt: skip
_OF_DATA = {torch.tensor, torch.as_tensor, torch.asarray}
_READS = {
    "item", "tolist", "__bool__", "__int__", "__float__", "__index__", "nonzero", "masked_select", "unique", "equal",
    "numpy", "__array__", "bincount", "allclose",
}  # fmt: skip
_NO_WORK = {"_parse_to", "_has_compatible_shallow_copy_type"}
_ANYWHERE = {"copy_", "data_ptr", "untyped_storage", "set_", "__getitem__", "__setitem__"}  # no two devices meet there


class Mismatch(RuntimeError):
    """Two devices in one operation."""


def home(t: Tensor) -> torch.device:
    """Where a tensor says that it is."""
    return t.__dict__.get("_pretended", CPU)


def place(module: nn.Module, device: str | torch.device) -> nn.Module:
    """Say of a module's weights that they are there."""
    for t in [*module.parameters(), *module.buffers()]:
        _tag(t, _named(device))
    return module


def _named(device: Any) -> torch.device:
    device = torch.device("cuda", device) if type(device) is int else torch.device(device)
    return torch.device("cuda", 0) if device.type == "cuda" and device.index is None else device


def _tag(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        value.__dict__["_pretended"] = device
    elif isinstance(value, list | tuple):
        for each in value:
            _tag(each, device)
    return value


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _tensors(each)


def _asked_by() -> str:
    """The innermost line that is neither torch's, Triton's nor ours."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name != __file__ and "/torch/" not in name and "/triton/" not in name:
            return f"{'/'.join(name.split('/')[-2:])}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "?"


class Pretend(TorchFunctionMode):
    """The mode; `reads` and `copies` count by line of code."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: Counter[str] = Counter()
        self.copies: Counter[str] = Counter()

    @property
    def waits(self) -> tuple[int, int]:
        """Reads and copies so far."""
        return self.reads.total(), self.copies.total()

    def __enter__(self) -> Pretend:
        self._patches = ExitStack()
        for change in _patches():
            self._patches.enter_context(change)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patches.close()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", str(func))
        if name in _NO_WORK:
            return func(*args, **kwargs)
        if name in ("__get__", "__set__"):
            return self._attribute(func, name, args, kwargs)
        if name in ("to", "cpu", "cuda") and isinstance(args[0], Tensor):
            return self._moved(func, name, args, kwargs)
        if func in _MAKERS or name.startswith("new_") or name.endswith("_like"):
            return self._made(func, args, kwargs)
        if kwargs.get("device") is not None:
            kwargs["device"] = "cpu"
        self._count(name, args, kwargs)
        self._meet(name, args, kwargs)
        out = func(*args, **kwargs)
        if name == "__iter__":
            return iter(_tag(list(out), home(args[0])))
        if args and out is args[0]:
            return out  # written in place
        return _tag(out, self._result(name, args, kwargs))

    # -- one kind of function each -----------------------------------------------------------------------------------

    @staticmethod
    def _attribute(func: Any, name: str, args: Any, kwargs: Any) -> Any:
        what, t = getattr(func.__self__, "__name__", ""), args[0]
        if name == "__set__":
            if what == "data":
                _tag(t, home(args[1]))
            return func(*args, **kwargs)
        if what == "device":
            return home(t)
        if what in ("is_cuda", "is_cpu"):
            return what == f"is_{home(t).type}"
        return _tag(func(*args, **kwargs), home(t))

    def _moved(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """`to`, `cpu` and `cuda`: what is named is a device, a dtype, a tensor of both, or flags."""
        t, device, rest = args[0], None, []
        given = [*args[1:], kwargs.pop("device", None), kwargs.pop("other", None), kwargs.pop("dtype", None)]
        for each in given:
            if isinstance(each, Tensor):
                device, rest = home(each), [each.dtype]
            elif isinstance(each, str | torch.device) or type(each) is int:
                device = _named(each)
            elif isinstance(each, torch.dtype):
                rest = [each]
        device = CPU if name == "cpu" else _named(device or "cuda") if name == "cuda" else device or home(t)
        kept = {key: value for key, value in kwargs.items() if key in ("copy", "memory_format")}
        out = torch.Tensor.to(t, *rest, **kept) if rest or kept else t
        if device != home(t):
            self._move(t, device)
            out = t.detach().clone() if out is t else out
        return out if out is t else _tag(out, device)

    def _made(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        asked, device = kwargs.pop("device", None), torch.get_default_device()
        source = args[0] if args and isinstance(args[0], Tensor) else None
        if asked is not None:
            device = _named(asked)
        elif source is not None:
            device = home(source)
        if func in _OF_DATA:
            if source is None:
                self.reads.update(_asked_by() for t in _tensors(args) if home(t).type == "cuda")
            if device.type == "cuda" and (source is None or home(source) == CPU):
                self.copies[_asked_by()] += 1
        out = func(*args, device="cpu", **{key: value for key, value in kwargs.items() if key != "pin_memory"})
        return _tag(out.clone() if out is source else out, device)

    # -- what torch would say of it ----------------------------------------------------------------------------------

    def _move(self, t: Tensor, device: torch.device) -> None:
        if (home(t).type, device.type) == ("cuda", "cpu"):
            self.reads[_asked_by()] += 1
        elif (home(t).type, device.type) == ("cpu", "cuda"):
            self.copies[_asked_by()] += 1

    def _count(self, name: str, args: Any, kwargs: Any) -> None:
        if not args or not isinstance(args[0], Tensor):
            return
        if name == "copy_" and isinstance(args[1], Tensor):
            self._move(args[1], home(args[0]))
        if home(args[0]).type != "cuda":
            return
        repeats = name == "repeat_interleave" and isinstance(args[1], Tensor) and "output_size" not in kwargs
        if name in _READS or repeats:
            self.reads[_asked_by()] += 1
        if name not in ("__getitem__", "__setitem__"):
            return
        single = name == "__setitem__" and (not isinstance(args[2], Tensor) or args[2].numel() == 1)
        for part in _parts(args[1]):
            if isinstance(part, list) and part:
                self.copies[_asked_by()] += 1
            elif isinstance(part, Tensor) and part.dim() and home(part) == CPU:
                self.copies[_asked_by()] += 1
            elif isinstance(part, Tensor) and part.dim() and part.dtype == torch.bool and not single:
                self.reads[_asked_by()] += 1

    @staticmethod
    def _meet(name: str, args: Any, kwargs: Any) -> None:
        """Refuse what torch would refuse."""
        if name in ("__getitem__", "__setitem__"):
            for part in _tensors(_parts(args[1])):
                if part.dim() and home(part) not in (CPU, home(args[0])):
                    raise Mismatch(
                        "indices should be either on cpu or on the same device as the indexed tensor "
                        f"({home(args[0])}); they are on {home(part)}"
                    )
        if name in _ANYWHERE:
            return
        found = {home(t) for t in _tensors([args, kwargs]) if t.dim() or home(t) != CPU}
        if len(found) > 1:
            raise Mismatch(
                f"Expected all tensors to be on the same device, but found at least two devices, "
                f"{' and '.join(sorted(map(str, found)))}! ({name})"
            )

    @staticmethod
    def _result(name: str, args: Any, kwargs: Any) -> torch.device:
        if name in _ANYWHERE:
            return home(args[0])
        homes = [home(t) for t in _tensors([args, kwargs])]
        return next((each for each in homes if each.type == "cuda"), CPU)


def _parts(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


def _patches() -> Iterator[Any]:
    """What is no torch function, and would ask for a device that is not there."""
    from triton.runtime.interpreter import GridExecutor

    launch, parameter = GridExecutor.__call__, nn.Parameter.__new__

    def launched(self: Any, *args: Any, **kwargs: Any) -> None:
        found = {home(t) for t in _tensors([args, kwargs])}
        if len(found) > 1 or CPU in found:
            raise Mismatch(f"a kernel was launched with pointers to {', '.join(sorted(map(str, found)))}")
        with torch._C.DisableTorchFunction():
            launch(self, *args, **kwargs)

    def made(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
        out = parameter(cls, data, requires_grad)
        return out if data is None else _tag(out, home(data))

    yield patch.object(GridExecutor, "__call__", launched)
    yield patch.object(nn.Parameter, "__new__", staticmethod(made))
    yield patch.object(torch.cuda, "device", lambda device: nullcontext())
    yield patch.object(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=2))


