"""The Caption tab: a picture or video and questions, answered by stock generate and by mmspec, side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

import gradio as gr
from gradio.components import Component
from gradio.utils import get_upload_folder

from mmspec.app.demo import race_tab
from mmspec.app.demo.captions import MAX_PROMPT, NOUNS, PICTURE, PLAIN, VIDEO, CaptionRace, CaptionRequest, Token, Turn
from mmspec.app.demo.race import DONE, RefusedError
from mmspec.app.demo.race_tab import QUICK, duration, headline, hint, moment, slider
from mmspec.app.media.items import kind_of
from mmspec.pipelines.prompts import Turns

FIELDS = (  # of a CaptionRequest after its picture or video, in the page's order
    "prompt", "drafter", "depth", "width", "size", "temperature", "top_p", "seed", "reproducible", "max_new_tokens",
    "frames",
)  # fmt: skip
HARD = " (a stress test: hard to draft)"
LEGEND = (
    '<span><span class="mm-t mm-own mm-call" data-n="5">a call begins</span> and gives 5 tokens</span>'
    '<span><span class="mm-t mm-drafted">drafted</span> and accepted</span>'
    '<span><span class="mm-t mm-own">own</span> the model\'s, after the draft</span>'
    '<span><span class="mm-t mm-corrected">corrected</span> draft refused</span>'
)
EMPTY = '<p class="mm-hint">The answer appears here, token by token.</p>'
START = hint(
    "Choose a picture and press <b>Run</b>. Stock <code>generate</code> and mmspec answer the same question, one after "
    "the other; then both answers are replayed side by side, each at the pace that was measured."
)


def run(race: CaptionRace, kind: str, image: Any, video: Any, *values: Any) -> Iterator[tuple[Any, ...]]:
    """Run a first question; the arguments are the page's, see `FIELDS`."""
    yield from go_on(race, [], kind, image, video, *values)


def go_on(
    race: CaptionRace, before: Turns, kind: str, image: Any, video: Any, *values: Any
) -> Iterator[tuple[Any, ...]]:
    """Run a further question about the same picture or video; `before` is the conversation so far."""
    request = dict(zip(FIELDS, values, strict=True), kind=kind, before=before)

    def turn() -> Turn:
        return Turn.of(CaptionRequest(media=_upload(video if kind == VIDEO else image), **request))

    yield from race_tab.run(race, turn, look, empty(race), outputs=6)


def _upload(file: dict[str, Any] | None) -> str | None:
    """The path of an upload or example. RefusedError: another file; gradio only checks what is marked as a file."""
    if file is None:
        return None
    if not Path(file["path"]).resolve().is_relative_to(Path(get_upload_folder()).resolve()):
        raise RefusedError("This is no uploaded file. Upload one or choose an example.")
    return file["path"]


def look(turn: Turn) -> tuple[Any, ...]:
    """Headline, stage, figures, the frames of a video, the conversation, and its turns so far."""
    question, turns = turn.question, list(turn.question.before)
    talk = [text for pair in turns for text in pair]
    texts = enumerate((*talk, question.prompt))
    messages: list[Any] = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in texts]
    chat = gr.Chatbot(messages, visible=bool(turns))
    frames = gr.Gallery(turn.frames, visible=question.kind == VIDEO)
    if turn.plain.state == DONE:
        turns.append((question.prompt, turn.plain.text))
    return show_headline(turn), show_texts(turn), show_figures(turn), frames, chat, turns


def empty(race: CaptionRace) -> str:
    """The stage before a run."""
    return show_texts(Turn.of(CaptionRequest(kind=PICTURE, media=None, prompt="", drafter=race.name)))


def build(
    race: CaptionRace, examples: Sequence[Path], prompts: Sequence[str], note: str = "", hard: str = "",
    draw: Callable[[], object] | None = None,
) -> None:  # fmt: skip
    """Build the tab in the current page and connect its events.

    Args:
        examples: pictures and videos.
        note: what the model knows.
        hard: the prompt that is hard to draft.
        draw: draws a new picture of the kind that the model knows.
    """
    turns = gr.State([])
    with gr.Row():
        with gr.Column(scale=2, min_width=300):
            kind, image, video = _media(examples, note, draw)
            prompt = gr.Textbox(
                prompts[0], label="Prompt", lines=1, max_lines=5, max_length=MAX_PROMPT,
                placeholder="What to ask about it", elem_id="mm-prompt",
            )  # fmt: skip
            start, further, stop = race_tab.buttons("caption", "Run", "Follow up")
            drafter = gr.Dropdown(list(race.drafters), value=race.name, label="Drafter", elem_id="mm-drafter")
            named = [text + HARD * (text == hard) for text in prompts]
            gr.Examples(
                [[text] for text in prompts], [prompt], label="Prompts", elem_id="mm-prompts",
                api_visibility="private", example_labels=named,
            )  # fmt: skip
            inputs = [kind, image, video, prompt, drafter, *_options()]
        with gr.Column(scale=5, min_width=320):
            panes = race_tab.panes("caption", START, empty(race), LEGEND)
            frames = gr.Gallery(visible=False, columns=8, height=120, label="Frames that the model sees",
                                elem_id="mm-frames", buttons=[])  # fmt: skip
            chat = gr.Chatbot(visible=False, height=180, label="Conversation", elem_id="mm-talk", buttons=[])
    shown = [*panes, frames, chat, turns]
    race_tab.connect([start.click, prompt.submit], partial(run, race), inputs, shown, stop)
    race_tab.connect([further.click], partial(go_on, race), [turns, *inputs], shown, stop)
    another = [kind.change, image.change, video.change]  # a new picture or video ends the conversation
    gr.on(another, lambda: ([], gr.Chatbot(visible=False)), None, [turns, chat], **QUICK)


def _media(
    examples: Sequence[Path], note: str, draw: Callable[[], object] | None
) -> tuple[gr.Radio, gr.Image, gr.Video]:
    """The picture or video, with examples."""
    choices = [("Picture", PICTURE), ("Video", VIDEO)]
    kind = gr.Radio(choices, value=PICTURE, show_label=False, container=False, elem_id="mm-kind")
    look: dict[str, Any] = {"sources": ["upload"], "height": 150, "buttons": []}
    paths = {name: [str(path) for path in examples if kind_of(path.name) == name] for name in NOUNS}
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
    return kind, image, video


def _options() -> list[Component]:
    """The remaining fields of a CaptionRequest on the page, in order."""
    with gr.Accordion("Options", open=False, elem_id="mm-options"):
        return [
            slider(CaptionRequest, "depth", "Depth", info="maximum draft length, in tokens; 0: the drafter's default"),
            slider(CaptionRequest, "width", "Width", info="branches; 1 is a chain; 0: the drafter's default"),
            slider(CaptionRequest, "size", "Size", info="draft nodes per call; 0: the drafter's default"),
            slider(CaptionRequest, "temperature", "Temperature", step=0.05, info="0 is greedy decoding"),
            slider(CaptionRequest, "top_p", "Top-p", step=0.05, info="for temperatures above 0"),
            gr.Number(0, label="Seed", precision=0, minimum=0),
            gr.Checkbox(True, label="Same draws", info="above temperature 0: the tokens that stock generate draws"),
            slider(CaptionRequest, "max_new_tokens", "New tokens", info="maximum"),
            slider(CaptionRequest, "frames", "Frames", info="of a video, evenly spaced"),
        ]


# --- HTML


def show_token(token: Token, at: float = 0.0, fast: float = 1.0) -> str:
    """One token in its colour, except leading blanks; a token without text, such as the end token, is also marked."""
    seen = token.text.lstrip()
    silent = " mm-silent" * (not seen)
    blanks = token.text[: len(token.text) - len(seen)]
    call = f' mm-call" data-n="{token.begins}' if token.begins and token.kind != PLAIN else ""
    return f'{blanks}<span class="mm-t mm-{token.kind}{silent}{call}" {moment(at, fast)}>{escape(seen)}</span>'


def show_texts(turn: Turn) -> str:
    fast, bodies = race_tab.speed_factor(turn), []
    for title, answer in zip(race_tab.TITLES, (turn.plain, turn.fast), strict=True):
        tokens = "".join(show_token(one, at, fast) for one, at in zip(answer.tokens, answer.at, strict=True)) or EMPTY
        bodies.append(f'<div class="mm-text" tabindex="0" role="region" aria-label="{title}: text">{tokens}</div>')
    drafts = f"{turn.question.drafter} drafts ahead; one call checks the whole draft"
    return race_tab.stage(turn, ("stock generate: one call of the model for each token", drafts), bodies)


def show_headline(turn: Turn) -> str:
    """The speed-up to the last token that both have, tokens per forward, and whether the output is the same."""
    cut = f"Cut off at {turn.question.max_new_tokens} tokens; New tokens in the options allows more." * turn.plain.cut
    return headline(turn, turn.speed_up(), turn.fast.tokens_per_target_call, acceptance(turn), cut)


def show_figures(turn: Turn) -> str:
    """A table of times, forwards and accepted tokens."""
    both = turn.plain, turn.fast
    decode = turn.speed_up(after=1)
    return race_tab.table([
        ("tokens", *(f"{len(a.tokens)}{', cut off' * a.cut}" for a in both)),
        ("whole answer", *(duration(a.seconds) for a in both)),
        ("to the first token", *(duration(a.first) for a in both)),
        ("tokens/s, prefill included", *(f"{len(a.tokens) / a.at[-1]:.1f}" if a.at else "–" for a in both)),
        ("speed-up without the wait for the first token", "1", f"{decode:.2f}×" if decode else "–"),
        ("forwards after the prefill", *(str(a.rounds) for a in both)),
        ("tokens per forward, its own included", *(f"{a.tokens_per_target_call:.2f}" for a in both)),
        ("drafted tokens accepted per forward", "–", f"{turn.fast.accepted_draft_tokens_per_call:.2f}"),
        (f"{turn.question.noun} and prompt prepared, once for both", *[duration(turn.prepared)] * 2),
    ])  # fmt: skip


def acceptance(turn: Turn) -> tuple[str, str]:
    """The badge as (same, different, chance, partial or open; its text)."""
    n, different = turn.compared, turn.difference
    if not turn.question.comparable:
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
