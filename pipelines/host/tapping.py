"""Tapping a model: its decoder and layers are read, and some of its modules read a draft in a way of their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

from mmspec.pipelines.host import few_rows, renamed
from mmspec.pipelines.host.forward import Tap
from mmspec.pipelines.host.hooks import Taps
from mmspec.pipelines.host.kinds import GenerativeModel, TextDecoder
from mmspec.pipelines.host.model import HostModel
from mmspec.types import FINAL


def _read(own: TextDecoder, features: tuple[int, ...]) -> dict[int | None, nn.Module]:
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


def taps(model: GenerativeModel, features: tuple[int, ...]) -> Taps:
    """What reads these features of a model, and its drafts; while it is entered, the model is tapped.

    Raises:
        ValueError: it has no such features.
    """
    host = HostModel.of(model)
    if features not in host.taps:
        host.taps[features] = Taps(_wanted(host, features))
    return host.taps[features]


def _wanted(host: HostModel, features: tuple[int, ...]) -> Iterator[tuple[nn.Module, type, Mapping[str, object]]]:
    own = host.decoder
    yield from ((module, reader, {}) for module, reader in host.readers)  # of two mixins the first counts
    yield from ((module, Tap, {"_mmspec_layer": layer}) for layer, module in _read(own, features).items())
    yield from ((module, renamed.Renamed, {}) for module in (renamed.modules(own) if host.instead else ()))
    yield from ((module, few_rows.FewRows, {}) for module in few_rows.gaining(own, host.head))
