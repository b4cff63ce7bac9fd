"""What mmspec has to know of PEFT: wrappers, soft prompts, and adapters per row."""

from __future__ import annotations

from typing import Any

from mmspec.pipelines.host.kinds import GenerativeModel

_TOGETHER = {"LILY", "SHADOW"}  # adapters whose layers read all tokens of a forward together


def inside(wrapper: object) -> GenerativeModel | None:
    """The model inside a PEFT wrapper; None: this is not a PEFT wrapper."""
    return wrapper.get_base_model() if hasattr(wrapper, "get_base_model") else None


def unsupported(wrapper: object) -> str | None:
    """Why a PEFT wrapper's active adapter is not supported; None: it is, or this is not a PEFT wrapper."""
    adapter = getattr(wrapper, "active_peft_config", None)
    if adapter is None:
        return None
    kind = _kind(adapter)
    supported = "mmspec supports adapters whose layers read each token by itself, such as LoRA"
    if getattr(adapter, "is_prompt_learning", False):
        return (
            f"its active PEFT adapter is {kind}, which puts virtual tokens before the prompt, and mmspec does not see "
            f"them in drafts and positions; {supported}"
        )
    if kind in _TOGETHER:
        return f"its active PEFT adapter is {kind}, with which a draft would change what comes before it; {supported}"
    return None


def _kind(config: Any) -> str:
    return str(getattr(config.peft_type, "value", config.peft_type))


def generating(model: GenerativeModel) -> object:
    """The PEFT wrapper whose `generate` runs now; PEFT puts its `prepare_inputs_for_generation` on the model."""
    return getattr(vars(model).get("prepare_inputs_for_generation"), "__self__", None)


def of_call(model: GenerativeModel, rows: int) -> str | None:
    """Why the adapters of this call are not supported, which shows in their configurations, and in the hooks that PEFT
    adds; None: they are."""
    configs = getattr(model, "peft_config", None)
    if configs is None:
        return None
    for kind in map(_kind, configs.values()):
        if kind == "POLY" and rows > 1:
            return "a Poly adapter's task_ids needs every row to stay in the batch to the end"
        if kind in _TOGETHER:
            return f"it has a PEFT adapter of type {kind}, with which a draft would change what comes before it"
    hooks = (hook for module in model.modules() for hook in module._forward_pre_hooks.values())
    handed = {name for hook in hooks for name in getattr(hook, "keywords", ())}
    if rows > 1 and "adapter_names" in handed:
        return "adapter_names needs every row to stay in the batch to the end, but finished rows leave it here"
    if "alora_offsets" in handed:
        return "an activated LoRA counts from the end of a forward's tokens where it begins, which a draft would move"
    return None


def unmerged(model: GenerativeModel) -> bool:
    """Whether layers have adapters that are not merged into their weights."""
    return any(hasattr(module, "base_layer") for module in model.modules())
