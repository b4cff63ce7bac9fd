"""A frozen model that draws as a teacher: it draws pictures as for a user, and hands over its features along them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mmspec.config import Options
from mmspec.drafters.draft_vocab import DraftVocab
from mmspec.drafters.plain import Plain
from mmspec.pipelines.families import table as families
from mmspec.pipelines.host.image_models import ImageModel
from mmspec.pipelines.llamagen.pipeline import LlamaGenPipeline
from mmspec.pipelines.patch import enable
from mmspec.protocols import Drafter, TargetInfo
from mmspec.session import Row, Session
from mmspec.train.data import TrainingSample
from mmspec.train.trace import Trace
from mmspec.tree import chain
from mmspec.types import FINAL, Acceptance, Categorical, Draft, Prompt, Scores

PIECE = 512  # tokens of a picture that one forward reads, so that not all of its distributions are in memory at once


class Traced(BaseException):
    """Carries a trace out of the call for pictures in which it was read; None: that call is for fewer pictures.

    No Exception, so that no call runs on.
    """

    def __init__(self, trace: Trace | None) -> None:
        self.trace = trace


class PictureRecorder(Plain):
    """Proposes nothing, and notes the rows of all calls; with answers, reads these in the place of what is drawn, and
    ends the first call with `Traced`."""

    def __init__(self, features: tuple[int, ...], answers: Sequence[Sequence[int]] | None = None) -> None:
        self.reads = features
        self.features = features if FINAL in features else (*features, FINAL)
        self.answers = answers
        self.rows: list[Row] = []
        self.target: Any = None

    @property
    def nodes(self) -> int:  # type: ignore[override]  # as many as it reads at once
        return 1 if self.answers is None else min(PIECE, max(map(len, self.answers)))

    def fit(self, target: TargetInfo, given: Options) -> PictureRecorder:
        return self

    def start(self, session: Session, target: Any, prompt: Prompt) -> None:  # type: ignore[override]
        self.rows += session.rows
        self.target = target
        if self.answers is not None:
            alike = len(self.answers) == len(session.rows)
            raise Traced(self._trace(session, target, prompt, self.answers) if alike else None)

    def _trace(self, session: Session, target: Any, prompt: Prompt, answers: Sequence[Sequence[int]]) -> Trace:
        device, S = session.pending.device, target.streams
        ids = pad_sequence([torch.tensor(row, device=device) for row in answers], batch_first=True)
        said = torch.arange(ids.shape[1], device=device) < torch.tensor([*map(len, answers)], device=device)[:, None]
        assert prompt.hidden is not None and prompt.embeds is not None  # it asks for features
        read = [prompt.hidden, *_along(session, target, ids)]
        each = torch.cat(read, 1).unflatten(-1, (S, len(self.features), -1))  # [B, T, S, features, H]
        final = each[..., self.features.index(FINAL), :].flatten(-2)
        seen = each[..., [self.features.index(i) for i in self.reads], :].flatten(-3)
        embeds = target.embed(ids)
        before = torch.zeros_like(prompt.ids)
        T = before.shape[1] + ids.shape[1]
        start = 1 - before.shape[1] if getattr(target, "grid", None) else 0  # the prompt stands before the grid
        return Trace(
            torch.cat([prompt.ids, ids], 1), torch.cat([prompt.embeds, torch.cat([embeds] * S, -1)], 1),
            final if self.reads == (FINAL,) else seen, final, torch.cat([prompt.valid, said], 1),
            torch.cat([before.bool(), said], 1), torch.cat([prompt.visual, torch.zeros_like(ids)], 1),
            torch.arange(start, start + T, device=device).expand(len(ids), T)[..., None], start,
        )  # fmt: skip


def _along(session: Session, target: Any, ids: Tensor) -> list[Tensor]:
    """The features [B, n, S·F] of these tokens [B, N], a piece after the other, each read as a draft that stands."""
    read = []
    for first in range(0, ids.shape[1], PIECE):
        tokens = ids[:, first : first + PIECE]
        B, n = tokens.shape
        draft = Draft(tokens, chain(n, ids.device).expand(B))
        _, hidden = target.nodes(session, draft)
        read.append(hidden)
        if first + n < ids.shape[1]:
            count = torch.full((B,), n, device=ids.device)
            stands = Acceptance(torch.ones_like(tokens, dtype=torch.bool), count, count - 1, ids[:, first + n])
            target.commit(session, session.commit(draft, Scores(Categorical(ids=tokens), hidden), stands))
    return read


class ImageTeacher:
    """Context manager around a pipeline or model that draws.

    Args:
        painter: a LlamaGenPipeline, or a model with the way it is called.
        features: what the drafter reads of it.
        settings: of its calls, such as `guidance_scale`; the drafter learns to draft under these.
    """

    def __init__(
        self, painter: LlamaGenPipeline | ImageModel, features: tuple[int, ...], settings: Options | None = None
    ) -> None:
        self.painter, self.features, self.settings = painter, features, dict(settings or {})
        self.model: Any = painter.target if isinstance(painter, ImageModel) else painter
        network: Any = families.unwrap(self.model) if isinstance(painter, ImageModel) else painter.transformer
        network.eval().requires_grad_(False)
        self.dtype: torch.dtype = network.dtype
        self._target: Any = None
        self._alone = False  # whether its calls are for one picture each

    def __enter__(self) -> ImageTeacher:
        return self

    def __exit__(self, *_: object) -> None:
        self._target = None

    @property
    def target(self) -> Any:
        """The session's view of the model, with the guidance of its calls.

        Raises:
            RuntimeError: nothing was drawn or read yet, which is how it becomes known.
        """
        if self._target is None:
            raise RuntimeError("the teacher draws or reads a picture first; its head and its guidance come from there")
        return self._target

    def head(self, hidden: Tensor, vocab: DraftVocab | None = None) -> Tensor:
        """Guided logits [..., V], or of a draft vocabulary [..., V_d], of all streams' final features [..., S·H]: what
        is verified, before temperature and top-k."""
        return self.target.head(hidden.flatten(0, -2)[None], vocab).view(*hidden.shape[:-1], -1)

    def embed(self, ids: Tensor) -> Tensor:
        return self.target.embed(ids)

    def _drawn(self, samples: Sequence[TrainingSample], generator: list[torch.Generator] | None = None) -> Any:
        prompts = [sample.prompt for sample in samples]
        if isinstance(self.painter, ImageModel):
            return self.painter.draw(prompts, **self.settings)
        classes = self.painter.transformer.config.classes
        if classes and not all(prompt.isdigit() for prompt in prompts):
            raise ValueError(
                f"this model draws classes, so a prompt is a number from 0 to {classes - 1}; got {prompts}"
            )
        what: dict[str, Any] = {"class_labels": [int(p) for p in prompts]} if classes else {"prompt": prompts}
        return self.painter(**what, **self.settings, generator=generator, output_type="latent")

    def _recorded(self, samples: Sequence[TrainingSample], recorder: PictureRecorder) -> None:
        """Make the call with this recorder, to its end."""
        try:
            with enable(self.model, drafter=recorder, reproducible=True):
                self._drawn(samples)
        finally:
            self._target = recorder.target

    @torch.no_grad()
    def answers(self, samples: Sequence[TrainingSample], max_new_tokens: int, temperature: float) -> list[list[int]]:
        """Token ids of one whole picture per prompt, drawn as a plain call would; nothing is cut."""
        recorder = PictureRecorder(())
        self._recorded(samples, recorder)
        if len(recorder.rows) != len(samples):
            raise ValueError(
                f"{len(samples)} prompts gave {len(recorder.rows)} pictures; what draws has to call `generate` once "
                "for all prompts, or once for each, and nothing else"
            )
        return [row.tokens[row.start :] for row in recorder.rows]

    @torch.no_grad()
    def draw(
        self, samples: Sequence[TrainingSample], drafter: Drafter, seeds: Sequence[int]
    ) -> tuple[list[list[int]], float]:
        """A picture of a pipeline for each sample, by its seed, with this drafter: token ids, and how many a forward of
        the target gave."""
        with enable(self.model, drafter=drafter, reproducible=True):
            made = self._drawn(samples, [torch.Generator().manual_seed(seed) for seed in seeds])
        ids: list[list[int]] = made.tokens.flatten(1).tolist()
        return ids, made.tokens.numel() / (made.stats.row_rounds + len(ids))

    @torch.no_grad()
    def trace(self, samples: Sequence[TrainingSample], answers: Sequence[Sequence[int]]) -> Trace:
        """What the model says along these pictures, all of its streams, in a call that is made for nothing else.

        Raises:
            ValueError: what draws makes no call that mmspec takes part in.
        """
        if self._alone:
            each = zip(samples, answers, strict=True)
            return Trace.of([row for one, answer in each for row in self._read([one], [answer]).rows()])
        return self._read(samples, answers)

    def _read(self, samples: Sequence[TrainingSample], answers: Sequence[Sequence[int]]) -> Trace:
        recorder = PictureRecorder(self.features, answers)
        try:
            self._recorded(samples, recorder)
        except Traced as read:
            if read.trace is not None:
                return read.trace
            self._alone = len(samples) > 1
            if self._alone:
                return self.trace(samples, answers)
        raise ValueError(
            f"{type(families.unwrap(self.model)).__name__} drew {len(samples)} pictures in no call of `generate` for "
            "as many, which is what a teacher reads"
        )

    def open(self, sample: TrainingSample) -> None:
        """Make `target` known, and what goes wrong in a call."""
        self.trace([sample], [[0]])
