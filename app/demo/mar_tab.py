"""The Image tab's page for a MAR: a class drawn plainly and by exact speculation, side by side."""

from __future__ import annotations

import html

import gradio as gr

from mmspec.app.demo import look
from mmspec.app.demo.answer import DONE
from mmspec.app.demo.desk import Desk
from mmspec.app.demo.look import duration
from mmspec.app.demo.sketch import CSPD, MAX_AHEAD, MAX_GUIDANCE, ClassWish, Sketch, Studio, Two
from mmspec.app.demo.tab import QUICK, Tab, tie

PLAIN = ("Plain", "one token an iteration: a pass of the model for each")
START = look.hint(
    "Choose a class and press <b>Draw</b>. The picture is drawn twice from the same seed, one after the other: token "
    "by token, then with drafts; all modes but CSpD's keep the model's distribution."
)


class Classes(Tab):
    """The page's events."""

    wish = ClassWish

    def __init__(self, studio: Studio, desk: Desk) -> None:
        super().__init__(studio, desk)
        self.blank = studio.blank

    def empty(self) -> tuple[str, str]:
        return pane(self.blank(), *PLAIN), pane(self.blank(), "mmspec", _about(ClassWish("")))

    def look(self, both: Two) -> tuple[str, str, str]:
        return summary(both), pane(both.plain, *PLAIN), pane(both.fast, "mmspec", _about(both.wish))


def _about(wish: ClassWish) -> str:
    return f"{wish.mode}: one pass looks at many tokens"


def pane(sketch: Sketch, title: str, about: str) -> str:
    """One picture with its places and numbers."""
    marks = [] if sketch.state == DONE else sketch.known  # nothing stands before the finished picture
    label = f"{sum(map(bool, sketch.known))} of {len(sketch.known)} tokens drawn"
    grid = look.canvas(sketch.image, ["mm-plain" * bool(when) for when in marks], sketch.grid, label)
    told, done = sketch.told, bool(sketch.work)
    kept = f"{told['acceptance']:.0%} of the drafts tested" if told.get("tested") else "none drafted"
    numbers = look.figures([
        ("seconds", duration(sketch.seconds), sketch.passes, ""),
        ("passes", str(sketch.passes), sketch.passes, f"{sketch.work.get('rows', 0)} rows in them" if done else ""),
        ("head evaluations", str(sketch.work.get("evaluations", 0)), done, "tokens times steps"),
        ("drafts kept", f"{told.get('tested', 0) - told.get('refused', 0):.0f}", done, kept),
    ])  # fmt: skip
    return look.section(title, sketch.state, look.header(title, about, sketch.state) + grid + numbers)


def summary(two: Two) -> str:
    """The speed-up, where there is one, and what the second picture has to do with the first."""
    about, fewer = "the accelerated picture comes after the plain one", ""
    if two.speed_up is not None:
        how = "as fast" if two.speed_up >= 1 else "the speed"
        about = f"{how}; passes of the model: {two.plain.passes} → {two.fast.passes}"
    if two.fewer is not None:
        passes, seconds = two.fewer
        fewer = (
            f"Plain drawing in {passes} passes, many tokens in each, took {duration(seconds)}. That is another "
            "distribution; where it is good enough, it is the way to beat."
        )
    bars = look.times([(name, [("decode", s.seconds)]) for name, s in (("plain", two.plain), ("mmspec", two.fast))])
    badge = ("chance", "another picture of the same distribution: lossless, but with noise of its own")
    if two.wish.mode == CSPD:
        badge = ("chance", "approximate: a picture of another distribution")
    if two.speed_up is None:
        badge = ("open", "nothing to compare" if two.over else "not compared yet")
    return look.summary(two.speed_up, about, bars, look.badge(*badge, two.over), fewer)


def build(studio: Studio, desk: Desk) -> Classes:
    """Lay the page out in the tab under construction and tie its events."""
    tab = Classes(studio, desk)
    with gr.Row():
        with gr.Column(scale=2, min_width=300):
            names = studio.model.names
            label = gr.Dropdown(names, value=names[0], label="Class", filterable=True, elem_id="mm-class")
            with gr.Row():
                draw = gr.Button("Draw", variant="primary", min_width=80)
                stop = gr.Button("Stop", variant="stop", interactive=False, min_width=80)
            mode = gr.Dropdown(studio.modes, value=studio.modes[0], label="Speculation with")
            ahead = gr.Slider(1, MAX_AHEAD, ClassWish.ahead, step=1, label="Ahead", info="tokens drafted in a round")
            prefill = gr.Slider(0, 1, ClassWish.prefill, step=0.05, label="Prefill",
                                info="share that the model draws before anything is drafted")  # fmt: skip
            with gr.Accordion("Sampling", open=False):
                seed = gr.Number(0, label="Seed", precision=0, minimum=0, info="of both pictures")
                guidance = gr.Slider(1, MAX_GUIDANCE, studio.guidance, step=0.5, label="Guidance",
                                     info="how closely to follow the class")  # fmt: skip
        with gr.Column(scale=5, min_width=320):
            note = look.hint(f"Both pictures are {html.escape(studio.note)}.") if studio.note else ""
            told = gr.HTML(START + note, elem_id="mm-class-summary")
            with gr.Row(equal_height=True):
                plain, fast = (gr.HTML(empty, min_width=300) for empty in tab.empty())
    panes = [told, plain, fast]
    tie(tab, [draw.click], tab.run, [label, mode, ahead, prefill, seed, guidance], panes, panes, [draw, stop])
    stop.click(tab.stop, None, None, **QUICK)
    return tab
