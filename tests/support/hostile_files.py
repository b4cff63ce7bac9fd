"""A corpus of hostile and odd files, each with what has to become of it."""

from __future__ import annotations

import io
import os
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import clips
import numpy as np
from PIL import Image

RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)
Make = Callable[[Path], object]  # writes a file, or returns its bytes


@dataclass(frozen=True)
class Fine:
    """The file gives so many frames of this size, with about this colour in the upper left corner of the first."""

    size: tuple[int, int]
    colour: tuple[int, int, int] | None = None
    frames: int = 1


@dataclass(frozen=True)
class Case:
    """A file to make, and what has to become of it: a picture, a failure of this reason (a regex), or either."""

    name: str
    make: Make
    outcome: Fine | str
    kind: str = "image"


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def plain(mode: str, colour: object, kind: str = "PNG", **options: object) -> bytes:
    return encoded(Image.new(mode, (8, 8), colour), kind, **options)


def noise(width: int = 48, height: int = 32) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8))


def two_halves() -> Image.Image:
    """Left half red, right half green; twice as wide as high."""
    image = Image.new("RGB", (40, 20), RED)
    image.paste(GREEN, (20, 0, 40, 20))
    return image


def rotated(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(two_halves(), "PNG", exif=exif)


def numbers(values: list[float], dtype: Any, kind: str) -> bytes:
    """A picture of one line of them."""
    return encoded(Image.fromarray(np.array([values], dtype=dtype)), kind)


def animation(kind: str, count: int = 2, delay: int = 100) -> bytes:
    colours = (GREEN, RED, BLUE, WHITE)
    frames = [Image.new("RGB", (8, 8), colours[place % 4]) for place in range(count)]
    return encoded(frames[0], kind, save_all=True, append_images=frames[1:], duration=delay, lossless=True)


def cut(data: bytes, share: float = 0.5) -> bytes:
    return data[: int(len(data) * share)]


def chunk(kind: bytes, data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")


def png(width: int, height: int, pixels: bytes, *extra: bytes, depth: int = 1) -> bytes:
    """A PNG by hand: grey of this depth, `pixels` as they are compressed, extra chunks before them."""
    header = struct.pack(">IIBBBBB", width, height, depth, 0, 0, 0, 0)
    body = b"".join(extra) + chunk(b"IDAT", zlib.compress(pixels)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + body


def bomb(width: int, height: int) -> bytes:
    """A small PNG whose header declares a huge picture; its pixels are never written."""
    return png(width, height, b"")


def inflating() -> bytes:
    """A PNG of 8 x 8 pixels with 50 MB of zeros compressed behind them."""
    return png(8, 8, bytes(50_000_000), depth=8)


def text_bomb() -> bytes:
    """A small picture with a comment of 20 MB, compressed."""
    return png(8, 8, bytes(72), chunk(b"zTXt", b"Comment\0\0" + zlib.compress(bytes(20_000_000))), depth=8)


def many_texts() -> bytes:
    """A small picture with 100 comments of 1 MB each, compressed."""
    text = zlib.compress(bytes(1_000_000))
    return png(8, 8, bytes(72), *(chunk(b"zTXt", b"C%d\0\0" % n + text) for n in range(100)), depth=8)


def gif_of(width: int, height: int) -> bytes:
    """A GIF whose screen is declared larger than its one frame."""
    data = bytearray(encoded(Image.new("P", (8, 8)), "GIF"))
    data[6:10] = struct.pack("<HH", width, height)
    return bytes(data)


def jpeg_of(width: int, height: int) -> bytes:
    """A JPEG with another size written into its frame header."""
    data = bytearray(plain("RGB", RED, "JPEG"))
    place = data.index(b"\xff\xc0")
    data[place + 5 : place + 9] = struct.pack(">HH", height, width)
    return bytes(data)


def endless_ifds() -> bytes:
    """A TIFF whose list of directories leads back to its beginning."""
    data = bytearray(plain("L", 7, "TIFF"))
    first = struct.unpack_from("<I", data, 4)[0]
    entries = struct.unpack_from("<H", data, first)[0]
    struct.pack_into("<I", data, first + 2 + 12 * entries, first)
    return bytes(data)


def tiff(*entries: tuple[int, int, int, int], body: bytes = b"") -> bytes:
    """A TIFF by hand; entries are (tag, type, count, value)."""
    packed = b"".join(struct.pack("<HHII", *entry) for entry in entries)
    return b"II*\0" + struct.pack("<IH", 8, len(entries)) + packed + struct.pack("<I", 0) + body


def icon_bomb() -> bytes:
    """An ICO that holds a huge PNG."""
    inside = bomb(50_000, 50_000)
    return struct.pack("<HHHBBBBHHII", 0, 1, 1, 0, 0, 0, 0, 1, 32, len(inside), 22) + inside


def clip(path: Path, *args: object, **options: object) -> bytes:
    """Bytes of a clip by `clips.write_clip`, made beside the path."""
    made = clips.write_clip(path.with_name(f"making{path.suffix}"), *args, **options)  # type: ignore[arg-type]
    data = made.read_bytes()
    made.unlink()
    return data


def patched(data: bytes, box: bytes, offset: int, value: bytes) -> bytes:
    """The MP4 with other bytes in a box, counted from the end of the box's name."""
    place = data.index(box) + 4 + offset
    return data[:place] + value + data[place + len(value) :]


def lying(path: Path) -> bytes:
    """An MP4 whose headers claim 100 days; its frames last two seconds."""
    data = clip(path, 16, 8)
    for box, offset in ((b"mvhd", 16), (b"tkhd", 20), (b"mdhd", 16)):
        data = patched(data, box, offset, struct.pack(">I", 2**32 - 2))
    return data


def huge_video(path: Path) -> bytes:
    """An AVI whose header says 16 000 x 16 000, of a codec that believes it."""
    return patched(clip(path, 4, codec="ffv1"), b"strf", 8, struct.pack("<II", 16_000, 16_000))


def scrambled(path: Path, codec: str = "mpeg4") -> bytes:
    """An MP4 with a good index and noise where the frames were."""
    data = clip(path, 16, codec=codec, faststart=False)
    start = data.index(b"mdat") + 4
    stop = data.index(b"moov") - 4
    dirt = np.random.default_rng(0).integers(0, 256, stop - start, dtype=np.uint8).tobytes()
    return data[:start] + dirt + data[stop:]


def in_a_moment(name: str) -> Make:
    return lambda path: (path.parent / name).write_bytes(plain("RGB", GREEN)) and os.symlink(name, path)


def looping_folders(path: Path) -> None:
    path.mkdir()
    os.symlink(path, path / "again")


SVG = b'<?xml version="1.0"?>\n<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>'
SHORT = (8, 8)

CASES: list[Case] = [
    # pictures that are odd and right
    Case("plain.png", lambda _: plain("RGB", GREEN), Fine(SHORT, GREEN)),
    Case("grey.png", lambda _: plain("L", 128), Fine(SHORT, (128,) * 3)),
    Case("bits.png", lambda _: plain("1", 1), Fine(SHORT, WHITE)),
    Case("cmyk.jpg", lambda _: plain("CMYK", (255, 0, 255, 0), "JPEG", quality=100), Fine(SHORT, GREEN)),
    Case("sixteen.png", lambda _: numbers([0, 257, 65535], np.uint16, "PNG"), Fine((3, 1), (0, 0, 0))),
    Case("floats.tif", lambda _: numbers([0, 0.5, np.nan, 1], np.float32, "TIFF"), Fine((4, 1), (0, 0, 0))),
    Case("huge_floats.tif", lambda _: numbers([3e38, np.inf, -3e38], np.float32, "TIFF"), Fine((3, 1), WHITE)),
    Case("palette_alpha.png", lambda _: plain("P", 0, transparency=0), Fine(SHORT, WHITE)),
    Case("half_alpha.png", lambda _: plain("RGBA", (255, 0, 0, 128)), Fine(SHORT, (255, 127, 127))),
    Case("grey_alpha.png", lambda _: plain("LA", (0, 0)), Fine(SHORT, WHITE)),
    Case("colour_key.png", lambda _: plain("RGB", RED, transparency=RED), Fine(SHORT, WHITE)),
    Case("one_pixel.png", lambda _: encoded(Image.new("RGB", (1, 1), RED), "PNG"), Fine((1, 1), RED)),
    Case("really_a_png.jpg", lambda _: plain("RGB", GREEN), Fine(SHORT, GREEN)),
    Case("really_a_webp.gif", lambda _: plain("RGB", WHITE, "WEBP"), Fine(SHORT, WHITE)),
    Case("on_its_side.png", lambda _: rotated(6), Fine((20, 40), RED)),
    Case("mirrored.png", lambda _: rotated(2), Fine((40, 20), GREEN)),
    Case("odd_orientation.png", lambda _: rotated(99), Fine((40, 20), RED)),
    Case("broken_exif.png", lambda _: encoded(two_halves(), "PNG", exif=b"Exif\0\0II*\0\xff\xff junk"), Fine((40, 20))),
    Case("trailing_junk.png", lambda _: plain("RGB", GREEN) + bytes(100_000), Fine(SHORT, GREEN)),
    Case("moving.gif", lambda _: animation("GIF"), Fine(SHORT, GREEN)),
    Case("moving.webp", lambda _: animation("WEBP"), Fine(SHORT, GREEN)),
    Case("moving.apng", lambda _: animation("PNG"), Fine(SHORT, GREEN)),
    Case("endless_ifds.tif", lambda _: endless_ifds(), Fine(SHORT, (7, 7, 7))),
    Case("a link.png", in_a_moment("the one it leads to.data"), Fine(SHORT, GREEN)),
    Case("bell\x07 and\nnewline\x1b[31m.png", lambda _: plain("RGB", GREEN), Fine(SHORT, GREEN)),
    Case("ü" * 120 + ".png", lambda _: plain("RGB", GREEN), Fine(SHORT, GREEN)),
    Case("\u202egnp.exe \U0001f98a 画像.png", lambda _: plain("RGB", GREEN), Fine(SHORT, GREEN)),
    Case("bytes \udcff\udcfe that are no UTF-8.png", lambda _: plain("RGB", GREEN), Fine(SHORT, GREEN)),
    # pictures that are none
    Case("empty.jpg", lambda _: b"", "empty"),
    Case("one_byte.jpg", lambda _: b"\xff", "not an image"),
    Case("text.png", lambda _: b"hello, I am a text", "not an image"),
    Case("page.jpg", lambda _: b"<html><body>404 not found</body></html>", "not an image"),
    Case("script.png", lambda _: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not an image"),
    Case("drawing.png", lambda _: SVG, "SVG"),
    Case("paper.jpg", lambda _: b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n", "PDF"),
    Case("icons.png", lambda _: icon_bomb(), "icon"),
    Case("film.jpg", lambda path: clip(path.with_suffix(".mp4"), 4), "is a video, not an image"),
    Case("half.jpg", lambda _: cut(encoded(noise(), "JPEG")), "cut off"),
    Case("progressive.jpg", lambda _: cut(encoded(noise(), "JPEG", progressive=True), 0.8), "cut off"),
    Case("half.png", lambda _: cut(encoded(noise(), "PNG")), "cut off"),
    Case("header.png", lambda _: encoded(noise(), "PNG")[:24], "not an image|damaged"),
    Case("half.webp", lambda _: cut(encoded(noise(), "WEBP")), "not an image|cut off"),
    Case("half.bmp", lambda _: cut(encoded(noise(), "BMP")), "cut off"),
    Case("half.tif", lambda _: cut(encoded(noise(), "TIFF")), "not an image|cut off"),
    Case("half.gif", lambda _: cut(encoded(noise(), "GIF")), "cut off"),
    Case("flipped.png", lambda _: encoded(noise(), "PNG")[:60] + b"\xff" * 2000, "damaged"),
    Case("random.jpg", lambda _: b"\xff\xd8\xff\xe0" + bytes(range(256)) * 40, "not an image|damaged"),
    Case("no_width.gif", lambda _: gif_of(0, 8), Fine(SHORT)),
    # bombs
    Case("bomb_warns.png", lambda _: bomb(12_000, 12_000), "bomb"),
    Case("bomb_raises.png", lambda _: bomb(20_000, 20_000), "bomb"),
    Case("over_our_limit.png", lambda _: bomb(8_000, 8_000), "over 50 million"),
    Case("endless_strip.png", lambda _: bomb(1, 40_000), "longer than 200 times"),
    Case("huge_header.jpg", lambda _: jpeg_of(65_000, 65_000), "bomb"),
    Case("huge_screen.gif", lambda _: gif_of(65_535, 65_535), "bomb"),
    Case("real_bomb.png", lambda _: encoded(Image.new("1", (9_000, 9_000)), "PNG"), "over 50 million"),
    Case("inflating.png", lambda _: inflating(), Fine(SHORT)),
    Case("text_bomb.png", lambda _: text_bomb(), "not an image|damaged"),
    Case("many_texts.png", lambda _: many_texts(), "not an image|damaged"),
    Case("huge.tif", lambda _: tiff((256, 4, 1, 2**31), (257, 4, 1, 2**31), (273, 4, 1, 8)), "bomb|not an image"),
    Case("huge_tag.tif", lambda _: tiff((256, 4, 2**31, 8), (257, 4, 1, 9)), "not an image|damaged"),
    # things that are no files
    Case("folder.jpg", Path.mkdir, "folder"),
    Case("folders_in_a_circle.png", looping_folders, "folder"),
    Case("loop.png", lambda path: os.symlink(path.name, path), "leads to itself"),
    Case("dangling.png", lambda path: os.symlink("nowhere.png", path), "dangling"),
    Case("pipe.png", os.mkfifo, "pipe"),  # opening it would wait for ever
    Case("zero.png", lambda path: os.symlink("/dev/zero", path), "device"),
    Case("gone.png", lambda path: None, "missing"),
    Case("sparse.png", lambda path: path.touch() or os.truncate(path, 600 * 2**20), "600 MiB"),
    # videos
    Case("good.mp4", lambda path: clip(path, 16), Fine((64, 48), GREEN, 8), "video"),
    Case("short.mp4", lambda path: clip(path, 3), Fine((64, 48), RED, 3), "video"),
    Case("really_mkv.mp4", lambda path: clip(path.with_suffix(".mkv"), 16), Fine((64, 48), None, 8), "video"),
    Case("turned.mp4", lambda path: clip(path, 16, rotation=90), Fine((48, 64), None, 8), "video"),
    Case("lying.mp4", lying, Fine((64, 48), None, 8), "video"),
    Case("broken_tail.mp4", lambda path: cut(clip(path, 30), 0.8), Fine((64, 48), None, 8), "video"),
    Case("moving_gif_as.mp4", lambda _: animation("GIF", 20), Fine(SHORT, None, 8), "video"),
    Case("no_delay.gif", lambda _: animation("GIF", 4, delay=0), Fine(SHORT, GREEN, 4), "video"),
    Case("film.webp", lambda _: animation("WEBP", 4), "no video", "video"),
    Case("still.mp4", lambda _: plain("RGB", GREEN, "JPEG", quality=100), "no video", "video"),
    Case("empty.mp4", lambda _: b"", "empty", "video"),
    Case("no_frames.mp4", lambda path: clip(path, 0), "frame|no video", "video"),
    Case("sound.mp4", clips.write_sound, "no video", "video"),
    Case("mostly_gone.mp4", lambda path: cut(clip(path, 30), 0.3), "cut off|damaged", "video"),
    Case("no_index.mp4", lambda path: cut(clip(path, 30, faststart=False), 0.8), "cut off", "video"),
    Case("only_ftyp.mp4", lambda path: clip(path, 4)[:40], "no video", "video"),
    Case("scrambled.mp4", scrambled, "damaged", "video"),
    Case("scrambled_h264.mp4", lambda path: scrambled(path, "libx264"), "damaged: 0 of 8", "video"),
    Case("huge.avi", huge_video, "over 50 million", "video"),
    Case("hours.mp4", lambda path: clip(path, 16, times=list(range(0, 16 * 8000, 8000))), "lasts", "video"),
    Case("random.mp4", lambda _: bytes(range(256)) * 100, "damaged", "video"),
    Case("page.mp4", lambda _: b"<!doctype html><title>404</title>", "no video", "video"),
    Case("folder.mp4", Path.mkdir, "folder", "video"),
]


def place(case: Case, folder: Path) -> Path:
    """Make the file of a case in this folder."""
    path = folder / case.name
    data = case.make(path)
    if isinstance(data, bytes):
        path.write_bytes(data)
    return path
