"""The server's endpoints, in OpenAI's formats."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import uvicorn
from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from mmspec.app.devices import first_line
from mmspec.app.engine import Engine
from mmspec.app.media.pictures import PictureLoader
from mmspec.app.options import is_local
from mmspec.app.serve.chat import ChatError, ChatRequest
from mmspec.pipelines.host.processors.grammar import GrammarError, json_grammar
from mmspec.pipelines.host.reach import room_after
from mmspec.pipelines.prompts import inputs_of
from mmspec.pipelines.serving.async_batcher import AnswerPart, AsyncBatcher

T = TypeVar("T")
Fields = dict[str, Any]
KEEP_ALIVE = 75  # seconds that an idle connection stays open; clients that reuse it wait less between two requests
ENDED = "the server is being ended"
UPLOAD = 60.0  # seconds within which a request's body must arrive


@dataclass
class Service:
    """The state that the endpoints share."""

    engine: Engine
    worker: AsyncBatcher
    pictures: PictureLoader
    name: str  # the model's name for clients
    most: int  # default of a request's maximum number of new tokens
    temperature: float  # default of a request's temperature
    queue: int  # how many requests may wait besides those in the batch
    max_bytes: int  # maximum size of a request
    key: str | None = None  # the API key that clients must send
    open: int = 0  # number of open requests

    async def check_key(self, request: Request) -> None:  # async: the threads are for slower work
        given = request.headers.get("authorization", "")
        host = re.sub(r":\d+$", "", request.headers.get("host", "").lower())
        if self.key is None and not is_local(host):  # a web page in this machine's browser
            raise ChatError(403, f"without --key only this machine may ask, not {host!r} (Host)")
        if self.key is not None and not secrets.compare_digest(given.encode(), f"Bearer {self.key}".encode()):
            raise ChatError(401, "the right API key is required: Authorization: Bearer KEY", None, "invalid_api_key")

    def model(self, name: str | None) -> Fields:
        """The model's description; ChatError if it has another name."""
        if name not in (None, self.name):
            raise ChatError(404, f"no model {name!r} here; this is {self.name!r}", "model", "model_not_found")
        return {"id": self.name, "object": "model", "created": 0, "owned_by": "mmspec"}

    async def counted(self) -> AsyncIterator[None]:
        """Count a request as open until its answer is sent; ChatError if the queue is full."""
        if self.open >= self.worker.batches.rows + self.queue:
            raise ChatError(429, f"{self.open} requests are open, the limit; try again later", None, "queue_full")
        self.open += 1
        try:
            yield
        finally:
            self.open -= 1

    async def read(self, request: Request) -> ChatRequest:
        """Read a request; ChatError if it is too large, late or invalid."""
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise ChatError(415, "a request needs the header Content-Type: application/json")  # no web page may send it
        length = request.headers.get("content-length")  # a body in chunks has none
        if length is None or int(length) > self.max_bytes:
            why = f"a request needs a Content-Length up to {self.max_bytes} (--max-bytes); got {length}"
            raise ChatError(411 if length is None else 413, why)
        try:
            async with asyncio.timeout(UPLOAD):
                data = await request.body()
        except (TimeoutError, ClientDisconnect) as error:
            raise ChatError(408, f"the request has not arrived after {UPLOAD:g} s; send smaller pictures") from error
        body = await asyncio.to_thread(ChatRequest.parse, data)
        self.model(body.model)
        return body

    async def prepared(self, body: ChatRequest) -> tuple[Any, Fields]:
        """The model inputs, and the settings of `generate`. ChatError: the model cannot answer this request."""
        settings = body.settings(self.temperature, self.most)
        if (schema := body.schema_of_answer) is not None:
            try:
                settings["logits_processor"] = [await asyncio.to_thread(json_grammar, self.engine.processor, schema)]
            except (ImportError, ValueError) as error:
                raise ChatError(400, f"response_format: {error}", "response_format") from error
        chat, thinking = await body.chat(self.pictures), (body.chat_template_kwargs or {}).get("enable_thinking", False)
        try:
            job = self.engine.threads.submit(lambda processor: inputs_of(processor, [chat], thinking))
            inputs = (await asyncio.wrap_future(job)).to(self.engine.model.dtype)
        except Exception as error:  # the template refuses the chat, or a picture is too small for the processor
            raise ChatError(400, f"the model cannot read this chat ({first_line(error)})", "messages") from error
        if (room := room_after(inputs, self.engine.model)) < 1:
            why = f"the prompt has {1 - room} tokens too many for this model and an answer; shorten it"
            raise ChatError(400, why, "messages", "context_length_exceeded")
        return inputs, settings | {"max_new_tokens": min(settings["max_new_tokens"], room)}


class Server(uvicorn.Server):
    """Once it is to end, answers under way have `last` seconds; those that are left end with an error."""

    def __init__(self, app: FastAPI, worker: AsyncBatcher, last: int, **config: Any) -> None:
        config |= {"timeout_keep_alive": KEEP_ALIVE, "timeout_graceful_shutdown": last + 1}  # then it cancels tasks
        super().__init__(uvicorn.Config(app, **config))
        self.end = threading.Timer(last, worker.fail, [ChatError(503, ENDED)])
        self.end.daemon = True

    def handle_exit(self, sig: int, frame: Any) -> None:
        if not self.should_exit:
            self.end.start()
        super().handle_exit(sig, frame)


def build(service: Service) -> FastAPI:
    app, keyed = FastAPI(title="mmspec", openapi_url=None), [Depends(service.check_key)]

    @app.exception_handler(HTTPException)
    @app.exception_handler(Exception)
    async def refused(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"error": (known := _known(error)).detail}, known.status_code)

    @app.get("/health")
    async def health() -> Fields:
        status, batches = "ok" if service.worker.alive else "ended", service.worker.batches
        return {"status": status, "open": service.open, "running": len(batches.running), "rows": batches.rows}

    @app.get("/v1/models", dependencies=keyed)
    async def models() -> Fields:
        return {"object": "list", "data": [service.model(None)]}

    @app.get("/v1/models/{name:path}", dependencies=keyed)
    async def model(name: str) -> Fields:
        return service.model(name)

    @app.post("/v1/chat/completions", dependencies=[*keyed, Depends(service.counted)])
    async def chat(request: Request) -> Any:
        began, body = time.perf_counter(), await service.read(request)
        inputs, settings = await _while_connected(request, service.prepared(body))
        seed = secrets.randbits(31) if body.seed is None else body.seed % 2**63
        parts = service.worker.stream(inputs, seed, [*filter(None, body.stop)], bool(body.stream), **settings)
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        frame = {"id": f"chatcmpl-{secrets.token_hex(12)}", "object": kind, "created": int(time.time())}
        frame["model"] = service.name
        if body.stream:
            events = _events(frame, parts, lambda part: _counts(inputs, part, began), body.stream_options or {})
            return StreamingResponse(events, 200, {"Cache-Control": "no-cache"}, "text/event-stream")
        part = await _while_connected(request, anext(parts))
        message = {"role": "assistant", "content": part.text}
        return frame | {"choices": [_choice(part, message=message)]} | _counts(inputs, part, began)

    return app


def _choice(part: AnswerPart, **message: Fields) -> Fields:
    return {"index": 0, **message, "finish_reason": part.finish, "logprobs": None}


def _counts(inputs: Any, part: AnswerPart, began: float) -> Fields:
    """The fields of a whole answer that say how many tokens and forwards it took."""
    given, n, stats = inputs["input_ids"].shape[1], part.tokens, part.stats
    usage = {"prompt_tokens": given, "completion_tokens": n, "total_tokens": given + n}
    calls = {"target_calls": stats.row_rounds, "tokens_per_target_call": round(stats.tokens_per_target_call, 4)}
    drafts = {"drafted_tokens": stats.drafted, "accepted_tokens": stats.accepted}
    return {"usage": usage, "mmspec": calls | drafts | {"seconds": round(time.perf_counter() - began, 6)}}


async def _while_connected(request: Request, work: Awaitable[T]) -> T:
    """The result of the work; it is cancelled if the client disconnects, the only message that can still arrive."""
    job, gone = asyncio.ensure_future(work), asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait({job, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not job.done():
            raise ChatError(499, "the client has left")
        return job.result()
    except asyncio.CancelledError:
        raise ChatError(503, ENDED) from None
    finally:
        job.cancel()
        gone.cancel()


async def _events(
    frame: Fields, parts: AsyncIterator[AnswerPart], counts: Callable[[AnswerPart], Fields], options: Fields
) -> AsyncIterator[str]:
    """An answer as server-sent events; errors become events, too."""
    role = {"role": "assistant"}
    try:
        async for part in parts:
            more = counts(part) if part.finish else {}
            usage = more.pop("usage", None)
            yield _event(frame | {"choices": [_choice(part, delta=role | {"content": part.text})], **more})
            if usage and options.get("include_usage"):
                yield _event(frame | {"choices": [], "usage": usage})
            role = {}
    except Exception as error:  # the status was sent already
        yield _event({"error": _known(error).detail})
    yield "data: [DONE]\n\n"


def _event(value: Fields) -> str:
    return f"data: {json.dumps(value)}\n\n"


def _known(error: Exception) -> ChatError:
    """Any error as one in OpenAI's format."""
    if isinstance(error, ChatError):
        return error
    status = 400 if isinstance(error, GrammarError) else getattr(error, "status_code", 500)
    return ChatError(status, str(getattr(error, "detail", None) or first_line(error)))
