"""The protocols of the decoding loop, Target and Drafter, and the views that each has of the other and the session."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, Self, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn

from mmspec.config import Options
from mmspec.modes import Mode
from mmspec.session import Row, Session
from mmspec.types import Draft, Prompt, Round, Scores

T = TypeVar("T")
Memory = TypeVar("Memory")


@dataclass(frozen=True)
class TargetInfo:
    """The facts of a target that a drafter has to fit.

    Attributes:
        name: folder or hub name that the target was loaded from.
        vocab: V, rows of its head.
        hidden: H, width of its final features.
        embedding: width of its input embeddings.
        layers: number of layers of its text decoder.
        ends: ids of tokens that end an answer; None: its tokens are not text.
        grid: G, if its positions are rows and columns of a picture of G × G tokens; 0: positions are 0, 1, 2, …
        rope_theta: base of the rotary frequencies on such a grid.
    """

    name: str
    vocab: int
    hidden: int
    embedding: int
    layers: int
    device: torch.device
    dtype: torch.dtype
    ends: tuple[int, ...] | None = None
    grid: int = 0
    rope_theta: float = 0.0


class SessionView(Protocol[Memory]):
    """The part of a session that a drafter may read; it may change only `memory`, whose type is its own.

    Attributes:
        rows: the active sequences, with their tokens.
        pending: [B], the tokens that are decided and not yet in the target's cache.
        emitted: [B], number of tokens decided after each prompt.
        seeds: [B], seeds of the rows' noise.
        memory: the result of the drafter's `start`.
        last: the previous round, at first the prefill's.
    """

    memory: Memory

    @property
    def rows(self) -> Sequence[Row]: ...
    @property
    def pending(self) -> Tensor: ...
    @property
    def emitted(self) -> Tensor: ...
    @property
    def seeds(self) -> Tensor: ...
    @property
    def last(self) -> Round: ...


class Rows(Protocol):
    """State with one entry per row, which can select some rows and append the rows of another."""

    def select(self, rows: Tensor) -> Self: ...

    def join(self, other: Self) -> Self: ...


@dataclass
class PerRow(Generic[T]):
    """One value per row, on the host: the memory of a drafter that keeps no tensors."""

    values: list[T]

    def select(self, rows: Tensor) -> PerRow[T]:
        return PerRow([self.values[i] for i in rows.tolist()])

    def join(self, other: PerRow[T]) -> PerRow[T]:
        return PerRow(self.values + other.values)


def reported(memory: object) -> dict[str, float]:
    """The statistics of the prompts that a drafter's memory has read, its attribute `stats`: sums by name, or none."""
    return dict(getattr(memory, "stats", {}))


@dataclass
class Around(Generic[T]):
    """The memory of a drafter that wraps another: the inner drafter's memory, and one value per row of its own."""

    inner: Any  # the inner drafter's memory: Rows, or None
    values: list[T]

    @property
    def stats(self) -> dict[str, float]:
        return reported(self.inner)

    def select(self, rows: Tensor) -> Around[T]:
        inner = None if self.inner is None else self.inner.select(rows)
        return Around(inner, [self.values[i] for i in rows.tolist()])

    def join(self, other: Around[T]) -> Around[T]:
        return Around(None if self.inner is None else self.inner.join(other.inner), self.values + other.values)


@runtime_checkable
class Compilable(Protocol):
    """A drafter with a forward of its own that can be captured and compiled like the target's."""

    def compiled(self, compile: bool) -> Self:
        """The same drafter with captured forwards."""


class Target(Protocol):
    """A stateless view of the target model, whose distribution the output follows; independent of any drafter.

    Attributes:
        device: of sessions and drafters, even if the model's layers are spread over several devices.
        features: recorded for the drafter, in the drafter's order: i ≥ 0 for the input of layer i, FINAL.
        inference: the mode that rounds run in, torch.inference_mode or torch.no_grad.
        streams: S, the number of forwards of the same tokens per distribution: 2 under classifier-free guidance.
        guidance: merges the streams into one distribution; a captured draft depends on it. None: there is one stream.
        weighs: whether `weigh` does anything.
    """

    device: torch.device
    features: tuple[int, ...]
    inference: Mode
    streams: int
    guidance: Any
    weighs: bool

    @property
    def tables(self) -> tuple[nn.Module, ...]:
        """The modules that `embed` and `head` read; a captured draft is valid until one of them changes."""

    def prefill(self, session: Session, inputs: Any, nodes: int) -> tuple[Prompt, Scores]:
        """Read the prompts of the session's rows into `session.cache`.

        Args:
            inputs: the inputs of the call.
            nodes: the largest number of nodes of a draft, for which the cache reserves room.

        Returns:
            The prompts as a drafter sees them, and the scores [B, 1, V] after them.
        """

    def score(self, session: Session, draft: Draft) -> Scores:
        """One forward over all nodes of the draft [B, N]; each attends to the row's cache and to its own ancestors."""

    def commit(self, session: Session, round_: Round) -> None:
        """Keep the KV cache entries of the accepted nodes and drop the others."""

    def embed(self, ids: Tensor) -> Tensor:
        """Input embeddings [..., H] of token ids; all streams read the same tokens."""

    def head(self, hidden: Tensor, vocab: Any = None) -> Tensor:
        """Raw logits [B, n, V] of final features [B, n, S·H], restricted to the tokens of `vocab`, a DraftVocab.

        `vocab` is given with the option `draft_vocab`, which needs a target whose `TargetInfo.ends` is known.
        """

    def weigh(self, logits: Tensor, session: SessionView[Any], position: Tensor) -> Tensor:
        """Process a drafter's logits [B, n, V] of the tokens at `position` [B, n] as the target processes its own."""


@runtime_checkable
class BareEmbedding(Protocol):
    """A target that can also return its embeddings before the norm that follows its embedding table."""

    def bare_embed(self, ids: Tensor) -> Tensor:
        """Input embeddings [..., H] of token ids without that norm."""


class Drafter(Protocol[Memory]):
    """Proposes drafts. It does not depend on the target's class, and changes only its own memory in the session.

    Under the rule `exact` the output has the target's distribution whatever is proposed: a bad drafter costs time,
    never quality. The loop calls `start` and `propose`; `enable` uses the rest.

    Attributes:
        features: the target's features that it reads, in `prompt.hidden` and `session.last.scores.hidden`, concatenated
            on the last axis: i ≥ 0 (input of layer i) or FINAL (after the last norm); `()` for none. LIKELIEST is
            returned separately, in `Scores.likeliest`.
        nodes: the largest number N of nodes of its drafts, the root included; the cache reserves room for them.

    A drafter with options also has `options`, a frozen dataclass whose field names `enable` accepts. A drafter whose
    drafts depend on other rows and calls has `shares = True`: then a row's seed fixes its noise before anything is
    drafted, so that the row's tokens do not depend on them.
    """

    @property
    def features(self) -> tuple[int, ...]: ...

    @property
    def nodes(self) -> int: ...

    def fit(self, target: TargetInfo, given: Options) -> Drafter[Memory]:
        """This drafter for a target, with the user's options (`config.chosen` puts them into `options`).

        Raises:
            ValueError: it was made for another target, does not have an option, or a value is invalid.
        """

    def start(self, session: SessionView[Memory], target: Target, prompt: Prompt) -> Memory:
        """Memory for these rows, filled from the prompt; the loop keeps it as `session.memory`.

        Returns:
            Rows (with `select` and `join`, since rows leave and join), which may have `stats` of the prompts (sums,
            by name), or None for a drafter without memory.
        """

    def propose(self, session: SessionView[Memory], target: Target) -> Draft:
        """The next draft [B, N] for the active rows; node 0 is `session.pending`.

        It may read `session.rows[b].tokens` (prompt and answer so far, the pending token last), `session.memory`,
        `session.last` (the previous round, at first the prefill's), `target.embed` and `target.head`. A node where a
        row proposes nothing has NO_TOKEN. A draft drawn at random must include the distribution that it was drawn from.

        Another draft may be verified in its place: the root only, or these nodes, with the same parents but some
        tokens removed or replaced, followed by additional nodes.
        """


class Proposer(Protocol):
    """The part of a drafter that the loop calls: also a captured drafter, or a Switch that may turn drafting off."""

    @property
    def features(self) -> tuple[int, ...]: ...

    @property
    def nodes(self) -> int: ...

    def start(self, session: Session, target: Target, prompt: Prompt) -> object:
        """As `Drafter.start`."""

    def propose(self, session: Session, target: Target) -> Draft:
        """As `Drafter.propose`."""
