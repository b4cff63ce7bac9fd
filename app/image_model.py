"""Image models other than LlamaGen: transformers models, diffusers pipelines, and a user's own Python file."""

from __future__ import annotations

import hashlib
import importlib.util
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmspec.app import painter
from mmspec.app.compare import PLAIN, Method
from mmspec.app.devices import EngineError, find_device, find_dtype, find_model, first_line, load_quietly
from mmspec.app.painter import ImageResult, ImageSubject
from mmspec.pipelines.families.table import unwrap
from mmspec.pipelines.host import image_models
from mmspec.pipelines.host.image_models import ImageModel
from mmspec.pipelines.patching.handle import Handle, Patch
from mmspec.statistics import Stats
from mmspec.types import NO_TOKEN

OWN_FILE = (
    "name a Python file with `load(device, dtype)`, which returns what mmspec.enable takes, and `draw(model, prompts, "
    "**settings)`, which returns a picture for each prompt"
)


class ModelSubject(ImageSubject):
    """A model that draws pictures by calls of `generate`. A seed belongs to a call, not to a picture.

    It replaces the model's `generate` permanently by a function that records the output: a function that is set and
    removed again would invalidate the captures of the model.
    """

    def __init__(self, model: ImageModel, **settings: object) -> None:
        self._draw, self._codes, self._method = model.draw, model.codes, PLAIN
        self._calls: list[tuple[Tensor, dict[int, float]]] = []  # tokens [B, n], and the rule's cost by row
        super().__init__(model.target, **settings)
        self.model.generate = self._generate

    @property
    def model(self) -> Any:
        return unwrap(self.pipe)

    @property
    def classes(self) -> int:
        return 0

    @property
    def codes(self) -> int:
        return self._codes

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


def load(model: str, device: str, dtype: str, **settings: object) -> ImageSubject:
    """Load a subject: a LlamaGenPipeline, another model or pipeline, or the user's own Python file.

    Raises EngineError: there is no such model, or mmspec cannot decode its pictures.
    """
    place = find_device(device)
    found = open_model(model, place, find_dtype(dtype, place))
    return (ModelSubject if isinstance(found, ImageModel) else ImageSubject)(found, **settings)


def open_model(model: str, device: torch.device, dtype: torch.dtype, decoded: bool = True) -> Any:
    """An ImageModel, or a LlamaGenPipeline.

    Args:
        decoded: refuse models whose pictures transformers cannot decode.

    Raises EngineError: there is no such model.
    """
    if model.endswith(".py"):
        return of_file(Path(model), device, dtype)
    load_quietly("transformers", "diffusers")
    try:
        found = image_models.load(find_model(model), device, dtype, decoded)
    except (OSError, ValueError):  # `pipeline` reports the error, since most users mean a LlamaGen
        found = None
    return painter.pipeline(model, device, dtype) if found is None else found


def of_file(path: Path, device: torch.device, dtype: torch.dtype) -> ImageModel:
    """The model that the file's `load` returns, called by its `draw`.

    Raises EngineError: there is no such file, it fails, or it lacks `load` or `draw`.
    """
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise EngineError(f"no file {str(path)!r}; {OWN_FILE}")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        target = module.load(device, dtype)
        draw = module.draw
    except Exception as error:  # in the user's code
        raise EngineError(f"cannot load {str(path)!r} ({first_line(error)}); {OWN_FILE}") from error
    about = f"{path} {hashlib.sha256(path.read_bytes()).hexdigest()[:10]}"

    return ImageModel(target, partial(draw, target), image_models.codes_of(unwrap(target)), about)
