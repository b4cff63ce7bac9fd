"""Stock's own assisted generation in mmspec's loop: an assistant, DFlash's included, `use_mtp`, prompt lookup."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mmspec.drafters.ngram import NgramDrafter
from mmspec.pipelines.patching import drafting
from mmspec.pipelines.patching.handle import Patch
from mmspec.pipelines.patching.obstacles import Obstacle

# of a generation config; the first that is set counts, as in stock, and the last says what an assistant is
_FIELDS = ("prompt_lookup_num_tokens", "use_mtp", "speculation_type")


@dataclass(frozen=True)
class DraftRequest:
    """What a call asks to draft with.

    Attributes:
        key: the same for calls that ask for the same.
        drafter: as `enable` takes it.
        given: its options.
    """

    key: Any
    drafter: Any
    given: Mapping[str, Any]


def asked(model: Any, kwargs: Mapping[str, Any]) -> tuple[DraftRequest, dict[str, Any]] | None:
    """What a call of `generate` asks to draft with, and its arguments without that; None: nothing, or only stock knows.

    Stock alone drafts with a model of other tokens (`assistant_tokenizer`) or with its own first layers
    (`assistant_early_exit`); and beams take no drafts.
    """
    config = kwargs.get("generation_config") or model.generation_config
    assistant = kwargs.get("assistant_model")

    def value(name: str) -> Any:
        told = kwargs.get(name)
        return getattr(config, name, None) if told is None else told

    stocks = value("assistant_early_exit") or kwargs.get("assistant_tokenizer") is not None
    if stocks or (value("num_beams") or 1) > 1:
        return None
    found = _found(value, assistant)
    if found is None:
        return None
    rest = {name: each for name, each in kwargs.items() if name not in ("assistant_model", *_FIELDS)}
    if any(getattr(config, name, None) for name in _FIELDS):
        rest["generation_config"] = copy.deepcopy(config)
        for name in _FIELDS:
            setattr(rest["generation_config"], name, None)
    return found, rest


def _found(value: Any, assistant: Any) -> DraftRequest | None:
    count, orders = value("prompt_lookup_num_tokens"), value("max_matching_ngram_size") or 2
    if count is not None:
        key = ("ngram", int(count), int(orders))
        return DraftRequest(
            key, NgramDrafter(orders=tuple(range(int(orders), 0, -1))), {"depth": int(count), "width": 1}
        )
    if value("use_mtp"):
        return DraftRequest("mtp", "mtp", {})
    if assistant is not None:
        own = getattr(assistant, "generation_config", None)  # a block drafter has none: it drafts a block
        depth = getattr(own, "num_assistant_tokens", None)
        return DraftRequest((id(assistant), depth), assistant, {"depth": depth, "width": 1} if depth else {})
    return None


def patch_for(model: Any, patch: Patch, what: DraftRequest) -> Patch:
    """A patch that drafts so, for one call, and is like the model's own otherwise; made once for each key.

    Raises:
        UnsupportedError: it does not fit this model; where `on_unsupported` is "fallback", a warning, and the model's
            own patch drafts: the tokens are the same.
    """
    made = patch.asked.get(what.key)
    if made is None:
        target = patch.family.describe(model)
        try:
            drafter, given = drafting.named(what.drafter, what.given)
            ready = drafting.resolve(drafter, given, target, model)
        except (ValueError, OSError) as error:
            patch.decline(Obstacle(str(error)))
            return patch
        proposer = drafting.proposer(model, ready, patch.config, target, patch.family.captures_drafts)
        made = Patch(patch.family, ready, patch.config, patch.rule, proposer, given, target)
        made.stats, made.keeps = patch.stats, what.drafter
        patch.asked[what.key] = made
    return made
