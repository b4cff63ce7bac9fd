"""Emu3: images come from ordinary `generate` calls with a negative prompt, kept on a grid by a token constraint."""

from __future__ import annotations

from torch import Tensor

from mmspec.pipelines.families.decoder_only import DecoderOnly
from mmspec.pipelines.host.call import Call
from mmspec.pipelines.host.exotic import pictures
from mmspec.pipelines.host.kinds import GenerativeModel
from mmspec.pipelines.host.processors.table import constrained
from mmspec.rules import Rule, exact


class Emu3(DecoderOnly):
    """Has both prompts in one batch: one forward per round, while stock makes two per token."""

    guided = True

    def rule(self, named: Rule, call: Call) -> Rule:
        """A relaxed rule applies only to images, which have a token constraint; text stays exact."""
        return named if constrained(call.logits_processor) else exact

    def codebook(self, model: GenerativeModel) -> Tensor:
        return pictures.emu3(model)
