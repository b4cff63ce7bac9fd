"""`mmspec demo`: a page on this machine that shows stock generate and mmspec side by side, and the bench's records."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from mmspec import zoo
from mmspec.app import embedded, media

ABOUT = (
    "The same answer from the same vision-language model in fewer steps: a small drafter guesses ahead, "
    "one call checks the whole guess."
)
RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"
STYLE = Path(__file__).with_name("demo.css")
PROMPTS = ("Describe this image in two or three sentences.", "What is in this image?")  # for other models
MAX_UPLOAD = "20mb"
MAX_QUEUE = 16
EXAMPLES = 8
KEEP = 3600  # seconds after which an upload is deleted
FONTS = {  # none is fetched
    "font": ["ui-sans-serif", "system-ui", "sans-serif"],
    "font_mono": ["ui-monospace", "Consolas", "monospace"],
}


def configure(parser: argparse.ArgumentParser) -> None:
    """The options of `mmspec demo`."""
    parser.description = "Show stock generate and mmspec side by side on a page that only this machine can open."
    add = parser.add_argument
    add("--model", default=embedded.MODEL, help="name on the Hugging Face Hub, or a folder (%(default)s)")
    add("--drafter", help="ngram, folder or hub name; default: what fits")
    add("--examples", type=Path, metavar="FOLDER", help="example pictures (default: the sample drawings)")
    add("--results", type=Path, default=RESULTS, metavar="FOLDER", help="the bench's JSON records")
    add("--host", default="127.0.0.1", help="address to listen on; any but this machine's needs --auth (%(default)s)")
    add("--port", type=int, help="default: the first free one from 7860 on")
    add("--auth", metavar="USER:PASSWORD", help="ask for it; or set MMSPEC_DEMO_AUTH, which `ps` does not show")
    add("--time-limit", type=float, default=120.0, metavar="S", help="longest run, in seconds (%(default)s)")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps ... (%(default)s)")
    add("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto", help="(%(default)s)")
    add("--open", action="store_true", help="open the page in the browser")


def run(args: argparse.Namespace) -> int:
    """Serve until the user stops it; the exit code."""
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # read when gradio is imported
    from mmspec.app import demo_guard

    try:
        auth = demo_guard.credentials(args.host, args.auth or os.environ.get("MMSPEC_DEMO_AUTH"))
        pictures = examples(args.examples)
        page = load(args, pictures)
    except (demo_guard.DoorError, media.MediaError, _Fatal) as error:
        print(f"mmspec demo: {error}", file=sys.stderr)
        return 1
    try:
        launch(page, args.host, args.port, auth, inbrowser=args.open)
    except OSError as error:  # the port is taken
        print(f"mmspec demo: {error}", file=sys.stderr)
        return 1
    return 0


class _Fatal(Exception):
    """The demo cannot start; the message says why."""


def examples(folder: Path | None) -> list[Path]:
    """Example pictures: of the folder named, else the sample drawings, if there are any."""
    try:
        return media.find(folder or zoo.samples())[:EXAMPLES]
    except media.MediaError:
        if folder is not None:
            raise
        return []


def load(args: argparse.Namespace, pictures: list[Path]) -> Any:
    """The page over a loaded and warmed-up model."""
    from mmspec.app import engine as engines
    from mmspec.app.demo_answer import RefusedError
    from mmspec.app.demo_caption import Offer
    from mmspec.app.demo_run import Duo
    from mmspec.zoo import language

    own = args.model == embedded.MODEL
    drafter = args.drafter or (embedded.DRAFTER if own else "ngram")
    try:
        engine = engines.load(args.model, drafter, args.device, args.dtype, 128, 0.0)
    except engines.EngineError as error:
        raise _Fatal(str(error)) from error
    if engine.drafter is None:
        raise _Fatal(f"{args.model} cannot be accelerated: {'; '.join(engine.notes) or 'no drafter was given'}")
    duo = Duo(engine, args.time_limit)
    prompts = [*reversed(language.PROMPTS.values())] if own else list(PROMPTS)
    if pictures:
        try:
            duo.warm_up(str(pictures[0]), prompts[0])
        except RefusedError as error:
            raise _Fatal(str(error)) from error
    note = embedded.NOTE.removeprefix("note: ") if own else ""
    return build(duo, Offer(pictures, prompts, note), args.results)


def build(duo: Any, offer: Any, results: Path) -> Any:
    """The Blocks: a header and two tabs."""
    import gradio as gr

    from mmspec.app import demo_bench, demo_caption, demo_guard

    with demo_guard.Page(title="mmspec", analytics_enabled=False, fill_width=True, delete_cache=(KEEP, KEEP)) as page:
        gr.HTML(f'<header class="mm-header"><h1>mmspec</h1><p>{ABOUT}</p></header>')
        with gr.Tab("Caption"):
            demo_caption.build(duo, offer, page)
        with gr.Tab("Drafters"):
            demo_bench.build(demo_bench.read(results))
    return page


def launch(page: Any, host: str, port: int | None, auth: tuple[str, str] | None, **options: Any) -> Any:
    """Open the door as narrowly as it goes: no share link, no files but the examples, small uploads, a short queue."""
    import gradio as gr

    theme = gr.themes.Base(primary_hue="emerald", neutral_hue="slate", **FONTS)
    page.queue(max_size=MAX_QUEUE, default_concurrency_limit=1, api_open=False)
    return page.launch(
        server_name=host, server_port=port, auth=auth, share=False, allowed_paths=[], max_file_size=MAX_UPLOAD,
        footer_links=[], run_history=False, enable_monitoring=False, strict_cors=True, ssr_mode=False, pwa=False,
        mcp_server=False, theme=theme, css_paths=STYLE, **options,
    )  # fmt: skip
