"""Command-line options that several commands share, and functions that parse their values."""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
import math
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
DTYPES = ("auto", "float32", "bfloat16", "float16")


def checked(kind: Callable[[str], T], fits: Callable[[T], bool], what: str) -> Callable[[str], T]:
    """The type of an option; `what` is what its values are."""

    def parse(text: str) -> T:
        with contextlib.suppress(ValueError):
            if fits(value := kind(text)):
                return value
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")

    return parse


def _digits(text: str) -> int:
    return int(text if text.isdecimal() else "")  # without a sign, spaces or underscores


count = checked(_digits, lambda n: n >= 1, "a whole number from 1 on")
seed_value = checked(_digits, lambda n: 0 <= n < 2**62, "a seed; one is a whole number from 0 on, below 2**62")
port = checked(_digits, lambda n: 1 <= n < 2**16, "a port; one is a number from 1 to 65535")
from_zero = checked(float, lambda x: 0 <= x < math.inf, "a number from 0 on")
above_zero = checked(float, lambda x: 0 < x < math.inf, "a number above 0")


def is_local(host: str) -> bool:
    """Whether a server that listens on this host can be reached from this machine only."""
    with contextlib.suppress(ValueError):  # a host name
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    return False


def where(parser: argparse._ActionsContainer) -> None:
    """Add `--device` and `--dtype` to a parser, or to a group of one."""
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps ... (%(default)s)")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="dtype of the weights (%(default)s)")
