"""Emu3: its pictures are ordinary `generate` calls, guided by a negative prompt and kept on a grid by a grammar."""

from __future__ import annotations

from torch import Tensor

from mmspec.pipelines.families.decoder_only import DecoderOnly
from mmspec.pipelines.host.call import Call
from mmspec.pipelines.host.exotic import pictures
from mmspec.pipelines.host.kinds import GenerativeModel
from mmspec.pipelines.host.processors.table import constrained
from mmspec.rules import Rule, exact


class Emu3(DecoderOnly):
    """Both prompts in one batch: one forward per round where stock makes two per token."""

    guided = True

    def rule(self, named: Rule, call: Call) -> Rule:
        """A relaxed rule is for pictures, which a grammar keeps on their grid: text stays exact."""
        return named if constrained(call.logits_processor) else exact

    def codebook(self, model: GenerativeModel) -> Tensor:
        return pictures.emu3(model)
