"""CUDA graphs: a captured function, or each of its pieces, is recorded once and replayed by every call."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count

import torch
from torch import Tensor, fx

from mmspec.compile.recording import RECORDING, Function, Recorder, proved
from mmspec.functional import LayerAttention
from mmspec.modes import lasting
from mmspec.steady import Steady

VARIABLE = "MMSPEC_GRAPHS"
SETTINGS = ("auto", "pieces", "off")
WHOLES = 4  # whole graphs of one function that are kept
LARGE = 2**28  # bytes of the results of a function that is not recorded as a whole, since a graph keeps them allocated

Check = Callable[[Sequence[Tensor], Sequence[Tensor], torch.dtype], None]  # raises an exception if two results differ


def setting() -> str:
    """The value of MMSPEC_GRAPHS: "auto" (the default), "pieces" or "off". Raises ValueError: another value."""
    value = os.environ.get(VARIABLE) or "auto"
    if value not in SETTINGS:
        raise ValueError(f"{VARIABLE}={value!r} is not known; choose auto, pieces or off, or leave it unset")
    return value


def wanted(tensors: Iterable[Tensor]) -> bool:
    """Whether to record a function of these tensors: they are on one CUDA device whose graphs passed the test `proved`,
    and MMSPEC_GRAPHS is not "off"."""
    devices = {t.device for t in tensors}  # a graph would not repeat computations on the host
    if setting() == "off" or len(devices) != 1 or torch.version.hip:
        return False
    (device,) = devices
    return device.type == "cuda" and proved(device)


class Graphs:
    """The graphs of one captured function, which share memory, and so run in the order of their recording.

    A graph stores only addresses. Weights and the outputs of earlier graphs are read in place; all other inputs (those
    of the call and the results of attentions) are copied to static buffers. The next call overwrites the arguments of
    an attention, which may therefore read them on the current stream but must not keep them; a cache copies keys and
    values. The function's outputs are copies, or new tensors.

    An attention that is steady (`mmspec/steady.py`) is recorded, too: then all is one graph, which the host
    launches once. It is used after it has given what the pieces give.

    Args:
        inputs: example inputs of the function.
        still: replaces the attentions while the pieces are recorded.
        check: compares the results of a whole graph with those of the pieces.
    """

    def __init__(self, inputs: Sequence[Tensor], still: LayerAttention, check: Check) -> None:
        with lasting():
            self._places = [t.clone() for t in inputs]
        self._still, self._check = still, check
        self._wholes: dict[Hashable, Whole | None] = {}  # None: it cannot be recorded as a whole
        self._whole_recorder: Recorder | None = None
        self._draws = False  # whether a piece draws random numbers
        self._inside = False  # whether a whole graph is being recorded
        self._turn = threading.Lock()  # all calls use the same buffers
        self._numbers = count()
        self._at: list[int] | None = None  # addresses of the weights at the recording
        self._replays: dict[int, Function | None] = {}  # by number; None: it cannot be recorded
        self._recorder: Recorder | None = None

    def place(self, piece: fx.GraphModule, function: Function) -> Function:
        """The graph of `function`, which computes `piece`, at one of its places, each of which has its own weights.

        A piece that draws random numbers is not recorded, since a graph supports only torch's default generator.
        """
        if any(torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) for node in piece.graph.nodes):
            self._draws = True
            return function
        return partial(self._call, next(self._numbers), function)

    def run(
        self, whole: Function, inputs: Sequence[Tensor], weights: Sequence[Tensor], attend: LayerAttention
    ) -> list[Tensor]:
        """Run `whole`, which calls the graphs; they are recorded again if the weights have moved."""
        with self._turn, torch.no_grad():
            at = [weight.data_ptr() for weight in weights]
            if at != self._at:
                self._at = None
                self._record(whole, weights)
                self._at = at
            assert self._recorder is not None
            self._recorder.follow()
            _copy(self._places, inputs)
            outputs = list(self._at_once(whole, weights, attend) or whole(*self._places, *weights, attend))
            staying = [n for n, t in enumerate(outputs) if _base(t) in self._stay]
            copies = [torch.empty_like(outputs[n]) for n in staying]
            _copy(copies, [outputs[n] for n in staying])
            for n, t in zip(staying, copies, strict=True):
                outputs[n] = t
            return outputs

    def _at_once(self, whole: Function, weights: Sequence[Tensor], attend: LayerAttention) -> Sequence[Tensor] | None:
        """The outputs by a whole graph; None: the attention is not steady, or the graph cannot be recorded."""
        steadied: Callable[[], Steady | None] | None = getattr(attend, "steadied", None)
        refused = self._wholes and not any(self._wholes.values())
        if steadied is None or refused or self._draws or None in self._replays.values() or setting() != "auto":
            return None
        steady = steadied()
        if steady is None:
            return None
        key = (steady.key, steady.dtype, *((t.shape, t.dtype) for t in steady.tensors))
        if key not in self._wholes:
            full = len(self._wholes) >= WHOLES
            self._wholes[key] = None if full else self._recorded_whole(whole, weights, attend, steady)
        one = self._wholes[key]
        return None if one is None else one(steady.tensors)

    def _recorded_whole(
        self, whole: Function, weights: Sequence[Tensor], attend: LayerAttention, steady: Steady
    ) -> Whole | None:
        wanted = [t.clone() for t in whole(*self._places, *weights, attend)]  # a graph appends the same once more
        if sum(t.nbytes for t in wanted) > LARGE:
            return None
        recorder, count = self._whole_recorder or Recorder(self._places[0].device), len(self._places)
        self._whole_recorder = None  # later graphs must not share memory with a failed one

        def function(*given: Tensor) -> Sequence[Tensor]:
            return whole(*given[:count], *weights, steady.within(given[count:]))

        with RECORDING, lasting():
            places, self._inside = [t.clone() for t in steady.tensors], True
            try:
                outputs, replay = recorder(function, [*self._places, *places])
            except Exception as error:  # a kernel's compiler or launch may fail in any way
                _refuse(str(error))
                return None
            finally:
                self._inside = False
        self._whole_recorder = recorder
        one = Whole(recorder, places, outputs, replay)
        try:
            self._checked(one(steady.tensors), wanted, steady.dtype)
        except Exception as error:
            recorder.rest()
            _refuse(str(error))
            return None
        self._stay |= {_base(t) for t in outputs}
        return one

    def _checked(self, mine: Sequence[Tensor], wanted: Sequence[Tensor], dtype: torch.dtype) -> None:
        """An exception if numbers differ by more than rounding, or if most of the choices are others."""
        for a, b in zip(mine, wanted, strict=True):
            if not b.is_floating_point():
                if b.numel() and float((a == b).float().mean()) < 0.5:
                    raise RuntimeError("it would choose other tokens")
                continue
            masked = [~t.isfinite() | (t.abs() > torch.finfo(t.dtype).max / 2) for t in (a, b)]
            if float((masked[0] != masked[1]).float().sum()) > 0.01 * b.numel():
                raise RuntimeError("it would mask other entries")
            both = masked[0] | masked[1]
            a, b = a.masked_fill(both, 0.0), b.masked_fill(both, 0.0)
            if bool(b.any()) or bool(a.any()):
                self._check([a], [b], dtype)

    def _record(self, whole: Function, weights: Sequence[Tensor]) -> None:
        """Record every piece by calling `whole` once on the inputs of the last call."""
        with RECORDING, lasting():
            if self._recorder is not None:
                self._recorder.rest()
            if self._whole_recorder is not None:
                self._whole_recorder.rest()
            self._wholes, self._whole_recorder = {}, None
            self._recorder = Recorder(self._places[0].device)
            self._replays, self._stay = {}, {_base(t) for t in (*self._places, *weights)}
            whole(*self._places, *weights, self._still)

    def _call(self, number: int, function: Function, *given: Tensor) -> Sequence[Tensor]:
        if self._inside:
            return function(*given)
        if number not in self._replays:
            self._replays[number] = self._recorded(function, given)
        return (self._replays[number] or function)(*given)

    def _recorded(self, function: Function, given: Sequence[Tensor]) -> Function | None:
        assert self._recorder is not None
        try:
            inputs = [t if _base(t) in self._stay else t.new_empty_strided(t.shape, t.stride()).copy_(t) for t in given]
            outputs, replay = self._recorder(function, inputs)
        except RuntimeError as error:  # it waits for the device, copies from the host, or runs out of memory
            why = str(error).strip().partition("\n")[0]
            if None not in self._replays.values():
                warnings.warn(f"mmspec runs a compiled function without a CUDA graph: {why}", stacklevel=2)
            self._recorder = Recorder(self._recorder.device)  # later graphs must not share memory with a failed one
            return None
        self._stay |= {_base(t) for t in outputs}
        copied = [(t, n) for n, t in enumerate(inputs) if t is not given[n]]

        def again(*given: Tensor) -> list[Tensor]:
            for place, which in copied:
                place.copy_(given[which])
            replay()
            return outputs

        return again


@dataclass(frozen=True)
class Whole:
    """A graph of a whole function, and where it expects the tensors of a steady attention."""

    recorder: Recorder
    places: list[Tensor]
    outputs: list[Tensor]
    replay: Callable[[], None]

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        self.recorder.follow()
        _copy(self.places, tensors)
        self.replay()
        return self.outputs


def _copy(places: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Copy tensors, those of one dtype by one kernel."""
    groups: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for place, t in zip(places, tensors, strict=True):
        to, of = groups.setdefault(place.dtype, ([], []))
        to.append(place)
        of.append(t)
    for to, of in groups.values():
        torch._foreach_copy_(to, of)


def _refuse(why: str) -> None:
    first = why.strip().partition("\n")[0]
    warnings.warn(f"mmspec records a function in pieces, not as one CUDA graph: {first}", stacklevel=2)


def _base(t: Tensor) -> int:
    return t.untyped_storage().data_ptr()
