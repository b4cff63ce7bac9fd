"""What each call of the model gave: a caption in the terminal, one line a call, drafted tokens coloured by their depth.

python examples/watch_drafts.py [PICTURE] [--prompt "Describe this image in detail."] [--svg drafts.svg]
"""

import argparse
from html import escape
from pathlib import Path

from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor, logging

import mmspec
from mmspec import zoo
from mmspec.pipelines.prompts import chat_inputs
from mmspec.pipelines.serving.stream import stream

DEPTHS = ("#d7ecfb", "#b3dbf7", "#8cc8f1", "#69b3e7", "#4a9cd9", "#3385c6", "#2470af", "#195b95")  # 1 to 8, and deeper
OWN = "#ffe2a8"  # the model's own token, after the draft
LINE, CHAR, SIDE = 26, 8.4, 74  # pixels: of a line, of a character, left of the text


def lines(picture, prompt):
    """One list a call of the model: its tokens as (text, depth in the draft), 0 for the model's own."""
    model = AutoModelForImageTextToText.from_pretrained(zoo.path("scenes-video"), dtype="float32").eval()
    processor = AutoProcessor.from_pretrained(zoo.path("scenes-video"))
    mmspec.enable(model, drafter=zoo.path("scenes-video-eagle"), depth=8)
    inputs = chat_inputs(processor, [prompt], [[Image.open(picture).convert("RGB")]])
    for step in stream(model, inputs, max_new_tokens=160, do_sample=False):
        texts = processor.batch_decode([[token] for token in step.tokens], skip_special_tokens=True)
        if any(texts):
            yield [(text, i + 1 if i < step.accepted else 0) for i, text in enumerate(texts)]


def colour(depth):
    return DEPTHS[min(depth, len(DEPTHS)) - 1] if depth else OWN


def in_terminal(calls):
    for call in calls:
        for text, depth in call:
            red, green, blue = bytes.fromhex(colour(depth)[1:])
            print(f"\033[48;2;{red};{green};{blue}m\033[30m{text}\033[0m", end="")
        print()


def in_svg(calls):
    width = SIDE + CHAR * max(sum(len(text) for text, _ in call) for call in calls) + 8
    parts = []
    for number, call in enumerate(calls, 1):
        x, y = SIDE, LINE * number
        parts.append(f'<text class="n" x="{SIDE - 10}" y="{y}" text-anchor="end">call {number}</text>')
        for text, depth in call:
            wide = CHAR * len(text)
            parts.append(f'<rect x="{x:.1f}" y="{y - 16}" width="{wide:.1f}" height="21" fill="{colour(depth)}"/>')
            parts.append(f'<text x="{x:.1f}" y="{y}" textLength="{wide:.1f}" xml:space="preserve"'
                         f' fill="{"#fff" if depth > 4 else "#111"}">{escape(text)}</text>')  # fmt: skip
            x += wide
    height, tokens = LINE * (len(calls) + 3), sum(map(len, calls))
    said = f"{tokens} tokens in {len(calls)} calls of the model; stock generate needs {tokens}."
    legend = "".join(f'<tspan dx="3" fill="{colour(d)}" stroke="#888" stroke-width=".3">■</tspan>' for d in range(1, 9))
    own = f'<tspan fill="{OWN}" stroke="#888" stroke-width=".3">■</tspan>'
    for up, note in ((36, said), (12, f"{legend} drafted, by depth in the draft {own} the model's own")):
        parts.append(f'<text class="n" x="{SIDE}" y="{height - up}">{note}</text>')
    style = "text{font:14px ui-monospace,Menlo,Consolas,monospace}.n{font-size:12px;fill:#7a828c}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {max(width, 560):.0f} {height}" role="img">'
        f"<title>{said}</title><style>{style}</style>{''.join(parts)}</svg>\n"
    )


parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("picture", nargs="?", default=str(zoo.samples() / "scene-01.png"))
parser.add_argument("--prompt", default=zoo.PROMPTS["long"])
parser.add_argument("--svg", help="write the lines there as a picture, too")
args = parser.parse_args()

logging.disable_progress_bar()  # of loading weights
calls = list(lines(args.picture, args.prompt))
in_terminal(calls)
print(f"{sum(map(len, calls))} tokens in {len(calls)} calls of the model")
if args.svg:
    Path(args.svg).write_text(in_svg(calls), encoding="utf-8")
