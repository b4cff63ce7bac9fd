"""Cores, processes, signals and packages of this machine, and an error; none imports torch."""

from __future__ import annotations

import contextlib
import importlib.metadata
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess


class EngineError(Exception):
    """The model or the drafter cannot be used at all."""


def say(line: str) -> None:
    """Print progress to stderr."""
    print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Treat the first SIGTERM inside the block as Ctrl-C; ignore later ones, so that the run can finish up."""

    def stop(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


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


def start_process(target: Callable[..., None], *args: object, daemon: bool = False) -> tuple[BaseProcess, Connection]:
    """A new process that runs `target(pipe, *args)`, and the other end of its pipe."""
    pipe, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=target, args=(theirs, *args), daemon=daemon)
    try:
        process.start()
    finally:
        theirs.close()  # so that reading raises EOFError when the process ends
    return process, pipe


def end_process(process: BaseProcess, patience: float) -> str:
    """End a process, after up to `patience` seconds in which it may exit by itself; returns how it ended."""
    process.join(patience)
    process.kill()
    process.join()
    code = process.exitcode or 0
    with contextlib.suppress(ValueError):
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return f"signal {-code}"
