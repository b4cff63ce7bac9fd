"""`mmspec demo`: a local web page that shows stock generate and mmspec side by side, and the bench's pages."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mmspec
from mmspec import zoo
from mmspec.app import embedded, enabling
from mmspec.app.options import above_zero, is_local, port, where

if TYPE_CHECKING:
    from gradio import Blocks
    from gradio.routes import App

    from mmspec.app.engine import Engine
    from mmspec.app.media.decoder import Decoder

Tabs = dict[str, Callable[[], None]]  # by title, functions that build a tab in the current page
ABOUT = (
    "The same words and pictures from the same models in fewer steps: guess ahead, check the whole guess in one call."
)
CONDITION = {"batch": "batch {}", "rows": "{} rows", "temperature": "temperature {:g}", "prompt": "{} answers"}
PATHS = ("mmspec", "without mmspec")
COLOURS = dict(zip(PATHS, ("#16a34a", "#788496"), strict=True))
RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
STYLE = Path(__file__).with_name("demo.css")
HARD = " (hard to draft)"
# Prompts with the words on their buttons, for the embedded models and for others.
OWN_PROMPTS = {text: text + HARD * (name == "long") for name, text in zoo.PROMPTS.items()}
OWN_PROMPTS["How many objects are there?"] = "How many objects are there?"
PROMPTS = {text: text for text in ("Describe this image in two or three sentences.", "What is in this image?")}
WISHES = (  # for the embedded image model; it draws the first one correctly
    "a large green ring on a white background",
    "a small red striped circle left of a large blue square on a grey background",
    "a large yellow star above a small purple triangle on a grainy background",
    "a small cyan dotted diamond right of a large orange cross on a black background",
)
NAME_EXAMPLES = (  # gives the buttons of example pictures and videos, which have no text, names for screen readers
    "() => { const name = () => document.querySelectorAll('.gallery-item:not([aria-label]) :is(img, video)').forEach("
    "one => one.closest('button').setAttribute('aria-label', 'Example ' + one.src.split('/').pop())); name(); "
    "new MutationObserver(name).observe(document.body, {childList: true, subtree: true}) }"
)
MAX_UPLOAD = "40mb"
MAX_QUEUE = 16
NO_RESULTS = '<p class="mm-hint">There are no pages of <code>mmspec bench</code> in <code>{}</code>; see --results.</p>'
KEEP = 3600  # seconds after which an upload is deleted
FONTS = ["ui-sans-serif", "system-ui", "sans-serif"], ["ui-monospace", "Consolas", "monospace"]  # not downloaded


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = "Show stock generate and mmspec side by side on a page that only this machine can open."
    add = parser.add_argument
    add("--model", default=embedded.MODEL, help="name on the Hugging Face Hub, or a folder (%(default)s)")
    add("--drafter", help="name, folder or hub name; default: what the model ships with")
    add("--image-model", default=embedded.IMAGE_MODEL, help="for the Image tab, LlamaGen or MAR, or none (%(default)s)")
    add("--image-drafter", metavar="NAME", help="a trained drafter for it, folder or hub name")
    add("--examples", type=Path, default=zoo.samples(), metavar="FOLDER", help="example pictures (default: drawings)")
    add("--results", type=Path, default=RESULTS, metavar="FOLDER", help="pages that `mmspec bench --markdown` wrote")
    add("--host", default="127.0.0.1", help="address to listen on; any but this machine's needs --auth (%(default)s)")
    add("--port", type=port, help="default: the first free port from 7860 on")
    add("--auth", metavar="USER:PASSWORD", help="require a password; or set MMSPEC_DEMO_AUTH, which `ps` does not show")
    add("--time-limit", type=above_zero, default=180.0, metavar="S", help="limit of a run, in seconds (%(default)s)")
    enabling.add(parser)
    where(parser)
    add("--open", action="store_true", help="open the page in the browser")


def run(args: argparse.Namespace) -> int:
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # read when gradio is imported
    here = [os.environ.get("no_proxy") or os.environ.get("NO_PROXY", ""), "127.0.0.1", "localhost"]
    os.environ["no_proxy"] = ",".join(filter(None, here))  # gradio asks its own page
    from mmspec.app.demo import captions, race
    from mmspec.app.devices import EngineError

    try:
        auth = credentials(args.host, args.auth or os.environ.get("MMSPEC_DEMO_AUTH"))
        with captions.media_decoder() as decoder:
            tabs = load_captions(args, decoder) | load_images(args)
            page = build(tabs | {"Results": partial(show_results, args.results)})
            quietly = {"quiet": True, "prevent_thread_lock": True}  # no advice to create a public link
            _, address, _ = launch(page, args.host, args.port, auth, inbrowser=args.open, **quietly)
            print(f"the demo is at {address} (Ctrl-C ends it)", flush=True)
            try:
                page.block_thread()
            finally:
                race.close()
    except (EngineError, enabling.EnableError, OSError) as error:
        print(f"mmspec demo: {error}", file=sys.stderr)  # OSError: the port is taken, or a password is missing
        return 1
    return 0


def credentials(host: str, auth: str | None) -> tuple[str, str] | None:
    """User and password; None if only this machine can reach the demo. OSError if they are missing or not readable."""
    if auth is None and is_local(host):
        return None
    user, _, password = (auth or "").partition(":")
    if not (user and password):
        why = "takes both, not empty" if auth is not None else f"is needed, since --host {host} lets others in"
        raise OSError(f"--auth USER:PASSWORD, or MMSPEC_DEMO_AUTH, {why}")
    return user, password


def load_captions(args: argparse.Namespace, decoder: Decoder) -> Tabs:
    from mmspec.app import engine as engines
    from mmspec.app.demo import caption_tab
    from mmspec.app.demo.captions import CaptionRace
    from mmspec.app.devices import EngineError
    from mmspec.zoo import scenes

    drafter = args.drafter or embedded.drafter(args.model)
    options = enabling.given(args.enable, drafter)
    engine = engines.load(args.model, drafter, args.device, args.dtype, 128, 0.0, **options)
    if engine.drafter is None:
        raise EngineError(f"{args.model} cannot be accelerated: {'; '.join(engine.notes) or 'no drafter was given'}")
    race = CaptionRace(engine, decoder, args.time_limit, fitting(engine, args.model))
    if not embedded.speaks(args.model):
        return {"Caption": partial(caption_tab.build, race, args.examples, PROMPTS)}
    note = embedded.NOTE.format(args.model).removeprefix("note: ")
    return {"Caption": partial(caption_tab.build, race, args.examples, OWN_PROMPTS, note=note, draw=scenes.drawn)}


def fitting(engine: Engine, model: str) -> dict[str, object]:
    """All drafters that fit a loaded model, by method; the engine's own is first.

    These are those of an embedded model, the MTP heads in the model's own files, and those without weights.
    """
    from mmspec.registry import OF_TEXT, name_of

    titled = {name_of(engine.drafter): engine.drafter}
    for name in (*embedded.drafters(model), "mtp", *OF_TEXT):
        with contextlib.suppress(ValueError, TypeError, OSError):  # it does not fit
            drafter = mmspec.enable(engine.model, drafter=embedded.resolve(name)).drafter
            titled.setdefault(name_of(drafter), drafter)
    mmspec.disable(engine.model)
    return titled


def load_images(args: argparse.Namespace) -> Tabs:
    """The Image tab of --image-model; with the embedded one also the tab of the embedded MAR."""
    from mmspec.app import image_model
    from mmspec.app.demo import image_tab
    from mmspec.app.demo.images import ImageRace, MarRace
    from mmspec.app.devices import EngineError

    own = args.image_model == embedded.IMAGE_MODEL
    names = [args.image_model] if args.image_model != embedded.STOCK else []
    names += [image_model.MAR] if own and (zoo.weights() / embedded.MAR_MODEL).is_dir() else []
    tabs: Tabs = {}
    for name in names:
        subject = image_model.load(name, args.device, args.dtype)
        if isinstance(subject, image_model.ModelSubject):
            raise EngineError(f"the Image tab needs a LlamaGen or a MAR, and {name} is neither; see --image-model")
        if isinstance(subject, image_model.MarSubject):
            tabs["Image, continuous" if tabs else "Image"] = partial(image_tab.build, MarRace(subject, args.time_limit))
            continue
        drafter = args.image_drafter or (embedded.IMAGE_DRAFTER if own else None)
        drafter = embedded.fitting(drafter, name) if drafter else None
        race = ImageRace(subject, drafter, args.time_limit)
        tabs["Image"] = partial(image_tab.build, race, WISHES if own else ())
    return tabs


def show_results(folder: Path) -> None:
    """Build the Results tab in the current page: the bench's pages, one at a time, below bars of the speed-ups."""
    import gradio as gr
    import pandas as pd

    from mmspec.app.demo.race import QUICK

    pages = {path.stem.replace("-", " "): path for path in sorted(folder.glob("*.md"))}
    if not pages:
        gr.HTML(NO_RESULTS.format(folder))
        return
    first = "round video" if "round video" in pages else next(iter(pages))
    chosen = gr.Dropdown([*pages], value=first, label="Measurements")
    plot = gr.BarPlot(
        x="method", y="times as fast", color="path", color_map=COLOURS, sort="-y", x_title=" ", color_title="",
        x_label_angle=-30, tooltip="all", height=320, elem_id="mm-bars",
    )  # fmt: skip
    page = gr.Markdown(elem_id="mm-results")

    def show(name: str) -> tuple[object, str]:
        rows, title = speedups(pages[name].with_suffix(".json"))
        bars = gr.BarPlot(pd.DataFrame(rows), title=title, visible=True) if rows else gr.BarPlot(visible=False)
        return bars, pages[name].read_text(encoding="utf-8")

    gr.on(None, show, chosen, [plot, page], **QUICK)  # also as the page opens


def speedups(file: Path) -> tuple[list[dict[str, object]], str]:
    """The speed-ups of the first condition among a bench's records, and a title; none if the file has none."""
    try:
        every = json.loads(file.read_text(encoding="utf-8"))["records"]
        records = [r for r in every if r.get("speedup_e2e") and "kernel" not in r]
    except (OSError, ValueError, LookupError, TypeError, AttributeError):  # no such file, or not the bench's
        return [], ""
    first = {name: r[name] for r in records[:1] for name in CONDITION if r.get(name) not in (None, "")}
    rows: list[dict[str, object]] = [
        {"method": r["method"], "times as fast": round(r["speedup_e2e"], 2), "path": PATHS[bool(r.get("stock_path"))]}
        for r in records
        if all(r.get(name) == value for name, value in first.items())
    ]
    words = (CONDITION[name].format(value) for name, value in first.items())
    return rows, ", ".join(["Against plain decoding, end to end", *words])


def build(tabs: Tabs) -> Blocks:
    """Build the page: a header and the tabs."""
    import gradio as gr

    with gr.Blocks(title="mmspec", analytics_enabled=False, fill_width=True, delete_cache=(KEEP, KEEP)) as page:
        gr.HTML(f'<header class="mm-header"><h1>mmspec</h1><p>{ABOUT}</p></header>')
        for title, fill in tabs.items():
            with gr.Tab(title):
                fill()
        page.load(None, js=NAME_EXAMPLES, queue=False, api_visibility="private")
    return page


def launch(
    page: Blocks, host: str, port: int | None, auth: tuple[str, str] | None, **options: Any
) -> tuple[App, str, str]:
    """Launch with tight limits: no share link, no files except the examples, small uploads, a short queue."""
    import gradio as gr

    theme = gr.themes.Base(primary_hue="emerald", neutral_hue="slate", font=FONTS[0], font_mono=FONTS[1])
    page.queue(max_size=MAX_QUEUE, default_concurrency_limit=1, api_open=False)
    return page.launch(
        server_name=host, server_port=port, auth=auth, share=False, allowed_paths=[], max_file_size=MAX_UPLOAD,
        footer_links=[], run_history=False, enable_monitoring=False, strict_cors=True, ssr_mode=False, pwa=False,
        mcp_server=False, theme=theme, css_paths=STYLE, **options,
    )  # fmt: skip
