"""Videos that rows of questions and of training data show: their frames, decoded in a process of its own."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from PIL import Image

from mmspec import media
from mmspec.app.media.decoder import Decoder
from mmspec.app.media.items import VIDEO, BytesSource, Item
from mmspec.app.media.video import FramePolicy
from mmspec.media import MediaLimits

USUAL = "uniform:8"  # frames of a video, evenly spread
HELP = "frames of a video in the data: N evenly spread, fps:R or keyframes (%(default)s)"


def policy(text: str) -> FramePolicy:
    """The value of an option that chooses frames."""
    try:
        return FramePolicy.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


class VideoReader:
    """Reads one video at a time, as the captioner does, with its limits; a context manager.

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

    def __call__(self, held: object, folders: Sequence[Path], where: str) -> list[Image.Image]:
        """The frames of a cell: bytes, {bytes, path}, or the path of a file below one of these folders.

        Raises MediaError: it holds something else, or its video cannot be decoded.
        """
        data = media.cell(held, folders, where, MediaLimits().max_bytes)
        if self._decoder is None:
            assert self._open is not None, "a VideoReader works inside its `with` only"
            self._decoder = self._open.enter_context(Decoder(1, MediaLimits(), self.frames))
        return list(self._decoder.one(Item(where, VIDEO, BytesSource(data))).frames)
