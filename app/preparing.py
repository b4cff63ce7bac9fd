"""The processor's work in threads of its own: while the model writes, the next pictures become its inputs."""

from __future__ import annotations

import copy
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from mmspec.pipelines.host.kinds import Processor


THREADS = 2  # a model; resizing and normalizing leave Python's lock alone


T = TypeVar("T")


class ProcessorThreads:
    """Threads that each work with a copy of a processor of transformers: tokenizers are not safe to share."""

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
    """Jobs in, what they give or raise out, in the order of the jobs."""

    def __init__(self, threads: ProcessorThreads):
        self._threads = threads
        self._jobs: deque[tuple[Hashable, Future[T]]] = deque()

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, ticket: Hashable, job: Callable[[Processor], T]) -> None:
        self._jobs.append((ticket, self._threads.submit(job)))

    def ready(self, wait: int = 0) -> Iterator[tuple[Hashable, T | BaseException]]:
        """What is done, from the first job on, an exception in the place of what it raised; waits for so many."""
        while self._jobs and (wait > 0 or self._jobs[0][1].done()):
            ticket, future = self._jobs.popleft()
            yield ticket, future.exception() or future.result()
            wait -= 1
