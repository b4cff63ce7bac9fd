"""Small good clips for tests: coloured shapes that move, made by PyAV."""

from __future__ import annotations

import struct
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from PIL import Image, ImageDraw

COLOURS = ("red", "lime", "blue", "yellow", "magenta", "cyan", "white", "orange")


def moving_shape(place: int, size: tuple[int, int] = (64, 48)) -> Image.Image:
    """Frame `place` of the standard clip: a white square walks over a page whose colour changes every frame."""
    picture = Image.new("RGB", size, COLOURS[place % len(COLOURS)])
    left = place * 3 % max(1, size[0] - 12)
    ImageDraw.Draw(picture).rectangle((left, 8, left + 11, 19), fill="black")
    return picture


def grey_steps(count: int, size: tuple[int, int] = (64, 48)) -> list[Image.Image]:
    """Frames that say their own place: frame k is grey of level 16 + 4 k (see `place_of`), for up to 56 frames."""
    return [Image.new("RGB", size, (16 + 4 * place,) * 3) for place in range(count)]


def place_of(picture: Image.Image) -> int:
    """Which of `grey_steps` this is, after a lossy codec."""
    return round((float(np.asarray(picture.convert("L")).mean()) - 16) / 4)


def write_clip(
    path: Path | str,
    frames: int | list[Image.Image] = 16,
    fps: int = 8,
    codec: str = "mpeg4",
    *,
    gop: int = 6,
    sound: bool = False,
    faststart: bool = True,
    rotation: int = 0,
    times: list[int] | None = None,
) -> Path:
    """Write a clip of these frames (a number: so many of `moving_shape`); the container follows from the extension.

    Args:
        gop: frames from one key frame to the next.
        sound: whether a silent track goes with it.
        faststart: whether an MP4 has its index in front, so that a cut-off file can be read as far as it goes.
        rotation: degrees (0, 90, 180, 270) by which a player turns the MP4 against the clock.
        times: when each frame is shown, in units of 1 / fps; evenly spaced if left out.
    """
    path = Path(path)
    pictures = [moving_shape(place) for place in range(frames)] if isinstance(frames, int) else frames
    options = {"movflags": "faststart"} if faststart and path.suffix in (".mp4", ".mov") else {}
    with av.open(str(path), "w", options=options) as container:
        video = container.add_stream(codec, rate=fps)
        video.width, video.height = pictures[0].size if pictures else (64, 48)
        video.pix_fmt = "yuv420p"
        video.gop_size = gop
        video.options = {"qscale": "2", "flags": "qscale"} if codec == "mpeg4" else {}
        audio = container.add_stream("aac", rate=16000) if sound else None
        container.start_encoding()  # so that a clip of no frames is a file too
        for place, picture in enumerate(pictures):
            frame = av.VideoFrame.from_image(picture)
            frame.pts, frame.time_base = (times[place] if times else place), Fraction(1, fps)
            container.mux(video.encode(frame))
        container.mux(video.encode(None))
        if audio is not None:
            container.mux(audio.encode(_silence(1024)))
            container.mux(audio.encode(None))
    if rotation:
        path.write_bytes(turned(path.read_bytes(), rotation))
    return path


def write_sound(path: Path | str, codec: str = "aac") -> Path:
    """A file with sound and no video."""
    with av.open(str(path), "w") as container:
        audio = container.add_stream(codec, rate=16000, layout="mono")
        container.mux(audio.encode(_silence(16000)))
        container.mux(audio.encode(None))
    return Path(path)


def turned(data: bytes, rotation: int) -> bytes:
    """The MP4 with another display matrix in the header of its (first) track."""
    along, across = {90: (0, -1), 180: (-1, 0), 270: (0, 1)}[rotation]
    matrix = struct.pack(">9i", *(65536 * n for n in (along, across, 0, -across, along, 0, 0, 0)), 1 << 30)
    place = data.index(b"tkhd") + 4 + 4 + 20 + 8 + 8  # version 0: times, id, duration; reserved; layer to volume
    return data[:place] + matrix + data[place + 36 :]


def _silence(samples: int) -> av.AudioFrame:
    frame = av.AudioFrame.from_ndarray(np.zeros((1, samples), dtype=np.float32), format="fltp", layout="mono")
    frame.sample_rate, frame.pts = 16000, 0
    return frame
