"""Loads a MAR and its draft model, which draw pictures of classes, plainly or by speculation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from mmspec import zoo
from mmspec.app.compare import Method
from mmspec.app.devices import EngineError, find_device, first_line, load_quietly
from mmspec.app.embedded import MAR_DRAFT, MAR_MODEL
from mmspec.app.painter import ImageSubject

NAME = "mar"  # short name of the embedded model
OWN = (NAME, MAR_MODEL)


def draws(model: str) -> bool:
    """Whether this is a MARPipeline: the embedded one, or a folder."""
    index = Path(model) / "model_index.json"
    return model in OWN or (index.is_file() and '"MARPipeline"' in index.read_text())


class MarSubject(ImageSubject):
    """A MARPipeline with the arguments for its calls, and the embedded draft model if it is the embedded one.

    A method with a drafter has the arguments of `enable_speculation` as its options. Call `singly` first unless only
    plain methods are drawn.
    """

    def __init__(self, pipe: Any, draft: Any = None, **settings: object) -> None:
        super().__init__(pipe, **settings)
        self.draft = draft

    def go(self, method: Method) -> None:
        self.pipe.disable_speculation()
        if method.drafter is not None:
            try:
                self.pipe.enable_speculation(**method.options)
            except (ValueError, TypeError) as error:
                raise EngineError(str(error)) from error

    def _facts(self, out: Any) -> dict[str, Any]:
        return {"stats": out.stats.summary() if out.stats else {}, "work": out.work}

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

    def small(self, name: str) -> Any:
        """A draft model: from a folder, or the embedded one. Raises EngineError: it cannot be loaded."""
        from mmspec.models.mar import MARTransformer2DModel

        try:
            draft = MARTransformer2DModel.from_pretrained(zoo.path(name) if name == MAR_DRAFT else name)
        except (ValueError, TypeError, OSError) as error:
            raise EngineError(f"cannot load the draft {name}: {first_line(error)}") from error
        return draft.to(self.model.device, self.model.dtype).eval()


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
    pipe.set_progress_bar_config(disable=True)
    subject = MarSubject(pipe, **settings)
    if own:
        subject.draft = subject.small(MAR_DRAFT)
    return subject
