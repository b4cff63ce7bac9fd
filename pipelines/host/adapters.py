"""What mmspec has to know of PEFT: wrappers, soft prompts, and adapters per row."""

from __future__ import annotations

from mmspec.pipelines.host.kinds import GenerativeModel


def inside(wrapper: object) -> GenerativeModel | None:
    """The model inside a PEFT wrapper; None: this is not a PEFT wrapper."""
    return wrapper.get_base_model() if hasattr(wrapper, "get_base_model") else None


def soft_prompt(wrapper: object) -> str | None:
    """Why a PEFT wrapper's active adapter is not supported; None: it is, or this is not a PEFT wrapper."""
    adapter = getattr(wrapper, "active_peft_config", None)
    if adapter is None or not getattr(adapter, "is_prompt_learning", False):
        return None
    kind = getattr(adapter.peft_type, "value", adapter.peft_type)
    return (
        f"its active PEFT adapter is {kind}, which puts virtual tokens before the prompt, and mmspec does not see them "
        "in drafts and positions; adapters in the weights, such as LoRA, are supported"
    )


def generating(model: GenerativeModel) -> object:
    """The PEFT wrapper whose `generate` runs now; PEFT puts its `prepare_inputs_for_generation` on the model."""
    return getattr(vars(model).get("prepare_inputs_for_generation"), "__self__", None)


def by_row(model: GenerativeModel) -> bool:
    """Whether each row of this call has its own PEFT adapter, which shows in the hooks that PEFT adds."""
    return hasattr(model, "peft_config") and any(
        "adapter_names" in getattr(hook, "keywords", ())
        for module in model.modules()
        for hook in module._forward_pre_hooks.values()
    )


def unmerged(model: GenerativeModel) -> bool:
    """Whether layers have adapters that are not merged into their weights."""
    return any(hasattr(module, "base_layer") for module in model.modules())
