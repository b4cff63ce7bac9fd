"""What a call of `generate` says about assisted generation: an assistant model, `use_mtp` or prompt lookup."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

from mmspec.config import Options
from mmspec.drafters.ngram import NgramDrafter
from mmspec.pipelines.host.kinds import GenerationConfig, GenerativeModel

# fields of a generation config; the first that is set counts, as in stock, and the last is the kind of assistant
_FIELDS = ("prompt_lookup_num_tokens", "use_mtp", "speculation_type")


@dataclass(frozen=True)
class DraftRequest:
    """The drafter that a call names."""

    key: Hashable  # equal for calls that name the same drafter with the same options
    drafter: Any  # in a form that `enable` takes
    given: Options  # its options


def setting(name: str, *configs: GenerationConfig | None) -> Any:
    """The first value of a field in these generation configs that is set; None: none is, or no config has the field."""
    values = (getattr(config, name, None) for config in configs)
    return next((value for value in values if value is not None), None)


def assists(config: GenerationConfig) -> bool:
    """Whether a call with this generation config drafts for another model."""
    return bool(setting("is_assistant", config))


def draft_length(model: GenerativeModel) -> int | None:
    """The draft length that an assistant recommends."""
    return setting("num_assistant_tokens", getattr(model, "generation_config", None))


def requested(model: GenerativeModel, kwargs: Mapping[str, Any]) -> tuple[DraftRequest, dict[str, Any]] | None:
    """The drafter that a call of `generate` names, and its other arguments; None: none, or one that only stock can run.

    Only stock drafts with a model of another tokenizer (`assistant_tokenizer`) or with the model's first layers
    (`assistant_early_exit`). Beam search takes no drafts.
    """
    passed, own, assistant = kwargs.get("generation_config"), model.generation_config, kwargs.get("assistant_model")

    def value(name: str) -> Any:
        return kwargs[name] if name in kwargs else setting(name, passed, own)

    only_stock = value("assistant_early_exit") or kwargs.get("assistant_tokenizer") is not None
    if only_stock or (value("num_beams") or 1) > 1:
        return None
    count = value("prompt_lookup_num_tokens")
    if count is not None:
        orders = int(value("max_matching_ngram_size") or 2)  # the longest n-gram that is looked up
        drafter = NgramDrafter(orders=tuple(range(orders, 0, -1)))
        found = DraftRequest(("ngram", int(count), orders), drafter, {"depth": int(count), "width": 1})
    elif value("use_mtp"):
        found = DraftRequest("mtp", "mtp", {})
    elif assistant is not None:
        length = draft_length(assistant)  # None for a block drafter, such as DFlash's
        found = DraftRequest((id(assistant), length), assistant, {"depth": length, "width": 1} if length else {})
    else:
        return None
    rest = {name: each for name, each in kwargs.items() if name not in ("assistant_model", *_FIELDS)}
    if passed is not None:
        rest["generation_config"] = copy.deepcopy(passed)
        vars(rest["generation_config"]).update(dict.fromkeys(_FIELDS))
    filled_in = [name for name in _FIELDS if setting(name, own) is not None]  # by stock, unless the call says None
    return found, rest | dict.fromkeys(filled_in)
