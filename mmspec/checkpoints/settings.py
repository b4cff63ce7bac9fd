"""What config.json and the shapes of the tensors say of a drafter, for each layout; the tensors are believed first."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, replace
from functools import partial
from reprlib import repr as briefly
from typing import Any, TypeGuard

from mmspec.checkpoints import dflash, rotary
from mmspec.checkpoints.layouts import Layout, layout_named
from mmspec.config import option_names
from mmspec.drafters.block_config import BlockConfig
from mmspec.drafters.blocks import ROPE_KINDS
from mmspec.drafters.eagle import EagleConfig
from mmspec.drafters.shape import USUAL
from mmspec.registry import DRAFTERS
from mmspec.types import FINAL

Shape = tuple[int, ...]
LARGEST, MANY = 2**24, 64  # of any number in config.json; entries of a list there
MOST = {"tokens": 128}  # of what is done one after the other
# What no published layout has a place for: our own writer notes it beside.
RECORDED = ("target", "target_revision", "depth", "width", "size", "tree", "draws", "media")
_SWITCHES = {  # setting: the tensor whose presence says it, in the layouts that may lack that one
    "fc_bias": "fc.bias",
    "qkv_bias": "block.qkv.bias",
    "input_norm": "input_norm.weight",
    "out_norm": "out_norm.weight",
    "fc_norm": "fc_norm.0.weight",
    "norm_before_fc": "fused_norm.weight",
    "parallel": "mask_hidden",
}

_NEEDS = {  # setting: (values that our network computes, what any other means)
    "hidden_act": ((None, "silu"), "another activation than silu"),
    "embed_requires_grad": ((None, False), "embeddings of its own, which drift from the target's"),
}
_LATER = {  # the same of settings that came with EAGLE-3 or after it, for drafters that continue the final feature
    "num_hidden_layers": ((None, 1), "more than one decoder layer"),
    "norm_before_fc": ((None, False), "a norm of the target's features before fc"),
    "fc_norm": ((None, False), "a norm of each of the target's features before fc"),
    "norm_output": ((None, False), "output features that are normed before they are fed back"),
}
_KEYS_NEED = {"_proj.weight_scale": "quantised weights"}  # a part of a key: what it means
_LATER_KEYS = {
    "layers.1.": "more than one decoder layer",
    "fc_norm.": "a norm of each of the target's features before fc",
}
_LANTERN = ("caption_dim", "input_type")  # in config.json
_QWEN_KEYS = {  # which block drafters have
    "q_norm.weight": "norms of the queries and keys",
    "o_proj.bias": "a bias of the attention's output projection",
}


def read(
    name: str, config: Mapping[str, Any], shapes: Mapping[str, Shape], target: Callable[[str], int | None],
    kind: type[Any],
) -> Any:  # fmt: skip
    """The settings of a drafter.

    Args:
        name: its layout.
        config: config.json as it is.
        shapes: of the tensors in the file.
        target: gives the number of decoder "layers" of the target, or of tokens in its "vocab"; None where nobody
            knows. Asked only if needed.
        kind: of its method.

    Raises:
        ValueError: a setting that is missing or makes no sense.
    """
    if name == "mmspec":
        return _own(config, kind)
    layout, flat = layout_named(name), _flat(config)
    found = (
        _block(name, flat, shapes, target) if layout.method == "block" else _eagle(layout, config, shapes, target, kind)
    )
    verifier = _part(_part(config, "speculators_config"), "verifier").get("name_or_path")
    recorded = {"target": verifier, **_part(config, "mmspec")}
    said = {key: recorded[key] for key in RECORDED if recorded.get(key) is not None and key in found.usual()}
    return made(type(found), {**found.to_dict(), **said})


def _eagle(
    layout: Layout, config: Mapping[str, Any], shapes: Mapping[str, Shape], target: Callable[[str], int | None],
    kind: type[EagleConfig],
) -> EagleConfig:  # fmt: skip
    """Of a drafter that continues features."""
    flat = _flat(config)
    values = {**_switches(layout, flat, shapes), **_layer(flat, shapes, layout.layer)}
    values |= rotary.read(flat, layout.own_head is True)
    if layout.own_head:  # a tensor that config.json tells of and the file lacks is missing
        values |= {name: values.get(name) or bool(flat.get(name)) for name in ("fc_norm", "norm_before_fc")}
        values |= {"layers": layers(config), "norm_output": bool(flat.get("norm_output"))}
        values["parallel"] = values.get("parallel") or flat.get("speculators_model_type") == "peagle"
    if values.get("parallel"):
        values["mask_token"] = flat.get("mask_token_id", flat.get("ptd_token_id"))
    return _features(made(kind, values), config, shapes, partial(target, "layers"))


def _block(
    name: str, flat: Mapping[str, Any], shapes: Mapping[str, Shape], target: Callable[[str], int | None]
) -> BlockConfig:
    """Of a drafter that denoises a block. Muse-Glimmer's files do not say how many tokens their target has."""
    if flat.get("vocab_size") is None and "t2d" not in shapes:
        flat = {**flat, "vocab_size": target("vocab")}
    fc = "encoder.fc.weight" if name == "muse-glimmer" else "fc.weight"
    values = dflash.settings(name, flat, shapes, _layer(flat, shapes, "layers.0", fc))
    return made(BlockConfig, values)


def layers(config: Mapping[str, Any]) -> int:
    """How many layers config.json gives its drafter.

    Raises:
        ValueError: a number that no drafter has.
    """
    count = _flat(config).get("num_hidden_layers")
    if count is not None and not (_is_count(count) and count <= MANY):
        raise ValueError(
            f"num_hidden_layers in config.json must be a whole number from 1 to {MANY}; it is {briefly(count)}"
        )
    return count or 1


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json with the object in which speculators keeps the decoder layer's settings laid open.

    NeMo's number of layers stands beside that of the target, from whose config its own is copied.
    """
    flat = {**config, **_part(config, "transformer_layer_config")}
    return {**flat, "num_hidden_layers": flat.get("draft_num_hidden_layers", flat.get("num_hidden_layers"))}


def _part(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """An object inside config.json, empty where it is absent."""
    part = config.get(key)
    if part is not None and not isinstance(part, Mapping):
        raise ValueError(f"{key} in config.json must be an object; it is {briefly(part)}")
    return part or {}


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= LARGEST


def method_of(name: str, config: Mapping[str, Any]) -> str:
    """The method of a drafter in a layout.

    Raises:
        ValueError: one that this version does not have.
    """
    method = layout_named(name).method or _part(config, "mmspec").get("method", "eagle")
    known = [name for name, entry in DRAFTERS.items() if entry.trained]
    if method not in known:
        raise ValueError(
            f"config.json names the method {briefly(method)}, which this version does not have; it has {known}"
        )
    return str(method)


def _own(config: Mapping[str, Any], kind: type[EagleConfig]) -> EagleConfig:
    shapes = [f.name for f in fields(kind) if f.default is MISSING]
    wrong = [f"{name} = {briefly(config.get(name))}" for name in shapes if not _is_count(config.get(name))]
    if wrong:
        raise ValueError(f"config.json must give whole numbers from 1 to {LARGEST}; it gives {', '.join(wrong)}")
    return made(kind, {key: value for key, value in config.items() if key != "mmspec"})


def made(kind: type[Any], values: Mapping[str, Any]) -> Any:
    """A config of such values.

    Raises:
        ValueError: values of another kind than its own, or out of bounds.
    """
    _check_kinds(kind, values)
    try:
        return kind.of(dict(values))
    except ValueError as error:
        raise ValueError(f"config.json: {error}") from error


def _check_kinds(made: type[Any], values: Mapping[str, Any]) -> None:
    """ValueError for values of another kind than those of a config, or out of bounds."""
    own = {name for name, value in made.usual().items() if name not in option_names(USUAL)}  # which says its own
    usual = {name: 0 if value is MISSING else value for name, value in made.usual().items() if name in own}
    allowed = {name: _allowed(name, usual[name]) for name in usual}
    wrong = [
        f"{name} is {briefly(value)}, expected {allowed[name]}"
        for name, value in values.items()
        if name in usual and not _is_allowed(name, value, usual[name])
    ]
    if wrong:
        raise ValueError(f"config.json: {'; '.join(wrong)}. Correct it, or fetch the drafter again")


def _is_allowed(name: str, value: Any, usual: Any) -> bool:
    if isinstance(usual, tuple):
        return (
            isinstance(value, list | tuple)
            and (name == "features") <= len(value) <= MANY
            and all(_like(one, usual[0] if usual else 0) for one in value)
            and all(type(one) is not int or one >= _least(name) for one in value)
        )
    if type(usual) is int:
        return _like(value, usual) and 0 <= value <= MOST.get(name, LARGEST)
    return _like(value, usual)


def _least(name: str) -> int:
    """The smallest whole number in a list: a layer's number, or FINAL."""
    return FINAL if name == "features" else 0


def _like(value: Any, usual: Any) -> bool:
    if type(usual) is float:
        return type(value) in (int, float) and 0 < value < LARGEST**2
    return type(value) is type(usual) and (type(value) is not int or abs(value) <= LARGEST)


def _allowed(name: str, usual: Any) -> str:
    kinds = {bool: "true or false", float: "a number above 0", str: "a text"}
    if isinstance(usual, tuple):
        whole, some = isinstance((*usual, 0)[0], int), "1 to" if name == "features" else "at most"
        return f"a list of {some} {MANY} " + (f"whole numbers from {_least(name)}" if whole else "texts")
    return kinds.get(type(usual), f"a whole number from 0 to {MOST.get(name, LARGEST)}")


def refuse(name: str, config: Mapping[str, Any], shapes: Mapping[str, Shape]) -> None:
    """Raise a ValueError with every reason for which our network cannot be that of a drafter in a layout."""
    flat, layout = _flat(config), layout_named(name)
    denoises = layout.method == "block"
    kind, fine = (
        config.get("speculators_model_type"),
        ("dflash", "dspark", "dflash2") if denoises else ("eagle3", "peagle"),
    )
    needs = [] if kind in (None, *fine) else [f"the method {kind!r} of speculators (this layout has {', '.join(fine)})"]
    later = not denoises and not layout.own_head
    wanted = {**_NEEDS, **(_LATER if later else {})}
    needs += [f"{why} ({k} = {flat[k]!r})" for k, (fine, why) in wanted.items() if flat.get(k) not in fine]
    keys = {**_KEYS_NEED, **({} if denoises else _QWEN_KEYS), **(_LATER_KEYS if later else {})}
    needs += [f"{why} ({part}*)" for part, why in keys.items() if any(part in key for key in shapes)]
    scaling = rotary.scaling(flat)
    rope = rotary.kind_of(scaling)
    if rope not in ROPE_KINDS:
        needs.append(f"rotary positions scaled by {rope!r}")
    if name == "eagle" and (lantern := [key for key in _LANTERN if key in config]):
        needs.append(
            f"the network of LANTERN's drafters for LlamaGen ({', '.join(lantern)}): positions by row and column in "
            "interleaved pairs, and its own embeddings, one and the same before the picture"
        )
    kinds = flat.get("layer_types")
    if denoises:
        needs += dflash.needs(flat)
    elif isinstance(kinds, list) and "sliding_attention" in kinds:
        needs.append("attention within a sliding window")
    if layout.layer == "midlayer" and layers(config) > 1:
        needs.append(f"more than one layer under the name midlayer (num_hidden_layers = {layers(config)})")
    if needs:
        raise ValueError(f"this drafter needs {'; '.join(needs)}. mmspec's network has not that, so it is refused")
    if "mrope_section" in scaling and not layout.one_axis and not layout.own_head:
        warnings.warn(
            "this drafter's config.json asks for M-RoPE; mmspec counts a drafter's positions in one dimension. What is "
            "generated stays exact, but fewer drafted tokens may be accepted after an image",
            stacklevel=3,
        )


def _layer(flat: Mapping[str, Any], shapes: Mapping[str, Shape], layer: str, fc: str = "fc.weight") -> dict[str, Any]:
    """The fields that a Llama-like config.json and the decoder layer's tensors give."""
    matrices = [fc, *(f"{layer}.{x}_proj.weight" for x in ("self_attn.q", "self_attn.k", "mlp.gate"))]
    wrong = [f"{key} has the shape {list(shapes[key])}" for key in matrices if len(shapes[key]) != 2]
    if wrong:
        raise ValueError(f"{', '.join(wrong)}; expected matrices")
    heads = flat.get("num_attention_heads")
    if not _is_count(heads):
        raise ValueError(f"config.json must give num_attention_heads, a whole number ≥ 1; it gives {briefly(heads)}")
    q, k = (shapes[f"{layer}.self_attn.{x}_proj.weight"][0] for x in "qk")
    head_dim = flat.get("head_dim") or q // heads
    if not _is_count(head_dim):
        raise ValueError(
            f"head_dim in config.json must be a whole number from 1 to {LARGEST}; it is {briefly(head_dim)}"
        )
    if q != heads * head_dim or k % head_dim or heads % max(1, k // head_dim):
        raise ValueError(
            f"{layer}.self_attn.q_proj.weight has {q} rows and k_proj.weight {k}; with num_attention_heads {heads} and "
            f"head_dim {head_dim} expected {heads * head_dim} and a part of that in whole heads"
        )
    hidden = shapes[fc][0]
    theta = flat.get("rope_theta") or _part(flat, "rope_parameters").get("rope_theta")
    found = {
        "hidden": hidden,
        "intermediate": shapes[f"{layer}.mlp.gate_proj.weight"][0],
        "heads": heads,
        "kv_heads": k // head_dim,
        "head_dim": 0 if head_dim * heads == hidden else head_dim,
        "vocab": _vocab(flat, shapes),
        "rope_theta": theta or EagleConfig.rope_theta,
        "norm_eps": flat.get("rms_norm_eps") or EagleConfig.norm_eps,
    }
    _check_kinds(EagleConfig, found)
    return found


def _vocab(flat: Mapping[str, Any], shapes: Mapping[str, Shape]) -> int:
    for key in ("t2d", "embed_tokens.weight"):
        if key in shapes:
            return shapes[key][0]
    size = flat.get("vocab_size")
    if not _is_count(size):
        raise ValueError(
            f"config.json must give vocab_size, as no tensor gives the vocabulary; it gives {briefly(size)}"
        )
    return size


def _switches(layout: Layout, flat: Mapping[str, Any], shapes: Mapping[str, Shape]) -> dict[str, Any]:
    """What the layout fixes, what config.json says in other words, and what the presence and shapes of tensors say."""
    renamed = {ours: bool(flat.get(theirs)) for ours, theirs in layout.renamed.items()}
    there = {key: any(name in shapes for name in layout.theirs(tensor)) for key, tensor in _SWITCHES.items()}
    may = {key: there[key] for key, tensor in _SWITCHES.items() if tensor in layout.optional}
    sizes = {ours: (*shapes[key], 0)[axis] for ours, (key, axis) in layout.sizes.items()}
    return {**layout.usual, **layout.fixed, **renamed, **may, **sizes}


def _features(
    found: EagleConfig, config: Mapping[str, Any], shapes: Mapping[str, Shape], layers: Callable[[], int | None]
) -> EagleConfig:
    """With the layers that EAGLE-3 reads: listed, or by default those entering 2, L//2 and L−3; and their width."""
    wide = shapes["fc.weight"][1]
    if found.parallel_norm:
        found = replace(found, features=_listed(config) or _default(layers()))
        if len(found.features) < 2:
            raise ValueError(f"an EAGLE-3 drafter reads two layers or more of its target; it lists {found.features}")
        wide //= len(found.features)
    else:
        wide -= found.hidden
    return found if wide == found.hidden else replace(found, target_hidden=max(wide, 0))


def _listed(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Layers whose input is read. Files in the wild count in two ways: see sgl-project/sglang#25454."""
    listed = config.get("eagle_aux_hidden_state_layer_ids")
    nested = _part(config, "eagle_config").get("eagle_aux_hidden_state_layer_ids")
    for said in filter(None, (listed, nested)):
        if not isinstance(said, list) or len(said) > MANY or not all(_like(layer, 0) and layer >= 0 for layer in said):
            name = "eagle_aux_hidden_state_layer_ids"
            raise ValueError(f"{name} in config.json must list up to {MANY} whole numbers ≥ 0; it is {briefly(said)}")
    if not listed and nested:
        listed = [i + 1 for i in nested] if nested[0] == 1 else nested  # 1 first: layers whose output is read
    return tuple(listed or ())


def _default(layers: int | None) -> tuple[int, ...]:
    if layers is None:
        raise ValueError(
            "the file does not say which layers of the target it reads, and that depends on how many the target has; "
            "pass target=, the model or its name or folder (`mmspec convert`: --target)"
        )
    if layers < 4:
        raise ValueError(
            f"EAGLE-3 reads layers 2, L//2 and L−3 of its target; a target of {layers} layers is too small"
        )
    return 2, layers // 2, layers - 3
