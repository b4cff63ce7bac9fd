"""`mmspec serve` through OpenAI's own client: the texts of model.generate, streams, limits, and rows that are freed."""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import gzip
import io
import json
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from PIL import Image

from mmspec import media, zoo
from mmspec.app import embedded
from mmspec.app import engine as engines
from mmspec.app.media import pictures as loading
from mmspec.app.media.pictures import PictureLoader
from mmspec.app.serve import chat, command
from mmspec.app.serve.chat import ChatRequest
from mmspec.app.serve.http import Server, Service, build
from mmspec.pipelines.host.processors.grammar import json_grammar
from mmspec.pipelines.prompts import chat_inputs
from mmspec.pipelines.serving import continuous
from mmspec.pipelines.serving.async_batcher import AsyncBatcher

SAMPLES = sorted(zoo.samples().glob("*.png"))
PROMPT = zoo.PROMPTS["long"]
ROWS = 8


def url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def blank(side: int) -> bytes:
    """A picture."""
    held = io.BytesIO()
    Image.new("RGB", (side, side)).save(held, "PNG")
    return held.getvalue()


def asking(address: str, prompt: str = PROMPT) -> list[dict[str, Any]]:
    shown = {"type": "image_url", "image_url": {"url": address}}
    return [{"role": "user", "content": [shown, {"type": "text", "text": prompt}]}]


@pytest.fixture(scope="module")
def engine() -> engines.Engine:
    return engines.load(embedded.MODEL, embedded.DRAFTER, "cpu", "auto", 64, 0.0)


@pytest.fixture(scope="module")
def service(engine: engines.Engine) -> Iterator[Service]:
    limits = media.MediaLimits(max_pixels=100_000, max_bytes=200_000, seconds=20)
    with AsyncBatcher(engine.batcher(ROWS), engine.processor) as worker, PictureLoader(limits, False) as pictures:
        yield Service(engine, worker, pictures, embedded.MODEL, 128, 0.0, 256, 500_000)


@contextlib.contextmanager
def running(service: Service, last: int = 10) -> Iterator[tuple[Server, str]]:
    """A server in a thread, and its address."""
    server = Server(build(service), service.worker, last, port=0, log_level="error")
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield server, f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join()


@pytest.fixture(scope="module")
def base(service: Service) -> Iterator[str]:
    with running(service) as (_, address):
        yield address


@pytest.fixture(scope="module")
def client(base: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0)


def ask(client: openai.OpenAI, messages: Any, **how: Any) -> Any:
    return client.chat.completions.create(model=embedded.MODEL, messages=messages, **how)


@lru_cache
def stock(
    engine: engines.Engine, path: Path, prompt: str = PROMPT, most: int = 128, before: Any = (), **how: Any
) -> str:
    """What `generate` says to a prompt about a picture, after the turns before."""
    inputs = chat_inputs(engine.processor, [prompt], [[media.load_image(path)]], before=before)
    out = engine.model.generate(**inputs, max_new_tokens=most, do_sample=False, **how)
    return engine.processor.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)[0]


def idle(base: str) -> None:
    """Until no request is open and no row is taken."""
    for _ in range(500):
        told = httpx.get(f"{base}/health").json()
        if told["open"] == told["running"] == 0:
            return
        time.sleep(0.02)
    raise AssertionError(told)


def test_an_answer_is_that_of_generate_streamed_or_not(client: openai.OpenAI, engine: engines.Engine) -> None:
    want, messages = stock(engine, SAMPLES[0]), asking(url(SAMPLES[0].read_bytes()))
    whole = ask(client, messages, temperature=0)
    (choice,) = whole.choices
    assert (choice.message.content, choice.finish_reason) == (want, "stop")
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    told = whole.mmspec
    assert 0 < told["accepted_tokens"] <= told["drafted_tokens"]
    assert told["target_calls"] < whole.usage.completion_tokens and told["tokens_per_target_call"] > 1
    chunks = list(ask(client, messages, temperature=0, stream=True, stream_options={"include_usage": True}))
    pieces = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]
    assert "".join(pieces) == want and len(pieces) > 3
    assert chunks[-2].choices[0].finish_reason == "stop" and chunks[-1].usage == whole.usage
    assert chunks[-2].mmspec["target_calls"] == told["target_calls"]
    cut = ask(client, messages, max_tokens=3)
    assert (cut.choices[0].finish_reason, cut.usage.completion_tokens) == ("length", 3)
    assert want.startswith(cut.choices[0].message.content)


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_end_an_answer_and_are_left_out(
    client: openai.OpenAI, engine: engines.Engine, base: str, stream: bool
) -> None:
    want = stock(engine, SAMPLES[0])
    stop = want[len(want) // 2 :][:5]
    found = ask(client, asking(url(SAMPLES[0].read_bytes())), stop=[stop, "never"], stream=stream)
    answers = list(found) if stream else [found]
    text = "".join((c.choices[0].delta if stream else c.choices[0].message).content or "" for c in answers)
    assert text == want[: want.index(stop)] and answers[-1].choices[0].finish_reason == "stop"
    idle(base)


def test_a_seed_fixes_what_is_drawn(client: openai.OpenAI) -> None:
    messages = asking(url(SAMPLES[1].read_bytes()))
    how = {"temperature": 1.5, "top_p": 0.95, "max_tokens": 12}
    with ThreadPoolExecutor(6) as pool:
        found = pool.map(lambda seed: ask(client, messages, seed=seed, **how), [1, 2, 3] * 2)
        texts = [one.choices[0].message.content for one in found]
    assert texts[:3] == texts[3:] and len(set(texts)) == 3
    only_best = ask(client, messages, extra_body={"min_p": 1.0}, **how)
    cold, greedy = (ask(client, messages, temperature=t, max_tokens=12) for t in (1e-39, 0))
    assert cold.choices == greedy.choices == only_best.choices


def test_a_repetition_penalty_is_that_of_generate(client: openai.OpenAI, engine: engines.Engine) -> None:
    want = stock(engine, SAMPLES[0], most=30, repetition_penalty=30.0)
    found = ask(client, asking(url(SAMPLES[0].read_bytes())), max_tokens=30, extra_body={"repetition_penalty": 30})
    assert found.choices[0].message.content == want != stock(engine, SAMPLES[0], most=30)


def test_turns(client: openai.OpenAI, engine: engines.Engine) -> None:
    want = stock(engine, SAMPLES[2])
    messages = asking(url(SAMPLES[2].read_bytes()))
    assert ask(client, messages).choices[0].message.content == want
    more = [*messages, {"role": "assistant", "content": want}, {"role": "user", "content": "How many objects?"}]
    second = stock(engine, SAMPLES[2], "How many objects?", 12, ((PROMPT, want),))
    assert ask(client, more, max_tokens=12).choices[0].message.content == second


def test_answers_in_json(client: openai.OpenAI, engine: engines.Engine) -> None:
    schema = {
        "type": "object",
        "properties": {"text": {"type": "string", "maxLength": 9}, "sure": {"type": "boolean"}},
        "required": ["text", "sure"],
        "additionalProperties": False,
    }
    told = {"type": "json_schema", "json_schema": {"name": "caption", "schema": schema, "strict": True}}
    messages = asking(url(SAMPLES[0].read_bytes()))
    found = ask(client, messages, response_format=told, max_tokens=40)
    want = stock.__wrapped__(engine, SAMPLES[0], most=40, logits_processor=[json_grammar(engine.processor, schema)])
    assert found.choices[0].message.content == want and set(json.loads(want)) == {"text", "sure"}
    assert found.mmspec["target_calls"] < found.usage.completion_tokens / 2
    any_object = ask(client, messages, response_format={"type": "json_object"}, max_tokens=4)
    assert any_object.choices[0].message.content.startswith("{")


def test_64_clients_at_once(client: openai.OpenAI, engine: engines.Engine, base: str) -> None:
    paths = SAMPLES[:4]
    want = [stock(engine, path, zoo.PROMPTS["short"], 7) for path in paths]
    addresses = [url(path.read_bytes()) for path in paths]

    def one(number: int) -> str:
        messages = asking(addresses[number % 4], zoo.PROMPTS["short"])
        if number % 2:
            return ask(client, messages, max_tokens=7).choices[0].message.content
        return "".join(chunk.choices[0].delta.content for chunk in ask(client, messages, max_tokens=7, stream=True))

    with ThreadPoolExecutor(64) as pool:
        assert list(pool.map(one, range(64))) == want * 16
    idle(base)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_row(
    client: openai.OpenAI, base: str, service: Service, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    messages = asking(url(SAMPLES[0].read_bytes()))
    endless = {"max_tokens": 5000, "temperature": 2.0, "top_p": 1.0, "seed": 1}
    if stream:
        answer = ask(client, messages, stream=True, **endless)
        for _ in range(3):
            next(answer)
        assert httpx.get(f"{base}/health").json()["running"] == 1
        answer.close()
    else:
        with pytest.raises(openai.APITimeoutError):
            ask(client, messages, timeout=0.05, **endless)
        with pytest.raises(openai.APITimeoutError):  # in the middle of the answer
            ask(client, user("Hi"), timeout=1, **endless)
    idle(base)
    assert not service.worker.batches.busy and not caplog.records, "no traceback"


def test_a_server_that_ends_tells_its_clients(service: Service, caplog: pytest.LogCaptureFixture) -> None:
    worker = AsyncBatcher(service.engine.batcher(1), service.engine.processor)
    own = replace(service, worker=worker)
    with (
        worker,
        running(own, 1) as (server, address),
        openai.OpenAI(base_url=f"{address}/v1", api_key="none") as client,
    ):
        parts = ask(client, asking(url(blank(32))), stream=True, max_tokens=5000, temperature=2.0, seed=1)
        next(parts)
        server.handle_exit(signal.SIGINT, None)
        with pytest.raises(openai.APIError, match="the server is being ended"):
            list(parts)
    assert not caplog.records, "no traceback"


def test_a_compiled_server_compiles_before_it_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[object] = []
    monkeypatch.setattr(engines.Engine, "warm_up", lambda self, frames, choice, rows: done.append(rows))
    monkeypatch.setattr(Server, "run", lambda self: done.append("answers"))
    parser = argparse.ArgumentParser()
    command.configure(parser)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    assert command.run(parser.parse_args(["--port", port, "--batch-size", "3", "--enable", "compile=true"])) == 0
    assert done == [3, "answers"]


def test_a_full_queue_is_said(client: openai.OpenAI, base: str, service: Service) -> None:
    service.queue, queue = 1 - ROWS, service.queue
    try:
        messages = asking(url(SAMPLES[0].read_bytes()))
        answer = ask(client, messages, stream=True, max_tokens=5000, temperature=2.0, seed=1)
        next(answer)
        with pytest.raises(openai.RateLimitError, match="1 requests are open") as refused:
            ask(client, messages)
        assert refused.value.code == "queue_full" and refused.value.type == "rate_limit_error"
        answer.close()
        idle(base)
        assert ask(client, messages).choices[0].message.content
    finally:
        service.queue = queue


def test_requests_under_way_count_as_open(base: str, service: Service) -> None:
    service.queue, queue, tries = 1 - ROWS, service.queue, 200
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n"
    head += b"Content-Type: application/json\r\n\r\n"
    try:
        with socket.create_connection(("127.0.0.1", int(base.rpartition(":")[2]))) as slow:
            slow.sendall(head)
            while not httpx.get(f"{base}/health").json()["open"] and (tries := tries - 1):
                time.sleep(0.01)
            assert httpx.post(f"{base}/v1/chat/completions", json={}).status_code == 429
        idle(base)
    finally:
        service.queue = queue


def test_a_stream_goes_on_where_its_row_begins_again(
    client: openai.OpenAI, base: str, engine: engines.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too little memory in a round: all rows are read once more, and what a client has it does not get again."""
    rounds, decode = iter(range(10**6)), continuous.decode

    def short(*args: Any) -> Any:
        if next(rounds) == 5:
            raise torch.OutOfMemoryError
        return decode(*args)

    monkeypatch.setattr(continuous, "decode", short)
    messages = [asking(url(path.read_bytes())) for path in SAMPLES[:2]]

    def one(asked: Any) -> str:
        return "".join(chunk.choices[0].delta.content for chunk in ask(client, asked, stream=True))

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(one, messages)) == [stock(engine, path) for path in SAMPLES[:2]]
    idle(base)
    assert next(rounds) > 5 and httpx.get(f"{base}/health").json()["rows"] == ROWS  # no longer halved


def test_a_compressed_answer_is_not_decompressed_here() -> None:
    limits = media.MediaLimits(max_bytes=10_000)
    with socket.create_server(("127.0.0.1", 0)) as there, PictureLoader(limits, True) as pictures:
        packed = gzip.compress(b"0" * 10**6)

        def answer() -> None:
            with there.accept()[0] as line:
                assert b"accept-encoding: identity" in line.recv(2**16).lower()
                line.sendall(b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nConnection: close\r\n\r\n" + packed)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(media.MediaError, match="not an image"):
            asyncio.run(pictures.load(f"http://127.0.0.1:{there.getsockname()[1]}/a.png"))
        thread.join()


@pytest.mark.parametrize("whole", [True, False])
def test_a_slow_address_is_given_up_and_keeps_no_decoder(whole: bool) -> None:
    """One that sends its content byte by byte, or its headers."""
    limits = media.MediaLimits(seconds=0.3)
    with socket.create_server(("127.0.0.1", 0)) as there, PictureLoader(limits, True) as pictures:

        def drip() -> None:
            with there.accept()[0] as line, contextlib.suppress(OSError):
                line.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n" if whole else b"HTTP/1.1 200 OK\r\nA: ")
                while True:
                    line.sendall(b"x")
                    time.sleep(0.02)

        thread = threading.Thread(target=drip)
        thread.start()
        with pytest.raises(media.MediaError, match="TimeoutError within"):
            asyncio.run(pictures.load(f"http://127.0.0.1:{there.getsockname()[1]}/a.png"))
        thread.join()


def test_many_pictures_of_clients_that_leave_keep_nobody_waiting(base: str, client: openai.OpenAI) -> None:
    shown = asking(url(blank(20)))[0]["content"][:1] * loading.MOST
    for _ in range(8):
        with pytest.raises(openai.APITimeoutError):
            ask(client, user(shown), timeout=0.02)
    began = time.perf_counter()
    assert ask(client, user("Hi"), max_tokens=1).choices
    idle(base)
    assert time.perf_counter() - began < 5


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


LARGE, SAMPLE = asking(url(blank(400))), asking(url(SAMPLES[0].read_bytes()))
BAD: dict[str, tuple[Any, dict[str, Any], str]] = {
    "not a picture": (asking(url(b"no picture")), {}, "the picture is not an image"),
    "too many pixels": (LARGE, {}, "over 0 million"),
    "too many pictures": (user(SAMPLE[0]["content"][:1] * 11), {}, "limit for all of"),
    "too many bytes": (asking(url(b"\0" * 250_000)), {}, "MiB, over"),
    "a large body": (asking(url(b"\0" * 500_000)), {}, "up to 500000"),
    "an address": (asking("http://127.0.0.1:1/a.png"), {}, "does not open"),
    "a file": (asking("file:///etc/passwd"), {}, "does not open"),
    "no data": (asking("DATA:image/png;base64,"), {}, "has a data URL that cannot be read"),
    "no base64": (asking("data:image/png;base64,€€"), {}, "has a data URL that cannot be read"),
    "no data URL": (asking("data:nothing"), {}, "has a data URL that cannot be read; write data:image/jpeg"),
    "257 pictures": (user(asking("data:,")[0]["content"][:1] * 257), {}, "is one of 257; 256 are allowed"),
    "no URL": (user([{"type": "image_url", "image_url": {}}]), {}, "0.image_url.url: F"),
    "many messages": ([user("?")[0]] * 1025, {}, "at most 1024 items"),
    "long stop": (LARGE, {"stop": "x" * 257}, "at most 256 characters"),
    "many stops": (LARGE, {"stop": ["x"] * 17}, "at most 16 items"),
    "template": (LARGE, {"extra_body": {"chat_template_kwargs": {"chat_template": "x"}}}, "enable_thinking"),
    "penalty": (LARGE, {"presence_penalty": 0.2}, "presence_penalty is not"),
    "no picture": (user([{"type": "image_url"}]), {}, "does not open"),
    "no schema": (LARGE, {"response_format": {"type": "json_schema"}}, "schema is missing"),
    "a wrong schema": (
        SAMPLE,
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "thing"}}}},
        "response_format: the JSON schema is not supported",
    ),
    "tools": (LARGE, {"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools is not"),
    "several": (LARGE, {"n": 2}, "n is not supported"),
    "temperature": (LARGE, {"temperature": -1}, "temperature: Input should be greater"),
    "nobody": ([], {}, "messages: List should have at least 1 item"),
    "robot": ([{"role": "robot", "content": "?"}], {}, "messages.0.role"),
    "answered": ([{"role": "assistant", "content": "?"}], {}, "must be the user's"),
    "long": (user("word " * 9000), {}, "too many for this model"),
}


@pytest.mark.parametrize("name", BAD)
def test_errors_in_openais_format(client: openai.OpenAI, base: str, name: str) -> None:
    messages, how, says = BAD[name]
    with pytest.raises(openai.APIStatusError, match=says) as refused:
        ask(client, messages, **how)
    assert refused.value.status_code == (413 if name == "a large body" else 400)
    assert refused.value.type == "invalid_request_error"
    idle(base)


def test_models_keys_and_strange_addresses(client: openai.OpenAI, base: str, service: Service) -> None:
    assert [model.id for model in client.models.list()] == [embedded.MODEL]
    with pytest.raises(openai.NotFoundError, match="no model 'gpt-9' here; this is 'scenes-video'"):
        client.chat.completions.create(model="gpt-9", messages=asking(""))
    here, kind = f"{base}/v1/chat/completions", {"Content-Type": "application/json"}
    assert httpx.post(here, content=iter([b"{}"]), headers=kind).status_code == 411
    assert httpx.post(here, content=b"{}", headers={"Content-Type": "text/plain"}).status_code == 415
    for host in ("evil.example", "a{b.evil.example:80", ""):  # browsers allow braces
        foreign = httpx.get(f"{base}/v1/models", headers={"Host": host})
        assert foreign.status_code == 403 and host.removesuffix(":80") in foreign.json()["error"]["message"]
    service.key = "secret"
    try:
        with pytest.raises(openai.AuthenticationError, match="the right API key is required"):
            client.models.list()
        assert client.with_options(api_key="secret").models.retrieve(embedded.MODEL).id == embedded.MODEL
        assert httpx.get(f"{base}/v1/models", headers={"Authorization": "secret"}).status_code == 401
    finally:
        service.key = None


OPTIONAL = [name for name in (*ChatRequest.model_fields, *chat.NEUTRAL, "user") if name != "messages"]


@pytest.mark.parametrize("name", OPTIONAL)
def test_null_is_a_field_that_is_left_out(name: str) -> None:
    body = {"messages": [{"role": "user", "content": "?"}], "seed": 1}
    plain, null = (ChatRequest.parse(json.dumps(body | more).encode()) for more in ({}, {name: None}))
    assert null.model_copy(update={"seed": 1}).model_dump(exclude_none=True) == plain.model_dump(exclude_none=True)


def test_null_is_left_out_within_messages_and_formats() -> None:
    text = {"type": "text", "text": "?", "image_url": None}
    body = {"messages": [{"role": "user", "content": [text], "name": None}], "response_format": {"type": "text"}}
    body["response_format"]["json_schema"] = None
    assert ChatRequest.parse(json.dumps(body).encode()).messages[0].content[0].text == "?"
    shown = {"type": "image_url", "image_url": {"url": "data:,"}, "text": None}
    body["messages"][0]["content"].append(shown)
    body["messages"] = [{"role": "assistant", "content": None}, *body["messages"]]
    assert ChatRequest.parse(json.dumps(body).encode()).messages[0].content[0].text == ""


@pytest.mark.parametrize(
    ("method", "path", "status", "says"),
    [
        ("GET", "/v1/nothing", 404, "Not Found"),
        ("GET", "/v1/models/gpt-9", 404, "no model 'gpt-9' here"),
        ("GET", "/v1/chat/completions", 405, "Method Not Allowed"),
        ("DELETE", "/v1/models", 405, "Method Not Allowed"),
        ("POST", "/v1/chat/completions", 400, "the body: Invalid JSON"),
    ],
)
def test_every_error_has_openais_shape(base: str, method: str, path: str, status: int, says: str) -> None:
    answer = httpx.request(method, base + path, headers={"Content-Type": "application/json"})
    error = answer.json()["error"]
    assert answer.status_code == status and set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error" and error["message"].startswith(says)
