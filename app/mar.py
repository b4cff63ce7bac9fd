"""Loads a MAR and its draft model, and draws pictures of classes, plainly or by speculation."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from mmspec import zoo
from mmspec.app.compare import PLAIN, Method
from mmspec.app.devices import EngineError, find_device, first_line, load_quietly, wait
from mmspec.app.embedded import MAR_DRAFT, MAR_MODEL

NAME = "mar"  # short name of the embedded model
OWN = (NAME, MAR_MODEL)


def draws(model: str) -> bool:
    """Whether this is a MARPipeline: the embedded one, or a folder."""
    index = Path(model) / "model_index.json"
    return model in OWN or (index.is_file() and '"MARPipeline"' in index.read_text())


@dataclass(frozen=True)
class MarImages:
    seconds: float
    images: list[Image.Image]
    tokens: Tensor
    work: dict[str, int]
    stats: dict[str, float]


class MarSubject:
    """A MARPipeline, the embedded draft model if it is the embedded one, and arguments for its calls."""

    def __init__(self, pipe: Any, draft: Any = None, **settings: object) -> None:
        self.pipe, self.draft = pipe, draft
        self.settings = {name: value for name, value in settings.items() if value is not None}
        pipe.set_progress_bar_config(disable=True)

    def singly(self) -> str:
        """Draw one token per iteration from now on, as speculation does, with a sampler that suits the exact rule.

        Returns: a note of what that changes; empty if the model is drawn so anyway.
        """
        from mmspec.models.mar_scheduler import MARScheduler
        from mmspec.pipelines.mar.pipeline import DEFAULTS

        changed, config = [], self.pipe.scheduler.config
        iterations = {**DEFAULTS, **self.pipe.config.defaults}["num_inference_steps"]
        if iterations < self.tokens:
            changed.append(f"one token per iteration, not {self.tokens} in {iterations}")
        self.settings["num_inference_steps"] = self.tokens
        if not config.final_noise:
            changed.append("noise at the last denoising step too, and none of the first step")
            self.pipe.scheduler = MARScheduler.from_config(config, final_noise=True, skip_terminal=True)
        return f"not drawn by the model's own sampler: {'; '.join(changed)}" if changed else ""

    @property
    def tokens(self) -> int:
        return self.pipe.transformer.tokens

    @property
    def names(self) -> list[str]:
        """Names of the classes by number; the number itself if a class has no name."""
        known = {int(number): name for number, name in self.pipe.config.id2label.items()}
        return [known.get(number, str(number)) for number in range(self.pipe.transformer.config.classes)]

    def small(self, name: str) -> Any:
        """A draft model: from a folder, or the embedded one. Raises EngineError: it cannot be loaded."""
        from mmspec.models.mar import MARTransformer2DModel

        own, model = name == MAR_DRAFT, self.pipe.transformer
        if own and self.draft is not None:
            return self.draft
        try:
            draft = MARTransformer2DModel.from_pretrained(zoo.path(name) if own else name)
        except (ValueError, TypeError, OSError) as error:
            raise EngineError(f"cannot load the draft {name}: {first_line(error)}") from error
        return draft.to(model.device, model.dtype).eval()

    def label(self, prompt: str) -> int:
        """The number of a class by its name or number. Raises EngineError: there is no such class."""
        names, prompt = self.names, prompt.strip()
        if prompt in names:
            return names.index(prompt)
        if prompt.isdecimal() and int(prompt) < len(names):
            return int(prompt)
        raise EngineError(
            f"this model draws classes, by name or by number from 0 to {len(names) - 1}; {prompt!r} is none. Choose "
            f"from {', '.join(names[:8])}{' …' if len(names) > 8 else ''}"
        )

    def draw(self, labels: Sequence[int], seeds: Sequence[int], method: Method = PLAIN, **more: object) -> MarImages:
        """Draw a picture of each class; `more` overrides the settings. Call `singly` first unless the method is plain.

        The method's options are the arguments of `enable_speculation`; without a drafter it is plain.

        Raises EngineError: the pipeline refuses the settings.
        """
        try:
            self.pipe.disable_speculation()
            if method.drafter is not None:
                self.pipe.enable_speculation(**method.options)
            generators = [torch.Generator().manual_seed(seed) for seed in seeds]
            wait(self.pipe.transformer.device)
            began = time.perf_counter()
            out = self.pipe(list(labels), generator=generators, **{**self.settings, **more})
            wait(self.pipe.transformer.device)
            took = time.perf_counter() - began
        except (ValueError, TypeError, OSError) as error:
            raise EngineError(str(error)) from error
        return MarImages(took, out.images, out.tokens, out.work, out.stats.summary() if out.stats else {})


def load(model: str, device: str, dtype: str, **settings: object) -> MarSubject:
    """The embedded model, `mar`, or a folder; float32 unless `dtype` says otherwise.

    Raises EngineError: it cannot be loaded.
    """
    from mmspec.pipelines.mar.pipeline import MARPipeline

    load_quietly("diffusers")
    place, own = find_device(device), model in OWN
    kind = torch.float32 if dtype == "auto" else getattr(torch, dtype)
    try:
        pipe = MARPipeline.from_pretrained(zoo.path(MAR_MODEL) if own else model, torch_dtype=kind).to(place)
    except Exception as error:  # missing weights, other files, too little memory
        raise EngineError(f"cannot load {model}: {first_line(error)}") from error
    subject = MarSubject(pipe, **settings)
    if own:
        subject.draft = subject.small(MAR_DRAFT)
    return subject
