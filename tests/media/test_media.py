"""Images decode to upright RGB of the size asked for, and nothing of the process changes; see also test_hostile.py."""

from __future__ import annotations

import os
import pickle
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from hostile_files import GREEN, RED, bomb, encoded, noise, rotated
from PIL import Image, ImageFile

from mmspec import media
from mmspec.app.media.decoder import Decoder
from mmspec.app.media.items import Item, file_source
from mmspec.app.media.video import FramePolicy
from mmspec.media import Media, MediaError, MediaLimits


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


def test_nothing_global_is_changed(tmp_path: Path):
    before = (Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES, list(warnings.filters))
    with pytest.raises(MediaError):
        media.decode(bomb(12_000, 12_000), "x.png")
    media.decode(encoded(Image.new("L", (8, 8)), "PNG"), "x.png")
    assert (Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES, list(warnings.filters)) == before


@pytest.mark.parametrize("most", [media.MAX_PIXELS, 100_000_000])
def test_the_pixel_limit_can_be_raised_above_that_of_pillow(most: int, tmp_path: Path):
    Image.new("1", (9500, 9500)).save(tmp_path / "large.png")
    with Decoder(1, MediaLimits(max_pixels=most), FramePolicy(), max_side=64) as decoder:
        decoder.submit("large", Item("large", "image", file_source(tmp_path / "large.png")))
        [(_, found)] = decoder.ready(None)
    assert isinstance(found, Media) if most > 9500**2 else "raise --max-pixels" in str(found)


def heic() -> bytes:
    return b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(40)


def test_heic_without_its_decoder_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    why = r"is a HEIC picture, for which no decoder .*; install the extra heic .*or save"
    with pytest.raises(MediaError, match=why):
        media.decode(heic(), "x.heic")


def test_heic_with_its_decoder():
    pillow_heif = pytest.importorskip("pillow_heif")
    pillow_heif.register_heif_opener()
    picture = Image.new("RGB", (64, 32), (200, 40, 90))
    data = encoded(picture, "HEIF")
    found = media.decode(data, "x.heic")
    assert found.size == (64, 32) and abs(found.getpixel((30, 15))[0] - 200) < 9
    with pytest.raises(MediaError, match="over 0 million"):
        media.decode(data, "x.heic", max_pixels=63)
    with pytest.raises(MediaError, match="damaged or cut-off HEIC"):
        media.decode(heic(), "x.heic")


def test_a_cut_off_avif_is_no_video():
    data = encoded(Image.new("RGB", (64, 64)), "AVIF")
    with pytest.raises(MediaError, match=r"AVIF|damaged or cut off") as refused:
        media.decode(data[:60], "x.avif")
    assert "video" not in str(refused.value)


def test_a_video_in_place_of_a_picture():
    data = b"\0\0\0\x18ftypisom" + bytes(40)
    with pytest.raises(MediaError, match=r"is a video, not an image; give it the extension \.mp4"):
        media.decode(data, "x.jpg")
    with pytest.raises(MediaError, match=r"is a video, not an image; give a picture, such as a frame of it"):
        media.decode(data, "clip.mp4")


def test_long_pictures_have_an_override():
    strip = encoded(Image.new("L", (2010, 10)), "PNG")
    with pytest.raises(MediaError, match=r"longer than 200 times its width; crop it, or raise --max-aspect"):
        media.decode(strip, "x.png")
    assert media.decode(strip, "x.png", max_aspect=201).size == (2010, 10)


@pytest.mark.parametrize("form", ["PNG", "JPEG"])
@pytest.mark.parametrize("size", [(400, 300), (300, 400), (1200, 10)])
def test_pictures_are_made_to_have_no_more_pixels(form: str, size: tuple[int, int]):
    data = encoded(Image.new("RGB", size), form)
    width, height = media.decode(data, "x", max_area=10_000).size
    assert 0.9 * 10_000 < width * height <= 10_000 * 1.02 and abs(width / height / (size[0] / size[1]) - 1) < 0.15
    assert media.decode(data, "x", max_area=size[0] * size[1]).size == size
