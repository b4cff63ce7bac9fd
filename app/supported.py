"""`mmspec supported`: lists the model families proved identical, the drafters and the rules."""

from __future__ import annotations

import argparse

import mmspec


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = "Print the model families that are proved identical, the drafters and the rules."


HOW = (
    "How this was proved: tiny random models of these very classes, greedy, float32, one row and three rows of unequal "
    "length;\n  twelve families also with sdpa and eager attention, one row and four (docs/models.md)"
)


def run(args: argparse.Namespace) -> int:
    mmspec.supported()
    print(HOW)
    return 0
