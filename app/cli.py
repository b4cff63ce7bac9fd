"""The `mmspec` command: a table of commands, each in a module that is imported only when it is called."""

from __future__ import annotations

import argparse
import builtins
import importlib
import logging
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import mmspec

HIDDEN = ("DeprecationWarning", "PendingDeprecationWarning", "FutureWarning")  # these are for developers
COMMANDS = {  # command: (module with configure(parser) and run(args) -> exit code, one line of help)
    "caption": ("mmspec.app.caption.command", "caption images and videos: folders, lists, tables, tars, data sets"),
    "generate": ("mmspec.app.generate", "draw pictures from prompts with an autoregressive image model"),
    "demo": ("mmspec.app.demo.command", "see it at work in the browser"),
    "serve": ("mmspec.app.serve.command", "serve OpenAI's chat protocol to many clients at once"),
    "verify": ("mmspec.app.verify", "check that output is unchanged on your model and image"),
    "bench": ("mmspec.app.bench.command", "measure the speed-up over plain decoding, and the quality of pictures"),
    "train": ("mmspec.app.train", "train a drafter for a model"),
    "convert": ("mmspec.app.convert", "rewrite a drafter in another published layout"),
    "doctor": ("mmspec.app.doctor", "check versions, device and compiler, for bug reports; list what is supported"),
}


def main(argv: Sequence[str] | None = None, build: Callable[[list[str]], argparse.ArgumentParser] | None = None) -> int:
    """Run one command of the parser that `build` creates; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a character that the console lacks must not end a long run
            stream.reconfigure(errors="backslashreplace")
    quiet()
    parser = (build or _parser)(words)
    args = parser.parse_args(words)
    try:
        return args.run(args)
    except KeyboardInterrupt:
        print(f"\n{parser.prog}: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:  # as in `mmspec ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def quiet() -> None:
    """Silence warnings that libraries address to developers, in this process and in those that it starts later."""
    for name in ("TRANSFORMERS_VERBOSITY", "DIFFUSERS_VERBOSITY"):
        os.environ.setdefault(name, "error")
    os.environ.setdefault("PYTHONWARNINGS", ",".join(f"ignore::{kind}" for kind in HIDDEN))
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # about missing compilers
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"  # without its place in the source
    if not sys.warnoptions:
        for kind in HIDDEN:
            warnings.filterwarnings("ignore", category=getattr(builtins, kind))


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are two lines; a command without arguments prints its help."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if not args and self._subparsers is not None:
            self.print_help(sys.stderr)
            self.exit(2)
        known, strange = super().parse_known_args(args, namespace)
        if strange:
            stray = "--model" in self._option_string_actions and not strange[0].startswith("-")
            self.error(
                f"unrecognized arguments: {' '.join(strange)}"
                + "; inputs come before options, and --model names a model" * stray
            )
        return known, strange

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n`{self.prog} --help` explains what it takes\n")


def _parser(words: list[str]) -> argparse.ArgumentParser:
    parser = Parser(prog="mmspec", description=mmspec.__doc__)
    parser.add_argument("--version", action="version", version=f"mmspec {mmspec.__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    called = next((word for word in words if not word.startswith("-")), None)
    for name, (module, help_line) in COMMANDS.items():
        verb = verbs.add_parser(name, help=help_line)
        if name == called:
            chosen = importlib.import_module(module)
            chosen.configure(verb)
            verb.set_defaults(run=chosen.run)
    return parser


if __name__ == "__main__":
    sys.exit(main())
