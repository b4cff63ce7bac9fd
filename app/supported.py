"""`mmspec supported`: the models and drafters that work together."""

from __future__ import annotations

import argparse

import mmspec


def configure(parser: argparse.ArgumentParser) -> None:
    """No options."""
    parser.description = "Print which model families work with which drafters."


def run(args: argparse.Namespace) -> int:
    """Print the matrix."""
    mmspec.supported()
    return 0
