"""The captioning engine: loads a model, and enables mmspec on it."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

import mmspec
from mmspec.app import embedded
from mmspec.app.captioner import Captioner
from mmspec.app.devices import EngineError, find_device, find_model, first_line, free_memory, load_quietly
from mmspec.app.embedded import STOCK
from mmspec.app.prompt import PromptChoice
from mmspec.drafters.plain import Plain
from mmspec.pipelines.families import table as families
from mmspec.pipelines.host.kinds import GenerativeModel, Processor
from mmspec.pipelines.host.loading import model_and_processor
from mmspec.pipelines.prompts import chat_inputs, text_alone
from mmspec.pipelines.serving.batcher import TOGETHER, Batcher, StaticBatcher
from mmspec.pipelines.serving.continuous import ContinuousBatcher
from mmspec.pipelines.serving.threads import ProcessorThreads

COLD = 1e-5  # temperatures up to this are greedy, since logits divided by them could be infinite
WARM_UP = 8  # new tokens of a warm-up that compiles the model
ROWS = {"cpu": 16, "cuda": 64}  # default maximum batch size
NODES = {"cpu": 64, "cuda": 512}  # maximum number of draft nodes in one forward; beyond it, forwards are compute-bound


def sampling_settings(temperature: float, **more: object) -> dict[str, Any]:
    """The settings of `generate` to sample, or to decode greedily at temperatures near 0."""
    return {"do_sample": True, "temperature": temperature, **more} if temperature > COLD else {"do_sample": False}


class Engine:
    """A model with its processor and drafter; with `drafter=None` it runs on the stock path of transformers.

    A model that mmspec cannot accelerate also captions on the stock path: then `drafter` is None and `notes` say why.
    """

    scored = False  # whether answers come with scores

    def __init__(
        self, model: GenerativeModel, processor: Processor, drafter: object, max_new_tokens: int,
        temperature: float = 0, options: Mapping[str, Any] | None = None,
    ):  # fmt: skip
        self.model, self.processor, self.drafter = model.eval(), processor, drafter
        self.options = dict(options or {})  # of `mmspec.enable`
        self.settings = {"max_new_tokens": max_new_tokens, "num_beams": 1} | sampling_settings(temperature)
        tokenizer: Any = getattr(processor, "tokenizer", processor)
        tokenizer.padding_side = "left"
        if tokenizer.pad_token is None:  # of some remote code it can only be read
            tokenizer.pad_token = tokenizer.eos_token
        self.threads = ProcessorThreads(processor)
        self.notes: list[str] = []
        if drafter is not None:
            self._enable()

    def keep_to(self, schema: dict[str, Any]) -> None:
        """Constrain every answer to JSON of this schema; EngineError if that is not possible."""
        try:
            self.settings["logits_processor"] = [mmspec.json_grammar(self.processor, schema)]
        except (ImportError, ValueError) as error:
            raise EngineError(str(error)) from error

    @property
    def sampling(self) -> bool:
        """Whether answers are drawn."""
        return bool(self.settings["do_sample"])

    @property
    def compilable(self) -> bool:
        """Whether mmspec can accelerate the model at all."""
        return families.of(self.model).unsupported(self.model) is None

    def warm_up(self, frames: Sequence[Image.Image], choice: PromptChoice, rows: int) -> None:
        """Turn on `compile`, and compile by generating a few tokens about one item in all rows, which are discarded."""
        self.options["compile"] = True
        if self.drafter is not None:
            self._enable()
        flow = self.flow(rows, max_new_tokens=WARM_UP)
        for number in range(rows):
            flow.add(number, frames, choice)
        while flow.busy:
            flow.step()

    def flow(self, rows: int, **settings: object) -> Captioner:
        return Captioner(self.batcher(rows, **settings), self.threads)

    def batcher(self, rows: int, **settings: object) -> Batcher:
        """A batcher of `rows` prompts: continuous, or with static batches if mmspec cannot accelerate the model."""
        batches: type[Batcher] = StaticBatcher
        if self.compilable:
            batches = ContinuousBatcher
            if self.drafter is None:
                mmspec.enable(self.model, drafter=Plain(), **self.options)
        return batches(self.model, self.processor, rows, scored=self.scored, **(self.settings | settings))

    def suggest_rows(self, frames: int = 1, size: tuple[int, int] = (1024, 768)) -> int:
        """The initial batch size; a flow halves it if memory runs out nevertheless.

        It is 4/5 of the device's free memory, less the activations of a prefill, divided by the memory of a row: twice
        the KV cache of prompt, answer and draft, since it is copied when rows join, and four times the draft's logits
        in float32. At most ROWS, and at most NODES nodes in one forward: beyond that a forward is compute-bound, so
        that more rows gain nothing and drafts cost time.

        Args:
            frames: maximum number of pictures of one item.
            size: of the largest picture.
        """
        nodes = getattr(self.drafter, "nodes", 1)
        kind = self.model.device.type
        most = max(1, min(ROWS.get(kind, 8), NODES.get(kind, 64) // nodes))
        free = free_memory(self.model.device)
        if free is None:
            return most
        config, each = self.model.config.get_text_config(), self.model.dtype.itemsize
        images = [] if text_alone(self.processor) else [Image.new("RGB", size)] * frames
        prompt = chat_inputs(self.processor, ["."], [images], clips=True)
        length = prompt["input_ids"].shape[1] + self.settings["max_new_tokens"] + nodes
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        keys = 2 * config.num_hidden_layers * heads * width * each * length
        row = 2 * keys + 4 * nodes * config.vocab_size * 4
        prefill = TOGETHER * 12 * config.hidden_size * each  # activations: hidden states, and the widest of an MLP
        return max(1, min(most, int((0.8 * free - prefill) / row)))

    @contextlib.contextmanager
    def stock(self) -> Iterator[None]:
        """Inside the block, the model runs stock `generate`."""
        mmspec.disable(self.model)
        try:
            yield
        finally:
            self._enable()

    def _enable(self) -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            named = None if self.drafter == embedded.SHIPPED else self.drafter
            handle = mmspec.enable(self.model, drafter=named, **{"on_unsupported": "fallback", **self.options})
        self.drafter = handle.drafter  # keep it, so that it is loaded only once
        self.options.pop("draft", None)
        messages = [str(note.message) for note in caught if issubclass(note.category, UserWarning)]
        self.notes += [note for note in messages if note not in self.notes]


def load(
    model: str, drafter: str, device: str, dtype: str, max_new_tokens: int, temperature: float, sees: bool = True,
    **options: object,
) -> Engine:  # fmt: skip
    """Load an Engine: a name on the Hub, a local folder or an embedded model; `auto` picks the fastest device.

    `options` are those of `mmspec.enable`. With `sees`, a model that reads text alone is refused.
    """
    load_quietly("transformers")
    where, place = find_model(model), find_device(device)
    kind = ("float32" if place.type == "cpu" else "auto") if dtype == "auto" else dtype
    if (Path(where) / "model_index.json").is_file():
        raise EngineError(f"{model!r} is a pipeline that draws; see `mmspec generate --help` and `mmspec bench image`")
    try:
        network, processor = model_and_processor(where, kind)
        network = network.to(place)
    except Exception as error:  # a missing folder, no network, an unknown architecture, too little memory
        raise EngineError(f"cannot load the model {model!r}. {first_line(error)}") from error
    if sees and text_alone(processor):
        raise EngineError(f"{model!r} reads text alone, and this command asks about pictures; see --model")
    try:
        chosen = None if drafter == STOCK else embedded.resolve(embedded.fitting(drafter, model))
        return Engine(network, processor, chosen, max_new_tokens, temperature, options)
    except Exception as error:
        raise EngineError(
            f"cannot use the drafter {drafter!r} with {model!r}: {first_line(error)}; mend that, or choose another "
            f"drafter, such as 'ngram' (needs no weights) or '{STOCK}' (no speed-up)"
        ) from error
