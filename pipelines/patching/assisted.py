"""Runs stock's assisted generation in mmspec's loop: an assistant model (also DFlash's), `use_mtp` or prompt lookup."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
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
    """The drafter that a call of `generate` names."""

    key: Hashable  # equal for calls that name the same drafter with the same options
    drafter: Any  # in a form that `enable` takes
    given: Options  # its options


def requested(model: GenerativeModel, kwargs: Mapping[str, Any]) -> tuple[DraftRequest, dict[str, Any]] | None:
    """The drafter that a `generate` call names, and its other arguments; None: none, or one that only stock can run."""
    found = assisted.requested(model, kwargs)
    return None if found is None else (_request(found[0]), found[1])


def _request(assistance: Assistance) -> DraftRequest:
    count, orders = assistance.count, assistance.orders
    if assistance.how == "lookup":
        drafter = NgramDrafter(orders=tuple(range(orders, 0, -1)))
        return DraftRequest(("ngram", count, orders), drafter, {"depth": count, "width": 1})
    if assistance.how == "mtp":
        return DraftRequest("mtp", "mtp", {})
    given = {"depth": count, "width": 1} if count else {}
    return DraftRequest((id(assistance.model), count), assistance.model, given)


def patch_for(model: GenerativeModel, patch: Patch, request: DraftRequest) -> Patch:
    """The model's patch with the requested drafter in place of its own, for one call; built once for each key.

    Raises:
        UnsupportedError: the drafter does not fit this model. If `on_unsupported` is "fallback" this is a warning, and
            the model's own patch is used, which gives the same tokens.
    """
    special = patch.by_request.get(request.key)
    if special is None:
        target = patch.family.describe(model)
        try:
            ready, given = choose.chosen(request.drafter, request.given, target, model)
            config = replace(patch.config, lookup=False)  # which `enable` was given for its own drafter
            proposer = drafting.proposer(model, ready, config, target, patch.family.captures_drafts)
        except (ValueError, OSError) as error:
            patch.decline(Obstacle(str(error)))
            return patch
        special = Patch(patch.family, ready, config, patch.rule, proposer, given, target)
        special.stats, special.source = patch.stats, request.drafter
        patch.by_request[request.key] = special
    return special
