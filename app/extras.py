"""Cores and installed packages of this machine, and what else needs no import of torch."""

from __future__ import annotations

import importlib.metadata
import os


class EngineError(Exception):
    """The model or the drafter cannot be used at all."""


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def version(package: str) -> str | None:
    """The version of an installed package; None if it is missing."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def installing(*extras: str) -> str:
    """The command that installs extras, as in the documentation; mmspec is installed from a clone."""
    return f'pip install -e ".[{",".join(extras)}]" in the clone of mmspec'
