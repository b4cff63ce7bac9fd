"""Stock's own assisted generation in mmspec's loop: an assistant, DFlash's included, `use_mtp`, prompt lookup."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

from mmspec.config import Options
from mmspec.drafters.ngram import NgramDrafter
from mmspec.pipelines.host import assisted
from mmspec.pipelines.host.assisted import Assistance
from mmspec.pipelines.host.kinds import GenerativeModel
from mmspec.pipelines.patching import choose, drafting
from mmspec.pipelines.patching.handle import Patch
from mmspec.pipelines.patching.obstacles import Obstacle


@dataclass(frozen=True)
class DraftRequest:
    """What a call asks to draft with."""

    key: Hashable  # the same for calls that ask for the same
    drafter: Any  # as `enable` takes it
    given: Options  # its options


def requested(model: GenerativeModel, kwargs: Mapping[str, Any]) -> tuple[DraftRequest, dict[str, Any]] | None:
    """What a call of `generate` asks to draft with, and its arguments without that; None: nothing, or only stock
    knows."""
    wish = assisted.requested(model, kwargs)
    return None if wish is None else (_request(wish[0]), wish[1])


def _request(wish: Assistance) -> DraftRequest:
    if wish.how == "lookup":
        drafter = NgramDrafter(orders=tuple(range(wish.orders, 0, -1)))
        return DraftRequest(("ngram", wish.count, wish.orders), drafter, {"depth": wish.count, "width": 1})
    if wish.how == "mtp":
        return DraftRequest("mtp", "mtp", {})
    given = {"depth": wish.count, "width": 1} if wish.count else {}
    return DraftRequest((id(wish.model), wish.count), wish.model, given)


def patch_for(model: GenerativeModel, patch: Patch, what: DraftRequest) -> Patch:
    """A patch that drafts so, for one call, and is like the model's own otherwise; made once for each key.

    Raises:
        UnsupportedError: it does not fit this model; where `on_unsupported` is "fallback", a warning, and the model's
            own patch drafts: the tokens are the same.
    """
    made = patch.by_request.get(what.key)
    if made is None:
        target = patch.family.describe(model)
        try:
            ready, given = choose.chosen(what.drafter, what.given, target, model)
        except (ValueError, OSError) as error:
            patch.decline(Obstacle(str(error)))
            return patch
        proposer = drafting.proposer(model, ready, patch.config, target, patch.family.captures_drafts)
        made = Patch(patch.family, ready, patch.config, patch.rule, proposer, given, target)
        made.stats, made.keeps = patch.stats, what.drafter
        patch.by_request[what.key] = made
    return made
