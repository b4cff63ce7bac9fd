"""Options that several verbs of the command line share, and how their values are read."""

from __future__ import annotations

import argparse
import difflib
import ipaddress
import math
import socket
from collections.abc import Callable, Iterable

CLOSE = 0.75  # how alike two names are, from 0 to 1, for one to be a misspelling of the other
DTYPES = ("auto", "float32", "bfloat16", "float16")


def count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


def door(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port; one is a number from 1 to 65535")
    return int(text)


def is_local(host: str) -> bool:
    """Whether only this machine can reach a server that listens there."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:  # a name
        return False


def check_port(host: str, port: int, otherwise: str) -> None:
    """OSError if somebody listens there already, which says what to do `otherwise`."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as listening:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
    except (OSError, OverflowError) as error:
        raise OSError(f"cannot listen at {host}:{port} ({error}); {otherwise}") from error


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


class Pairs(argparse._ExtendAction):
    """Collects words NAME=VALUE, however often the flag is said."""

    names: Callable[[], Iterable[str]] = staticmethod(lambda: ())  # that may be said to it


def where(parser: argparse._ActionsContainer) -> None:
    """`--device` and `--dtype`: where a model runs, and in which numbers; for a parser, or a group of one."""
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps ... (%(default)s)")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="of the weights (%(default)s)")


def meant(word: str, known: Iterable[str]) -> str:
    """A question after the one of these names that a word misspells; nothing where none is near."""
    near = difflib.get_close_matches(word.partition("=")[0], known, 1, cutoff=CLOSE)
    return "".join(f"; did you mean {one}?" for one in near)
