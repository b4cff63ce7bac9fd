"""CUDA graphs: each piece of a captured function is recorded once and replayed by every call.

torch keeps a work space of cuBLAS for each stream (and, in some releases, thread), to which a graph holds the address;
it frees the space when any graph of that stream is let go (pytorch #193402) or the thread ends. So the graphs of one
function are recorded on a stream that nobody else ever has, and on which nothing ran before. Its work space is then
allocated during a recording, in these graphs' own memory pool, which lives as long as any of them. They run one after
the other, so they may share it. `proved` tests this on the device itself.
"""

from __future__ import annotations

import ctypes
import gc
import os
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache, partial
from itertools import count

import torch
from torch import Tensor, fx

from mmspec.functional import LayerAttention
from mmspec.modes import lasting

VARIABLE = "MMSPEC_GRAPHS"
WARM_UPS = 3  # runs of a piece before it is recorded, in which kernels are loaded and tuned

Function = Callable[..., Sequence[Tensor]]

_RECORDING = threading.Lock()  # torch records one graph at a time in a process, and must not wait meanwhile


def wish() -> str:
    """What MMSPEC_GRAPHS says: "auto", which is also what it says if it is not set, or "off".

    Raises:
        ValueError: it says anything else.
    """
    word = os.environ.get(VARIABLE) or "auto"
    if word not in ("auto", "off"):
        raise ValueError(f"{VARIABLE}={word!r} is not known; choose auto or off, or leave it unset")
    return word


def wanted(tensors: Iterable[Tensor]) -> bool:
    """Whether to record a function of these tensors: they are on one CUDA device, on which graphs have passed the test
    `proved`, and MMSPEC_GRAPHS does not forbid it."""
    homes = {t.device for t in tensors}  # what is computed on the host would be recorded as it was then
    if wish() != "auto" or len(homes) != 1 or torch.version.hip:
        return False
    (home,) = homes
    return home.type == "cuda" and proved(home)


class Graphs:
    """The graphs of one captured function, which share memory, and so run in the order of their recording.

    A graph stores addresses only. Weights, and the outputs of earlier graphs, are read in place; all other inputs
    (those of the call and the results of attentions) are copied to buffers that stay. The next call overwrites what an
    attention is given, so an attention may read it on the current stream but must not keep it; a cache copies keys and
    values. The function's outputs are copies, or new tensors.

    Args:
        inputs: of the function, as it is going to be called with.
        still: stands for the attentions while the pieces are recorded.
    """

    def __init__(self, inputs: Sequence[Tensor], still: LayerAttention) -> None:
        with lasting():
            self._places = [t.clone() for t in inputs]
        self._still = still
        self._turn = threading.Lock()  # all calls use the same places
        self._numbers = count()
        self._at: list[int] | None = None  # addresses of the weights at the recording
        self._held: dict[int, Function | None] = {}  # by number; None: it cannot be recorded
        self._recorder: Recorder | None = None

    def place(self, piece: fx.GraphModule, function: Function) -> Function:
        """What stands for `function`, which computes `piece`, where it is called: other places have other weights.

        A piece that draws random numbers is left as it is, since a graph knows one generator only, torch's own.
        """
        if any(torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) for node in piece.graph.nodes):
            return function
        return partial(self._call, next(self._numbers), function)

    def run(
        self, whole: Function, inputs: Sequence[Tensor], weights: Sequence[Tensor], attend: LayerAttention
    ) -> list[Tensor]:
        """`whole` of all these, with pieces in their places; recorded anew if weights lie elsewhere than before."""
        with self._turn, torch.no_grad():
            at = [weight.data_ptr() for weight in weights]
            if at != self._at:
                self._at = None
                self._record(whole, weights)
                self._at = at
            assert self._recorder is not None
            self._recorder.follow()
            for place, t in zip(self._places, inputs, strict=True):
                place.copy_(t)
            return [t.clone() if _base(t) in self._stay else t for t in whole(*self._places, *weights, attend)]

    def _record(self, whole: Function, weights: Sequence[Tensor]) -> None:
        """Call `whole` once, by which every piece is recorded, on the inputs of the last call."""
        with _RECORDING, lasting():
            if self._recorder is not None:
                self._recorder.rest()
            self._recorder = Recorder(self._places[0].device)
            self._held, self._stay = {}, {_base(t) for t in (*self._places, *weights)}
            whole(*self._places, *weights, self._still)

    def _call(self, number: int, function: Function, *given: Tensor) -> Sequence[Tensor]:
        if number not in self._held:
            self._held[number] = self._recorded(function, given)
        return (self._held[number] or function)(*given)

    def _recorded(self, function: Function, given: Sequence[Tensor]) -> Function | None:
        assert self._recorder is not None
        try:
            inputs = [t if _base(t) in self._stay else t.new_empty_strided(t.shape, t.stride()).copy_(t) for t in given]
            outputs, replay = self._recorder(function, inputs)
        except RuntimeError as error:  # it waits for the device, copies from the host, finds no memory
            why = str(error).strip().partition("\n")[0]
            if None not in self._held.values():
                warnings.warn(f"mmspec runs a compiled function without a CUDA graph: {why}", stacklevel=2)
            self._recorder = Recorder(self._recorder.device)  # nothing shares memory with half a graph
            return None
        self._stay |= {_base(t) for t in outputs}
        copied = [(t, n) for n, t in enumerate(inputs) if t is not given[n]]

        def again(*given: Tensor) -> list[Tensor]:
            for place, which in copied:
                place.copy_(given[which])
            replay()
            return outputs

        return again


def _base(t: Tensor) -> int:
    return t.untyped_storage().data_ptr()


class Recorder:
    """All that touches CUDA: records graphs that share memory, each allocating where no earlier one's outputs lie.

    Nothing here waits for the device, empties the allocator or collects garbage, so other threads are not held up.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.pool = device, torch.cuda.graph_pool_handle()
        self.stream: torch.cuda.Stream | None = None
        self.last = torch.cuda.current_stream(device)

    def __call__(self, function: Function, inputs: Sequence[Tensor]) -> tuple[list[Tensor], Callable[[], None]]:
        """Outputs of `function` that stay where they are, and what computes them from what the inputs then hold.

        Raises:
            RuntimeError: it does what cannot be recorded.
        """
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self.device):
            here, warm = torch.cuda.current_stream(), torch.cuda.Stream()
            warm.wait_stream(here)
            with torch.cuda.stream(warm):
                for _ in range(WARM_UPS):
                    function(*inputs)
            here.wait_stream(warm)
            if self.stream is None:
                self.stream = unshared(self.device)
            with torch.cuda.stream(self.stream), _uncollected():
                graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")  # others may go on using CUDA
                try:
                    outputs = list(function(*inputs))
                finally:
                    graph.capture_end()
        return outputs, graph.replay

    def follow(self) -> None:
        """What is launched from now on waits for what was launched by the last call, also on another stream."""
        stream = torch.cuda.current_stream(self.device)
        if stream != self.last:
            stream.wait_stream(self.last)
            self.last = stream

    def rest(self) -> None:
        """Wait until the last call is through: its graphs are let go after that."""
        self.last.synchronize()


@contextmanager
def _uncollected() -> Iterator[None]:
    """No garbage is collected: a graph that is let go while this thread records would spoil the recording."""
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()


def unshared(device: torch.device) -> torch.cuda.Stream:
    """A stream that nobody else has, in a thread that has used the device before.

    torch hands out its own 32 streams over and over. This one is of the driver's, and is never destroyed: another
    stream at its address would find its work space.

    Raises:
        RuntimeError: the driver has none to give.
    """
    driver, made = ctypes.CDLL("nvcuda" if os.name == "nt" else "libcuda.so.1"), ctypes.c_void_p()
    error = driver.cuStreamCreate(ctypes.byref(made), 1)  # CU_STREAM_NON_BLOCKING: the default stream does not wait
    if error or not made.value:
        raise RuntimeError(f"the CUDA driver gave no stream (error {error})")
    return torch.cuda.ExternalStream(made.value, device=device)


# -- does it hold here? ------------------------------------------------------------------------------------------------


@lru_cache(maxsize=64)
def proved(device: torch.device) -> bool:
    """Whether graphs give on this device what they were recorded of, once others have come and gone.

    Some are recorded by a thread that ends, some let go, the memory of both is written over; those that are left are
    then played side by side on two streams. Where any of it goes wrong, a warning says so, and nothing is recorded.
    """
    try:
        with _RECORDING, torch.cuda.device(device), torch.no_grad(), lasting():
            wrong = _wrong(device, Recorder)
    except Exception as error:  # whatever a driver may say
        wrong = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    if wrong:
        warnings.warn(f"mmspec records no CUDA graphs on {device}: {wrong}", stacklevel=3)
    return not wrong


def _wrong(device: torch.device, recorder: type[Recorder]) -> str:
    """What is wrong with the graphs of such recorders; empty: nothing."""
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
                return "what they compute changes once other graphs are let go"
    return ""
