"""Where the layers are that write a model's text."""

from __future__ import annotations

from typing import Any

from mmspec.pipelines.targets import recurrent


def decoder(model: Any) -> Any:
    """The module with the text's layers; where `get_decoder` names a whole language model, the decoder inside of it."""
    found = model.get_decoder()
    return found if hasattr(found, "layers") else getattr(found, "model", found)


def head(model: Any) -> Any:
    """What gives logits, of the model or of the language model inside of it; None: nothing does."""
    found = model.get_output_embeddings()
    inner: Any = getattr(model, "language_model", None)
    return inner.get_output_embeddings() if found is None and hasattr(inner, "get_output_embeddings") else found


def more_than_keys(text: Any) -> bool:
    """Whether layers of a decoder keep more than keys and values: recurrent states, or the keys of an indexer."""
    kinds = getattr(text.config, "layer_types", None) or ()
    return "indexed_attention" in kinds or bool(recurrent.modules(text))
