"""Requests of OpenAI's chat protocol: parsing, pictures, the text of answers, and errors."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal
from urllib.request import url2pathname, urlopen

from PIL import Image
from pydantic import BaseModel, Field, ValidationError, model_validator

from mmspec.app.media.decoder import Decoder
from mmspec.app.media.items import IMAGE, Item, bytes_source
from mmspec.app.media.video import FramePolicy
from mmspec.media import Media, MediaError, MediaLimits, read

SECONDS = 20.0  # time limit to fetch a picture, and to decode it
COLD = 1e-5  # temperatures up to this are greedy, since logits divided by them could be infinite
KINDS = {429: "rate_limit_error", 500: "server_error"}  # types of errors by status; others are invalid requests
NEUTRAL: dict[str, tuple[object, ...]] = {  # unsupported fields → values that have no effect
    "n": (1,), "logprobs": (False,), "top_logprobs": (0,), "logit_bias": ({},), "tools": ([],), "functions": ([],),
    "presence_penalty": (0,), "frequency_penalty": (0,), "tool_choice": ("none", "auto"), "audio": (),
}  # fmt: skip


class ChatError(Exception):
    """A request is refused; has the status and the body in OpenAI's format."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        kind = KINDS.get(status, "invalid_request_error")
        self.status, self.body = status, {"message": message, "type": kind, "param": param, "code": code}
        super().__init__(message)


class _Body(BaseModel):
    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, body: Any) -> Any:
        """Clients send null for what they leave out."""
        return {name: value for name, value in body.items() if value is not None} if isinstance(body, dict) else body


class _Address(_Body):
    url: str


class _Part(_Body):
    type: Literal["text", "image_url"]
    text: str = ""
    image_url: _Address = _Address(url="")


class _Message(_Body):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[_Part]

    @property
    def parts(self) -> list[_Part]:
        return [_Part(type="text", text=self.content)] if isinstance(self.content, str) else self.content


class _Schema(_Body):
    value: dict[str, Any] = Field(alias="schema")


class _Format(_Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: _Schema | None = None


class ChatRequest(_Body, extra="allow"):
    """The supported fields; fields in NEUTRAL are refused unless they have no effect, and others are ignored."""

    messages: list[_Message] = Field(min_length=1)
    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    seed: int = Field(default_factory=lambda: secrets.randbits(31))
    stop: str | list[str] | None = None
    response_format: _Format = _Format(type="text")
    stream: bool = False
    stream_options: dict[str, Any] | None = None

    @classmethod
    def parse(cls, body: bytes) -> ChatRequest:
        """Parse a request; ChatError if it is invalid or uses unsupported features."""
        try:
            request = cls.model_validate_json(body)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"])) or None
            raise ChatError(400, f"{place or 'the body'}: {first['msg']}", place) from error
        for name, value in (request.model_extra or {}).items():
            if value not in NEUTRAL.get(name, (value,)):
                raise ChatError(400, f"{name} is not supported; leave it out", name, "unsupported_parameter")
        if request.response_format.type == "json_schema" and request.response_format.json_schema is None:
            raise ChatError(400, "response_format: type is json_schema, but the schema is missing", "response_format")
        if request.messages[-1].role == "assistant":
            raise ChatError(400, "the last message must be the user's; got the assistant's", "messages")
        return request

    @property
    def stops(self) -> list[str]:
        return [stop for stop in ([self.stop] if isinstance(self.stop, str) else self.stop or []) if stop]

    @property
    def answer_schema(self) -> dict[str, Any] | None:
        schema = self.response_format.json_schema
        anything = {"type": "object"} if self.response_format.type == "json_object" else None
        return anything if schema is None else schema.value

    def settings(self, temperature: float, most: int) -> dict[str, Any]:
        """The settings for `generate`; the arguments are defaults for what the request does not set."""
        warmth = temperature if self.temperature is None else self.temperature
        warmth = warmth if warmth > COLD else 0
        drawn = {"temperature": warmth, "top_p": self.top_p, "top_k": self.top_k} if warmth else {}
        most = self.max_completion_tokens or self.max_tokens or most
        return {"max_new_tokens": most, "do_sample": bool(warmth), **drawn}

    def chat(self, picture: Any) -> Iterator[dict[str, Any]]:
        """The turns in the format of chat templates; `picture(url, before)` loads a picture and adds it to `before`,
        the earlier pictures of the request."""
        before: list[Image.Image] = []
        for message in self.messages:
            shown = [
                {"type": "text", "text": part.text}
                if part.type == "text"
                else {"type": "image", "image": picture(part.image_url.url, before)}
                for part in message.parts
            ]
            yield {"role": message.role.replace("developer", "system"), "content": shown}


class Pictures:
    """Loads pictures by their URLs and decodes them in worker processes; a context manager.

    Args:
        limits: limits for each picture.
        folder: `file://` URLs are read only below this folder; None: not at all.
        http: whether http(s) URLs are fetched, from any host that this machine can reach.
        decoders: number of processes.
    """

    def __init__(self, limits: MediaLimits, folder: Path | None, http: bool, decoders: int) -> None:
        self._limits, self._folder, self._http = limits, folder and folder.resolve(), http
        self._decoders = [Decoder(1, limits, FramePolicy("uniform", 1)) for _ in range(decoders)]
        self._free: SimpleQueue[Decoder] = SimpleQueue()

    def __enter__(self) -> Pictures:
        for decoder in self._decoders:
            self._free.put(decoder.__enter__())
        return self

    def __exit__(self, *error: object) -> None:
        for decoder in self._decoders:
            decoder.close()

    def load(self, url: str, before: list[Image.Image]) -> Image.Image:
        """Load a picture. ChatError if that fails, or if the request's pictures have too many pixels in total."""
        try:
            shown = self._decoded(self._bytes(url))
        except MediaError as error:
            advice = error.what_to_do.split(", or raise")[0]
            raise ChatError(400, f"the picture {error.reason}; {advice}", "messages", "invalid_image") from error
        before.append(shown.frames[0])
        pixels, most = sum(one.width * one.height for one in before), self._limits.max_pixels
        if pixels > most:
            why = f"the first {len(before)} pictures have {pixels} pixels, over {most} for all of a request"
            raise ChatError(400, f"{why}; send fewer or smaller ones", "messages", "invalid_image")
        return shown.frames[0]

    def _decoded(self, data: bytes) -> Media:
        decoder = self._free.get()
        try:
            return decoder.one(Item("picture", IMAGE, bytes_source(data)))
        finally:
            self._free.put(decoder)

    def _bytes(self, url: str) -> bytes:
        kind, _, rest = url.partition(":")
        if kind == "file" and self._folder is not None:
            path = Path(url2pathname(rest.removeprefix("//"))).resolve()
            if path.is_relative_to(self._folder):
                return read(path, self._limits.max_bytes)
        if kind == "data" or (kind in ("http", "https") and self._http):
            try:
                with urlopen(url, timeout=SECONDS) as answer:
                    return b"".join(self._pieces(answer))
            except (OSError, ValueError, HTTPException) as error:
                raise MediaError("picture", f"cannot be fetched ({error})", "send it as a data URL") from error
        reason = f"has a URL that this server does not open ({url[:60]!r})"
        raise MediaError("picture", reason, "send it as a data URL, or see --allow-http and --allow-files")

    def _pieces(self, answer: Any) -> Iterator[bytes]:
        """Read a response up to one byte over the limit; OSError if it comes too slowly."""
        end, room = time.monotonic() + SECONDS, self._limits.max_bytes + 1
        while room and (data := answer.read1(min(room, 2**16))):
            yield data
            room -= len(data)
            if time.monotonic() > end:
                raise TimeoutError(f"not complete after {SECONDS:g} s")


class AnswerText:
    """The text of a growing answer, up to the first stop string; `stopped` says whether one was found."""

    def __init__(self, tokenizer: Any, stops: list[str]) -> None:
        self._tokenizer, self._stops, self.stopped = tokenizer, stops, False
        self._text, self._begin, self._end, self._sent = "", 0, 0, 0

    def read(self, tokens: list[int], last: bool) -> str:
        """The new text, without an incomplete character or what may be the beginning of a stop string.

        If an answer is generated again from its beginning, there is no new text until it is as long as before.
        """
        if len(tokens) <= self._end and not last:
            return ""
        before, now = (
            self._tokenizer.decode(some, skip_special_tokens=True)
            for some in (tokens[self._begin : self._end], tokens[self._begin :])
        )
        if last or not now.endswith("\ufffd"):
            self._text += now[len(before) :]
            self._begin, self._end = self._end, len(tokens)
        places = [place for stop in self._stops if (place := self._text.find(stop)) >= 0]
        self.stopped, self._text = bool(places), self._text[: min(places, default=None)]
        begins = (n for stop in self._stops for n in range(len(stop)) if self._text.endswith(stop[:n]))
        sure = len(self._text) - (0 if last or self.stopped else max(begins, default=0))
        piece, self._sent = self._text[self._sent : sure], max(self._sent, sure)
        return piece
