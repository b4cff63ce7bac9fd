"""A process that decodes: it reads items off a line, and answers with facts and frames, within its limits."""

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
    """What every worker process is told once."""

    limits: MediaLimits
    frames: FramePolicy
    max_side: int | None


def serve(line: Connection, order: DecodeOrder) -> None:
    """What a worker process does: read an item off the line, answer with its frames, until the line breaks."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent decides what ends
    for library in ("OMP", "OPENBLAS", "MKL"):  # numpy is loaded for few pictures, and needs no threads for them
        os.environ[f"{library}_NUM_THREADS"] = "1"
    Image.MAX_IMAGE_PIXELS = max(Image.MAX_IMAGE_PIXELS or 0, order.limits.max_pixels)  # Pillow's own limit
    _limit_memory(order.limits.memory)
    with contextlib.suppress(OSError, EOFError):  # the parent has gone
        line.send_bytes(b"{}")
        while True:
            packed = line.recv_bytes()
            _set_alarm(order.limits.seconds + 5)
            answer, frames = _answer(packed, order)
            _set_alarm(0)
            line.send_bytes(json.dumps(answer).encode())
            for frame in frames:
                line.send_bytes(frame)


def _answer(packed: bytes, order: DecodeOrder) -> tuple[dict[str, Any], list[bytes]]:
    """What goes back for an item: facts or an error as plain data, never as a pickle; and the frames."""
    name = "item"
    try:
        item = pickle.loads(packed)
        name = label(item)
        made = _decode(item, order)
        facts = {name: getattr(made, name) for name in ("content", "seconds", "animated")}
        return {**facts, "frames": [frame.size for frame in made.frames]}, [frame.tobytes() for frame in made.frames]
    except MediaError as error:
        refusal = error
    except MemoryError:
        refusal = media.too_much_memory(name)
    except Exception as error:  # a source is not ours, and may raise anything at all
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
    """How messages call an item."""
    return str(item.source.path or item.name)


def _limit_memory(room: int) -> None:
    """Let this process take so many bytes more than now, on systems that can count them."""
    with contextlib.suppress(ImportError, OSError, ValueError):  # Windows, macOS: only the limits on size and time hold
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + room
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _set_alarm(seconds: float) -> None:
    """Let the system end this process after a time (0: never), in case the parent is no longer there to do so."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, seconds)
