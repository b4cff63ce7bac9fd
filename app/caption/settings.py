"""Options of `mmspec caption`: from the command line over those of a YAML file, and those that shape an answer."""

from __future__ import annotations

import argparse
import difflib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from mmspec.app import embedded
from mmspec.app.caption.journal import key
from mmspec.app.media import video

BESIDE, AUTO = "beside", "auto"
PROMPT = "Describe this image in two or three sentences."  # for models other than the embedded one
ENGINE = "mmspec.app.engine:load"
SAID_LATER = "config"  # the one flag that a config file cannot hold
# One of these on the command line undoes the others of a config file.
RIVALS = (("prompt", "prompt_file"), ("frames", "fps", "keyframes"))


class SettingsError(Exception):
    """The options, or the file that holds them, make no sense."""


@dataclass(frozen=True)
class Options:
    """What a run was told: a field for each flag, whose default stands in the table of flags (`flags.py`)."""

    inputs: list[str]
    recursive: bool
    column_image: str | None
    column_text: str | None
    column_tags: str | None
    split: str
    prompt: str | None
    prompt_file: Path | None
    system: str | None
    start_with: str | None
    prepend: str
    append: str
    model: str
    drafter: str
    max_new_tokens: int
    temperature: float
    max_pixels_per_image: int | str
    seed: int
    dtype: str
    engine: str
    frames: int | None
    fps: float | None
    keyframes: bool
    max_frames: int
    max_pixels: int
    max_aspect: float
    max_duration: float
    timeout: float
    max_bytes: int
    max_memory: int
    decoders: int | None
    out: str
    format: str | None
    extension: str
    on_existing: str
    config: Path | None
    resume: bool
    retry_failed: bool
    limit: int | None
    dry_run: bool
    shard: str | None
    devices: str
    batch_size: int | str
    dedup: str | None
    max_errors: int | None
    ray: bool
    report: Path | None
    compare: bool
    quiet: bool

    @property
    def kinds(self) -> list[str]:
        """Of final files."""
        return (self.format or "metadata").split(",")

    @property
    def policy(self) -> str:
        """How the frames of a video are chosen, as FramePolicy.parse reads it."""
        if self.keyframes:
            return "keyframes"
        return f"fps:{self.fps:g}" if self.fps else f"uniform:{min(self.frames or 8, self.max_frames)}"


@dataclass(frozen=True)
class Settings:
    """What shapes an answer besides the item and what was asked about it."""

    model: str
    drafter: str
    max_new_tokens: int
    temperature: float
    seed: int | None  # None when nothing is drawn
    dtype: str = AUTO
    engine: str = ENGINE
    max_pixels_per_image: int | str = AUTO

    def ask(self, asked: Any, **more: Any) -> str:
        """Name of all that shapes the answer but the content: the settings, what was asked (a dataclass), and `more`.

        Only what differs from its default counts, so that an option that is new does not undo what was done before.
        """
        usual = {"dtype": AUTO, "engine": ENGINE, "max_pixels_per_image": AUTO, "max_frames": video.MAX_FRAMES}
        facts = vars(self) | vars(asked) | more
        return key("", **{name: value for name, value in facts.items() if value not in ("", usual.get(name, ""))})


class Flags:
    """The table of flags while it is made: what argparse is told, and the defaults, which it is not.

    So a parsed namespace holds only what was said, and the command line can win over a config file.
    """

    def __init__(self, parser: argparse.ArgumentParser):
        self.parser, self.group = parser, parser.add_argument_group("inputs")
        self.defaults: dict[str, Any] = {}
        self.spelled: dict[str, str] = {}

    def section(self, title: str) -> None:
        self.group = self.parser.add_argument_group(title)

    def add(self, *names: str, default: Any = None, shown: str | None = None, help: str, **more: Any) -> None:
        """As `add_argument`; `shown` is what the help says of the default, where that is not the default itself."""
        if shown is None and not isinstance(default, bool):
            shown = "" if default in (None, "", []) else str(default)
        help += f" ({shown})" if shown else ""
        action = self.group.add_argument(*names, default=argparse.SUPPRESS, help=help.replace("%", "%%"), **more)
        self.defaults[action.dest] = default
        self.spelled[action.dest] = names[0]

    def switch(self, name: str, default: bool, help: str) -> None:
        self.add(name, default=default, help=help + " (the default)" * default, action=argparse.BooleanOptionalAction)

    def words(self, said: dict[str, Any], origin: Path) -> list[str]:
        """A config's entries as the words of a command line."""
        words: list[str] = []
        for name, value in said.items():
            dest = str(name).replace("-", "_")
            if dest not in self.spelled or dest == SAID_LATER:
                near = difflib.get_close_matches(dest, self.spelled, 1)
                hint = f"; did you mean {near[0].replace('_', '-')!r}?" if near else ""
                raise SettingsError(f"{origin}: unknown setting {name!r}{hint} (mmspec caption --help lists them)")
            flag = self.spelled[dest]
            if isinstance(self.defaults[dest], bool):
                if not isinstance(value, bool):
                    raise SettingsError(f"{origin}: {name} is true or false; got {value!r}")
                words.append(flag if value else flag.replace("--", "--no-"))
            elif value is not None and flag.startswith("--"):
                if isinstance(value, list | dict):
                    raise SettingsError(f"{origin}: {name} takes one value; got {value!r}")
                words.append(f"{flag}={value}")
        inputs = said.get("inputs") or []
        return [*words, "--", *([inputs] if isinstance(inputs, str) else map(str, inputs))]


def resolve(args: argparse.Namespace) -> Options:
    """All options: the defaults, over them the config file, over it what the command line says."""
    flags: Flags = args.flags
    said = {name: value for name, value in vars(args).items() if name in flags.defaults}
    held: dict[str, Any] = {}
    if said.get("config"):
        held = _held(said["config"], flags)
    for rivals in RIVALS:
        if any(said.get(name, False) is not False for name in rivals):
            held = {name: value for name, value in held.items() if name not in rivals}
    options = Options(**(flags.defaults | held | said))
    if sum(map(bool, (options.frames, options.fps, options.keyframes))) > 1:
        raise SettingsError("--frames, --fps and --keyframes are three ways to choose frames; give one of them")
    return options


def fitted(options: Options) -> Options:
    """The options with a model, and the prompt and drafter that fit it, where nobody named one."""
    model = options.model or embedded.MODEL
    prompt = options.prompt
    if prompt is None and options.prompt_file is None:
        prompt = embedded.prompt() if embedded.speaks(model) else PROMPT
    return replace(options, model=model, prompt=prompt, drafter=options.drafter or embedded.drafter(model))


def dumped(options: Options) -> bytes:
    """The options as a config file that gives the same run again."""
    plain = {
        name.replace("_", "-"): str(value) if isinstance(value, Path) else value
        for name, value in vars(options).items()
        if name != SAID_LATER and value is not None
    }
    return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True).encode()


def settings(options: Options) -> Settings:
    """What shapes the answers."""
    names = ("model", "drafter", "max_new_tokens", "temperature", "dtype", "engine", "max_pixels_per_image")
    return Settings(seed=options.seed if options.temperature > 0 else None, **{n: getattr(options, n) for n in names})


def _held(path: Path, flags: Flags) -> dict[str, Any]:
    try:
        said = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SettingsError(
            f"{path} cannot be read as YAML ({error}); give a file of lines like `model: name`"
        ) from error
    if not isinstance(said, dict):
        raise SettingsError(f"{path} holds no settings; give lines like `max-new-tokens: 64`")
    called, flags.parser.prog = flags.parser.prog, f"{flags.parser.prog} --config {path}"  # for its error messages
    try:
        found = flags.parser.parse_args(flags.words(said, path))
    finally:
        flags.parser.prog = called
    return {name: value for name, value in vars(found).items() if name in flags.defaults}
