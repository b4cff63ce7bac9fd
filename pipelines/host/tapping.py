"""The mixins on a model's modules: hooks that record features, and special forwards of modules that need them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor, nn

from mmspec.functional import fits, linear
from mmspec.modes import each_module, own_class
from mmspec.pipelines.host import tree_attention
from mmspec.pipelines.host.forward import Tap, now
from mmspec.pipelines.host.hooks import Taps, stock
from mmspec.pipelines.host.kinds import GenerativeModel, TextDecoder
from mmspec.pipelines.host.model import HostModel
from mmspec.types import FINAL


class FewRows:
    """Mixin for an `nn.Linear` that is faster for few rows, as in a draft; does not change the stock path."""

    weight: Tensor
    bias: Tensor | None

    def forward(self, input: Tensor) -> Tensor:
        if now().read is None:
            return stock(self).forward(self, input)
        return linear(input, self.weight, self.bias)


def _gaining(*modules: nn.Module | None) -> Iterator[nn.Module]:
    """All linear layers among these modules and their submodules that become faster; none on a GPU."""
    for module in each_module(*(m for m in modules if m is not None)):
        if own_class(type(module)) is nn.Linear and "forward" not in vars(module) and fits(module.weight):
            yield module


def _read(own: TextDecoder, features: tuple[int, ...]) -> dict[int | None, nn.Module]:
    """The modules to record: the decoder (key None), and the layers whose inputs the drafter reads, by index.

    Raises:
        ValueError: the inputs of its layers consist of several streams.
    """
    streams = getattr(own.config, "hc_mult", None) or getattr(own.config, "hc_count", None) or 1  # hyper-connections
    if streams > 1 and max(features, default=FINAL) >= 0:
        raise ValueError(
            f"{type(own).__name__} carries {streams} streams between its layers, but this drafter reads one; use a "
            "drafter that reads only the final features, or drafter='ngram', which fits any model"
        )
    return {None: own, **{i: own.layers[i] for i in features if i >= 0}}


def taps(model: GenerativeModel, features: tuple[int, ...]) -> Taps:
    """A context in which the model's forwards record these features, and in which it can read drafts.

    Raises:
        ValueError: it does not have these features.
    """
    host = HostModel.of(model)
    if features not in host.taps:
        host.taps[features] = Taps(_mixins(host, features))
    return host.taps[features]


def _mixins(host: HostModel, features: tuple[int, ...]) -> Iterator[tuple[nn.Module, type, Mapping[str, object]]]:
    own = host.decoder
    yield from ((module, reader, {}) for module, reader in host.readers)  # a module with two mixins gets only the first
    yield from ((module, Tap, {"_mmspec_layer": layer}) for layer, module in _read(own, features).items())
    yield from (
        (module, tree_attention.Renamed, {}) for module in (tree_attention.modules(own) if host.draft_attention else ())
    )
    yield from ((module, FewRows, {}) for module in _gaining(own, host.head))
