"""The table of flags of `mmspec caption`, and what each of them takes."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from mmspec import media
from mmspec.app import embedded, enabling
from mmspec.app.caption.settings import AUTO, ENGINE, VLLM, Flags
from mmspec.app.media import video
from mmspec.app.media.items import kind_of
from mmspec.app.options import DTYPES, above_zero, count, from_zero

ON_EXISTING = ("skip", "overwrite", "append", "prepend")
RARE = (  # what few people change: `--help-all` and docs/captioning.md tell of them, and --config holds them
    "--column-image", "--column-text", "--column-tags", "--split", "--prompt-file", "--system", "--start-with",
    "--prepend", "--append", "--temperature", "--seed", "--dtype", "--fps", "--keyframes", "--max-frames",
    "--max-pixels", "--max-aspect", "--max-duration", "--timeout", "--max-bytes", "--max-memory", "--decoders",
    "--extension", "--on-existing", "--resume", "--limit", "--dedup", "--max-errors", "--compare",
)  # fmt: skip
OUTPUTS = ("txt", "metadata", "parquet", "webdataset", "pairs")


def configure(parser: argparse.ArgumentParser) -> None:
    """The options of `mmspec caption`."""
    flags = Flags(parser, RARE)
    _inputs(flags)
    _answers(flags)
    _limits(flags)
    _outputs(flags)
    _running(flags)
    parser.set_defaults(flags=flags)


def _inputs(flags: Flags) -> None:
    add = flags.add
    add("inputs", nargs="*", default=[], metavar="INPUT", help="folders, files, globs, lists (.txt), tables "
        "(.jsonl .csv .parquet), webdataset tars, hf:owner/name; default: the sample drawings")  # fmt: skip
    flags.switch("--recursive", False, "look into subfolders too")
    add("--column-image", metavar="NAME", help="column of a table that holds paths or bytes (default: found by name)")
    add("--column-text", metavar="NAME", help="column of a table with the captions that are there already")
    add("--column-tags", metavar="NAME", help="column of a table for {tags}")
    add("--split", default="train", metavar="NAME", help="of a data set hf:owner/name")
    flags.section("what is asked")
    add("--prompt", metavar="TEXT", help="about every item; may hold {name} {dir} {tags} {existing}")
    add(
        "--prompt-file",
        type=Path,
        metavar="FILE",
        help="several prompts, weighted: each item gets one, always the same",
    )
    add("--system", metavar="TEXT", help="system message")
    add("--start-with", metavar="TEXT", help="words that every answer begins with")
    add("--prepend", default="", metavar="TEXT", help="put before every caption")
    add("--append", default="", metavar="TEXT", help="put after every caption")


def _answers(flags: Flags) -> None:
    add = flags.add
    flags.section("the model")
    add("--model", metavar="NAME", help="name on the Hugging Face Hub, or a folder; default: the embedded one, "
        f"{embedded.MODEL}")  # fmt: skip
    add("--drafter", metavar="NAME", help="name, folder, 'ngram' (needs no weights) or 'none' (plain decoding); "
        "default: what fits")  # fmt: skip
    add("--enable", default=[], **enabling.FLAG)
    flags.switch("--compile", None, "compile the model; without either, where the run is long enough to pay for it")
    add("--max-new-tokens", type=count, default=128, metavar="N", help="longest caption, in tokens")
    add("--temperature", type=from_zero, default=0.0, metavar="T", help="0 takes the likeliest token")
    add("--max-pixels-per-image", type=_area, default=AUTO, metavar="N", help="larger pictures are made smaller; "
        "auto: as suits the model, none: never")  # fmt: skip
    add("--seed", type=int, default=0, metavar="N", help="of weighted prompts, and of draws at a temperature above 0")
    add("--dtype", choices=DTYPES, default=AUTO, help="of the weights")
    add("--engine", type=_engine, default=ENGINE, shown="", metavar="NAME", help="vllm: vLLM's offline engine (extra: "
        "vllm); or MODULE:FUNCTION, one of your own")  # fmt: skip


def _limits(flags: Flags) -> None:
    add = flags.add
    flags.section("videos, and limits for hostile files")
    add("--frames", type=count, metavar="N", help="frames of a video, evenly spread (8 unless --fps or --keyframes)")
    add("--fps", type=_fps, metavar="F", help="frames of a video per second of it")
    flags.switch("--keyframes", False, "take the key frames of a video")
    add("--max-frames", type=count, default=video.MAX_FRAMES, metavar="N", help="at most, however they are chosen")
    add("--max-pixels", type=count, default=media.MAX_PIXELS, metavar="N", help="largest picture or frame")
    add("--max-aspect", type=above_zero, default=media.MAX_ASPECT, metavar="N", help="longest picture, in widths")
    add("--max-duration", type=above_zero, default=3600.0, metavar="S", help="longest video")
    add("--timeout", type=above_zero, default=60.0, metavar="S", help="longest time to decode one file")
    sizes: dict[str, Any] = {"type": _size, "metavar": "SIZE"}
    add("--max-bytes", **sizes, default=media.MAX_BYTES, shown=_shown(media.MAX_BYTES), help="largest file; it is read "
        "into memory whole")  # fmt: skip
    add("--max-memory", **sizes, default=media.MAX_MEMORY, shown=_shown(media.MAX_MEMORY), help="most that decoding a "
        "file may take, the file included (on Linux)")  # fmt: skip
    add("--decoders", type=count, metavar="N", help="processes that decode, per model (default: what the cores allow)")


def _outputs(flags: Flags) -> None:
    add = flags.add
    flags.section("outputs")
    add("--out", default="captions", metavar="FOLDER", help="for the captions, or 'beside' for beside the files")
    add("--format", type=_formats, metavar="LIST", help=f"any of {','.join(OUTPUTS)}; default: metadata, and txt for "
        "items that are files of their own")  # fmt: skip
    add("--extension", type=_extension, default=".txt", metavar=".EXT", help="of caption files")
    add("--on-existing", choices=ON_EXISTING, default="skip", help="existing captions not written by mmspec: "
        "keep, overwrite, append ours or prepend ours")  # fmt: skip


def _running(flags: Flags) -> None:
    add = flags.add
    flags.section("the run")
    add("--config", type=Path, metavar="FILE", help="YAML with any flags, as run.yaml beside the captions")
    flags.switch("--resume", True, "what is done is not done again")
    flags.switch("--retry-failed", False, "try again what failed before")
    add("--limit", type=count, metavar="N", help="caption at most N items in this run")
    flags.switch("--dry-run", False, "write nothing: counts, the first prompt, an estimate measured on a warm batch")
    add("--shard", type=_shard, metavar="I/N", help="only part I of N (0/4 ... 3/4), for several machines")
    add("--devices", "--device", type=_devices, default=AUTO, metavar="LIST", help="auto, cpu, cuda, mps, or one "
        "worker process each: 0,1 or cuda:0,cuda:1 or cpu,cpu")  # fmt: skip
    add("--batch-size", type=_batch, default=AUTO, metavar="N", help="items at work at once on a device; auto: as "
        "many as fit, by the sizes of the pictures")  # fmt: skip
    add("--dedup", choices=("exact", "phash"), help="caption equal files, or pictures that look equal, once")
    add("--max-errors", type=count, metavar="N", help="give up after so many failures")
    flags.switch("--ray", False, "run the workers on Ray, one per device of its cluster (extra: ray)")
    add("--report", type=_report, metavar="FILE", help="JSON with counts, speeds and acceptance")
    flags.switch("--compare", True, "measure the speed-up over stock generate on a few of the items")
    flags.switch("--quiet", False, "do not print the captions")


def _fps(text: str) -> float:
    value = above_zero(text)
    if value > video.MAX_RATE:
        raise argparse.ArgumentTypeError(f"{text!r} is more than {video.MAX_RATE} frames a second")
    return value


def _batch(text: str) -> int | str:
    return text if text == AUTO else count(text)


def _area(text: str) -> int | str:
    return text if text in (AUTO, "none") else count(text)


def _devices(text: str) -> str:
    if not text.replace(",", "").strip():
        raise argparse.ArgumentTypeError(f"{text!r} names no device; give auto, cpu, cuda, mps, or a list as 0,1")
    return text


def _size(text: str) -> int:
    """Bytes; 512M and 2G are multiples of 1024."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)B?", text.upper())
    if not found or not (size := int(float(found[1]) * 1024 ** " KMGT".index(found[2] or " "))):
        raise argparse.ArgumentTypeError(f"{text!r} is no size, as 512M, 2G or a number of bytes")
    return size


def _shown(size: int) -> str:
    """A size as `_size` reads it."""
    unit = max(place for place in range(5) if size % 1024**place == 0)
    return f"{size // 1024**unit}{' KMGT'[unit].strip()}"


def _shard(text: str) -> str:
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if not found or not int(found[1]) < int(found[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is not I/N with I from 0 to N-1, as 0/4 ... 3/4")
    return text


def _formats(text: str) -> str:
    wrong = [name for name in text.split(",") if name not in OUTPUTS]
    if wrong:
        raise argparse.ArgumentTypeError(f"unknown {', '.join(map(repr, wrong))}; choose from {', '.join(OUTPUTS)}")
    return text


def _extension(text: str) -> str:
    if not re.fullmatch(r"\.?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no extension like .txt or .caption")
    text = text if text.startswith(".") else f".{text}"
    if kind_of(f"x{text}"):
        raise argparse.ArgumentTypeError(f"{text!r} is the extension of pictures or videos, which would be replaced")
    return text


def _report(text: str) -> Path:
    if kind_of(text):  # as the shell makes of `--report photos/*.png`
        raise argparse.ArgumentTypeError(f"{text!r} is the name of a picture or video; give a name like report.json")
    return Path(text)


def _engine(text: str) -> str:
    text = VLLM if text == "vllm" else text
    if not re.fullmatch(r"[\w.]+:\w+", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not vllm, or MODULE:FUNCTION as {ENGINE}")
    return text
