"""What a question is about, decoded in a process of its own: a picture, or some frames of a video."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from PIL import Image

from mmspec.app.demo.answer import MAX_FRAMES, PICTURE, Ask
from mmspec.app.demo.desk import RefusedError
from mmspec.app.media.decoder import Decoder
from mmspec.app.media.items import FileSource, Item
from mmspec.app.media.video import FramePolicy, centres
from mmspec.media import MediaError, MediaLimits

# What a phone takes is let in, and made smaller before it leaves the process that decodes it.
LIMITS = MediaLimits(max_pixels=64_000_000, max_bytes=64 * 2**20, seconds=20.0, max_duration=120.0)
LONGEST = 1024  # pixels of a side that are handed on
PATIENCE = 0.2  # seconds between two looks whether the visitor has given up


def decoder() -> Decoder:
    """A context manager; inside, `look_at` works."""
    return Decoder(1, LIMITS, FramePolicy("uniform", MAX_FRAMES), max_side=LONGEST)


def look_at(ask: Ask, eyes: Decoder, stop: threading.Event) -> tuple[Image.Image, ...]:
    """The picture, or at most as many frames of the video as are asked for.

    Raises RefusedError: it cannot be used; the message says why, and what to do.
    """
    assert ask.media is not None
    ticket, end = object(), time.monotonic() + 2 * LIMITS.seconds
    eyes.submit(ticket, Item("upload", ask.kind, FileSource(Path(ask.media))))
    while not stop.is_set() and time.monotonic() < end:
        for whose, seen in eyes.ready(PATIENCE):
            if whose is not ticket:  # of a run that was given up
                continue
            if isinstance(seen, MediaError):
                raise RefusedError(f"This {ask.noun} {seen.reason}; {_advice(ask, seen)}.")
            return tuple(centres(seen.frames, ask.frames))
    raise RefusedError(f"The {ask.noun} was not read to its end.")


def _advice(ask: Ask, error: MediaError) -> str:
    """What a visitor can do, who has no command line: of the error's alternatives, those without one."""
    if ask.kind == PICTURE and "is a video" in error.reason:
        return "choose Video above and upload it there"
    ways = error.what_to_do.split(", or ")
    return ", or ".join(way for way in ways if "--" not in way and "install" not in way) or "choose another"
