"""The flags of `mmspec caption`: a dataclass with one field for each, with its type, default and help text."""

# ruff: noqa: RUF009 - `_flag` returns a field
from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmspec import media
from mmspec.app import embedded, enabling
from mmspec.app.media import video
from mmspec.app.media.clips import policy
from mmspec.app.media.items import kind_of
from mmspec.app.options import DTYPES, above_zero, count, from_zero
from mmspec.config import size_in_bytes

BESIDE, AUTO = "beside", "auto"
ENGINE, VLLM = "mmspec.app.engine:load", "mmspec.app.caption.vllm_engine:load"
ON_EXISTING = ("skip", "overwrite", "append")
PAGES = (".html", ".htm")
REPORTS = (".json", ".jsonl", *PAGES)
OUTPUTS = ("txt", "metadata", "parquet", "webdataset")
RARE = (  # flags that few people change; only `--help-all` and docs/captioning.md describe them
    "--column-image", "--column-text", "--column-tags", "--split", "--system", "--start-with",
    "--prepend", "--append", "--temperature", "--seed", "--dtype", "--max-frames",
    "--max-pixels", "--max-aspect", "--max-duration", "--timeout", "--max-bytes", "--max-memory", "--decoders",
    "--extension", "--on-existing", "--resume", "--limit", "--dedup", "--max-errors", "--push-to-hub", "--compare",
)  # fmt: skip


def _frames(text: str) -> str:
    policy(text)
    return text


def _count_or(*words: str) -> Callable[[str], int | str]:
    return lambda text: text if text in words else count(text)


def _devices(text: str) -> str:
    if not text.replace(",", "").strip():
        raise argparse.ArgumentTypeError(f"{text!r} names no device; give auto, cpu, cuda, mps, or a list as 0,1")
    return text


def _size(text: str) -> int:
    """Bytes; 512M and 2G are multiples of 1024."""
    try:
        size = size_in_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if not size:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size above 0")
    return size


def _shard(text: str) -> str:
    parts = re.fullmatch(r"(\d+)/(\d+)", text)
    if not parts or not int(parts[1]) < int(parts[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is not I/N with I from 0 to N-1, as 0/4 ... 3/4")
    return text


def _formats(text: str) -> str:
    wrong = [name for name in text.split(",") if name not in OUTPUTS]
    if wrong:
        raise argparse.ArgumentTypeError(f"unknown {', '.join(map(repr, wrong))}; choose from {', '.join(OUTPUTS)}")
    return text


def _extension(text: str) -> str:
    if not re.fullmatch(r"\.?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not an extension such as .txt or .caption")
    text = text if text.startswith(".") else f".{text}"
    if kind_of(f"x{text}"):
        raise argparse.ArgumentTypeError(f"{text!r} is the extension of pictures or videos, which would be replaced")
    return text


def _report(text: str) -> Path:
    if kind_of(text):  # the shell expands `--report photos/*.png` to such a name
        raise argparse.ArgumentTypeError(f"{text!r} is the name of a picture or video; give a name like report.json")
    if Path(text).suffix.lower() not in REPORTS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a report's name; give one like report.json or report.html")
    return Path(text)


def _repo(text: str) -> str:
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a name like owner/name")
    return text


class _Once(argparse.Action):
    """Stores a value; a second value is an error, so that it does not silently replace the first."""

    def __call__(self, parser: argparse.ArgumentParser, args: argparse.Namespace, values: object, *_: object) -> None:
        if hasattr(args, self.dest):
            parser.error(f"{self.option_strings[0]} is given twice, {getattr(args, self.dest)} and {values}; name one")
        setattr(args, self.dest, values)


def _engine(text: str) -> str:
    text = VLLM if text == "vllm" else text
    if not re.fullmatch(r"[\w.]+:\w+", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not vllm, or MODULE:FUNCTION as {ENGINE}")
    return text


def _flag(
    metavar: str | None, default: Any, help: str, *, section: str = "", shown: str | None = None,
    names: tuple[str, ...] = (), **takes: Any,
) -> Any:  # fmt: skip
    """A field that carries the arguments for argparse's `add_argument`.

    Args:
        section: title of the help section that begins with this flag.
        shown: how the help shows the default, where that is not the default itself.
        names: other spellings of the flag.
    """
    if shown is None:
        shown = "" if default in (None, "", []) or isinstance(default, bool) else str(default)
    takes = {"help": help + f" ({shown})" * bool(shown), **({"metavar": metavar} if metavar else {}), **takes}
    about = {"section": section, "names": names, "takes": takes}
    return field(metadata=about, **({"default_factory": list} if default == [] else {"default": default}))  # type: ignore[call-overload]


def _switch(default: bool | None, help: str) -> Any:
    """A flag with a --no- form; None means that neither was given."""
    return _flag(None, default, help + " (the default)" * bool(default), action=argparse.BooleanOptionalAction)


# fmt: off
@dataclass(frozen=True)
class Options:
    inputs: list[str] = _flag("INPUT", [], "folders, files, globs, lists (.txt), tables (.jsonl .csv .parquet), "
        "webdataset tars, hf:owner/name, s3://...; default: the sample drawings", section="inputs",
        nargs="*")
    recursive: bool = _switch(False, "look into subfolders too")
    column_image: str | None = _flag("NAME", None, "column of a table that holds paths or bytes; default: by name")
    column_text: str | None = _flag("NAME", None, "column of a table that holds existing captions")
    column_tags: str | None = _flag("NAME", None, "column of a table that fills {tags}")
    split: str = _flag("NAME", "train", "split of a data set hf:owner/name")

    prompt: list[str] = _flag("TEXT", [], "prompt for every item; may contain {name} {dir} {tags} {existing}; give it "
        "several times for several captions", section="prompts", action="append")
    system: str | None = _flag("TEXT", None, "system message")
    start_with: str | None = _flag("TEXT", None, "text that every answer begins with")
    prepend: str = _flag("TEXT", "", "put before every caption")
    append: str = _flag("TEXT", "", "put after every caption")
    json_schema: Path | None = _flag("FILE", None, "make every caption JSON of this schema (extra: json)", type=Path)

    score: bool = _switch(False, "record each caption's mean log-probability")

    model: str = _flag("NAME", None, "name on the Hugging Face Hub, or a folder; default: the embedded one, "
        + embedded.MODEL, section="the model")
    drafter: str = _flag("NAME", None, "name, folder, 'ngram' (no weights) or 'none' (plain decoding); default: "
        "one that fits the model")
    enable: list[str] = _flag("NAME=VALUE", [], **{k: v for k, v in enabling.FLAG.items() if k != "metavar"})
    compile: bool | None = _switch(None, "compile the model; default: if the run is long enough")
    max_new_tokens: int = _flag("N", 128, "maximum length of a caption, in tokens", type=count)
    temperature: float = _flag("T", 0.0, "sampling temperature; 0 is greedy decoding", type=from_zero)
    max_pixels_per_image: int | str = _flag("N", AUTO, "larger pictures are scaled down; auto: as suits the model, "
        "none: never", type=_count_or(AUTO, "none"))
    seed: int = _flag("N", 0, "random seed, for a temperature above 0", type=int)
    dtype: str = _flag(None, AUTO, "dtype of the weights", choices=DTYPES)
    engine: str = _flag("NAME", ENGINE, "vllm: vLLM's offline engine (extra: vllm); or MODULE:FUNCTION, your own",
        shown="", type=_engine)

    frames: str = _flag("POLICY", "8", "frames of a video: N evenly spaced, fps:R for R a second, or keyframes",
        type=_frames, section="videos, and limits for hostile files")
    max_frames: int = _flag("N", video.MAX_FRAMES, "maximum number of frames, for every --frames", type=count)
    max_pixels: int = _flag("N", media.MAX_PIXELS, "largest picture or frame", type=count)
    max_aspect: float = _flag("N", media.MAX_ASPECT, "largest ratio of a picture's sides", type=above_zero)
    max_duration: float = _flag("S", 3600.0, "longest video", type=above_zero)
    timeout: float = _flag("S", 60.0, "longest time to decode one file", type=above_zero)
    max_bytes: int = _flag("SIZE", media.MAX_BYTES, "largest file; files are read into memory whole", shown="512M",
        type=_size)
    max_memory: int = _flag("SIZE", media.MAX_MEMORY, "memory limit for decoding a file, file included (Linux)",
        shown="2G", type=_size)
    decoders: int | None = _flag("N", None, "decoder processes per model; default: by the number of cores", type=count)

    out: str = _flag("FOLDER", "captions", "output folder, also s3://..., or 'beside' to write beside the files",
        section="outputs")
    format: str | None = _flag("LIST", None, f"any of {','.join(OUTPUTS)}; default: metadata, and txt for items that "
        "are separate files", type=_formats)
    extension: str = _flag(".EXT", ".txt", "extension of caption files", type=_extension)
    on_existing: str = _flag(None, "skip", "what to do with captions and final files not written by mmspec: keep or "
        "overwrite them, or append to the captions", choices=ON_EXISTING)

    config: Path | None = _flag("FILE", None, "YAML file of flags, such as an earlier run's run.yaml", type=Path,
        section="the run")
    resume: bool = _switch(True, "skip items that are finished")
    retry_failed: bool = _switch(False, "retry items that failed before")
    limit: int | None = _flag("N", None, "caption at most N items in this run", type=count)
    dry_run: bool = _switch(False, "write nothing; print counts, the first prompt and a measured time estimate")
    shard: str | None = _flag("I/N", None, "only part I of N (0/4 ... 3/4), for several machines", type=_shard)
    devices: str = _flag("LIST", AUTO, "auto, cpu, cuda, mps, or one worker each: 0,1 or cuda:0,cuda:1 or cpu,cpu",
        names=("--device",), type=_devices)
    batch_size: int | str = _flag("N", AUTO, "items in a batch on each device; auto: as many as fit, by the sizes of "
        "the pictures", type=_count_or(AUTO))
    dedup: str | None = _flag(None, None, "exact: caption identical files once", choices=("exact",))
    max_errors: int | None = _flag("N", None, "give up after N failures", type=count)
    push_to_hub: str | None = _flag("REPO", None, "at the end, upload the output folder as a data set owner/name",
        type=_repo)
    report: Path | None = _flag("FILE", None, "write speeds and counts as .json, or as a .html page", type=_report,
        action=_Once)
    compare: bool = _switch(True, "measure the speed-up over stock generate on a few items")
    quiet: bool = _switch(False, "do not print the captions")
    # fmt: on

    @property
    def kinds(self) -> list[str]:
        return (self.format or "metadata").split(",")

    def limits(self, max_area: int | None = None) -> media.MediaLimits:
        """Limits for the decoder; it scales pictures down to at most `max_area` pixels."""
        return media.MediaLimits(
            max_pixels=self.max_pixels, max_bytes=self.max_bytes, seconds=self.timeout, memory=self.max_memory,
            max_duration=self.max_duration, max_aspect=self.max_aspect, max_area=max_area,
        )  # fmt: skip

    @property
    def policy(self) -> video.FramePolicy:
        return video.FramePolicy.parse(self.frames, self.max_frames)
