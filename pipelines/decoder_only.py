"""A transformers model as it stands: the mixin that makes its `generate` fast, and what has to be known of it."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor

from mmspec.pipelines import attention
from mmspec.pipelines.generate import Call, generate, obstacle
from mmspec.pipelines.vlm import VlmTarget, tap, untap
from mmspec.rules import Rule
from mmspec.types import TargetInfo

__all__ = ["Enabled", "codebook", "describe", "tap", "unsupported", "untap"]

_LAYERS = set(attention.KINDS)
_ATTENTION = {"sdpa", "eager", attention.NAME}


class Enabled:
    """Mixin of an enabled model; `generate` lands in one of these for every mode that transformers has.

    Attributes:
        _mmspec_handle: the Handle of `enable`.
        _mmspec_target: what stands for this model in a session.
        _mmspec_guided: whether the forward of a negative prompt (`guidance_scale`) may share a batch with the prompt's.
    """

    _mmspec_handle: Any
    _mmspec_target: type[VlmTarget] = VlmTarget
    _mmspec_guided = False

    def _sample(
        self,
        input_ids: Any,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        handle = self._mmspec_handle
        call = Call(
            input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus, streamer, model_kwargs
        )
        why = obstacle(self, call)
        if why is None:
            output, stats = generate(self, handle, call)
            handle.book(stats)
            return output
        self._mmspec_decline(why)
        return super()._sample(  # type: ignore[misc]
            input_ids,
            logits_processor,
            stopping_criteria,
            generation_config,
            synced_gpus=synced_gpus,
            streamer=streamer,
            **model_kwargs,
        )

    def _mmspec_rule(self, call: Call) -> Rule:
        """What is kept of a draft in this call."""
        return self._mmspec_handle.rule

    def _mmspec_decline(self, why: str) -> None:
        """Let a call run on the stock path: an unknown logits processor always may, anything else as the user said.

        So may a training loop's, which generates in between.
        """
        if "logits processor" in why or "gradient checkpointing" in why:  # never guessed; the stock path is right
            self._mmspec_handle.fall_back(why)
        else:
            self._mmspec_handle.refuse(why)

    def _beam_search(self, *args: Any, **kwargs: Any) -> Any:
        self._mmspec_decline("beam search (num_beams > 1) ranks whole sequences; a draft has nothing to save there")
        return super()._beam_search(*args, **kwargs)  # type: ignore[misc]

    def _assisted_decoding(self, *args: Any, **kwargs: Any) -> Any:
        self._mmspec_decline("assisted decoding (assistant_model, prompt_lookup_num_tokens) drafts by itself")
        return super()._assisted_decoding(*args, **kwargs)  # type: ignore[misc]


def unsupported(model: Any) -> str | None:
    """Why this model cannot be accelerated, or None."""
    config = model.config
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder model; only decoder-only models are supported"
    if getattr(model, "_is_stateful", False):
        return "it keeps a recurrent state, which cannot be rolled back after a rejected draft"
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    if decoder is None or decoder is model or not hasattr(decoder, "layers"):
        return "get_decoder() does not give a text decoder with layers"
    if model.get_output_embeddings() is None:
        return "get_output_embeddings() gives no head"
    if "position_ids" not in inspect.signature(decoder.forward).parameters:
        return "its decoder takes no position_ids, which the nodes of a tree need"
    layers = set(getattr(decoder.config, "layer_types", None) or ["full_attention"])
    if layers - _LAYERS:
        return f"it has {', '.join(sorted(layers - _LAYERS))} layers, whose state cannot be rolled back to a tree node"
    asked = decoder.config._attn_implementation
    if asked not in _ATTENTION:
        return (
            f"its attention is {asked!r}, which takes no tree mask; load it with attn_implementation='sdpa' "
            f"(allowed: {', '.join(sorted(_ATTENTION))})"
        )
    return None


def describe(model: Any) -> TargetInfo:
    """What a drafter has to fit."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    ends = model.generation_config.eos_token_id
    return TargetInfo(
        name=getattr(model.config, "_name_or_path", "") or type(model).__name__,
        vocab=head.weight.shape[0],
        hidden=head.weight.shape[1],
        embedding=embedding.weight.shape[-1],
        layers=len(model.get_decoder().layers),
        device=embedding.weight.device,
        dtype=model.dtype,
        ends=() if ends is None else tuple(ends) if isinstance(ends, list) else (ends,),
    )


def codebook(model: Any) -> Tensor | None:
    """The code of each token of the head, [V, c], for rules that know which tokens look alike; text has none."""
    return None
