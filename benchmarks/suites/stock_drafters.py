"""Drafters for comparison with transformers' own: a model's first layers, and transformers' block drafter."""

from __future__ import annotations

import copy
import tempfile
from dataclasses import replace

from torch import nn

from mmspec.checkpoints.save import save_drafter
from mmspec.drafters.dflash import BlockDrafter
from mmspec.pipelines.drafters.draft_model import ModelDrafter
from mmspec.pipelines.host.decoder import decoder
from mmspec.pipelines.host.kinds import GenerativeModel
from mmspec.pipelines.host.loading import stock_class

EARLY = 6  # a draft model has 1/6 of its target's layers


def first_layers(model: GenerativeModel) -> ModelDrafter:
    """A draft model of the model's first layers and its head; it shares the model's weights."""
    small = copy.deepcopy(model, {id(t): t for t in (*model.parameters(), *model.buffers())})
    own = decoder(small)
    count = max(1, len(own.layers) // EARLY)
    own.layers = nn.ModuleList(own.layers[:count])
    own.config.num_hidden_layers = count
    if getattr(own.config, "layer_types", None):
        own.config.layer_types = own.config.layer_types[:count]
    drafter = ModelDrafter.of(small)
    same = {"num_assistant_tokens": drafter.options.depth, "num_assistant_tokens_schedule": "constant"}
    small.generation_config.update(**same)
    return drafter


def dflash(drafter: BlockDrafter) -> dict[str, object]:
    """The same weights in transformers' class, which reads embeddings without a norm.

    Raises ValueError: the class does not support this network.
    """
    same = copy.copy(drafter)
    same.config = replace(drafter.config, bare_embeds=True)
    with tempfile.TemporaryDirectory() as folder:
        save_drafter(same, folder, "muse-glimmer")
        theirs = stock_class("MuseGlimmerAssistantModel").from_pretrained(folder)
    own = next(drafter.parameters())
    return {"assistant_model": theirs.to(own.device, own.dtype).eval(), "speculation_type": "dflash"}


# As in `mmspec.app.bench.drafters`.
OF_MODEL = {"model": first_layers}
ASSISTED = {"model": lambda drafter: {"assistant_model": drafter.model}, "block": dflash}
