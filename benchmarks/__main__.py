"""`python -m benchmarks`, from a checkout: the maintainers' suites, and the training of the embedded models."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

import benchmarks
from benchmarks.suites import SUITES
from mmspec.app import cli
from mmspec.app.bench import command as bench

TRAINING = "train the embedded models again from nothing"


def parser(words: Sequence[str] = ()) -> cli.Parser:
    """A sub-command for each suite, and `zoo`."""
    made = cli.Parser(prog="python -m benchmarks")
    verbs = bench.configure(made, SUITES)
    made.set_defaults(run=bench.run)
    made.description = benchmarks.__doc__
    training = verbs.add_parser("zoo", help=TRAINING)
    if words and words[0] == "zoo":  # it needs diffusers, which suites do without
        zoo = importlib.import_module("benchmarks.zoo.command")
        zoo.configure(training)
        training.set_defaults(run=zoo.run)
    return made


if __name__ == "__main__":
    sys.exit(cli.main(build=parser))
