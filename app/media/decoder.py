"""Decodes items in worker processes, so that a hostile file that hangs, crashes or fills memory only fails itself."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import pickle
import signal
import threading
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from PIL import Image

from mmspec.app.media.decode_worker import DecodeOrder, label, serve
from mmspec.app.media.video import FramePolicy
from mmspec.media import Media, MediaError, MediaLimits, raising

if TYPE_CHECKING:
    from mmspec.app.media.items import Item

AHEAD = 4  # items per worker process, whether waiting, being decoded or finished
HELD_BYTES = 512 * 2**20  # of finished frames that were not fetched; above this limit no new item is started
START_SECONDS = 300.0  # time limit for a process to start on a busy machine
TRIES = 2  # an earlier item may cause a later crash, so an item fails only after it crashed two processes


class DecoderError(Exception):
    """No item can be decoded at all."""


class DecodeJob(NamedTuple):
    ticket: Hashable
    label: str  # the item's name in messages
    packed: bytes  # the item, pickled


@dataclass(eq=False)
class DecodeWorker:
    """A process, the pipe to it, and the item that it decodes."""

    order: DecodeOrder
    process: Any = None
    pipe: Any = None  # a Connection
    started: bool = False
    job: DecodeJob | None = None

    def begin(self) -> None:
        self.pipe, theirs = multiprocessing.Pipe()
        self.started = False
        self.process = multiprocessing.get_context("spawn").Process(
            target=serve, args=(theirs, self.order), name="mmspec-decoder", daemon=True
        )
        try:
            self.process.start()
        finally:
            theirs.close()  # so that reading raises EOFError when the process ends

    def end(self, patience: float = 0) -> str:
        """End the process, after up to `patience` seconds in which it may exit by itself; returns how it ended."""
        if self.pipe is not None:
            self.pipe.close()
        if self.process is None or self.process.pid is None:
            return ""
        self.process.join(patience)
        self.process.kill()
        self.process.join()
        code = self.process.exitcode or 0
        with contextlib.suppress(ValueError):
            return signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return f"signal {-code}"

    def answers(self, seconds: float) -> bool:
        """Whether an answer arrives within so many seconds; the second poll finds one that arrived at the deadline."""
        return bool(self.pipe.poll(seconds) or self.pipe.poll(0))

    def ask(self, job: DecodeJob, seconds: float) -> Media | MediaError | None:
        """The decoded item or its error; None if it takes too long. EOFError or OSError if the process has died."""
        self.pipe.send_bytes(job.packed)
        if not self.answers(seconds):
            return None
        answer = json.loads(self.pipe.recv_bytes())
        sizes = answer.pop("frames", ())
        frames = tuple(Image.frombytes("RGB", size, self.pipe.recv_bytes(3 * size[0] * size[1])) for size in sizes)
        return MediaError(*answer["error"]) if "error" in answer else Media(frames, **answer)


class Decoder:
    """Takes items and returns decoded media or MediaErrors in the order in which they finish; a context manager.

    A thread for each process keeps it busy and enforces its time limit, whatever the caller does meanwhile. The process
    that creates a Decoder must not be a daemon of multiprocessing, since daemons cannot start processes.

    Args:
        workers: number of processes.
        max_side: frames are scaled down to fit into max_side x max_side before they leave their process.
    """

    def __init__(self, workers: int, limits: MediaLimits, frames: FramePolicy, max_side: int | None = None):
        order, self._limits = DecodeOrder(limits, frames, max_side), limits
        self._change = threading.Condition()
        self._waiting: deque[DecodeJob] = deque()
        self._done: deque[tuple[Hashable, Media | MediaError]] = deque()
        self._inside = 0  # items submitted and not yet returned
        self._held = 0  # bytes of finished frames
        self._trouble: BaseException | None = DecoderError("use a Decoder inside a `with` block")
        self._closing = False
        self._workers = [DecodeWorker(order) for _ in range(max(1, workers))]
        self._threads = [
            threading.Thread(target=self._keep_busy, args=(worker,), name="mmspec-decoder", daemon=True)
            for worker in self._workers
        ]

    def __enter__(self) -> Decoder:
        try:
            for worker in self._workers:
                worker.begin()
            self._trouble = None
            for thread in self._threads:
                thread.start()
        except BaseException:  # also Ctrl-C: `with` does not call __exit__ if __enter__ raises
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes, whatever they are doing."""
        with self._change:
            self._closing = True
            self._trouble = self._trouble or DecoderError("the Decoder has been closed")
            self._change.notify_all()
        for worker, thread in zip(self._workers, self._threads, strict=True):
            while thread.is_alive():  # a new process may just be starting
                with contextlib.suppress(AttributeError, OSError, ValueError):
                    worker.process.kill()
                thread.join(0.1)
            worker.end()

    @property
    def room(self) -> int:
        """How many more items may be submitted before finished ones are fetched."""
        return max(0, AHEAD * len(self._workers) - self._inside)

    def submit(self, ticket: Hashable, item: Item) -> None:
        """Queue an item; `ready` returns it with this ticket."""
        job = DecodeJob(ticket, label(item), pickle.dumps(item))
        with self._change:
            self._waiting.append(job)
            self._inside += 1
            self._change.notify_all()

    def ready(self, wait: float | None = 0) -> list[tuple[Hashable, Media | MediaError]]:
        """The finished items; waits up to `wait` seconds (None: no limit) for the first one, if any is pending."""
        with self._change:
            self._change.wait_for(lambda: self._done or not self._inside or self._trouble, wait)
            if self._trouble is not None:
                raise DecoderError(f"nothing can be decoded: {self._trouble}") from self._trouble
            finished = list(self._done)
            self._done.clear()
            self._inside -= len(finished)
            self._held = 0
            self._change.notify_all()
        return finished

    def one(self, item: Item) -> Media:
        """Decode one item, while no other is pending. MediaError if it cannot be decoded."""
        self.submit(item.name, item)
        ((_, outcome),) = self.ready(None)
        if isinstance(outcome, MediaError):
            raise outcome
        return outcome

    def _keep_busy(self, worker: DecodeWorker) -> None:
        try:
            self._start(worker)
            while not self._closing:
                with self._change:
                    self._change.wait_for(lambda: self._closing or (self._waiting and self._held <= HELD_BYTES))
                    if self._closing:
                        return
                    job = worker.job = self._waiting.popleft()
                outcome = self._decode(worker, job)
                with self._change:
                    worker.job = None
                    self._done.append((job.ticket, outcome))
                    if isinstance(outcome, Media):
                        self._held += sum(3 * frame.width * frame.height for frame in outcome.frames)
                    self._change.notify_all()
        except BaseException as error:  # `ready` raises it where the caller sees it
            with self._change:
                self._trouble = self._trouble or error
                self._change.notify_all()

    def _start(self, worker: DecodeWorker) -> None:
        """Wait until the process has started."""
        if worker.answers(START_SECONDS):
            with contextlib.suppress(OSError, EOFError):
                worker.pipe.recv_bytes()
                worker.started = True
                return
        how = worker.end(1)
        guard = "is the main program guarded by `if __name__ == '__main__':`?"
        raise DecoderError(f"a decoder process ended before it has started ({how}); {guard}")

    def _decode(self, worker: DecodeWorker, job: DecodeJob) -> Media | MediaError:
        """Decode one item, in a new process if the first one dies."""
        if not worker.process.is_alive():  # it died while it was idle, so no file is the cause
            self._replace(worker)
        for _ in range(TRIES):
            try:
                outcome = worker.ask(job, self._limits.seconds)
            except (OSError, EOFError):
                how = self._replace(worker, 1)
                continue
            if outcome is not None:
                return outcome
            self._replace(worker)
            reason = f"takes longer than {self._limits.seconds:g} s to decode"
            return MediaError(job.label, reason, f"make it smaller, {raising('--timeout')}")
        return MediaError(job.label, f"crashes the decoder ({how})", "save it again in another format, or leave it out")

    def _replace(self, worker: DecodeWorker, patience: float = 0) -> str:
        """Start a new process; returns how the last one ended."""
        how = worker.end(patience)
        if self._closing:
            raise DecoderError("the Decoder has been closed")
        worker.begin()
        self._start(worker)
        return how
