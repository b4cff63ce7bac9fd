"""CUDA graphs: the pieces of a captured function, each recorded where it stands and replayed by every call.

There are none where torch keeps a work space of cuBLAS per stream: one graph that is let go frees that of all others of
its stream (pytorch #193402). So does every torch before 2.15, ROCm's, and any with TORCH_CUBLAS_WORKSPACE_CACHE=1.
"""

from __future__ import annotations

import gc
import os
import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, fx

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
    found = os.environ.get(VARIABLE) or "auto"
    if found not in ("auto", "off"):
        raise ValueError(f"{VARIABLE}={found!r} is not known; choose auto or off, or leave it unset")
    return found


def wanted(tensors: Iterable[Tensor]) -> bool:
    """Whether a function of these tensors is to be recorded: they lie on one CUDA device, and nobody says no."""
    homes = {t.device for t in tensors}  # what is computed on the host would be recorded as it was then
    shared = bool(torch.version.hip) or os.environ.get("TORCH_CUBLAS_WORKSPACE_CACHE") == "1"
    sound = torch.__version__ >= "2.15" and not shared  # compared as versions
    return wish() == "auto" and sound and len(homes) == 1 and homes.pop().type == "cuda"


class Graphs:
    """The graphs of one captured function, which share memory, and so run in the order of their recording.

    A graph knows addresses, nothing else. Weights, and what an earlier graph gives, are read where they lie; all other
    inputs, those of the call and what attentions give, are copied to a place that stays. What an attention is handed is
    written over by the next call: it may read that, on the stream that it is called on, but must not keep it; a cache
    copies keys and values. What leaves the function is a copy of what stays, or new.

    Args:
        inputs: of the function, as it is going to be called with.
        still: stands for the attentions while the pieces are recorded.
    """

    def __init__(self, inputs: Sequence[Tensor], still: Any) -> None:
        with lasting():
            self._places = [t.clone() for t in inputs]
        self._still = still
        self._turn = threading.Lock()  # all calls use the same places
        self._numbers = count()
        self._at: list[int] | None = None  # addresses of the weights at the recording
        self._held: dict[int, Function | None] = {}  # by number; None: it cannot be recorded

    def place(self, piece: fx.GraphModule, function: Function) -> Function:
        """What stands for `function`, which computes `piece`, where it is called: other places have other weights.

        A piece that draws random numbers is left as it is, since a graph knows one generator only, torch's own.
        """
        if any(torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) for node in piece.graph.nodes):
            return function
        return partial(self._call, next(self._numbers), function)

    def run(self, whole: Function, inputs: Sequence[Tensor], weights: Sequence[Tensor], attend: Any) -> list[Tensor]:
        """`whole` of all these, with pieces in their places; recorded anew if weights lie elsewhere than before."""
        with self._turn, torch.no_grad():
            at = [weight.data_ptr() for weight in weights]
            if at != self._at:
                self._at = None
                self._record(whole, weights)
                self._at = at
            self._recorder.follow()
            for place, t in zip(self._places, inputs, strict=True):
                place.copy_(t)
            return [t.clone() if _base(t) in self._stay else t for t in whole(*self._places, *weights, attend)]

    def _record(self, whole: Function, weights: Sequence[Tensor]) -> None:
        """Call `whole` once, by which every piece is recorded, on the inputs of the last call."""
        with _RECORDING, lasting():
            self._recorder = Recorder(self._places[0].device)
            self._held, self._stay = {}, {_base(t) for t in (*self._places, *weights)}
            whole(*self._places, *weights, self._still)

    def _call(self, number: int, function: Function, *given: Tensor) -> Sequence[Tensor]:
        if number not in self._held:
            self._held[number] = self._recorded(function, given)
        return (self._held[number] or function)(*given)

    def _recorded(self, function: Function, given: Sequence[Tensor]) -> Function | None:
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
    """All that touches CUDA: records graphs that share memory, each allocating where no earlier one's outputs lie."""

    def __init__(self, device: torch.device) -> None:
        gc.collect()  # an old graph that is let go while one is recorded would spoil it
        torch.cuda.synchronize(device)  # and one that runs must not be let go
        self.device = device
        self.pool, self.stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)
        self.last = torch.cuda.current_stream(device)

    def __call__(self, function: Function, inputs: Sequence[Tensor]) -> tuple[list[Tensor], Callable[[], None]]:
        """Outputs of `function` that stay where they are, and what computes them from what the inputs then hold.

        Raises:
            RuntimeError: it does what cannot be recorded.
        """
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self.device):
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                for _ in range(WARM_UPS):
                    function(*inputs)
            # Waits for the device first; other threads may go on using it.
            with torch.cuda.graph(graph, self.pool, self.stream, capture_error_mode="thread_local"):
                outputs = list(function(*inputs))
        return outputs, graph.replay

    def follow(self) -> None:
        """What is launched from now on waits for what was launched by the last call, also on another stream."""
        stream = torch.cuda.current_stream(self.device)
        if stream != self.last:
            stream.wait_stream(self.last)
            self.last = stream
