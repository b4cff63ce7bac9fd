"""The one place where classes meet a MAR: load it and its draft, and draw plainly or by speculation."""

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
from mmspec.app.engine import EngineError, find_device, first_line
from mmspec.zoo.recipes import SCENES_MAR

NAME = "mar"  # stands for the embedded model
OWN = (NAME, SCENES_MAR.name)


def draws(model: str) -> bool:
    """Whether this is a MARPipeline: the embedded one, or a folder."""
    index = Path(model) / "model_index.json"
    return model in OWN or (index.is_file() and '"MARPipeline"' in index.read_text())


@dataclass(frozen=True)
class Made:
    """What one call took and gave."""

    seconds: float
    images: list[Image.Image]
    tokens: Tensor
    work: dict[str, int]
    told: dict[str, float]


class Mar:
    """A MARPipeline whose sampler suits the exact rule, the embedded model's draft, and arguments of the calls."""

    def __init__(self, pipe: Any, draft: Any = None, **settings: Any) -> None:
        from mmspec.models.mar_scheduler import MARScheduler

        self.pipe, self.draft = pipe, draft
        self.settings = {name: value for name, value in settings.items() if value is not None}
        pipe.set_progress_bar_config(disable=True)
        if not pipe.scheduler.config.final_noise:  # for all ways alike: the exact rule needs noise at every step
            pipe.scheduler = MARScheduler.from_config(pipe.scheduler.config, final_noise=True, skip_terminal=True)

    @property
    def tokens(self) -> int:
        return self.pipe.transformer.tokens

    @property
    def names(self) -> list[str]:
        """Of the classes, by number; numbers where they have no names."""
        known = {int(number): name for number, name in self.pipe.config.id2label.items()}
        return [known.get(number, str(number)) for number in range(self.pipe.transformer.config.classes)]

    def label(self, said: str) -> int:
        """The number of a class by its name or number.

        Raises:
            EngineError: there is none.
        """
        names, said = self.names, said.strip()
        if said in names:
            return names.index(said)
        if said.isdecimal() and int(said) < len(names):
            return int(said)
        raise EngineError(
            f"this model draws classes, by name or by number from 0 to {len(names) - 1}; {said!r} is none. Choose "
            f"from {', '.join(names[:8])}{' …' if len(names) > 8 else ''}"
        )

    def draw(
        self, labels: Sequence[int], seeds: Sequence[int], speculation: dict[str, Any] | None = None, **more: Any
    ) -> Made:
        """A picture of each class, one token an iteration unless `more` says otherwise.

        Raises:
            EngineError: the pipeline refuses the settings.
        """
        try:
            self.pipe.disable_speculation()
            if speculation is not None:
                self.pipe.enable_speculation(**speculation)
            generators = [torch.Generator().manual_seed(seed) for seed in seeds]
            _wait(self.pipe.transformer.device)
            began = time.perf_counter()
            arguments = {"num_inference_steps": self.tokens, **self.settings, **more}
            out = self.pipe(list(labels), generator=generators, **arguments)
            _wait(self.pipe.transformer.device)
            took = time.perf_counter() - began
        except (ValueError, TypeError, OSError) as error:
            raise EngineError(str(error)) from error
        return Made(took, out.images, out.tokens, out.work, out.told.summary() if out.told else {})


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def load(model: str, device: str, dtype: str, **settings: Any) -> Mar:
    """The embedded model, `mar`, or a folder; float32 unless `dtype` says otherwise.

    Raises:
        EngineError: it cannot be loaded.
    """
    from mmspec.models.mar import MARTransformer2DModel
    from mmspec.pipelines.mar import MARPipeline

    place, own = find_device(device), model in OWN
    kind = torch.float32 if dtype == "auto" else getattr(torch, dtype)
    try:
        pipe = MARPipeline.from_pretrained(zoo.path(SCENES_MAR.name) if own else model, torch_dtype=kind).to(place)
        small = MARTransformer2DModel.from_pretrained(zoo.path(SCENES_MAR.draft)) if own else None
    except Exception as error:  # no such weights, other files, too little memory: all fatal
        raise EngineError(f"cannot load {model}: {first_line(error)}") from error
    return Mar(pipe, None if small is None else small.to(place, kind).eval(), **settings)
