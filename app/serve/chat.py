"""Requests of OpenAI's chat protocol: their fields and errors."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, ValidationError

from mmspec.app.engine import sampling_settings
from mmspec.app.media.pictures import PictureLoader
from mmspec.media import MediaError

# types of errors by status; others are invalid requests
KINDS = {429: "rate_limit_error", 500: "server_error", 503: "server_error"}
PICTURES = 256  # maximum number of pictures in a request
MESSAGES, STOPS, STOP_LENGTH = 1024, 16, 256  # maximum number of messages, and of their parts; of stop strings
NEUTRAL: dict[str, tuple[object, ...]] = {  # unsupported fields → values that have no effect, besides null
    "n": (1,), "logprobs": (False,), "top_logprobs": (0,), "logit_bias": ({},), "tools": ([],), "functions": ([],),
    "presence_penalty": (0,), "frequency_penalty": (0,), "tool_choice": ("none", "auto"), "audio": (),
    "repetition_penalty": (1,), "min_p": (0,), "max_new_tokens": (),
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
_Stop = Annotated[str, Field(max_length=STOP_LENGTH)]
_PARTS = BeforeValidator(lambda text: [{"type": "text", "text": text or ""}] if isinstance(text, str | None) else text)
_LISTED = BeforeValidator(lambda stop: [stop] if isinstance(stop, str) else stop or [])


class _Message(BaseModel):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[list[_Part], Field(max_length=MESSAGES), _PARTS]


class _Format(BaseModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None  # the schema itself is its field "schema"


class ChatRequest(BaseModel, extra="allow"):
    """The supported fields; null is as good as leaving a field out. For other fields, see NEUTRAL."""

    messages: list[_Message] = Field(min_length=1, max_length=MESSAGES)
    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0)
    seed: int | None = None
    stop: Annotated[list[_Stop], Field(max_length=STOPS), _LISTED] = []
    response_format: _Format | None = None
    chat_template_kwargs: dict[Literal["enable_thinking"], bool] | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None

    @classmethod
    def parse(cls, body: bytes) -> ChatRequest:
        """Parse a request; ChatError if it is invalid or uses unsupported features."""
        try:
            request = cls.model_validate_json(body)
        except ValidationError as error:
            first = max(error.errors(), key=lambda one: len(one["loc"]))  # of alternatives, the one that fits most
            loc = first["loc"]  # has the type of a part after its number
            place = ".".join(str(key) for at, key in enumerate(loc) if at < 2 or loc[at - 2] != "content") or None
            raise ChatError(400, f"{place or 'the body'}: {first['msg']}", place) from error
        for name, value in (request.model_extra or {}).items():
            if value not in (None, *NEUTRAL.get(name, (value,))):
                raise ChatError(400, f"{name} is not supported; leave it out", name, "unsupported_parameter")
        if request.messages[-1].role == "assistant":
            raise ChatError(400, "the last message must be the user's; got the assistant's", "messages")
        pictures = sum(isinstance(part, _Picture) for message in request.messages for part in message.content)
        if pictures > PICTURES:
            raise ChatError(400, f"a request may have {PICTURES} pictures; got {pictures}", "messages")
        return request

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
        most = self.max_completion_tokens or self.max_tokens or most
        drawn = sampling_settings(warmth, top_p=self.top_p or 1.0, top_k=self.top_k or 0)
        own = {"repetition_penalty": 1.0} if (self.model_extra or {}).get("repetition_penalty") else {}
        return own | {"max_new_tokens": most, **drawn}  # its own in place of that of the model's generation_config

    async def chat(self, pictures: PictureLoader) -> list[dict[str, Any]]:
        """The messages in the format of chat templates; ChatError if a picture cannot be loaded or all are too big.

        Pictures are loaded one by one, so that requests with few of them need not wait for one with many.
        """
        room = pictures.limits.max_pixels

        async def shown(part: _Part) -> dict[str, Any]:
            nonlocal room
            if isinstance(part, _Text):
                return part.model_dump()
            try:
                picture = await pictures.load(part.image_url.url)
                room -= picture.width * picture.height
                if room < 0:
                    why = f"goes over {pictures.limits.max_pixels} pixels, the limit for all of a request's pictures"
                    raise MediaError("picture", why, "send fewer or smaller ones")
            except MediaError as error:
                advice = error.what_to_do.split(", or raise")[0]
                raise ChatError(400, f"the picture {error.reason}; {advice}", "messages", "invalid_image") from error
            return {"type": "image", "image": picture}

        return [
            {"role": message.role.replace("developer", "system"), "content": [await shown(p) for p in message.content]}
            for message in self.messages
        ]
