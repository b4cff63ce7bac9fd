"""The description of a checkpoint layout: how to recognise it, its tensor names, how to read and write its config."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mmspec.checkpoints.files import Json, Settings
from mmspec.drafters.trained import TrainedConfig

Keys = Mapping[str, tuple[str, ...]]  # our tensor: theirs, stacked along the first axis in this order
Seen = Callable[[Json, Collection[str]], bool]  # recognises a layout by config.json and the tensors' names
_IN_FILES = {"head.weight": "lm_head.weight", "head.ids": "draft_ids"}  # our tensors: their names in our own files


@dataclass(frozen=True)
class Published:
    """The content of a drafter's files.

    Attributes:
        config: the content of config.json.
        flat: the same, with the nested settings of a layer merged into the top level.
        shapes: of the tensors.
        target: returns the target's number of decoder "layers", or of tokens in its "vocab"; None if unknown. Called
            only if needed.
    """

    config: Json
    flat: Json
    shapes: Mapping[str, tuple[int, ...]]
    target: Callable[[str], int | None]


@dataclass(frozen=True)
class Layout:
    """One file format of drafters.

    Attributes:
        about: a description in one line.
        seen: whether config.json and the tensors' names are of this layout.
        read: the settings from its files, except `fixed` and `usual`; called after all tensors were found.
        write: its config.json, from a drafter's config.
        needs: all features of such files that mmspec's network does not support.
        method: of its drafters; "": any.
        layer: prefix of the decoder layer's tensors.
        fc: the weight that reads the target's features.
        keys: our tensor: theirs. Tensors that are not listed have our name in files.
        optional: our tensors that a file may lack.
        dropped: their tensors that are ignored: copies of the target's, or derived from others.
        fixed: settings that have only this value in the layout.
        usual: settings that files do not contain, with the defaults of the authors' code.
        own_head: whether drafters have their own output head; None: either.
        one_axis: positions have one dimension, even if config.json asks for M-RoPE.
    """

    about: str
    seen: Seen
    read: Callable[[Layout, Published], Settings]
    write: Callable[[Any], Settings]
    needs: Callable[[Layout, Published], list[str]]
    method: str = "eagle"
    layer: str = "layers.0"
    fc: str = "fc.weight"
    keys: Keys = field(default_factory=dict)
    optional: frozenset[str] = frozenset()
    dropped: tuple[str, ...] = ("embed_tokens.weight",)
    fixed: Json = field(default_factory=dict)
    usual: Json = field(default_factory=dict)
    own_head: bool | None = False
    one_axis: bool = False

    def over(self, layers: int) -> Layout:
        """The layout for this many layers: {n} in a name becomes the number of each, {m} of each but the first."""

        def numbered(name: str) -> list[tuple[str, str]]:
            mark = next((mark for mark in ("{n}", "{m}") if mark in name), "")
            return [(mark, str(i)) for i in range(mark == "{m}", layers)] if mark else [("", "")]

        keys = {
            ours.replace(mark, i): tuple(name.replace(mark, i) for name in theirs)
            for ours, theirs in self.keys.items()
            for mark, i in numbered(ours)
        }
        optional = frozenset(name.replace(mark, i) for name in self.optional for mark, i in numbered(name))
        return replace(self, keys=keys, optional=optional)

    def theirs(self, ours: str) -> tuple[str, ...]:
        return self.keys.get(ours, (_IN_FILES.get(ours, ours),))

    def drops(self, key: str) -> bool:
        return key in self.dropped or (bool(self.keys) and key.endswith("rotary_emb.inv_freq"))

    def present(self, files: Published, ours: str) -> bool:
        """Whether one of our tensors is in the files."""
        return any(name in files.shapes for name in self.theirs(ours))


def has(start: str) -> Seen:
    """Recognises files with a tensor whose name begins with `start`."""
    return lambda config, keys: any(key.startswith(start) for key in keys)


def made_by(name: str) -> Seen:
    """Recognises files whose config.json lists this architecture."""

    def seen(config: Json, keys: Collection[str]) -> bool:
        listed = config.get("architectures")
        return isinstance(listed, list) and name in listed

    return seen


def verified(c: TrainedConfig, algorithm: str, tokens: int) -> Settings:
    """The part of speculators' config.json that describes how to use a drafter."""
    greedy = {"proposal_type": "greedy", "speculative_tokens": tokens, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    verifier: Settings = {"name_or_path": c.target or None, "architectures": []}
    return {
        "algorithm": algorithm,
        "default_proposal_method": "greedy",
        "proposal_methods": [greedy],
        "verifier": verifier,
    }
