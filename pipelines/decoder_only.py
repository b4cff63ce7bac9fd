"""A transformers model as it stands: the mixin that makes its `generate` fast, and what has to be known of it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from torch import Tensor
from transformers import GenerationMixin

from mmspec.pipelines import assisted, attention, devices, recurrent
from mmspec.pipelines.generate import Call, asking, generate, obstacle, overheard
from mmspec.pipelines.handle import Patch
from mmspec.pipelines.obstacles import Obstacle, unfit_attention
from mmspec.pipelines.swap import stock
from mmspec.pipelines.vlm import VlmTarget, tap, untap
from mmspec.rules import Rule
from mmspec.types import TargetInfo

__all__ = ["Enabled", "codebook", "describe", "tap", "unsupported", "untap"]

_LAYERS = set(attention.KINDS)
_instead: ContextVar[Patch | None] = ContextVar("mmspec_instead", default=None)  # of a call that names its drafter


class Enabled:
    """Mixin of an enabled model; `generate` lands in one of these for every mode that transformers has.

    Another thread may swap the class at any time. So methods take the stock ones from `stock(self)`, a call asks once
    for its Patch, and what belongs to the kind of model rather than to the model is asked of `patch.kind`.

    Attributes:
        _mmspec_handle: the Patch of `enable`.
        _mmspec_target: makes what stands for this model in a session.
        _mmspec_guided: whether the forward of a negative prompt (`guidance_scale`) may share a batch with the prompt's.
    """

    _mmspec_handle: Patch
    _mmspec_target: Callable[..., VlmTarget] = VlmTarget
    _mmspec_guided = False

    @functools.wraps(GenerationMixin.generate)
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        custom = kwargs.get("custom_generate")
        if callable(custom) and not getattr(custom, "__module__", "").startswith("mmspec."):
            kwargs["custom_generate"] = overheard(custom, type(self)._mmspec_handle)
        patch, drafts = Patch.of(self), assisted.asked(self, kwargs)
        if patch is not None and drafts is not None:
            patch, kwargs = assisted.patch_for(self, patch, drafts[0]), drafts[1]
        tokens = asking.set({**dict(zip(("inputs",), args, strict=False)), **kwargs}), _instead.set(patch)
        try:
            return super().generate(*args, **kwargs)  # type: ignore[misc]
        finally:
            asking.reset(tokens[0])
            _instead.reset(tokens[1])

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
        patch = Patch.of(self)
        if patch is not None and (drafts := _instead.get()) in patch.asked.values():
            patch = drafts
        call = Call(
            input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus, streamer, model_kwargs
        )
        if patch is not None:  # None: disabled since this call began
            why = obstacle(self, call, patch.kind)
            if why is None:
                with patch.running(self):
                    output, stats = generate(self, patch, call)
                patch.book(stats)
                return output
            patch.kind._mmspec_decline(patch, why)
        return stock(self)._sample(
            self,
            input_ids,
            logits_processor,
            stopping_criteria,
            generation_config,
            synced_gpus=synced_gpus,
            streamer=streamer,
            **model_kwargs,
        )

    @classmethod
    def _mmspec_rule(cls, patch: Patch, call: Call) -> Rule:
        """What is kept of a draft in this call."""
        return patch.rule

    @classmethod
    def _mmspec_decline(cls, patch: Patch, why: Obstacle) -> None:
        """Let a call run on the stock path, or raise."""
        patch.decline(why)

    def _beam_search(self, *args: Any, **kwargs: Any) -> Any:
        _decline(self, "beam search (num_beams > 1) ranks whole sequences; a draft has nothing to save there")
        return stock(self)._beam_search(self, *args, **kwargs)

    def _assisted_decoding(self, *args: Any, **kwargs: Any) -> Any:
        _decline(self, "this kind of assisted decoding (early exit, other tokens, speculation_type) drafts by itself")
        return stock(self)._assisted_decoding(self, *args, **kwargs)


def _decline(model: Any, reason: str) -> None:
    patch = Patch.of(model)
    if patch is not None:
        patch.kind._mmspec_decline(patch, Obstacle(reason))


def unsupported(model: Any) -> str | None:
    """Why this model cannot be accelerated, or None."""
    config = model.config
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder model; only decoder-only models are supported"
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    if decoder is None or decoder is model or not hasattr(decoder, "layers"):
        return "get_decoder() does not give a text decoder with layers"
    if model.get_output_embeddings() is None:
        return "get_output_embeddings() gives no head"
    if "position_ids" not in inspect.signature(decoder.forward).parameters:
        return "its decoder takes no position_ids, which the nodes of a tree need"
    strange = recurrent.unknown(decoder)
    if strange is not None:
        return f"{strange} keeps a state that cannot be rolled back after a rejected draft"
    kept = any(recurrent.modules(decoder))
    if getattr(model, "_is_stateful", False) and not kept:
        return "it keeps a recurrent state, which cannot be rolled back after a rejected draft"
    if getattr(decoder.config, "cross_attention_layers", None):
        return "its decoder has cross-attention layers, which keep the picture's keys in the cache beside the text's"
    layers = set(getattr(decoder.config, "layer_types", None) or ["full_attention"])
    layers -= recurrent.KINDS if kept else set()
    if layers - _LAYERS:
        return f"it has {', '.join(sorted(layers - _LAYERS))} layers, whose state cannot be rolled back to a tree node"
    return unfit_attention(decoder.config)


def describe(model: Any) -> TargetInfo:
    """What a drafter has to fit."""
    embedding, (vocab, hidden) = model.get_input_embeddings(), head_shape(model)
    ends = model.generation_config.eos_token_id
    return TargetInfo(
        name=getattr(model.config, "_name_or_path", "") or type(model).__name__,
        vocab=vocab,
        hidden=hidden,
        embedding=embedding.weight.shape[-1],
        layers=len(model.get_decoder().layers),
        device=devices.execution(embedding),
        dtype=model.dtype,
        ends=() if ends is None else tuple(ends) if isinstance(ends, list) else (ends,),
    )


def head_shape(model: Any) -> tuple[int, int]:
    """Rows and width of its head; where that is quantized, `weight` may be a function, or packed."""
    head = model.get_output_embeddings()
    if hasattr(head, "out_features"):
        return head.out_features, head.in_features
    return head.weight.shape[0], head.weight.shape[1]


def codebook(model: Any) -> Tensor | None:
    """The code of each token of the head, [V, c], for rules that know which tokens look alike; text has none."""
    return None
