"""Shared by trained drafters: their config, the check that they fit a target, and copies on the target's device."""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from typing import Any, ClassVar, Self, TypeVar

from torch import nn

from mmspec.drafters.blocks import Rope
from mmspec.drafters.draft_vocab import DraftVocab
from mmspec.drafters.growth import TargetHead
from mmspec.drafters.shape import USUAL, Shape, TreeOptions
from mmspec.protocols import TargetInfo
from mmspec.types import FINAL

Network = TypeVar("Network", bound=nn.Module)
Values = dict[str, Any]  # values of a config, by name
_PADDED = 1.01  # allowed ratio of vocabulary sizes, some are padded: LLaVA has 32000 by its authors, 32064 on the hub


@dataclass(frozen=True)
class FileConfig:
    """A config that is stored in a file as a flat dict: the fields of nested dataclasses are beside its own."""

    named: ClassVar[str]  # in messages

    @classmethod
    def of(cls, values: Values) -> Self:
        """The config from the result of `to_dict`, which may have gone through JSON.

        Raises ValueError: unknown fields, or invalid values.
        """
        allowed = cls.usual()
        unknown = sorted(set(values) - set(allowed))
        if unknown:
            raise ValueError(f"config.json has unknown fields {', '.join(unknown)}; {cls.named} has {sorted(allowed)}")
        frozen: Values = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        for name, part in cls._parts().items():
            own = {f.name: frozen.pop(f.name) for f in fields(part) if f.name in frozen}
            frozen |= {name: replace(part, **own)} if own else {}
        return cls(**frozen)

    @classmethod
    def _parts(cls) -> Values:
        """The nested dataclasses, with their default values."""
        return {f.name: f.default for f in fields(cls) if is_dataclass(f.default)}

    @classmethod
    def usual(cls) -> Values:
        """All fields of the flat dict with their defaults; MISSING for a field that a file must have."""
        parts = cls._parts()
        own = {f.name: f.default for f in fields(cls) if f.name not in parts}
        return own | {name: value for part in parts.values() for name, value in vars(part).items()}

    def to_dict(self) -> Values:
        """The flat dict of this config."""
        nested = asdict(self)
        return {k: v for k, v in nested.items() if not isinstance(v, dict)} | {
            name: value for part in nested.values() if isinstance(part, dict) for name, value in part.items()
        }


@dataclass(frozen=True)
class TrainedConfig(FileConfig, Rope):
    """The config fields that all trained drafters share; those of the rotary positions are in Rope.

    Attributes:
        hidden, intermediate, heads, kv_heads, head_dim, vocab, norm_eps: as in Llama and Qwen3.
        features: the target's features that it reads (see Drafter).
        target_hidden: width of the target's features; 0: `hidden`.
        layers: number of layers.
        draft_vocab: rows of the drafter's own head; 0: it uses the target's head.
        target, target_revision: the model that it was trained for.
        shape: the recommended shape of drafts.
    """

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocab: int
    head_dim: int = 0
    norm_eps: float = 1e-6
    features: tuple[int, ...] = (FINAL,)
    target_hidden: int = 0
    layers: int = 1
    draft_vocab: int = 0
    target: str = ""
    target_revision: str = ""
    shape: Shape = USUAL

    def __post_init__(self) -> None:
        if self.intermediate < 1 or not 0 <= self.draft_vocab <= self.vocab:
            raise ValueError(
                f"intermediate must be at least 1, and draft_vocab from 0 to the vocabulary's {self.vocab}; got "
                f"{self.intermediate} and {self.draft_vocab}"
            )
        self.check(self.head_dim or self.hidden // self.heads)


def check_fit(c: TrainedConfig, target: TargetInfo) -> None:
    """Raise a ValueError that lists the differences if a drafter with this config does not fit the target."""
    wanted = {
        "hidden size": (c.target_hidden or c.hidden, target.hidden),
        "embedding width": (c.hidden, target.embedding),
    }
    if not c.vocab <= target.vocab <= _PADDED * c.vocab:
        wanted["vocabulary"] = (c.vocab, target.vocab)
    if not c.draft_vocab:
        wanted["head width"] = (c.hidden, target.hidden)
    wrong = [f"{name} {mine} (target: {theirs})" for name, (mine, theirs) in wanted.items() if mine != theirs]
    mine, theirs = (c.rope, c.grid, 0.0), ("1d", 0, 0.0)
    if target.grid:
        mine, theirs = (c.rope, c.grid, c.rope_theta), ("2d", target.grid, target.rope_theta)
    if mine != theirs:
        wrong.append(f"rotary positions {_turns(*mine)} (target: {_turns(*theirs)})")
    wrong += [f"layer {i} (target: {target.layers} layers)" for i in c.features if i >= target.layers]
    if wrong:
        raise ValueError(
            f"this drafter was made for {c.target or 'another target'} and does not fit {target.name}: "
            f"{', '.join(wrong)}. Use a drafter trained for this target, or drafter='ngram', which fits any"
        )


def _turns(rope: str, grid: int, theta: float = 0.0) -> str:
    return f"{rope!r}" + (f" on a grid of {grid}" if grid else "") + (f", base {theta:g}" if theta else "")


def placed(drafter: Network, target: TargetInfo, options: TreeOptions) -> Network:
    """A copy of the drafter with these options, on the target's device and in its dtype.

    If nothing has to move, both share their layers; otherwise the new one has copies.

    Raises:
        ValueError: a draft vocabulary that the target does not have, or fewer tokens than a node has branches.
    """
    fitted: Any = beside(drafter, target)  # a drafter with a head
    fitted.options = options
    if not fitted.head.own:
        fitted.head = TargetHead(None if options.named is None else DraftVocab.of(options.named, target))
    options.check_branches(target.vocab if fitted.head.ids is None else len(fitted.head.ids))
    return fitted  # type: ignore[no-any-return]


def beside(drafter: Network, target: TargetInfo) -> Network:
    """A copy of the drafter with the same weights, on the target's device and in its dtype."""
    own = [*drafter.parameters(), *drafter.buffers()]
    stays = all(t.device == target.device and (t.dtype == target.dtype or not t.is_floating_point()) for t in own)
    if stays:
        same = copy.copy(drafter)
        same.training = False
        return same
    memo: dict[int, object] = {id(head): head} if isinstance(head := getattr(drafter, "head", None), TargetHead) else {}
    for t in own:  # aliases, which `to` can move without changing the original
        alias = t.detach()
        memo[id(t)] = nn.Parameter(alias, t.requires_grad) if isinstance(t, nn.Parameter) else alias
    return copy.deepcopy(drafter, memo).to(device=target.device, dtype=target.dtype).eval()
