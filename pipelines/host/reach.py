"""How far a model's positions reach: tables that end, and rotary frequencies that change as a text grows."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from mmspec.modes import each_module
from mmspec.pipelines.host.kinds import TextDecoder
from mmspec.session import Session

Stop = Callable[[list[int], int], int | None]  # `Row.stop`

MARGIN = 128  # slots by which a row may be behind the longest one, and the nodes of its draft


def table(decoder: TextDecoder) -> int | None:
    """Positions that its learned table holds (OPT, BioGPT); None where there is none."""
    sizes = [
        module.num_embeddings - getattr(module, "offset", 0)  # OPT's table begins with two rows that are no positions
        for name, module in decoder.named_children()
        if isinstance(module, nn.Embedding) and ("position" in name or name == "wpe")
    ]
    return min(sizes, default=None)


def turn(decoder: TextDecoder) -> int | None:
    """Length past which rotary frequencies or scales depend on the longest position in the batch; None: they never do.

    A draft reaches further than the text, so that it could change them for tokens that stock decoding reads unchanged.
    """
    lengths = []
    for module in each_module(decoder):
        own = vars(module)
        kinds = own.get("rope_type")  # one, or one for each type of layers
        for layer, kind in (kinds if isinstance(kinds, dict) else {None: kinds}).items():
            if kind == "longrope":
                parameters = module.config.rope_parameters
                lengths.append((parameters if layer is None else parameters[layer])["original_max_position_embeddings"])
            elif "dynamic" in (kind or ""):
                lengths.append(module.original_max_seq_len)
        if own.get("attn_temperature_tuning"):  # Llama-4 counts slots of the cache
            lengths.append(int(module.floor_scale) - MARGIN)
    if type(decoder).__name__ == "InklingTextModel" and decoder.config.log_scaling_n_floor is not None:
        lengths.append(decoder.config.log_scaling_n_floor - MARGIN)  # counts them likewise
    return min(lengths, default=None)


def within(stop: Stop | None, most: int, held: int) -> Stop:
    """A row's condition, on a table that holds `held` positions: as stock, it fails where the row goes on past them.

    Args:
        stop: the row's own condition, if any.
        most: tokens that the row may have, the last of which is not read any more.
        held: for the message.
    """

    def stops(tokens: list[int], new: int) -> int | None:
        length = None if stop is None else stop(tokens, new)
        if (len(tokens) if length is None else length) > most:
            raise IndexError(f"the model has {held} learned positions and the text needs more; lower max_new_tokens")
        return length

    return stops


def bound(session: Session, table: int) -> None:
    """Let rows fail where they go on past the model's learned positions, and not where a draft would."""
    begin = torch.zeros(len(session.cache.open_slots), 1, dtype=torch.long, device=session.pending.device)
    furthest = session.cache.places.at(begin).reshape(-1, len(session.rows), session.cache.streams).amax((0, 2))
    for row, place in zip(session.rows, furthest.tolist(), strict=True):
        row.stop = within(row.stop, row.start + table - place + 1, table)
