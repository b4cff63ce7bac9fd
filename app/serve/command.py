"""`mmspec serve`: serves a model with OpenAI's chat protocol; requests are batched continuously."""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import sys

from mmspec.app import embedded, enabling
from mmspec.app.options import count, from_zero, is_local, port, where
from mmspec.media import MAX_PIXELS, MediaLimits

SECONDS, LAST = 20.0, 10  # to fetch a picture, and to decode it; for answers under way after Ctrl-C


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = "Serve OpenAI's chat protocol at /v1, with pictures, streaming and many clients at once."
    add = parser.add_argument
    add("model", nargs="?", default=embedded.MODEL, help="name on the Hugging Face Hub, or a folder (%(default)s)")
    add("--drafter", help="name, folder or hub name; default: what the model ships with")
    add("--name", help="the model's name for clients (default: MODEL)")
    add("--host", default="127.0.0.1", help="address to listen on; any but this machine's needs --key (%(default)s)")
    add("--port", type=port, default=8000, help="(%(default)s)")
    add("--key", help="API key that clients must send; or set MMSPEC_API_KEY, which `ps` does not show")
    add("--batch-size", type=count, metavar="N", help="maximum batch size (default: what fits)")
    add("--queue", type=count, default=256, metavar="N", help="requests that may wait besides (%(default)s)")
    add("--max-new-tokens", type=count, default=512, metavar="N", help="default for requests (%(default)s)")
    add("--temperature", type=from_zero, default=0.0, metavar="T", help="default for requests (%(default)s)")
    add("--max-bytes", type=count, default=32 * 2**20, metavar="N", help="limit of a request or picture (%(default)s)")
    add("--max-pixels", type=count, default=MAX_PIXELS, metavar="N", help="limit of a request's pictures (%(default)s)")
    add("--max-pixels-per-image", type=lambda text: text if text in ("auto", "none") else count(text), default="auto",
        help="larger ones are scaled down; auto: to 1,280 visual tokens, none: never (%(default)s)")  # fmt: skip
    add("--log-level", choices=("info", "warning"), default="info", help="info: a line for each request (%(default)s)")
    add("--allow-http", action="store_true", help="fetch pictures from any URL that this machine can reach")
    enabling.add(parser)
    where(parser)


def run(args: argparse.Namespace) -> int:
    from mmspec.app.devices import EngineError

    key = args.key or os.environ.get("MMSPEC_API_KEY")
    try:
        if not (key or is_local(args.host)):
            raise OSError(f"--host {args.host} lets others on the network in: add --key KEY, or set MMSPEC_API_KEY")
        if not (key or "").isascii():
            raise OSError("--key may have ASCII characters only, since clients send it in a header")
        _serve(args, key)
    except (EngineError, enabling.EnableError, OSError) as error:
        print(f"mmspec serve: {error}", file=sys.stderr)
        return 1
    return 0


def _serve(args: argparse.Namespace, key: str | None) -> None:
    from mmspec.app import engine as engines
    from mmspec.app.caption.run import area_for
    from mmspec.app.media.pictures import PictureLoader
    from mmspec.app.prompt import PromptChoice
    from mmspec.app.serve import http
    from mmspec.pipelines.prompts import template
    from mmspec.pipelines.serving.async_batcher import AsyncBatcher

    kind = socket.AF_INET6 if ":" in args.host else socket.AF_INET
    socket.create_server((args.host, args.port), family=kind).close()  # OSError if it is in use
    drafter = args.drafter or embedded.drafter(args.model)
    options = enabling.given(args.enable, drafter, batches=True)
    engine = engines.load(args.model, drafter, args.device, args.dtype, args.max_new_tokens, 0.0, sees=False, **options)
    area, capped = area_for(args.max_pixels_per_image, engine)
    blind = None if template(engine.processor) else "this model has no chat template: it reads no roles, only texts"
    for note in filter(None, (*engine.notes, blind, capped)):
        print(f"mmspec serve: {note}", file=sys.stderr)
    limits = MediaLimits(args.max_pixels, args.max_bytes, SECONDS, max_area=area)
    rows = args.batch_size or engine.suggest_rows()
    if options.get("compile"):  # clients would wait
        print(f"mmspec serve: compiling for {rows} requests at once", file=sys.stderr)
        engine.warm_up([], PromptChoice("."), rows)
    with (
        AsyncBatcher(engine.batcher(rows), engine.processor) as worker,
        PictureLoader(limits, args.allow_http) as pictures,
    ):
        shown = (args.name or args.model, args.max_new_tokens, args.temperature, args.queue, args.max_bytes, key)
        app = http.build(http.Service(engine, worker, pictures, *shown))
        host = f"[{args.host}]" if kind == socket.AF_INET6 else args.host
        print(f"{args.model} is at http://{host}:{args.port}/v1 (Ctrl-C ends it)", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            http.Server(app, worker, LAST, host=args.host, port=args.port, log_level=args.log_level).run()
