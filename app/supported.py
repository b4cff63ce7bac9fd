"""`mmspec supported`: the model families that are proved identical, the drafters and the rules."""

from __future__ import annotations

import argparse

import mmspec


def configure(parser: argparse.ArgumentParser) -> None:
    """No options."""
    parser.description = "Print the model families that are proved identical, the drafters and the rules."


def run(args: argparse.Namespace) -> int:
    """Print them."""
    mmspec.supported()
    return 0
