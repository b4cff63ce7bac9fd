"""The captioning engine: loads a model, enables mmspec on it, and turns pictures and prompts into texts."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from PIL import Image

import mmspec
from mmspec.app import embedded
from mmspec.app.devices import EngineError, find_device, find_model, first_line, free_memory, load_quietly, unloadable
from mmspec.app.embedded import STOCK
from mmspec.app.preparing import THREADS, Preparing, ProcessorThreads
from mmspec.app.prompt import PromptChoice
from mmspec.compile.capture_cache import settled
from mmspec.drafters.plain import Plain
from mmspec.pipelines.families import table as families
from mmspec.pipelines.host.kinds import BatchFeature, GenerativeModel, Processor
from mmspec.pipelines.host.loading import model_and_processor
from mmspec.pipelines.prompts import chat_inputs
from mmspec.pipelines.serving.batcher import TOGETHER, Batcher, FinishedPrompt, StaticBatcher, answer_length
from mmspec.pipelines.serving.continuous import ContinuousBatcher
from mmspec.statistics import Stats

PICTURE = (1024, 768)  # default picture size of `suggest_rows`
WARM_UP = 8  # new tokens of a warm-up that compiles the model
ROWS = {"cpu": 16, "cuda": 64}  # default maximum batch size
NODES = {"cpu": 64, "cuda": 512}  # maximum number of draft nodes in one forward; beyond it, forwards are compute-bound


@dataclass(frozen=True)
class CaptionResult:
    """The result of one item.

    Attributes:
        tokens: number of generated tokens.
        seconds: since the prefill of its prompt; answers of one batch share the time.
        finish: "stop" if the model ended the answer, "length" if it, or another of several answers, was cut off at
            `max_new_tokens`.
        further: the answers to the further prompts.
        scores: mean log-probability per token for each answer, in the order of the prompts; empty unless requested.
        error: why there is no text; None if there is one.
    """

    ticket: Hashable
    text: str = ""
    tokens: int = 0
    seconds: float = 0.0
    error: Exception | None = None
    finish: str = ""
    further: tuple[str, ...] = ()
    scores: tuple[float, ...] = ()


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
        self.sampling = temperature > 0
        warmth = {"do_sample": True, "temperature": temperature} if self.sampling else {"do_sample": False}
        self.settings: dict[str, Any] = {"max_new_tokens": max_new_tokens, "num_beams": 1, **warmth}
        tokenizer: Any = getattr(processor, "tokenizer", processor)
        tokenizer.padding_side = "left"
        if tokenizer.pad_token is None:
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
        return Captioner(self, self.batcher(rows, **settings))

    def batcher(self, rows: int, **settings: object) -> Batcher:
        """A batcher of `rows` prompts: continuous, or with static batches if mmspec cannot accelerate the model."""
        batches: type[Batcher] = StaticBatcher
        if self.compilable:
            batches = ContinuousBatcher
            if self.drafter is None:
                mmspec.enable(self.model, drafter=Plain(), **self.options)
        return batches(self.model, self.processor, rows, scored=self.scored, **(self.settings | settings))

    def suggest_rows(self, frames: int = 1, size: tuple[int, int] = PICTURE) -> int:
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
        prompt = chat_inputs(self.processor, ["."], [[Image.new("RGB", size)] * frames], clips=True)
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


@dataclass(frozen=True, eq=False)
class _Ticket:
    """What is needed to decode an answer: its item, the forced beginning, and the number of its prompt."""

    ticket: Hashable
    start: str
    prompt: list[int]
    number: int = 0
    rest: tuple[Prompted, ...] = ()  # for the first of several prompts: the others


Prompted = tuple[_Ticket, BatchFeature, int]  # the arguments of `Batcher.add`: ticket, inputs, seed


class Captioner:
    """Takes pictures and prompts one by one, and returns answers as they finish; a failure affects only its item."""

    def __init__(self, engine: Engine, batches: Batcher) -> None:
        self.engine, self._batches = engine, batches
        self._preparing = Preparing[Prompted](engine.threads)
        self._several: dict[Hashable, list[CaptionResult | None]] = {}  # items with several prompts; answers so far

    @property
    def rows(self) -> int:
        """The maximum batch size; it is halved when memory runs out."""
        return self._batches.rows

    @property
    def free(self) -> int:
        """How many items can be added; some are prepared ahead, so that an ended row is replaced at once."""
        return max(0, self._batches.free + max(THREADS, self.rows // 4) - len(self._preparing))

    @property
    def busy(self) -> bool:
        """Whether any item has not been returned yet."""
        return self._batches.busy or bool(self._preparing)

    @property
    def stats(self) -> Stats:
        """Statistics of the accelerated path so far."""
        return self._batches.stats

    def add(self, ticket: Hashable, frames: Sequence[Image.Image], choice: PromptChoice, seed: int = 0) -> None:
        """Add one picture, or the frames of one clip, and its prompts; `seed` is used for sampling.

        Further prompts join once the first is answered, so that they can use the prefix cache of the picture.
        """

        def one(processor: Processor, number: int, text: str, rest: tuple[Prompted, ...] = ()) -> Prompted:
            inputs = chat_inputs(processor, [text], [frames], choice.system, choice.start, clips=True)
            inputs = inputs.to(self.engine.model.dtype)
            prompt = inputs["input_ids"][0].tolist() if choice.start else []
            return _Ticket(ticket, choice.start, prompt, number, rest), inputs, seed + number

        def job(processor: Processor) -> Prompted:
            rest = tuple(one(processor, number, text) for number, text in enumerate(choice.further, 1))
            return one(processor, 0, choice.text, rest)

        self._preparing.add(ticket, job)

    def _enter(self) -> list[CaptionResult]:
        """Add prepared prompts to the batcher; returns results for those that the processor or the batcher refuses."""
        refused = []
        for ticket, prompted in self._preparing.ready(wait=0 if self._batches.busy else self._batches.free):
            try:
                if isinstance(prompted, BaseException):
                    raise prompted
                self._batches.add(*prompted)
            except Exception as error:  # the picture or prompt cannot be processed
                refused.append(CaptionResult(ticket, error=error))
        return refused

    def step(self) -> list[CaptionResult]:
        """Do a part of the work, such as one forward of the model, and return the finished results.

        Only full batches are worth compiling: at the end of a run the batch shrinks through all smaller sizes.
        """
        results = self._enter()
        with settled(self._batches.free > 0):
            finished = self._batches.step()
        for one in finished:
            assert isinstance(one.ticket, _Ticket)
            error, finish = one.error, self._finish(one)
            if finish == "length" and "logits_processor" in self.engine.settings:
                error, finish = ValueError(f"no complete JSON in {len(one.tokens)} tokens; raise --max-new-tokens"), ""
            text = self._text(one.ticket, one.tokens) if error is None else ""
            scores = () if one.logprob is None else (round(one.logprob / max(1, len(one.tokens)), 6),)
            result = CaptionResult(one.ticket.ticket, text, len(one.tokens), one.seconds, error, finish, scores=scores)
            results += self._gathered(one.ticket, result)
        return results

    def _gathered(self, ticket: _Ticket, result: CaptionResult) -> list[CaptionResult]:
        """The result of an item, once all of its prompts are answered; if one fails, the item fails."""
        if ticket.rest and result.error is None:
            self._several[ticket.ticket] = [None] * (1 + len(ticket.rest))
            for prompt, inputs, seed in reversed(ticket.rest):
                self._batches.add(prompt, inputs, seed, ahead=True)
        several = self._several.get(ticket.ticket)
        if several is None:
            return [result]
        several[ticket.number] = result
        results = [one for one in several if one is not None]
        if len(results) < len(several):
            return []
        del self._several[ticket.ticket]
        return [
            replace(
                results[0],
                tokens=sum(one.tokens for one in results),
                seconds=sum(one.seconds for one in results),
                error=next((one.error for one in results if one.error is not None), None),
                finish="length" if any(one.finish == "length" for one in results) else results[0].finish,
                further=tuple(one.text for one in results[1:]),
                scores=tuple(score for one in results for score in one.scores),
            )
        ]

    def _finish(self, one: FinishedPrompt) -> str:
        """Why an answer ended: "length" if it has the maximum length and no end token, else "stop"."""
        config = self.engine.model.generation_config
        ended = answer_length([*one.tokens, -1], config.eos_token_id) <= len(one.tokens)
        full = len(one.tokens) >= self.engine.settings["max_new_tokens"]
        return "" if one.error is not None else "length" if full and not ended else "stop"

    def _text(self, ticket: _Ticket, tokens: list[int]) -> str:
        """The answer after its forced beginning; both are decoded together, since a tokenizer may merge them."""
        if not ticket.start:
            return self._decode(tokens).strip()
        before, whole = self._decode(ticket.prompt), self._decode(ticket.prompt + tokens)
        return (ticket.start + whole.removeprefix(before)).strip()

    def _decode(self, tokens: list[int]) -> str:
        return self.engine.processor.batch_decode([tokens], skip_special_tokens=True)[0]


def load(
    model: str, drafter: str, device: str, dtype: str, max_new_tokens: int, temperature: float, **options: object
) -> Engine:
    """Load an Engine: a name on the Hub, a local folder or an embedded model; `auto` picks the fastest device.

    `options` are those of `mmspec.enable`.
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
        raise unloadable(model, error) from error
    try:
        chosen = None if drafter == STOCK else embedded.resolve(embedded.fitting(drafter, model))
        return Engine(network, processor, chosen, max_new_tokens, temperature, options)
    except Exception as error:
        raise EngineError(
            f"cannot use the drafter {drafter!r} with {model!r}; choose another, 'ngram' (needs no weights) or "
            f"'{STOCK}' (no speed-up). {first_line(error)}"
        ) from error
