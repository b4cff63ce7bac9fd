"""The one place where prompts meet an image model: load it, enable mmspec on it, turn prompts into pictures."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from PIL import Image
from torch import Tensor

import mmspec
from mmspec.app import embedded
from mmspec.app.devices import EngineError, find_device, find_dtype, find_model, first_line, load_quietly
from mmspec.app.embedded import STOCK
from mmspec.pipelines.families import table as families
from mmspec.registry import DRAFTERS, resolve_rule
from mmspec.rules import Rule
from mmspec.statistics import Stats
from mmspec.zoo import pictures

PLAIN = STOCK  # the drafter that is none: one token per forward of the target
NOTE = (
    "note: scenes-llamagen, the model that comes with mmspec, draws one or two coloured shapes and does not know: {}. "
    "It knows prompts like 'a small red striped circle left of a large blue square on a grey background'. For others "
    "name a LlamaGen model of your own: --model FOLDER"
)


@dataclass(frozen=True)
class DrawingMethod:
    """How to decode: a drafter and the options of `mmspec.enable`; PLAIN decodes one token after the other."""

    drafter: Any = PLAIN
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        said = " ".join(f"{name}={value}" for name, value in self.options.items() if value is not None)
        return f"{self.drafter} {said}".strip()


@dataclass(frozen=True)
class ImageResult:
    """What one call of the pipeline gave and took, one entry a picture."""

    images: list[Image.Image]
    tokens: Tensor  # [B, grid, grid]
    seconds: float  # of the whole call: text encoder, prefill, rounds, picture decoder
    stats: Stats
    spent: list[float]  # what a relaxed rule cost in total variation; see LlamaGenOutput

    @property
    def forwards(self) -> int:
        """Forwards of the target, the prefill among them; its rows share them."""
        return self.stats.rounds + 1

    @property
    def compression(self) -> float:
        """Tokens of one picture per forward that it took part in; plain decoding has 1."""
        rows = len(self.images)
        return self.tokens.numel() / (self.stats.row_rounds + rows)

    @property
    def decode_seconds(self) -> float:
        """Of the rounds alone: draft, verify, accept and commit."""
        return sum(spent for part, spent in self.stats.seconds.items() if part != "prefill")

    @property
    def round_seconds(self) -> float:
        return self.decode_seconds / max(1, self.stats.rounds)


class Subject(Protocol):
    """What draws pictures, in its own ways: a LlamaGenPipeline (below), or a MARPipeline (`mar.py`)."""

    plain: Any  # the way of plain decoding

    def label(self, said: str, /) -> Any:
        """What a prompt is to the model: the prompt, or the number of a class."""

    def draw(self, conditions: Sequence[str | int], seeds: Sequence[int], way: Any, /, **settings: object) -> Any:
        """One picture of each, in one batch, with the `seconds` it took and the `images`."""


class ImageSubject:
    """A LlamaGenPipeline and the arguments of its calls.

    Attributes:
        static: whether it has a plain loop of fixed shapes, too.
    """

    plain = DrawingMethod()
    static = True

    def __init__(self, pipe: Any, **settings: object) -> None:
        self.pipe = pipe
        self.settings = {name: value for name, value in settings.items() if value is not None}
        self._loaded: dict[str, Any] = {}  # trained drafters, read from their files once
        self._rules: dict[tuple[str, float | None], Rule] = {}  # neighbours and cells of a codebook take a while
        if hasattr(pipe, "set_progress_bar_config"):
            pipe.set_progress_bar_config(disable=True)

    @property
    def model(self) -> Any:
        """What writes the tokens."""
        return self.pipe.transformer

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def codes(self) -> int:
        """How many codes a picture is made of; 0: that is not known."""
        return self.model.config.vocab

    @property
    def classes(self) -> int:
        """How many classes it draws; 0: it reads prompts."""
        return self.pipe.transformer.config.classes

    @property
    def tokens(self) -> int:
        return self.pipe.transformer.config.grid**2

    def go(self, way: DrawingMethod) -> Any:
        """Decode in this way from now on; the handle, or None for plain decoding.

        Raises EngineError: the drafter or an option does not fit.
        """
        mmspec.disable(self.pipe)
        if way.drafter == PLAIN:
            return None
        try:
            options = dict(way.options)
            if isinstance(options.get("rule"), str):
                options["rule"] = self._rule(options["rule"], options.get("budget"))
            name = way.drafter if isinstance(way.drafter, str) else ""
            drafter = self._loaded.get(name) or (embedded.resolve(name) if name else way.drafter)
            handle = mmspec.enable(self.pipe, drafter=drafter, **options)
            if name and name not in DRAFTERS:
                self._loaded[name] = handle.drafter
            return handle
        except Exception as error:  # a bad option, a missing folder, a drafter of another model: all end the call
            raise EngineError(f"cannot draw with {way}: {_told(error)}") from error

    def _rule(self, spec: str, budget: float | None) -> Rule:
        if (spec, budget) not in self._rules:
            model = families.unwrap(self.pipe)
            family = families.of(model)
            codebook = family.codebook(model)
            codebook = codebook if codebook is None else codebook.detach().to(self.device)
            self._rules[spec, budget] = resolve_rule(spec, codebook, budget, family.embeddings(model))
        return self._rules[spec, budget]

    def paint(self, conditions: Sequence[str | int], seeds: Sequence[int], **settings: object) -> ImageResult:
        """One picture per prompt or class, in one batch; each depends on its own seed only.

        Args:
            settings: further arguments of the pipeline's call, for this one only.

        Raises EngineError: the pipeline refuses the prompts or its settings.
        """
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        condition = {"class_labels" if self.classes else "prompt": list(conditions)}
        began = time.perf_counter()
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="prompts are only lower-cased")
                out = self.pipe(**condition, generator=generators, **{**self.settings, **settings})
        except (ValueError, TypeError) as error:
            raise EngineError(_told(error)) from error
        return ImageResult(out.images, out.tokens.cpu(), time.perf_counter() - began, out.stats, out.spent)

    def draw(
        self, conditions: Sequence[str | int], seeds: Sequence[int], way: DrawingMethod, **settings: object
    ) -> ImageResult:
        """The same, decoded in this way.

        Raises EngineError: the drafter or an option does not fit, or the pipeline refuses the prompts or its settings.
        """
        self.go(way)
        return self.paint(conditions, seeds, **settings)

    def label(self, said: str) -> Any:
        """What a prompt is to the model: the prompt, or the number of a class.

        Raises EngineError: the model draws classes, and this is none.
        """
        if not self.classes:
            return said
        if not said.strip().isdecimal() or int(said) >= self.classes:
            raise EngineError(
                f"this model draws classes, by their numbers from 0 to {self.classes - 1}; {said!r} is none"
            )
        return int(said)


def load(model: str, device: str, dtype: str, **settings: object) -> ImageSubject:
    """ImageSubject for the embedded model, a folder or a name on the Hub.

    Raises EngineError: no such model, or it is no LlamaGenPipeline.
    """
    from mmspec.pipelines.llamagen.pipeline import LlamaGenPipeline

    load_quietly("transformers", "diffusers")
    where, place = find_model(model), find_device(device)
    kind = find_dtype(dtype, place)
    try:
        pipe = LlamaGenPipeline.from_pretrained(where).to(place)
    except Exception as error:  # a missing folder, no network, another pipeline, too little memory: all fatal
        raise EngineError(
            f"cannot load the model {model!r}: {first_line(error).rstrip('.')}. It must be a LlamaGenPipeline; make "
            "one of the authors' files with `mmspec convert llamagen`. Other models that draw are for mmspec.enable"
        ) from error
    for part in (pipe.transformer, pipe.text_encoder):  # the picture decoder stays as it is: it is cheap and exact
        if part is not None and part.dtype != kind:  # transformers loads a text encoder in the type of its file
            part.to(kind)
    return ImageSubject(pipe, **settings)


def unknown_words(prompts: Sequence[str]) -> list[str]:
    """Words that the embedded model has never seen, in order of appearance."""
    known = set(pictures.vocabulary())
    said = (word.strip(".,;:!?\"'()").lower() for prompt in prompts for word in prompt.split())
    return [word for word in dict.fromkeys(said) if word and word not in known]


def sheet(rows: Sequence[tuple[str, Sequence[Image.Image]]]) -> Image.Image:
    """All pictures on one sheet, a row each, with the row's name above it."""
    from PIL import ImageDraw

    side = max(max(picture.size) for _, row in rows for picture in row)
    gap, head = 4, 14
    width = max(len(row) for _, row in rows) * (side + gap) + gap
    page = Image.new("RGB", (width, len(rows) * (side + gap + head) + gap), "white")
    pen = ImageDraw.Draw(page)
    for line, (title, row) in enumerate(rows):
        top = gap + line * (side + gap + head)
        pen.text((gap, top), title.encode("latin-1", "replace").decode("latin-1"), fill="black")
        for column, picture in enumerate(row):
            page.paste(picture, (gap + column * (side + gap), top + head))
    return page


def _told(error: Exception) -> str:
    """The message of an error that was written for people; of any other its class too."""
    return str(error) if isinstance(error, (ValueError, TypeError, FileNotFoundError)) else first_line(error)
