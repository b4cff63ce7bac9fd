"""Frames of the videos in questions and training data, decoded in a separate process."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from PIL import Image

from mmspec import media
from mmspec.app.media.decoder import Decoder
from mmspec.app.media.items import VIDEO, Item, bytes_source
from mmspec.app.media.video import FramePolicy
from mmspec.media import MediaLimits

USUAL = "uniform:8"  # frames of a video, evenly spaced
HELP = "frames of a video in the data: N evenly spaced, fps:R or keyframes (%(default)s)"


def policy(text: str) -> FramePolicy:
    """Parse the value of an option that chooses frames."""
    try:
        return FramePolicy.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


class VideoReader:
    """Reads one video at a time, with the decoder and default limits of `mmspec caption`; a context manager.

    The process starts with the first video.
    """

    def __init__(self, frames: FramePolicy) -> None:
        self.frames = frames
        self.count = frames.most
        self._open: ExitStack | None = None
        self._decoder: Decoder | None = None

    def __enter__(self) -> VideoReader:
        self._open = ExitStack()
        return self

    def __exit__(self, *error: object) -> None:
        assert self._open is not None
        self._open.close()
        self._open = self._decoder = None

    def __call__(self, cell: object, folders: Sequence[Path], where: str) -> list[Image.Image]:
        """The frames of a cell: bytes, {bytes, path}, or the path of a file below one of these folders.

        Raises MediaError: the cell holds something else, or its video cannot be decoded.
        """
        data = media.cell(cell, folders, where, MediaLimits().max_bytes)
        if self._decoder is None:
            assert self._open is not None, "use a VideoReader inside a `with` block"
            self._decoder = self._open.enter_context(Decoder(1, MediaLimits(), self.frames))
        return list(self._decoder.one(Item(where, VIDEO, bytes_source(data))).frames)
