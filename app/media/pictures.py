"""Pictures by their URLs, as requests to a server name them."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Sequence
from functools import partial

import httpx
from PIL import Image

from mmspec.app.media.decoder import Decoder
from mmspec.app.media.items import IMAGE, Item, Source, bytes_source
from mmspec.app.media.video import FramePolicy
from mmspec.media import MediaError, MediaLimits, read_url

DECODERS, FETCHES = 2, 64  # processes; addresses that are fetched at once
MOST = 256  # maximum number of pictures that are loaded together
PLAIN = {"Accept-Encoding": "identity"}  # what a few compressed bytes hold may be gigabytes


class PictureLoader(Decoder):
    """Loads pictures by their URLs and decodes them in worker processes; a context manager.

    Args:
        limits: limits for each picture; `seconds` is the time limit to fetch it, and to decode it.
        http: whether http(s) URLs are fetched, from any host that this machine can reach; otherwise only data URLs.
    """

    def __init__(self, limits: MediaLimits, http: bool) -> None:
        super().__init__(DECODERS, limits, FramePolicy("uniform", 1))
        self.limits, self.schemes = limits, ("data", "http", "https") if http else ("data",)
        self._tls, self._turns = http and ssl.create_default_context(), asyncio.Semaphore(FETCHES)

    async def load_all(self, urls: Sequence[str]) -> list[Image.Image]:
        """The pictures at these URLs, together within `max_pixels`; MediaError if one of them cannot be loaded.

        They are loaded one by one, so that whoever asks for a few need not wait for whoever asks for many.
        """
        if len(urls) > MOST:
            raise MediaError("picture", f"is one of {len(urls)}; {MOST} are allowed", "send fewer")
        loaded, room = list[Image.Image](), self.limits.max_pixels
        for url in urls:
            loaded.append(await self.load(url))
            room -= loaded[-1].width * loaded[-1].height
            if room < 0:
                why = f"goes over {self.limits.max_pixels} pixels, the limit for all of a request's pictures"
                raise MediaError("picture", why, "send fewer or smaller ones")
        return loaded

    async def load(self, url: str) -> Image.Image:
        """The picture at a URL; MediaError if it cannot be loaded."""
        scheme = url.partition(":")[0].lower()
        if scheme not in self.schemes:
            why = f"has a URL that this server does not open ({url[:60]!r})"
            raise MediaError("picture", why, "send it as a data URL, or see --allow-http")
        whole = scheme == "data"
        source = Source("data", partial(read_url, url)) if whole else bytes_source(await self._content(url))
        return (await self.awaited(Item("picture", IMAGE, source))).frames[0]

    async def _content(self, url: str) -> bytes:
        """The content of an address; a little more than the limit says that it is larger. MediaError."""
        data, seconds = bytearray(), self.limits.seconds
        try:
            async with (
                self._turns,
                asyncio.timeout(seconds),
                httpx.AsyncClient(verify=self._tls, follow_redirects=True, timeout=None) as client,
                client.stream("GET", url, headers=PLAIN) as answer,
            ):
                answer.raise_for_status()
                async for piece in answer.aiter_raw():
                    data += piece
                    if len(data) > self.limits.max_bytes:
                        break
        except (TimeoutError, httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            why = str(error).partition("\n")[0] or f"{type(error).__name__} within {seconds:g} s"
            raise MediaError("picture", f"cannot be fetched ({why})", "send it as a data URL") from error
        return bytes(data)
