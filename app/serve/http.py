"""The server's endpoints, in OpenAI's formats, and the thread that runs the model for all requests."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from mmspec.app.devices import first_line
from mmspec.app.engine import Engine
from mmspec.app.serve.chat import AnswerText, ChatError, ChatRequest, Pictures
from mmspec.compile.capture_cache import settled
from mmspec.pipelines.host.processors.grammar import json_grammar
from mmspec.pipelines.prompts import inputs_of
from mmspec.pipelines.serving.batcher import Batcher, cut_off
from mmspec.statistics import Stats

T = TypeVar("T")
KEEP_ALIVE = 75  # seconds that an idle connection stays open; clients that reuse it wait less between two requests
UPLOAD = 60.0  # seconds within which a request's body must arrive
Piece = tuple[str, str | None, dict[str, Any]]  # text; for the last piece also the finish reason and usage
Progress = tuple[list[int], Stats, bool, Exception | None]  # tokens so far, stats of their rounds, done, error
Send = Callable[[Progress], object]


class ModelThread:
    """Runs the rounds of a Batcher in a separate thread; a context manager."""

    def __init__(self, batches: Batcher) -> None:
        self.batches = batches
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()  # between rounds; None: end the thread
        self._open: set[Send] = set()
        self._thread = threading.Thread(target=self._work, name="mmspec-model", daemon=True)

    def __enter__(self) -> ModelThread:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._jobs.put(None)
        self._thread.join()

    async def answer(self, inputs: Any, seed: int, settings: dict[str, Any]) -> AsyncIterator[Progress]:
        """Yield a request's progress after each round; closing the iterator frees its row. Raises its error."""
        loop, updates = asyncio.get_running_loop(), asyncio.Queue[Progress]()

        def send(progress: Progress) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(updates.put_nowait, progress)

        def begin() -> None:
            self._open.add(send)
            self.batches.add(send, inputs, seed, **settings)

        self._jobs.put(begin)
        try:
            done = False
            while not done:
                progress = await updates.get()
                _, _, done, error = progress
                if error is not None:
                    raise error
                yield progress
        finally:
            self._jobs.put(lambda: self._leave(send))

    def _leave(self, send: Send) -> None:
        self._open.discard(send)
        self.batches.cancel(send)

    def _work(self) -> None:
        while True:
            with contextlib.suppress(Empty):
                while (job := self._jobs.get(block=not self.batches.busy)) is not None:
                    job()
                return
            try:
                with settled(self.batches.free > 0):
                    finished = self.batches.step()
            except Exception as error:  # of the whole batch, since the batcher handles errors of single prompts
                for send in [*self._open]:
                    self._leave(send)
                    send(([], Stats(), True, error))
                continue
            updates: list[tuple[Any, Progress]] = [(o.ticket, (o.tokens, o.stats, True, o.error)) for o in finished]
            updates += [(ticket, (tokens, stats, False, None)) for ticket, tokens, stats in self.batches.written()]
            for send, progress in updates:
                send(progress)


@dataclass
class Service:
    """The state that the endpoints share.

    Attributes:
        name: the model's name for clients.
        most: default of a request's maximum number of new tokens.
        temperature: default of a request's temperature.
        queue: how many requests may wait besides those in the batch.
        max_bytes: maximum size of a request.
        key: the API key that clients must send; None: no key is needed.
        open: number of open requests.
    """

    engine: Engine
    worker: ModelThread
    pictures: Pictures
    name: str
    most: int = 512
    temperature: float = 0.0
    queue: int = 256
    max_bytes: int = 32 * 2**20
    key: str | None = None
    open: int = 0

    async def body(self, request: Request) -> bytes:
        """Read a request's body. ChatError if the queue is full, or the body is too large or late."""
        if self.open >= self.worker.batches.rows + self.queue:
            why = f"{self.open} requests are open, which is the limit; try again later"
            raise ChatError(429, why, None, "queue_full")
        if int(request.headers.get("content-length", -1)) not in range(self.max_bytes + 1):
            why = f"a request needs a Content-Length of at most {self.max_bytes} bytes (--max-bytes)"
            raise ChatError(413, f"{why}; send smaller pictures")
        self.open += 1
        try:
            async with asyncio.timeout(UPLOAD):
                return await request.body()
        except (TimeoutError, ClientDisconnect) as error:
            raise ChatError(408, f"the request has not arrived after {UPLOAD:g} s; send smaller pictures") from error
        finally:
            self.open -= 1

    def check_key(self, request: Request) -> None:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self.key is not None and not secrets.compare_digest(given.encode(), self.key.encode()):
            raise ChatError(401, "an API key is required: Authorization: Bearer KEY", None, "invalid_api_key")

    async def answer(self, body: ChatRequest) -> AsyncIterator[Piece]:
        """Yield the pieces of an answer; the first one is empty and comes once the prompt is prepared."""
        began = time.perf_counter()
        self.open += 1
        try:
            inputs, settings = await self._prepared(body)
            yield "", None, {}
            reader, most, length = self.engine.processor, settings["max_new_tokens"], inputs["input_ids"].shape[1]
            writer = AnswerText(getattr(reader, "tokenizer", reader), body.stops)
            seed = secrets.randbits(31) if body.seed is None else body.seed % 2**63
            async for tokens, stats, done, _ in self.worker.answer(inputs, seed, settings):
                if not (done or body.stream or body.stops):
                    continue
                piece = writer.read(tokens, done)
                if not (done or writer.stopped):
                    yield piece, None, {}
                    continue
                n = writer.used(tokens)
                facts = {
                    "target_calls": stats.row_rounds,
                    "drafted_tokens": stats.drafted,
                    "accepted_tokens": stats.accepted,
                    "tokens_per_target_call": round(stats.tokens_per_target_call, 4),
                    "seconds": round(time.perf_counter() - began, 6),
                }
                usage = {"prompt_tokens": length, "completion_tokens": n, "total_tokens": length + n}
                cut = cut_off(tokens, self.engine.model.generation_config.eos_token_id, most) and not writer.stopped
                yield piece, "length" if cut else "stop", {"usage": usage, "mmspec": facts}
                return
        finally:
            self.open -= 1

    async def _prepared(self, body: ChatRequest) -> tuple[Any, dict[str, Any]]:
        """The model inputs, and the settings of `generate`."""
        settings = body.settings(self.temperature, self.most)
        if (schema := body.schema_of_answer) is not None:
            try:
                settings["logits_processor"] = [await asyncio.to_thread(json_grammar, self.engine.processor, schema)]
            except (ImportError, ValueError) as error:
                raise ChatError(400, f"response_format: {error}", "response_format") from error
        chat = await asyncio.to_thread(self.pictures.chat, body.messages)
        try:
            job = self.engine.threads.submit(lambda processor: inputs_of(processor, [chat]))
            inputs = (await asyncio.wrap_future(job)).to(self.engine.model.dtype)
        except Exception as error:  # the template refuses the chat, or a picture is too small for the processor
            raise ChatError(400, f"the model cannot read this chat ({first_line(error)})", "messages") from error
        length, context = inputs["input_ids"].shape[1], self.engine.model.config.get_text_config()
        room = getattr(context, "max_position_embeddings", 2**62) - length
        if room < 1:
            why = f"the prompt has {length} tokens, {1 - room} too many for this model and an answer; shorten it"
            raise ChatError(400, why, "messages", "context_length_exceeded")
        return inputs, settings | {"max_new_tokens": min(settings["max_new_tokens"], room)}


def build(service: Service) -> FastAPI:
    app = FastAPI(title="mmspec", openapi_url=None)

    @app.exception_handler(ChatError)
    @app.exception_handler(HTTPException)
    @app.exception_handler(Exception)
    async def refused(request: Request, error: Exception) -> JSONResponse:
        if not isinstance(error, ChatError):
            status = getattr(error, "status_code", 500)
            error = ChatError(status, str(getattr(error, "detail", None) or first_line(error)))
        return JSONResponse({"error": error.body}, error.status)

    @app.get("/health")
    async def health() -> dict[str, object]:
        batches = service.worker.batches
        return {"status": "ok", "open": service.open, "running": len(batches.running), "rows": batches.rows}

    @app.get("/v1/models")
    async def models(request: Request) -> dict[str, object]:
        service.check_key(request)
        model = {"id": service.name, "object": "model", "created": 0, "owned_by": "mmspec"}
        return {"object": "list", "data": [model]}

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Any:
        service.check_key(request)
        body = ChatRequest.parse(await service.body(request))
        if body.model not in (None, service.name):
            why = f"no model {body.model!r} here; this is {service.name!r}"
            raise ChatError(404, why, "model", "model_not_found")
        pieces = service.answer(body)
        frame = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": service.name}
        if body.stream:
            await _while_connected(request, anext(pieces))  # so that errors are sent with their status
            return StreamingResponse(_events(body, pieces, frame), media_type="text/event-stream")

        async def whole() -> list[Piece]:
            return [piece async for piece in pieces]

        written = await _while_connected(request, whole())
        message = {"role": "assistant", "content": "".join(text for text, _, _ in written)}
        choice = {"index": 0, "message": message, "finish_reason": written[-1][1], "logprobs": None}
        return frame | {"object": "chat.completion", "choices": [choice], **written[-1][2]}

    return app


async def _while_connected(request: Request, work: Awaitable[T]) -> T:
    """The result of the work; it is cancelled if the client disconnects, the only message that can still arrive."""
    job, gone = asyncio.ensure_future(work), asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait({job, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not job.done():
            raise ChatError(499, "the client has left")
        return job.result()
    finally:
        job.cancel()
        gone.cancel()


async def _events(body: ChatRequest, pieces: AsyncIterator[Piece], frame: dict[str, object]) -> AsyncIterator[str]:
    """An answer as server-sent events; errors become events, too."""
    frame = frame | {"object": "chat.completion.chunk"}
    delta: dict[str, object] = {"role": "assistant", "content": ""}
    try:
        async for text, finish, more in pieces:
            choice = {"index": 0, "delta": delta | {"content": text}, "finish_reason": finish, "logprobs": None}
            usage = more.pop("usage", None)
            yield _event(frame | {"choices": [choice], **more})
            if usage and (body.stream_options or {}).get("include_usage"):
                yield _event(frame | {"choices": [], "usage": usage})
            delta = {}
    except Exception as error:  # the status was sent already
        yield _event({"error": ChatError(500, first_line(error)).body})
    yield "data: [DONE]\n\n"


def _event(value: dict[str, object]) -> str:
    return f"data: {json.dumps(value)}\n\n"
