"""Reasons why a call cannot be accelerated that come from the model's current state, which may change between calls."""

from __future__ import annotations

from dataclasses import dataclass

from mmspec.pipelines.host import adapters
from mmspec.pipelines.host.assisted import assists
from mmspec.pipelines.host.kinds import GenerationConfig, GenerativeModel
from mmspec.pipelines.host.model import HostModel

BEAMS = "beam search (num_beams > 1) ranks whole sequences; a draft has nothing to save there"


@dataclass(frozen=True)
class Obstacle:
    """Why a call has to run the stock path."""

    reason: str  # for the error or warning message
    # use the stock path whatever `on_unsupported` is, since the user could not have known
    always_falls_back: bool = False


def now(model: GenerativeModel, config: GenerationConfig, rows: int) -> Obstacle | None:
    """Why the model cannot be accelerated now, for example because its attention was changed, adapters were added, or
    it is the assistant of another model; None: it can.

    Args:
        model: an enabled model of transformers.
        config: the call's generation config.
        rows: the batch size of the call.
    """
    if assists(config):
        return Obstacle("it drafts for another model here, a few tokens at a time", always_falls_back=True)
    host = HostModel.of(model)
    why = host.unfit or adapters.unsupported(adapters.generating(model)) or host.shared_scale
    if why is not None:
        return Obstacle(why)
    if (why := adapters.of_call(model, rows)) is not None:
        return Obstacle(why, always_falls_back=True)
    return None
