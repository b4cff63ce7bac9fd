"""Images from untrusted folders: which files may be opened, each decoded to RGB or refused with a clear error."""

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

from PIL import Image, ImageOps

MAX_PIXELS = 50_000_000  # checked against the header, before anything is decoded; 150 MB as RGB
MAX_BYTES = 512 * 2**20  # size on disk
MAX_MEMORY = 2 * 2**30  # bytes
MAX_ASPECT = 200  # a 1 x 50 000 strip passes the pixel limit, yet a resize of its short side would take all memory

JPEG_NAMES = {".jfif", ".jpe", ".jpeg", ".jpg"}
OTHER_NAMES = {".apng", ".avif", ".bmp", ".gif", ".png", ".ppm", ".pgm", ".tif", ".tiff", ".webp"}
HEIC_NAMES = {".heic", ".heif"}  # found even where no decoder is there, so that their owner learns what is missing
EXTENSIONS = JPEG_NAMES | OTHER_NAMES | HEIC_NAMES
HEIC = (b"hei", b"hev", b"mif", b"msf")  # how its brands begin
FILMS = {".avi", ".m4v", ".mkv", ".mov", ".mp4", ".webm"}
# Formats Pillow may try. Left out on purpose: EPS (starts Ghostscript), TGA (has no signature, so that any bytes may
# pass for one), JPEG 2000 (a cut-off file can decode without an error).
ANIMATIONS = ("AVIF", "GIF", "PNG", "WEBP")
FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
CONVERT = "save it again as JPEG or PNG"
COPY_AGAIN = "copy or download it again"
STRANGERS = (  # place, bytes there, what that is and what to do with it
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
    """What to do about a limit; an item that failed by it is not tried again unasked."""
    return f"or raise {flag}, with --retry-failed"


class MediaError(Exception):
    """One file or folder that cannot be used: which, why, and what its owner can do about it."""

    def __init__(self, path: Path | str, reason: str, what_to_do: str):
        self.path, self.reason, self.what_to_do = Path(path), reason, what_to_do
        super().__init__(f"{path}: {reason}; {what_to_do}")

    def __reduce__(self) -> tuple:
        """Pickle by the three arguments, so that a worker process can hand the error on."""
        return type(self), (self.path, self.reason, self.what_to_do)


class OutsideError(MediaError):
    """A row names a file outside of the folder of its table."""


@dataclass(frozen=True)
class MediaLimits:
    """What one item may take, so that no file can hold up or kill a run."""

    max_pixels: int = MAX_PIXELS  # of a picture or of one frame
    max_bytes: int = MAX_BYTES
    seconds: float = 60.0  # to read and decode it
    memory: int = MAX_MEMORY  # bytes, on top of what an idle worker process takes
    max_aspect: float = MAX_ASPECT  # length by width of a picture
    max_area: int | None = None  # pixels that a picture is made to have at most before it reaches the model
    max_duration: float = 3600.0  # seconds of video in full HD; the more pixels a frame has, the shorter


@dataclass(frozen=True)
class Media:
    """One decoded item: its frames in RGB (one for an image) and what its bytes are known by."""

    frames: tuple[Image.Image, ...]
    content: str  # sha256 of the bytes
    seconds: float | None = None  # length of a video
    animated: bool = False  # an image of which further frames were left out


def load_image(path: Path | str, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """The picture in `path` as upright RGB: first frame of an animation, transparency on white, 16 bits scaled to 8."""
    return decode(read(path), path, max_pixels)


def read(path: Path | str, max_bytes: int = MAX_BYTES) -> bytes:
    """Bytes of a regular file of sensible size; pipes, devices, folders and symlink loops are refused unopened."""
    path = Path(path)
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            raise MediaError(path, "is a folder, not an image", "rename it, or add --recursive to look inside")
        if not stat.S_ISREG(status.st_mode):
            raise MediaError(path, "is a pipe or device, not a file", "remove it from the folder")
        check_bytes(status.st_size, path, max_bytes)
        return path.read_bytes()
    except ValueError as error:  # a zero byte in a name out of a list
        raise MediaError(path, f"is no possible file name ({error})", "correct the list") from error
    except OSError as error:
        raise explained(path, error) from error


def path_of(name: object, where: Path | str) -> str:
    """What a row has in place of a path, if it is one; MediaError for anything else, and for addresses."""
    try:
        possible = isinstance(name, str) and name.strip() and b"\0" not in os.fsencode(name)
    except UnicodeEncodeError:
        possible = False
    if not isinstance(name, str) or not possible:
        raise MediaError(where, f"has {shortened(name)} in place of a path", "write the path of a file")
    if "://" in name:
        raise MediaError(where, f"{name[:200]} is on the web", "download it first, for instance with img2dataset")
    return name


def below(folder: Path, name: object, where: Path | str) -> Path:
    """The file that a row of somebody's table names, relative to the table's folder; only below it may it lie.

    Args:
        folder: the table's own.
        name: the cell, whatever it holds.
        where: the row, for messages.

    Raises:
        OutsideError: a file elsewhere: a data set must not choose what is opened here.
        MediaError: no path, or an address.
    """
    base = os.path.abspath(folder)
    path = os.path.normpath(os.path.join(base, path_of(name, where)))
    if not path.startswith(os.path.join(base, "")):
        advice = "put the table into a folder above its files, or caption them by a list of paths of your own (.txt)"
        raise OutsideError(where, f"names {str(name)[:200]!r}, which lies outside of {base}", advice)
    return Path(path)


def cell(held: object, folders: Sequence[Path], where: str, max_bytes: int = MAX_BYTES) -> bytes:
    """The bytes in a cell of a table: itself, {bytes, path}, or a path of a file below one of these folders.

    Raises:
        MediaError: anything else, or a file that cannot be read.
    """
    if isinstance(held, dict):
        held = held.get("bytes") or held.get("path")
    if isinstance(held, str):
        reasons = []
        for folder in folders:
            try:
                path = below(folder, held, where)
            except MediaError as error:
                reasons.append(error)
            else:
                return read(path, max_bytes)
        raise reasons[0] if reasons else MediaError(where, f"names {held[:200]!r}", "put its bytes there")
    if not isinstance(held, bytes) or not held:
        came = "nothing" if held is None or held == b"" else type(held).__name__
        raise MediaError(where, f"holds {came}, not an image or video", "put its bytes or its path there")
    return held


def shortened(value: object) -> str:
    """A value for a message, whatever somebody wrote there."""
    try:
        return repr(value)[:60]
    except RecursionError:
        return f"a {type(value).__name__} nested too deep"


def dataset_folders(name: str) -> list[Path]:
    """Where the files of a data set of the library `datasets` lie: what its rows may name."""
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
    """Refuse what is empty, or too large to be read whole."""
    if not size:
        raise MediaError(path, "is empty (0 bytes)", COPY_AGAIN)
    if size > max_bytes:
        reason = f"has {round(size / 2**20, 2):g} MiB, over {round(max_bytes / 2**20, 2):g}"
        raise MediaError(path, reason, f"make it smaller, {raising('--max-bytes')}")


def decode(
    data: bytes, path: Path | str, max_pixels: int = MAX_PIXELS, max_side: int | None = None,
    max_aspect: float = MAX_ASPECT, max_area: int | None = None,
) -> Image.Image:  # fmt: skip
    """RGB picture out of the bytes of an image file, made to fit into max_side x max_side and to have no more than
    max_area pixels; `path` is for messages."""
    with opened(data, path, max_pixels, max_aspect) as image:
        if max_area is not None and image.width * image.height > max_area:
            side = int(max(image.size) * math.sqrt(max_area / (image.width * image.height)))
            max_side = max(1, min(max_side or side, side))
        if max_side is not None:
            image.draft(None, fitting(image.size, 2 * max_side))  # a JPEG is decoded at a fraction of its size
        image.load()  # verify() passes a truncated JPEG
        return shrunk(rgb(_upright(image)), max_side)


def animated(data: bytes, path: Path | str, max_pixels: int = MAX_PIXELS, max_aspect: float = MAX_ASPECT) -> bool:
    """Whether the bytes of an image file hold several frames to be shown one after the other."""
    with opened(data, path, max_pixels, max_aspect) as image:
        return image.format in ANIMATIONS and bool(getattr(image, "is_animated", False))


@contextlib.contextmanager
def opened(data: bytes, path: Path | str, max_pixels: int, max_aspect: float = MAX_ASPECT) -> Iterator[Image.Image]:
    """An image of which only the header was read and checked. The one place where Pillow meets foreign bytes.

    Whatever goes wrong inside the `with` becomes a MediaError.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # notes on odd metadata; but Pillow's guard against bombs must stop us:
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
    except Exception as error:  # a decoder fed with hostile bytes may raise anything at all
        raise MediaError(path, f"is damaged or cut off ({type(error).__name__}: {error})", COPY_AGAIN) from error


def too_much_memory(path: Path | str) -> MediaError:
    """The error for bytes that do not fit into memory when they are decoded."""
    return MediaError(path, "takes too much memory to decode", f"make it smaller, {raising('--max-memory')}")


def fitting(size: tuple[int, int], side: int) -> tuple[int, int]:
    """The size, made as much smaller as side x side demands, in the same proportions."""
    scale = min(1.0, side / max(size))
    return max(1, round(size[0] * scale)), max(1, round(size[1] * scale))


def shrunk(picture: Image.Image, max_side: int | None) -> Image.Image:
    """The picture, made to fit into max_side x max_side."""
    size = picture.size if max_side is None else fitting(picture.size, max_side)
    return picture if size == picture.size else picture.resize(size, Image.Resampling.BICUBIC, reducing_gap=2.0)


def _formats(data: bytes, path: Path | str) -> tuple[str, ...]:
    """What Pillow may try: HEIC only for bytes that say they are, and if the extra `heic` is installed."""
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
    """What bytes are that no decoder knows, and what to do."""
    head = data[:4096].lstrip(b"\xef\xbb\xbf \t\r\n")
    for place, mark, reason, what_to_do in STRANGERS:
        if head[place:].startswith(mark) or (mark == b"<svg" and head.startswith(b"<?xml") and mark in head):
            if "is a video" in reason and Path(path).suffix.lower() in FILMS:
                return reason, "give a picture, such as a frame of it; `mmspec caption` and the demo take videos"
            return reason, what_to_do
    return "is not an image that can be read here", CONVERT


def check_size(size: tuple[int, int], path: Path | str, max_pixels: int, max_aspect: float = MAX_ASPECT) -> None:
    """Refuse a picture by what its header says."""
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
    """The image turned as its EXIF orientation says; one whose EXIF block is broken stays as it is stored."""
    try:
        orientation = image.getexif().get(0x0112, 1)
    except Exception:  # EXIF is parsed lazily out of hostile bytes; without it no orientation is known
        return image
    return ImageOps.exif_transpose(image) if orientation in range(2, 9) else image


def rgb(image: Image.Image) -> Image.Image:
    """RGB in 8 bits; whatever is transparent shows a white page."""
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        return _eight_bits(image).convert("RGB")
    if image.has_transparency_data:
        picture = image.convert("RGBA")
        page = Image.new("RGBA", picture.size, "white")
        return Image.alpha_composite(page, picture).convert("RGB")
    return image.convert("RGB")


def _eight_bits(image: Image.Image) -> Image.Image:
    """Grey levels 0..255: 16 bits over their whole range, 32-bit integers and floats over the range they use."""
    import numpy as np  # late: worker processes start sooner, and few pictures need it

    grey = np.array(image, dtype=np.float32)  # a copy, changed in place: a large picture is large enough once
    np.nan_to_num(grey, copy=False, posinf=0.0, neginf=0.0)
    low, high = (0.0, 65535.0) if image.mode.startswith("I;16") else (float(grey.min()), float(grey.max()))
    scale = 255.0 / (high - low) if high > low else 0.0
    grey *= scale
    grey -= low * scale
    return Image.fromarray(np.rint(grey, out=grey).astype(np.uint8))


def explained(path: Path, error: OSError) -> MediaError:
    """What the system says of a file, and what to do."""
    reason, what_to_do = {
        errno.ENOENT: ("is missing or a dangling link", "restore it, or remove the link"),
        errno.EACCES: ("may not be read", "change its permissions (chmod u+r)"),
        errno.EPERM: ("may not be read", "change its permissions (chmod u+r)"),
        errno.ENAMETOOLONG: ("has a name that is too long for this disk", "give it a shorter name"),
        errno.ENOTDIR: ("is missing: a part of its path is not a folder", "restore it, or remove it from the list"),
        errno.ELOOP: ("is a symbolic link that leads to itself", "remove the link"),
    }.get(error.errno or 0, (f"cannot be read ({error.strerror or error})", "check the disk and the file"))
    return MediaError(path, reason, what_to_do)
