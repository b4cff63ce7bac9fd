"""A frozen image pipeline as a teacher: it draws pictures at its own settings and hands over its features."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mmspec.models.llamagen import visible
from mmspec.pipelines.families.llamagen import LlamaGen
from mmspec.pipelines.host.forward import reading
from mmspec.pipelines.host.processors.guidance import Guidance
from mmspec.pipelines.llamagen.pipeline import LlamaGenPipeline
from mmspec.pipelines.patch import enable
from mmspec.pipelines.target.llamagen import LlamaGenTarget
from mmspec.pipelines.target.state import each_stream
from mmspec.protocols import Drafter
from mmspec.train.data import TrainingSample
from mmspec.train.trace import Trace
from mmspec.types import unfold


class ImageTeacher:
    """Context manager around a LlamaGenPipeline; while it is open, the layers that the drafter reads are tapped."""

    def __init__(self, pipe: LlamaGenPipeline, features: tuple[int, ...]) -> None:
        self.pipe, self.features = pipe, features
        self._taps = LlamaGen().taps(pipe, features)
        self.model = pipe.transformer.eval().requires_grad_(False)
        self.how = pipe._settings({}, "latent", 1)
        scale = self.how["guidance_scale"]
        self.target = LlamaGenTarget(self.model, features, Guidance(scale) if scale > 1 else None)

    def __enter__(self) -> ImageTeacher:
        self._taps.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._taps.__exit__()

    def head(self, hidden: Tensor) -> Tensor:
        """Guided logits [..., V], which are what is verified, of both streams' final features [..., S·H]."""
        return self.target.head(hidden.flatten(0, -2)[None]).view(*hidden.shape[:-1], -1)

    def embed(self, ids: Tensor) -> Tensor:
        return self.target.embed(ids)

    def _conditions(self, samples: Sequence[TrainingSample]) -> dict[str, Any]:
        prompts = [sample.prompt for sample in samples]
        return {"class_labels": [int(p) for p in prompts]} if self.model.config.classes else {"prompt": prompts}

    @torch.no_grad()
    def answers(self, samples: Sequence[TrainingSample], max_new_tokens: int, temperature: float) -> list[list[int]]:
        """Token ids of one whole picture per prompt, drawn as a plain call of the pipeline would; nothing is cut."""
        made: Any = self.pipe(**self._conditions(samples), output_type="latent")
        ids: list[list[int]] = made.tokens.flatten(1).tolist()
        return ids

    @torch.no_grad()
    def draw(
        self, samples: Sequence[TrainingSample], drafter: Drafter, seeds: Sequence[int]
    ) -> tuple[list[list[int]], float]:
        """A picture for each sample, by its seed, with this drafter: token ids, and how many of one a forward gave."""
        with enable(self.pipe, drafter=drafter, reproducible=True):
            made: Any = self.pipe(
                **self._conditions(samples), generator=[torch.Generator().manual_seed(seed) for seed in seeds],
                output_type="latent",
            )  # fmt: skip
        ids: list[list[int]] = made.tokens.flatten(1).tolist()
        return ids, made.tokens.numel() / (made.stats.row_rounds + len(ids))

    @torch.no_grad()
    def trace(self, samples: Sequence[TrainingSample], answers: Sequence[Sequence[int]]) -> Trace:
        """One forward of both streams over prefixes and pictures."""
        conditions, S = self._conditions(samples), self.target.streams
        condition, valid = self.pipe._condition(
            conditions.get("prompt"), conditions.get("class_labels"), self.how["clean_caption"]
        )
        B, P = valid.shape
        ids = torch.tensor(answers, device=valid.device)
        prefix = self.target.prefix(condition)
        embeds = torch.cat([prefix, each_stream(self.target.embed(ids), S)], 1)
        T = embeds.shape[1]
        place = torch.arange(-P, T - P, device=ids.device).clamp(min=-1)
        valid = torch.cat([valid, torch.ones_like(ids, dtype=torch.bool)], 1)
        with reading() as read:
            read.final = hidden = self.model(embeds, place.expand(S * B, T), each_stream(visible(valid, T), S))
        layers = read.features(self.features)
        answered = (torch.arange(T, device=ids.device) >= P).expand(B, T)
        ids = torch.cat([ids.new_zeros(B, P), ids], 1)
        features, visual = unfold(torch.cat(layers, -1), S), torch.zeros_like(ids)
        positions = place.expand(B, T)[..., None]
        return Trace(ids, unfold(embeds, S), features, unfold(hidden, S), valid, answered, visual, positions, 1 - P)
