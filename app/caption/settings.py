"""Options of `mmspec caption`: merges command line, config file and defaults, and hashes what shapes an answer."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import yaml

from mmspec.app import embedded, enabling
from mmspec.app.caption.journal import digest, key
from mmspec.app.caption.options import AUTO, BESIDE, ENGINE, RARE, VLLM, Options
from mmspec.app.media import video
from mmspec.app.options import did_you_mean

PROMPT = "Describe this image in two or three sentences."  # for models other than the embedded one
WHOLE = "--help-all"
FILE = "run.yaml"  # beside the captions
HEAD = b"# Repeat this run by: mmspec caption --config FILE\n"
CONFIG = "config"  # the one flag that a config file cannot hold
ONCE = (CONFIG, "retry_failed", "resume", "limit")  # flags that apply to one run and are not written to run.yaml
KEPT = "1GB"  # default prefix_cache where a picture has several prompts
SHAPING = ("model", "drafter", "max_new_tokens", "temperature", "dtype", "engine", "max_pixels_per_image")


OPTIONS = {one.name: one for one in fields(Options)}


class SettingsError(Exception):
    """The options, or the file that holds them, are invalid."""


class Flags:
    """Adds the options to a parser, without their defaults.

    So a parsed namespace holds only the flags that were given, and the command line can override a config file.
    """

    def __init__(self, parser: argparse.ArgumentParser):
        self.parser = parser
        group: Any = parser
        self.rare: dict[argparse.Action, str] = {}  # flags shown only by --help-all, with their help
        parser.add_argument(WHOLE, action=_WholeHelp, flags=self, help="show all flags, including rarely used ones")
        for name, one in OPTIONS.items():
            about = one.metadata
            group = parser.add_argument_group(about["section"]) if about["section"] else group
            takes = about["takes"] | {"help": about["takes"]["help"].replace("%", "%%")}
            action = group.add_argument(*spelled(name), *about["names"], default=argparse.SUPPRESS, **takes)
            if action.option_strings and action.option_strings[0] in RARE:
                self.rare[action], action.help = str(action.help), argparse.SUPPRESS

    def reveal(self) -> None:
        """Show all flags in the help; also called when the docs are built."""
        for action, text in self.rare.items():
            action.help = text

    def words(self, entries: Mapping[str, Any], origin: Path) -> list[str]:
        """The entries of a config file as command-line arguments."""
        words: list[str] = []
        for name, value in entries.items():
            dest = str(name).replace("-", "_")
            if dest not in OPTIONS or dest == CONFIG:
                hint = did_you_mean(dest.replace("_", "-"), [one.replace("_", "-") for one in OPTIONS])
                raise SettingsError(f"{origin}: unknown setting {name!r}{hint} (mmspec caption --help lists them)")
            if dest == "inputs" or value is None:
                continue
            takes, (flag,) = OPTIONS[dest].metadata["takes"], spelled(dest)
            switch = takes.get("action") is argparse.BooleanOptionalAction
            if switch != isinstance(value, bool):
                raise SettingsError(f"{origin}: {name} is{' not' * (not switch)} true or false; got {value!r}")
            several = takes.get("action") == "append" or "nargs" in takes
            if isinstance(value, dict) or (isinstance(value, list) and not several):
                raise SettingsError(f"{origin}: {name} takes one value; got {value!r}")
            if switch:
                words.append(flag if value else flag.replace("--", "--no-"))
            else:
                words += [f"{flag}={one}" for one in (value if isinstance(value, list) else [value])]
        inputs = entries.get("inputs") or []
        return [*words, "--", *([inputs] if isinstance(inputs, str) else map(str, inputs))]


def spelled(name: str) -> tuple[str]:
    """The flag of an option; inputs are positional and have none."""
    return (name if name == "inputs" else f"--{name.replace('_', '-')}",)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(flags=Flags(parser))


class _WholeHelp(argparse.Action):
    def __init__(self, option_strings: Any, dest: str, flags: Flags, help: str):
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, help=help)
        self.flags = flags

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        self.flags.reveal()
        parser.print_help()
        parser.exit()


def resolve(args: argparse.Namespace) -> Options:
    """All options. The command line overrides the config file, which overrides the defaults."""
    given = {name: value for name, value in vars(args).items() if name in OPTIONS}
    options = Options(**((_from_file(given["config"], args.flags) if given.get("config") else {}) | given))
    if len(options.prompt) > 1 and options.engine != ENGINE:
        raise SettingsError(f"--engine {options.engine} takes one --prompt; got {len(options.prompt)}")
    if options.push_to_hub and options.out == BESIDE:
        raise SettingsError("--push-to-hub uploads a whole folder; give --out a folder that holds only captions")
    if options.score and options.engine != ENGINE:
        raise SettingsError(f"--engine {options.engine} returns no scores; leave --score out")
    if options.json_schema is not None:
        schema(options)
        around = [name for name in ("start_with", "prepend", "append") if getattr(options, name)]
        if around or options.engine != ENGINE:
            what = spelled(around[0])[0] if around else "--engine"
            raise SettingsError(f"--json-schema and {what} cannot be combined; leave one of them out")
    return options


def fitted(options: Options) -> Options:
    """The options with the default model, and with the prompt and drafter that fit it, where none were given."""
    model = options.model or embedded.MODEL
    prompt = options.prompt or [embedded.prompt() if embedded.speaks(model) else PROMPT]
    drafter = options.drafter or (embedded.STOCK if options.engine == VLLM else embedded.drafter(model))
    return replace(options, model=model, prompt=prompt, drafter=drafter)


def schema(options: Options) -> dict[str, object] | None:
    """The schema in the file of --json-schema; SettingsError if the file is not a JSON object."""
    if options.json_schema is None:
        return None
    try:
        parsed = json.loads(options.json_schema.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise SettingsError(f"--json-schema {options.json_schema} cannot be read as JSON ({error})") from error
    if not isinstance(parsed, dict):
        raise SettingsError(f"--json-schema {options.json_schema} holds a {type(parsed).__name__}; give an object")
    return parsed


def enable(options: Options) -> dict[str, object]:
    """The options of --enable by name, and a prefix cache for several prompts; EnableError if one is invalid."""
    if options.engine != ENGINE:
        return enabling.unchecked(options.enable)
    several = {"prefix_cache": KEPT} if len(options.prompt) > 1 else {}
    return several | enabling.given(options.enable, options.drafter)


def dumped(options: Options) -> bytes:
    """The options as a config file that repeats the run."""
    plain = {
        name.replace("_", "-"): str(value) if isinstance(value, Path) else value
        for name, value in vars(options).items()
        if name not in ONCE and value is not None
    }
    plain["prompt"] = options.prompt[0] if len(options.prompt) == 1 else options.prompt
    return HEAD + yaml.safe_dump(plain, sort_keys=False, allow_unicode=True).encode()


def shaping(options: Options) -> dict[str, object]:
    """The options that shape an answer besides the item and its prompt; the seed is None for greedy decoding."""
    drawn = sorted(word for word in options.enable if word.partition("=")[0] in enabling.DRAWN)
    seed = options.seed if options.temperature > 0 else None
    wanted = schema(options)
    grammar = {} if wanted is None else {"json_schema": digest(json.dumps(["", wanted], sort_keys=True).encode())}
    return {name: getattr(options, name) for name in SHAPING} | {"enable": " ".join(drawn), "seed": seed} | grammar


def ask(facts: Mapping[str, object]) -> str:
    """A hash of everything that shapes an answer except the content.

    Only what differs from its default counts, so that a newly added option does not invalidate recorded captions.
    """
    usual = {
        "further": (),
        "max_frames": video.MAX_FRAMES,
        "dtype": AUTO,
        "engine": ENGINE,
        "max_pixels_per_image": AUTO,
    }
    return key("", **{name: value for name, value in facts.items() if value not in ("", usual.get(name, ""))})


def _from_file(path: Path, flags: Flags) -> dict[str, Any]:
    try:
        entries = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SettingsError(
            f"{path} cannot be read as YAML ({error}); give a file of lines like `model: name`"
        ) from error
    if not isinstance(entries, dict):
        raise SettingsError(f"{path} is not a YAML mapping; give lines like `max-new-tokens: 64`")
    prog, flags.parser.prog = flags.parser.prog, f"{flags.parser.prog} --config {path}"  # for its error messages
    try:
        args = flags.parser.parse_args(flags.words(entries, path))
    finally:
        flags.parser.prog = prog
    return {name: value for name, value in vars(args).items() if name in OPTIONS}
