"""Command-line options that several commands share, and functions that parse their values."""

from __future__ import annotations

import argparse
import ipaddress
import math

DTYPES = ("auto", "float32", "bfloat16", "float16")


def count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


def seed_value(text: str) -> int:
    if not text.isdecimal() or int(text) >= 2**62:
        raise argparse.ArgumentTypeError(f"{text!r} is not a seed; one is a whole number from 0 on, below 2**62")
    return int(text)


def port(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port; one is a number from 1 to 65535")
    return int(text)


def is_local(host: str) -> bool:
    """Whether a server that listens on this host can be reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:  # a host name
        return False


def from_zero(text: str) -> float:
    return _number(text, "from 0 on", open_end=False)


def above_zero(text: str) -> float:
    return _number(text, "above 0", open_end=True)


def _number(text: str, allowed: str, open_end: bool) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (0 < value < math.inf or (value == 0 and not open_end)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number {allowed}")
    return value


def where(parser: argparse._ActionsContainer) -> None:
    """Add `--device` and `--dtype` to a parser, or to a group of one."""
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps ... (%(default)s)")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="dtype of the weights (%(default)s)")
