"""Vision-language (and language) models of transformers as a Target: stock forwards, explicit masks and positions."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import Cache

from mmspec.drafters.vocab import DraftVocab
from mmspec.modes import mode_of
from mmspec.pipelines import attended, attention, compiled, devices, reach, recurrent
from mmspec.pipelines.cache import SlotCache
from mmspec.pipelines.processors import Processors
from mmspec.pipelines.sampling import Noise, Sampler
from mmspec.pipelines.state import Onward, Places, State, positions_read, spread, stacked, tiled
from mmspec.pipelines.swap import Tap, final_hidden, hold, layer_input, listen, release
from mmspec.pipelines.visual import media
from mmspec.session import Session
from mmspec.slots import visibility
from mmspec.types import ATTENTION, FINAL, Categorical, Draft, Prompt, Round, Scores

TYPES = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")


def taps(model: Any, features: tuple[int, ...]) -> dict[str, Any]:
    """The modules to overhear: the decoder, the layers whose input the drafter asked for, and where it wants to know
    what is attended to, some layers' attention."""
    decoder = model.get_decoder()
    heard = attended.layers(decoder) if ATTENTION in features else {}
    return {"decoder": decoder, **{f"layer {i}": decoder.layers[i] for i in features if i >= 0}, **heard}


def tap(model: Any, features: tuple[int, ...]) -> None:
    for module in recurrent.modules(model.get_decoder()):
        hold(module, recurrent.reader(type(module)))
    for name, module in taps(model, features).items():
        hold(module, attended.Attentive if name.startswith("attention") else Tap, _mmspec_name=name)


def untap(model: Any, features: tuple[int, ...]) -> None:
    for module in recurrent.modules(model.get_decoder()):
        release(module)
    for module in taps(model, features).values():
        release(module)


class VlmTarget:
    """One generate call's view of a model that `enable` has tapped.

    Args:
        model: an enabled model.
        features: what the drafter asked for.
        processors: what the call does to logits, guidance left out.
        sample: draw, or take the likeliest token.
        keep: hand processed and raw logits back with the scores.
        noise: draw by this noise, fixed beforehand; None: by the session's.
        guidance: what makes one law of two streams: a NegativePrompt, or what a subclass has in its place; None: one.
    """

    grid: tuple[int, int] | None = None  # rows and columns, where the tokens are known to be those of one picture
    device: torch.device  # where the session and the drafter are, however the model's layers are spread
    widen = True  # process logits in float32, as `_sample` does

    def __init__(
        self,
        model: Any,
        features: tuple[int, ...],
        processors: Processors,
        sample: bool,
        keep: bool,
        noise: Noise | None = None,
        guidance: Any = None,
    ) -> None:
        self.model = model
        self.device = devices.execution(model.get_input_embeddings())
        self.inference = mode_of(model)
        self.features = tuple(i for i in features if i != ATTENTION)
        self.attends = ATTENTION in features
        self.sampler = Sampler(processors, sample, noise)
        self.bare = not (sample or keep or processors.processors or guidance)
        self.keep = keep
        self.guidance = guidance
        self.streams = 1 if guidance is None else 2
        handle = getattr(model, "_mmspec_handle", None)
        self.compiled = compiled.of(model) if handle is not None and handle.config.compile else None
        self.arguments: dict[str, Any] = {}
        self.given: dict[str, Any] = {}  # what the call that is being read was given; for drafters that read it, too
        decoder = model.get_decoder()
        config = decoder.config
        self.table, turn = reach.table(decoder), reach.turn(decoder)
        self.last = min((n - 1 for n in (self.table, turn) if n is not None), default=None)  # no node stands past it
        self.eager = config._attn_implementation == "eager"
        self.tree = config._attn_implementation == attention.NAME
        self.shares = bool(getattr(config, "num_kv_shared_layers", 0))
        kinds = getattr(config, "layer_types", None)
        sliding = "sliding_attention" in kinds if kinds else getattr(config, "use_sliding_window", True)
        self.window = getattr(config, "sliding_window", None) if sliding else None
        self.mixed = bool(kinds)  # a mask per layer type; without types, every layer has the same window

    def embed(self, ids: Tensor) -> Tensor:
        return self.model.get_input_embeddings()(ids).to(ids.device)

    def head(self, hidden: Tensor, vocab: DraftVocab | None = None) -> Tensor:
        """Logits [B, N, V], guided where there are two streams, of features [B, N, S·H]; of `vocab` alone if given."""
        head, hidden = self.model.get_output_embeddings(), spread(hidden, self.streams)
        return self._guided(head(hidden) if vocab is None else vocab.logits(head, hidden)).to(hidden.device)

    def prefill(
        self, ids: Tensor, generation_config: Any, arguments: dict[str, Any], cache: Cache | None, reserve: int
    ) -> tuple[State, Prompt, Tensor]:
        """The model's own prefill on a SlotCache, and that of the negative prompt where the call is guided.

        Args:
            ids: [B, L], the whole text or, on a filled cache, its new tokens; fewer than `inputs_embeds` where soft
                prompts stand before them.

        Returns:
            The state, what a drafter may know of the prompt, and the raw logits [S·B, 1, V] after it.
        """
        slots = SlotCache.adopt(cache, ids.shape[0], ids.device, reserve)
        past = slots.lengths.longest
        read = _read(ids, generation_config, arguments, past)
        new = pad(ids, (max(0, read - ids.shape[1]), 0))[:, -read:]  # soft prompts have no ids
        mask = arguments.get("attention_mask")
        valid = ids.new_ones(len(ids), past + read, dtype=torch.bool) if mask is None else mask.bool()
        arguments = {**arguments, "past_key_values": slots}
        if self.shares and "logits_to_keep" in arguments:  # a number would make the decoder drop all other features
            arguments["logits_to_keep"] = ids.new_full((1,), -1)
        visual = media(new, self.model.config, arguments)
        asked = attended.attending(visual, valid) if self.attends else nullcontext()
        with listen() as heard, asked as looked:
            out = self.model._prefill(ids, generation_config, arguments, is_first_iteration=True)
        arguments = self.model._update_model_kwargs_for_generation(out, arguments)
        _check(slots, final_hidden(heard["decoder"]).shape[1], read)
        slots.advance(read)
        positions = self._positions(ids, arguments)
        types = {name: arguments.pop(name)[:, -1:] for name in TYPES if arguments.get(name) is not None}
        places = self._places(positions, heard, past + read)
        state = State(slots, places, valid, types, self.streams, not bool(valid.all()))
        self.arguments = {**arguments, "attention_mask": None}
        prompt = Prompt(
            ids=new,
            embeds=self._embeds(heard, new),
            hidden=self._features(heard),
            visual=visual,
            valid=valid[:, past:],
            attention=None if looked is None else looked.mean,
            positions=positions_read(heard["decoder"][1].get("position_ids"), places, ids.new_zeros(len(ids), 1), read),
        )
        raw = self._logits(out, heard)[:, -1:]
        return (state, prompt, raw) if self.guidance is None else self._second(state, prompt, raw, reserve)

    def _second(self, state: State, prompt: Prompt, raw: Tensor, reserve: int) -> tuple[State, Prompt, Tensor]:
        """The same with the negative prompt below; for a drafter the streams end together, on the feature axis."""
        with listen() as heard:
            slots, out = self.guidance.prefill(self.model, reserve)
        first = torch.full_like(prompt.ids[:, :1], slots.lengths.longest)
        state = state.stack(State(slots, Onward(first), self.guidance.mask.bool(), state.types, 2))
        assert prompt.embeds is not None
        prompt = replace(
            prompt,
            embeds=_beside(prompt.embeds, self._embeds(heard, self.guidance.ids)),
            hidden=None if prompt.hidden is None else _beside(prompt.hidden, self._features(heard)),
        )
        return state, prompt, torch.cat([raw, self._logits(out, heard)[:, -1:]])

    def _positions(self, ids: Tensor, arguments: dict[str, Any]) -> Tensor | None:
        """The call's position ids with the next one at their end; None where the model's decoding step drops them."""
        step = self.model.prepare_inputs_for_generation(ids[:, -1:], next_sequence_length=1, **arguments)
        positions = arguments.pop("position_ids", None)
        return None if step.get("position_ids") is None else positions

    def _places(self, positions: Tensor | None, heard: dict[str, Any], length: int) -> Places:
        """Where the tokens to come stand: from the call's position ids, else from those that the decoder was given.

        Without either, the decoder counts the slots of the cache, padding included: `length` of them.
        """
        if positions is not None:
            return Onward(positions[..., -1:])
        told, rows = heard["decoder"][1].get("position_ids"), len(final_hidden(heard["decoder"]))
        first = torch.tensor([[length]], device=self.model.device) if told is None else told[..., -1:] + 1
        return Onward(first.expand(*first.shape[:-2], rows, 1))

    def _embeds(self, heard: dict[str, Any], ids: Tensor) -> Tensor:
        embeds = heard["decoder"][1].get("inputs_embeds")
        return self.embed(ids) if embeds is None else embeds.to(self.device)

    def _features(self, heard: dict[str, Any]) -> Any:
        """[S·B, N, F] of one forward, or None where the drafter wants none."""
        if not self.features:
            return None
        found = [
            final_hidden(heard["decoder"]) if i == FINAL else layer_input(heard[f"layer {i}"]) for i in self.features
        ]
        return torch.cat([t.to(self.device) for t in found], -1) if found[1:] else found[0].to(self.device)

    def _logits(self, out: Any, heard: dict[str, Any]) -> Tensor:
        """Raw logits [S·B, N, V] of one forward."""
        return out.logits.to(self.device)

    def _guided(self, raw: Tensor) -> Tensor:
        """[B, N, V] of raw logits [S·B, N, V]."""
        return raw if self.guidance is None else self.guidance(raw)

    def _allowed(self, logits: Tensor, session: Session, draft: Draft) -> Tensor:
        """The logits [B, N, V] that the model itself lets through, before any processor of the call."""
        return logits

    def law(self, raw: Tensor, session: Session, draft: Draft, hidden: Tensor | None) -> Scores:
        """The law that stock `generate` would draw from: processors on float logits, then softmax or argmax."""
        if self.bare:
            return Scores(Categorical(ids=self._allowed(raw, session, draft).argmax(-1)), hidden)
        guided = self._guided(raw)
        guided = self._allowed(guided.to(torch.float32) if self.widen else guided, session, draft)
        processed = self.sampler.process(guided, session, draft)
        kept = (processed, raw[: len(processed)].to(torch.float32)) if self.keep else (None, None)
        return Scores(self.sampler.realised(processed, session, draft), hidden, *kept)

    def score(self, session: Session, draft: Draft) -> Scores:
        state: State = session.cache
        tokens, depth, ancestors, index = (
            tiled(t, self.streams)
            for t in (draft.tokens.clamp(min=0), draft.tree.depth, draft.tree.ancestors, (session.emitted - 1)[:, None])
        )
        read = self.read if self.compiled is None else partial(self.compiled.read, self)
        places = state.places.at(index + depth)
        places = places if self.last is None else places.clamp(max=self.last)  # past it lies what no row will keep
        with recurrent.reads(tiled(draft.tree.parents, self.streams), depth, ancestors):
            raw, *hidden = read(state, tokens, places, self._mask(state, ancestors, depth))
        return self.law(raw, session, draft, stacked(hidden[0], self.streams) if hidden else None)

    def read(self, state: State, tokens: Tensor, places: Tensor, mask: Any) -> tuple[Tensor, ...]:
        """Raw logits [S·B, N, V] of one forward, and the features [S·B, N, F] where the drafter asked for some."""
        with listen() as heard:
            out = self._forward(state, tokens, places, mask)
        hidden, raw = self._features(heard), self._logits(out, heard)
        return (raw,) if hidden is None else (raw, hidden)

    def _forward(self, state: State, ids: Tensor, places: Tensor, mask: Any) -> Any:
        """The model's own decoding step, over nodes [S·B, N]."""
        arguments = {
            **self.arguments,
            "past_key_values": state.cache,
            "position_ids": places,
            **{name: t.expand_as(ids) for name, t in state.types.items()},
        }
        inputs = self.model.prepare_inputs_for_generation(ids, next_sequence_length=ids.shape[1], **arguments)
        inputs["attention_mask"] = mask
        if inputs.get("position_ids") is None:  # GLM-Image drops them, and would take a draft for a prompt
            inputs["position_ids"] = places
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = 0
        return self.model(**inputs, return_dict=True)

    def _mask(self, state: State, ancestors: Tensor, depth: Tensor) -> Any:
        """bool or additive [B, 1, N, T]; one per layer type where the model has sliding windows; None: all is seen."""
        at = state.cache.lengths
        if depth.shape[1] == 1 and at.even and not state.padded and self.window is None and self.compiled is None:
            return None
        full = visibility(at, state.open_slots, ancestors)

        def wanted(visible: Tensor, window: int | None = None) -> Tensor:
            mask = self._as_wanted(visible)
            return attention.marked(mask, at.device, state.open_slots, ancestors, depth, window) if self.tree else mask

        if self.window is None:
            return wanted(full)
        slot = torch.arange(full.shape[2], device=full.device)
        behind = slot - at.device[:, None]  # [B, T] relative to the root: negative in the cache, then node numbers
        place = torch.where(behind < 0, behind, depth.gather(1, behind.clamp(0, depth.shape[1] - 1)))
        near = depth[:, :, None] - place[:, None, :] < self.window
        if not self.mixed:
            return wanted(full & near, self.window)
        return {"full_attention": wanted(full), "sliding_attention": wanted(full & near, self.window)}

    def _as_wanted(self, visible: Tensor) -> Tensor:
        visible = visible[:, None]
        additive = self.eager or (
            visible.device.type == "cpu" and not self.tree and not torch.is_autocast_enabled("cpu")
        )
        return attention.additive(visible, self.model.dtype) if additive else visible

    def commit(self, session: Session, round_: Round) -> None:
        session.cache.commit(round_)


def _read(ids: Tensor, generation_config: Any, arguments: dict[str, Any], past: int) -> int:
    """How many tokens stock's `_prefill` reads, where `past` are cached already."""
    embeds, mask = arguments.get("inputs_embeds"), arguments.get("attention_mask")
    if embeds is not None:
        return embeds.shape[1] - past
    whole = getattr(generation_config, "_mask_length", -1) if mask is None else mask.shape[1]
    L = ids.shape[1]
    return len(range(L)[-(L - past) :]) if whole == L else L  # a mask that is longer tells that only new ids came


def _check(slots: SlotCache, appended: int, read: int) -> None:
    """Raises: RuntimeError, before a wrong count could write over what is cached."""
    if appended != read or not slots.slots:
        raise RuntimeError(
            f"the prefill was to append {read} tokens to the cache; the decoder read {appended}, into "
            f"{'this' if slots.slots else 'another'} cache. Call mmspec.disable(model) for this call"
        )


def _beside(cond: Tensor, uncond: Tensor) -> Tensor:
    """[B, L, 2·H] of [B, L, H] and [B, L', H], ends aligned; where the second is shorter, zeros stand before it."""
    missing = cond.shape[1] - uncond.shape[1]
    return torch.cat([cond, pad(uncond, (0, 0, missing, 0))], -1)
