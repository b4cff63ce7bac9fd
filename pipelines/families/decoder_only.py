"""A transformers model as it stands: the mixin that makes its `generate` fast, and what has to be known of it."""

from __future__ import annotations

import functools
import inspect
from contextvars import ContextVar
from typing import Any

from transformers import GenerationMixin

from mmspec.pipelines.patching import assisted
from mmspec.pipelines.patching.family import Family
from mmspec.pipelines.patching.generate import generate, obstacle, watched
from mmspec.pipelines.patching.handle import Patch
from mmspec.pipelines.patching.obstacles import Obstacle, unfit_attention
from mmspec.pipelines.sampling.guidance import Guidance
from mmspec.pipelines.targets import devices, recurrent
from mmspec.pipelines.targets import tree_attention as attention
from mmspec.pipelines.targets.call import Call, asking
from mmspec.pipelines.targets.decoder import decoder, head
from mmspec.pipelines.targets.hooks import stock
from mmspec.pipelines.targets.vlm import VlmTarget, tap, untap
from mmspec.types import TargetInfo

_LAYERS = set(attention.KINDS)
_instead: ContextVar[Patch | None] = ContextVar("mmspec_instead", default=None)  # of a call that names its drafter
_BLOCKS = ("index_kpool", "indexer_compress_ratio", "index_block_size")  # of an indexer that chooses blocks, not keys
# class → why it cannot be accelerated, where nothing but its forward tells
_STRANGE = {
    "IdeficsForVisionText2Text": "each of its layers looks at the pictures through a mask made for one token at a time",
    "Kosmos2ForConditionalGeneration": "its generate hands the writing on to a model that counts the cache's slots",
    "Kosmos2_5ForConditionalGeneration": "its generate hands the writing on to a model that counts the cache's slots",
    "Phi4MultimodalForCausalLM": "its forward takes a placeholder in a draft for a picture to read",
    "EvollaForProteinText2Text": "its layers look at the protein through a mask made for one token at a time",
}


class DecoderOnlyPatch:
    """Mixin of an enabled model; `generate` lands in one of these for every mode that transformers has.

    Another thread may swap the class at any time. So methods take the stock ones from `stock(self)`, a call asks once
    for its Patch, and what belongs to the kind of model rather than to the model is asked of `patch.family`.
    """

    _mmspec_patch: Patch

    @functools.wraps(GenerationMixin.generate)
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        custom = kwargs.get("custom_generate")
        if callable(custom) and not str(getattr(custom, "__module__", "")).startswith("mmspec."):
            kwargs["custom_generate"] = watched(custom, type(self)._mmspec_patch)
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
            why = obstacle(self, call, patch)
            if why is None:
                with patch.running(self):
                    output, stats = generate(self, patch, call)
                patch.book(stats)
                return output
            patch.family.decline(patch, why)
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

    def _beam_search(self, *args: Any, **kwargs: Any) -> Any:
        _decline(self, "beam search (num_beams > 1) ranks whole sequences; a draft has nothing to save there")
        return stock(self)._beam_search(self, *args, **kwargs)

    def _assisted_decoding(self, *args: Any, **kwargs: Any) -> Any:
        _decline(self, "this kind of assisted decoding (early exit, other tokens, speculation_type) drafts by itself")
        return stock(self)._assisted_decoding(self, *args, **kwargs)


def _decline(model: Any, reason: str) -> None:
    patch = Patch.of(model)
    if patch is not None:
        patch.family.decline(patch, Obstacle(reason))


class DecoderOnly(Family):
    """Decoder-only models of transformers, with or without pictures."""

    mixin = DecoderOnlyPatch

    def tap(self, model: Any, features: tuple[int, ...]) -> None:
        tap(model, features)

    def untap(self, model: Any, features: tuple[int, ...]) -> None:
        untap(model, features)

    def target(self, model: Any, features: tuple[int, ...], guidance: Guidance | None) -> VlmTarget:
        return VlmTarget(model, features, guidance)

    def unsupported(self, model: Any) -> str | None:
        return unsupported(model)

    def describe(self, model: Any) -> TargetInfo:
        """What a drafter has to fit."""
        embedding, (vocab, hidden) = model.get_input_embeddings(), head_shape(model)
        ends = model.generation_config.eos_token_id
        return TargetInfo(
            name=getattr(model.config, "_name_or_path", "") or type(model).__name__,
            vocab=vocab,
            hidden=hidden,
            embedding=embedding.weight.shape[-1],
            layers=len(decoder(model).layers),
            device=devices.execution(embedding),
            dtype=model.dtype,
            ends=() if ends is None else tuple(ends) if isinstance(ends, list) else (ends,),
        )


def unsupported(model: Any) -> str | None:
    """Why this model cannot be accelerated, or None."""
    config = model.config
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder model; only decoder-only models are supported"
    if stock(model).__name__ in _STRANGE:
        return _STRANGE[stock(model).__name__]
    text = decoder(model) if hasattr(model, "get_decoder") else None
    if text is None or text is model or not hasattr(text, "layers"):
        return "get_decoder() does not give a text decoder with layers"
    if head(model) is None:
        return "get_output_embeddings() gives no head"
    if "position_ids" not in inspect.signature(text.forward).parameters:
        return "its decoder takes no position_ids, which the nodes of a tree need"
    strange = recurrent.unknown(text)
    if strange is not None:
        return f"{strange} keeps a state that cannot be rolled back after a rejected draft"
    kept = any(recurrent.modules(text))
    if getattr(model, "_is_stateful", False) and not kept:
        return "it keeps a recurrent state, which cannot be rolled back after a rejected draft"
    if any("get_query_offset" in recurrent.names(type(module)) for module in text.modules()):
        return "its attention measures distances by slots of the cache, where the nodes of a tree lie side by side"
    indexed = "indexed_attention" in (getattr(text.config, "layer_types", None) or ())
    if indexed and any(getattr(text.config, name, None) for name in _BLOCKS):
        return "its indexer chooses blocks of the cache, which the nodes of a tree would shift"
    if getattr(text.config, "cross_attention_layers", None):
        return "its decoder has cross-attention layers, which keep the picture's keys in the cache beside the text's"
    layers = set(getattr(text.config, "layer_types", None) or ["full_attention"])
    layers -= recurrent.KINDS if kept else set()
    if layers - _LAYERS:
        return f"it has {', '.join(sorted(layers - _LAYERS))} layers, whose state cannot be rolled back to a tree node"
    return unfit_attention(text.config)


def head_shape(model: Any) -> tuple[int, int]:
    """Rows and width of its head; where that is quantized, `weight` may be a function, or packed."""
    last = head(model)
    if hasattr(last, "out_features"):
        return last.out_features, last.in_features
    return last.weight.shape[0], last.weight.shape[1]
