"""Stock's own assisted generation with the drafters that it has, too; and a draft model made of the model itself."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

from mmspec.checkpoints.save import save_drafter
from mmspec.pipelines.drafters.draft_model import ModelDrafter
from mmspec.pipelines.drafters.mtp import MtpDrafter
from mmspec.pipelines.host.decoder import decoder
from mmspec.pipelines.host.loading import stock_class

EARLY = 6  # a draft model has one in so many of its target's layers


def first_layers(model: Any) -> ModelDrafter:
    """The model's own first layers under its head, with the same weights, as a smaller model that drafts for it."""
    small = copy.deepcopy(model, {id(t): t for t in (*model.parameters(), *model.buffers())})
    own = decoder(small)
    count = max(1, len(own.layers) // EARLY)
    own.layers = nn.ModuleList(own.layers[:count])
    own.config.num_hidden_layers = count
    if getattr(own.config, "layer_types", None):
        own.config.layer_types = own.config.layer_types[:count]
    made = ModelDrafter.of(small)
    alike = {"num_assistant_tokens": made.options.depth, "num_assistant_tokens_schedule": "constant"}
    small.generation_config.update(**alike)
    return made


# By a drafter's name: how it is made of the model that is measured, where it needs no file of its own.
OF_MODEL: dict[str, Callable[[Any], Any]] = {"model": first_layers, "mtp": MtpDrafter.of_model}


def _dflash(drafter: Any) -> dict[str, Any]:
    """The same weights in transformers' own class, which reads embeddings without the norm that a table may have.

    Raises ValueError: a network that it is not.
    """
    same = copy.copy(drafter)
    same.config = replace(drafter.config, bare_embeds=True)
    with tempfile.TemporaryDirectory() as folder:
        save_drafter(same, folder, "muse-glimmer")
        theirs = stock_class("MuseGlimmerAssistantModel").from_pretrained(folder)
    own = next(drafter.parameters())
    return {"assistant_model": theirs.to(own.device, own.dtype).eval(), "speculation_type": "dflash"}


# By a drafter's method: the arguments with which stock `generate` drafts so. Prompt lookup has a row of its own.
ASSISTED: dict[str, Callable[[Any], dict[str, Any]]] = {
    "model": lambda drafter: {"assistant_model": drafter.model},
    "mtp": lambda drafter: {"use_mtp": True},
    "block": _dflash,
}
