"""Heads on the target's features that predict the tokens of a picture's Jacobi window from the left and from above."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmspec.config import Options, chosen
from mmspec.drafters.jacobi import JacobiDrafter
from mmspec.drafters.trained import FileConfig, beside
from mmspec.drafters.window import ALONE, WindowMemory, WindowOptions
from mmspec.functional import Linear
from mmspec.kernels import reference as ops
from mmspec.protocols import SessionView, Target, TargetInfo
from mmspec.types import FINAL, NO_TOKEN, Draft, Prompt, Round


class Captures(Protocol):
    """The captured forwards of the heads, such as `mmspec.compile.capture_cache.CaptureCache`."""

    def check(self, module: nn.Module) -> None: ...
    def forward(self, module: nn.Module, inputs: Sequence[Tensor]) -> Callable[..., Sequence[Tensor]] | None: ...


@dataclass(frozen=True)
class HeadsConfig(FileConfig):
    """The config of the heads of an image generation model.

    Attributes:
        hidden, vocab: H and V of the target.
        intermediate: width of their MLP.
        grid: G, tokens in a row of the picture.
        streams: number of streams whose features they read, concatenated; 2 under classifier-free guidance.
        columns: number of positions that they were trained to predict, counted from the first undecided one.
        window: recommended number of positions in a round, including the pending token's.
        target, target_revision: the model that they were trained for.
    """

    named: ClassVar[str] = "a heads drafter"

    hidden: int
    intermediate: int
    vocab: int
    grid: int
    streams: int = 2
    columns: int = 31
    window: int = 16
    features: tuple[int, ...] = (FINAL,)
    target: str = ""
    target_revision: str = ""

    def __post_init__(self) -> None:
        if self.features != (FINAL,):
            raise ValueError(f"heads continue the target's final feature, {FINAL}; got features {self.features}")


class View(NamedTuple):
    """The heads' view of a round: C positions after the pending token, and the G latest decided tokens."""

    features: Tensor  # [B, G + 1 + C, R·H], the target's after each token; zeros where it has read none
    scored: Tensor  # bool [B, C], whether the target scored this position in the last round, maybe after wrong tokens
    around: Tensor  # int64 [B, G + C], the G latest decided tokens and the guesses after them; NO_TOKEN for none
    fed: Tensor  # int64 [B, C], the token to the left as the target read it; NO_TOKEN where it has not
    place: Tensor  # int64 [B, C], the column of the picture

    @property
    def own(self) -> Tensor:
        """bool [B, C], whether the guess is the target's own, computed after the token that is now to the left."""
        return self.scored & (self.fed == self.around[..., -self.fed.shape[-1] - 1 : -1])


@dataclass
class HeadsMemory(WindowMemory):
    """A WindowMemory with the target's features after the last G + 1 tokens before the pending one, [B, G + 1, S·H]."""

    features: Tensor = field(default_factory=lambda: torch.empty(0))

    def append(self, last: Round) -> None:
        assert last.scores.hidden is not None
        new, count = last.scores.hidden, last.acceptance.count[:, None]
        wide = (-1, -1, new.shape[-1])
        path = torch.cat([self.features, new.gather(1, last.kept[..., None].expand(wide))], 1)
        here = count + torch.arange(self.features.shape[1], device=path.device)
        self.features = path.gather(1, here[..., None].expand(wide))
        super().append(last)


class HeadsDrafter(nn.Module):
    """A Jacobi window in which heads guess the positions that the target has not scored after the current left token.

    After SSD (2606.20543), whose heads predict the final features along the row and below it; there the verification of
    their proposals loses quality, here any rule can be used. Ours: one MLP for all positions, which also reads the
    target's features of the position from the round before; trained on windows that it drafted itself.

    If `reproducible=True` or temperature 0 fixes every token, the noise of its draw is known beforehand, and a guess is
    the token that the heads' distribution gives with that noise. Otherwise the heads are not used, and the window is
    that of `jacobi`.
    """

    method = "heads"
    Config = HeadsConfig
    options = WindowOptions()

    def __init__(self, config: HeadsConfig) -> None:
        super().__init__()
        self.config, c = config, config
        self.jacobi = JacobiDrafter(features=c.features)
        self.captures: Captures | None = None  # None: not captured
        wide = c.streams * c.hidden
        self.norms = nn.ModuleList(nn.RMSNorm(wide, 1e-6) for _ in range(4))
        self.embed_norm = nn.RMSNorm(c.hidden, 1e-6)
        self.column, self.place = nn.Embedding(c.columns, 16), nn.Embedding(c.grid, 16)
        self.enter = Linear(4 * (wide + c.hidden) + 33, c.intermediate)
        self.inner = Linear(c.intermediate, c.intermediate)
        self.leave, self.gate = Linear(c.intermediate, wide), Linear(c.intermediate, 2)

    @property
    def features(self) -> tuple[int, ...]:
        return self.config.features

    @property
    def nodes(self) -> int:
        return self.jacobi.nodes

    def fit(self, target: TargetInfo, given: Options) -> HeadsDrafter:
        """The same heads with the user's options, on the target's device.

        Raises ValueError: heads for another target, an option that they do not have, or a window that is too wide.
        """
        c = self.config
        if (c.hidden, c.vocab) != (target.hidden, target.vocab):
            raise ValueError(
                f"these heads were made for {c.target or 'another target'}, of width {c.hidden} with {c.vocab} tokens; "
                f"{target.name} has {target.hidden} and {target.vocab}. Use drafter='jacobi', which fits any"
            )
        options = chosen(WindowOptions(window=c.window), given, "the heads drafter")
        if options.proactive != ALONE or options.window > c.columns + 1:
            raise ValueError(
                f"these heads predict a chain of at most {c.columns} tokens; got {options}. Leave proactive out, and "
                f"choose window ≤ {c.columns + 1}"
            )
        fitted = beside(self, target)
        fitted.options = options
        fitted.jacobi = replace(self.jacobi, vocab=target.vocab, options=options)
        return fitted

    def captured(self, captures: Captures) -> HeadsDrafter:
        """The same drafter, with its forward captured and compiled for each shape."""
        twin = copy.copy(self)
        twin.captures = captures
        return twin

    def start(self, session: SessionView[HeadsMemory], target: Target, prompt: Prompt) -> HeadsMemory:
        """The memory of these rows. Raises ValueError: a target without a grid, or with another one."""
        width = prompt.grid[1] if prompt.grid else None
        if width != self.config.grid:
            raise ValueError(
                f"these heads were trained for pictures of {self.config.grid} tokens in a row; this target has "
                f"{'no grid' if width is None else width}. Use drafter='jacobi'"
            )
        if self.captures is not None:
            self.captures.check(self)
        seen, window = session.last.scores.hidden, self.jacobi.start(session, target, prompt)
        assert seen is not None
        zeros = seen.new_zeros(len(seen), self.config.grid + 1, seen.shape[-1])
        return HeadsMemory(window.decided, window.ends, window.init, window.q, zeros)

    @torch.no_grad()
    def propose(self, session: SessionView[HeadsMemory], target: Target) -> Draft:
        draft = self.jacobi.propose(session, target)
        if draft.q is not None or draft.tree.size == 1:
            return draft
        return self.better(draft, self.view(session, draft), session, target)

    def better(self, draft: Draft, view: View, session: SessionView[HeadsMemory], target: Target) -> Draft:
        """The draft with the heads' guesses in place of those that are not the target's own."""
        guess = draft.tokens[:, 1:]
        position = session.emitted[:, None] + torch.arange(guess.shape[1], device=guess.device)
        hidden = self._streams(self._predicted(view, target), target.streams)
        better = ops.likeliest(target.weigh(target.head(hidden), session, position))
        better = torch.where(view.own | (guess == NO_TOKEN), guess, better)
        return replace(draft, tokens=torch.cat([draft.tokens[:, :1], better], 1))

    def view(self, session: SessionView[HeadsMemory], draft: Draft) -> View:
        """The heads' view of a draft with a window's guesses."""
        last, memory, C = session.last, session.memory, draft.tokens.shape[1] - 1
        column, size = torch.arange(C, device=draft.tokens.device), last.draft.tree.size
        node = last.acceptance.count[:, None] + column  # the node of the last draft whose token was to the left
        exists, node = (node < size) & (size > 1), node.clamp(max=size - 1)
        fed = torch.where(exists, last.draft.tokens.gather(1, node), NO_TOKEN)
        scored = fed != NO_TOKEN
        assert last.scores.hidden is not None
        hidden = last.scores.hidden.gather(1, node[..., None].expand(-1, -1, last.scores.hidden.shape[-1]))
        features = torch.cat([memory.features, hidden * scored[..., None]], 1)
        around = torch.cat([memory.decided, draft.tokens[:, 1:]], 1)
        place = (session.emitted[:, None] + column) % self.config.grid
        return View(self._streams(features, self.config.streams), scored, around, fed, place)

    def _streams(self, features: Tensor, count: int) -> Tensor:
        """[B, n, S·H] as [B, n, count·H]: if S ≠ count, the first (conditional) stream is repeated."""
        H = self.config.hidden
        return features if features.shape[-1] == count * H else features[..., :H].repeat(1, 1, count)

    def inputs(self, view: View, embed: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """The arguments of `forward`, with the target's embeddings."""
        around, fed = (embed(ids.clamp(min=0)) * (ids != NO_TOKEN)[..., None] for ids in (view.around, view.fed))
        return [view.features, view.scored, around, fed, view.place]

    def _predicted(self, view: View, target: Target) -> Tensor:
        inputs = self.inputs(view, target.embed)
        function = None if self.captures is None else self.captures.forward(self, inputs)
        return self(*inputs) if function is None else function(*inputs)[0]

    def forward(self, features: Tensor, scored: Tensor, around: Tensor, fed: Tensor, place: Tensor) -> Tensor:
        """Final features [B, C, R·H] at the C positions; the arguments are as in View, with embeddings for tokens."""
        G, C = self.config.grid, scored.shape[1]
        on = scored[..., None].to(features.dtype)
        here, above, right = features[:, G + 1 :], features[:, 1 : C + 1], features[:, 2 : C + 2]
        seen = [here, above, right, features[:, G : G + 1].expand_as(here)]
        tokens = self.embed_norm(around)
        near = (tokens[:, G - 1 : -1], self.embed_norm(fed), tokens[:, :C], tokens[:, 1 : C + 1])
        column = self.column.weight[:C].expand(len(scored), -1, -1)
        read = [n(f) for n, f in zip(self.norms, seen, strict=True)]
        x = F.silu(self.enter(torch.cat([*read, *near, column, self.place(place), on], -1)))
        x = x + F.silu(self.inner(x))
        own, over = self.gate(x).sigmoid().split(1, -1)
        return here * own + above * (1 - on * own) * over + self.leave(x)
