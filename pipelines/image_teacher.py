"""The teacher in distillation for image models: a frozen model generates images and returns its features for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mmspec.config import Options
from mmspec.drafters.draft_vocab import DraftVocab
from mmspec.drafters.plain import Plain
from mmspec.pipelines.host import wrappers
from mmspec.pipelines.host.image_models import ImageModel
from mmspec.pipelines.llamagen.pipeline import LlamaGenPipeline
from mmspec.pipelines.patch import enable
from mmspec.protocols import Drafter, TargetInfo
from mmspec.session import Row, Session
from mmspec.train.data import TrainingSample
from mmspec.train.trace import Trace
from mmspec.tree import chain
from mmspec.types import FINAL, Acceptance, Categorical, Draft, Prompt, Scores

PIECE = 512  # image tokens per forward, which limits how many distributions are in memory at once


class Traced(BaseException):
    """Carries a trace out of the generate call that recorded it; None: the call has another number of rows.

    It is a BaseException, so that no `except Exception` on the way swallows it.
    """

    def __init__(self, trace: Trace | None) -> None:
        self.trace = trace


class PictureRecorder(Plain):
    """A drafter that proposes nothing and records the rows of all calls. With answers, it runs the target on these
    instead of generating, and ends the first call by raising `Traced`."""

    def __init__(self, features: tuple[int, ...], answers: Sequence[Sequence[int]] | None = None) -> None:
        self.reads = features
        self.features = features if FINAL in features else (*features, FINAL)
        self.answers = answers
        self.rows: list[Row] = []
        self.target: Any = None

    @property
    def nodes(self) -> int:  # type: ignore[override]  # the tokens of one forward
        return 1 if self.answers is None else min(PIECE, max(map(len, self.answers)))

    def fit(self, target: TargetInfo, given: Options) -> PictureRecorder:
        return self

    def start(self, session: Session, target: Any, prompt: Prompt) -> None:  # type: ignore[override]
        self.rows += session.rows
        self.target = target
        if self.answers is not None:
            matches = len(self.answers) == len(session.rows)
            raise Traced(self._trace(session, target, prompt, self.answers) if matches else None)

    def _trace(self, session: Session, target: Any, prompt: Prompt, answers: Sequence[Sequence[int]]) -> Trace:
        device, S = session.pending.device, target.streams
        ids = pad_sequence([torch.tensor(row, device=device) for row in answers], batch_first=True)
        valid = torch.arange(ids.shape[1], device=device) < torch.tensor([*map(len, answers)], device=device)[:, None]
        assert prompt.hidden is not None and prompt.embeds is not None  # since it asks for features
        hidden = [prompt.hidden, *_features(session, target, ids)]
        each = torch.cat(hidden, 1).unflatten(-1, (S, len(self.features), -1))  # [B, T, S, features, H]
        final = each[..., self.features.index(FINAL), :].flatten(-2)
        features = each[..., [self.features.index(i) for i in self.reads], :].flatten(-3)
        embeds = target.embed(ids)
        before = torch.zeros_like(prompt.ids)
        T = before.shape[1] + ids.shape[1]
        start = 1 - before.shape[1] if getattr(target, "grid", None) else 0  # the prompt comes before the grid
        return Trace(
            torch.cat([prompt.ids, ids], 1), torch.cat([prompt.embeds, torch.cat([embeds] * S, -1)], 1),
            final if self.reads == (FINAL,) else features, final, torch.cat([prompt.valid, valid], 1),
            torch.cat([before.bool(), valid], 1), torch.cat([prompt.visual, torch.zeros_like(ids)], 1),
            torch.arange(start, start + T, device=device).expand(len(ids), T)[..., None], start,
        )  # fmt: skip


def _features(session: Session, target: Any, ids: Tensor) -> list[Tensor]:
    """The features [B, n, S·F] of these tokens [B, N], piece by piece; each piece is read as a fully accepted draft."""
    features = []
    for first in range(0, ids.shape[1], PIECE):
        tokens = ids[:, first : first + PIECE]
        B, n = tokens.shape
        draft = Draft(tokens, chain(n, ids.device).expand(B))
        _, hidden = target.nodes(session, draft)
        features.append(hidden)
        if first + n < ids.shape[1]:
            count = torch.full((B,), n, device=ids.device)
            accepted = Acceptance(torch.ones_like(tokens, dtype=torch.bool), count, count - 1, ids[:, first + n])
            target.commit(session, session.commit(draft, Scores(Categorical(ids=tokens), hidden), accepted))
    return features


class ImageTeacher:
    """Context manager around a pipeline or model that generates images.

    Args:
        painter: a LlamaGenPipeline, or an ImageModel, which knows how its model is called.
        features: the features that the drafter reads.
        settings: arguments of its calls, such as `guidance_scale`; the drafter is trained to draft with these.
    """

    def __init__(
        self, painter: LlamaGenPipeline | ImageModel, features: tuple[int, ...], settings: Options | None = None
    ) -> None:
        self.painter, self.features, self.settings = painter, features, dict(settings or {})
        self.model: Any = painter.target if isinstance(painter, ImageModel) else painter
        network: Any = wrappers.unwrap(self.model) if isinstance(painter, ImageModel) else painter.transformer
        network.eval().requires_grad_(False)
        self.dtype: torch.dtype = network.dtype
        self._target: Any = None
        self._one_by_one = False  # whether each of its generate calls is for one image

    def __enter__(self) -> ImageTeacher:
        return self

    def __exit__(self, *_: object) -> None:
        self._target = None

    @property
    def target(self) -> Any:
        """The session's view of the model, with the guidance of its calls.

        Raises:
            RuntimeError: the teacher has not generated or read an image yet; the first such call sets the target.
        """
        if self._target is None:
            raise RuntimeError("the teacher has no head yet; first generate or trace an image with it")
        return self._target

    def head(self, hidden: Tensor, vocab: DraftVocab | None = None) -> Tensor:
        """Guided logits [..., V], or of a draft vocabulary [..., V_d], from all streams' final features [..., S·H];
        drafts are verified against these logits after temperature and top-k."""
        return self.target.head(hidden.flatten(0, -2)[None], vocab).view(*hidden.shape[:-1], -1)

    def embed(self, ids: Tensor) -> Tensor:
        return self.target.embed(ids)

    def _generate(self, samples: Sequence[TrainingSample], generator: list[torch.Generator] | None = None) -> Any:
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

    def _record(self, samples: Sequence[TrainingSample], recorder: PictureRecorder) -> None:
        """Generate the samples' images with this recorder as the drafter, and keep its target."""
        try:
            with enable(self.model, drafter=recorder, reproducible=True):
                self._generate(samples)
        finally:
            self._target = recorder.target

    @torch.no_grad()
    def answers(self, samples: Sequence[TrainingSample], max_new_tokens: int, temperature: float) -> list[list[int]]:
        """Token ids of one complete image per prompt, as a plain call generates it; nothing is cut off."""
        recorder = PictureRecorder(())
        self._record(samples, recorder)
        if len(recorder.rows) != len(samples):
            raise ValueError(
                f"{len(samples)} prompts gave {len(recorder.rows)} pictures; the image model has to call `generate` "
                "exactly once for all prompts, or exactly once for each"
            )
        return [row.tokens[row.start :] for row in recorder.rows]

    @torch.no_grad()
    def draw(
        self, samples: Sequence[TrainingSample], drafter: Drafter, seeds: Sequence[int]
    ) -> tuple[list[list[int]], float]:
        """Generate one image per sample and seed with a pipeline and this drafter: the token ids, and the number of
        tokens per forward of the target."""
        with enable(self.model, drafter=drafter, reproducible=True):
            output = self._generate(samples, [torch.Generator().manual_seed(seed) for seed in seeds])
        ids: list[list[int]] = output.tokens.flatten(1).tolist()
        return ids, output.tokens.numel() / (output.stats.row_rounds + len(ids))

    @torch.no_grad()
    def trace(self, samples: Sequence[TrainingSample], answers: Sequence[Sequence[int]]) -> Trace:
        """The features of all streams of the model along these images, from a generate call made only for that.

        Raises:
            ValueError: the image model makes no call that mmspec accelerates.
        """
        if self._one_by_one:
            each = zip(samples, answers, strict=True)
            return Trace.of([row for one, answer in each for row in self._read([one], [answer]).rows()])
        return self._read(samples, answers)

    def _read(self, samples: Sequence[TrainingSample], answers: Sequence[Sequence[int]]) -> Trace:
        recorder = PictureRecorder(self.features, answers)
        try:
            self._record(samples, recorder)
        except Traced as traced:
            if traced.trace is not None:
                return traced.trace
            self._one_by_one = len(samples) > 1
            if self._one_by_one:
                return self.trace(samples, answers)
        raise ValueError(
            f"{type(wrappers.unwrap(self.model)).__name__} made no call of `generate` with {len(samples)} rows for "
            f"{len(samples)} pictures; the teacher reads its features in such a call"
        )

    def open(self, sample: TrainingSample) -> None:
        """Make one call, which sets `target` and raises early if calls of the model fail."""
        self.trace([sample], [[0]])
