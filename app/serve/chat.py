"""Requests of OpenAI's chat protocol: their fields and errors."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import HTTPException
from pydantic import BaseModel, BeforeValidator, Field, ValidationError

from mmspec.app.engine import sampling_settings
from mmspec.app.media.pictures import PictureLoader
from mmspec.media import MediaError

# types of errors by status; others are invalid requests
KINDS = {429: "rate_limit_error", 500: "server_error", 503: "server_error"}
MESSAGES, STOPS, STOP_LENGTH = 1024, 16, 256  # maximum number of messages, and of their parts; of stop strings
NEUTRAL: dict[str, tuple[object, ...]] = {  # unsupported fields → values that have no effect, besides null
    "n": (1,), "logprobs": (False,), "top_logprobs": (0,), "logit_bias": ({},), "tools": ([],), "functions": ([],),
    "presence_penalty": (0,), "frequency_penalty": (0,), "tool_choice": ("none", "auto"), "audio": (),
    "max_new_tokens": (),
}  # fmt: skip


class ChatError(HTTPException):
    """A request is refused; `detail` is the error in OpenAI's format."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        kind = KINDS.get(status, "invalid_request_error")
        super().__init__(status, {"message": message, "type": kind, "param": param, "code": code})


class _Url(BaseModel):
    url: str


class _Part(BaseModel):
    type: Literal["text", "image_url"]
    text: str | None = None
    image_url: _Url | None = None


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
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0)
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
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"])) or None
            raise ChatError(400, f"{place or 'the body'}: {first['msg']}", place) from error
        for name, value in (request.model_extra or {}).items():
            if value not in (None, *NEUTRAL.get(name, (value,))):
                raise ChatError(400, f"{name} is not supported; leave it out", name, "unsupported_parameter")
        if request.messages[-1].role == "assistant":
            raise ChatError(400, "the last message must be the user's; got the assistant's", "messages")
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
        drawn = sampling_settings(warmth, top_p=self.top_p or 1.0, top_k=self.top_k or 0)
        own = self.model_dump(include={"min_p", "repetition_penalty"}, exclude_none=True)
        return {"max_new_tokens": self.max_completion_tokens or self.max_tokens or most, **drawn, **own}

    async def chat(self, pictures: PictureLoader) -> list[dict[str, Any]]:
        """The messages in the format of chat templates; ChatError if the pictures cannot be loaded."""
        parts = [part for message in self.messages for part in message.content if part.type == "image_url"]
        try:
            loaded = iter(await pictures.load_all([part.image_url.url if part.image_url else "" for part in parts]))
        except MediaError as error:
            advice = error.what_to_do.split(", or raise")[0]
            raise ChatError(400, f"the picture {error.reason}; {advice}", "messages", "invalid_image") from error

        def shown(part: _Part) -> dict[str, Any]:
            text = part.type == "text"
            return {"type": "text", "text": part.text or ""} if text else {"type": "image", "image": next(loaded)}

        return [
            {"role": message.role.replace("developer", "system"), "content": [*map(shown, message.content)]}
            for message in self.messages
        ]
