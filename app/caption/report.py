"""Progress and results of a run: a line per item, a progress bar, the summary, and the report as JSON or HTML."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from PIL import Image
from tqdm import tqdm

from mmspec.app.caption.journal import Ledger, Record
from mmspec.app.caption.options import Options
from mmspec.app.caption.plan import Plan
from mmspec.app.files import inline, write_whole
from mmspec.app.media.decoder import Decoder, DecoderError
from mmspec.app.media.items import Item
from mmspec.app.media.video import FramePolicy
from mmspec.media import MediaError
from mmspec.progress import bar

SHOWN, SIDE = 48, 320  # number of pictures in the HTML page, and pixels of their longer side
FAILED = 20  # number of failures that it lists
STYLE = """
:root{color-scheme:light dark;font:16px/1.5 system-ui,sans-serif}
body{max-width:76rem;margin:2rem auto;padding:0 1rem}
main{display:grid;gap:1.25rem;grid-template-columns:repeat(auto-fill,minmax(15rem,1fr))}
figure{margin:0;overflow-wrap:anywhere}
img{width:100%;border-radius:.4rem}
figcaption p{margin:.3rem 0}
small{opacity:.65}
pre{overflow:auto}
"""


@dataclass
class RunTally:
    """Counts of a run; inside its `with` block they have a progress bar."""

    total: int
    quiet: bool = False
    items: int = 0  # finished, captioned or failed
    captioned: int = 0  # of these
    captions: int = 0  # one for each prompt of an item
    tokens: int = 0
    failed: int = 0
    cut: int = 0  # captions cut off at --max-new-tokens
    seconds: float = 0.0  # wall time, without loading the model
    _begun: float = 0.0

    def __enter__(self) -> RunTally:
        self._bar = tqdm(total=self.total, unit="item", **bar())
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def add(self, record: Record) -> None:
        """Count an item, which is on the disk already; the clock starts when the first answer was begun."""
        texts = record.get("captions") or ([record["text"]] if "text" in record else [])
        if texts and not self.captioned:
            self._begun = time.perf_counter() - record.get("seconds", 0)
        self.seconds = time.perf_counter() - self._begun if self._begun else 0.0
        self.items += 1
        self.captioned += bool(texts)
        self.captions += len(texts)
        self.tokens += record.get("tokens", 0)
        self.cut += record.get("finish") == "length"
        if texts and not self.quiet:
            tqdm.write(f"{plain(record['file_name'])}: {plain(' | '.join(texts))}")
        if "error" in record:
            self.failed += 1
            tqdm.write(f"failed: {plain(record['message'])}", file=sys.stderr)
        self._bar.set_postfix_str(f"{self.tokens / max(self.seconds, 1e-9):.0f} tokens/s", refresh=False)
        self._bar.update()

    @property
    def counted(self) -> str:
        of = f" of {self.captioned} item{'s' * (self.captioned != 1)}" if self.captions != self.captioned else ""
        return f"{self.captions} caption{'s' * (self.captions != 1)}{of}"

    def __str__(self) -> str:
        pace = f"{self.captioned / max(self.seconds, 1e-9):.2f} items/s" if self.captioned else ""
        cut = f"{self.cut} cut off at --max-new-tokens" if self.cut else ""
        return ", ".join(filter(None, [self.counted, pace, cut]))


def write(
    options: Options, todo: Plan, tally: RunTally, workers: Sequence[Record], comparison: Any,
    ledger: Ledger, items: Callable[[], Iterable[Item]],
) -> None:  # fmt: skip
    """Write the report as JSON: counts, speeds, acceptance, and the workers with their provenance; or, where the name
    ends in .html, as a page with all this and some of the items with their captions."""
    seconds = max(tally.seconds, 1e-9)
    rounds, gained = (sum(worker.get(name, 0) for worker in workers) for name in ("row_rounds", "gained"))
    facts = {
        "counts": {
            "items": todo.items,
            "captioned": tally.captioned,
            "captions": tally.captions,
            "cut_off_at_max_new_tokens": tally.cut,
            "done_before": todo.done,
            "kept": todo.kept,
            "failed": tally.failed,
            "failed_before": todo.failed_before,
            "not_reached": len(todo.pending) - tally.items,
        },
        "seconds": round(tally.seconds, 3),
        "items_per_second": round(tally.captioned / seconds, 4),
        "tokens": tally.tokens,
        "tokens_per_second": round(tally.tokens / seconds, 2),
        "tokens_per_target_call": round(gained / rounds, 4) if rounds else None,
        "comparison": comparison.facts if comparison else None,
        "workers": list(workers),
        "options": {name: str(v) if isinstance(v, Path) else v for name, v in vars(options).items()},
    }
    path = options.report
    assert path is not None, "no --report was given"
    if path.suffix == ".html":
        summary = "; ".join(filter(None, [str(tally), str(comparison or "")]))
        data = _page(summary, facts, ledger, items(), options)
    else:
        data = json.dumps(facts, indent=2, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
    write_whole(path, data)


def plain(text: str) -> str:
    """Text safe for a terminal: on one line, with the control characters of file names and answers escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def _page(
    summary: str, facts: Mapping[str, Any], ledger: Ledger, items: Iterable[Item], options: Options
) -> bytes:  # fmt: skip
    """The page, with all pictures inside, from a report's facts and the journal.

    Args:
        summary: the last line of the run.
        items: items of the run; those that are shown are decoded again, in a separate process.
    """
    names = ledger.captioned()
    chosen = set(names[:: max(1, -(-len(names) // SHOWN))])
    pictures = _pictures([item for item in items if item.name in chosen], options)
    figures = [_figure(ledger.get(name) or {}, pictures.get(name)) for name in sorted(chosen)]
    failed = [f"<li>{escape(str(record.get('message')))}</li>" for record in ledger.all_failures()]
    parts = [
        f"<!doctype html><meta charset=utf-8><title>Captions by mmspec</title><style>{STYLE}</style><h1>Captions</h1>",
        *(f"<p>{escape(text)}</p>" for text in (summary, *options.prompt)),
        f"<p><small>{len(figures)} of {len(names)}</small></p><main>{''.join(figures)}</main>",
        f"<h2>Failed</h2><ul>{''.join(failed[:FAILED])}</ul>" * bool(failed),
        f"<p>and {len(failed) - FAILED} more in failed.jsonl</p>" * (len(failed) > FAILED),
        f"<h2>Report</h2><pre>{escape(json.dumps(facts, indent=1, ensure_ascii=False))}</pre>",
    ]  # fmt: skip
    return "\n".join(filter(None, parts)).encode("utf-8", "backslashreplace") + b"\n"


def _figure(record: Record, picture: Image.Image | None) -> str:
    shown = "" if picture is None else f'<img alt="" src="{inline(picture, "JPEG", quality=80)}">'
    scores = record.get("scores") or [record.get("score")]
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
