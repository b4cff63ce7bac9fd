"""Images decode to upright RGB of the size asked for, and nothing of the process changes; see also test_hostile.py."""

from __future__ import annotations

import os
import pickle
import warnings
from pathlib import Path

import numpy as np
import pytest
from hostile import GREEN, RED, bomb, encoded, noise, rotated
from PIL import Image, ImageFile

from mmspec import media
from mmspec.app.caption.decoder import Decoder
from mmspec.app.caption.items import FileSource, Item
from mmspec.app.caption.video import FramePolicy
from mmspec.media import Limits, Media, MediaError


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(orientation: int):
    picture = media.decode(rotated(orientation), "x.png")
    assert picture.size == ((40, 20) if orientation <= 4 else (20, 40))
    top_left = {1: RED, 2: GREEN, 3: GREEN, 4: RED, 5: RED, 6: RED, 7: GREEN, 8: GREEN}[orientation]
    assert picture.getpixel((0, 0)) == top_left


def test_sixteen_bits_and_floats_keep_their_levels():
    ramp = np.linspace(0, 65535, 256).astype(np.uint16)
    for values in (ramp, ramp.astype(np.float32), ramp.astype(np.int32)):
        data = encoded(Image.fromarray(values.reshape(16, 16)), "TIFF")
        grey = np.asarray(media.decode(data, "x"))[..., 0].ravel()
        assert np.array_equal(grey, np.arange(256))


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
@pytest.mark.parametrize(("size", "side", "expected"), [((400, 300), 100, (100, 75)), ((30, 40), 100, (30, 40))])
def test_pictures_are_made_to_fit(kind: str, size: tuple[int, int], side: int, expected: tuple[int, int]):
    data = encoded(noise(*size), kind)
    assert media.decode(data, "x", max_side=side).size == expected
    assert media.decode(data, "x").size == size


def test_an_error_travels_between_processes():
    error = MediaError("a b.png", "is empty", "copy it again")
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) == "a b.png: is empty; copy it again" and again.what_to_do == "copy it again"


def test_no_cut_of_any_format_gives_anything_but_a_picture_or_a_media_error():
    for kind in ("JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF", "AVIF", "PPM"):
        whole = encoded(noise(), kind)
        for size in range(0, len(whole), max(1, len(whole) // 40)):
            try:
                picture = media.decode(whole[:size], "x")
                assert picture.size == (48, 32) and size > 0.9 * len(whole), (kind, size)
            except MediaError:
                continue


def test_an_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "x.png"
    path.write_bytes(encoded(Image.new("L", (8, 8)), "PNG"))
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
    media.decode(encoded(Image.new("L", (8, 8)), "PNG"), "x.png")
    assert (Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES, list(warnings.filters)) == before


def test_the_pixel_limit_can_be_lowered():
    with pytest.raises(MediaError, match="8 x 8"):
        media.decode(encoded(Image.new("L", (8, 8)), "PNG"), "x.png", max_pixels=63)


@pytest.mark.parametrize("most", [media.MAX_PIXELS, 100_000_000])
def test_the_pixel_limit_can_be_raised_above_that_of_pillow(most: int, tmp_path: Path):
    Image.new("1", (9500, 9500)).save(tmp_path / "large.png")
    with Decoder(1, Limits(max_pixels=most), FramePolicy(), max_side=64) as decoder:
        decoder.submit("large", Item("large", "image", FileSource(tmp_path / "large.png")))
        [(_, found)] = decoder.ready(None)
    assert isinstance(found, Media) if most > 9500**2 else "raise --max-pixels" in str(found)
