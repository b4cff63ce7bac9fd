"""What a target saw and thought along its own texts, and lessons that remember it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Protocol

from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mmspec.train.data import TrainingSample, lengths_sorted


@dataclass(frozen=True)
class Trace:
    """What the target saw and thought along one batch of sequences; S streams side by side. Texts are padded on the
    right, prompts of pictures on the left, pictures on the right."""

    ids: Tensor  # [B, T]
    embeds: Tensor  # [B, T, S·H], visual features in their places
    features: Tensor  # [B, T, S·F], what the drafter reads
    final: Tensor  # [B, T, S·H], final hidden states, what the target's head reads
    valid: Tensor  # bool [B, T]
    answered: Tensor  # bool [B, T], the target's own tokens
    visual: Tensor  # int64 [B, T], k ≥ 1 at the tokens of the row's k-th image or video frame, 0 at all others
    positions: Tensor  # [B, T, A], the target's own position ids, on A axes; of what draws a count
    start: int = 0  # the drafter's rotary position of row 0; on a grid, behind P rows of prompt, 1 − P

    def rows(self) -> list[Trace]:
        """Every row by itself, without the padding behind it."""
        lines = []
        for b, valid in enumerate(self.valid):
            length = int(valid.nonzero()[-1]) + 1
            cut = {name: getattr(self, name)[b : b + 1, :length].clone() for name in _TENSORS}
            if self.features is self.final:
                cut["features"] = cut["final"]
            lines.append(replace(self, **cut))
        return lines

    @classmethod
    def of(cls, rows: Sequence[Trace]) -> Trace:
        """Rows as one batch, padded on the right."""
        padded = {name: pad_sequence([getattr(row, name)[0] for row in rows], batch_first=True) for name in _TENSORS}
        return cls(**padded, start=rows[0].start)

    @property
    def bytes(self) -> int:
        tensors = {t.data_ptr(): t for t in (getattr(self, name) for name in _TENSORS)}
        return sum(t.nbytes for t in tensors.values())


_TENSORS = tuple(f.name for f in fields(Trace) if f.name != "start")


class Teaches(Protocol):
    def answers(
        self, samples: Sequence[TrainingSample], max_new_tokens: int, temperature: float
    ) -> list[list[int]]: ...

    def trace(self, samples: Sequence[TrainingSample], answers: Sequence[Sequence[int]]) -> Trace: ...

    def head(self, hidden: Tensor) -> Tensor: ...

    def embed(self, ids: Tensor) -> Tensor: ...


@dataclass
class Lesson:
    """Samples of one kind with the target's answers; traces read ahead come from memory, others from the teacher."""

    teacher: Teaches
    samples: Sequence[TrainingSample]
    answers: Sequence[list[int]]
    held: dict[int, Trace] = field(default_factory=dict)  # by the sample's place

    @property
    def lengths(self) -> list[tuple[int, int]]:
        """By what makes samples long: pictures first, then tokens."""
        return [(sample.images, len(answer)) for sample, answer in zip(self.samples, self.answers, strict=True)]

    def read(self, batch: int, room: int) -> int:
        """Trace the samples, a batch at a time, as long as there is room; returns the bytes that are left of it."""
        for group in lengths_sorted(self.lengths, batch):
            if room <= 0:
                break
            self.held.update(zip(group, self.trace(group).rows(), strict=True))
            room -= sum(self.held[i].bytes for i in group)
        return room

    def trace(self, places: Sequence[int]) -> Trace:
        """The trace of the samples at some places, as one batch."""
        if all(i in self.held for i in places):
            return Trace.of([self.held[i] for i in places])
        return self.teacher.trace([self.samples[i] for i in places], [self.answers[i] for i in places])
