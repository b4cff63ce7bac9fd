"""The Caption tab: a question about a picture or video, answered by stock generate and by mmspec, side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

import gradio as gr
from gradio.utils import get_upload_folder
from PIL import Image, ImageOps

from mmspec.app.demo import race as races
from mmspec.app.demo.captions import MAX_PROMPT, NOUNS, PICTURE, PLAIN, VIDEO, CaptionRace, CaptionRequest, Token, Turn
from mmspec.app.demo.race import QUICK, RefusedError, control, headline, hint, moment
from mmspec.app.files import inline
from mmspec.app.media.items import kind_of

FIELDS = ("prompt", "drafter")  # of a CaptionRequest after its picture or video, in the page's order
OPTIONS = ("depth", "width", "size", "temperature", "top_p", "seed", "reproducible", "max_new_tokens", "frames")
LEGEND = (
    '<span><span class="mm-t mm-own mm-call" data-n="5">a call begins</span> and gives 5 tokens</span>'
    '<span><span class="mm-t mm-drafted">drafted</span> and accepted</span>'
    '<span><span class="mm-t mm-own">own</span> the model\'s, after the draft</span>'
    '<span><span class="mm-t mm-corrected">corrected</span> draft refused</span>'
)
EXAMPLES = 8  # of each kind
EMPTY = '<p class="mm-hint">The answer appears here, token by token.</p>'
START = hint(
    "Choose a picture and press <b>Run</b>. Stock <code>generate</code> and mmspec answer the same question, one after "
    "the other; then both answers are replayed side by side, each at the pace that was measured."
)


def run(race: CaptionRace, kind: str, image: Any, video: Any, *values: Any) -> Iterator[races.Shown]:
    """Answer a question; the arguments are the page's, see FIELDS and OPTIONS."""
    request = dict(zip((*FIELDS, *OPTIONS), values, strict=True), kind=kind)

    def turn() -> Turn:
        return Turn.of(CaptionRequest(media=_upload(video if kind == VIDEO else image), **request))

    yield from races.run(race, turn, lambda turn: (show_headline(turn), show_texts(turn)), empty(race))


def _upload(file: dict[str, Any] | None) -> str | None:
    """The path of an upload or example. RefusedError: another file; gradio only checks what is marked as a file."""
    path = (file or {}).get("path")
    if path and not Path(path).resolve().is_relative_to(Path(get_upload_folder()).resolve()):
        raise RefusedError("This is no uploaded file. Upload one or choose an example.")
    return path


def empty(race: CaptionRace) -> str:
    """The stage before a run."""
    return show_texts(Turn.of(CaptionRequest(kind=PICTURE, media=None, prompt="", drafter=race.name)))


def build(
    race: CaptionRace, examples: Path, prompts: Mapping[str, str], note: str = "",
    draw: Callable[[], object] | None = None,
) -> None:  # fmt: skip
    """Build the tab in the current page and connect its events.

    Args:
        examples: a folder of pictures and videos.
        prompts: examples, with the words on their buttons; the first one is there when the page opens.
        note: what the model knows.
        draw: draws a new picture of the kind that the model knows.
    """
    with gr.Row():
        with gr.Column(scale=2, min_width=300):
            media = _media(examples, note, draw)
            prompt = gr.Textbox(
                next(iter(prompts)), label="Prompt", lines=1, max_lines=5, max_length=MAX_PROMPT,
                placeholder="What to ask about it", elem_id="mm-prompt",
            )  # fmt: skip
            start, stop = races.buttons("caption", "Run")
            drafter = gr.Dropdown(list(race.drafters), value=race.name, label="Drafter", elem_id="mm-drafter")
            gr.Examples(
                [[text] for text in prompts], [prompt], label="Prompts", elem_id="mm-prompts",
                api_visibility="private", example_labels=[*prompts.values()],
            )  # fmt: skip
            with gr.Accordion("Options", open=False, elem_id="mm-options"):
                inputs = [*media, prompt, drafter, *(control(CaptionRequest, name) for name in OPTIONS)]
        with gr.Column(scale=5, min_width=320):
            panes = races.panes("caption", START, empty(race), LEGEND)
    races.connect([start.click, prompt.submit], partial(run, race), inputs, panes, stop)


def _media(examples: Path, note: str, draw: Callable[[], object] | None) -> list[Any]:
    """The kind, the picture and the video, with examples."""
    choices = [("Picture", PICTURE), ("Video", VIDEO)]
    kind = gr.Radio(choices, value=PICTURE, label="Kind", show_label=False, container=False, elem_id="mm-kind")
    look: dict[str, Any] = {"sources": ["upload"], "height": 150, "buttons": []}
    files = sorted(examples.iterdir()) if examples.is_dir() else []
    paths = {name: [str(path) for path in files if kind_of(path.name) == name][:EXAMPLES] for name in NOUNS}
    with gr.Column(min_width=200) as still:
        first = next(iter(paths[PICTURE]), None)  # so that one click starts a run
        image = gr.Image(first, type="filepath", label="Picture", elem_id="mm-image", **look)
    with gr.Column(min_width=200, visible=False) as moving:
        video = gr.Video(label="Video", elem_id="mm-video", **look)
    for group, where, name in ((still, image, PICTURE), (moving, video, VIDEO)):
        with group:
            if ready := [[path] for path in paths[name]]:
                gr.Examples(ready, [where], label="Examples", elem_id=f"mm-{name}-examples", api_visibility="private")
    if draw is not None:
        with still:
            gr.Button("Draw a new scene", size="sm", elem_id="mm-new").click(draw, None, image, **QUICK)
    if note:
        gr.HTML(f'<p class="mm-small">{escape(note)}</p>', elem_id="mm-note")
    kind.change(lambda k: [gr.Column(visible=k == name) for name in NOUNS], kind, [still, moving], **QUICK)
    return [kind, image, video]


# --- HTML


def show_token(token: Token, at: float = 0.0, fast: float = 1.0) -> str:
    """One token in its colour, except leading blanks; a token without text, such as the end token, is also marked."""
    seen = token.text.lstrip()
    silent = " mm-silent" * (not seen)
    blanks = token.text[: len(token.text) - len(seen)]
    call = f' mm-call" data-n="{token.begins}' if token.begins and token.kind != PLAIN else ""
    return f'{blanks}<span class="mm-t mm-{token.kind}{silent}{call}" {moment(at, fast)}>{escape(seen)}</span>'


def show_texts(turn: Turn) -> str:
    fast, bodies = races.speed_factor(turn), []
    for title, answer in zip(races.TITLES, (turn.plain, turn.fast), strict=True):
        tokens = "".join(show_token(one, at, fast) for one, at in zip(answer.tokens, answer.at, strict=True)) or EMPTY
        bodies.append(f'<div class="mm-text" tabindex="0" role="region" aria-label="{title}: text">{tokens}</div>')
    drafts = f"{turn.question.drafter} drafts ahead; one call checks the whole draft"
    frames = _frames(turn.frames) if turn.question.kind == VIDEO else ""
    return frames + races.stage(turn, ("stock generate: one call of the model for each token", drafts), bodies)


def _frames(frames: Sequence[Image.Image]) -> str:
    """The frames of a video that the model sees, small."""
    small = [ImageOps.contain(frame, (120, 120)) for frame in frames]
    shown = (f'<img src="{inline(one)}" alt="frame {n} that the model sees">' for n, one in enumerate(small, 1))
    return f'<div class="mm-frames">{"".join(shown)}</div>'


def show_headline(turn: Turn) -> str:
    """The speed-up to the last token that both have, tokens per forward, and whether the output is the same."""
    cut = f"Cut off at {turn.question.max_new_tokens} tokens; New tokens in the options allows more." * turn.plain.cut
    return headline(turn, turn.speed_up, turn.fast.tokens_per_target_call, acceptance(turn), cut)


def acceptance(turn: Turn) -> tuple[str, str]:
    """The badge as (same, different, chance, partial or open; its text)."""
    n, different = turn.compared, turn.difference
    if turn.question.temperature > 0 and not turn.question.reproducible:
        return "chance", (
            "Sampled: both answers follow the same distribution, but with different noise. Tick “same draws” or "
            "set the temperature to 0 to compare them token by token."
        )
    if different is not None:
        return "different", f"First difference at token {different + 1}; <code>mmspec verify</code> tells why"
    if turn.ended:
        return "same", f"✓ identical output: {n} of {n} tokens"
    if n == 0:
        return "open", "nothing to compare"
    return "partial", f"identical as far as both went: {n} token{'s' * (n != 1)}"
