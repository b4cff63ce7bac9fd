"""Decodes frames of a video: chosen by a policy, upright, in RGB."""

from __future__ import annotations

import argparse
import contextlib
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from PIL import Image

from mmspec import media
from mmspec.media import COPY_AGAIN, MediaError, MediaLimits

if TYPE_CHECKING:  # a run with images only never loads FFmpeg
    from av.container import InputContainer
    from av.packet import Packet as AnyPacket
    from av.video.frame import VideoFrame
    from av.video.stream import VideoStream

# Containers that FFmpeg may open. Playlists (HLS, DASH, concat) are excluded, since they name other files and URLs.
CONTAINERS = "mov,matroska,avi,mpegts,mpeg,mpegvideo,flv,asf,ogg,gif,apng,mp3,wav,flac,aac"
FULL_HD = 1920 * 1080
T = TypeVar("T")
MAX_FRAMES, MAX_RATE = 32, 1000  # frames of one video, and of one second of it
CONVERT = "convert it to MP4 (ffmpeg -i IN OUT.mp4)"


@dataclass(frozen=True)
class FramePolicy:
    kind: str = "uniform"  # or "fps", "keyframes"
    rate: float = 8  # frames for "uniform", frames per second for "fps"
    max_frames: int = MAX_FRAMES

    @classmethod
    def parse(cls, text: str, max_frames: int = MAX_FRAMES) -> FramePolicy:
        """Parse "8" or "uniform:8", "fps:2" or "keyframes"; ArgumentTypeError for anything else."""
        kind, _, number = f"uniform:{text}".partition(":") if text.isdecimal() else text.partition(":")
        try:
            rate = float(number) if number else 0.0 if kind == "keyframes" else -1.0
        except ValueError:
            rate = -1.0
        fits = {"uniform": rate >= 1 and rate.is_integer(), "fps": 0 < rate <= MAX_RATE, "keyframes": not number}
        if not fits.get(kind) or max_frames < 1:
            raise argparse.ArgumentTypeError(
                f"unknown frame policy {text!r} (at most {max_frames} frames); choose N (frames, evenly spaced; "
                "or uniform:N), fps:R (R frames a second) or keyframes, and at least 1 frame"
            )
        return cls(kind, rate, max_frames)

    @property
    def most(self) -> int:
        """Maximum number of frames of one video."""
        return min(int(self.rate), self.max_frames) if self.kind == "uniform" else self.max_frames

    @property
    def named(self) -> str:
        """The policy as text that `parse` reads; for "uniform" with the limit applied."""
        return {"uniform": f"uniform:{self.most}", "fps": f"fps:{self.rate:g}"}.get(self.kind, self.kind)

    def choose(self, times: Sequence[float], keys: Sequence[bool]) -> list[int]:
        """Indices of the frames to take, given the time (s) of every frame and whether it is a key frame."""
        if self.kind == "fps":
            chosen: Sequence[int] = _ticks(times, self.rate)
        elif self.kind == "keyframes":
            chosen = [place for place, key in enumerate(keys) if key]
        else:
            chosen = centres(range(len(times)), self.most)
        return centres(chosen, self.max_frames)


class Packet(NamedTuple):
    """What the container says about one frame, before anything is decoded."""

    pts: int
    key: bool
    run: int  # number of key frames up to and including this packet; a run can be decoded without earlier ones


def decode(
    data: bytes, path: Path | str, policy: FramePolicy, limits: MediaLimits, max_side: int | None = None
) -> tuple[tuple[Image.Image, ...], float]:
    """The chosen frames and the length in seconds; fewer frames if the video has fewer, or if its end is damaged.

    It passes twice over the data: the first pass reads all times and decodes nothing, the second one decodes what is
    needed.
    """
    with _opened(data, path, limits) as (container, stream):
        packets = list(_packets(container, stream))
        shown = sorted(packets)
        if not shown:
            raise MediaError(path, "is a video without a single frame", COPY_AGAIN)
        if len(shown) < stream.frames / 2:
            raise MediaError(path, f"is cut off: {len(shown)} of its {stream.frames} frames are there", COPY_AGAIN)
        base = float(stream.time_base or 0)
        times = [(packet.pts - shown[0].pts) * base for packet in shown]
        seconds = times[-1] + (float(1 / stream.average_rate) if stream.average_rate else 0.0)
        _check_length(seconds, (stream.width, stream.height), path, limits)
        wanted = [shown[place] for place in policy.choose(times, [packet.key for packet in shown])]
    missing = {packet.pts for packet in wanted}
    count, pictures = len(missing), []
    with _opened(data, path, limits) as (container, stream):
        for frame in _frames(container, stream, _runs(packets, wanted)):
            if frame.pts in missing and not frame.is_corrupt:
                media.check_size((frame.width, frame.height), path, limits.max_pixels, limits.max_aspect)
                missing.remove(frame.pts)
                pictures.append(_picture(frame, max_side))
            if not missing:
                break
    if not pictures or 2 * len(pictures) < count:
        raise MediaError(path, f"is damaged: {len(pictures)} of {count} frames can be decoded", COPY_AGAIN)
    return tuple(pictures), seconds


@contextlib.contextmanager
def _opened(data: bytes, path: Path | str, limits: MediaLimits) -> Iterator[tuple[InputContainer, VideoStream]]:
    """Open a container and its video stream; all errors of FFmpeg inside the block become MediaErrors."""
    import av
    from av.stream import Disposition

    rules = {"format_whitelist": CONTAINERS, "protocol_whitelist": "none"}  # it may read only these bytes
    try:
        with av.open(io.BytesIO(data), "r", container_options=rules, metadata_errors="replace") as container:
            covers = Disposition.attached_pic
            stream = next((one for one in container.streams.video if not one.disposition & covers), None)
            if stream is None:
                raise MediaError(path, "has no video in it", "leave it out")
            codec = stream.codec_context
            if codec is None:
                raise MediaError(path, "has a video codec that cannot be decoded here", CONVERT)
            if not stream.width or not stream.height:
                raise MediaError(path, "is damaged: the size of its frames is missing", COPY_AGAIN)
            media.check_size((stream.width, stream.height), path, limits.max_pixels, limits.max_aspect)
            codec.thread_count = 1  # the processes run in parallel; threads would only cost memory
            # Frames may declare another size than the header; and damaged frames shall be dropped, not concealed.
            codec.options = {"max_pixels": str(limits.max_pixels), "err_detect": "explode"}
            yield container, stream
    except MediaError:
        raise
    except MemoryError as error:  # av.error.MemoryError is a subclass
        raise media.too_much_memory(path) from error
    except Exception as error:  # hostile bytes may make the demuxer raise any error
        why = f"{type(error).__name__}: {getattr(error, 'strerror', None) or error}"
        raise MediaError(path, f"is damaged, cut off or no video ({why})", f"{COPY_AGAIN}, or {CONVERT}") from error


def _packets(container: InputContainer, stream: VideoStream) -> Iterator[Packet]:
    """All frames of the file in file order, up to the first place that cannot be read."""
    run = 0
    for packet in _until_broken(container.demux(stream)):
        pts = packet.dts if packet.pts is None else packet.pts
        run += packet.is_keyframe
        if pts is not None and packet.size and not packet.is_discard:
            yield Packet(pts, packet.is_keyframe, run)


def _runs(packets: list[Packet], wanted: list[Packet]) -> set[int]:
    """The runs to decode: those of these frames, and the previous run if a frame is shown before its key frame."""
    starts = {packet.run: packet.pts for packet in packets if packet.key}
    before = {packet.run - 1 for packet in wanted if packet.pts < starts.get(packet.run, packet.pts)}
    return before | {packet.run for packet in wanted}


def _frames(container: InputContainer, stream: VideoStream, runs: set[int]) -> Iterator[VideoFrame]:
    """The decoded frames of these runs, each run in display order."""
    run, begun = 0, False
    for packet in _until_broken(container.demux(stream)):
        run += packet.is_keyframe
        if packet.size and run in runs:
            begun = True
            yield from _until_broken(_decoded(stream, packet))
        elif begun:
            yield from _until_broken(_decoded(stream, None))
            stream.codec_context.flush_buffers()
            begun = False
    if begun:
        yield from _until_broken(_decoded(stream, None))


def _decoded(stream: VideoStream, packet: AnyPacket | None) -> Iterator[VideoFrame]:
    """The frames from a packet; None: those still in the decoder."""
    yield from stream.codec_context.decode(packet)


def _until_broken(parts: Iterator[T]) -> Iterator[T]:
    """The packets or frames up to the first that is broken."""
    import av

    try:
        yield from parts
    except av.error.MemoryError:
        raise
    except av.error.FFmpegError:
        return


def _picture(frame: VideoFrame, max_side: int | None) -> Image.Image:
    """The frame in RGB, rotated as its metadata says, scaled down to `max_side`."""
    size = (frame.width, frame.height)
    width, height = size if max_side is None else media.fitting(size, max_side)
    picture = frame.to_image(width=width, height=height).convert("RGB")
    turn = round(frame.rotation / 90) % 4  # quarter turns, counterclockwise
    return picture.transpose(Image.Transpose(turn + 1)) if turn else picture


def _check_length(seconds: float, size: tuple[int, int], path: Path | str, limits: MediaLimits) -> None:
    allowed = limits.max_duration / max(1.0, size[0] * size[1] / FULL_HD)
    if seconds > allowed:
        reason = f"lasts {seconds:.3g} s at {size[0]} x {size[1]} pixels, where {allowed:.3g} s are allowed"
        raise MediaError(path, reason, f"cut it into shorter clips, {media.raising('--max-duration')}")


def _ticks(times: Sequence[float], rate: float) -> list[int]:
    """The first frame of each interval of 1 / rate seconds that has one."""
    chosen: list[int] = []
    last = -1
    for place, time in enumerate(times):
        tick = int(time * rate + 1e-6)
        if tick > last:
            chosen.append(place)
            last = tick
    return chosen


def centres(places: Sequence[T], most: int) -> list[T]:
    """At most `most` of the places, evenly spaced: the centres of equal bins."""
    count = len(places)
    return list(places) if count <= most else [places[(2 * bin + 1) * count // (2 * most)] for bin in range(most)]
