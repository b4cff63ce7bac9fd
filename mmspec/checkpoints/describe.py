"""What a folder says of its drafter beside the weights: config.json in each layout, and the card."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from mmspec import __version__
from mmspec.checkpoints import dflash, rotary
from mmspec.checkpoints.layouts import layout_named
from mmspec.checkpoints.settings import RECORDED
from mmspec.drafters.eagle import EagleConfig
from mmspec.drafters.vispec import ViSpecConfig

_NO_LIMIT = 131072  # max_position_embeddings: rotary tables are made as needed, so that only the target sets a limit
_CARD = """---
{base}library_name: mmspec
tags:
- speculative-decoding
- {method}
---

# {method} drafter for {target}

Drafts tokens for {target}{revision}; the target decides, so what is generated is what the target alone would generate.

```python
import mmspec

mmspec.enable(model, drafter="this folder or repository")
model.generate(...)  # as before
```

{drafts}

Layout of the files: {layout}. {shapes}
"""


_TREE = """| depth | width | size |
|---|---|---|
| {c.depth} | {c.width} | {c.size} |

These are the recommended depth (longest drafted path), width (branches per node) and size (nodes sent to the target at
once), used where `enable` is told nothing else."""
_WINDOW = "It recommends a window of {c.window} positions, used where `enable` is told nothing else."


def describe(name: str, method: str, config: EagleConfig) -> dict[str, Any]:
    """config.json of a drafter in a layout.

    Raises:
        ValueError: the layout has no place for this drafter; the message says why.
    """
    layout, values = layout_named(name), config.to_dict()
    marker = {"layout": name, "method": method, "version": __version__}
    if name == "mmspec":
        return {"mmspec": marker, **values}
    wrong = [f"its method is {method!r}, not {layout.method!r}"] if method != layout.method else []
    fixed = {key: want for key, want in layout.fixed.items() if key in values}
    wrong += [f"{key} is {values[key]!r}, not {want!r}" for key, want in fixed.items() if values[key] != want]
    if layout.own_head is not None and layout.own_head is not (config.draft_vocab > 0):
        wrong.append(f"it has {'an' if config.draft_vocab else 'no'} output head of its own")
    if layout.own_head and len(config.features) < 2:
        wrong.append(f"it reads {len(config.features)} layer of its target, not several")
    if wrong:
        raise ValueError(
            f"the layout {name!r} ({layout.about}) cannot hold this drafter: {'; '.join(wrong)}. Use layout 'mmspec'"
        )
    marker |= {key: values[key] for key in RECORDED if key in values}
    return {**_WRITERS[name](config), "mmspec": marker}


def _llama(c: EagleConfig) -> dict[str, Any]:
    return {
        "model_type": "llama", "hidden_act": "silu", "num_hidden_layers": c.layers, "vocab_size": c.vocab,
        "hidden_size": c.hidden, "intermediate_size": c.intermediate, "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads, "head_dim": c.head_dim or c.hidden // c.heads, "rms_norm_eps": c.norm_eps,
        **rotary.describe(c), "max_position_embeddings": _NO_LIMIT,
        "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False,
    }  # fmt: skip


def _eagle(c: EagleConfig) -> dict[str, Any]:
    return {"architectures": ["LlamaForCausalLM"], **_llama(c), "bias": c.fc_bias, "qkv_bias": c.qkv_bias}


def _eagle3(c: EagleConfig) -> dict[str, Any]:
    own = {"target_hidden_size": c.target_hidden} if c.target_hidden else {}
    return {
        "architectures": ["LlamaForCausalLMEagle3"], **_llama(c), "qkv_bias": c.qkv_bias, **own, **_normed(c),
        "draft_vocab_size": c.draft_vocab, "eagle_aux_hidden_state_layer_ids": list(c.features),
    }  # fmt: skip


def _normed(c: EagleConfig) -> dict[str, Any]:
    """What came after EAGLE-3, where a drafter has it."""
    names = ("fc_norm", "norm_before_fc", "norm_output")
    return {name: True for name in names if getattr(c, name)}


def _speculators(c: EagleConfig) -> dict[str, Any]:
    greedy = {
        "proposal_type": "greedy",
        "speculative_tokens": c.shape.depth,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "peagle" if c.parallel else "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [greedy],
            "verifier": {"name_or_path": c.target or None, "architectures": []},
        },
        "transformer_layer_config": _llama(c),
        "draft_vocab_size": c.draft_vocab,
        "target_hidden_size": c.target_hidden or None,
        "eagle_aux_hidden_state_layer_ids": list(c.features),
        "norm_before_residual": c.norm_residual,
        "norm_before_fc": False,
        **_normed(c),
        **({"mask_token_id": c.mask_token} if c.parallel else {}),
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
    }


def _msd(c: EagleConfig) -> dict[str, Any]:
    """The model type chooses the authors' layer: Qwen2-VL's has biases and an input norm, LLaVA's has neither."""
    if c.input_norm is not c.qkv_bias:
        raise ValueError("the layout 'msd' has input_norm and qkv_bias both or neither. Use layout 'mmspec'")
    if not c.input_norm:
        return {**_eagle(c), "architectures": ["LlavaLlamaForCausalLM"], "model_type": "llava"}
    half = (c.head_dim or c.hidden // c.heads) // 2
    sections = [half // 4, (half - half // 4) // 2, half - half // 4 - (half - half // 4) // 2]
    scaling = {"type": "mrope", "mrope_section": sections}  # which turn alike: all three positions are the same
    qwen = {"architectures": ["Qwen2VLForConditionalGeneration"], "model_type": "qwen2_vl", "rope_scaling": scaling}
    return {**_eagle(c), **qwen}


def _nemo(architecture: str, c: EagleConfig) -> dict[str, Any]:
    queries = {"vispec_num_query_tokens": c.num_q} if isinstance(c, ViSpecConfig) else {}
    return {
        "architectures": [architecture], **_llama(c), "draft_num_hidden_layers": 1, **queries,
        "fc_bias": c.fc_bias, "qkv_bias": c.qkv_bias,
        "draft_skip_first_input_norm": not c.input_norm, "draft_apply_final_norm": c.out_norm,
    }  # fmt: skip


_WRITERS: dict[str, Callable[[Any], dict[str, Any]]] = {
    **{
        name: partial(dflash.describe, name)
        for name in ("speculators-block", "muse-glimmer", "hunyuan-dflash", "dflash")
    },
    "speculators": _speculators,
    "vispec": _eagle,
    "nemo-vispec": partial(_nemo, "VispecDraftModel"),
    "nemo-msd": partial(_nemo, "MultimodalEagleDraftModel"),
    "nemo-eagle": partial(_nemo, "LlamaEagleDraftModel"),
    "eagle3": _eagle3,
    "msd": _msd,
    "eagle": _eagle,
}


def card(name: str, method: str, c: EagleConfig) -> str:
    """README.md of a drafter in a layout."""
    on_hub = re.fullmatch(r"[\w.-]+/[\w.-]+", c.target) is not None and not c.target.startswith(".")
    return _CARD.format(
        base=f"base_model: {json.dumps(c.target)}\n" if on_hub else "",
        method=method,
        target=c.target or "a target that was not recorded",
        revision=f" (revision {c.target_revision})" if c.target_revision else "",
        layout=f"{name} ({layout_named(name).about})",
        shapes=f"Hidden size {c.hidden}, vocabulary {c.vocab}, {getattr(c, 'draft_vocab', 0) or 'no'} rows of an own "
        "output head.",
        drafts=_TREE.format(c=c.shape) if hasattr(c, "shape") else _WINDOW.format(c=c),
    )
