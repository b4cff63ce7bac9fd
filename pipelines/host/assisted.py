"""What a call of `generate` asks stock to draft with, and the settings of its generation config by name."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mmspec.pipelines.host.kinds import GenerationConfig, GenerativeModel

# of a generation config; the first that is set counts, as in stock, and the last says what an assistant is
_FIELDS = ("prompt_lookup_num_tokens", "use_mtp", "speculation_type")


@dataclass(frozen=True)
class Assistance:
    """What stock would draft with."""

    how: str  # "lookup" in the text itself, "mtp" heads of the model, or another "model"
    count: int | None = None  # tokens to draft; None: nobody says
    orders: int = 2  # the longest piece of text that is looked up
    model: Any = None  # the assistant


def setting(name: str, *configs: GenerationConfig | None) -> Any:
    """Of these generation configs' values the first that is set; None: none is, or no config has the field."""
    values = (getattr(config, name, None) for config in configs)
    return next((value for value in values if value is not None), None)


def assists(config: GenerationConfig) -> bool:
    """Whether a call with this generation config drafts for another model."""
    return bool(setting("is_assistant", config))


def drafted(model: GenerativeModel) -> int | None:
    """How many tokens a model recommends to draft."""
    return setting("num_assistant_tokens", getattr(model, "generation_config", None))


def requested(model: GenerativeModel, kwargs: Mapping[str, Any]) -> tuple[Assistance, dict[str, Any]] | None:
    """What a call of `generate` asks to draft with, and its arguments without that; None: nothing, or only stock knows.

    Stock alone drafts with a model of other tokens (`assistant_tokenizer`) or with its own first layers
    (`assistant_early_exit`); and beams take no drafts.
    """
    config = kwargs.get("generation_config") or model.generation_config
    assistant = kwargs.get("assistant_model")

    def value(name: str) -> Any:
        given = kwargs.get(name)
        return setting(name, config) if given is None else given

    stocks = value("assistant_early_exit") or kwargs.get("assistant_tokenizer") is not None
    if stocks or (value("num_beams") or 1) > 1:
        return None
    count = value("prompt_lookup_num_tokens")
    if count is not None:
        wish = Assistance("lookup", int(count), int(value("max_matching_ngram_size") or 2))
    elif value("use_mtp"):
        wish = Assistance("mtp")
    elif assistant is not None:
        wish = Assistance("model", drafted(assistant), model=assistant)  # a block drafter has no count: it has a block
    else:
        return None
    rest = {name: each for name, each in kwargs.items() if name not in ("assistant_model", *_FIELDS)}
    if any(getattr(config, name, None) for name in _FIELDS):
        rest["generation_config"] = copy.deepcopy(config)
        for name in _FIELDS:
            setattr(rest["generation_config"], name, None)
    return wish, rest
