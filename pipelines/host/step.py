"""The forwards that stock's loop makes: a prompt's prefill, and the decoding step over the nodes of a draft."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from mmspec.pipelines.host.call import PICTURES, TYPES, Call
from mmspec.pipelines.host.forward import Read, reading
from mmspec.pipelines.host.names import CACHE


def prefill(
    model: Any, call: Call, slots: Any, decode: Callable[..., Any] | None = None, every: bool = False
) -> tuple[Read, Any, dict[str, Any]]:
    """The model's own prefill of a call's prompt, in one piece, into `slots`.

    Args:
        decode: see `reading`.
        every: the decoder is to give the features of all tokens, though layers share keys.

    Returns:
        What was read off it, its output, and the arguments of the next step.
    """
    ids, config, arguments = call.input_ids, call.generation_config, {**call.arguments, CACHE: slots}
    if every and "logits_to_keep" in arguments:  # a number would make the decoder drop all other features
        arguments["logits_to_keep"] = ids.new_full((1,), -1)
    config.prefill_chunk_size, chunk = None, config.prefill_chunk_size
    try:
        with reading(decode) as read:
            out = model._prefill(ids, config, arguments, is_first_iteration=True)
    finally:
        config.prefill_chunk_size = chunk
    return read, out, model._update_model_kwargs_for_generation(out, arguments, is_encoder_decoder=False)


def next_positions(model: Any, ids: Tensor, arguments: dict[str, Any]) -> Tensor | None:
    """Take the position ids from a step's arguments, the next one at their end; None where the step drops them."""
    step = model.prepare_inputs_for_generation(ids[:, -1:], next_sequence_length=1, **arguments)
    positions = arguments.pop("position_ids", None)
    return None if step.get("position_ids") is None else positions


def split(arguments: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Of a step's arguments the types of the last token [B, 1], and what a draft's forward is given besides."""
    types = {name: t[:, -1:] for name in TYPES if (t := arguments.get(name)) is not None}
    aside = {CACHE, *PICTURES, *types}
    return types, {name: value for name, value in arguments.items() if name not in aside} | {"attention_mask": None}


def step(
    model: Any, arguments: dict[str, Any], types: dict[str, Tensor], slots: Any, ids: Tensor, places: Tensor, mask: Any
) -> Any:
    """The output of the model's own decoding step over nodes [B, N] at `places`, under a mask of ours."""
    spread = {name: t.expand(-1, ids.shape[1], *t.shape[2:]) for name, t in types.items()}
    arguments = {**arguments, CACHE: slots, "position_ids": places, **spread}
    inputs = model.prepare_inputs_for_generation(ids, next_sequence_length=ids.shape[1], **arguments)
    inputs["attention_mask"] = mask
    if inputs.get("position_ids") is None:  # GLM-Image drops them, and would take a draft for a prompt
        inputs["position_ids"] = places
    if "logits_to_keep" in inputs:
        inputs["logits_to_keep"] = 0
    return model(**inputs, return_dict=True)


def plain(model: Any, ids: Tensor, mask: Tensor, slots: Any) -> tuple[Read, Any]:
    """A forward over a prompt [B, L] of text, into `slots`: what was read off it, and its output."""
    with reading() as read:
        out = model(ids, attention_mask=mask, use_cache=True, return_dict=True, **{CACHE: slots})
    return read, out


def cacheless(model: Any, ids: Tensor, valid: Tensor, arguments: dict[str, Any]) -> Read:
    """What is read off a forward over whole texts [B, L], which keeps nothing."""
    with reading() as read:
        model(input_ids=ids, attention_mask=valid.long(), use_cache=False, logits_to_keep=1, **arguments)
    return read
