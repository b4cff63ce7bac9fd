"""Rotary positions in config.json, in the words of transformers: `rope_theta` beside `rope_scaling`, or all in one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from reprlib import repr as briefly

from mmspec.checkpoints.files import Json, Settings
from mmspec.drafters.blocks import ROPE_KINDS, Rope

_SAID = {"rope_factor": "factor", "rope_trained": "original_max_position_embeddings"}
_BOUNDS = {"llama3": ("low_freq_factor", "high_freq_factor", 1.0, 4.0), "yarn": ("beta_slow", "beta_fast", 1.0, 32.0)}


def scaling(flat: Json) -> Json:
    """The object that says how positions are scaled, empty where there is none.

    Raises:
        ValueError: it is no object.
    """
    for key in ("rope_scaling", "rope_parameters"):
        part = flat.get(key)
        if part is not None and not isinstance(part, Mapping):
            raise ValueError(f"{key} in config.json must be an object; it is {briefly(part)}")
        if part:
            return part
    return {}


def kind_of(said: Json) -> object:
    """How frequencies are scaled; M-RoPE, which only says what they turn with, scales nothing."""
    kind = said.get("rope_type") or said.get("type") or "default"
    return "default" if kind == "mrope" else kind


def read(flat: Json, axes: bool) -> Settings:
    """Values of a Rope but its theta, of a config.json laid open.

    Args:
        axes: whether the network counts on three axes where config.json has M-RoPE sections.
    """
    said = scaling(flat)
    kind = kind_of(said)
    values: Settings = {"rope_kind": kind} if kind in ROPE_KINDS and kind != "default" else {}
    share = said.get("partial_rotary_factor", flat.get("partial_rotary_factor"))
    if share not in (None, 1):
        values["rope_share"] = share
    if axes and "mrope_section" in said:
        values["mrope"] = said["mrope_section"]
        if isinstance(values["mrope"], list):
            values["mrope"] = tuple(values["mrope"])
        values["mrope_interleaved"] = bool(said.get("mrope_interleaved"))
    if not values.get("rope_kind"):
        return values
    values |= {ours: said[theirs] for ours, theirs in _SAID.items() if said.get(theirs) is not None}
    if kind in _BOUNDS:
        low, high, *usual = _BOUNDS[kind]
        values |= {"rope_low": said.get(low) or usual[0], "rope_high": said.get(high) or usual[1]}
        values.setdefault("rope_trained", flat.get("max_position_embeddings") or 0)
    if kind == "yarn":
        values |= {"rope_gain": _gain(said), "rope_truncate": bool(said.get("truncate", True))}
    return values


def _gain(said: Json) -> float:
    """YaRN's factor of cosine and sine, as transformers makes it where the file says none."""
    factor, given = said.get("factor", 1.0), said.get("attention_factor")
    if given is not None or not isinstance(factor, int | float):
        return given or 1.0
    scales = [said.get(name) for name in ("mscale", "mscale_all_dim")]

    def gain(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if all(isinstance(scale, int | float) and scale for scale in scales):
        return gain(scales[0]) / gain(scales[1])  # type: ignore[arg-type]
    return gain(1.0)


def describe(c: Rope) -> Settings:
    """`rope_theta`, `rope_scaling` and `partial_rotary_factor` of a drafter's config.

    Raises:
        ValueError: positions on a grid, which only our own layout has a place for.
    """
    if c.rope != "1d":
        raise ValueError("positions on a grid have no place in this layout. Use layout 'mmspec'")
    said: Settings = {}
    if c.rope_kind != "default":
        said = {"rope_type": c.rope_kind, "factor": c.rope_factor}
        if c.rope_kind in _BOUNDS:
            low, high, *_ = _BOUNDS[c.rope_kind]
            said |= {low: c.rope_low, high: c.rope_high, "original_max_position_embeddings": c.rope_trained}
        if c.rope_kind == "yarn":
            said |= {"attention_factor": c.rope_gain, "truncate": c.rope_truncate}
    if c.mrope:
        said = {"rope_type": "default", **said, "mrope_section": list(c.mrope)}
        said |= {"mrope_interleaved": True} if c.mrope_interleaved else {}
    part = {"partial_rotary_factor": c.rope_share} if c.rope_share != 1 else {}
    return {"rope_theta": c.rope_theta, "rope_scaling": said or None, **part}
