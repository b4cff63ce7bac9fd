"""Images from folders nobody vouches for: find them, and turn each into one right RGB picture or a clear error."""

from __future__ import annotations

import errno
import io
import os
import stat
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

MAX_PIXELS = 50_000_000  # checked against the header, before anything is decoded; 150 MB as RGB
MAX_BYTES = 512 * 2**20  # size on disk
MAX_ASPECT = 200  # a 1 x 50 000 strip passes the pixel limit, yet a resize of its short side would take all memory

JPEG_NAMES = {".jfif", ".jpe", ".jpeg", ".jpg"}
OTHER_NAMES = {".apng", ".avif", ".bmp", ".gif", ".png", ".ppm", ".pgm", ".tif", ".tiff", ".webp"}
UNREADABLE_NAMES = {".heic", ".heif"}  # found, so that their owner learns that they got no caption
EXTENSIONS = JPEG_NAMES | OTHER_NAMES | UNREADABLE_NAMES
# Formats Pillow may try. Left out on purpose: EPS (starts Ghostscript), TGA (has no signature, so that any bytes may
# pass for one), JPEG 2000 (a cut-off file can decode without an error).
FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
CONVERT = "save it again as JPEG or PNG"
COPY_AGAIN = "copy or download it again"


class MediaError(Exception):
    """One file or folder that cannot be used: which, why, and what its owner can do about it."""

    def __init__(self, path: Path | str, reason: str, what_to_do: str):
        self.path, self.reason, self.what_to_do = Path(path), reason, what_to_do
        super().__init__(f"{path}: {reason}; {what_to_do}")

    def __reduce__(self) -> tuple:
        """Pickle by the three arguments, so that a worker process can hand the error on."""
        return type(self), (self.path, self.reason, self.what_to_do)


def find(path: Path | str, recursive: bool = False) -> list[Path]:
    """Images (by extension) of a folder in a stable order, or the one image named; hidden files are left out."""
    path = Path(path)
    if not path.exists():
        raise MediaError(path, "no such file or folder", "give a folder with images, or one image")
    if not path.is_dir():
        return [path]  # named by hand, so it is tried whatever its extension
    found: list[Path] = []
    for folder, below, names in os.walk(path, onerror=_refuse(path)):
        below[:] = sorted(name for name in below if recursive and not name.startswith("."))
        found += [Path(folder, name) for name in names if _looks_like_image(name)]
    if not found:
        advice = f"known extensions are {' '.join(sorted(EXTENSIONS))}"
        raise MediaError(path, "no images found", advice if recursive else f"add --recursive for subfolders; {advice}")
    return sorted(found, key=lambda image: image.relative_to(path).parts)


def neighbours(image: Path) -> list[Path]:
    """The image and all others of its folder."""
    return sorted({image, *(image.parent / name for name in os.listdir(image.parent) if _looks_like_image(name))})


def load_image(path: Path | str, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """The picture in `path` as upright RGB: first frame of an animation, transparency on white, 16 bits scaled to 8."""
    return decode(read(path), path, max_pixels)


def read(path: Path | str) -> bytes:
    """Bytes of a regular file of sensible size; pipes, devices, folders and symlink loops are refused unopened."""
    path = Path(path)
    try:
        found = path.stat()
        if stat.S_ISDIR(found.st_mode):
            raise MediaError(path, "is a folder, not an image", "rename it, or add --recursive to look inside")
        if not stat.S_ISREG(found.st_mode):
            raise MediaError(path, "is a pipe or device, not a file", "remove it from the folder")
        if found.st_size == 0:
            raise MediaError(path, "is empty (0 bytes)", COPY_AGAIN)
        if found.st_size > MAX_BYTES:
            raise MediaError(path, f"has {found.st_size / 2**20:.0f} MiB, over {MAX_BYTES // 2**20}", "make it smaller")
        return path.read_bytes()
    except OSError as error:
        raise _explained(path, error) from error


def decode(data: bytes, path: Path | str, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """RGB picture out of the bytes of an image file; `path` is for the messages. The one place where Pillow decodes."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # notes on odd metadata; but Pillow's guard against bombs must stop us:
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                _check_size(image.size, path, max_pixels)
                image.load()  # verify() passes a truncated JPEG
                return _rgb(_upright(image))
    except MediaError:
        raise
    except Image.UnidentifiedImageError as error:
        raise MediaError(path, "is not an image that can be read here", CONVERT) from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        reason = "declares more pixels than can be opened safely (a decompression bomb?)"
        raise MediaError(path, reason, "make it smaller") from error
    except Exception as error:  # a decoder fed with hostile bytes may raise anything at all
        raise MediaError(path, f"is damaged or cut off ({type(error).__name__}: {error})", COPY_AGAIN) from error


def _check_size(size: tuple[int, int], path: Path | str, max_pixels: int) -> None:
    width, height = size
    if width * height > max_pixels:
        reason = f"{width} x {height} is {width * height / 1e6:.0f} million pixels, over {max_pixels / 1e6:.0f} million"
        raise MediaError(path, reason, "make the image smaller")
    if max(size) > MAX_ASPECT * min(size):
        raise MediaError(path, f"{width} x {height} is longer than {MAX_ASPECT} times its width", "crop it")


def _upright(image: Image.Image) -> Image.Image:
    """The image turned as its EXIF orientation says; one whose EXIF block is broken stays as it is stored."""
    try:
        orientation = image.getexif().get(0x0112, 1)
    except Exception:  # EXIF is parsed lazily out of hostile bytes; without it no orientation is known
        return image
    return ImageOps.exif_transpose(image) if orientation in range(2, 9) else image


def _rgb(image: Image.Image) -> Image.Image:
    """RGB in 8 bits; whatever is transparent shows a white page."""
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        return Image.fromarray(_eight_bits(image)).convert("RGB")
    if image.has_transparency_data:
        picture = image.convert("RGBA")
        page = Image.new("RGBA", picture.size, "white")
        return Image.alpha_composite(page, picture).convert("RGB")
    return image.convert("RGB")


def _eight_bits(image: Image.Image) -> np.ndarray:
    """Grey levels 0..255: 16 bits over their whole range, 32-bit integers and floats over the range they use."""
    grey = np.nan_to_num(np.asarray(image, dtype=np.float64), posinf=0.0, neginf=0.0)
    low, high = (0.0, 65535.0) if image.mode.startswith("I;16") else (grey.min(), grey.max())
    return np.rint((grey - low) * (255.0 / max(high - low, 1e-12))).astype(np.uint8)


def _looks_like_image(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in EXTENSIONS and not name.startswith(".")


def _refuse(top: Path) -> Callable[[OSError], None]:
    """How os.walk reports a folder it cannot list: fatal for the top one, a warning for one further down."""

    def report(error: OSError) -> None:
        refusal = _explained(Path(error.filename or top), error)
        if refusal.path == top:
            raise refusal from error
        warnings.warn(f"left out: {refusal}", stacklevel=2)

    return report


def _explained(path: Path, error: OSError) -> MediaError:
    reason, what_to_do = {
        errno.ENOENT: ("is missing or a dangling link", "restore it, or remove the link"),
        errno.EACCES: ("may not be read", "change its permissions (chmod u+r)"),
        errno.EPERM: ("may not be read", "change its permissions (chmod u+r)"),
        errno.ELOOP: ("is a symbolic link that leads to itself", "remove the link"),
    }.get(error.errno or 0, (f"cannot be read ({error.strerror or error})", "check the disk and the file"))
    return MediaError(path, reason, what_to_do)
