"""Requests of OpenAI's chat protocol: their fields, their pictures, and errors."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from PIL import Image
from pydantic import BaseModel, Field, ValidationError

from mmspec.app.media.decoder import Decoder
from mmspec.app.media.items import IMAGE, Item, bytes_source
from mmspec.app.media.remote import fetch
from mmspec.app.media.video import FramePolicy
from mmspec.media import MediaError, MediaLimits

DECODERS = 2  # processes
SECONDS = 20.0  # time limit to fetch a picture, and to decode it
COLD = 1e-5  # temperatures up to this are greedy, since logits divided by them could be infinite
KINDS = {429: "rate_limit_error", 500: "server_error"}  # types of errors by status; others are invalid requests
NEUTRAL: dict[str, tuple[object, ...]] = {  # unsupported fields → values that have no effect, besides null
    "n": (1,), "logprobs": (False,), "top_logprobs": (0,), "logit_bias": ({},), "tools": ([],), "functions": ([],),
    "presence_penalty": (0,), "frequency_penalty": (0,), "tool_choice": ("none", "auto"), "audio": (),
}  # fmt: skip


class ChatError(Exception):
    """A request is refused; has the status and the body in OpenAI's format."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        kind = KINDS.get(status, "invalid_request_error")
        self.status, self.body = status, {"message": message, "type": kind, "param": param, "code": code}
        super().__init__(message)


class _Text(BaseModel):
    type: Literal["text"]
    text: str = ""


class _Url(BaseModel):
    url: str


class _Picture(BaseModel):
    type: Literal["image_url"]
    image_url: _Url


_Part = Annotated[_Text | _Picture, Field(discriminator="type")]


class _Message(BaseModel):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[_Part]

    @property
    def parts(self) -> list[_Part]:
        return [_Text(type="text", text=self.content)] if isinstance(self.content, str) else self.content


class _Format(BaseModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None  # the schema itself is its field "schema"


class ChatRequest(BaseModel, extra="allow"):
    """The supported fields; null is as good as leaving a field out. For other fields, see NEUTRAL."""

    messages: list[_Message] = Field(min_length=1)
    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0)
    seed: int | None = None
    stop: str | list[str] | None = None
    response_format: _Format | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None

    @classmethod
    def parse(cls, body: bytes) -> ChatRequest:
        """Parse a request; ChatError if it is invalid or uses unsupported features."""
        try:
            request = cls.model_validate_json(body)
        except ValidationError as error:
            first = max(error.errors(), key=lambda one: len(one["loc"]))  # of alternatives, the one that fits most
            place = ".".join(map(str, first["loc"])) or None
            raise ChatError(400, f"{place or 'the body'}: {first['msg']}", place) from error
        for name, value in (request.model_extra or {}).items():
            if value not in (None, *NEUTRAL.get(name, (value,))):
                raise ChatError(400, f"{name} is not supported; leave it out", name, "unsupported_parameter")
        if request.messages[-1].role == "assistant":
            raise ChatError(400, "the last message must be the user's; got the assistant's", "messages")
        return request

    @property
    def stops(self) -> list[str]:
        return [stop for stop in ([self.stop] if isinstance(self.stop, str) else self.stop or []) if stop]

    @property
    def schema_of_answer(self) -> dict[str, Any] | None:
        """The JSON schema that the answer must have; ChatError if the request announces one without giving it."""
        form = self.response_format
        if form is None or form.type == "text":
            return None
        schema = {"type": "object"} if form.type == "json_object" else (form.json_schema or {}).get("schema")
        if not isinstance(schema, dict):
            raise ChatError(400, "response_format: type is json_schema, but the schema is missing", "response_format")
        return schema

    def settings(self, temperature: float, most: int) -> dict[str, Any]:
        """The settings for `generate`; the arguments are defaults for what the request does not set."""
        warmth = temperature if self.temperature is None else self.temperature
        drawn = {"temperature": warmth, "top_p": self.top_p or 1.0, "top_k": self.top_k or 0} if warmth > COLD else {}
        most = self.max_completion_tokens or self.max_tokens or most
        return {"max_new_tokens": most, "do_sample": bool(drawn), **drawn}


class Pictures(contextlib.ExitStack):
    """Loads pictures by their URLs and decodes them in worker processes; a context manager.

    Args:
        limits: limits for each picture; `max_pixels` also for all pictures of a request.
        http: whether http(s) URLs are fetched, from any host that this machine can reach.
    """

    def __init__(self, limits: MediaLimits, http: bool) -> None:
        super().__init__()
        self._limits, self._http = limits, http
        self._decoder = self.enter_context(Decoder(DECODERS, limits, FramePolicy("uniform", 1)))

    def chat(self, messages: Sequence[_Message]) -> list[dict[str, Any]]:
        """The messages in the format of chat templates; ChatError if a picture cannot be loaded or all are too big."""
        pixels, most = 0, self._limits.max_pixels

        def shown(part: _Part) -> dict[str, Any]:
            nonlocal pixels
            if isinstance(part, _Text):
                return part.model_dump()
            picture = self.load(part.image_url.url)
            pixels += picture.width * picture.height
            if pixels > most:
                why = f"the request's pictures have over {most} pixels, the limit for all of them"
                raise ChatError(400, f"{why}; send fewer or smaller ones", "messages", "invalid_image")
            return {"type": "image", "image": picture}

        roles = [message.role.replace("developer", "system") for message in messages]
        contents = ([shown(part) for part in message.parts] for message in messages)
        return [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]

    def load(self, url: str) -> Image.Image:
        """The picture at a URL; ChatError if it cannot be loaded."""
        try:
            if not url.startswith(("data:", *(("http:", "https:") if self._http else ()))):
                reason = f"has a URL that this server does not open ({url[:60]!r})"
                raise MediaError("picture", reason, "send it as a data URL, or see --allow-http")
            data = fetch(url, self._limits.max_bytes, SECONDS)  # the decoder refuses what is over the limit
            return self._decoder.one(Item("picture", IMAGE, bytes_source(data))).frames[0]
        except MediaError as error:
            advice = error.what_to_do.split(", or raise")[0]
            raise ChatError(400, f"the picture {error.reason}; {advice}", "messages", "invalid_image") from error
