"""Vision-language (and language) models of transformers as a Target: stock forwards, explicit masks and positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import Cache

from mmspec.pipelines.cache import SlotCache
from mmspec.pipelines.processors import Processors
from mmspec.pipelines.swap import Tap, final_hidden, layer_input, listen, restore, swap
from mmspec.session import Session
from mmspec.slots import visibility
from mmspec.types import FINAL, Categorical, Draft, Prompt, Round, Scores

_TYPES = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")


@dataclass
class State:
    """What the target keeps per row."""

    cache: SlotCache
    first: Tensor  # [..., B, 1], position of the first generated token; Qwen's M-RoPE has leading axes
    open_slots: Tensor  # bool [B, L], false at the prompt's padding
    types: dict[str, Tensor]  # token types of generated text, [B, 1] each

    def select(self, rows: Tensor) -> State:
        types = {name: t[rows] for name, t in self.types.items()}
        return State(self.cache.select(rows), self.first[..., rows, :], self.open_slots[rows], types)

    def join(self, other: State) -> State:
        longest = max(self.open_slots.shape[1], other.open_slots.shape[1])
        open_slots = [pad(t, (0, longest - t.shape[1]), value=True) for t in (self.open_slots, other.open_slots)]
        types = {name: torch.cat([t, other.types[name]]) for name, t in self.types.items()}
        first = torch.cat([self.first, other.first], -2)
        return State(self.cache.join(other.cache), first, torch.cat(open_slots), types)


def placeholders(model: Any) -> list[int]:
    """Token ids that stand for visual features in a prompt."""
    names = ("image_token_id", "video_token_id", "image_token_index", "video_token_index")
    return sorted({getattr(model.config, name, None) for name in names} - {None})


def taps(model: Any, features: tuple[int, ...]) -> dict[str, Any]:
    """The modules to overhear: the decoder, and the layers whose input the drafter asked for."""
    decoder = model.get_decoder()
    return {"decoder": decoder, **{f"layer {i}": decoder.layers[i] for i in features if i != FINAL}}


def tap(model: Any, features: tuple[int, ...]) -> None:
    for name, module in taps(model, features).items():
        swap(module, Tap, _mmspec_name=name)


def untap(model: Any, features: tuple[int, ...]) -> None:
    for module in taps(model, features).values():
        restore(module)


class VlmTarget:
    """One generate call's view of a model that `enable` has tapped."""

    def __init__(self, model: Any, features: tuple[int, ...], processors: Processors, sample: bool, keep: bool) -> None:
        self.model = model
        self.features = features
        self.processors = processors
        self.sample = sample
        self.keep = keep  # hand processed and raw logits back with the scores
        self.arguments: dict[str, Any] = {}
        config = model.get_decoder().config
        self.eager = config._attn_implementation == "eager"
        kinds = getattr(config, "layer_types", None)
        sliding = "sliding_attention" in kinds if kinds else getattr(config, "use_sliding_window", True)
        self.window = getattr(config, "sliding_window", None) if sliding else None
        self.mixed = bool(kinds)  # a mask per layer type; without types, every layer has the same window

    def embed(self, ids: Tensor) -> Tensor:
        return self.model.get_input_embeddings()(ids)

    def head(self, hidden: Tensor) -> Tensor:
        return self.model.get_output_embeddings()(hidden)

    def prefill(
        self, ids: Tensor, generation_config: Any, arguments: dict[str, Any], cache: Cache | None, reserve: int
    ) -> tuple[State, Prompt, Tensor]:
        """The model's own prefill on a SlotCache.

        Returns:
            The state, what a drafter may know of the prompt, and the raw logits [B, 1, V] after it.
        """
        slots = SlotCache.adopt(cache, ids.shape[0], ids.device, reserve)
        past = slots.lengths.longest
        mask = arguments.get("attention_mask")
        valid = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
        arguments = {**arguments, "past_key_values": slots}
        with listen() as heard:
            out = self.model._prefill(ids, generation_config, arguments, is_first_iteration=True)
        arguments = self.model._update_model_kwargs_for_generation(out, arguments)
        slots.advance(valid.shape[1] - past)
        types = {name: arguments.pop(name)[:, -1:] for name in _TYPES if arguments.get(name) is not None}
        first = arguments.pop("position_ids")[..., -1:]
        self.arguments = {**arguments, "attention_mask": None}
        embeds = heard["decoder"][1].get("inputs_embeds")
        if embeds is None and past == 0:
            embeds = self.embed(ids)
        prompt = Prompt(
            ids=ids[:, past:] if ids.shape[1] == valid.shape[1] else ids,
            embeds=embeds,
            hidden=self._features(heard),
            visual=self._visual(ids[:, -(valid.shape[1] - past) :]),
            valid=valid[:, past:],
        )
        return State(slots, first, valid, types), prompt, out.logits[:, -1:]

    def _visual(self, ids: Tensor) -> Tensor:
        """bool [B, L]: image and video positions."""
        return torch.isin(ids, torch.tensor(placeholders(self.model), device=ids.device, dtype=ids.dtype))

    def _features(self, heard: dict[str, Any]) -> Tensor | None:
        if not self.features:
            return None
        found = [
            final_hidden(heard["decoder"]) if i == FINAL else layer_input(heard[f"layer {i}"]) for i in self.features
        ]
        return found[0] if len(found) == 1 else torch.cat([t.to(found[0].device) for t in found], -1)

    def law(self, raw: Tensor, session: Session, draft: Draft, hidden: Tensor | None) -> Scores:
        """The law that stock `generate` would draw from: processors on float logits, then softmax or argmax."""
        raw = raw.to(torch.float32) if self.keep or self.processors.processors or self.sample else raw
        processed = self.processors(raw, session, draft)
        law = Categorical(processed) if self.sample else Categorical(ids=processed.argmax(-1))
        kept = (processed, raw) if self.keep else (None, None)
        return Scores(law, hidden, *kept)

    def score(self, session: Session, draft: Draft) -> Scores:
        state: State = session.cache
        depth = draft.tree.depth
        arguments = {
            **self.arguments,
            "past_key_values": state.cache,
            "position_ids": state.first + (session.emitted - 1)[:, None] + depth,
            **{name: t.expand_as(depth) for name, t in state.types.items()},
        }
        ids = draft.tokens.clamp(min=0)
        inputs = self.model.prepare_inputs_for_generation(ids, next_sequence_length=ids.shape[1], **arguments)
        inputs["attention_mask"] = self._mask(state, draft)
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = 0
        with listen() as heard:
            out = self.model(**inputs, return_dict=True)
        return self.law(out.logits, session, draft, self._features(heard))

    def _mask(self, state: State, draft: Draft) -> Any:
        """bool or additive [B, 1, N, T]; one per layer type where the model has sliding windows."""
        at = state.cache.lengths
        full = visibility(at, state.open_slots, draft.tree.ancestors)
        if self.window is None:
            return self._as_wanted(full)
        slot = torch.arange(full.shape[2], device=full.device)
        behind = slot - at.device[:, None]  # [B, T] relative to the root: negative in the cache, then node numbers
        depth = draft.tree.depth
        place = torch.where(behind < 0, behind, depth.gather(1, behind.clamp(0, depth.shape[1] - 1)))
        near = depth[:, :, None] - place[:, None, :] < self.window
        if not self.mixed:
            return self._as_wanted(full & near)
        return {"full_attention": self._as_wanted(full), "sliding_attention": self._as_wanted(full & near)}

    def _as_wanted(self, visible: Tensor) -> Tensor:
        visible = visible[:, None]
        if not self.eager:
            return visible
        dtype = self.model.dtype
        return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(
            ~visible, torch.finfo(dtype).min
        )

    def commit(self, session: Session, round_: Round) -> None:
        """Keep what stands; on a chain it lies in its place already."""
        state: State = session.cache
        state.cache.commit(round_.kept, round_.counts, round_.verdict.count, round_.draft.tree.is_chain)
