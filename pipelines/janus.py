"""Janus and Janus-Pro: `generate(generation_mode="image")` has a loop of its own in stock; this one takes its place."""

from __future__ import annotations

from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers.generation.logits_process import ClassifierFreeGuidanceLogitsProcessor, LogitsProcessorList
from transformers.generation.utils import GenerateDecoderOnlyOutput

from mmspec.loop import begin, decode
from mmspec.pipelines import decoder_only, devices, drafting
from mmspec.pipelines.cache import SlotCache
from mmspec.pipelines.decoder_only import describe, tap, unsupported, untap
from mmspec.pipelines.generate import row_seeds, watching
from mmspec.pipelines.processors import POINTWISE, Processors
from mmspec.pipelines.sampling import TorchNoise
from mmspec.pipelines.state import Onward, State, spread, stacked
from mmspec.pipelines.swap import listen
from mmspec.pipelines.visual import media
from mmspec.pipelines.vlm import VlmTarget
from mmspec.rules import Rule, exact
from mmspec.session import Row, Session
from mmspec.tree import lone
from mmspec.types import Prompt, Round, TargetInfo

__all__ = ["Enabled", "codebook", "describe", "tap", "unsupported", "untap"]


@dataclass(eq=False)
class Prepared(Exception):
    """Carries what stock's `generate` made of its arguments out of it, at the point where its loop would begin."""

    ids: Tensor  # [2B, L], the prompts, then the same with pads for words
    embeds: Tensor  # [2B, L, H]
    arguments: dict[str, Any]  # of `prepare_inputs_for_generation`
    processors: LogitsProcessorList
    config: Any


_preparing: ContextVar[dict[str, Any] | None] = ContextVar("mmspec_janus", default=None)


class Enabled(decoder_only.Enabled):
    """Text goes the ordinary way; for pictures stock prepares the arguments, and leaves its loop to a session."""

    def generate(
        self, inputs: Any = None, attention_mask: Any = None, logits_processor: Any = None, **kwargs: Any
    ) -> Any:
        def stock_generate() -> Any:  # which adds to the list of processors that it is given
            processors = LogitsProcessorList(logits_processor or ())
            return super(Enabled, self).generate(inputs, attention_mask, processors, **kwargs)  # type: ignore[misc]

        if kwargs.get("generation_mode", "text") != "image":
            return stock_generate()
        token = _preparing.set({})
        try:
            return stock_generate()  # an argument that stock refuses
        except Prepared as prepared:
            ready = prepared.with_traceback(None)  # which would hold on to all of stock's tensors
        finally:
            _preparing.reset(token)
        why = _obstacle(ready) or _unfit(self)
        if why is None:
            return _draw(self, ready)
        self._mmspec_decline(why)
        return stock_generate()

    def _mmspec_rule(self, call: Any) -> Rule:
        """A relaxed rule is for pictures: text stays exact."""
        return exact

    def _get_logits_processor(self, *args: Any, **kwargs: Any) -> Any:
        made = super()._get_logits_processor(*args, **kwargs)  # type: ignore[misc]
        seen = _preparing.get()
        if seen is not None:
            seen.update(processors=made, config=kwargs["generation_config"])
        return made

    def _prepare_static_cache(self, *args: Any, **kwargs: Any) -> Any:
        """No cache of stock's own while it prepares; some versions cannot even make theirs."""
        if _preparing.get() is not None:
            return None
        return super()._prepare_static_cache(*args, **kwargs)  # type: ignore[misc]

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        seen = _preparing.get()
        if seen is None:
            return super().prepare_inputs_for_generation(*args, **kwargs)  # type: ignore[misc]
        raise Prepared(kwargs.pop("input_ids"), kwargs.pop("inputs_embeds"), kwargs, **seen)


def _obstacle(ready: Prepared) -> str | None:
    """Why these pictures have to be drawn on the stock path, or None."""
    config, processors = ready.config, list(ready.processors)
    if ready.arguments.get("past_key_values") is not None:
        return "a cache of the caller's own in image mode is filled by the stock loop only"
    if config.output_scores or config.output_logits or config.output_attentions or config.output_hidden_states:
        return "scores, logits, attentions and hidden states of image mode are collected by the stock loop only"
    if not any(type(p) is ClassifierFreeGuidanceLogitsProcessor for p in processors):
        return "image mode without guidance (guidance_scale ≤ 1) does not run in stock either"
    known = POINTWISE | {ClassifierFreeGuidanceLogitsProcessor}
    strange = [type(p).__name__ for p in processors if type(p) not in known]
    return f"the logits processor {strange[0]} reads the prompt in image mode, or keeps state" if strange else None


def _unfit(model: Any) -> str | None:
    """Why the drafter is for text only, or None."""
    handle = model._mmspec_handle
    try:
        handle.drafter.fit(_describe_pictures(model), handle.config)
    except ValueError as error:
        return f"in image mode, {error}"
    return None


@dataclass(frozen=True)
class Paired:
    """The processors of a call up to the one that makes one law of both halves of the batch."""

    processors: LogitsProcessorList

    def __call__(self, raw: Tensor) -> Tensor:
        """Guided logits [B, N, V] from those of both streams, [2B, N, V]."""
        flat = raw.flatten(0, 1)
        no_tokens = torch.zeros(len(flat) // 2, 1, dtype=torch.long, device=raw.device)
        return self.processors(no_tokens, flat).view(len(raw) // 2, *raw.shape[1:])


class JanusTarget(VlmTarget):
    """Image mode: codes in, the head for codes, and both streams in one batch, as stock has them too."""

    def __init__(self, model: Any, features: tuple[int, ...], ready: Prepared, noise: TorchNoise | None) -> None:
        at = [type(p) is ClassifierFreeGuidanceLogitsProcessor for p in ready.processors].index(True) + 1
        upto, after = (LogitsProcessorList(part) for part in (ready.processors[:at], ready.processors[at:]))
        guidance, warpers = Paired(upto), Processors(after)
        super().__init__(model, features, warpers, bool(ready.config.do_sample), False, noise, guidance)
        self.grid = tuple(model.model.vqmodel.quantize.quant_state_dims)
        self.widen = noise is None  # stock draws from laws of the model's own precision, so its noise has that too

    def embed(self, ids: Tensor) -> Tensor:
        return self.model.prepare_embeddings_for_image_generation(ids).to(ids.device)

    def head(self, hidden: Tensor, vocab: Any = None) -> Tensor:
        return self._guided(self.model.model.generation_head(spread(hidden, 2))).to(hidden.device)

    def open(self, ready: Prepared, reserve: int) -> tuple[State, Prompt, Tensor]:
        """The prefill of both streams: the state, what a drafter may know, and the raw logits [2B, 1, V]."""
        L = ready.ids.shape[1]
        slots = SlotCache(len(ready.ids), ready.ids.device, reserve)
        arguments = {**ready.arguments, "past_key_values": slots}
        inputs = self.model.prepare_inputs_for_generation(input_ids=ready.ids, inputs_embeds=ready.embeds, **arguments)
        with listen() as heard:
            out = self.model.model.language_model(**inputs)
        slots.advance(L)
        told = heard["decoder"][1].get("position_ids")  # without any, stock counts the slots of the cache
        first = torch.full_like(ready.ids[:, :1], L) if told is None else told[:, -1:] + 1
        valid = ready.arguments["attention_mask"].bool()
        ids, hidden = ready.ids.chunk(2)[0], self._features(heard)
        prompt = Prompt(
            ids=torch.zeros_like(ids),  # words have no id among the codes
            embeds=stacked(ready.embeds, 2),
            hidden=None if hidden is None else stacked(hidden, 2),
            visual=media(ids, self.model.config, {}),
            valid=valid.chunk(2)[0],
        )
        return State(slots, Onward(first), valid, {}, 2), prompt, self._logits(out, heard)[:, -1:]

    def _forward(self, state: State, ids: Tensor, places: Tensor, mask: Any) -> Any:
        return self.model.model.language_model(
            inputs_embeds=self.embed(ids),
            position_ids=places,
            attention_mask=mask,
            past_key_values=state.cache,
            use_cache=True,
        )

    def _logits(self, out: Any, heard: dict[str, Any]) -> Tensor:
        return self.model.model.generation_head(out.last_hidden_state).to(self.device)


def _draw(model: Any, ready: Prepared) -> Any:
    """What stock's image mode returns."""
    handle, config = model._mmspec_handle, ready.config
    handle.fitting()  # whose drafter is the one to fit
    info = _describe_pictures(model)
    if info not in handle.fitted:
        fitted = handle.drafter.fit(info, handle.config)
        handle.fitted[info] = drafting.proposer(model, fitted, handle.config, info, drafts=False)
    drafter = handle.fitted[info]
    noise = TorchNoise() if config.do_sample and handle.config.reproducible else None
    target = JanusTarget(model, drafter.features, ready, noise)
    count, limit = len(ready.ids) // 2, model.model.vision_model.config.num_image_tokens
    seeds = devices.agreed(model, row_seeds(count, config.do_sample and noise is None))
    rows = [Row([], 0, limit, seed, index=b) for b, seed in enumerate(seeds)]
    session, watch = Session(list(rows), None, ready.ids.device, handle.rule), watching.get()
    with torch.no_grad():
        for round_ in _rounds(session, target, drafter, ready):
            if watch is not None:
                watch(round_)
    if noise is not None:
        noise.close(limit)
    handle.book(session.stats)
    sequences = torch.tensor([row.tokens for row in rows], dtype=ready.ids.dtype, device=ready.ids.device)
    return GenerateDecoderOnlyOutput(sequences=sequences) if config.return_dict_in_generate else sequences


def _rounds(session: Session, target: JanusTarget, drafter: Any, ready: Prepared) -> Iterator[Round]:
    """The prefill's round and all that follow."""
    reserve = ready.ids.shape[1] + session.rows[0].limit + drafter.nodes
    session.cache, prompt, raw = session.timed("prefill", target.open, ready, reserve)
    root = lone(prompt.ids[:, -1:])
    hidden = None if prompt.hidden is None else prompt.hidden[:, -1:]
    yield begin(session, target, drafter, prompt, target.law(raw, session, root, hidden))
    yield from decode(session, target, drafter)


def _describe_pictures(model: Any) -> TargetInfo:
    """What a drafter has to fit in image mode: the head for codes."""
    return replace(describe(model), vocab=model.model.vqmodel.config.num_embeddings, ends=None)


def codebook(model: Any) -> Tensor:
    """The codes as the decoder of pictures sees them, [V, c]."""
    return torch.nn.functional.normalize(model.model.vqmodel.quantize.embedding.weight.detach(), dim=-1)
