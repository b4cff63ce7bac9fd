"""An enabled model that captions: it is loaded, mmspec is enabled on it, pictures and a prompt become texts."""

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

PICTURE = (1024, 768)  # what `suggest_rows` takes for an ordinary picture
WARM_UP = 8  # new tokens that are written only to have what they need compiled
ROWS = {"cpu": 16, "cuda": 64}  # answers written at once at most, if nobody says otherwise
NODES = {"cpu": 64, "cuda": 512}  # nodes of one forward at most; beyond that it is bound by arithmetic


@dataclass(frozen=True)
class CaptionResult:
    """What became of one thing to caption.

    Attributes:
        tokens: how many were generated.
        seconds: since its prompt was first read; answers that are written at once share the time.
        finish: "stop" where the model ended it, "length" where it, or another of several, was cut off at the most
            tokens allowed.
        further: the answers to the further prompts.
        scores: mean log-probability of a token of each answer, the first prompt's first; empty unless asked for.
        error: why there is no text; None: there is one.
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
    """A model with its processor and drafter; `drafter=None` is the stock path of transformers.

    A model that mmspec cannot accelerate captions all the same, on the stock path: `drafter` is None then and `notes`
    say why.
    """

    scored = False  # whether answers come with their scores

    def __init__(
        self, model: GenerativeModel, processor: Processor, drafter: object, max_new_tokens: int,
        temperature: float = 0, options: Mapping[str, Any] | None = None,
    ):  # fmt: skip
        self.model, self.processor, self.drafter = model.eval(), processor, drafter
        self.options = dict(options or {})  # of `enable`
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
        """Let every answer be JSON of this schema; EngineError where that cannot be."""
        try:
            self.settings["logits_processor"] = [mmspec.json_grammar(self.processor, schema)]
        except (ImportError, ValueError) as error:
            raise EngineError(str(error)) from error

    @property
    def compilable(self) -> bool:
        """Whether mmspec can accelerate the model at all."""
        return families.of(self.model).unsupported(self.model) is None

    def warm_up(self, frames: Sequence[Image.Image], choice: PromptChoice, rows: int) -> None:
        """Compile the model from now on, and let the first answers wait for it: those about one item, thrown away."""
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
        """Takes prompts, `rows` of them at once; static batches where mmspec cannot accelerate the model."""
        batches: type[Batcher] = StaticBatcher
        if self.compilable:
            batches = ContinuousBatcher
            if self.drafter is None:
                mmspec.enable(self.model, drafter=Plain(), **self.options)
        return batches(self.model, self.processor, rows, scored=self.scored, **(self.settings | settings))

    def suggest_rows(self, frames: int = 1, size: tuple[int, int] = PICTURE) -> int:
        """How many answers to write at once to begin with; a flow halves it when memory runs out all the same.

        Four fifths of what is free on the device, less what reading prompts takes, over what a row takes: keys and
        values of the prompt, the answer and the draft, twice, since they are copied when rows join; and the draft's
        logits in float32, four times over. At most ROWS, and no more than NODES nodes in one forward: beyond that it is
        bound by arithmetic, where more rows bring nothing and drafts cost.

        Args:
            frames: pictures of one item at most.
            size: of the largest of them.
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
        reading = TOGETHER * 12 * config.hidden_size * each  # activations: hidden states, and the widest of an MLP
        return max(1, min(most, int((0.8 * free - reading) / row)))

    @contextlib.contextmanager
    def stock(self) -> Iterator[None]:
        """Inside, the model generates as transformers made it."""
        mmspec.disable(self.model)
        try:
            yield
        finally:
            self._enable()

    def _enable(self) -> None:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            named = None if self.drafter == embedded.SHIPPED else self.drafter
            handle = mmspec.enable(self.model, drafter=named, **{"on_unsupported": "fallback", **self.options})
        self.drafter = handle.drafter  # loaded once, however often the stock path is compared
        self.options.pop("draft", None)
        heard = [str(note.message) for note in said if issubclass(note.category, UserWarning)]
        self.notes += [note for note in heard if note not in self.notes]


@dataclass(frozen=True, eq=False)
class _Ticket:
    """What is needed to read an answer: whose it is, how it was made to begin, and which of several it is."""

    ticket: Hashable
    start: str
    prompt: list[int]
    number: int = 0
    rest: tuple[Prompted, ...] = ()  # of the first of several: the others


Prompted = tuple[_Ticket, BatchFeature, int]  # what `add` of the batches takes; the last is a seed


class Captioner:
    """Pictures and prompts go in one by one, answers come out as they are finished; a failure is one item's own."""

    def __init__(self, engine: Engine, batches: Batcher) -> None:
        self.engine, self._batches = engine, batches
        self._preparing = Preparing[Prompted](engine.threads)
        self._several: dict[Hashable, list[CaptionResult | None]] = {}  # items of several prompts, with what is there

    @property
    def rows(self) -> int:
        """How many answers are written at once at most; it is halved when memory runs out."""
        return self._batches.rows

    @property
    def free(self) -> int:
        """How many items can be added; some are prepared ahead, so that a row that ends is replaced at once."""
        return max(0, self._batches.free + max(THREADS, self.rows // 4) - len(self._preparing))

    @property
    def busy(self) -> bool:
        """Whether there is anything that has not been handed back yet."""
        return self._batches.busy or bool(self._preparing)

    @property
    def stats(self) -> Stats:
        """What happened so far, where mmspec took part."""
        return self._batches.stats

    def add(self, ticket: Hashable, frames: Sequence[Image.Image], choice: PromptChoice, seed: int = 0) -> None:
        """One picture, or the frames of one clip, and what is asked about it; `seed` fixes what is drawn.

        Further prompts join once the first is answered: what `prefix_cache` keeps of the picture is not read again.
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
        """Hand over what has been prepared; what the processor or the batches refuse."""
        refused = []
        for ticket, made in self._preparing.ready(wait=0 if self._batches.busy else self._batches.free):
            try:
                if isinstance(made, BaseException):
                    raise made
                self._batches.add(*made)
            except Exception as error:  # a picture or a prompt that cannot be read
                refused.append(CaptionResult(ticket, error=error))
        return refused

    def step(self) -> list[CaptionResult]:
        """A part of the work, such as one forward of the model; returns what has finished.

        Only full batches are worth compiling: at the end of a run a batch takes every size below its own.
        """
        results = self._enter()
        with settled(self._batches.free > 0):
            finished = self._batches.step()
        for one in finished:
            assert isinstance(one.ticket, _Ticket)
            error, finish = one.error, self._finish(one)
            if finish == "length" and "logits_processor" in self.engine.settings:
                error, finish = ValueError(f"no whole JSON in {len(one.tokens)} tokens; raise --max-new-tokens"), ""
            text = self._text(one.ticket, one.tokens) if error is None else ""
            scores = () if one.logprob is None else (round(one.logprob / max(1, len(one.tokens)), 6),)
            result = CaptionResult(one.ticket.ticket, text, len(one.tokens), one.seconds, error, finish, scores=scores)
            results += self._gathered(one.ticket, result)
        return results

    def _gathered(self, ticket: _Ticket, result: CaptionResult) -> list[CaptionResult]:
        """The result of an item once all of its prompts are answered; the first that fails fails the item."""
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
        """Why an answer ends: as long as it may be and without an end of its own, it was cut off."""
        config = self.engine.model.generation_config
        ended = answer_length([*one.tokens, -1], config.eos_token_id) <= len(one.tokens)
        full = len(one.tokens) >= self.engine.settings["max_new_tokens"]
        return "" if one.error is not None else "length" if full and not ended else "stop"

    def _text(self, ticket: _Ticket, tokens: list[int]) -> str:
        """The answer with its beginning; a tokenizer may join the two in ways that only it knows."""
        if not ticket.start:
            return self._decode(tokens).strip()
        before, whole = self._decode(ticket.prompt), self._decode(ticket.prompt + tokens)
        return (ticket.start + whole.removeprefix(before)).strip()

    def _decode(self, tokens: list[int]) -> str:
        return self.engine.processor.batch_decode([tokens], skip_special_tokens=True)[0]


def load(
    model: str, drafter: str, device: str, dtype: str, max_new_tokens: int, temperature: float, **options: object
) -> Engine:
    """Engine for a name on the Hub, a local folder or an embedded model; `auto` picks the fastest device there is.

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
    except Exception as error:  # a missing folder, no network, an unknown architecture, too little memory: all fatal
        raise unloadable(model, error) from error
    try:
        chosen = None if drafter == STOCK else embedded.resolve(embedded.fitting(drafter, model))
        return Engine(network, processor, chosen, max_new_tokens, temperature, options)
    except Exception as error:
        raise EngineError(
            f"cannot use the drafter {drafter!r} with {model!r}; choose another, 'ngram' (needs no weights) or "
            f"'{STOCK}' (no speed-up). {first_line(error)}"
        ) from error
