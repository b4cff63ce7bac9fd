"""LlamaGenPipeline as `mmspec.enable` knows it: its calls stay, the drafter and the rule come from the patch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

from torch import Tensor

from mmspec.pipelines.host import devices
from mmspec.pipelines.host.forward import Tap
from mmspec.pipelines.host.hooks import Taps, stock
from mmspec.pipelines.host.names import origin
from mmspec.pipelines.llamagen.pipeline import DecodingPlan
from mmspec.pipelines.patching.family import Family
from mmspec.pipelines.patching.handle import Patch
from mmspec.protocols import TargetInfo
from mmspec.session import Session


class LlamaGenPatch:
    """Mixin of an enabled pipeline."""

    _mmspec_patch: Patch

    def _plan(self, sample: bool) -> DecodingPlan:
        patch = Patch.of(self)
        if patch is None:  # disabled since this call began
            return stock(self)._plan(self, sample)
        patch.relaxes(sample)
        return DecodingPlan(
            patch.fitting(self), patch.rule, patch.config.reproducible, patch.config.compile, patch.book
        )

    def _rounds(self, *args: Any) -> Iterator[Session]:
        patch = Patch.of(self)
        with nullcontext() if patch is None else patch.running(self):
            yield from stock(self)._rounds(self, *args)


class LlamaGen(Family):
    """`compile` captures the forward alone."""

    mixin = LlamaGenPatch
    drafter = "jacobi"
    captures_drafts = False

    def describe(self, model: Any) -> TargetInfo:
        transformer = model.transformer
        c = transformer.config
        name = str(origin(model)[0] or type(model).__name__)
        where = devices.execution(transformer)
        wide = {"hidden": c.dim, "embedding": c.dim, "grid": c.grid, "rope_theta": c.rope_base}
        return TargetInfo(name, c.vocab, layers=c.num_layers, device=where, dtype=transformer.dtype, **wide)

    def codebook(self, model: Any) -> Tensor:
        """[V, c], the vectors that the tokens stand for."""
        return model.vqvae.codebook()  # type: ignore[no-any-return]

    def embeddings(self, model: Any) -> Tensor:
        return model.transformer.tok_embeddings.weight  # type: ignore[no-any-return]

    def taps(self, model: Any, features: tuple[int, ...]) -> Taps:
        layers = model.transformer.layers
        return Taps((layers[i], Tap, {"_mmspec_layer": i}) for i in features if i >= 0)
