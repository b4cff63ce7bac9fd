"""All checkpoint layouts, mmspec's own among them: detection, and a drafter's config from and to its config.json."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from reprlib import repr as briefly

from mmspec import __version__
from mmspec.checkpoints import block, eagle, eagle3, llama, msd, vispec
from mmspec.checkpoints.files import Json, Settings
from mmspec.checkpoints.layout import Layout, Published
from mmspec.checkpoints.values import Made, made, part
from mmspec.drafters.trained import FileConfig
from mmspec.registry import DRAFTERS

OURS = Layout(
    "our own: the module's tensors by their names, fused projections",
    lambda config, keys: _marked(config) == "mmspec",
    lambda layout, files: {key: value for key, value in files.config.items() if key != "mmspec"},
    FileConfig.to_dict,
    lambda layout, files: [],
    method="",
    layer="",
    dropped=(),
    own_head=None,
)
LAYOUTS: dict[str, Layout] = {  # in the order of detection: the first match is used
    "mmspec": OURS,
    **block.LAYOUTS,
    **eagle3.LAYOUTS,
    **vispec.LAYOUTS,
    "nemo-eagle": eagle.BY_NEMO,
    **msd.LAYOUTS,
    "eagle": eagle.BY_AUTHORS,
}
# Values that no published layout contains; mmspec's writer adds them under its own key.
RECORDED = ("target", "target_revision", "depth", "width", "size", "tree", "draws", "media")


def _marked(config: Json) -> str | None:
    """The layout that mmspec's writer recorded in config.json."""
    marker = config.get("mmspec")
    if not isinstance(marker, Mapping):
        return None
    layout = marker.get("layout", "mmspec")
    if not isinstance(layout, str):
        raise ValueError(f"mmspec.layout in config.json must be one of {', '.join(LAYOUTS)}; it is {briefly(layout)}")
    return layout


def layout_named(name: str) -> Layout:
    """The layout with this name. Raises ValueError: an unknown name; the message lists the known ones."""
    if name not in LAYOUTS:
        raise ValueError(f"unknown layout {name!r}; choose from {', '.join(LAYOUTS)}")
    return LAYOUTS[name]


def detect(config: Json, keys: Collection[str]) -> str:
    """The layout of a file. MSD's tensors have EAGLE's names and shapes: there config.json decides, which the caller
    can override by naming the layout.

    Args:
        config: the content of config.json.
        keys: the names of the tensors.

    Raises:
        ValueError: no known layout matches.
    """
    marked = _marked(config)
    for name, layout in LAYOUTS.items():
        if marked == name or (marked not in LAYOUTS and layout.seen(config, keys)):
            return name
    shown = ", ".join(sorted(keys)[:6]) or "none"
    kinds = config.get("architectures")
    whole = f"if it is a whole model ({kinds[0]}), name it so: drafter='model', draft=…; " if kinds else ""
    raise ValueError(
        f"no known drafter layout fits these tensors ({shown}{', …' if len(keys) > 6 else ''}); "
        f"{whole}known: {', '.join(f'{name} ({layout.about})' for name, layout in LAYOUTS.items())}. "
        "If it is one of them, pass layout= (`mmspec convert --from`)"
    )


def opened(config: Json) -> Settings:
    """config.json with the nested settings of speculators' decoder layer merged into the top level.

    NeMo's number of layers has its own key, since its config is a copy of the target's.
    """
    flat = {**config, **part(config, "transformer_layer_config")}
    return {**flat, "num_hidden_layers": flat.get("draft_num_hidden_layers", flat.get("num_hidden_layers"))}


def method_of(name: str, config: Json) -> str:
    """The method of a drafter in a layout. Raises ValueError: an unknown method."""
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
    if "mrope_section" in llama.scaling(files.flat) and not layout.one_axis and not layout.own_head:
        warnings.warn(
            "this drafter's config.json asks for M-RoPE; mmspec counts a drafter's positions in one dimension. The "
            "output stays exact, but fewer drafted tokens may be accepted after an image",
            stacklevel=3,
        )


def read(name: str, files: Published, kind: type[Made]) -> Made:
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
    return made(kind, {**settings_read, **added})


def describe(name: str, method: str, config: FileConfig) -> Settings:
    """config.json of a drafter in a layout.

    Raises ValueError: the layout cannot represent this drafter; the message says why.
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
