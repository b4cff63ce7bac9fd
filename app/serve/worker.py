"""The thread that has the model: it lets prompts join the batch, runs rounds, and tells each prompt what it has."""

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

Progress = tuple[list[int], Stats, bool, Exception | None]  # tokens so far, their rounds, whether that is all, why not
Tell = Callable[[Progress], object]


class ModelThread:
    """Answers prompts from a Batcher, in a thread of its own; a context manager."""

    def __init__(self, batches: Batcher) -> None:
        self.batches = batches
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._open: set[Tell] = set()
        self._thread = threading.Thread(target=self._work, name="mmspec-worker", daemon=True)

    def __enter__(self) -> ModelThread:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._jobs.put(None)
        self._thread.join()

    async def answer(self, inputs: BatchFeature, seed: int, settings: dict[str, Any]) -> AsyncIterator[Progress]:
        """What a prompt has, after each round; closing the iterator frees its row. Raises what the model raised."""
        loop, updates = asyncio.get_running_loop(), asyncio.Queue[Progress]()

        def tell(progress: Progress) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(updates.put_nowait, progress)

        def begin() -> None:
            self._open.add(tell)
            self.batches.add(tell, inputs, seed, **settings)

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
            self._jobs.put(lambda: self._leave(tell))

    def _leave(self, tell: Tell) -> None:
        self._open.discard(tell)
        self.batches.cancel(tell)

    def _work(self) -> None:
        while True:
            with contextlib.suppress(Empty):
                while (job := self._jobs.get(block=not self.batches.busy)) is not None:
                    job()
                return
            try:
                with settled(self.batches.free > 0):
                    finished = self.batches.step()
            except Exception as error:  # not of one prompt, for the batcher sees to these
                for tell in [*self._open]:
                    self._leave(tell)
                    tell(([], Stats(), True, error))
                continue
            updates = [(end.ticket, (end.tokens, end.stats, True, end.error)) for end in finished]
            updates += [(ticket, (tokens, stats, False, None)) for ticket, tokens, stats in self.batches.written()]
            for ticket, progress in updates:
                ticket(progress)  # type: ignore[operator]
