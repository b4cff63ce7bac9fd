"""Pictures by their URLs, as requests to a server name them."""

from __future__ import annotations

import asyncio
from functools import partial
from urllib.request import urlopen

import httpx
from PIL import Image

from mmspec.app.media.decoder import Decoder
from mmspec.app.media.items import IMAGE, Item, Source, bytes_source
from mmspec.app.media.video import FramePolicy
from mmspec.media import MediaError, MediaLimits

DECODERS, FETCHES = 2, 64  # processes; addresses that are fetched at once


class PictureLoader(Decoder):
    """Loads pictures by their URLs and decodes them in worker processes; a context manager.

    Args:
        limits: limits for each picture; `seconds` is the time limit to fetch it, and to decode it.
        http: whether http(s) URLs are fetched, from any host that this machine can reach; otherwise only data URLs.
    """

    def __init__(self, limits: MediaLimits, http: bool) -> None:
        super().__init__(DECODERS, limits, FramePolicy("uniform", 1))
        self.limits, self.schemes = limits, ("data", "http", "https") if http else ("data",)
        self._tls, self._turns = httpx.create_ssl_context() if http else False, asyncio.Semaphore(FETCHES)

    async def load(self, url: str) -> Image.Image:
        """The picture at a URL; MediaError if it cannot be loaded."""
        scheme = url.partition(":")[0].lower()
        if scheme not in self.schemes:
            why = f"has a URL that this server does not open ({url[:60]!r})"
            raise MediaError("picture", why, "send it as a data URL, or see --allow-http")
        source = Source(scheme, partial(_data, url)) if scheme == "data" else bytes_source(await self._content(url))
        return (await self.awaited(Item("picture", IMAGE, source))).frames[0]

    async def _content(self, url: str) -> bytes:
        """The content of an address; a little more than the limit says that it is larger. MediaError."""
        data, seconds = bytearray(), self.limits.seconds
        try:
            async with (
                self._turns,
                asyncio.timeout(seconds),
                httpx.AsyncClient(verify=self._tls, follow_redirects=True, timeout=None) as client,
                client.stream("GET", url) as answer,
            ):
                answer.raise_for_status()
                async for piece in answer.aiter_bytes():
                    data += piece
                    if len(data) > self.limits.max_bytes:
                        break
        except (TimeoutError, httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            why = f"not complete after {seconds:g} s" if isinstance(error, TimeoutError) else str(error).split("\n")[0]
            raise MediaError("picture", f"cannot be fetched ({why})", "send it as a data URL") from error
        return bytes(data)


def _data(url: str, max_bytes: int) -> bytes:
    """The content of a data URL; MediaError."""
    try:
        with urlopen("data:" + url.partition(":")[2]) as content:
            return content.read()  # type: ignore[no-any-return]
    except (OSError, ValueError) as error:
        advice = "write data:image/jpeg;base64, and the file in base64"
        raise MediaError("picture", "has a data URL that cannot be read", advice) from error
