"""What keeps a model or a call from being accelerated, as far as it lies in the model's state of the moment."""

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

    reason: str  # what stands in the way, for an error or a warning
    # take the stock path whatever `on_unsupported` says, since the user could not have known
    always_falls_back: bool = False


def now(model: GenerativeModel, config: GenerationConfig, rows: int) -> Obstacle | None:
    """Why the model cannot be accelerated now: its attention was changed, adapters were added, it assists another
    model.

    Args:
        model: an enabled model of transformers.
        config: the call's generation config.
        rows: of the call.
    """
    if assists(config):
        return Obstacle("it drafts for another model here, a few tokens at a time", always_falls_back=True)
    host = HostModel.of(model)
    why = host.unfit or adapters.soft_prompt(adapters.generating(model)) or host.shared_scale
    if why is not None:
        return Obstacle(why)
    if rows > 1 and adapters.by_row(model):
        why = "adapter_names counts on rows that stay to the end, and here rows leave as they end"
        return Obstacle(why, always_falls_back=True)
    return None
