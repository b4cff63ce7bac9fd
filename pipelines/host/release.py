"""Error handling for releases of transformers that mmspec was not tested with.

Importing this module does not import transformers, so that it can report why an import from there fails.
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
    """A sentence with the installed release, the tested ones, and the command that installs one of those."""
    spec = contract.TESTED["transformers"]
    return (
        f'transformers {installed()} is installed, and mmspec is tested with {spec}: pip install "transformers{spec}"'
    )


def broken(names: Collection[str] = ()) -> str | None:
    """Which of mmspec's assumptions are false for the installed release, in a sentence; None: all hold.

    Args:
        names: class names; rows for these are checked besides those for all models.
    """
    rows = contract.broken(models=names)
    return None if not rows else f"{rows[0]}{f' (and {len(rows) - 1} more)' if rows[1:] else ''}. {advice()}"


def with_advice(refused: UnsupportedError) -> UnsupportedError:
    """The same error, with `advice()` at its end."""
    included = contract.TESTED["transformers"] in str(refused)
    return refused if included else UnsupportedError(f"{refused}. {advice()}")


def changed(error: Exception) -> str:
    """The reason for an error that does not occur on a tested release, in a sentence."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    where = "" if last is None else f" in {last.tb_frame.f_code.co_name}"
    what = f"{type(error).__name__}: {error}{where}"
    return broken() or f"{what}. {advice()}"


class Untouched:
    """The handle of a model that was left unchanged, because mmspec does not work with the installed transformers.

    Attributes:
        model: what was passed to `enable`.
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


def leave(model: object, why: str, config: SpecConfig, above: int = 3) -> Untouched:
    """Leave a model unchanged, with a warning for the caller, who is `above` frames up.

    Raises:
        UnsupportedError: `on_unsupported` is "error".
    """
    if config.on_unsupported == "error":
        raise UnsupportedError(f"mmspec cannot accelerate {type(model).__name__}: {why}")
    warnings.warn(f"mmspec leaves {type(model).__name__} as it is: {why}", stacklevel=above)
    return Untouched(model)


def missing(name: str, error: Exception) -> Callable[..., object]:
    """A replacement for a public function of mmspec whose module cannot be imported with the installed release.

    Raises:
        Exception: `error` itself, on a tested release for which all of mmspec's assumptions hold.
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

    replacements: dict[str, Callable[..., object]] = {"enable": enable, "disable": disable}
    return replacements.get(name, refuse)


def guarded(enable: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `enable`: on an untested release, errors caused by transformers become UnsupportedError or a warning."""

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
