"""Every hostile file gives one right RGB picture or a MediaError that says what to do."""

from __future__ import annotations

import io
import os
import pickle
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFile

from mmspec.app import media
from mmspec.app.media import MediaError

RED, GREEN, WHITE = (255, 0, 0), (0, 255, 0), (255, 255, 255)


def noise(width: int = 48, height: int = 32) -> Image.Image:
    values = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


def encoded(image: Image.Image, kind: str, **options) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def two_halves() -> Image.Image:
    """Left half red, right half green; twice as wide as high."""
    image = Image.new("RGB", (40, 20), RED)
    image.paste(GREEN, (20, 0, 40, 20))
    return image


def rotated(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(two_halves(), "PNG", exif=exif)


def png(mode: str, colour, **options) -> bytes:
    return encoded(Image.new(mode, (8, 8), colour), "PNG", **options)


def sixteen_bits() -> bytes:
    return encoded(Image.fromarray(np.array([[0, 257, 65535]], dtype=np.uint16)), "PNG")


def floats() -> bytes:
    return encoded(Image.fromarray(np.array([[0.0, 0.5, np.nan, 1.0]], dtype=np.float32)), "TIFF")


def animation(kind: str) -> bytes:
    frames = [Image.new("RGB", (8, 8), colour) for colour in (GREEN, RED)]
    return encoded(frames[0], kind, save_all=True, append_images=frames[1:], duration=100, lossless=True)


def bomb(width: int, height: int) -> bytes:
    """A small PNG whose header declares a huge picture; its pixels are never written."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")

    header = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([1, 0, 0, 0, 0])
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def cut(data: bytes, share: float = 0.5) -> bytes:
    return data[: int(len(data) * share)]


def test_every_kind_of_picture_becomes_plain_rgb(tmp_path: Path):
    transparent = Image.new("RGBA", (8, 8), (255, 0, 0, 0))
    palette = Image.new("P", (8, 8), 1)
    palette.putpalette([0, 0, 0, 255, 0, 0])
    cases: dict[str, tuple[bytes, tuple[int, int], tuple[int, int, int]]] = {  # file, a pixel, its colour
        "plain.png": (png("RGB", GREEN), (0, 0), GREEN),
        "grey.png": (png("L", 128), (0, 0), (128,) * 3),
        "bits.png": (png("1", 1), (0, 0), WHITE),
        "palette.png": (encoded(palette, "PNG"), (0, 0), RED),
        "palette_alpha.png": (encoded(palette, "PNG", transparency=1), (0, 0), WHITE),
        "alpha.png": (encoded(transparent, "PNG"), (0, 0), WHITE),
        "half_alpha.png": (png("RGBA", (255, 0, 0, 128)), (0, 0), (255, 127, 127)),
        "grey_alpha.png": (png("LA", (0, 0)), (0, 0), WHITE),
        "colour_key.png": (png("RGB", RED, transparency=RED), (0, 0), WHITE),
        "cmyk.jpg": (encoded(Image.new("CMYK", (8, 8), (255, 0, 255, 0)), "JPEG", quality=100), (0, 0), GREEN),
        "sixteen.png": (sixteen_bits(), (1, 0), (1, 1, 1)),
        "float.tif": (floats(), (3, 0), WHITE),
        "moving.gif": (animation("GIF"), (0, 0), GREEN),
        "moving.webp": (animation("WEBP"), (0, 0), GREEN),
        "picture.avif": (encoded(Image.new("RGB", (8, 8), WHITE), "AVIF"), (0, 0), WHITE),
        "wrong_extension.jpg": (png("RGB", GREEN), (0, 0), GREEN),
    }
    for name, (data, place, colour) in cases.items():
        (tmp_path / name).write_bytes(data)
        picture = media.load_image(tmp_path / name)
        assert picture.mode == "RGB" and not picture.has_transparency_data, name
        assert np.abs(np.subtract(picture.getpixel(place), colour)).max() <= 3, (name, picture.getpixel(place))
    assert media.find(tmp_path) == sorted(tmp_path.iterdir())


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(orientation: int):
    picture = media.decode(rotated(orientation), "x.png")
    assert picture.size == ((40, 20) if orientation <= 4 else (20, 40))
    top_left = {1: RED, 2: GREEN, 3: GREEN, 4: RED, 5: RED, 6: RED, 7: GREEN, 8: GREEN}[orientation]
    assert picture.getpixel((0, 0)) == top_left


def test_a_broken_exif_block_does_not_cost_the_picture():
    data = encoded(two_halves(), "PNG", exif=b"Exif\0\0II*\0\xff\xff\xff\xff garbage")
    assert media.decode(data, "x.png").getpixel((0, 0)) == RED


HOSTILE: dict[str, tuple[Callable[[], bytes], str]] = {
    "zero bytes": (lambda: b"", "empty"),
    "text": (lambda: b"hello, I am a text", "not an image"),
    "web page": (lambda: b"<html><body>404 not found</body></html>", "not an image"),
    "postscript": (lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not an image"),
    "only a header": (lambda: encoded(noise(), "PNG")[:24], "not an image|damaged"),
    "half a jpeg": (lambda: cut(encoded(noise(), "JPEG")), "cut off"),
    "half a progressive jpeg": (lambda: cut(encoded(noise(), "JPEG", progressive=True), 0.8), "cut off"),
    "half a png": (lambda: cut(encoded(noise(), "PNG")), "cut off"),
    "half a webp": (lambda: cut(encoded(noise(), "WEBP")), "not an image|cut off"),
    "half a bmp": (lambda: cut(encoded(noise(), "BMP")), "cut off"),
    "half a tiff": (lambda: cut(encoded(noise(), "TIFF")), "not an image|cut off"),
    "half a gif": (lambda: cut(encoded(noise(), "GIF")), "cut off"),
    "flipped bytes": (lambda: encoded(noise(), "PNG")[:60] + b"\xff" * 2000, "damaged"),
    "bomb, Pillow warns": (lambda: bomb(12_000, 12_000), "bomb"),
    "bomb, Pillow raises": (lambda: bomb(20_000, 20_000), "bomb"),
    "over our own limit": (lambda: bomb(8_000, 8_000), "over 50 million"),
    "endless strip": (lambda: bomb(1, 40_000), "longer than 200 times"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused_with_a_reason(name: str, tmp_path: Path):
    make, reason = HOSTILE[name]
    path = tmp_path / "x.png"
    path.write_bytes(make())
    with pytest.raises(MediaError, match=reason) as caught:
        media.load_image(path)
    assert caught.value.path == path and caught.value.what_to_do
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_no_cut_of_any_format_gives_anything_but_a_picture_or_a_media_error():
    for kind in ("JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF", "AVIF", "PPM"):
        whole = encoded(noise(), kind)
        for size in range(0, len(whole), max(1, len(whole) // 40)):
            try:
                picture = media.decode(whole[:size], "x")
                assert picture.size == (48, 32) and size > 0.9 * len(whole), (kind, size)
            except MediaError:
                continue


def test_things_that_are_no_files(tmp_path: Path):
    (tmp_path / "folder.png").mkdir()
    os.symlink("loop.png", tmp_path / "loop.png")
    os.symlink("nowhere.png", tmp_path / "dangling.png")
    os.mkfifo(tmp_path / "pipe.png")  # opening it would wait for ever
    os.symlink("/dev/zero", tmp_path / "zero.png")
    reasons = ("a folder", "leads to itself", "dangling", "pipe", "device")
    for name, reason in zip(("folder", "loop", "dangling", "pipe", "zero"), reasons, strict=True):
        with pytest.raises(MediaError, match=reason):
            media.load_image(tmp_path / f"{name}.png")


def test_an_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "x.png"
    path.write_bytes(png("L", 0))
    path.chmod(0)
    if os.access(path, os.R_OK):  # root reads everything

        def refuse(self: Path) -> bytes:
            raise PermissionError(13, "Permission denied", str(self))

        monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(MediaError, match="may not be read"):
        media.load_image(path)


def test_a_file_over_the_size_limit_is_not_read(tmp_path: Path):
    path = tmp_path / "x.png"
    path.touch()
    os.truncate(path, media.MAX_BYTES + 1)
    with pytest.raises(MediaError, match="MiB"):
        media.load_image(path)


def test_nothing_global_is_changed(tmp_path: Path):
    before = (Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES, list(warnings.filters))
    with pytest.raises(MediaError):
        media.decode(bomb(12_000, 12_000), "x.png")
    media.decode(png("L", 0), "x.png")
    assert (Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES, list(warnings.filters)) == before


def test_the_pixel_limit_can_be_lowered():
    with pytest.raises(MediaError, match="8 x 8"):
        media.decode(png("L", 0), "x.png", max_pixels=63)


def test_find(tmp_path: Path):
    for name in ("b.JPG", "a.png", "notes.txt", ".hidden.png", "._a.png", "sub/c.webp", ".git/d.png", "x.png/e.gif"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.touch()
    os.symlink(tmp_path, tmp_path / "sub" / "up")  # a loop of folders

    def names(**options) -> list[str]:
        return [path.relative_to(tmp_path).as_posix() for path in media.find(tmp_path, **options)]

    assert names() == ["a.png", "b.JPG"]
    assert names(recursive=True) == ["a.png", "b.JPG", "sub/c.webp", "x.png/e.gif"]
    assert media.find(tmp_path / "notes.txt") == [tmp_path / "notes.txt"]  # named by hand, so it is tried


def test_find_says_what_is_wrong_with_a_folder(tmp_path: Path):
    with pytest.raises(MediaError, match="no such file or folder"):
        media.find(tmp_path / "missing")
    (tmp_path / "sub").mkdir()
    with pytest.raises(MediaError, match="no images found; add --recursive"):
        media.find(tmp_path)
    with pytest.raises(MediaError, match="no images found; known extensions"):
        media.find(tmp_path, recursive=True)
