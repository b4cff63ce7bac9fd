"""Runs the processor in threads, so that the next inputs are prepared while the model generates."""

from __future__ import annotations

import copy
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from mmspec.pipelines.host.kinds import Processor


THREADS = 2  # per model; resizing and normalizing release the GIL


T = TypeVar("T")


class ProcessorThreads:
    """Threads that each use their own copy of a processor, since tokenizers are not thread-safe."""

    def __init__(self, processor: Processor, threads: int = THREADS):
        self._processor, self._own = processor, threading.local()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="mmspec-processor")

    def submit(self, job: Callable[[Processor], T]) -> Future[T]:
        def done() -> T:
            if not hasattr(self._own, "processor"):
                self._own.processor = copy.deepcopy(self._processor)
            return job(self._own.processor)

        return self._pool.submit(done)


class Preparing(Generic[T]):
    """Runs jobs in the threads, and returns their results or exceptions in the order of the jobs."""

    def __init__(self, threads: ProcessorThreads):
        self._threads = threads
        self._jobs: deque[tuple[Hashable, Future[T]]] = deque()

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, ticket: Hashable, job: Callable[[Processor], T]) -> None:
        self._jobs.append((ticket, self._threads.submit(job)))

    def ready(self, wait: int = 0) -> Iterator[tuple[Hashable, T | BaseException]]:
        """Results or exceptions of finished jobs up to the first unfinished one; waits for the first `wait` jobs."""
        while self._jobs and (wait > 0 or self._jobs[0][1].done()):
            ticket, future = self._jobs.popleft()
            yield ticket, future.exception() or future.result()
            wait -= 1
