"""PEFT, as far as it changes what a model reads: wrappers, soft prompts, adapters of a row's own."""

from __future__ import annotations

from mmspec.pipelines.host.kinds import GenerativeModel


def inside(wrapper: object) -> GenerativeModel | None:
    """The model inside a PEFT wrapper; None: it is no such wrapper."""
    return wrapper.get_base_model() if hasattr(wrapper, "get_base_model") else None


def soft_prompt(wrapper: object) -> str | None:
    """Why a PEFT wrapper's active adapter cannot be followed, or None, also for what is no such wrapper."""
    adapter = getattr(wrapper, "active_peft_config", None)
    if adapter is None or not getattr(adapter, "is_prompt_learning", False):
        return None
    kind = getattr(adapter.peft_type, "value", adapter.peft_type)
    return (
        f"its active PEFT adapter is {kind}, which puts virtual tokens before the prompt that drafts and positions do "
        "not know; adapters in the weights, such as LoRA, are supported"
    )


def generating(model: GenerativeModel) -> object:
    """The PEFT wrapper whose `generate` runs now: it lends the model its own `prepare_inputs_for_generation`."""
    return getattr(vars(model).get("prepare_inputs_for_generation"), "__self__", None)


def by_row(model: GenerativeModel) -> bool:
    """Whether PEFT gives each row of this call its own adapter, as its hooks tell."""
    return hasattr(model, "peft_config") and any(
        "adapter_names" in getattr(hook, "keywords", ())
        for module in model.modules()
        for hook in module._forward_pre_hooks.values()
    )


def unmerged(model: GenerativeModel) -> bool:
    """Whether layers have adapters beside their weights."""
    return any(hasattr(module, "base_layer") for module in model.modules())
