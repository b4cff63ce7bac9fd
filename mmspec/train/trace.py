"""Traces: the target's embeddings and hidden states along its own texts, and lessons, which cache them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Protocol

from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mmspec.train.data import TrainingSample, lengths_sorted


@dataclass(frozen=True)
class Trace:
    """The target's embeddings and hidden states along one batch of sequences; S streams are concatenated. Texts are
    padded on the right; for image generation, prompts are padded on the left and pictures on the right."""

    ids: Tensor  # [B, T]
    embeds: Tensor  # [B, T, S·H], visual features in their places
    features: Tensor  # [B, T, S·F], those that the drafter reads
    final: Tensor  # [B, T, S·H], final hidden states, the input of the target's head
    valid: Tensor  # bool [B, T]
    answered: Tensor  # bool [B, T], tokens that the target generated
    visual: Tensor  # int64 [B, T], k ≥ 1 at the tokens of the row's k-th image or video frame, 0 at all others
    positions: Tensor  # [B, T, A], the target's position ids on A axes; 0, 1, … for image generation
    start: int = 0  # the drafter's rotary position of row 0; on a grid after P rows of prompt, 1 − P

    def rows(self) -> list[Trace]:
        """The trace of each row, without padding at its end."""
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
        """One trace of several rows, padded on the right."""
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
    """Samples of one kind with the target's answers; their traces are cached or computed by the teacher."""

    teacher: Teaches
    samples: Sequence[TrainingSample]
    answers: Sequence[list[int]]
    cache: dict[int, Trace] = field(default_factory=dict)  # by the sample's index

    @property
    def lengths(self) -> list[tuple[int, int]]:
        """The length of each sample: number of pictures, then of answer tokens."""
        return [(sample.images, len(answer)) for sample, answer in zip(self.samples, self.answers, strict=True)]

    def read(self, batch: int, room: int) -> int:
        """Cache the samples' traces, batch by batch, while there is room; returns the remaining bytes."""
        for group in lengths_sorted(self.lengths, batch):
            if room <= 0:
                break
            self.cache.update(zip(group, self.trace(group).rows(), strict=True))
            room -= sum(self.cache[i].bytes for i in group)
        return room

    def trace(self, indices: Sequence[int]) -> Trace:
        """The trace of some samples as one batch."""
        if all(i in self.cache for i in indices):
            return Trace.of([self.cache[i] for i in indices])
        return self.teacher.trace([self.samples[i] for i in indices], [self.answers[i] for i in indices])
