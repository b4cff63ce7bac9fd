"""The registry of drafters and rules: their names, and where their classes and functions are."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

from torch import Tensor

from mmspec import rules
from mmspec.rules import Rule


@dataclass(frozen=True)
class Entry:
    """A registered drafter.

    Attributes:
        trained: it needs weights, which `mmspec train` produces.
        from_model: it is built from a model that the user names, or from the target by its class method `of_model`.
    """

    module: str
    cls: str
    about: str
    _: KW_ONLY
    trained: bool = False
    from_model: bool = False


_D, _OF_MODELS = "mmspec.drafters.", "mmspec.pipelines.drafters."
DRAFTERS: dict[str, Entry] = {
    "ngram": Entry(_D + "ngram", "NgramDrafter", "prompt lookup, no weights"),
    "suffix": Entry(
        _D + "suffix",
        "SuffixDrafter",
        "copies what followed the same words in this run, no weights; the default if a model ships with no drafter",
    ),
    "recycle": Entry(_D + "recycle", "RecycleDrafter", "the model's latest top tokens after each token, no weights"),
    "plain": Entry(_D + "plain", "Plain", "drafts nothing; to use compile=True alone"),
    "jacobi": Entry(_D + "jacobi", "JacobiDrafter", "Jacobi window, no weights; for images"),
    "eagle": Entry(_D + "eagle", "EagleDrafter", "EAGLE-2-style feature drafter; reads EAGLE, EAGLE-3", trained=True),
    "heads": Entry(_D + "heads", "HeadsDrafter", "for pictures: heads that fill a Jacobi window", trained=True),
    "block": Entry(_D + "dflash", "BlockDrafter", "a block in one pass; reads DFlash, DSpark, DFlash2", trained=True),
    "vispec": Entry(_D + "vispec", "ViSpecDrafter", "summaries of images, and a global image vector", trained=True),
    "msd": Entry(_D + "msd", "MsdDrafter", "images as their embeddings", trained=True),
    "flash": Entry(_D + "flash_vlm", "FlashDrafter", "images as latents, several tokens a pass", trained=True),
    "specvlm": Entry(_D + "specvlm", "SpecVlmDrafter", "image tokens compressed as a gate decides", trained=True),
    "model": Entry(_OF_MODELS + "draft_model", "ModelDrafter", "a smaller model: draft=…", from_model=True),
    "assistant": Entry(_OF_MODELS + "assistant", "AssistantDrafter", "Gemma-4's assistants: draft=…", from_model=True),
    "mtp": Entry(_OF_MODELS + "mtp", "MtpDrafter", "the heads in the target's own checkpoint", from_model=True),
}

# text drafters without weights, for any model: the demo offers them, and tests compare them with stock's tokens
OF_TEXT = [n for n, e in DRAFTERS.items() if not (e.trained or e.from_model or n in ("plain", "jacobi"))]
USUAL = "suffix"  # the default for text if the model ships with no drafter

# Name of a model in lower case without its owner → a drafter published for it on the hub. It is suggested if the model
# ships with no drafter; it is never downloaded without the user's request.
PUBLISHED: dict[str, str] = {
    **{
        name.lower(): f"JLKang/ViSpec-{name}"
        for name in (
            "Qwen2.5-VL-3B-Instruct",
            "Qwen2.5-VL-7B-Instruct",
            "llava-v1.6-vicuna-7b-hf",
            "llava-v1.6-vicuna-13b-hf",
        )
    },
    "llava-1.5-7b-hf": "lucylyn/MSD-LLaVA1.5-7B",
    "llava-1.5-13b-hf": "lucylyn/MSD-LLaVA1.5-13B",
    "qwen2-vl-7b-instruct": "lucylyn/MSD-Qwen2VL-7B-Instruct",
    **{
        f"qwen3-vl-{size.lower()}-instruct": f"AngelSlim/Qwen3-VL-{size}-Instruct_eagle3"
        for size in ("2B", "4B", "30B-A3B")
    },
    "qwen3-vl-235b-a22b-instruct": "RedHatAI/Qwen3-VL-235B-A22B-Instruct-speculator.eagle3",
    **{
        name.lower(): f"z-lab/{name}-DFlash"
        for name in (
            "Qwen3.5-4B",
            "Qwen3.5-9B",
            "Qwen3.5-27B",
            "Qwen3.5-35B-A3B",
            "Qwen3.5-122B-A10B",
            "Qwen3.6-27B",
            "Qwen3.6-35B-A3B",
            "gemma-4-26B-A4B-it",
            "gemma-4-31B-it",
        )
    },
}


def drafters() -> dict[str, str]:
    return {name: entry.about for name, entry in DRAFTERS.items()}


def drafter_class(name: str) -> Any:
    """The class registered under a name. Raises ValueError: an unknown name; the message lists the known ones."""
    if name not in DRAFTERS:
        raise ValueError(f"unknown drafter {name!r}; choose from {', '.join(DRAFTERS)}")
    return getattr(importlib.import_module(DRAFTERS[name].module), DRAFTERS[name].cls)


def name_of(drafter: object) -> str:
    """The name of a drafter: its attribute `method`, or the name that its class is registered under."""
    cls = type(drafter)
    names = (name for name, entry in DRAFTERS.items() if (entry.module, entry.cls) == (cls.__module__, cls.__name__))
    return getattr(drafter, "method", None) or next(names, cls.__name__)


RULES: dict[str, Callable[..., Rule]] = {  # rules with a parameter `codebook` compare tokens by their codes
    "exact": lambda: rules.exact, "lantern": rules.lantern, "scaled": rules.scaled, "typical": rules.typical,
    "gsd": rules.gsd, "grouped": rules.grouped, "pooled": rules.pooled,
}  # fmt: skip


def resolve_rule(
    spec: str | Rule, codebook: Tensor | None = None, budget: float | None = None, embeddings: Tensor | None = None
) -> Rule:
    """A rule from its name and parameters, such as "exact" or "lantern(k=10, lam=2.0)"; a Rule is returned as it is.

    Args:
        spec: parameters are given by name, as numbers or quoted strings.
        codebook: [V, c], the target's codes; on the device where the rule will run.
        budget: the most that a row may cost in total variation; None: no limit.
        embeddings: [V, H], the target's table of input embeddings.

    Raises:
        ValueError: an unknown rule or parameter, a value out of range, no codebook where one is needed.
    """
    if not isinstance(spec, str | Rule):
        raise ValueError(f"a rule must be a Rule, or its name and parameters as text; got {spec!r}")
    rule = spec if isinstance(spec, Rule) else _built(spec, {"codebook": codebook, "embeddings": embeddings})
    limited = rule if budget is None else replace(rule, budget=budget)
    return rule if rule.lossless else limited


def check_rule(spec: str) -> None:
    """Check the form and the name of a rule, before there is a model with a codebook.

    Raises ValueError: an unknown rule, or text that has another form.
    """
    name, _ = _parsed(spec)
    if name not in RULES:
        raise ValueError(f"unknown rule {name!r}; choose from {', '.join(RULES)}")


def _built(spec: str, tables: dict[str, Tensor | None]) -> Rule:
    check_rule(spec)
    name, given = _parsed(spec)
    allowed = dict(inspect.signature(RULES[name]).parameters)
    coded = {table: allowed.pop(table) for table in tables if table in allowed}
    missing = [key for key, p in allowed.items() if p.default is p.empty and key not in given]
    wrong = missing or sorted(set(given) - set(allowed))
    if wrong:
        what = "needs" if missing else "has no parameter"
        raise ValueError(f"{name} {what} {wrong[0]}; its parameters are {', '.join(allowed) or 'none'}; got {spec!r}")
    if any(p.default is p.empty and tables[table] is None for table, p in coded.items()):
        raise ValueError(
            f"a codebook [V, c] is needed: {name} compares tokens by their codes, and this target has none; "
            "choose exact, scaled, or gsd without a distance"
        )
    return RULES[name](**{table: tables[table] for table in coded}, **given)


def _parsed(spec: str) -> tuple[str, dict[str, int | float | str | None]]:
    """Name and parameters of "name" or "name(key=number, key='word', …)"."""
    try:
        call = ast.parse(spec.strip(), mode="eval").body
        if isinstance(call, ast.Name):
            return call.id, {}
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and not call.args:
            given = {each.arg: ast.literal_eval(each.value) for each in call.keywords if each.arg}
            plain = (int, float, str, type(None))
            if len(given) == len(call.keywords) and all(type(value) in plain for value in given.values()):
                return call.func.id, given
    except (SyntaxError, ValueError):
        pass
    raise ValueError(f"a rule must have the form exact or lantern(k=10, lam=2.0); got {spec!r}")
