"""How to install the libraries of an extra, for messages that miss one."""

from __future__ import annotations


def installing(*extras: str) -> str:
    """The command of the documentation; mmspec is installed from a clone."""
    return f'pip install -e ".[{",".join(extras)}]" in the clone of mmspec'
