"""Decodes items in worker processes, so that a hostile file that hangs, crashes or fills memory only fails itself."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import pickle
import signal
import threading
import time
from collections.abc import Sequence
from concurrent import futures
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Self

from PIL import Image

from mmspec import media
from mmspec.app.extras import end_process, start_process
from mmspec.app.media import video
from mmspec.app.media.items import VIDEO, Item, bytes_source
from mmspec.app.media.video import FramePolicy
from mmspec.media import Media, MediaError, MediaLimits, raising

HELD_BYTES = 512 * 2**20  # of finished frames that were not fetched; above this limit no new item is started
START_SECONDS = 300.0  # time limit for a process to start on a busy machine
TRIES = 2  # an earlier item may cause a later crash, so an item fails only after it crashed two processes
USUAL = "uniform:8"  # frames of a video, evenly spaced
HELP = "frames of a video in the data: N evenly spaced, fps:R or keyframes (%(default)s)"


class DecoderError(Exception):
    """No item can be decoded at all."""


def serve(pipe: Connection, limits: MediaLimits, policy: FramePolicy, max_side: int | None) -> None:
    """The main function of a worker process: receive an item, answer with its frames, until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent decides when to stop
    for library in ("OMP", "OPENBLAS", "MKL"):  # numpy is loaded for few pictures only, and needs no threads
        os.environ[f"{library}_NUM_THREADS"] = "1"
    Image.MAX_IMAGE_PIXELS = max(Image.MAX_IMAGE_PIXELS or 0, limits.max_pixels)  # Pillow's own limit
    _limit_memory(limits.memory)
    with contextlib.suppress(OSError, EOFError):  # the parent has gone
        pipe.send(None)  # it has started
        while True:
            packed = pipe.recv_bytes()
            _set_alarm(limits.seconds + 5)
            outcome = _outcome(packed, limits, policy, max_side)
            frames = outcome.frames if isinstance(outcome, Media) else ()
            facts = replace(outcome, frames=()) if isinstance(outcome, Media) else outcome
            pipe.send((facts, [frame.size for frame in frames]))
            for frame in frames:
                pipe.send_bytes(frame.tobytes())
            _set_alarm(0)


def _outcome(packed: bytes, limits: MediaLimits, policy: FramePolicy, max_side: int | None) -> Media | MediaError:
    name = "item"
    try:
        item = pickle.loads(packed)
        name = _label(item)
        data = item.source.read(limits.max_bytes)
        media.check_bytes(len(data), name, limits.max_bytes)
        content = hashlib.sha256(data).hexdigest()
        if item.kind == VIDEO:
            frames, seconds = video.decode(data, name, policy, limits, max_side)
            return Media(frames, content, seconds=seconds)
        picture = media.decode(data, name, limits.max_pixels, max_side, limits.max_aspect, limits.max_area)
        return Media((picture,), content)
    except MediaError as error:  # copied, since its traceback keeps the bytes of the file in memory
        return MediaError(error.path, error.reason, error.what_to_do)
    except MemoryError:
        return media.too_much_memory(name)
    except Exception as error:  # sources use other libraries, which may raise any error
        reason = f"cannot be read ({type(error).__name__}: {error})"
        return MediaError(name, reason, "check the file, the disk and the network")


def _label(item: Item) -> str:
    """The name of an item in messages."""
    return str(item.source.path or item.name)


def _limit_memory(room: int) -> None:
    """Limit this process to so many bytes more than it uses now, where the system supports it."""
    with contextlib.suppress(ImportError, OSError, ValueError):  # Windows, macOS: only size and time are limited
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + room
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _set_alarm(seconds: float) -> None:
    """Let the system end this process after a time (0: never), in case the parent is gone and cannot."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, seconds)


class DecodeWorker:
    """A process that decodes one item at a time; it is started for the first item, and again after it has died."""

    def __init__(self, limits: MediaLimits, *more: object):
        self.limits, self.more, self.closed = limits, more, False
        self.process: Any = None
        self.pipe: Any = None  # a Connection

    def decode(self, item: Item) -> Media | MediaError:
        """Decode one item, in a new process if the first one dies."""
        name, seconds, how = _label(item), self.limits.seconds, ""
        for _ in range(TRIES):
            if self.process is None or not self.process.is_alive():  # it may have died while it was idle
                self._start()
            try:
                self.pipe.send(item)
                if self._answers(seconds):
                    return self._received()
            except (OSError, EOFError):
                how = self.end(1)
                continue
            self.end()
            return MediaError(
                name, f"takes longer than {seconds:g} s to decode", f"make it smaller, {raising('--timeout')}"
            )
        return MediaError(name, f"crashes the decoder ({how})", "save it again in another format, or leave it out")

    def kill(self) -> None:
        """Kill the process, whatever its thread is doing; no other one is started."""
        self.closed = True
        with contextlib.suppress(AttributeError):  # not started
            self.process.kill()

    def end(self, patience: float = 0) -> str:
        """End the process; returns how it ended."""
        if self.process is None:
            return ""
        self.pipe.close()
        process, self.process = self.process, None
        return end_process(process, patience)

    def _start(self) -> None:
        if self.closed:
            raise DecoderError("the Decoder has been closed")
        self.end()
        self.process, self.pipe = start_process(serve, self.limits, *self.more, daemon=True)
        with contextlib.suppress(OSError, EOFError):
            if self._answers(START_SECONDS):
                self.pipe.recv()
                return
        how = self.end(1)
        guard = "is the main program guarded by `if __name__ == '__main__':`?"
        raise DecoderError(f"nothing can be decoded: a decoder process ended before it has started ({how}); {guard}")

    def _answers(self, seconds: float) -> bool:
        """Whether an answer arrives within so many seconds; the second poll finds one that arrived at the deadline."""
        return bool(self.pipe.poll(seconds) or self.pipe.poll(0))

    def _received(self) -> Media | MediaError:
        facts, sizes = self.pipe.recv()
        frames = tuple(Image.frombytes("RGB", size, self.pipe.recv_bytes(3 * size[0] * size[1])) for size in sizes)
        return replace(facts, frames=frames) if isinstance(facts, Media) else facts


class Decoder:
    """Takes items and returns decoded media or MediaErrors as they finish; a context manager.

    A thread for each process keeps it busy and enforces its time limit, whatever the caller does meanwhile. The process
    that creates a Decoder must not be a daemon of multiprocessing, since daemons cannot start processes.

    Args:
        workers: maximum number of processes; they are started when items are submitted.
        max_side: frames are scaled down to fit into max_side x max_side before they leave their process.
    """

    def __init__(self, workers: int, limits: MediaLimits, frames: FramePolicy, max_side: int | None = None):
        self._workers = [DecodeWorker(limits, frames, max_side) for _ in range(max(1, workers))]
        self._idle: SimpleQueue[DecodeWorker] = SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = futures.ThreadPoolExecutor(len(self._workers), "mmspec-decoder")
        self._pending: dict[futures.Future[Media | MediaError], Any] = {}  # tickets
        self._held = 0  # bytes of finished frames that were not fetched
        self._fetched = threading.Condition()
        self._closing = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes, whatever they are doing."""
        self._closing = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._fetched:
            self._fetched.notify_all()
        for worker in self._workers:
            worker.kill()
        while self._idle.qsize() < len(self._workers):  # a new process may just be starting
            time.sleep(0.01)
            for worker in self._workers:
                worker.kill()
        for worker in self._workers:
            worker.end()

    @property
    def pending(self) -> int:
        """Number of items that were submitted and not yet fetched."""
        return len(self._pending)

    def submit(self, ticket: Any, item: Item) -> None:
        """Queue an item; `ready` returns it with this ticket."""
        self._pending[self._threads.submit(self._decode, item)] = ticket

    def ready(self, wait: float | None = 0) -> list[tuple[Any, Media | MediaError]]:
        """The finished items; waits up to `wait` seconds (None: no limit) for the first one, if any is pending."""
        futures.wait(self._pending, wait, futures.FIRST_COMPLETED)
        return [(self._pending.pop(one), self._fetch(one)) for one in list(self._pending) if one.done()]

    def one(self, item: Item) -> Media:
        """Decode one item; may be called by several threads at once. MediaError if it cannot be decoded."""
        return self._decoded(self._threads.submit(self._decode, item))

    async def awaited(self, item: Item) -> Media:
        """The same for a coroutine, which may be cancelled."""
        future = self._threads.submit(self._decode, item)
        try:
            await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if not future.cancel():
                future.add_done_callback(self._fetch)
            raise
        return self._decoded(future)

    def _decoded(self, future: futures.Future[Media | MediaError]) -> Media:
        outcome = self._fetch(future)
        if isinstance(outcome, MediaError):
            raise outcome
        return outcome

    def _fetch(self, future: futures.Future[Media | MediaError]) -> Media | MediaError:
        outcome = future.result()
        with self._fetched:
            self._held -= _size(outcome)
            self._fetched.notify_all()
        return outcome

    def _decode(self, item: Item) -> Media | MediaError:
        with self._fetched:
            self._fetched.wait_for(lambda: self._closing or self._held <= HELD_BYTES)
        worker = self._idle.get()
        try:
            outcome = worker.decode(item)
        finally:
            self._idle.put(worker)
        with self._fetched:
            self._held += _size(outcome)
        return outcome


class VideoReader(Decoder):
    """Reads one video at a time, with the default limits of `mmspec caption`; a context manager."""

    def __init__(self, frames: FramePolicy) -> None:
        super().__init__(1, MediaLimits(), frames)
        self.frames, self.count = frames, frames.most

    def __call__(self, cell: object, folders: Sequence[Path], where: str) -> list[Image.Image]:
        """The frames of a cell: bytes, {bytes, path}, or the path of a file below one of these folders.

        Raises MediaError: the cell holds something else, or its video cannot be decoded.
        """
        data = media.cell(cell, folders, where, MediaLimits().max_bytes)
        return list(self.one(Item(where, VIDEO, bytes_source(data))).frames)


def _size(outcome: Media | MediaError) -> int:
    """Bytes of the frames."""
    frames = outcome.frames if isinstance(outcome, Media) else ()
    return sum(3 * frame.width * frame.height for frame in frames)
