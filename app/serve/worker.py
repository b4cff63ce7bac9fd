"""The model's thread: adds requests to the batch, runs rounds, and sends each request its tokens so far."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from queue import Empty, SimpleQueue
from typing import Any

from mmspec.compile.capture_cache import settled
from mmspec.pipelines.host.kinds import BatchFeature
from mmspec.pipelines.serving.batcher import Batcher
from mmspec.statistics import Stats

Progress = tuple[list[int], Stats, bool, Exception | None]  # tokens so far, stats of their rounds, done, error
Send = Callable[[Progress], object]


class ModelThread:
    """Runs a Batcher in a separate thread; a context manager."""

    def __init__(self, batches: Batcher) -> None:
        self.batches = batches
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._open: set[Send] = set()
        self._thread = threading.Thread(target=self._work, name="mmspec-worker", daemon=True)

    def __enter__(self) -> ModelThread:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._jobs.put(None)
        self._thread.join()

    async def answer(self, inputs: BatchFeature, seed: int, settings: dict[str, Any]) -> AsyncIterator[Progress]:
        """Yield a request's progress after each round; closing the iterator frees its row. Raises its errors."""
        loop, updates = asyncio.get_running_loop(), asyncio.Queue[Progress]()

        def send(progress: Progress) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(updates.put_nowait, progress)

        def begin() -> None:
            self._open.add(send)
            self.batches.add(send, inputs, seed, **settings)

        self._jobs.put(begin)
        try:
            done = False
            while not done:
                progress = await updates.get()
                _, _, done, error = progress
                if error is not None:
                    raise error
                yield progress
        finally:
            self._jobs.put(lambda: self._leave(send))

    def _leave(self, send: Send) -> None:
        self._open.discard(send)
        self.batches.cancel(send)

    def _work(self) -> None:
        while True:
            with contextlib.suppress(Empty):
                while (job := self._jobs.get(block=not self.batches.busy)) is not None:
                    job()
                return
            try:
                with settled(self.batches.free > 0):
                    finished = self.batches.step()
            except Exception as error:  # of the whole batch, since the batcher handles errors of single prompts
                for send in [*self._open]:
                    self._leave(send)
                    send(([], Stats(), True, error))
                continue
            updates = [(end.ticket, (end.tokens, end.stats, True, end.error)) for end in finished]
            updates += [(ticket, (tokens, stats, False, None)) for ticket, tokens, stats in self.batches.written()]
            for ticket, progress in updates:
                ticket(progress)  # type: ignore[operator]
