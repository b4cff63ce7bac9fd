"""Training of heads for pictures, on windows that they drafted themselves, towards the target's distributions there."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from tqdm import tqdm

from mmspec.config import Options
from mmspec.drafters.heads import HeadsDrafter, HeadsMemory, View
from mmspec.progress import bar
from mmspec.protocols import SessionView, Target, TargetInfo
from mmspec.replacing import replaced
from mmspec.train.data import TrainingSample
from mmspec.train.distil import Distillation, finite
from mmspec.train.stop import Stop
from mmspec.train.trace import Teaches
from mmspec.types import Draft, Prompt

Note = tuple[int, int, View]  # index of the picture, number of decided tokens, and the heads' view
PARTS = 3  # of a run: before each, some of the pictures are drawn with the current heads
ROUNDS = 32  # average number of rounds of a picture that are used for training
OWN = 0.15  # weight of positions whose guess is the target's own, relative to the others


class Draws(Teaches, Protocol):
    def draw(
        self, samples: Sequence[TrainingSample], drafter: WindowRecorder, seeds: Sequence[int]
    ) -> tuple[list[list[int]], float]:
        """A picture for each sample, by its seed, with this drafter: its tokens, and the tokens per forward."""


@dataclass
class WindowRecorder:
    """Drafts like the heads, in their widest window, and records their views.

    Attributes:
        note: called with the picture's index, the number of its decided tokens, and one row of the View.
        silent: the heads are untrained, so their guesses are not used.
    """

    heads: HeadsDrafter
    note: Callable[[int, int, View], None]
    silent: bool = False

    @property
    def features(self) -> tuple[int, ...]:
        return self.heads.features

    @property
    def nodes(self) -> int:
        return self.heads.config.columns + 1

    def fit(self, target: TargetInfo, given: Options) -> WindowRecorder:
        return WindowRecorder(self.heads.fit(target, {"window": self.nodes}), self.note, self.silent)

    def start(self, session: SessionView[HeadsMemory], target: Target, prompt: Prompt) -> HeadsMemory:
        return self.heads.start(session, target, prompt)

    @torch.no_grad()
    def propose(self, session: SessionView[HeadsMemory], target: Target) -> Draft:
        draft = self.heads.jacobi.propose(session, target)
        view = self.heads.view(session, draft)
        for b, row in enumerate(session.rows):
            self.note(row.index, int(session.emitted[b]), View(*(t[b].cpu() for t in view)))
        return draft if self.silent else self.heads.better(draft, view, session, target)


@dataclass(frozen=True)
class Rounds:
    """The heads' views of N rounds, one row each, and the target's features for the tokens that they had to guess."""

    views: View  # [N, …]
    picture: Tensor  # int64 [N]
    emitted: Tensor  # int64 [N]
    features: Tensor  # [pictures, n, S·H], features whose logits are the target's distribution of each token

    def save(self, path: Path) -> None:
        with replaced(path, path.with_suffix(".part")) as part:  # no second one after a kill
            torch.save([*self.views, self.picture, self.emitted, self.features], part)

    @classmethod
    def load(cls, path: Path) -> Rounds:
        """Raises ValueError: it is missing or damaged."""
        try:
            *views, picture, emitted, features = torch.load(path, weights_only=True)
            return cls(View(*views), picture, emitted, features)
        except Exception as error:  # on other bytes torch may raise any error
            raise ValueError(
                f"{path} cannot be read ({type(error).__name__}: {error}), and the steps to come learn from it; delete "
                "checkpoint.pt beside it to begin anew"
            ) from error

    def first(self, pictures: int) -> Rounds:
        """The rounds of the first pictures."""
        kept = self.picture < pictures
        views = View(*(t[kept] for t in self.views))
        return Rounds(views, self.picture[kept], self.emitted[kept], self.features[:pictures])

    def join(self, other: Rounds) -> Rounds:
        """These rounds and those of other pictures."""
        views = View(*(torch.cat(pair) for pair in zip(self.views, other.views, strict=True)))
        picture = torch.cat([self.picture, other.picture + len(self.features)])
        emitted, features = (torch.cat([getattr(r, name) for r in (self, other)]) for name in ("emitted", "features"))
        return Rounds(views, picture, emitted, features)

    def batch(self, rows: Tensor, device: torch.device) -> tuple[View, Tensor, Tensor]:
        """Some rounds: their views, the target's features [b, C, S·H] at the C positions, and which positions exist."""
        view = View(*(t[rows].to(device) for t in self.views))
        position, n = self.emitted[rows, None] + torch.arange(view.fed.shape[1]), self.features.shape[1]
        features = self.features[self.picture[rows, None], position.clamp(max=n - 1)]
        return view._replace(features=view.features.float()), features.to(device).float(), (position < n).to(device)


class HeadsTraining(Distillation):
    """One training run of heads, in one process; it resumes after the last finished part, or where it was stopped.

    The loss is the total variation between the distributions, since a guess made with the target's own noise is right
    about as often as they overlap, plus a tenth of the cross-entropy; guesses that are not the target's own weigh more.
    """

    teacher: Draws

    def run(self, save_every: float = 0.0, measure_every: int = 0) -> float:
        """Train to the recipe's end; returns the number of tokens per forward on held-out pictures.

        Raises ValueError: fewer pictures to learn from than parts.
        """
        if len(self.samples) < PARTS:
            raise ValueError(
                f"heads learn in {PARTS} parts, each from other pictures; {len(self.samples)} are left beside those "
                "that are held out, so give more prompts"
            )
        self.resume()
        each, path = -(-self.recipe.steps // PARTS), self.out / "rounds.pt"  # rounds of all parts that have saved steps
        drawn = sum(len(self.samples[part::PARTS]) for part in range(-(-self.step // max(1, each))))
        more = 0 < self.step < self.recipe.steps
        rounds = Rounds.load(path).first(drawn) if more else None  # a part of which no step was saved comes again
        with tqdm(total=self.recipe.steps, initial=self.step, desc="train", **bar(True)) as steps:
            while self.step < self.recipe.steps:
                part = self.step // each
                if rounds is None or self.step % each == 0:
                    new, tau = self._drawn(self.samples[part::PARTS], part)
                    rounds = new if rounds is None else rounds.join(new)
                    tqdm.write(f"step {self.step}: {tau:.2f} tokens of a picture per forward")
                with Stop(self.accelerator, self.device) as stop:
                    for step in range(self.step, min((part + 1) * each, self.recipe.steps)):
                        began = time.process_time()
                        chosen = torch.Generator().manual_seed(self.recipe.seed * 100003 + step)
                        rows = torch.randint(len(rounds.picture), (self.recipe.batch,), generator=chosen)
                        loss = self.learn(*rounds.batch(rows, self.device))
                        self.seconds += time.process_time() - began
                        self.step += 1
                        finite(loss, self.step)
                        steps.set_postfix(loss=f"{loss:.3f}", refresh=False)
                        steps.update()
                        if stop.asked():
                            break
                    rounds.save(path)
                    self.save()
                    if stop.asked():
                        raise self.stopped()
        return self._drawn(self.held_out, PARTS)[1]

    def _drawn(self, samples: Sequence[TrainingSample], part: int) -> tuple[Rounds, float]:
        """Draw pictures with the current heads; returns the rounds, and the number of tokens per forward."""
        self.network.eval()
        random = torch.Generator().manual_seed(self.recipe.seed * 100003 + part)
        kept, features, taus = list[Note](), list[Tensor](), list[float]()
        for first in range(0, len(samples), self.recipe.writing):
            group, seen = samples[first : first + self.recipe.writing], list[Note]()

            def note(row: int, emitted: int, view: View, first: int = first, seen: list[Note] = seen) -> None:
                seen.append((first + row, emitted, view._replace(features=view.features.half())))

            seeds = [self.recipe.seed * 100003 + part * len(self.samples) + first + i for i in range(len(group))]
            answers, tau = self.teacher.draw(group, WindowRecorder(self.drafter, note, silent=part == 0), seeds)
            kept += [seen[i] for i in torch.randperm(len(seen), generator=random)[: ROUNDS * len(group)].tolist()]
            features.append(self.teacher.trace(group, answers).final[:, -len(answers[0]) - 1 : -1].half().cpu())
            taus += [tau] * len(group)
        pictures, emitted, views = zip(*kept, strict=True)
        stacked = View(*map(torch.stack, zip(*views, strict=True)))
        rounds = Rounds(stacked, torch.tensor(pictures), torch.tensor(emitted), torch.cat(features))
        return rounds, statistics.fmean(taus)

    def learn(self, view: View, features: Tensor, exists: Tensor) -> float:
        """One optimizer step on a batch of rounds; returns the loss."""
        self.network.train()
        with self.computing():
            with torch.no_grad():
                p = self.teacher.head(features).softmax(-1)
            log_q = self.teacher.head(self.network(*self.drafter.inputs(view, self.teacher.embed))).log_softmax(-1)
        r, weight = self.recipe, exists * torch.where(view.own, OWN, 1.0)
        each = r.law_weight * (p - log_q.exp()).abs().sum(-1) / 2 - r.token_weight * (p * log_q).sum(-1)
        return self.stepped((each * weight).sum() / weight.sum(), r)
