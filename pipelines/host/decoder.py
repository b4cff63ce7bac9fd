"""Where the layers are that write a model's text."""

from __future__ import annotations

from typing import Any

from mmspec.modes import each_module
from mmspec.pipelines.host import recurrent
from mmspec.pipelines.host.exotic import path_readers
from mmspec.pipelines.host.hooks import stock


def decoder(model: Any) -> Any:
    """The module with the text's layers; where `get_decoder` names a whole language model, the decoder inside of it."""
    found = model.get_decoder()
    return found if hasattr(found, "layers") else getattr(found, "model", found)


def head(model: Any) -> Any:
    """What gives logits, of the model or of the language model inside of it; None: nothing does."""
    found = model.get_output_embeddings()
    inner: Any = getattr(model, "language_model", None)
    return inner.get_output_embeddings() if found is None and hasattr(inner, "get_output_embeddings") else found


def embedding(model: Any) -> Any:
    """What embeds token ids."""
    return model.get_input_embeddings()


def readers(text: Any) -> list[tuple[Any, type]]:
    """The modules of a decoder that read a draft in a way of their own, and what goes before the class of each."""
    ours = {module: reader for module in each_module(text) if (reader := path_readers.reader(module)) is not None}
    rest = [(module, recurrent.reader(stock(module))) for module in recurrent.modules(text) if module not in ours]
    return [*ours.items(), *rest]


def more_than_states(text: Any) -> bool:
    """Whether layers of a decoder keep more than the text's keys and values and recurrent states: the keys of an
    indexer, those of a picture, what is read path by path."""
    config = text.config
    kinds, crossed = getattr(config, "layer_types", None) or (), getattr(config, "cross_attention_layers", None)
    by_path = any(path_readers.reader(module) is not None for module in each_module(text))
    return "indexed_attention" in kinds or bool(crossed) or by_path


def more_than_keys(text: Any) -> bool:
    """Whether layers of a decoder keep more than the text's keys and values."""
    return more_than_states(text) or bool(recurrent.modules(text))
