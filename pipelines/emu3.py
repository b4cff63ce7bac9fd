"""Emu3: its pictures are ordinary `generate` calls, guided by a negative prompt and kept on a grid by a grammar."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.generation.logits_process import PrefixConstrainedLogitsProcessor

from mmspec.pipelines import decoder_only
from mmspec.pipelines.codes import by_token
from mmspec.pipelines.decoder_only import describe, head_shape, tap, unsupported, untap
from mmspec.pipelines.generate import Call
from mmspec.pipelines.handle import Patch
from mmspec.rules import Rule, exact

__all__ = ["Enabled", "codebook", "describe", "tap", "unsupported", "untap"]


class Enabled(decoder_only.Enabled):
    """Both prompts in one batch: one forward per round where stock makes two per token."""

    _mmspec_guided = True

    @classmethod
    def _mmspec_rule(cls, patch: Patch, call: Call) -> Rule:
        """A relaxed rule is for pictures, which a grammar keeps on their grid: text stays exact."""
        drawing = any(type(p) is PrefixConstrainedLogitsProcessor for p in call.logits_processor)
        return super()._mmspec_rule(patch, call) if drawing else exact


def codebook(model: Any) -> Tensor:
    """The codes of the visual tokens, on their places in the vocabulary."""
    codes = model.model.vqmodel.quantize.embedding.weight
    return by_token(codes, model.vocabulary_mapping.img2bpe, head_shape(model)[0])
