"""Heads on the target's features: they foretell the tokens of a picture's window from their left and from above."""

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


@dataclass(frozen=True)
class HeadsConfig(FileConfig):
    """What the heads of a model that draws are made with.

    Attributes:
        hidden, vocab: H and V of the target.
        intermediate: width of their MLP.
        grid: G, tokens in a row of the picture.
        streams: of how many streams they read the features, side by side; 2 under classifier-free guidance.
        columns: how many positions they were trained to foretell, counted from the first that is not decided.
        window: how many positions they recommend to look at in a round, the pending token's included.
        target, target_revision: what they were trained for.
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


class View(NamedTuple):
    """What the heads see of a round: C positions behind the pending token, G tokens before it."""

    features: Tensor  # [B, G + 1 + C, R·H], the target's after each token; zeros where it has read none
    known: Tensor  # bool [B, C], whether the target has said in the last round what stands here, be it on wrong tokens
    around: Tensor  # int64 [B, G + C], the G tokens decided last and the guesses behind them; NO_TOKEN for none
    fed: Tensor  # int64 [B, C], the token to the left as the target read it; NO_TOKEN where it has not
    place: Tensor  # int64 [B, C], the column of the picture

    @property
    def own(self) -> Tensor:
        """bool [B, C], whether the guess is the target's own: it made it of the token that stands to the left."""
        return self.known & (self.fed == self.around[..., -self.fed.shape[-1] - 1 : -1])


@dataclass
class HeadsMemory(WindowMemory):
    """A WindowMemory with the target's features after the last tokens before the pending one, [B, G + 1, S·H]."""

    features: Tensor = field(default_factory=lambda: torch.empty(0))

    def append(self, last: Round) -> None:
        assert last.scores.hidden is not None
        new, count = last.scores.hidden, last.acceptance.count[:, None]
        wide = (-1, -1, new.shape[-1])
        path = torch.cat([self.features, new.gather(1, last.kept[..., None].expand(wide))], 1)
        here = count + torch.arange(self.features.shape[1], device=path.device)
        self.features = path.gather(1, here[..., None].expand(wide))
        super().append(last)


class Captured(Protocol):
    """What is captured of them, a mmspec.compile.held.Held."""

    def check(self, module: nn.Module) -> None: ...
    def forward(self, module: nn.Module, inputs: Sequence[Tensor]) -> Callable[..., Sequence[Tensor]] | None: ...


class HeadsDrafter(nn.Module):
    """A Jacobi window in which heads guess where the target has not spoken yet, or has read another token to the left.

    After SSD (2606.20543), whose heads foretell the final features along the row and below it; there what they propose
    is verified with a loss of quality, here under any rule. Ours: one MLP for all positions, which also reads what the
    target made of the position in the round before; trained on windows that it has drafted itself.

    Where `reproducible=True` or temperature 0 fixes every token, the noise of its draw is known beforehand, and a guess
    is what the heads' distribution gives with that noise. Elsewhere the heads are silent, and the window is that of
    `jacobi`.
    """

    method = "heads"
    Config = HeadsConfig
    options = WindowOptions()

    def __init__(self, config: HeadsConfig) -> None:
        super().__init__()
        self.config, c = config, config
        self.jacobi = JacobiDrafter(features=c.features)
        self.held: Captured | None = None  # None: they run as they are
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

        Raises:
            ValueError: another target's heads, an option that they have no use for, or a window that is too wide.
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
                f"these heads foretell a chain of at most {c.columns} tokens; got {options}. Leave proactive out, and "
                f"choose window ≤ {c.columns + 1}"
            )
        fitted = beside(self, target)
        fitted.options = options
        fitted.jacobi = replace(self.jacobi, vocab=target.vocab, options=options)
        return fitted

    def captured(self, held: Captured) -> HeadsDrafter:
        """The same, with its forward captured and compiled, a function for each shape."""
        twin = copy.copy(self)
        twin.held = held
        return twin

    def start(self, session: SessionView[HeadsMemory], target: Target, prompt: Prompt) -> HeadsMemory:
        """What these rows carry.

        Raises:
            ValueError: a target without a grid, or with another one.
        """
        width = prompt.grid[1] if prompt.grid else None
        if width != self.config.grid:
            raise ValueError(
                f"these heads were trained for pictures of {self.config.grid} tokens in a row; here "
                f"{'is no grid' if width is None else f'are {width}'}. Use drafter='jacobi'"
            )
        if self.held is not None:
            self.held.check(self)
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
        """A draft in which the heads' guesses take the place of those that are not the target's own."""
        guess = draft.tokens[:, 1:]
        position = session.emitted[:, None] + torch.arange(guess.shape[1], device=guess.device)
        hidden = self._streams(self._foretold(view, target), target.streams)
        better = ops.likeliest(target.weigh(target.head(hidden), session, position))
        better = torch.where(view.own | (guess == NO_TOKEN), guess, better)
        return replace(draft, tokens=torch.cat([draft.tokens[:, :1], better], 1))

    def view(self, session: SessionView[HeadsMemory], draft: Draft) -> View:
        """What the heads see of a draft with a window's guesses."""
        last, memory, C = session.last, session.memory, draft.tokens.shape[1] - 1
        column, size = torch.arange(C, device=draft.tokens.device), last.draft.tree.size
        node = last.acceptance.count[:, None] + column  # of the last draft, whose token stood to the left
        there, node = (node < size) & (size > 1), node.clamp(max=size - 1)
        fed = torch.where(there, last.draft.tokens.gather(1, node), NO_TOKEN)
        known = fed != NO_TOKEN
        assert last.scores.hidden is not None
        said = last.scores.hidden.gather(1, node[..., None].expand(-1, -1, last.scores.hidden.shape[-1]))
        features = torch.cat([memory.features, said * known[..., None]], 1)
        around = torch.cat([memory.decided, draft.tokens[:, 1:]], 1)
        place = (session.emitted[:, None] + column) % self.config.grid
        return View(self._streams(features, self.config.streams), known, around, fed, place)

    def _streams(self, features: Tensor, count: int) -> Tensor:
        """[B, n, S·H] as [B, n, count·H]: where it is another number, all are as the first, which is conditional."""
        H = self.config.hidden
        return features if features.shape[-1] == count * H else features[..., :H].repeat(1, 1, count)

    def inputs(self, view: View, embed: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """What `forward` takes, with the target's embeddings."""
        around, fed = (embed(ids.clamp(min=0)) * (ids != NO_TOKEN)[..., None] for ids in (view.around, view.fed))
        return [view.features, view.known, around, fed, view.place]

    def _foretold(self, view: View, target: Target) -> Tensor:
        inputs = [t.contiguous() for t in self.inputs(view, target.embed)]
        function = None if self.held is None else self.held.forward(self, inputs)
        return self(*inputs) if function is None else function(_none, *inputs)[0]

    def forward(self, features: Tensor, known: Tensor, around: Tensor, fed: Tensor, place: Tensor) -> Tensor:
        """Final features [B, C, R·H] at the C positions; of what `View` has, embeddings in the place of tokens."""
        G, C = self.config.grid, known.shape[1]
        on = known[..., None].to(features.dtype)
        said, above, right = features[:, G + 1 :], features[:, 1 : C + 1], features[:, 2 : C + 2]
        seen = [said, above, right, features[:, G : G + 1].expand_as(said)]
        words = self.embed_norm(around)
        near = (words[:, G - 1 : -1], self.embed_norm(fed), words[:, :C], words[:, 1 : C + 1])
        column = self.column.weight[:C].expand(len(known), -1, -1)
        read = [n(f) for n, f in zip(self.norms, seen, strict=True)]
        x = F.silu(self.enter(torch.cat([*read, *near, column, self.place(place), on], -1)))
        x = x + F.silu(self.inner(x))
        own, over = self.gate(x).sigmoid().split(1, -1)
        return said * own + above * (1 - on * own) * over + self.leave(x)


def _none(*_: Tensor) -> Tensor:
    raise AssertionError("heads have no attention")
