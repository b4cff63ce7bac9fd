"""`mmspec demo`: a local web page that shows stock generate and mmspec side by side, and the bench's records."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmspec import media, zoo
from mmspec.app import embedded, enabling
from mmspec.app.media import inputs, items
from mmspec.app.options import above_zero, check_port, port, where

if TYPE_CHECKING:
    from gradio import Blocks
    from gradio.routes import App

    from mmspec.app.demo.caption_tab import Offer
    from mmspec.app.demo.duo import Duo
    from mmspec.app.demo.easel import Easel, Studio
    from mmspec.app.demo.records import ResultFolder
    from mmspec.app.media.decoder import Decoder

ABOUT = (
    "The same words and pictures from the same models in fewer steps: guess ahead, check the whole guess in one call."
)
RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
STYLE = Path(__file__).with_name("demo.css")
PROMPTS = ("Describe this image in two or three sentences.", "What is in this image?")  # for other models
FURTHER = "Tell me more about what you see."
OWN_FURTHER = "How many objects are there?"
WISHES = (  # for the embedded image model; it draws the first one correctly
    "a large green ring on a white background",
    "a small red striped circle left of a large blue square on a grey background",
    "a large yellow star above a small purple triangle on a grainy background",
    "a small cyan dotted diamond right of a large orange cross on a black background",
)
MAX_UPLOAD = "40mb"
MAX_QUEUE = 16
EXAMPLES = 8
NONE = "none"
KEEP = 3600  # seconds after which an upload is deleted
FONTS: dict[str, Any] = {  # no downloaded fonts
    "font": ["ui-sans-serif", "system-ui", "sans-serif"],
    "font_mono": ["ui-monospace", "Consolas", "monospace"],
}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = "Show stock generate and mmspec side by side on a page that only this machine can open."
    add = parser.add_argument
    add("--model", default=embedded.MODEL, help="name on the Hugging Face Hub, or a folder (%(default)s)")
    add("--drafter", help="name, folder or hub name; default: what the model ships with")
    add("--drafters", nargs="+", default=[], metavar="NAME", help="more drafters to choose from, besides all that fit")
    add("--image-model", default=embedded.IMAGE_MODEL, help="for the Image tab, LlamaGen or MAR, or none (%(default)s)")
    add("--image-drafter", metavar="NAME", help="a trained drafter for it, folder or hub name")
    add("--examples", type=Path, metavar="FOLDER", help="example pictures (default: the sample drawings)")
    add("--results", type=Path, default=RESULTS, metavar="FOLDER", help="the bench's JSON records")
    add("--host", default="127.0.0.1", help="address to listen on; any but this machine's needs --auth (%(default)s)")
    add("--port", type=port, help="default: the first free port from 7860 on")
    add("--auth", metavar="USER:PASSWORD", help="require a password; or set MMSPEC_DEMO_AUTH, which `ps` does not show")
    add("--time-limit", type=above_zero, default=180.0, metavar="S", help="limit of a run, in seconds (%(default)s)")
    enabling.add(parser)
    where(parser)
    add("--open", action="store_true", help="open the page in the browser")


def run(args: argparse.Namespace) -> int:
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # read when gradio is imported
    from mmspec.app.demo import desk, guard, sight
    from mmspec.app.devices import EngineError

    refused = (guard.AccessError, desk.RefusedError, EngineError, enabling.EnableError, media.MediaError)
    try:
        auth = guard.credentials(args.host, args.auth or os.environ.get("MMSPEC_DEMO_AUTH"))
        if args.port is not None:  # check before the slow loading of the models
            check_port(args.host, args.port, "choose another --port, or none: a free one is found")
        pictures, clips = examples(args.examples)
        with sight.decoder() as decoder:
            page = load(args, decoder, pictures, clips)
            quietly = {"quiet": True, "prevent_thread_lock": True}  # no advice to create a public link
            _, address, _ = launch(page, args.host, args.port, auth, inbrowser=args.open, **quietly)
            print(f"the demo is at {address} (Ctrl-C ends it)", flush=True)
            page.block_thread()
    except (*refused, OSError) as error:  # OSError: the port is taken
        print(f"mmspec demo: {error}", file=sys.stderr)
        return 1
    return 0


def examples(folder: Path | None) -> tuple[list[Path], list[Path]]:
    """Example pictures and clips: from the given folder, else the samples, if available."""
    try:
        there = [(item.kind, item.source.path) for item in inputs.open_inputs([folder or zoo.samples()]).items()]
    except media.MediaError:
        if folder is not None:
            raise
        there = []
    pictures, clips = ([p for kind, p in there if kind == wanted and p] for wanted in (items.IMAGE, items.VIDEO))
    return pictures[:EXAMPLES], clips[:EXAMPLES]


def load(args: argparse.Namespace, decoder: Decoder, pictures: list[Path], clips: list[Path]) -> Blocks:
    from mmspec.app.demo import records

    duo, offer = _captions(args, decoder, pictures, clips)
    bench = records.read(args.results)
    easel, studio = _pictures(args), _classes(args, bench)
    wishes = WISHES if args.image_model == embedded.IMAGE_MODEL else ()
    return build(duo, offer, bench, easel, wishes, studio, args.model)


def _captions(args: argparse.Namespace, decoder: Decoder, pictures: list[Path], clips: list[Path]) -> tuple[Duo, Offer]:
    """The race and the examples of the Caption tab."""
    from mmspec.app import engine as engines
    from mmspec.app.demo.caption_tab import Offer
    from mmspec.app.demo.duo import Duo, fitting
    from mmspec.app.devices import EngineError
    from mmspec.zoo import scenes

    own = embedded.speaks(args.model)
    drafter = args.drafter or embedded.drafter(args.model)
    options = enabling.given(args.enable, drafter)
    engine = engines.load(args.model, drafter, args.device, args.dtype, 128, 0.0, **options)
    if engine.drafter is None:
        raise EngineError(f"{args.model} cannot be accelerated: {'; '.join(engine.notes) or 'no drafter was given'}")
    duo = Duo(engine, decoder, args.time_limit, fitting(engine, args.model, args.drafters))
    prompts = list(zoo.PROMPTS.values()) if own else list(PROMPTS)
    if pictures:
        duo.warm_up(str(pictures[0]), prompts[0])
    note = embedded.NOTE.format(args.model).removeprefix("note: ") if own else ""
    hard, draw = (zoo.PROMPTS["long"], scenes.drawn) if own else ("", None)
    return duo, Offer(pictures, prompts, note, clips, OWN_FURTHER if own else FURTHER, hard, draw)


def _pictures(args: argparse.Namespace) -> Easel | None:
    """The race of the Image tab for prompts; None leaves the tab out."""
    from mmspec.app import mar, painter
    from mmspec.app.demo.easel import Easel

    if args.image_model == NONE or mar.draws(args.image_model):
        return None
    own = embedded.IMAGE_DRAFTER if args.image_model == embedded.IMAGE_MODEL else None
    drafter = embedded.fitting(args.image_drafter, args.image_model) if args.image_drafter else own
    easel = Easel(painter.load(args.image_model, args.device, args.dtype), drafter, args.time_limit)
    easel.warm_up("0" if easel.subject.classes else "a picture")
    return easel


def _classes(args: argparse.Namespace, bench: ResultFolder) -> Studio | None:
    """The race for classes of a MAR: --image-model, or the embedded MAR along with the embedded image model."""
    from mmspec.app import mar
    from mmspec.app.demo.easel import Studio

    embedded_too = args.image_model == embedded.IMAGE_MODEL and (zoo.weights() / mar.OWN[1]).is_dir()
    if not embedded_too and not mar.draws(args.image_model):
        return None
    model = mar.load(mar.NAME if embedded_too else args.image_model, args.device, args.dtype)
    measured = bench.quality("mar-quality", mar.NAME) if embedded_too or args.image_model in mar.OWN else {}
    studio = Studio(model, args.time_limit, measured)
    studio.warm_up("0")
    return studio


def build(
    duo: Duo, offer: Offer, bench: ResultFolder, easel: Easel | None = None, wishes: Sequence[str] = (),
    studio: Studio | None = None, model: str = "",
) -> Blocks:  # fmt: skip
    """Build the page: a header and the tabs, which share one queue and one Desk."""
    import gradio as gr

    from mmspec.app.demo import caption_tab, desk, guard, image_tab, records

    one = desk.Desk()
    with guard.Page(title="mmspec", analytics_enabled=False, fill_width=True, delete_cache=(KEEP, KEEP)) as page:
        gr.HTML(f'<header class="mm-header"><h1>mmspec</h1><p>{ABOUT}</p></header>')
        with gr.Tab("Caption"):
            caption_tab.build(duo, one, offer, page)
        if easel is not None:
            with gr.Tab("Image"):
                image_tab.build(easel, one, wishes, bool(wishes))
        if studio is not None:
            with gr.Tab("Image, continuous" if easel is not None else "Image"):
                image_tab.build(studio, one)
        with gr.Tab("Drafters"):
            records.build(bench, model, page)
    return page


def launch(
    page: Blocks, host: str, port: int | None, auth: tuple[str, str] | None, **options: Any
) -> tuple[App, str, str]:
    """Launch with tight limits: no share link, no files except the examples, small uploads, a short queue."""
    import gradio as gr

    theme = gr.themes.Base(primary_hue="emerald", neutral_hue="slate", **FONTS)
    page.queue(max_size=MAX_QUEUE, default_concurrency_limit=1, api_open=False)
    return page.launch(
        server_name=host, server_port=port, auth=auth, share=False, allowed_paths=[], max_file_size=MAX_UPLOAD,
        footer_links=[], run_history=False, enable_monitoring=False, strict_cors=True, ssr_mode=False, pwa=False,
        mcp_server=False, theme=theme, css_paths=STYLE, **options,
    )  # fmt: skip
