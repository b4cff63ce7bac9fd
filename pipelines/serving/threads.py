"""Prepares prompts in threads, while the model runs in another."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from mmspec.pipelines.host.kinds import Processor

THREADS = 2  # per model; resizing and normalizing release the GIL
T = TypeVar("T")


class ProcessorThreads:
    """Threads that each use their own copy of a processor, since tokenizers are not thread-safe."""

    def __init__(self, processor: Processor):
        self.processor, self._own = processor, threading.local()

        def begin() -> None:
            self._own.processor = copy.deepcopy(processor)

        self._pool = ThreadPoolExecutor(THREADS, "mmspec-processor", initializer=begin)

    def submit(self, job: Callable[[Processor], T]) -> Future[T]:
        return self._pool.submit(lambda: job(self._own.processor))
