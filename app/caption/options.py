"""The options of `mmspec caption`: one dataclass, from which the flags and the fields of a config file follow."""

# ruff: noqa: RUF009 - `_flag` and `_switch` return a field
from __future__ import annotations

import argparse
import difflib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import yaml

from mmspec import media
from mmspec.app import embedded, enabling
from mmspec.app.caption.journal import key
from mmspec.app.media import video
from mmspec.app.media.remote import is_address
from mmspec.app.options import DTYPES, above_zero, checked, count, from_zero
from mmspec.config import size_in_bytes

BESIDE, AUTO, NEVER = "beside", "auto", "none"
ENGINE = "mmspec.app.engine:load"
OUTPUTS = ("txt", "metadata", "parquet", "webdataset")
PROMPT = "Describe this image in two or three sentences."  # for models other than the embedded one
ONCE = ("config", "retry_failed", "resume", "limit")  # flags that apply to one run and are not written to run.yaml
KEPT = "1GB"  # default prefix_cache where a picture has several prompts
SHAPING = ("model", "drafter", "max_new_tokens", "temperature", "dtype", "engine", "max_pixels_per_image")


class SettingsError(Exception):
    """The options, or the file that holds them, are invalid."""


def _frames(text: str) -> str:
    video.FramePolicy.parse(text)
    return text


def _count_or(*words: str) -> Callable[[str], int | str]:
    return lambda text: text if text in words else count(text)


def _text(pattern: str, wanted: str) -> Callable[[str], str]:
    """The type of a flag whose value matches a pattern; `wanted` describes it."""
    return checked(str, lambda text: re.fullmatch(pattern, text) is not None, wanted)


_size = checked(size_in_bytes, lambda size: size > 0, "a size above 0, such as 512M or 2G, which are multiples of 1024")


def _flag(
    metavar: str | None, default: Any, help: str, *, section: str = "", shown: str | None = None, **takes: Any
) -> Any:  # fmt: skip
    """A field that carries the arguments for argparse's `add_argument`.

    Args:
        section: title of the help section that begins with this flag.
        shown: how the help shows the default, where that is not the default itself.
    """
    if shown is None:
        shown = "" if default in (None, "", []) or isinstance(default, bool) else str(default)
    takes |= {"help": help + f" ({shown})" * bool(shown), **({"metavar": metavar} if metavar else {})}
    usual = {"default_factory": list} if default == [] else {"default": default}
    return field(metadata={"section": section, "takes": takes}, **usual)  # type: ignore[call-overload]


def _switch(default: bool | None, help: str) -> Any:
    """A flag with a --no- form; None means that neither was given."""
    return _flag(None, default, help + " (the default)" * bool(default), action=argparse.BooleanOptionalAction)


# fmt: off
@dataclass(frozen=True)
class Options:
    inputs: list[str] = _flag("INPUT", [], "folders, files, globs, lists (.txt), tables (.jsonl .csv .parquet), "
        "webdataset tars, hf:owner/name:split, s3://...; default: the sample drawings", section="inputs", nargs="*")
    recursive: bool = _switch(False, "look into subfolders too")
    column_image: str | None = _flag("NAME", None, "column of a table that holds paths or bytes; default: by name")
    column_text: str | None = _flag("NAME", None, "column of a table that holds existing captions")

    prompt: list[str] = _flag("TEXT", [], "prompt for every item; may contain {name} {dir} {existing}; give it "
        "several times for several captions", section="prompts", action="append")
    system: str = _flag("TEXT", "", "system message")
    prepend: str = _flag("TEXT", "", "put before every caption")
    append: str = _flag("TEXT", "", "put after every caption")
    json_schema: Path | None = _flag("FILE", None, "make every caption JSON of this schema (extra: json)", type=Path)
    score: bool = _switch(False, "record each caption's mean log-probability")

    model: str = _flag("NAME", None, "name on the Hugging Face Hub, or a folder; default: the embedded one, "
        + embedded.MODEL, section="the model")
    drafter: str = _flag("NAME", None, "name, folder, 'ngram' (no weights) or 'none' (plain decoding); default: "
        "one that fits the model")
    enable: list[str] = _flag(default=[], **enabling.FLAG)
    compile: bool | None = _switch(None, "compile the model; default: if the run is long enough")
    max_new_tokens: int = _flag("N", 128, "maximum length of a caption, in tokens", type=count)
    temperature: float = _flag("T", 0.0, "sampling temperature; 0 is greedy decoding", type=from_zero)
    max_pixels_per_image: int | str = _flag("N", AUTO, "larger pictures are scaled down; auto: as suits the model, "
        "none: never", type=_count_or(AUTO, NEVER))
    seed: int = _flag("N", 0, "random seed, for a temperature above 0", type=int)
    dtype: str = _flag(None, AUTO, "dtype of the weights", choices=DTYPES)
    engine: str = _flag("MODULE:FUNCTION", ENGINE, "a function of your own in place of mmspec.app.engine.load",
        shown="", type=_text(r"[\w.]+:\w+", f"MODULE:FUNCTION, as {ENGINE}"))

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
        "are separate files", type=_text("({0})(,({0}))*".format("|".join(OUTPUTS)), f"a list of {','.join(OUTPUTS)}"))
    on_existing: str = _flag(None, "skip", "keep or overwrite captions and final files that mmspec did not write",
        choices=("skip", "overwrite"))
    report: Path | None = _flag("FILE", None, "write speeds and counts as .json, or as a .html page",
        type=lambda text: Path(_text(r"(?!.*://).*\.(json|html)", "a local report's name, as r.json or r.html")(text)))

    config: Path | None = _flag("FILE", None, "YAML file of flags, such as an earlier run's run.yaml", type=Path,
        section="the run")
    resume: bool = _switch(True, "skip items that are finished")
    retry_failed: bool = _switch(False, "retry items that failed before")
    limit: int | None = _flag("N", None, "caption at most N items in this run", type=count)
    dry_run: bool = _switch(False, "write nothing; print counts and the first prompt")
    shard: str | None = _flag("I/N", None, "only part I of N (0/4 ... 3/4), for several machines",
        type=_text(r"\d+/[1-9]\d*", "I/N with I from 0 to N-1, as 0/4 ... 3/4"))
    devices: str = _flag("LIST", AUTO, "auto, cpu, cuda, mps, or one worker each: 0,1 or cuda:0,cuda:1 or cpu,cpu",
        type=_text(r"[\w:]+( *, *[\w:]+)*", "auto, cpu, cuda, mps, or a list as 0,1"))
    batch_size: int | str = _flag("N", AUTO, "items in a batch on each device; auto: as many as fit, by the sizes of "
        "the pictures", type=_count_or(AUTO))
    push_to_hub: str | None = _flag("REPO", None, "at the end, upload the output folder as a data set owner/name",
        type=_text(r"[\w.-]+/[\w.-]+", "a name like owner/name"))
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

    @property
    def schema(self) -> dict[str, object] | None:
        """The schema in the file of --json-schema; SettingsError if the file is not a JSON object."""
        if self.json_schema is None:
            return None
        try:
            parsed = json.loads(self.json_schema.read_text(encoding="utf-8-sig"))
        except (OSError, ValueError) as error:
            raise SettingsError(f"--json-schema {self.json_schema} cannot be read as JSON ({error})") from error
        if not isinstance(parsed, dict):
            raise SettingsError(f"--json-schema {self.json_schema} holds a {type(parsed).__name__}; give an object")
        return parsed

    @property
    def enabled(self) -> dict[str, object]:
        """The options of --enable by name, and a prefix cache for several prompts; EnableError if one is invalid."""
        several = {"prefix_cache": KEPT} if len(self.prompt) > 1 else {}
        return several | enabling.given(self.enable, self.drafter, batches=True)

    @property
    def shaping(self) -> dict[str, object]:
        """The options that shape an answer besides the item and its prompt; the seed is None for greedy decoding."""
        drawn = sorted(word for word in self.enable if word.partition("=")[0] in enabling.DRAWN)
        seed = self.seed if self.temperature > 0 else None
        schema = self.schema
        grammar = {} if schema is None else {"json_schema": key(**schema)}
        return {name: getattr(self, name) for name in SHAPING} | {"enable": " ".join(drawn), "seed": seed} | grammar

    def fitted(self) -> Options:
        """The options with the default model, and with the prompt and drafter that fit it, where none were given."""
        model = self.model or embedded.MODEL
        prompt = self.prompt or [embedded.prompt() if embedded.speaks(model) else PROMPT]
        return replace(self, model=model, prompt=prompt, drafter=self.drafter or embedded.drafter(model))

    def dumped(self) -> bytes:
        """The options as a config file that repeats the run."""
        plain = {name.replace("_", "-"): str(value) if isinstance(value, Path) else value
                 for name, value in vars(self).items() if name not in ONCE and value is not None}  # fmt: skip
        plain["prompt"] = self.prompt[0] if len(self.prompt) == 1 else self.prompt
        text = yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)
        return b"# Repeat this run by: mmspec caption --config FILE\n" + text.encode()

    def check(self) -> None:
        """SettingsError for options that cannot be combined."""
        if self.shard and not int(self.shard.partition("/")[0]) < int(self.shard.partition("/")[2]):
            raise SettingsError(f"--shard {self.shard!r} is not I/N with I from 0 to N-1, as 0/4 ... 3/4")
        if self.push_to_hub and (self.out == BESIDE or is_address(self.out)):
            raise SettingsError("--push-to-hub uploads a whole folder; give --out a local folder of captions only")
        if self.json_schema is not None and (self.prepend or self.append):
            raise SettingsError("--json-schema cannot be combined with --prepend or --append; leave one of them out")
        if self.engine == ENGINE and (schema := self.schema) is not None:
            from mmspec.pipelines.host.processors.json_schema import grammar_of

            try:
                grammar_of(schema)
            except (ImportError, ValueError) as error:
                raise SettingsError(f"--json-schema {self.json_schema}: {error}") from error


OPTIONS = {one.name: one for one in fields(Options)}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags, without their defaults: a parsed namespace holds only what was given."""
    group: Any = parser
    for name, one in OPTIONS.items():
        about = one.metadata
        group = parser.add_argument_group(about["section"]) if about["section"] else group
        takes = about["takes"] | {"help": about["takes"]["help"].replace("%", "%%")}
        flag = "inputs" if name == "inputs" else f"--{name.replace('_', '-')}"
        group.add_argument(flag, default=argparse.SUPPRESS, **takes)
    parser.set_defaults(parser=parser)


def resolve(args: argparse.Namespace) -> Options:
    """All options. The command line overrides the config file, which overrides the defaults."""
    given = {name: value for name, value in vars(args).items() if name in OPTIONS}
    options = Options(**((_from_file(given["config"], args.parser) if given.get("config") else {}) | given))
    options.check()
    return options


def _from_file(path: Path, parser: argparse.ArgumentParser) -> dict[str, Any]:
    """The options in a config file, which are parsed as if they were given on the command line."""
    try:
        entries = yaml.safe_load(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise SettingsError(f"--config {path}: {error.strerror}; name a YAML file") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        mark = getattr(error, "problem_mark", None)
        why = f"line {mark.line + 1}: {error.problem}" if mark else str(error).partition("\n")[0]  # type: ignore[union-attr]
        raise SettingsError(f"{path} cannot be read as YAML ({why}); give lines like `model: name`") from error
    if not isinstance(entries, dict):
        raise SettingsError(f"{path} is not a YAML mapping; give lines like `max-new-tokens: 64`")
    inputs = entries.pop("inputs", None) or []
    keys = ["inputs", *(flag[2:] for flag in parser._option_string_actions if flag[2:] not in ("", "help", "config"))]
    for name in map(str, entries):
        if name.replace("_", "-") not in keys:
            near = difflib.get_close_matches(name, keys, 1, cutoff=0)[0]
            raise SettingsError(f"{path} has an unknown {name!r}; the nearest key is {near!r}")
    words = [word for name, value in entries.items() for word in _words(str(name), value)]
    prog, parser.prog = parser.prog, f"{parser.prog} --config {path}"  # for its error messages
    try:
        args = parser.parse_args([*words, "--", *([inputs] if isinstance(inputs, str) else map(str, inputs))])
    finally:
        parser.prog = prog
    return {name: value for name, value in vars(args).items() if name in OPTIONS}


def _words(name: str, value: object) -> list[str]:
    """An entry of a config file as command-line arguments, which argparse checks."""
    flag = f"--{name.replace('_', '-')}"
    if value is None:
        return []
    if isinstance(value, bool):
        return [flag if value else flag.replace("--", "--no-")]
    value = [f"{key}={one}" for key, one in value.items()] if isinstance(value, dict) else value
    return [f"{flag}={each}" for each in (value if isinstance(value, list) else [value])]
