"""Decoding in processes of its own: a hostile file may hang, crash or swell there, and costs only itself."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import pickle
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any, NamedTuple

from PIL import Image

from mmspec.app.media.decode_worker import DecodeOrder, label, read, receive, send, serve
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
    """An item on its way."""

    ticket: Hashable
    label: str  # how messages call the item
    packed: bytes  # the item, pickled
    tries: int = 0


@dataclass(eq=False)
class DecodeWorker:
    """A process, our end of the line to it, and what it has to finish by when."""

    process: Any
    line: socket.socket
    deadline: float
    started: bool = False
    job: DecodeJob | None = None


class Decoder:
    """Items in, decoded media or MediaErrors out, in the order in which they are ready; a context manager.

    A thread of ours keeps the processes busy and within their time, whatever the caller is doing meanwhile. The process
    that makes a Decoder must not be a daemon of multiprocessing, for those may start no others.

    Args:
        workers: processes.
        max_side: frames are made to fit into max_side x max_side before they leave their process.
    """

    def __init__(self, workers: int, limits: MediaLimits, frames: FramePolicy, max_side: int | None = None):
        self._order = DecodeOrder(limits, frames, max_side)
        self._count = max(1, workers)
        self._change = threading.Condition()
        self._waiting: deque[DecodeJob] = deque()
        self._done: deque[tuple[Hashable, Media | MediaError]] = deque()
        self._inside = 0  # items submitted and not yet handed back
        self._held = 0  # bytes of finished frames
        self._starts_failed = 0
        self._trouble: BaseException | None = DecoderError("a Decoder works inside its `with` only")
        self._workers: list[DecodeWorker] = []
        self._closing = False
        self._bell, self._rope = socket.socketpair()  # pulling the rope wakes the thread
        self._thread = threading.Thread(target=self._keep_going, name="mmspec-decoder", daemon=True)

    def __enter__(self) -> Decoder:
        try:
            for _ in range(self._count):
                self._workers.append(self._hire())
            self._trouble = None
            self._thread.start()
        except BaseException:  # Ctrl-C, too: `with` does not call __exit__ for it here
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes, whatever they are at."""
        self._closing = True
        try:
            self._pull()
            if self._thread.is_alive():
                self._thread.join(5)
        finally:
            self._trouble = self._trouble or DecoderError("the Decoder has been closed")
            for worker in self._workers:
                _dismiss(worker)
            self._workers.clear()
            self._bell.close()
            self._rope.close()

    @property
    def room(self) -> int:
        """How many more items may be submitted before some are taken out."""
        return max(0, AHEAD * self._count - self._inside)

    def submit(self, ticket: Hashable, item: Item) -> None:
        """Have an item decoded; `ready` hands it back under this ticket."""
        job = DecodeJob(ticket, label(item), pickle.dumps(item))
        with self._change:
            self._waiting.append(job)
            self._inside += 1
        self._pull()

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
        if finished:
            self._pull()
        return finished

    def _pull(self) -> None:
        with contextlib.suppress(OSError):  # closed, or so full that it rings anyway
            self._rope.send(b"!", getattr(socket, "MSG_DONTWAIT", 0))

    def _keep_going(self) -> None:
        try:
            while not self._closing:
                self._hand_out()
                deadline = min(worker.deadline for worker in self._workers)
                lines: dict[Any, DecodeWorker] = {worker.line: worker for worker in self._workers}
                left = None if deadline == float("inf") else max(0.0, deadline - time.monotonic())
                for line in wait([*lines, self._bell], left):
                    if line is self._bell:
                        self._bell.recv(4096)
                    else:
                        self._listen(lines[line])
                for worker in list(self._workers):
                    if worker.deadline < time.monotonic() and not wait([worker.line], 0):  # it answered, unheard as yet
                        self._replace(worker, timed_out=True)
        except BaseException as error:  # `ready` raises it where the caller sees it
            with self._change:
                self._trouble = error
                self._change.notify_all()

    def _hand_out(self) -> None:
        for worker in list(self._workers):
            with self._change:
                if not worker.started or worker.job or not self._waiting or self._held > HELD_BYTES:
                    continue
                worker.job = self._waiting.popleft()
            worker.deadline = time.monotonic() + self._order.limits.seconds
            try:
                send(worker.line, worker.job.packed)
            except OSError:  # it died while it had nothing to do, so no file is to blame
                with self._change:
                    self._waiting.appendleft(worker.job)
                worker.job = None
                self._replace(worker)

    def _listen(self, worker: DecodeWorker) -> None:
        try:
            answer = json.loads(receive(worker.line))
            sizes = answer.pop("frames", ())
            pictures = tuple(Image.frombytes("RGB", size, read(worker.line, 3 * size[0] * size[1])) for size in sizes)
        except (OSError, EOFError):
            self._replace(worker)
            return
        worker.deadline = float("inf")
        job, worker.job = worker.job, None
        if job is None:
            worker.started, self._starts_failed = True, 0
            return
        self._finish(job, MediaError(*answer["error"]) if "error" in answer else Media(pictures, **answer))

    def _finish(self, job: DecodeJob, outcome: Media | MediaError) -> None:
        with self._change:
            self._done.append((job.ticket, outcome))
            if isinstance(outcome, Media):
                self._held += sum(3 * frame.width * frame.height for frame in outcome.frames)
            self._change.notify_all()

    def _replace(self, worker: DecodeWorker, timed_out: bool = False) -> None:
        """Put a new process in the place of one that died or takes too long, and settle what it was at."""
        if not timed_out:
            worker.process.join(1)  # its line is broken, so it is ending; how, is worth knowing
        code = _dismiss(worker)
        self._workers.remove(worker)
        if not worker.started:
            self._starts_failed += 1
            if self._starts_failed >= STARTS:
                how = "takes too long to start" if timed_out else f"ends before it has started ({_end(code)})"
                guard = "does the main program guard itself by `if __name__ == '__main__':`?"
                raise DecoderError(f"a decoder process {how}; {guard}")
        self._workers.append(self._hire())
        job = worker.job
        if job is None:
            return
        if timed_out:
            reason = f"takes longer than {self._order.limits.seconds:g} s to decode"
            self._finish(job, MediaError(job.label, reason, f"make it smaller, {raising('--timeout')}"))
        elif job.tries + 1 < TRIES:
            with self._change:
                self._waiting.appendleft(job._replace(tries=job.tries + 1))
        else:
            reason = f"crashes the decoder ({_end(code)})"
            self._finish(job, MediaError(job.label, reason, "save it again in another format, or leave it out"))

    def _hire(self) -> DecodeWorker:
        ours, theirs = socket.socketpair()
        process = multiprocessing.get_context("spawn").Process(
            target=serve, args=(theirs, self._order), name="mmspec-decoder", daemon=True
        )
        try:
            process.start()
        finally:
            theirs.close()  # so that the line breaks when the process ends
        return DecodeWorker(process, ours, time.monotonic() + START_SECONDS)


def _dismiss(worker: DecodeWorker) -> int | None:
    """End a process and leave nothing of it; its exit code."""
    worker.line.close()
    worker.process.kill()
    worker.process.join()
    code = worker.process.exitcode
    worker.process.close()
    return code


def _end(code: int | None) -> str:
    if code is None or code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-code).name
    return f"signal {-code}"
