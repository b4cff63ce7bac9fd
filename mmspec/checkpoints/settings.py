"""config.json of a drafter in any layout: to a config and back, and what our network cannot be."""

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

# What no published layout has a place for: our own writer notes it beside.
RECORDED = ("target", "target_revision", "depth", "width", "size", "tree", "draws", "media")


def opened(config: Json) -> Settings:
    """config.json with the object in which speculators keeps the decoder layer's settings laid open.

    NeMo's number of layers stands beside that of the target, from whose config its own is copied.
    """
    flat = {**config, **part(config, "transformer_layer_config")}
    return {**flat, "num_hidden_layers": flat.get("draft_num_hidden_layers", flat.get("num_hidden_layers"))}


def method_of(name: str, config: Json) -> str:
    """The method of a drafter in a layout.

    Raises:
        ValueError: one that this version does not have.
    """
    method = layout_named(name).method or part(config, "mmspec").get("method", "eagle")
    known = [name for name, entry in DRAFTERS.items() if entry.trained]
    if method not in known:
        raise ValueError(
            f"config.json names the method {briefly(method)}, which this version does not have; it has {known}"
        )
    return str(method)


def refuse(name: str, files: Published) -> None:
    """Raise a ValueError with every reason for which our network cannot be that of a drafter in a layout."""
    layout = layout_named(name)
    if needs := layout.needs(layout, files):
        raise ValueError(f"this drafter needs {'; '.join(needs)}. mmspec's network has not that, so it is refused")
    if "mrope_section" in rotary.scaling(files.flat) and not layout.one_axis and not layout.own_head:
        warnings.warn(
            "this drafter's config.json asks for M-RoPE; mmspec counts a drafter's positions in one dimension. What is "
            "generated stays exact, but fewer drafted tokens may be accepted after an image",
            stacklevel=3,
        )


def read(name: str, files: Published, kind: type[values.Made]) -> values.Made:
    """The config of a drafter in a layout; the tensors are believed first.

    Args:
        kind: of its method.

    Raises:
        ValueError: a setting that is missing or makes no sense.
    """
    layout = layout_named(name)
    settings_read = {**layout.usual, **layout.fixed, **layout.read(layout, files)}
    verifier = part(part(files.config, "speculators_config"), "verifier").get("name_or_path")
    recorded, known = {"target": verifier, **part(files.config, "mmspec")}, kind.usual()
    noted = {key: recorded[key] for key in RECORDED if recorded.get(key) is not None and key in known}
    return values.made(kind, {**settings_read, **noted})


def describe(name: str, method: str, config: FileConfig) -> Settings:
    """config.json of a drafter in a layout.

    Raises:
        ValueError: the layout has no place for this drafter; the message says why.
    """
    layout, said = layout_named(name), config.to_dict()
    marker = {"layout": name, "method": method, "version": __version__}
    wrong = [f"its method is {method!r}, not {layout.method!r}"] if layout.method not in ("", method) else []
    fixed = {key: want for key, want in layout.fixed.items() if key in said}
    wrong += [f"{key} is {said[key]!r}, not {want!r}" for key, want in fixed.items() if said[key] != want]
    rows, read = said.get("draft_vocab", 0), said.get("features", ())
    if layout.own_head is not None and layout.own_head is not (rows > 0):
        wrong.append(f"it has {'an' if rows else 'no'} output head of its own")
    if layout.own_head and len(read) < 2:
        wrong.append(f"it reads {len(read)} layer of its target, not several")
    if wrong:
        raise ValueError(
            f"the layout {name!r} ({layout.about}) cannot hold this drafter: {'; '.join(wrong)}. Use layout 'mmspec'"
        )
    marker |= {key: said[key] for key in RECORDED if layout.keys and key in said}
    return {"mmspec": marker, **layout.write(config)}
