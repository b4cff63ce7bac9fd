"""Pictures by their URLs, as requests to a server name them."""

from __future__ import annotations

import time
from http.client import HTTPException
from urllib.request import urlopen

from PIL import Image

from mmspec.app.media.decoder import Decoder
from mmspec.app.media.items import IMAGE, Item, bytes_source
from mmspec.app.media.video import FramePolicy
from mmspec.media import MediaError, MediaLimits

DECODERS = 2  # processes


class PictureLoader(Decoder):
    """Loads pictures by their URLs and decodes them in worker processes; a context manager.

    Args:
        limits: limits for each picture; `seconds` is the time limit to fetch it, and to decode it.
        http: whether http(s) URLs are fetched, from any host that this machine can reach; otherwise only data URLs.
    """

    def __init__(self, limits: MediaLimits, http: bool) -> None:
        super().__init__(DECODERS, limits, FramePolicy("uniform", 1))
        self.limits, self.schemes = limits, ("data:", "http:", "https:") if http else ("data:",)

    def load(self, url: str) -> Image.Image:
        """The picture at a URL; MediaError if it cannot be loaded."""
        if not url.startswith(self.schemes):
            reason = f"has a URL that this server does not open ({url[:60]!r})"
            raise MediaError("picture", reason, "send it as a data URL, or see --allow-http")
        data = fetch(url, self.limits.max_bytes, self.limits.seconds)  # the decoder refuses what is over the limit
        return self.one(Item("picture", IMAGE, bytes_source(data))).frames[0]


def fetch(url: str, max_bytes: int, seconds: float) -> bytes:
    """The content of a URL, within a time limit; a byte more than `max_bytes` says that it is larger. MediaError."""
    data, end = bytearray(), time.monotonic() + seconds
    try:
        with urlopen(url, timeout=seconds) as answer:
            while len(data) <= max_bytes and (piece := answer.read1(2**20)):
                data += piece
                if time.monotonic() > end:
                    raise TimeoutError(f"not complete after {seconds:g} s")
    except (OSError, ValueError, HTTPException) as error:
        raise MediaError("picture", f"cannot be fetched ({error})", "send it as a data URL") from error
    return bytes(data[: max_bytes + 1])
