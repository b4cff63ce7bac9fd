"""The limits of a model's positions: a learned table, changes of rotary frequencies, the room for an answer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from mmspec.modes import each_module
from mmspec.pipelines.host.kinds import BatchFeature, GenerativeModel, TextDecoder
from mmspec.session import Session

Stop = Callable[[list[int], int], int | None]  # `Row.stop`

MARGIN = 128  # allowance in slots for rows that are shorter than the longest one, and for the nodes of a draft


def table(decoder: TextDecoder) -> int | None:
    """The number of positions in a decoder's learned table (OPT, BioGPT); None: it has no table."""
    sizes = [
        module.num_embeddings - getattr(module, "offset", 0)  # the first two rows of OPT's table are not positions
        for name, module in decoder.named_children()
        if isinstance(module, nn.Embedding) and ("position" in name or name == "wpe")
    ]
    return min(sizes, default=None)


def rotary_limit(decoder: TextDecoder) -> int | None:
    """Length beyond which rotary frequencies or scales depend on the batch's longest position; None: they never do.

    A draft is longer than the text, so it could change them for tokens of the text, unlike in stock.
    """
    lengths = []
    for module in each_module(decoder):
        own = vars(module)
        kinds = own.get("rope_type")  # a string, or a dict by layer type
        for layer, kind in (kinds if isinstance(kinds, dict) else {None: kinds}).items():
            if kind == "longrope":
                parameters = module.config.rope_parameters
                lengths.append((parameters if layer is None else parameters[layer])["original_max_position_embeddings"])
            elif "dynamic" in (kind or ""):
                lengths.append(module.original_max_seq_len)
        if own.get("attn_temperature_tuning"):  # Llama-4 counts slots of the cache
            lengths.append(int(module.floor_scale) - MARGIN)
    if type(decoder).__name__ == "InklingTextModel" and decoder.config.log_scaling_n_floor is not None:
        lengths.append(decoder.config.log_scaling_n_floor - MARGIN)  # also counts slots
    return min(lengths, default=None)


def room_after(inputs: BatchFeature, model: GenerativeModel) -> int:
    """How many tokens an answer to this prompt may have in the model's context; below 1: the prompt is too long."""
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 2**62
    return int(most - inputs["input_ids"].shape[1])


def within(stop: Stop | None, most: int, limit: int) -> Stop:
    """A row's stop condition that raises IndexError, as stock does, if the row needs more positions than there are.

    Args:
        stop: the row's own condition, if any.
        most: the maximum number of tokens of the row; the last one is not read.
        limit: the size of the model's table, for the message.
    """

    def stops(tokens: list[int], new: int) -> int | None:
        length = None if stop is None else stop(tokens, new)
        if (len(tokens) if length is None else length) > most:
            raise IndexError(f"the model has {limit} learned positions and the text needs more; lower max_new_tokens")
        return length

    return stops


def bound(session: Session, table: int) -> None:
    """Make rows raise an error if their text, not just a draft, exceeds the model's learned positions."""
    begin = torch.zeros(len(session.cache.open_slots), 1, dtype=torch.long, device=session.pending.device)
    furthest = session.cache.places.at(begin).reshape(-1, len(session.rows), session.cache.streams).amax((0, 2))
    for row, place in zip(session.rows, furthest.tolist(), strict=True):
        row.stop = within(row.stop, row.start + table - place + 1, table)
