"""What trained drafters share: what their config says, whether they fit a target, and their place beside it."""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from typing import Any, ClassVar, Self, TypeVar

from torch import nn

from mmspec.drafters.blocks import Rope
from mmspec.drafters.draft_vocab import DraftVocab
from mmspec.drafters.growth import TargetHead
from mmspec.drafters.shape import ALL, USUAL, Shape, TreeOptions
from mmspec.protocols import TargetInfo
from mmspec.types import FINAL

Network = TypeVar("Network", bound=nn.Module)
Values = dict[str, Any]  # of a config, by name
_PADDED = 1.01  # some targets have a few more embeddings than others: LLaVA 32000 by its authors, 32064 in transformers


@dataclass(frozen=True)
class FileConfig:
    """A config that is written to a file, and read from it: flat, what its parts say beside its own."""

    named: ClassVar[str]  # in messages

    @classmethod
    def of(cls, values: Values) -> Self:
        """From what `to_dict` gave, or JSON made of it.

        Raises:
            ValueError: fields that it does not have, or values that cannot be.
        """
        known = cls.usual()
        unknown = sorted(set(values) - set(known))
        if unknown:
            raise ValueError(f"config.json has unknown fields {', '.join(unknown)}; {cls.named} has {sorted(known)}")
        frozen: Values = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        for name, part in cls._parts().items():
            own = {f.name: frozen.pop(f.name) for f in fields(part) if f.name in frozen}
            frozen |= {name: replace(part, **own)} if own else {}
        return cls(**frozen)

    @classmethod
    def _parts(cls) -> Values:
        """What is a dataclass of its own, as it is usually."""
        return {f.name: f.default for f in fields(cls) if is_dataclass(f.default)}

    @classmethod
    def usual(cls) -> Values:
        """What it holds as a file has it: by name, with the default of each; MISSING where a file must say it."""
        parts = cls._parts()
        own = {f.name: f.default for f in fields(cls) if f.name not in parts}
        return own | {name: value for part in parts.values() for name, value in vars(part).items()}

    def to_dict(self) -> Values:
        """Itself as a file has it."""
        held = asdict(self)
        return {k: v for k, v in held.items() if not isinstance(v, dict)} | {
            name: value for part in held.values() if isinstance(part, dict) for name, value in part.items()
        }


@dataclass(frozen=True)
class TrainedConfig(FileConfig, Rope):
    """What every trained drafter is made with; rotary positions are said by what it is besides, a Rope.

    Attributes:
        hidden, intermediate, heads, kv_heads, head_dim, vocab, norm_eps: as in Llama and Qwen3.
        features: what it reads of the target (see Drafter).
        target_hidden: width of the target's features, where it is not `hidden`.
        layers: how many.
        draft_vocab: rows of the drafter's own head; 0: the target's head is used.
        target, target_revision: what it was trained for.
        shape: how it recommends to draft.
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
        self.check(self.head_dim or self.hidden // self.heads)


def check_fit(c: TrainedConfig, target: TargetInfo) -> None:
    """Refuse a target that a drafter with this config was not made for.

    Raises:
        ValueError: the message says what differs.
    """
    wanted = {
        "hidden size": (c.target_hidden or c.hidden, target.hidden),
        "embedding width": (c.hidden, target.embedding),
    }
    if not c.vocab <= target.vocab <= _PADDED * c.vocab:
        wanted["vocabulary"] = (c.vocab, target.vocab)
    if not c.draft_vocab:
        wanted["head width"] = (c.hidden, target.hidden)
    wrong = [f"{name} {mine} (target: {theirs})" for name, (mine, theirs) in wanted.items() if mine != theirs]
    turning, its = (c.rope, c.grid, 0.0), ("1d", 0, 0.0)
    if target.grid:
        turning, its = (c.rope, c.grid, c.rope_theta), ("2d", target.grid, target.rope_theta)
    if turning != its:
        wrong.append(f"rotary positions {_turns(*turning)} (target: {_turns(*its)})")
    wrong += [f"layer {i} (target: {target.layers} layers)" for i in c.features if i >= target.layers]
    if wrong:
        raise ValueError(
            f"this drafter was made for {c.target or 'another target'} and does not fit {target.name}: "
            f"{', '.join(wrong)}. Use a drafter trained for this target, or drafter='ngram', which fits any"
        )


def _turns(rope: str, grid: int, theta: float = 0.0) -> str:
    return f"{rope!r}" + (f" on a grid of {grid}" if grid else "") + (f", base {theta:g}" if theta else "")


def placed(drafter: Network, target: TargetInfo, options: TreeOptions) -> Network:
    """A drafter for itself with these options, on the target's device and in its dtype; the given one stays as it is.

    Where nothing moves, both have the same layers; else those of the new one are copies.

    Raises:
        ValueError: a draft vocabulary that the target has not, or fewer tokens than a node has branches.
    """
    fitted: Any = beside(drafter, target)  # a drafter with a head
    fitted.options = options
    if not fitted.head.own:
        fitted.head = TargetHead(None if options.draft_vocab == ALL else DraftVocab.of(options.draft_vocab, target))
        if (ids := fitted.head.ids) is not None and len(ids) < options.branches:
            raise ValueError(
                f"a tree with {options.branches} branches per node needs a draft_vocab of as many tokens; lower width"
            )
    return fitted  # type: ignore[no-any-return]


def beside(drafter: Network, target: TargetInfo) -> Network:
    """A drafter of the same weights on the target's device and in its dtype; the given one stays as it is."""
    own = [*drafter.parameters(), *drafter.buffers()]
    stays = all(t.device == target.device and (t.dtype == target.dtype or not t.is_floating_point()) for t in own)
    if stays:
        same = copy.copy(drafter)
        same.training = False
        return same
    memo: dict[int, object] = {id(head): head} if isinstance(head := getattr(drafter, "head", None), TargetHead) else {}
    for t in own:  # aliases, whose data can go elsewhere
        alias = t.detach()
        memo[id(t)] = nn.Parameter(alias, t.requires_grad) if isinstance(t, nn.Parameter) else alias
    return copy.deepcopy(drafter, memo).to(device=target.device, dtype=target.dtype).eval()
