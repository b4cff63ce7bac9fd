"""Options that several verbs of the command line share, and how their values are read."""

from __future__ import annotations

import argparse
from typing import Any

DTYPES = ("auto", "float32", "bfloat16", "float16")


def count(text: str) -> int:
    """A whole number from 1 on."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


def where(parser: Any) -> None:
    """`--device` and `--dtype`: where a model runs, and in which numbers; for a parser, or a group of one."""
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps ... (%(default)s)")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="of the weights (%(default)s)")
