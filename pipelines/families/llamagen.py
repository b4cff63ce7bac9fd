"""The family of LlamaGenPipeline for `mmspec.enable`: its calls use the drafter and the rule of the patch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

from torch import Tensor

from mmspec.pipelines.host import devices
from mmspec.pipelines.host.forward import Tap
from mmspec.pipelines.host.hooks import Taps, stock
from mmspec.pipelines.host.names import origin
from mmspec.pipelines.llamagen.pipeline import DecodingPlan, LlamaGenPipeline
from mmspec.pipelines.patching.family import Family
from mmspec.pipelines.patching.handle import Patch
from mmspec.protocols import TargetInfo
from mmspec.session import Session


class LlamaGenPatch:
    """Mixin for an enabled pipeline."""

    _mmspec_patch: Patch

    def _plan(self, sample: bool) -> DecodingPlan:
        patch = Patch.of(self)
        if patch is None:  # it was disabled after this call began
            return stock(self)._plan(self, sample)
        proposer, config = patch.fitted_proposer(self), patch.config
        return DecodingPlan(proposer, patch.heeded(sample), config.reproducible, config.compile, patch.add_stats)

    def _rounds(self, *args: object) -> Iterator[Session]:
        patch = Patch.of(self)
        with nullcontext() if patch is None else patch.running(self):
            yield from stock(self)._rounds(self, *args)


class LlamaGen(Family[LlamaGenPipeline]):
    """`compile` captures only the target's forward."""

    mixin = LlamaGenPatch
    drafter = "jacobi"
    captures_drafts = keeps_prefixes = False

    def describe(self, model: LlamaGenPipeline) -> TargetInfo:
        transformer = model.transformer
        c = transformer.config
        name, where = str(origin(model)[0] or type(model).__name__), devices.execution(transformer)
        return TargetInfo(
            name, c.vocab, hidden=c.dim, embedding=c.dim, layers=c.num_layers, device=where, dtype=transformer.dtype,
            grid=c.grid, rope_theta=c.rope_base,
        )  # fmt: skip

    def codebook(self, model: LlamaGenPipeline) -> Tensor:
        """[V, c], the codebook vectors of the tokens."""
        return model.vqvae.codebook()

    def embeddings(self, model: LlamaGenPipeline) -> Tensor:
        return model.transformer.tok_embeddings.weight

    def taps(self, model: LlamaGenPipeline, features: tuple[int, ...]) -> Taps:
        layers = model.transformer.layers
        return Taps((layers[i], Tap, {"_mmspec_layer": i}) for i in features if i >= 0)
