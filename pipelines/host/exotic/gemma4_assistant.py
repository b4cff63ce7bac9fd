"""Gemma-4's assistants in transformers: their classes, settings, and a forward on the target's keys and values."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from mmspec.pipelines.host.decoder import decoder
from mmspec.pipelines.host.kinds import GenerativeModel
from mmspec.pipelines.host.names import FEATURES, LOGITS

CLASSES = ("Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM")


def sizes(model: GenerativeModel) -> dict[str, int]:
    """The width and vocabulary of an assistant's target."""
    config = model.config
    return {"width": config.backbone_hidden_size, "vocabulary": config.get_text_config().vocab_size}


def window(model: GenerativeModel) -> int:
    """The size of its layers' sliding window, in tokens."""
    return int(model.config.get_text_config().sliding_window)


def eager(model: GenerativeModel) -> bool:
    """Whether it takes additive masks."""
    return bool(model.config.get_text_config()._attn_implementation == "eager")


def enters(model: GenerativeModel) -> Tensor:
    """The first weight, which has the device and dtype of its computations."""
    return model.pre_projection.weight


def read(
    model: GenerativeModel, x: Tensor, masks: dict[str, Tensor], places: Tensor,
    shared: dict[str, tuple[Tensor, Tensor]],
) -> Tensor:  # fmt: skip
    """Features [B, n, H + H_a], for the next step and for its head, from embeddings and features [B, n, 2·H]."""
    parameters = inspect.signature(model.model.forward).parameters
    every = {LOGITS: torch.arange(x.shape[1], device=x.device)} if LOGITS in parameters else {}
    out = model.model(
        inputs_embeds=model.pre_projection(x),
        attention_mask=masks,
        position_ids=places,
        shared_kv_states=shared,
        use_cache=False,
        **every,  # all tokens, not just the last
    )[FEATURES]
    return torch.cat([model.post_projection(out), out], -1)


def logits(model: GenerativeModel, hidden: Tensor) -> Tensor:
    """Logits of features [B, n, H + H_a], on the assistant's device."""
    own = hidden[..., model.config.backbone_hidden_size :].to(model.lm_head.weight.device)
    ordered = model.config.use_ordered_embeddings
    return model.masked_embedding(own, model.lm_head.weight) if ordered else model.lm_head(own)


def shared(model: GenerativeModel) -> dict[str, int]:
    """Layer type → the index of the target's layer whose keys and values an assistant reads: the last with its own."""
    layers: list[Any] = [layer.self_attn for layer in decoder(model).layers if hasattr(layer, "self_attn")]
    own = [each for each in layers if not getattr(each, "is_kv_shared_layer", True)]
    return {each.layer_type: each.layer_idx for each in own}
