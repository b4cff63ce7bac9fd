"""The version of a model: captures of it, and cached prefixes, are valid as long as the version does not change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from copy import deepcopy
from ctypes import string_at
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from operator import attrgetter, call, itemgetter
from types import FunctionType, MethodType
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from mmspec.compile import marks
from mmspec.compile.marks import CONTAINERS, PLAIN, fixed, is_config, is_holder, placed
from mmspec.modes import each_module, hooked, hooked_everywhere, inert, own_class

# Ignored attributes: those of every module (parameters and buffers are read separately), and those set by `generate`
_OF_CALLS = {"generation_config", "warnings_issued", "_previous_max_cache_length", "_output_capturing_hooks_installed"}
_ASIDE = {*vars(nn.Module())} - {"training"} | _OF_CALLS | {"_is_hf_initialized"}
_LEFT = {"rope_deltas"}  # tensors that a call leaves behind for the next one
_OF_LINEAR = _ASIDE | {"training", "in_features", "out_features"}  # whose forward reads its parameters alone
Marks = list[Any]  # values that are compared by ==
Versions = dict[int, "_Checked"]  # those of modules, by the module's id
_READ: ContextVar[Versions | None] = ContextVar("mmspec_versions", default=None)
# dicts of a module whose items are read
_PARAMETERS, _INSIDE = itemgetter("_parameters"), itemgetter("_parameters", "_buffers", "_modules")
_HOOKS = itemgetter("_forward_pre_hooks", "_forward_hooks")
_SEEN: WeakKeyDictionary[nn.Module, _Seen] = WeakKeyDictionary()  # the latest version, by module
_REFRESHED: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()  # how often `refresh` was called, by module


@dataclass
class _Checked:
    """The latest version of a module, and its tensors, if they have not been compared with it yet."""

    root: nn.Module  # stays alive, so that its id is not reused
    seen: _Seen
    tensors: list[Any] | None


@dataclass(frozen=True)
class Version:
    """Two versions are equal if the forward computes the same results from the same inputs.

    Keep it alive as long as it is compared with others, so that its ids are not reused for other objects. Not detected
    are writes that bypass torch's version counters (through `.data`, a numpy view, another process), tensors in lists
    and dicts of modules, class attributes, methods other than `forward`, and hooks that torch did not register; see
    `refresh`.

    Attributes:
        weights: the parameters and buffers, by identity among those that are alive, as those of a capture are.
        state: classes, submodules, flags, plain attributes (of objects, too), functions, configurations, and calls of
            `refresh`.
        written: for each parameter and buffer its version counter, its address, and the steps of optimizers; for other
            tensors of modules, which no capture uses, also which ones they are.
        counted: whether torch counts the writes to all of them; it does not count those to tensors of inference mode.
        why: the reason why a capture cannot replace the model's forward, such as hooks; None: it can.
    """

    weights: Marks
    state: Marks
    written: Marks
    counted: bool
    why: str | None
    _alive: list[ref[Any]] = field(compare=False, repr=False)  # weak references, whose ids identify objects


@contextmanager
def unchanging(read: Versions | None = None) -> Iterator[None]:
    """Inside the `with` block, each module's version is read only once, since a call does not change it.

    `read` keeps what has been read for further blocks that belong to the same call.
    """
    if _READ.get() is not None:
        yield
        return
    token = _READ.set({} if read is None else read)
    try:
        yield
    finally:
        _READ.reset(token)


def version(root: nn.Module, kept: bool = False) -> Version:
    """The version of a module and all its submodules: the previous object if nothing has changed, else a new one.

    Args:
        kept: also compare tensors that are neither parameters nor buffers, by identity; such a version is not cached.
    """
    if kept:
        return _version(root, kept)
    checked = _checked(root)
    if checked.tensors is not None and not checked.seen.same_tensors(checked.tensors):
        checked.seen = _SEEN[root] = _Seen(root)
    checked.tensors = None
    return checked.seen.version


def structure(root: nn.Module) -> Version:
    """Like `version`, but it may be an older one if only the contents or layouts of parameters and buffers have changed
    since: it takes less time."""
    return _checked(root).seen.version


def _checked(root: nn.Module) -> _Checked:
    read = _READ.get()
    if read is None:
        return _latest(root)
    if id(root) not in read:
        read[id(root)] = _latest(root)
    return read[id(root)]


def _latest(root: nn.Module) -> _Checked:
    """The latest version, after a check that all but the tensors' contents is unchanged; a new one if it is not."""
    seen = _SEEN.get(root)
    tensors = None if seen is None else seen.same_structure()
    if seen is None or tensors is None:
        seen = _SEEN[root] = _Seen(root)
    return _Checked(root, seen, tensors)


def _version(root: nn.Module, kept: bool = False) -> Version:
    modules, alive, configs = list(each_module(root)), list[ref[Any]](), dict[int, Any]()
    classes = [own_class(type(module)) for module in modules]  # another thread may swap them
    weights: Marks = []
    writes: Marks = []
    state: Marks = [sum(_REFRESHED.get(module, 0) for module in modules) if _REFRESHED else 0]

    def identity(thing: Any) -> Any:
        """What no other object has while this version is alive."""
        try:
            alive.append(marks.alive_ref(thing))
        except TypeError:
            return id(thing)
        return (id(thing), id(alive[-1])) if isinstance(thing, Tensor) else id(alive[-1])

    def mark(value: Any) -> Any:
        if type(value) in PLAIN:
            return value
        if isinstance(value, Tensor):  # no capture can use it
            return identity(value) if kept else None
        if isinstance(value, CONTAINERS):
            return marks.parts(value)
        if is_holder(value):
            return marks.held(value, identity)
        return identity(value) if callable(value) else type(value)

    why = "forward hooks are registered for all modules" if hooked_everywhere() else None
    places, counted = {id(module): place for place, module in enumerate(modules)}, True
    for module, own in zip(modules, classes, strict=True):
        attributes, aside = vars(module), _ignored(module)
        inside = attributes["_modules"]
        state += (id(own), *inside, [places.get(id(child)) for child in inside.values()])
        for t in (*attributes["_parameters"].values(), *attributes["_buffers"].values()):
            weights += (t,) if t is None else (id(t), *marks.laid_out(t))
            writes += (t,) if t is None else (identity(t), marks.written(t))
            counted = counted and (t is None or not t.is_inference())
        for name, value in attributes.items():
            if name in aside:
                continue
            if is_config(name, value):
                configs[id(value)] = value
                value = None
            state += (name, mark(value))
            if isinstance(value, Tensor) and name not in _LEFT:
                writes += (name, identity(value), marks.written(value))
        if why is None and (found := _obstacle(module, attributes)) is not None:
            why = f"{_name(root, module)} {found}"
    for config in (inner for outer in configs.values() for inner in marks.with_nested(outer)):
        state.append(identity(config))
        for name, value in vars(config).items():
            state += (name, mark(value))
    for stock in dict.fromkeys(classes):
        state += (identity(stock), identity(stock.forward))
    return Version(weights, state, writes, counted, why, alive)


def _ignored(module: nn.Module) -> set[str]:
    """The names of a module's ignored attributes."""
    kind, own = own_class(type(module)), vars(module)  # another thread may swap the class
    plain = kind is nn.Linear and "forward" not in own and kind.forward.__module__ == kind.__module__
    return _OF_LINEAR if plain and not any((*_INSIDE(own)[1:], *_HOOKS(own))) else _ASIDE


class _Seen:
    """A version and a snapshot of its attributes: checking that nothing has changed is faster than reading it again.

    Attributes are compared by the ids of their values. An id is unique while its object lives: plain values, tuples and
    configurations are kept alive here; modules, tensors and functions are checked by weak references. A tensor that a
    call has left for the next one may change to another tensor or None.
    """

    def __init__(self, root: nn.Module) -> None:
        marks.count_steps()
        self.version, self._gone = _version(root), list[ref[Any]]()  # ids mean nothing any more once something is gone
        pairs = [(module, _ignored(module)) for module in each_module(root)]
        pairs.sort(key=lambda pair: pair[1] is _ASIDE)
        modules, self._leaves = [module for module, _ in pairs], sum(aside is not _ASIDE for _, aside in pairs)
        self._refs = [ref(module, self._gone.append) for module in modules]
        self._alive = [ref(one(), self._gone.append) for one in self.version._alive]
        own: list[Any] = list(map(vars, modules))
        self._lengths = list(map(len, own))
        self._aside = [(i, name) for i, one in enumerate(own) for name in one.keys() & _OF_CALLS]
        read = [[name for name in one if name not in aside] for one, (_, aside) in zip(own, pairs, strict=True)]
        self._read = [i for i, some in enumerate(read) if some]
        # at least two names, so that itemgetter gives a tuple
        read = [some * 2 if len(some) == 1 else some for some in read]
        reader = cache(itemgetter)  # one for all modules with these names
        self._readers = [reader(*some) for some in read if some]
        configs = [value for one in own for name, value in one.items() if is_config(name, value)]
        nested = {id(one): one for config in configs for one in marks.with_nested(config)}
        self._configs = [vars(one) for one in nested.values()]
        self._registered, self._hooks = RemovableHandle.next_id, _hooks(own)
        self._names, values = self._attributes(own)
        named = [*chain.from_iterable(read), *self._names]
        outer = len(named) - len(self._names)
        results = [i for i in range(outer) if isinstance(values[i], Tensor)]
        self._results = [i for i in results if named[i] in _LEFT]
        self._ids = self._compared(values)
        self._kept = [value for value in values if fixed(value)]
        tensors = [i for i in range(outer, len(values)) if isinstance(values[i], Tensor)]
        plain = [i for i in tensors if placed(values[i]) and not values[i].is_inference()]
        self._tensors, self._plain = [*plain, *({*tensors, *results} - {*plain, *self._results})], len(plain)
        inside = [i for i, value in enumerate(values) if isinstance(value, CONTAINERS) and not fixed(value)]
        inside = [i for i in inside if named[i] not in _ASIDE]
        self._plain_containers = [i for i in inside if marks.all_plain(values[i])]
        self._copies = [deepcopy(values[i]) for i in self._plain_containers]
        self._containers = [i for i in inside if not marks.all_plain(values[i])]
        self._holders = [i for i, value in enumerate(values) if is_holder(value) and not is_config(named[i], value)]
        tensors = [values[i] for i in self._tensors]
        self._state, self._contents = self._state_of(modules, values, tensors), self._contents_of(tensors)

    def same_structure(self) -> list[Any] | None:
        """The tensors, which are still to be compared, if all else is unchanged; else None."""
        if self._gone:
            return None
        modules = list(map(call, self._refs))
        own = [module.__dict__ for module in modules]  # faster than `vars`
        if list(map(len, own)) != self._lengths or any(name not in own[i] for i, name in self._aside):
            return None
        try:
            names, values = self._attributes(own)
            same = names == self._names and self._compared(values) == self._ids and self._same_hooks(own)
            same = same and [values[i] for i in self._plain_containers] == self._copies
        except (KeyError, RuntimeError, ValueError):  # an attribute is gone; a tensor or an array is where a number was
            return None
        tensors = [values[i] for i in self._tensors]
        same = same and self._state_of(modules, values, tensors) == self._state
        return tensors if same else None

    def same_tensors(self, tensors: list[Any]) -> bool:
        return self._contents_of(tensors) == self._contents

    def _same_hooks(self, own: list[dict[str, Any]]) -> bool:
        """Each hook that torch registers has a further number."""
        latest = RemovableHandle.next_id
        if self._hooks or self._registered != latest:
            if _hooks(own) != self._hooks:
                return False
            self._registered = latest  # read before the hooks, since another thread may register one
        return True

    def _attributes(self, own: list[dict[str, Any]]) -> tuple[list[str], list[Any]]:
        """The values of the modules' attributes, then those inside: of parameters, buffers, submodules and
        configurations, whose names come first."""
        values = [*chain.from_iterable(map(call, self._readers, map(own.__getitem__, self._read)))]
        leaves, others = own[: self._leaves], own[self._leaves :]
        read = chain(map(_PARAMETERS, leaves), chain.from_iterable(map(_INSIDE, others)))
        inside = [*filter(None, read), *self._configs]
        values += chain.from_iterable(map(dict.values, inside))
        return [*chain.from_iterable(inside)], values

    def _compared(self, values: list[Any]) -> bytes:
        """Ids of the values; of None for results."""
        if self._results:
            values = values.copy()
            for i in self._results:
                values[i] = None if isinstance(values[i], Tensor) else values[i]
        return identities(tuple(values))

    def _state_of(self, modules: list[Any], values: list[Any], tensors: list[Any]) -> Any:
        """State that may change while all attributes keep their values, but for that of tensors."""
        kinds = list[Any](map(type, modules))
        return (
            hooked_everywhere(),
            sum(_REFRESHED.get(module, 0) for module in modules) if _REFRESHED else 0,
            kinds,
            [kind.forward for kind in dict.fromkeys(kinds)],
            list(map(type, tensors)),
            [marks.parts(values[i]) for i in self._containers],
            [marks.held(values[i], id) for i in self._holders],
        )

    def _contents_of(self, tensors: list[Any]) -> Any:
        """What differs after a write to a tensor, or where its memory or layout is another."""
        plain, others = tensors[: self._plain], tensors[self._plain :]
        return (
            list(map(attrgetter("_version"), plain)),
            # an address is on one device; nbytes and strides differ where the shape or the size of a number does
            list(map(Tensor.data_ptr, plain)),
            list(map(attrgetter("nbytes"), plain)),
            list(map(Tensor.stride, plain)),
            [(*marks.laid_out(t), *marks.written(t)) for t in others],
            marks.steps(plain),
        )


def identities(values: tuple[Any, ...]) -> bytes:
    """The ids of the values, one after the other: CPython's tuples end with the addresses of their items, and to copy
    these takes a sixth of the time that `id` of each takes."""
    return string_at(id(values) + tuple.__basicsize__, len(values) * tuple.__itemsize__)


def _hooks(own: list[dict[str, Any]]) -> list[int]:
    """The ids of hooks that may change something; `stream` sets another kind for each call."""
    some = filter(None, chain.from_iterable(map(_HOOKS, own)))
    return [id(hook) for hook in chain.from_iterable(map(dict.values, some)) if not inert(hook)]


def refresh(*models: nn.Module) -> None:
    """Invalidate captures and cached prefixes of these modules, their submodules, and the modules that contain them."""
    for module in each_module(*models):
        _REFRESHED[module] = _REFRESHED.get(module, 0) + 1


def _obstacle(module: nn.Module, attributes: dict[str, Any]) -> str | None:
    """The reason why a module's forward may behave differently at the next call, or None."""
    if hooked(module):
        return "has forward hooks"
    if attributes.get("_compiled_call_impl") is not None:
        return "is compiled by itself"
    if "_diffusers_hook" in attributes:
        return "has hooks of diffusers"
    # accelerate's own forward moves tensors between devices and does nothing else
    if "forward" not in attributes or type(attributes.get("_hf_hook")).__module__ == "accelerate.hooks":
        return None
    forward = attributes["forward"]
    method = isinstance(forward, MethodType) and forward.__self__ is module
    if method and isinstance(forward.__func__, FunctionType) and not forward.__func__.__closure__:
        return None
    return "has a forward of its own"


def _name(root: nn.Module, module: nn.Module) -> str:
    return next((name for name, found in root.named_modules() if found is module and name), type(module).__name__)
