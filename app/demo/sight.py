"""Decodes the picture of a question, or frames of its video, in a separate process."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from PIL import Image

from mmspec.app.demo.answer import MAX_FRAMES, PICTURE, Ask
from mmspec.app.demo.desk import RefusedError
from mmspec.app.media.decoder import Decoder
from mmspec.app.media.items import Item, file_source
from mmspec.app.media.video import FramePolicy, centres
from mmspec.media import MediaError, MediaLimits

# Photos and videos of phones are allowed, and scaled down before they leave the decoder process.
LIMITS = MediaLimits(max_pixels=64_000_000, max_bytes=64 * 2**20, seconds=20.0, max_duration=120.0)
LONGEST = 1024  # maximum side of the scaled picture, in pixels
PATIENCE = 0.2  # seconds between two checks whether the visitor has stopped the run


def decoder() -> Decoder:
    """The decoder for `look_at`, a context manager."""
    return Decoder(1, LIMITS, FramePolicy("uniform", MAX_FRAMES), max_side=LONGEST)


def look_at(ask: Ask, decoder: Decoder, stop: threading.Event) -> tuple[Image.Image, ...]:
    """The picture, or at most `ask.frames` frames of the video.

    Raises RefusedError: it cannot be used; the message says why, and what to do.
    """
    assert ask.media is not None
    ticket, end = object(), time.monotonic() + 2 * LIMITS.seconds
    decoder.submit(ticket, Item("upload", ask.kind, file_source(Path(ask.media))))
    while not stop.is_set() and time.monotonic() < end:
        for whose, media in decoder.ready(PATIENCE):
            if whose is not ticket:  # left over from a stopped run
                continue
            if isinstance(media, MediaError):
                raise RefusedError(f"This {ask.noun} {media.reason}; {_advice(ask, media)}.")
            return tuple(centres(media.frames, ask.frames))
    raise RefusedError(f"The {ask.noun} was not read completely.")


def _advice(ask: Ask, error: MediaError) -> str:
    """Those of the error's suggestions that a visitor can follow without the command line."""
    if ask.kind == PICTURE and "is a video" in error.reason:
        return "choose Video above and upload it there"
    ways = error.what_to_do.split(", or ")
    return ", or ".join(way for way in ways if "--" not in way and "install" not in way) or "choose another"
