"""Tapping a model: its decoder and layers are read, and some of its modules read a draft in a way of their own."""

from __future__ import annotations

from typing import Any

from mmspec.pipelines.host import renamed
from mmspec.pipelines.host.decoder import decoder, readers
from mmspec.pipelines.host.forward import Tap
from mmspec.pipelines.host.hooks import hold, release
from mmspec.types import FINAL


def _read(own: Any, features: tuple[int, ...]) -> dict[int | None, Any]:
    """The modules to read: the decoder (under None), and the layers whose input the drafter reads, by number.

    Raises:
        ValueError: what enters its layers is several streams wide.
    """
    streams = getattr(own.config, "hc_mult", None) or getattr(own.config, "hc_count", None) or 1  # hyper-connections
    if streams > 1 and max(features, default=FINAL) >= 0:
        raise ValueError(
            f"{type(own).__name__} carries {streams} streams between its layers, where this drafter reads one; take a "
            "drafter that reads the last features alone, or drafter='ngram', which fits any"
        )
    return {None: own, **{i: own.layers[i] for i in features if i >= 0}}


def tap(model: Any, features: tuple[int, ...]) -> None:
    """Read these features of a model from now on, until `untap`.

    Raises:
        ValueError: it has no such features.
    """
    own = decoder(model)
    heard = _read(own, features)
    for module, reader in readers(own):
        hold(module, reader)
    for layer, module in heard.items():
        hold(module, Tap, _mmspec_layer=layer)
    for module in _renamed(own):
        hold(module, renamed.Renamed)


def untap(model: Any, features: tuple[int, ...]) -> None:
    own = decoder(model)
    for module in (*(m for m, _ in readers(own)), *_read(own, features).values(), *_renamed(own)):
        release(module)


def _renamed(own: Any) -> list[Any]:
    """The attention modules that read a draft by another implementation than a prompt."""
    return [] if renamed.for_drafts(own) is None else renamed.modules(own)
