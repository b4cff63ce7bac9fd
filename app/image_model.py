"""Loads image models: LlamaGen, MAR, transformers models, diffusers pipelines, and a user's own Python file."""

from __future__ import annotations

import hashlib
import runpy
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmspec import zoo
from mmspec.app import painter
from mmspec.app.compare import PLAIN, Method
from mmspec.app.devices import EngineError, find_device, find_dtype, find_model, first_line, load_quietly
from mmspec.app.embedded import MAR_DRAFT, MAR_MODEL
from mmspec.app.painter import ImageResult, ImageSubject
from mmspec.pipelines.host import image_models, wrappers
from mmspec.pipelines.host.image_models import ImageModel
from mmspec.pipelines.patching.handle import Handle, Patch
from mmspec.statistics import Stats
from mmspec.types import NO_TOKEN

MAR = "mar"  # short name of the embedded model
OWN_MARS = (MAR, MAR_MODEL)
OWN_FILE = (
    "name a Python file with `load(device, dtype)`, which returns what mmspec.enable takes, and `draw(model, prompts, "
    "**settings)`, which returns a picture for each prompt"
)


class ModelSubject(ImageSubject):
    """A model that draws pictures by calls of `generate`. A seed belongs to a call, not to a picture.

    It replaces the model's `generate` permanently by a function that records the output: a function that is set and
    removed again would invalidate the captures of the model.
    """

    codes = classes = 0

    def __init__(self, model: ImageModel, **settings: object) -> None:
        self._draw, self.codes, self._method = model.draw, model.codes, PLAIN
        self._calls: list[tuple[Tensor, dict[int, float]]] = []  # tokens [B, n], and the rule's cost by row
        super().__init__(model.target, **settings)
        self.model.generate = self._generate

    @property
    def model(self) -> Any:
        return wrappers.unwrap(self.pipe)

    def go(self, method: Method) -> Handle | None:
        self._method = method
        return super().go(method)

    def paint(self, conditions: Sequence[str | int], seeds: Sequence[int], **settings: object) -> ImageResult:
        """Draw one picture per prompt in one call of `draw`; the first seed is used for torch's generator.

        Raises EngineError: the model refuses the prompts or the settings, or returns another number of pictures.
        """
        handle = super().go(self._method)  # resets its stats
        torch.manual_seed(seeds[0])
        calls = self._calls = list[tuple[Tensor, dict[int, float]]]()
        began = time.perf_counter()
        try:
            images = list(self._draw(list(conditions), **{**self.settings, **settings}))
        except Exception as error:  # any error of the model's code; the other methods go on
            raise EngineError(f"cannot draw: {first_line(error)}") from error
        seconds = time.perf_counter() - began
        if len(images) != len(conditions) or not calls:
            raise EngineError(
                f"{len(conditions)} prompts gave {len(images)} pictures, by {len(calls)} calls of `generate`"
            )
        rows = [row for tokens, _ in calls for row in tokens]
        stats = Stats() if handle is None else handle.stats
        if handle is None:  # plain decoding: one token per forward
            for tokens, _ in calls:
                B, n = tokens.shape
                stats.add(Stats(rounds=n - 1, tokens=B * n, row_rounds=B * (n - 1), gained=B * (n - 1)))
        spent = [charges.get(row, 0.0) for tokens, charges in calls for row in range(len(tokens))]
        tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=NO_TOKEN)
        return ImageResult(images, tokens, seconds, stats, spent)

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model's own `generate`, and record its output."""
        out = type(self.model).generate(self.model, *args, **kwargs)
        tokens = out if isinstance(out, Tensor) else out.sequences
        prompt = args[0] if args else kwargs.get("input_ids", kwargs.get("inputs"))
        if prompt is not None and torch.equal(tokens[:, : prompt.shape[1]].cpu(), prompt.cpu()):
            tokens = tokens[:, prompt.shape[1] :]
        patch = Patch.of(self.model)
        self._calls.append((tokens.cpu(), {} if patch is None else dict(patch.stats.charges)))
        return out


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


def is_mar(model: str) -> bool:
    """Whether this is a MARPipeline: the embedded one, or a folder."""
    index = Path(model) / "model_index.json"
    return model in OWN_MARS or (index.is_file() and '"MARPipeline"' in index.read_text())


def load(model: str, device: str, dtype: str, **settings: object) -> ImageSubject:
    """Load a subject: a LlamaGenPipeline, a MAR, another model or pipeline, or the user's own Python file.

    Raises EngineError: there is no such model, or mmspec cannot decode its pictures.
    """
    if is_mar(model):
        return load_mar(model, device, dtype, **settings)
    place = find_device(device)
    found = open_model(model, place, find_dtype(dtype, place))
    return (ModelSubject if isinstance(found, ImageModel) else ImageSubject)(found, **settings)


def open_model(model: str, device: torch.device, dtype: torch.dtype, decoded: bool = True) -> Any:
    """An ImageModel, or a LlamaGenPipeline.

    Args:
        decoded: refuse models whose pictures transformers cannot decode.

    Raises EngineError: there is no such model, or it generates no tokens.
    """
    if model.endswith(".py"):
        return of_file(Path(model), device, dtype)
    load_quietly("transformers", "diffusers")
    try:
        found = image_models.load(find_model(model), device, dtype, decoded)
    except (OSError, ValueError):  # `pipeline` reports the error, since most users mean a LlamaGen
        found = None
    except (TypeError, RuntimeError) as error:
        raise EngineError(f"cannot draw with {model!r}: {error}") from error
    return painter.pipeline(model, device, dtype) if found is None else found


def of_file(path: Path, device: torch.device, dtype: torch.dtype) -> ImageModel:
    """The model that the file's `load` returns, called by its `draw`.

    Raises EngineError: there is no such file, it fails, or it lacks `load` or `draw`.
    """
    if not path.is_file():
        raise EngineError(f"no file {str(path)!r}; {OWN_FILE}")
    try:
        own = runpy.run_path(str(path))
        about = f"{path} {hashlib.sha256(path.read_bytes()).hexdigest()[:10]}"
        target = own["load"](device, dtype)
        return ImageModel(target, partial(own["draw"], target), image_models.codes_of(wrappers.unwrap(target)), about)
    except Exception as error:  # in the user's code
        raise EngineError(f"cannot load {str(path)!r} ({first_line(error)}); {OWN_FILE}") from error


def load_mar(model: str, device: str, dtype: str, **settings: object) -> MarSubject:
    """The embedded model, `mar`, or a folder; float32 unless `dtype` says otherwise.

    Raises EngineError: it cannot be loaded.
    """
    from mmspec.pipelines.mar.pipeline import MARPipeline

    load_quietly("diffusers")
    place, own = find_device(device), model in OWN_MARS
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
