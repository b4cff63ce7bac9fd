"""Which models can read a draft tree: the requirements on their decoder, layers, attention and head."""

from __future__ import annotations

import inspect

from transformers import GenerationMixin

from mmspec.pipelines.host import recurrent, tree_attention
from mmspec.pipelines.host.decoder import decoder, head, readers, replaced, wrapped
from mmspec.pipelines.host.exotic import path_readers
from mmspec.pipelines.host.hooks import stock
from mmspec.pipelines.host.kinds import GenerativeModel
from mmspec.pipelines.host.masks import MASKS_BY_KIND

_BLOCKS = ("index_kpool", "indexer_compress_ratio", "index_block_size")  # settings of an indexer that selects blocks
# class → why it cannot be accelerated, for reasons that only its forward shows
_REFUSED = {
    "Kosmos2ForConditionalGeneration": "its generate delegates to a model that counts the slots of the cache",
    "EvollaForProteinText2Text": "its layers attend to the protein with a mask for one token at a time",
}


def encoder_decoder(model: GenerativeModel) -> bool:
    """Whether it is an encoder-decoder model."""
    return bool(getattr(model.config, "is_encoder_decoder", False))


def unsupported(model: GenerativeModel) -> str | None:
    """Why this model cannot be accelerated, or None."""
    if encoder_decoder(model):
        return "it is an encoder-decoder model; only decoder-only models are supported"
    if stock(model).__name__ in _REFUSED:
        return _REFUSED[stock(model).__name__]
    if getattr(stock(model), "_sample", GenerationMixin._sample) is not GenerationMixin._sample:
        return "its class has a decoding loop of its own (_sample)"
    update = getattr(model, "_update_model_kwargs_for_generation", None)
    if update is not None and not update.__module__.startswith("transformers."):  # it is called after the prefill only
        return "its class changes the arguments of every step (_update_model_kwargs_for_generation)"
    text = decoder(model) if hasattr(model, "get_decoder") else None
    if text is None or text is model or not hasattr(text, "layers"):
        return "get_decoder() does not return a text decoder with layers"
    if (hidden := wrapped(model) or replaced(readers(text))) is not None:
        return hidden
    if head(model) is None:
        return "get_output_embeddings() returns no head"
    if "position_ids" not in inspect.signature(text.forward).parameters:
        return "its decoder takes no position_ids, which the nodes of a tree need"
    unknown = recurrent.unknown(text, path_readers.READERS)
    if unknown is not None:
        return f"{unknown} keeps a state that cannot be rolled back after a rejected draft"
    kept = any(recurrent.modules(text))
    if getattr(model, "_is_stateful", False) and not kept:
        return "it keeps a recurrent state, which cannot be rolled back after a rejected draft"
    counting = [m for m in text.modules() if "get_query_offset" in recurrent.names(stock(m), helpers=True)]
    if counting and not any(path_readers.reader(m) for one in counting for m in one.modules()):
        return "its attention measures distances in cache slots, which are not the positions of tree nodes"
    indexers = [
        m for m in text.modules() if "update_indexer" in recurrent.names(stock(m)) and not path_readers.reader(m)
    ]
    if indexers and any(getattr(text.config, name, None) for name in _BLOCKS):
        return "its indexer selects blocks of the cache, which the nodes of a tree would shift"
    layers = set(getattr(text.config, "layer_types", None) or ["full_attention"])
    layers -= MASKS_BY_KIND.keys() | (recurrent.KINDS if kept else set())
    if layers:
        return f"it has {', '.join(sorted(layers))} layers, whose state cannot be rolled back to a tree node"
    return tree_attention.unfit(text)


def head_shape(model: GenerativeModel) -> tuple[int, int]:
    """Rows and width of the model's head; `weight` of a quantized head may be a function, or packed."""
    last = head(model)
    assert last is not None
    if hasattr(last, "out_features"):
        return last.out_features, last.in_features
    return last.weight.shape[0], last.weight.shape[1]
