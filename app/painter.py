"""Draws pictures from prompts by a LlamaGenPipeline, with mmspec enabled on it or not."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from PIL import Image
from torch import Tensor

import mmspec
from mmspec.app import embedded
from mmspec.app.compare import Method
from mmspec.app.devices import EngineError, find_model, first_line, load_quietly
from mmspec.app.embedded import STOCK
from mmspec.pipelines.families import table as families
from mmspec.pipelines.host import wrappers
from mmspec.registry import DRAFTERS, resolve_rule
from mmspec.rules import Rule
from mmspec.statistics import Stats
from mmspec.types import NO_TOKEN

NOTE = (
    "note: scenes-llamagen, the model that comes with mmspec, knows only prompts like 'a small red striped circle left "
    "of a large blue square on a grey background'. For others name a LlamaGen model of your own: --model FOLDER"
)


@dataclass(frozen=True)
class ImageResult:
    """The result of one call of the pipeline for a batch of B pictures."""

    images: list[Image.Image]
    tokens: Tensor  # [B, grid, grid]; of a MAR [B, grid², channels]
    seconds: float  # the whole call: text encoder, prefill, rounds, picture decoder
    stats: Any  # Stats; of a MAR the summary of its MarStats, empty for plain decoding
    spent: Sequence[float] = ()  # total-variation cost of a relaxed rule for each picture; see LlamaGenOutput
    work: dict[str, int] = field(default_factory=dict)  # of a MAR; see MAROutput

    @property
    def forwards(self) -> float:
        """Forwards of the target per picture, including the prefill."""
        return self.stats.row_rounds / len(self.images) + 1

    @property
    def compression(self) -> float:
        """Tokens of a picture per forward of its row; 1 for plain decoding."""
        return self.stats.tokens / len(self.images) / self.forwards

    @property
    def decode_seconds(self) -> float:
        """Time of the rounds alone: draft, verify, accept and commit."""
        return sum(spent for part, spent in self.stats.seconds.items() if part != "prefill")

    @property
    def lossless(self) -> bool:
        """Whether no relaxed rule had an effect on its tokens; a MAR's `cspd` is not looked at."""
        return getattr(self.stats, "lossless", True)

    @property
    def round_seconds(self) -> float:
        return self.decode_seconds / max(1, self.stats.rounds)

    def same(self, other: ImageResult) -> list[bool]:
        """Whether each row has the tokens of the other's, without what fills it up to the longest one."""
        pairs = zip(self.tokens, other.tokens, strict=True)
        return [torch.equal(a[a != NO_TOKEN], b[b != NO_TOKEN]) for a, b in pairs]


def together(results: Sequence[ImageResult]) -> ImageResult:
    """The results of several calls as one, without the tokens."""
    stats = Stats()
    for each in results:
        stats.add(each.stats)
    images = [image for each in results for image in each.images]
    spent = [cost for each in results for cost in each.spent]
    return ImageResult(images, torch.empty(0), sum(each.seconds for each in results), stats, spent)


class ImageSubject:
    """A LlamaGenPipeline with the arguments for its calls."""

    def __init__(self, pipe: Any, **settings: object) -> None:
        self.pipe = pipe
        self.settings = {name: value for name, value in settings.items() if value is not None}
        self._loaded: dict[str, Any] = {}  # trained drafters by name
        self._rule = lru_cache(16)(self._resolved)  # codebook neighbours are slow to compute

    @property
    def model(self) -> Any:
        """The model that generates the tokens."""
        return self.pipe.transformer

    @property
    def codes(self) -> int:
        """Size of the codebook; 0 if unknown."""
        return self.model.config.vocab

    @property
    def classes(self) -> int:
        """Number of classes; 0 if the model reads prompts."""
        return self.model.config.classes

    @property
    def tokens(self) -> int:
        return self.model.config.grid**2

    def go(self, method: Method) -> Any:
        """Decode by this method from now on; returns the handle, or None for plain decoding.

        Raises EngineError: the drafter or an option does not fit.
        """
        mmspec.disable(self.pipe)
        name = method.drafter if isinstance(method.drafter, str) else ""
        if method.drafter is None or name == STOCK:
            return None
        try:
            options = dict(method.options)
            if isinstance(options.get("rule"), str):
                options["rule"] = self._rule(options["rule"], options.get("budget"))
            drafter = self._loaded.get(name) or (embedded.resolve(name) if name else method.drafter)
            handle = mmspec.enable(self.pipe, drafter=drafter, **options)
        except Exception as error:  # such as a wrong option, a missing folder, a drafter for another model
            what = f"{name or type(method.drafter).__name__} {method.setting}".strip()
            raise EngineError(f"cannot draw with {what}: {first_line(error)}") from error
        if name and name not in DRAFTERS:
            self._loaded[name] = handle.drafter
        return handle

    def _resolved(self, spec: str, budget: float | None) -> Rule:
        family = families.of(model := wrappers.unwrap(self.pipe))
        codebook = family.codebook(model)
        codebook = codebook if codebook is None else codebook.detach().to(self.model.device)
        return resolve_rule(spec, codebook, budget, family.embeddings(model))

    def paint(self, conditions: Sequence[str | int], seeds: Sequence[int], **settings: object) -> ImageResult:
        """Draw one picture per prompt or class, in one batch; each depends only on its own seed.

        Args:
            settings: further arguments for this call of the pipeline.

        Raises EngineError: the pipeline refuses the prompts or its settings.
        """
        condition = {"class_labels" if self.classes else "prompt": list(conditions)}
        began = time.perf_counter()
        try:
            generators = [torch.Generator().manual_seed(seed) for seed in seeds]
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="prompts are only lower-cased")
                out = self.pipe(**condition, generator=generators, **{**self.settings, **settings})
        except (ValueError, TypeError) as error:
            raise EngineError(str(error)) from error
        tokens = out.tokens.cpu()  # waits for the device
        return ImageResult(out.images, tokens, time.perf_counter() - began, **self._facts(out))

    def _facts(self, out: Any) -> dict[str, Any]:
        return {"stats": out.stats, "spent": out.spent}

    @property
    def names(self) -> list[str]:
        """Names of the classes by number; the number itself if a class has no name."""
        known = {int(number): name for number, name in self.pipe.config.get("id2label", {}).items()}
        return [known.get(number, str(number)) for number in range(self.classes)]

    def label(self, prompt: str) -> Any:
        """The condition for a prompt: the prompt itself, or the number of a class by its name or number.

        Raises EngineError: the model draws classes, and there is no such class.
        """
        if not self.classes:
            return prompt
        names, prompt = self.names, prompt.strip()
        if prompt in names:
            return names.index(prompt)
        if prompt.isdecimal() and int(prompt) < len(names):
            return int(prompt)
        raise EngineError(
            f"this model draws classes, by name or by number from 0 to {len(names) - 1}; {prompt!r} is none. Choose "
            f"from {', '.join(names[:8])}{' …' if len(names) > 8 else ''}"
        )


def pipeline(model: str, device: torch.device, dtype: torch.dtype) -> Any:
    """The LlamaGenPipeline of that name. EngineError: there is no such model, or it is another one."""
    from mmspec.pipelines.llamagen.pipeline import LlamaGenPipeline

    load_quietly("transformers", "diffusers")
    where = find_model(model)
    try:
        pipe = LlamaGenPipeline.from_pretrained(where).to(device)
    except Exception as error:  # a missing folder, no network, another pipeline, too little memory
        raise EngineError(
            f"cannot load the model {model!r}: {first_line(error).rstrip('.')}. It must be a LlamaGenPipeline; convert "
            "the authors' files with `mmspec convert llamagen`. For other image models name your own Python file, or "
            "use mmspec.enable in Python. Models that describe pictures are for `mmspec caption`"
        ) from error
    for part in (pipe.transformer, pipe.text_encoder):  # the picture decoder keeps its dtype: it is cheap and exact
        if part is not None and part.dtype != dtype:  # transformers loads a text encoder in the dtype of its file
            part.to(dtype)
    pipe.set_progress_bar_config(disable=True)
    return pipe
