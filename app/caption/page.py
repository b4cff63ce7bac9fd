"""The report as one HTML page: speed-up and counts, some pictures with their captions, and failures."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

from PIL import Image

from mmspec.app.caption.journal import Ledger, Record
from mmspec.app.caption.options import Options
from mmspec.app.files import inline
from mmspec.app.media.decoder import Decoder, DecoderError
from mmspec.app.media.items import Item
from mmspec.app.media.video import FramePolicy
from mmspec.media import MediaError

SHOWN, SIDE = 48, 320  # number of pictures, and pixels of their longer side
FAILED = 20  # number of failures that are listed
STYLE = """
:root{color-scheme:light dark;font:16px/1.5 system-ui,sans-serif}
body{max-width:76rem;margin:2rem auto;padding:0 1rem}
main{display:grid;gap:1.25rem;grid-template-columns:repeat(auto-fill,minmax(15rem,1fr))}
figure{margin:0;overflow-wrap:anywhere}
img{width:100%;border-radius:.4rem}
figcaption p{margin:.3rem 0}
small,dt{opacity:.65}
dl{display:flex;flex-wrap:wrap;gap:.4rem 2rem}
dd{margin:0;font-size:1.35rem}
pre{overflow:auto}
"""


def render(facts: Mapping[str, Any], ledger: Ledger, items: Iterable[Item], options: Options) -> bytes:
    """The page, with all pictures inside, from a report's facts and the journal.

    Args:
        items: items of the run; those that are shown are decoded again, in a separate process.
    """
    names = ledger.captioned()
    chosen = set(names[:: max(1, -(-len(names) // SHOWN))])
    pictures = _pictures([item for item in items if item.name in chosen], options)
    figures = [_figure(ledger.get(name) or {}, pictures.get(name)) for name in sorted(chosen)]
    failed = [f"<li>{escape(str(record.get('message')))}</li>" for record in ledger.all_failures()]
    parts = [
        f"<!doctype html><meta charset=utf-8><title>Captions by mmspec</title><style>{STYLE}</style><h1>Captions</h1>",
        "<dl>" + "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in _numbers(facts)) + "</dl>",
        *(f"<p>{escape(prompt)}</p>" for prompt in options.prompt),
        f"<p><small>{len(figures)} of {len(names)}</small></p><main>{''.join(figures)}</main>",
        f"<h2>Failed</h2><ul>{''.join(failed[:FAILED])}</ul>" * bool(failed),
        f"<p>and {len(failed) - FAILED} more in failed.jsonl</p>" * (len(failed) > FAILED),
        f"<h2>Report</h2><pre>{escape(json.dumps(facts, indent=1, ensure_ascii=False))}</pre>",
    ]  # fmt: skip
    return "\n".join(filter(None, parts)).encode("utf-8", "backslashreplace") + b"\n"


def _numbers(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The key figures at the top of the page, as pairs of name and value."""
    counts, measured = facts["counts"], facts["comparison"] or {}
    shown = [("captions in this run", f"{counts['captioned']:,}"), ("items/s", f"{facts['items_per_second']:.2f}")]
    if "speedup" in measured:
        shown.append(("over stock generate", f"{measured['speedup']:.2f}×"))
        shown.append(("identical to stock", f"{measured['identical']} of {measured['items']}"))
    if facts["acceptance"]:
        shown.append(("tokens per model call", f"{facts['acceptance']['tokens_per_target_call']:.2f}"))
    return [*shown, ("failed", f"{counts['failed'] + counts['failed_before']:,}")]


def _figure(record: Record, picture: Image.Image | None) -> str:
    shown, scores = "", record.get("scores") or [record.get("score")]
    if picture is not None:
        shown = f'<img alt="" src="{inline(picture, "JPEG", quality=80)}">'
    texts = record.get("captions") or [record.get("text", "")]
    paragraphs = [f"<p>{escape(str(text))}</p>" for text in texts]
    likely = ", ".join(f"{score:.2f}" for score in scores if isinstance(score, int | float))
    small = escape(str(record.get("file_name"))) + f" · log-probability {likely}" * bool(likely)
    return f"<figure>{shown}<figcaption><small>{small}</small>{''.join(paragraphs)}</figcaption></figure>"


def _pictures(items: list[Item], options: Options) -> dict[str, Image.Image]:
    """A thumbnail of each item's first frame, by name; items that can no longer be read are left out."""
    pictures: dict[str, Image.Image] = {}
    with Decoder(1, options.limits(), FramePolicy.parse("uniform:1", 1), SIDE) as decoder:
        for item in items:
            try:
                pictures[item.name] = decoder.one(item).frames[0]
            except MediaError:
                continue
            except DecoderError:  # the captions are still worth a page without pictures
                break
    return pictures
