"""A decoder process: it receives items through a pipe and answers with facts and frames, within its limits."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pickle
import signal
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

from mmspec import media
from mmspec.app.media import video
from mmspec.app.media.video import FramePolicy
from mmspec.media import Media, MediaError, MediaLimits

if TYPE_CHECKING:
    from mmspec.app.media.items import Item


@dataclass(frozen=True)
class DecodeOrder:
    """The settings of every worker process."""

    limits: MediaLimits
    frames: FramePolicy
    max_side: int | None


def serve(pipe: Connection, order: DecodeOrder) -> None:
    """The main function of a worker process: receive an item, answer with its frames, until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent decides when to stop
    for library in ("OMP", "OPENBLAS", "MKL"):  # numpy is loaded for few pictures only, and needs no threads
        os.environ[f"{library}_NUM_THREADS"] = "1"
    Image.MAX_IMAGE_PIXELS = max(Image.MAX_IMAGE_PIXELS or 0, order.limits.max_pixels)  # Pillow's own limit
    _limit_memory(order.limits.memory)
    with contextlib.suppress(OSError, EOFError):  # the parent has gone
        pipe.send_bytes(b"{}")
        while True:
            packed = pipe.recv_bytes()
            _set_alarm(order.limits.seconds + 5)
            answer, frames = _answer(packed, order)
            _set_alarm(0)
            pipe.send_bytes(json.dumps(answer).encode())
            for frame in frames:
                pipe.send_bytes(frame)


def _answer(packed: bytes, order: DecodeOrder) -> tuple[dict[str, Any], list[bytes]]:
    """The answer for an item: facts or an error as JSON data, never as a pickle; and the frames."""
    name = "item"
    try:
        item = pickle.loads(packed)
        name = label(item)
        done = _decode(item, order)
        facts = {name: getattr(done, name) for name in ("content", "seconds", "animated")}
        return {**facts, "frames": [frame.size for frame in done.frames]}, [frame.tobytes() for frame in done.frames]
    except MediaError as error:
        refusal = error
    except MemoryError:
        refusal = media.too_much_memory(name)
    except Exception as error:  # sources use other libraries, which may raise any error
        reason = f"cannot be read ({type(error).__name__}: {error})"
        refusal = MediaError(name, reason, "check the file, the disk and the network")
    return {"error": [str(refusal.path), refusal.reason, refusal.what_to_do]}, []


def _decode(item: Item, order: DecodeOrder) -> Media:
    limits, name = order.limits, label(item)
    data = item.source.read(limits.max_bytes)
    media.check_bytes(len(data), name, limits.max_bytes)
    content = hashlib.sha256(data).hexdigest()
    if item.kind == "video":
        frames, seconds = video.decode(data, name, order.frames, limits, order.max_side)
        return Media(frames, content, seconds=seconds)
    picture = media.decode(data, name, limits.max_pixels, order.max_side, limits.max_aspect, limits.max_area)
    more = media.animated(data, name, limits.max_pixels, limits.max_aspect)
    return Media((picture,), content, animated=more)


def label(item: Item) -> str:
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
