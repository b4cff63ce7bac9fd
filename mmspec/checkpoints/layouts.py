"""The table of all checkpoint layouts, mmspec's own among them, and the detection of a file's layout."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from reprlib import repr as briefly

from mmspec.checkpoints import block, eagle, eagle3, msd, vispec
from mmspec.checkpoints.files import Json
from mmspec.checkpoints.layout import Layout
from mmspec.drafters.trained import FileConfig

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
    """The layout with this name.

    Raises:
        ValueError: an unknown name; the message lists the known ones.
    """
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
