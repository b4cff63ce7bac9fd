"""Streams, graphs and the work spaces of cuBLAS, as the releases of torch keep books of them, on a CPU.

What a graph computes is on a `tape`; here is told whose memory its products use meanwhile. A work space belongs to a
thread's handle and a stream. It is allocated where it is first asked for: within a recording in that graph's pool of
memory, which stays mapped as long as one of the pool's graphs lives, else in ordinary memory. Two pools that use one
space would disturb each other.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pretend_graphs
import torch
from torch import Tensor

# Releases differ in when a work space is let go: never; with any graph that was recorded on its stream (2.12 to 2.14);
# or, besides, with the thread that asked for it first.
RULES = ("kept", "cleared", "thread")


class Space:
    """A work space; `gone` once the books have let go of it."""

    def __init__(self, home: Home | None) -> None:
        self.home, self.thread, self.gone = home, threading.current_thread(), False
        self.users: weakref.WeakSet[Home] = weakref.WeakSet()


class Home:
    """A pool of memory that graphs share."""

    def __init__(self) -> None:
        self.memory = pretend_graphs.Pool()
        self.graphs: weakref.WeakSet[Graph] = weakref.WeakSet()


class Stream:
    def __init__(self, number: int) -> None:
        self.number = number

    def wait_stream(self, other: Any) -> None: ...

    def synchronize(self) -> None: ...


class Cuda:
    """Stands in the place of `torch.cuda`, for what `mmspec.compile.graphs` asks of it."""

    device = staticmethod(lambda *_: nullcontext())

    def __init__(self, rule: str) -> None:
        self.rule, self.books = rule, dict[tuple[int, int], Space]()
        self.numbers, self.handed = itertools.count(100), itertools.count()
        self.local = threading.local()

    def Stream(self, *_: Any) -> Stream:
        return Stream(next(self.handed) % 2)  # torch has 32, and hands them out over and over

    def unshared(self, device: Any) -> Stream:
        return Stream(next(self.numbers))

    def current_stream(self, *_: Any) -> Stream:
        return getattr(self.local, "stream", None) or Stream(-1)

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.local.stream = self.current_stream(), stream
        try:
            yield
        finally:
            self.local.stream = before

    def synchronize(self, *_: Any) -> None: ...

    def graph_pool_handle(self) -> Home:
        return Home()

    def CUDAGraph(self) -> Graph:
        return Graph(self)

    def multiplied(self, a: Tensor, b: Tensor) -> Tensor:
        """A product, which takes the work space of this thread and stream."""
        graph: Graph | None = getattr(self.local, "graph", None)
        key = threading.get_ident(), self.current_stream().number
        if key not in self.books or self.books[key].gone:
            self.books[key] = Space(graph and graph.home)
        if graph is not None:
            graph.spaces.append(self.books[key])
            self.books[key].users.add(graph.home)
        return torch.mm(a, b)

    def let_go(self, number: int) -> None:
        for (_, stream), space in self.books.items():
            space.gone |= stream == number and self.rule != "kept"


class Graph:
    """Recorded on a tape; it may be played while its memory, and that of its products, is what it was."""

    def __init__(self, cuda: Cuda) -> None:
        self.cuda, self.spaces = cuda, list[Space]()

    def capture_begin(self, pool: Home, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local", "other threads would be barred from CUDA"
        self.home, self.cuda.local.graph = pool, self
        pool.graphs.add(self)
        weakref.finalize(self, self.cuda.let_go, self.cuda.current_stream().number)
        self.mode = pretend_graphs.Taping(pool.memory)
        self.mode.__enter__()

    def capture_end(self) -> None:
        self.mode.__exit__(None, None, None)
        self.cuda.local.graph, self.calls, self.lent = None, self.mode.calls, self.mode.lent
        pretend_graphs.blank(self.calls)

    def replay(self) -> None:
        for space in self.spaces:
            gone = space.gone or (self.cuda.rule == "thread" and not space.thread.is_alive())
            if gone and (space.home is None or not space.home.graphs):
                raise pretend_graphs.Gone("a product's work space is not its own any more")
            if len([home for home in space.users if home.graphs]) > 1:
                raise pretend_graphs.Gone("two that may run at the same time share a work space")
        pretend_graphs._play(self.calls, self.lent, self.home.memory)
