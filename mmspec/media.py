"""Images from untrusted folders: checks which files may be opened, and decodes each to RGB or raises a clear error."""

from __future__ import annotations

import contextlib
import errno
import io
import math
import os
import stat
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.request import urlopen

from PIL import Image, ImageOps

MAX_PIXELS = 50_000_000  # checked against the header, before anything is decoded; 150 MB as RGB
MAX_BYTES = 512 * 2**20  # size on disk
MAX_MEMORY = 2 * 2**30  # bytes
MAX_ASPECT = 200  # a 1 x 50 000 strip passes the pixel limit, but a resize of its short side would use all memory

JPEG_NAMES = {".jfif", ".jpe", ".jpeg", ".jpg"}
OTHER_NAMES = {".apng", ".avif", ".bmp", ".gif", ".png", ".ppm", ".pgm", ".tif", ".tiff", ".webp"}
HEIC_NAMES = {".heic", ".heif"}  # listed even without a decoder, so that the user learns that one is missing
EXTENSIONS = JPEG_NAMES | OTHER_NAMES | HEIC_NAMES
HEIC = (b"hei", b"hev", b"mif", b"msf")  # first bytes of its brands
FILMS = {".avi", ".m4v", ".mkv", ".mov", ".mp4", ".webm"}
# Formats Pillow may try. Left out on purpose: EPS (starts Ghostscript), TGA (has no signature, so that any bytes may
# pass for one), JPEG 2000 (a cut-off file can decode without an error).
FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
CONVERT = "save it again as JPEG or PNG"
COPY_AGAIN = "copy or download it again"
STRANGERS = (  # offset, bytes there, what kind of file this is, what to do with it
    (0, b"%PDF", "is a PDF document", "save its pages as JPEG or PNG"),
    (0, b"<svg", "is a drawing in SVG", CONVERT),
    (0, b"\0\0\1\0", "is an icon file (ICO)", CONVERT),
    (0, b"\0\0\0\x0cjP", "is a JPEG 2000 picture", CONVERT),
    *((4, b"ftyp" + brand, "is a damaged or cut-off HEIC picture", COPY_AGAIN) for brand in HEIC),
    (4, b"ftypavi", "is a damaged or cut-off AVIF picture", COPY_AGAIN),
    (4, b"ftyp", "is a video, not an image", "give it the extension .mp4"),
    (0, b"\x1aE\xdf\xa3", "is a video, not an image", "give it the extension .mkv"),
    (8, b"AVI ", "is a video, not an image", "give it the extension .avi"),
)


def raising(flag: str) -> str:
    """Advice about a limit; an item that exceeded it is retried only with --retry-failed."""
    return f"or raise {flag}, with --retry-failed"


class MediaError(Exception):
    """A file or folder that cannot be used: its path or address, the reason, and what the user can do about it."""

    def __init__(self, path: Path | str, reason: str, what_to_do: str):
        self.path, self.reason, self.what_to_do = path, reason, what_to_do
        super().__init__(f"{path}: {reason}; {what_to_do}")

    def __reduce__(self) -> tuple:
        """Pickle by the three arguments, so that a worker process can send the error."""
        return type(self), (self.path, self.reason, self.what_to_do)


class OutsideError(MediaError):
    """A row of a table names a file outside of the table's folder."""


@dataclass(frozen=True)
class MediaLimits:
    """Limits for one item, so that no file can block or kill a run."""

    max_pixels: int = MAX_PIXELS  # of a picture or of one frame
    max_bytes: int = MAX_BYTES
    seconds: float = 60.0  # to read and decode it
    memory: int = MAX_MEMORY  # bytes, beyond those of an idle worker process
    max_aspect: float = MAX_ASPECT  # longer side of a picture divided by the shorter
    max_area: int | None = None  # pixels; a larger picture is shrunk to this before it reaches the model
    max_duration: float = 3600.0  # seconds of video in full HD; less for frames with more pixels


@dataclass(frozen=True)
class Media:
    """One decoded item: its frames in RGB (one for an image) and a hash of its bytes."""

    frames: tuple[Image.Image, ...]
    content: str  # sha256 of the bytes
    seconds: float | None = None  # length of a video


def load_image(path: Path | str, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """The picture in `path` as upright RGB: first frame of an animation, transparency on white, 16 bits scaled to 8."""
    return decode(read(path), path, max_pixels)


def read(path: Path | str, max_bytes: int = MAX_BYTES) -> bytes:
    """Bytes of a regular file of allowed size; pipes, devices, folders and symlink loops are never opened."""
    path = Path(path)
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            raise MediaError(path, "is a folder, not an image", "name a picture in it")
        if not stat.S_ISREG(status.st_mode):
            raise MediaError(path, "is a pipe or device, not a file", "remove it from the folder")
        check_bytes(status.st_size, path, max_bytes)
        return path.read_bytes()
    except ValueError as error:  # a zero byte in a name from a list
        raise MediaError(path, f"is not a valid file name ({error})", "correct the list") from error
    except OSError as error:
        raise explained(path, error) from error


def read_url(url: str, max_bytes: int = MAX_BYTES) -> bytes:
    """The content of a data URL."""
    try:
        with urlopen("data:" + url.partition(":")[2]) as content:
            data: bytes = content.read()
        if not data:  # of base64, other characters are left out
            raise ValueError(url)
    except (OSError, ValueError) as error:
        advice = "write data:image/jpeg;base64, and the file in base64"
        raise MediaError("picture", "has a data URL that cannot be read", advice) from error
    check_bytes(len(data), "picture", max_bytes)
    return data


def path_of(name: object, where: Path | str) -> str:
    """The path in a row of a table; MediaError for anything else, and for web addresses."""
    try:
        valid = isinstance(name, str) and name.strip() and b"\0" not in os.fsencode(name)
    except UnicodeEncodeError:
        valid = False
    if not isinstance(name, str) or not valid:
        raise MediaError(where, f"has {shortened(name)} in place of a path", "write the path of a file")
    if "://" in name:
        raise MediaError(where, f"{name[:200]} is on the web", "download it first, for instance with img2dataset")
    return name


def below(folder: Path, name: object, where: Path | str) -> Path:
    """The file that a row of an untrusted table names, relative to the table's folder; it must be inside that folder.

    Args:
        folder: the table's folder.
        name: the content of the cell, of any type.
        where: the row, for messages.

    Raises:
        OutsideError: a file elsewhere: a data set must not choose which files are opened on this machine.
        MediaError: not a path, or a web address.
    """
    base = os.path.abspath(folder)
    path = os.path.normpath(os.path.join(base, path_of(name, where)))
    if not path.startswith(os.path.join(base, "")):
        advice = "put the table into a folder above its files, or caption them by a list of paths of your own (.txt)"
        raise OutsideError(where, f"names {str(name)[:200]!r}, which lies outside of {base}", advice)
    return Path(path)


def cell(value: object, folders: Sequence[Path], where: str, max_bytes: int = MAX_BYTES) -> bytes:
    """The bytes of an image or video in a table's cell: bytes, {bytes, path}, or a path below one of these folders.

    Raises MediaError: anything else, or a file that cannot be read.
    """
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, str):
        reasons = []
        for folder in folders:
            try:
                path = below(folder, value, where)
            except MediaError as error:
                reasons.append(error)
            else:
                return read(path, max_bytes)
        raise reasons[0] if reasons else MediaError(where, f"names {value[:200]!r}", "put its bytes there")
    if not isinstance(value, bytes) or not value:
        kind = "nothing" if value is None or value == b"" else type(value).__name__
        raise MediaError(where, f"holds {kind}, not an image or video", "put its bytes or its path there")
    return value


def shortened(value: object) -> str:
    """The repr of an untrusted value, cut to 60 characters for a message."""
    try:
        return repr(value)[:60]
    except RecursionError:
        return f"a {type(value).__name__} nested too deep"


def dataset_folders(name: str) -> list[Path]:
    """The folders with the files of a data set of the library `datasets`, which its rows may name."""
    if Path(name).is_dir():
        return [Path(name)]
    from datasets import config
    from huggingface_hub.constants import HF_HUB_CACHE

    own = "/".join(name.split("/")[:2]).replace("/", "--")
    return [
        Path(HF_HUB_CACHE, f"datasets--{own}"),
        *map(Path, (config.DOWNLOADED_DATASETS_PATH, config.EXTRACTED_DATASETS_PATH)),
    ]


def check_bytes(size: int, path: Path | str, max_bytes: int = MAX_BYTES) -> None:
    """Raise a MediaError for a file that is empty, or too large to be read whole."""
    if not size:
        raise MediaError(path, "is empty (0 bytes)", COPY_AGAIN)
    if size > max_bytes:
        reason = f"has {round(size / 2**20, 2):g} MiB, over {round(max_bytes / 2**20, 2):g}"
        raise MediaError(path, reason, f"make it smaller, {raising('--max-bytes')}")


def decode(
    data: bytes, path: Path | str, max_pixels: int = MAX_PIXELS, max_side: int | None = None,
    max_aspect: float = MAX_ASPECT, max_area: int | None = None,
) -> Image.Image:  # fmt: skip
    """RGB picture from the bytes of an image file, shrunk to fit into max_side x max_side and to have at most max_area
    pixels; `path` is for messages."""
    with opened(data, path, max_pixels, max_aspect) as image:
        if max_area is not None and image.width * image.height > max_area:
            side = int(max(image.size) * math.sqrt(max_area / (image.width * image.height)))
            max_side = max(1, min(max_side or side, side))
        if max_side is not None:
            image.draft(None, fitting(image.size, 2 * max_side))  # decodes a JPEG at a fraction of its size
        image.load()  # verify() passes a truncated JPEG
        return shrunk(rgb(_upright(image)), max_side)


@contextlib.contextmanager
def opened(data: bytes, path: Path | str, max_pixels: int, max_aspect: float = MAX_ASPECT) -> Iterator[Image.Image]:
    """An image whose header was read and checked, but not yet its pixels. Only here does Pillow open untrusted bytes.

    Every exception inside the `with` block becomes a MediaError.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about odd metadata; but Pillow's check for bombs must be an error:
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(data), formats=_formats(data, path)) as image:
                check_size(image.size, path, max_pixels, max_aspect)
                yield image
    except MediaError:
        raise
    except Image.UnidentifiedImageError as error:
        raise MediaError(path, *_stranger(data, path)) from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        reason = "declares more pixels than can be opened safely (a decompression bomb?)"
        raise MediaError(path, reason, f"make it smaller, {raising('--max-pixels')}") from error
    except MemoryError as error:
        raise too_much_memory(path) from error
    except Exception as error:  # on hostile bytes a decoder may raise any exception
        raise MediaError(path, f"is damaged or cut off ({type(error).__name__}: {error})", COPY_AGAIN) from error


def too_much_memory(path: Path | str) -> MediaError:
    """The error for bytes that need too much memory to decode."""
    return MediaError(path, "takes too much memory to decode", f"make it smaller, {raising('--max-memory')}")


def fitting(size: tuple[int, int], side: int) -> tuple[int, int]:
    """The size, scaled down to fit into side x side, with the same aspect ratio."""
    scale = min(1.0, side / max(size))
    return max(1, round(size[0] * scale)), max(1, round(size[1] * scale))


def shrunk(picture: Image.Image, max_side: int | None) -> Image.Image:
    """The picture, scaled down to fit into max_side x max_side."""
    size = picture.size if max_side is None else fitting(picture.size, max_side)
    return picture if size == picture.size else picture.resize(size, Image.Resampling.BICUBIC, reducing_gap=2.0)


def _formats(data: bytes, path: Path | str) -> tuple[str, ...]:
    """The formats that Pillow may try: HEIC only for bytes with its signature, and if the extra `heic` is installed."""
    if data[4:8] != b"ftyp" or data[8:11] not in HEIC:
        return FORMATS
    try:
        import pillow_heif
    except ImportError as error:
        advice = f"install the extra heic of mmspec (pip install pillow-heif), or {CONVERT}"
        raise MediaError(path, "is a HEIC picture, for which no decoder is installed", advice) from error
    pillow_heif.register_heif_opener()
    return (*FORMATS, "HEIF")


def _stranger(data: bytes, path: Path | str) -> tuple[str, str]:
    """The reason and the advice for bytes that no decoder can read."""
    head = data[:4096].lstrip(b"\xef\xbb\xbf \t\r\n")
    for place, mark, reason, what_to_do in STRANGERS:
        if head[place:].startswith(mark) or (mark == b"<svg" and head.startswith(b"<?xml") and mark in head):
            if "is a video" in reason and Path(path).suffix.lower() in FILMS:
                return reason, "give a picture, such as a frame of it; `mmspec caption` and the demo take videos"
            return reason, what_to_do
    return "is not an image that can be read here", CONVERT


def check_size(size: tuple[int, int], path: Path | str, max_pixels: int, max_aspect: float = MAX_ASPECT) -> None:
    """Raise a MediaError if the size in a picture's header exceeds the limits."""
    width, height = size
    if min(size) < 1:
        raise MediaError(path, f"declares a size of {width} x {height} pixels", COPY_AGAIN)
    if width * height > max_pixels:
        reason = f"{width} x {height} is {width * height / 1e6:.0f} million pixels, over {max_pixels / 1e6:.0f} million"
        raise MediaError(path, reason, f"make it smaller, {raising('--max-pixels')}")
    if max(size) > max_aspect * min(size):
        reason = f"{width} x {height} is longer than {max_aspect:g} times its width"
        raise MediaError(path, reason, f"crop it, {raising('--max-aspect')}")


def _upright(image: Image.Image) -> Image.Image:
    """The image rotated by its EXIF orientation; unchanged if its EXIF block is broken."""
    try:
        orientation = image.getexif().get(0x0112, 1)
    except Exception:  # EXIF is parsed lazily from hostile bytes
        return image
    return ImageOps.exif_transpose(image) if orientation in range(2, 9) else image


def rgb(image: Image.Image) -> Image.Image:
    """8-bit RGB, transparency on white."""
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        return _eight_bits(image).convert("RGB")
    if image.has_transparency_data:
        picture = image.convert("RGBA")
        page = Image.new("RGBA", picture.size, "white")
        return Image.alpha_composite(page, picture).convert("RGB")
    return image.convert("RGB")


def _eight_bits(image: Image.Image) -> Image.Image:
    """Grey levels 0..255: 16 bits over their whole range, 32-bit integers and floats over the range they use."""
    import numpy as np  # imported late: worker processes start sooner, and few pictures need it

    grey = np.array(image, dtype=np.float32)  # a copy, which is then changed in place to save memory
    np.nan_to_num(grey, copy=False, posinf=0.0, neginf=0.0)
    low, high = (0.0, 65535.0) if image.mode.startswith("I;16") else (float(grey.min()), float(grey.max()))
    scale = 255.0 / (high - low) if high > low else 0.0
    grey *= scale
    grey -= low * scale
    return Image.fromarray(np.rint(grey, out=grey).astype(np.uint8))


def explained(path: Path, error: OSError) -> MediaError:
    """The MediaError for an OSError: the reason, and what to do."""
    reason, what_to_do = {
        errno.ENOENT: ("is missing or a dangling link", "restore it, or remove the link"),
        errno.EACCES: ("may not be read", "change its permissions (chmod u+r)"),
        errno.EPERM: ("may not be read", "change its permissions (chmod u+r)"),
        errno.ENAMETOOLONG: ("has a name that is too long for this disk", "give it a shorter name"),
        errno.ENOTDIR: ("is missing: a part of its path is not a folder", "restore it, or remove it from the list"),
        errno.ELOOP: ("is a symbolic link that leads to itself", "remove the link"),
    }.get(error.errno or 0, (f"cannot be read ({error.strerror or error})", "check the disk and the file"))
    return MediaError(path, reason, what_to_do)
