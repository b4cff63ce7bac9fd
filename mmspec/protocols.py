"""The protocols that meet in the loop, Target and Drafter, and what each may know of the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, Self, TypeVar, runtime_checkable

import torch
from torch import Tensor

from mmspec.config import Options
from mmspec.modes import Mode
from mmspec.session import Row, Session
from mmspec.types import Draft, Prompt, Round, Scores

T = TypeVar("T")
Memory = TypeVar("Memory")


@dataclass(frozen=True)
class TargetInfo:
    """What a drafter has to fit.

    Attributes:
        name: folder or hub name that the target was loaded from.
        vocab: V, rows of its head.
        hidden: H, width of its final features.
        embedding: width of its input embeddings.
        layers: of its text decoder.
        ends: ids of tokens that end an answer; None: its tokens are no text.
        grid: G, where its positions are rows and columns of a picture of G × G tokens; 0: they are counted in a line.
        rope_theta: base of the frequencies on such a grid.
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
    """What a drafter reads of a session; of it all it changes is `memory`, its own, of a type that it knows.

    Attributes:
        rows: the sequences under way, with their tokens.
        pending: [B], the tokens that are decided and not yet in the target's cache.
        emitted: [B], how many tokens are decided after each prompt.
        seeds: [B], of each row's noise.
        memory: what the drafter's `start` gave.
        last: the round before, the prefill's at first.
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
    """State with one entry per row: it can lose rows and take in the rows of another."""

    def select(self, rows: Tensor) -> Self: ...

    def join(self, other: Self) -> Self: ...


@dataclass
class PerRow(Generic[T]):
    """A value for each row, on the host: a memory of drafters that keep no tensors."""

    values: list[T]

    def select(self, rows: Tensor) -> PerRow[T]:
        return PerRow([self.values[i] for i in rows.tolist()])

    def join(self, other: PerRow[T]) -> PerRow[T]:
        return PerRow(self.values + other.values)


@runtime_checkable
class Reporting(Protocol):
    """A drafter's memory that reports on the prompts that it read: sums, by name."""

    stats: dict[str, float]


def reported(memory: object) -> dict[str, float]:
    """What goes into `Stats.drafter`: nothing, unless the memory is `Reporting`."""
    return dict(memory.stats) if isinstance(memory, Reporting) else {}


@dataclass
class Around(Generic[T]):
    """The memory of a drafter inside another, and a value of the outer one for each row."""

    inner: Any  # the drafter's own: Rows, or None
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
    """A drafter that has a forward of its own to capture and compile, as a target's is."""

    def compiled(self, compile: bool) -> Self:
        """The same drafter, with its forwards captured."""


class Target(Protocol):
    """The model whose distribution is kept: a stateless view of it, independent of any drafter.

    Attributes:
        device: where sessions and drafters are, however the model's layers are spread.
        features: what is recorded for the drafter, in the drafter's order: layers i ≥ 0 by what enters them, FINAL.
        inference: the mode that rounds run in, torch.inference_mode or torch.no_grad.
        streams: S, how many forwards of the same tokens make one distribution: 2 under classifier-free guidance.
        guidance: what makes one distribution of the streams, which a captured draft depends on; None: there is one.
        weighs: whether `weigh` does anything.
    """

    device: torch.device
    features: tuple[int, ...]
    inference: Mode
    streams: int
    guidance: Any
    weighs: bool

    def prefill(self, session: Session, inputs: Any, nodes: int) -> tuple[Prompt, Scores]:
        """Read the prompts of the session's rows into `session.cache`.

        Args:
            inputs: what came with the call.
            nodes: the most that a draft will hold, for which room is made.

        Returns:
            What a drafter may know of the prompts, and the scores [B, 1, V] after them.
        """

    def score(self, session: Session, draft: Draft) -> Scores:
        """One forward over every node of the draft [B, N], each seeing the row's cache and its own ancestors."""

    def commit(self, session: Session, round_: Round) -> None:
        """Keep the KV cache entries of the accepted nodes, drop the rest."""

    def embed(self, ids: Tensor) -> Tensor:
        """Input embeddings [..., H] of token ids; all streams read the same tokens."""

    def head(self, hidden: Tensor, vocab: Any = None) -> Tensor:
        """Raw logits [B, n, V] of final features [B, n, S·H]; of a DraftVocab's tokens alone where one is given.

        One is given on the option `draft_vocab`, which needs a target that says which tokens end an answer.
        """

    def weigh(self, logits: Tensor, session: SessionView[Any], position: Tensor) -> Tensor:
        """A drafter's logits [B, n, V] of the tokens at `position` [B, n], weighed as the target weighs its own."""


@runtime_checkable
class BareEmbedding(Protocol):
    """A target that has its embeddings, too, as they are before a norm that belongs to their table."""

    def bare_embed(self, ids: Tensor) -> Tensor:
        """Input embeddings [..., H] of token ids without that norm."""


class Drafter(Protocol[Memory]):
    """Proposes drafts. It depends on no target's class, and changes only its own memory in the session.

    Whatever it proposes, rule `exact` keeps the target's distribution: a bad drafter costs time, never quality. The
    loop calls `start` and `propose`; `enable` asks for the rest.

    Attributes:
        features: what it wants to read of the target, as `prompt.hidden` and `session.last.scores.hidden`, side by side
            on the last axis: layer i ≥ 0 (what enters it) or FINAL (after the last norm); `()` for nothing. What
            LIKELIEST asks for comes in a place of its own.
        nodes: the most nodes N of its drafts, the root included; room in the cache is made for so many.

    A drafter with options also has `options`, a frozen dataclass of its own, whose names `enable` takes. A drafter
    whose drafts depend on other rows and calls has `shares = True`: then a row's seed fixes its noise before anything
    is drafted, so that what it draws does not depend on them.
    """

    @property
    def features(self) -> tuple[int, ...]: ...

    @property
    def nodes(self) -> int: ...

    def fit(self, target: TargetInfo, given: Options) -> Drafter[Memory]:
        """Itself for this target, with the options that the user gave (`config.chosen` puts them into `options`).

        Raises:
            ValueError: it was made for another target, has no use for an option, or a value makes no sense.
        """

    def start(self, session: SessionView[Memory], target: Target, prompt: Prompt) -> Memory:
        """Memory for these rows, filled from the prompt; the loop keeps it as `session.memory`.

        Returns:
            Rows (it can `select` and `join`, since rows end and enter), which may be `Reporting`, or None for a drafter
            that remembers nothing.
        """

    def propose(self, session: SessionView[Memory], target: Target) -> Draft:
        """The next draft [B, N] for the rows under way, node 0 being `session.pending`.

        To be read: `session.rows[b].tokens` (prompt and answer so far, the pending token last), `session.memory`,
        `session.last` (the round before, the prefill's at first), `target.embed` and `target.head`. NO_TOKEN stands
        where a row has nothing to propose. A draft drawn at random must bring the distribution it was drawn from, as it
        was then.

        What is verified may be another draft: nothing but the root, or one whose first nodes are these, with the same
        parents, some of their tokens taken out or replaced, and nodes of others behind them.
        """


class Proposer(Protocol):
    """What the loop asks for drafts: a drafter, one whose drafts are captured, or one that is off for a while."""

    @property
    def features(self) -> tuple[int, ...]: ...

    @property
    def nodes(self) -> int: ...

    def start(self, session: Session, target: Target, prompt: Prompt) -> object:
        """As `Drafter.start`."""

    def propose(self, session: Session, target: Target) -> Draft:
        """As `Drafter.propose`."""
