"""CUDA graphs: a captured function, or each of its pieces, is recorded once and replayed by every call.

torch keeps a cuBLAS workspace for each stream (and, in some releases, thread), whose address is stored in a graph; it
frees the workspace when any graph of that stream is deleted (pytorch #193402) or the thread ends. So the graphs of one
function are recorded on a stream that is used for nothing else, before or after. Its workspace is then allocated during
a recording, in these graphs' own memory pool, which lives as long as any of them. They run one after the other, so they
may share it. `proved` tests this on the device itself.
"""

from __future__ import annotations

import ctypes
import gc
import os
import threading
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import count

import torch
from torch import Tensor, fx

from mmspec.functional import LayerAttention
from mmspec.modes import lasting
from mmspec.steady import Steady

VARIABLE = "MMSPEC_GRAPHS"
SETTINGS = ("auto", "pieces", "off")
WARM_UPS = 3  # runs of a piece before it is recorded, to load and tune kernels
WHOLES = 4  # whole graphs of one function that are kept
LARGE = 2**28  # bytes of the results of a function that is not recorded as a whole, since a graph keeps them allocated

Function = Callable[..., Sequence[Tensor]]
Check = Callable[[Sequence[Tensor], Sequence[Tensor], torch.dtype], None]  # raises an exception if two results differ

_RECORDING = threading.Lock()  # torch records one graph at a time in a process, and must not wait meanwhile


def setting() -> str:
    """The value of MMSPEC_GRAPHS: "auto" (the default), "pieces" or "off".

    Raises:
        ValueError: another value.
    """
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

        with _RECORDING, lasting():
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
        with _RECORDING, lasting():
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


class Recorder:
    """Records CUDA graphs that share a memory pool without overwriting each other's outputs.

    Recording does not wait for the device, empty the allocator or collect garbage, so it does not block other threads.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.pool = device, torch.cuda.graph_pool_handle()
        self.stream: torch.cuda.Stream | None = None
        self.last = torch.cuda.current_stream(device)

    def __call__(self, function: Function, inputs: Sequence[Tensor]) -> tuple[list[Tensor], Callable[[], None]]:
        """The static outputs of `function`, and a function that computes them from the current contents of the inputs.

        Raises:
            RuntimeError: it cannot be recorded.
        """
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self.device):
            here, warm = torch.cuda.current_stream(), torch.cuda.Stream()
            warm.wait_stream(here)
            try:
                with torch.cuda.stream(warm):
                    for _ in range(WARM_UPS):
                        function(*inputs)
            finally:  # what was launched before an error uses memory that is freed on this stream
                here.wait_stream(warm)
            if self.stream is None:
                self.stream = unshared(self.device)
            with torch.cuda.stream(self.stream), _uncollected():
                graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")  # others may go on using CUDA
                try:
                    try:
                        outputs = list(function(*inputs))
                    finally:
                        graph.capture_end()
                except BaseException:
                    _leave_capture(self.device)
                    raise
        return outputs, graph.replay

    def follow(self) -> None:
        """Make the current stream wait for the kernels of the last call, if that was on another stream."""
        stream = torch.cuda.current_stream(self.device)
        if stream != self.last:
            stream.wait_stream(self.last)
            self.last = stream

    def rest(self) -> None:
        """Wait until the last call has finished, before its graphs are deleted."""
        self.last.synchronize()


def _leave_capture(device: torch.device) -> None:
    """Let torch's generator draw again: after a recording that failed it still refuses to, as if it were recorded."""
    generator = torch.cuda.default_generators[device.index]
    generator.graphsafe_set_state(generator.clone_state())


@contextmanager
def _uncollected() -> Iterator[None]:
    """Turn garbage collection off: the deletion of a graph while this thread records would break the recording."""
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()


def unshared(device: torch.device) -> torch.cuda.Stream:
    """A stream that is used for nothing else; the thread must have used the device before.

    torch reuses its own 32 streams. This one is created by the driver and never destroyed: another stream at its
    address would get its workspace.

    Raises:
        RuntimeError: the driver cannot create a stream.
    """
    driver, handle = ctypes.CDLL("nvcuda" if os.name == "nt" else "libcuda.so.1"), ctypes.c_void_p()
    error = driver.cuStreamCreate(ctypes.byref(handle), 1)  # CU_STREAM_NON_BLOCKING: the default stream does not wait
    if error or not handle.value:
        raise RuntimeError(f"the CUDA driver could not create a stream (error {error})")
    return torch.cuda.ExternalStream(handle.value, device=device)


# -- the test on the device --------------------------------------------------------------------------------------------


@lru_cache(maxsize=64)
def proved(device: torch.device) -> bool:
    """Whether graphs still give the right results on this device after others were recorded and deleted.

    Some are recorded by a thread that ends, some are deleted, and freed memory is overwritten; the remaining ones are
    then replayed in parallel on two streams. If anything goes wrong, there is a warning, and nothing is recorded.
    """
    try:
        with _RECORDING, torch.cuda.device(device), torch.no_grad(), lasting():
            wrong = _wrong(device, Recorder)
    except Exception as error:  # a driver may raise anything
        wrong = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    if wrong:
        warnings.warn(f"mmspec records no CUDA graphs on {device}: {wrong}", stacklevel=3)
    return not wrong


def _wrong(device: torch.device, recorder: type[Recorder]) -> str:
    """The error in the graphs of such recorders; empty if there is none."""
    weight = torch.randn(4096, 256, device=device, dtype=torch.bfloat16)  # long sums of few rows: cuBLAS splits them

    def function(x: Tensor) -> list[Tensor]:
        return [x @ weight, (x @ weight).relu()]

    def recorded() -> Callable[[Tensor], list[Tensor]]:
        own, place = recorder(device), torch.zeros(8, 4096, device=device, dtype=torch.bfloat16)
        outputs, replay = own(function, [place])

        def play(x: Tensor) -> list[Tensor]:
            own.follow()
            place.copy_(x)
            replay()
            return [t.clone() for t in outputs]

        return play

    with ThreadPoolExecutor(1) as thread:
        elsewhere = thread.submit(recorded).result()
    passes, stays = recorded(), recorded()
    x = torch.randn(8, 4096, device=device, dtype=torch.bfloat16)
    wanted, _ = function(x), passes(x)
    torch.cuda.synchronize(device)
    del passes
    overwritten = [torch.full((2**22,), torch.nan, device=device) for _ in range(8)]
    results, streams = [], [torch.cuda.Stream(device) for _ in range(2)]
    for _ in range(4):
        for stream, play in zip(streams, (stays, elsewhere), strict=True):
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                results.append(play(x))
    torch.cuda.synchronize(device)
    del overwritten
    for one in results:
        for got, want in zip(one, wanted, strict=True):
            if not torch.allclose(got.float(), want.float(), rtol=2e-2, atol=1.0):  # sums of 4096 terms in bfloat16
                return "their results change after other graphs are deleted"
    return ""
