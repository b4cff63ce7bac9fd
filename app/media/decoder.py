"""Decoding in processes of its own: a hostile file may hang, crash or swell there, and costs only itself."""

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
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, NamedTuple

from PIL import Image

from mmspec.app.media.decode_worker import DecodeOrder, label, serve
from mmspec.app.media.video import FramePolicy
from mmspec.media import Media, MediaError, MediaLimits, raising

if TYPE_CHECKING:
    from mmspec.app.media.items import Item

AHEAD = 4  # items in hand per worker process, whether waiting, running or finished
HELD_BYTES = 512 * 2**20  # of finished frames nobody has taken yet; above, nothing new is begun
START_SECONDS = 120.0  # for a process to start on a busy machine
STARTS = 3  # processes in a row that may fail to start before all is given up
TRIES = 2  # a crash may be the late fault of an earlier item, so an item has to crash two processes


class DecoderError(Exception):
    """No item can be decoded at all."""


class DecodeJob(NamedTuple):
    ticket: Hashable
    label: str  # how messages call the item
    packed: bytes  # the item, pickled


@dataclass(eq=False)
class DecodeWorker:
    """A process, the line to it, and the item that it is at."""

    order: DecodeOrder
    process: Any = None
    line: Connection | None = None
    started: bool = False
    job: DecodeJob | None = None

    def begin(self) -> None:
        self.line, theirs = multiprocessing.Pipe()
        self.started = False
        self.process = multiprocessing.get_context("spawn").Process(
            target=serve, args=(theirs, self.order), name="mmspec-decoder", daemon=True
        )
        try:
            self.process.start()
        finally:
            theirs.close()  # so that the line breaks when the process ends

    def end(self, patience: float = 0) -> str:
        """End the process, which may have `patience` seconds to do so itself; how it ended."""
        if self.line is not None:
            self.line.close()
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
        """Whether there is an answer within so many seconds; one that is there by then is never too late."""
        assert self.line is not None
        return self.line.poll(seconds) or self.line.poll(0)

    def ask(self, job: DecodeJob, seconds: float) -> Media | MediaError | None:
        """The item decoded, or why not; None if that takes too long. EOFError or OSError if the process has died."""
        assert self.line is not None
        self.line.send_bytes(job.packed)
        if not self.answers(seconds):
            return None
        answer = json.loads(self.line.recv_bytes())
        sizes = answer.pop("frames", ())
        frames = tuple(Image.frombytes("RGB", size, self.line.recv_bytes(3 * size[0] * size[1])) for size in sizes)
        return MediaError(*answer["error"]) if "error" in answer else Media(frames, **answer)


class Decoder:
    """Items in, decoded media or MediaErrors out, in the order in which they are ready; a context manager.

    A thread for each process keeps it busy and within its time, whatever the caller is doing meanwhile. The process
    that makes a Decoder must not be a daemon of multiprocessing, for those may start no others.

    Args:
        workers: processes.
        max_side: frames are made to fit into max_side x max_side before they leave their process.
    """

    def __init__(self, workers: int, limits: MediaLimits, frames: FramePolicy, max_side: int | None = None):
        order, self._limits = DecodeOrder(limits, frames, max_side), limits
        self._change = threading.Condition()
        self._waiting: deque[DecodeJob] = deque()
        self._done: deque[tuple[Hashable, Media | MediaError]] = deque()
        self._inside = 0  # items submitted and not yet handed back
        self._held = 0  # bytes of finished frames
        self._trouble: BaseException | None = DecoderError("a Decoder works inside its `with` only")
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
        except BaseException:  # Ctrl-C, too: `with` does not call __exit__ for it here
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes, whatever they are at."""
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
        """How many more items may be submitted before some are taken out."""
        return max(0, AHEAD * len(self._workers) - self._inside)

    def submit(self, ticket: Hashable, item: Item) -> None:
        """Have an item decoded; `ready` hands it back under this ticket."""
        job = DecodeJob(ticket, label(item), pickle.dumps(item))
        with self._change:
            self._waiting.append(job)
            self._inside += 1
            self._change.notify_all()

    def ready(self, wait: float | None = 0) -> list[tuple[Hashable, Media | MediaError]]:
        """What is finished; waits so many seconds (None: as long as it takes) for the first, if any is to come."""
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
        """An item decoded, where nothing else is inside. MediaError where that cannot be."""
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
        """Wait until the process has started, with a new one in the place of one that does not."""
        for _ in range(STARTS):
            late = not worker.answers(START_SECONDS)
            if not late:
                with contextlib.suppress(OSError, EOFError):
                    assert worker.line is not None
                    worker.line.recv_bytes()
                    worker.started = True
                    return
            how = worker.end(0 if late else 1)
            if self._closing:
                break
            worker.begin()
        what = "takes too long to start" if late else f"ends before it has started ({how})"
        guard = "does the main program guard itself by `if __name__ == '__main__':`?"
        raise DecoderError(f"a decoder process {what}; {guard}")

    def _decode(self, worker: DecodeWorker, job: DecodeJob) -> Media | MediaError:
        """One item, in another process if need be."""
        if not worker.process.is_alive():  # it died while it had nothing to do, so no file is to blame
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
        """A new process; how the last one ended."""
        how = worker.end(patience)
        if self._closing:
            raise DecoderError("the Decoder has been closed")
        worker.begin()
        self._start(worker)
        return how
