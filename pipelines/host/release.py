"""What mmspec says and does on a release of transformers that it was not tested with.

Importing this module imports nothing of the host, so that it can say why something of the host is missing.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable, Collection
from functools import cache
from typing import Any, NoReturn

from packaging.specifiers import SpecifierSet

from mmspec.config import SpecConfig, UnsupportedError
from mmspec.pipelines.host import contract


@cache
def installed() -> str:
    return str(importlib.import_module("transformers").__version__)


@cache
def tested() -> bool:
    """Whether the installed release is one that mmspec is tested with."""
    return SpecifierSet(contract.TESTED["transformers"]).contains(installed(), prereleases=True)


def advice() -> str:
    """Which release is installed, which are tested, and the command that installs one of those."""
    known = contract.TESTED["transformers"]
    return (
        f'transformers {installed()} is installed, and mmspec is tested with {known}: pip install "transformers{known}"'
    )


def broken(names: Collection[str] = ()) -> str | None:
    """What mmspec assumes of the host and the installed release does not keep, in a sentence; None: nothing.

    Args:
        names: of the classes that are needed beside what all models need.
    """
    rows = contract.broken(models=names)
    return None if not rows else f"{rows[0]}{f' (and {len(rows) - 1} more)' if rows[1:] else ''}. {advice()}"


def with_advice(refused: UnsupportedError) -> UnsupportedError:
    """The same refusal, which says what is installed and what is tested."""
    known = contract.TESTED["transformers"] in str(refused)
    return refused if known else UnsupportedError(f"{refused}. {advice()}")


def changed(error: Exception) -> str:
    """Why something failed that does not fail on a tested release."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    where = "" if last is None else f" in {last.tb_frame.f_code.co_name}"
    what = f"{type(error).__name__}: {error}{where}"
    return broken() or f"{what}. {advice()}"


class Untouched:
    """A model that was left as it is, because mmspec cannot read the installed transformers.

    Attributes:
        model: what was given to `enable`.
    """

    drafter = None

    def __init__(self, model: object) -> None:
        self.model = model

    def disable(self) -> None:
        """Nothing was changed."""

    def __enter__(self) -> Untouched:
        return self

    def __exit__(self, *_: object) -> None:
        self.disable()


def leave(model: object, why: str, config: SpecConfig) -> Untouched:
    """Leave a model as it is, with a warning.

    Raises:
        UnsupportedError: that is not what `on_unsupported` asks for.
    """
    if config.on_unsupported == "error":
        raise UnsupportedError(f"mmspec cannot accelerate {type(model).__name__}: {why}")
    warnings.warn(f"mmspec leaves {type(model).__name__} as it is: {why}", stacklevel=4)
    return Untouched(model)


def missing(name: str, error: Exception) -> Callable[..., object]:
    """What stands for a public function of mmspec whose module does not load with the installed release.

    Raises:
        Exception: `error` itself, on a tested release that keeps all that mmspec assumes.
    """
    if tested() and broken() is None:
        raise error
    why = changed(error)

    def enable(model_or_pipe: object, drafter: object = None, **options: object) -> Untouched:
        return leave(model_or_pipe, why, SpecConfig.split(options)[0])

    def disable(model_or_pipe: object) -> None:
        """Nothing was enabled."""

    def refuse(*_: object, **__: object) -> NoReturn:
        raise UnsupportedError(f"mmspec.{name} is not available: {why}")

    known: dict[str, Callable[..., object]] = {"enable": enable, "disable": disable}
    return known.get(name, refuse)


def guarded(enable: Callable[..., Any]) -> Callable[..., Any]:
    """`enable`, which on an untested release refuses, or leaves the model, where it would fail for the host's sake."""

    @functools.wraps(enable)
    def wrapped(model_or_pipe: object, drafter: object = None, **options: object) -> Any:
        if tested():
            return enable(model_or_pipe, drafter, **options)
        try:
            return enable(model_or_pipe, drafter, **options)
        except UnsupportedError as refused:
            raise with_advice(refused) from refused
        except (AttributeError, ImportError, LookupError, RuntimeError, AssertionError) as error:
            return leave(model_or_pipe, changed(error), SpecConfig.split(options)[0])

    return wrapped
