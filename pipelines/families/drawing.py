"""Models whose ordinary `generate` calls give images: Emu3, and GLM-Image."""

from __future__ import annotations

import torch
from torch import Tensor

from mmspec.pipelines.families.decoder_only import DecoderOnly
from mmspec.pipelines.host.call import Call
from mmspec.pipelines.host.exotic import pictures
from mmspec.pipelines.host.forward import Read
from mmspec.pipelines.host.hooks import Taps
from mmspec.pipelines.host.kinds import GenerativeModel
from mmspec.pipelines.host.processors.guidance import Guidance
from mmspec.pipelines.host.processors.table import constrained
from mmspec.pipelines.target.state import Listed, Onward, Places
from mmspec.pipelines.target.vlm import VlmTarget
from mmspec.rules import Rule, exact


class Emu3(DecoderOnly):
    """Keeps images on a grid by a token constraint. With a negative prompt, one forward per round reads both prompts,
    while stock makes two forwards per token."""

    guided = True

    def rule(self, named: Rule, call: Call) -> Rule:
        """A relaxed rule applies only to images, which have a token constraint; text stays exact."""
        return named if constrained(call.logits_processor) else exact

    def codebook(self, model: GenerativeModel) -> Tensor:
        return pictures.emu3(model)


class GlmTarget(VlmTarget):
    def _places(self, positions: Tensor | None, read: Read, length: int) -> Places:
        listed = read.listed
        if listed is not None:
            return Listed(listed)
        embeds = read.arguments["inputs_embeds"]  # without grids stock counts cache slots
        return Onward(torch.full((3, len(embeds), 1), length, device=embeds.device))

    def _grid(self, read: Read) -> tuple[int, int] | None:
        """The size of the largest grid: its tokens share one time position, which is the most frequent one."""
        listed = read.listed
        if listed is None:
            return None
        time, places = listed[0, 0], listed[0, 1:]
        here = places[:, time == time.mode().values]
        rows, columns = (here.amax(1) - here.amin(1) + 1).tolist()
        return rows, columns


class GlmImage(DecoderOnly):
    """Generates two grids of image tokens, one after the other, at positions that its prefill computes."""

    drafter = "jacobi"
    keeps_prefixes = False

    def target(self, model: GenerativeModel, features: tuple[int, ...], guidance: Guidance | None) -> GlmTarget:
        return GlmTarget(model, features, guidance)

    def taps(self, model: GenerativeModel, features: tuple[int, ...]) -> Taps:
        return Taps([*super().taps(model, features).mixins, (model.model, pictures.Listing, {})])

    def codebook(self, model: GenerativeModel) -> Tensor:
        return pictures.glm_image(model)
