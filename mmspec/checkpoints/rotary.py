"""Rotary positions in config.json, in the format of transformers: `rope_theta` and `rope_scaling`, or combined."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from reprlib import repr as briefly
from typing import Any

from mmspec.checkpoints.files import Json, Settings
from mmspec.drafters.blocks import ROPE_KINDS, Rope

_KEYS = {"rope_factor": "factor", "rope_trained": "original_max_position_embeddings"}
_BOUNDS = {"llama3": ("low_freq_factor", "high_freq_factor", 1.0, 4.0), "yarn": ("beta_slow", "beta_fast", 1.0, 32.0)}


def scaling(flat: Json) -> Json:
    """The object with the scaling of positions, empty if there is none.

    Raises:
        ValueError: it is not an object, or differs between the layers.
    """
    for key in ("rope_scaling", "rope_parameters"):
        part = flat.get(key)
        if part is not None and not isinstance(part, Mapping):
            raise ValueError(f"{key} in config.json must be an object; it is {briefly(part)}")
        if part:
            return _of_all_layers(key, part, flat.get("layer_types"))
    return {}


def _of_all_layers(key: str, part: Json, layer_types: Iterable[str] | None) -> Json:
    """The values for all layers; Gemma-3 and others have an object for each type of layer."""
    typed = {kind: values for kind, values in part.items() if isinstance(values, Mapping)}
    used = [typed.get(kind) for kind in layer_types or typed]
    if not typed:
        return part
    if used[0] is None or any(values != used[0] for values in used):
        raise ValueError(
            f"{key} in config.json has values for each type of layer ({', '.join(typed)}); mmspec's drafters need the "
            "same for all of their layers (layer_types)"
        )
    return used[0]


def theta(flat: Json) -> Any:
    """The base of the frequencies, None if there is none; as in transformers, that beside the scaling comes first."""
    return scaling(flat).get("rope_theta") or flat.get("rope_theta")


def kind_of(rope: Json) -> object:
    """The kind of frequency scaling; M-RoPE only assigns frequencies to axes, and is "default"."""
    kind = rope.get("rope_type") or rope.get("type") or "default"
    return "default" if kind == "mrope" else kind


def read(flat: Json, axes: bool) -> Settings:
    """The values of a Rope, except its theta, from a flat config.json.

    Args:
        axes: whether the network uses three axes if config.json has M-RoPE sections.
    """
    rope = scaling(flat)
    kind = kind_of(rope)
    values: Settings = {"rope_kind": kind} if kind in ROPE_KINDS and kind != "default" else {}
    share = rope.get("partial_rotary_factor", flat.get("partial_rotary_factor"))
    if share not in (None, 1):
        values["rope_share"] = share
    if axes and "mrope_section" in rope:
        values["mrope"] = rope["mrope_section"]
        if isinstance(values["mrope"], list):
            values["mrope"] = tuple(values["mrope"])
        values["mrope_interleaved"] = bool(rope.get("mrope_interleaved"))
    if not values.get("rope_kind"):
        return values
    values |= {ours: rope[theirs] for ours, theirs in _KEYS.items() if rope.get(theirs) is not None}
    if kind in _BOUNDS:
        low, high, *defaults = _BOUNDS[kind]
        values |= {"rope_low": rope.get(low) or defaults[0], "rope_high": rope.get(high) or defaults[1]}
        values.setdefault("rope_trained", flat.get("max_position_embeddings") or 0)
    if kind == "yarn":
        values |= {"rope_gain": _gain(rope), "rope_truncate": bool(rope.get("truncate", True))}
    return values


def _gain(rope: Json) -> float:
    """YaRN's factor of cosine and sine, computed as in transformers if the file has none."""
    factor, given = rope.get("factor", 1.0), rope.get("attention_factor")
    if given is not None or not isinstance(factor, int | float):
        return given or 1.0
    scales = [rope.get(name) for name in ("mscale", "mscale_all_dim")]

    def gain(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if all(isinstance(scale, int | float) and scale for scale in scales):
        return gain(scales[0]) / gain(scales[1])  # type: ignore[arg-type]
    return gain(1.0)


def describe(c: Rope) -> Settings:
    """`rope_theta`, `rope_scaling` and `partial_rotary_factor` of a drafter's config.

    Raises:
        ValueError: positions on a grid, which only mmspec's own layout supports.
    """
    if c.rope != "1d":
        raise ValueError("this layout cannot store positions on a grid. Use layout 'mmspec'")
    rope: Settings = {}
    if c.rope_kind != "default":
        rope = {"rope_type": c.rope_kind, "factor": c.rope_factor}
        if c.rope_kind in _BOUNDS:
            low, high, *_ = _BOUNDS[c.rope_kind]
            rope |= {low: c.rope_low, high: c.rope_high, "original_max_position_embeddings": c.rope_trained}
        if c.rope_kind == "yarn":
            rope |= {"attention_factor": c.rope_gain, "truncate": c.rope_truncate}
    if c.mrope:
        rope = {"rope_type": "default", **rope, "mrope_section": list(c.mrope)}
        rope |= {"mrope_interleaved": True} if c.mrope_interleaved else {}
    part = {"partial_rotary_factor": c.rope_share} if c.rope_share != 1 else {}
    return {"rope_theta": c.rope_theta, "rope_scaling": rope or None, **part}
