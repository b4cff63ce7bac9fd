"""What a published layout of drafters is: how its files show it, what their tensors are called, what they say."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mmspec.checkpoints.files import Json, Settings
from mmspec.drafters.trained import TrainedConfig

Keys = Mapping[str, tuple[str, ...]]  # our tensor: theirs, stacked along the first axis in this order
Seen = Callable[[Json, Collection[str]], bool]  # of config.json and the tensors' names
_IN_FILES = {"head.weight": "lm_head.weight", "head.ids": "draft_ids"}  # our tensors: their names in our own files


@dataclass(frozen=True)
class Published:
    """What a drafter's files hold.

    Attributes:
        config: config.json as it is.
        flat: the same, with the objects that hold a layer's settings laid open.
        shapes: of the tensors.
        target: gives the number of decoder "layers" of the target, or of tokens in its "vocab"; None where nobody
            knows. Asked only if needed.
    """

    config: Json
    flat: Json
    shapes: Mapping[str, tuple[int, ...]]
    target: Callable[[str], int | None]


@dataclass(frozen=True)
class Layout:
    """One way of writing a drafter down.

    Attributes:
        about: one line for people.
        seen: whether config.json and the tensors' names are of this layout.
        read: the settings that its files give, but for `fixed` and `usual`; with Published whose tensors are all there.
        write: its config.json, of a drafter's config.
        needs: every reason for which our network cannot be that of such files.
        method: of the drafters that it holds; "": of any.
        layer: prefix of the decoder layer's tensors.
        fc: what reads the target's features.
        keys: our tensor: theirs. What is not listed has our own name in files.
        optional: our tensors that a file may lack.
        dropped: their tensors that are passed over: copies of the target's, or derived from others.
        fixed: settings that the layout can be written with no other value of.
        usual: settings that no file tells, as the authors' code has them.
        own_head: whether it brings an output head; None: either.
        one_axis: positions are counted in one dimension, even where config.json asks for M-RoPE.
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
        """The same for a drafter of so many layers: {n} in a name is the number of each, {m} of each but the first."""

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
    """Published with a tensor whose name begins so."""
    return lambda config, keys: any(key.startswith(start) for key in keys)


def made_by(name: str) -> Seen:
    """Published whose config.json lists this architecture."""

    def seen(config: Json, keys: Collection[str]) -> bool:
        listed = config.get("architectures")
        return isinstance(listed, list) and name in listed

    return seen


def verified(c: TrainedConfig, algorithm: str, tokens: int) -> Settings:
    """What speculators' config.json says of how a drafter is to be used."""
    greedy = {"proposal_type": "greedy", "speculative_tokens": tokens, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    verifier: Settings = {"name_or_path": c.target or None, "architectures": []}
    return {
        "algorithm": algorithm,
        "default_proposal_method": "greedy",
        "proposal_methods": [greedy],
        "verifier": verifier,
    }
