"""The config of a block drafter, as in its file, and the user's options."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from mmspec.config import is_number
from mmspec.drafters.shape import MOST, Shape, TreeOptions
from mmspec.drafters.trained import TrainedConfig

# method of `mmspec train` → what its published drafters add to DFlash's layers
PUBLISHED: dict[str, dict[str, Any]] = {
    "block": {},
    "dflash": {},
    "dspark": {"markov_rank": 256, "confidence": True, "confidence_markov": True, "anchored": True, "block": 8},
}
MARKOV = ("vanilla", "gated", "rnn")
NO_CAP = 1e9  # as `softcap`: logits are not capped

_WHOLE = replace(Shape.chain(MOST["depth"]), draws=True)  # cut to the depth of a block


@dataclass(frozen=True)
class BlockConfig(TrainedConfig):
    """The config fields of a block drafter beyond a TrainedConfig's.

    Attributes:
        features: the decoder layers of the target whose inputs are read (published files count outputs: one less).
        block: rows of a block, including the anchor's; an upper limit of the depth.
        mask_token: the id of the mask token, which is the input where a token is to be drafted.
        windows: attention window of each layer; 0: unlimited. A single number is for all layers.
        causal: for each layer, 1 if attention within the block is causal. A single number is for all layers.
        from_anchor: all rows of a block see the same features, those within the window before the anchor.
        anchored: the anchor's own row drafts, too: row k gives token k + 1. Otherwise row k gives token k.
        bias: of the attention's projections.
        qk_norm, rope_first: norms of queries and keys; whether rotary positions are applied before them (HunyuanOCR).
        bare_embeds: read the target's embeddings without the norm that belongs to their table (Muse-Glimmer).
        logit_scale, softcap: logits are scaled, then capped by tanh.
        markov_rank, markov: rank and kind of DSpark's Markov head; 0: none.
        confidence, confidence_markov: a confidence head; whether it also reads the Markov head's embedding.
        taps, group: of DFlash2's convolutions, kernel size and channels that share a weight; 0: none.
        selector_rank, selector_top: of DFlash2's selector; 0: none.
        shape: its depth is limited to that of a block.
    """

    named: ClassVar[str] = "a block config"

    features: tuple[int, ...] = (2, 3)
    block: int = 16
    mask_token: int = 0
    windows: tuple[int, ...] = (0,)
    causal: tuple[int, ...] = (0,)
    from_anchor: bool = False
    anchored: bool = False
    bias: bool = False
    qk_norm: bool = True
    rope_first: bool = False
    bare_embeds: bool = False
    logit_scale: float = 1.0
    softcap: float = NO_CAP
    markov_rank: int = 0
    markov: str = MARKOV[0]
    confidence: bool = False
    confidence_markov: bool = False
    taps: int = 0
    group: int = 1
    selector_rank: int = 0
    selector_top: int = 16
    shape: Shape = _WHOLE

    def __post_init__(self) -> None:
        super().__post_init__()
        most = self.most
        wrong = [] if most >= 1 and self.layers >= 1 and self.features else ["it needs a layer, features, and a block"]
        if self.markov not in MARKOV:
            wrong.append(f"markov must be one of {', '.join(MARKOV)}; got {self.markov!r}")
        if self.confidence_markov and not (self.confidence and self.markov_rank):
            wrong.append("confidence_markov needs a confidence and a Markov head")
        if self.taps and (self.taps > self.block or self.group < 1 or self.hidden % self.group):
            wrong.append(f"taps {self.taps} of a block of {self.block}, or groups of {self.group}, are not possible")
        if self.selector_rank and self.draft_vocab:
            wrong.append("a selector chooses from the target's head")
        if self.selector_rank and self.selector_top < 1:
            wrong.append("selector_top must be at least 1")
        for name in ("windows", "causal"):
            if len(getattr(self, name)) not in (1, self.layers):
                wrong.append(f"{name} needs one number, or one for each of {self.layers} layers")
        if wrong:
            raise ValueError(f"this config of a block drafter is not valid: {'; '.join(wrong)}")
        if self.shape.depth > most:
            object.__setattr__(self, "shape", replace(self.shape, depth=most, size=min(self.shape.size, 1 + most)))

    @property
    def most(self) -> int:
        """The largest depth of a draft."""
        return self.block - (not self.anchored)

    def each(self, values: tuple[int, ...]) -> tuple[int, ...]:
        """`windows` or `causal` with a value for each layer."""
        return values if len(values) == self.layers else values * self.layers

    @property
    def sequential(self) -> bool:
        """Whether the token of a row depends on the token drafted before it."""
        return self.markov_rank > 0 or self.selector_rank > 0


@dataclass(frozen=True)
class BlockOptions(TreeOptions):
    """Options of a block drafter: a chain, or with width ≥ 2 a tree; `prune` cannot be used.

    Attributes:
        confidence: end a chain where its confidence head gives the draft up to there a lower acceptance probability
            than this; 0: never.
    """

    confidence: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (is_number(self.confidence) and 0 <= self.confidence < 1):
            raise ValueError(f"confidence must be a probability from 0 to below 1; got {self.confidence!r}")
