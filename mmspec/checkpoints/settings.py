"""Conversion between a drafter's config and its config.json in any layout, and the check for unsupported features."""

from __future__ import annotations

import warnings
from reprlib import repr as briefly

from mmspec import __version__
from mmspec.checkpoints import rotary, values
from mmspec.checkpoints.files import Json, Settings
from mmspec.checkpoints.layout import Published
from mmspec.checkpoints.layouts import layout_named
from mmspec.checkpoints.values import part
from mmspec.drafters.trained import FileConfig
from mmspec.registry import DRAFTERS

# Values that no published layout contains; mmspec's writer adds them under its own key.
RECORDED = ("target", "target_revision", "depth", "width", "size", "tree", "draws", "media")


def opened(config: Json) -> Settings:
    """config.json with the nested settings of speculators' decoder layer merged into the top level.

    NeMo's number of layers has its own key, since its config is a copy of the target's.
    """
    flat = {**config, **part(config, "transformer_layer_config")}
    return {**flat, "num_hidden_layers": flat.get("draft_num_hidden_layers", flat.get("num_hidden_layers"))}


def method_of(name: str, config: Json) -> str:
    """The method of a drafter in a layout.

    Raises:
        ValueError: an unknown method.
    """
    method = layout_named(name).method or part(config, "mmspec").get("method", "eagle")
    methods = [name for name, entry in DRAFTERS.items() if entry.trained]
    if method not in methods:
        raise ValueError(
            f"config.json names the method {briefly(method)}, which this version does not have; it has {methods}"
        )
    return str(method)


def refuse(name: str, files: Published) -> None:
    """Raise a ValueError with all features of a drafter in a layout that mmspec's network does not support."""
    layout = layout_named(name)
    if needs := layout.needs(layout, files):
        raise ValueError(f"this drafter needs {'; '.join(needs)}. mmspec's network does not support that")
    if "mrope_section" in rotary.scaling(files.flat) and not layout.one_axis and not layout.own_head:
        warnings.warn(
            "this drafter's config.json asks for M-RoPE; mmspec counts a drafter's positions in one dimension. The "
            "output stays exact, but fewer drafted tokens may be accepted after an image",
            stacklevel=3,
        )


def read(name: str, files: Published, kind: type[values.Made]) -> values.Made:
    """The config of a drafter in a layout; where config.json and the tensors disagree, the tensors count.

    Args:
        kind: the config class of its method.

    Raises:
        ValueError: a setting that is missing or invalid.
    """
    layout = layout_named(name)
    settings_read = {**layout.usual, **layout.fixed, **layout.read(layout, files)}
    verifier = part(part(files.config, "speculators_config"), "verifier").get("name_or_path")
    recorded, names = {"target": verifier, **part(files.config, "mmspec")}, kind.usual()
    added = {key: recorded[key] for key in RECORDED if recorded.get(key) is not None and key in names}
    return values.made(kind, {**settings_read, **added})


def describe(name: str, method: str, config: FileConfig) -> Settings:
    """config.json of a drafter in a layout.

    Raises:
        ValueError: the layout cannot represent this drafter; the message says why.
    """
    layout, flat = layout_named(name), config.to_dict()
    marker = {"layout": name, "method": method, "version": __version__}
    wrong = [f"its method is {method!r}, not {layout.method!r}"] if layout.method not in ("", method) else []
    fixed = {key: want for key, want in layout.fixed.items() if key in flat}
    wrong += [f"{key} is {flat[key]!r}, not {want!r}" for key, want in fixed.items() if flat[key] != want]
    rows, read = flat.get("draft_vocab", 0), flat.get("features", ())
    if layout.own_head is not None and layout.own_head is not (rows > 0):
        wrong.append(f"it has {'an' if rows else 'no'} output head of its own")
    if layout.own_head and len(read) < 2:
        wrong.append(f"it reads {len(read)} layer of its target, not several")
    if wrong:
        raise ValueError(
            f"the layout {name!r} ({layout.about}) cannot hold this drafter: {'; '.join(wrong)}. Use layout 'mmspec'"
        )
    marker |= {key: flat[key] for key in RECORDED if layout.keys and key in flat}
    return {"mmspec": marker, **layout.write(config)}
