"""Records CUDA graphs, after a test on the device that replays give the right results.

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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache

import torch
from torch import Tensor

from mmspec.modes import lasting

WARM_UPS = 3  # runs of a function before it is recorded, to load and tune kernels
RECORDING = threading.Lock()  # torch records one graph at a time in a process, and must not wait meanwhile
Function = Callable[..., Sequence[Tensor]]


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

        Raises RuntimeError: it cannot be recorded.
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
        with RECORDING, torch.cuda.device(device), torch.no_grad(), lasting():
            wrong = _wrong(device, Recorder)
    except Exception as error:  # a driver may raise anything
        wrong = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    if wrong:
        warnings.warn(f"mmspec records no CUDA graphs on {device}: {wrong}", stacklevel=3)
    return not wrong


def _wrong(device: torch.device, recorder: type[Recorder]) -> str:
    """The error in the graphs of such recorders; empty if there is none."""
    seed = torch.Generator().manual_seed(0)  # of its own: a call that is running draws from the global ones

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=seed, device="cpu").to(device, torch.bfloat16)

    weight = drawn(4096, 256)  # long sums of few rows: cuBLAS splits them

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
    x = drawn(8, 4096)
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
