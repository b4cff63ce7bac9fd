"""Gemma-4's assistants: a few layers that attend to the target's keys and values, and draft from one position."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmspec.config import Options
from mmspec.drafters.growth import ModelHead, Stepwise, draws, grown
from mmspec.drafters.shape import TreeOptions
from mmspec.pipelines.host.exotic import gemma4_assistant as gemma
from mmspec.pipelines.host.hooks import stock
from mmspec.pipelines.host.kinds import GenerativeModel
from mmspec.pipelines.host.masks import additive
from mmspec.pipelines.target.state import State
from mmspec.protocols import SessionView, Target, TargetInfo
from mmspec.types import FINAL, Draft, Prompt, decided, gather_rows

_USUAL = TreeOptions.chain(4)  # the recommended shape


class AssistantDrafter(Stepwise):
    """Drafts with transformers' own assistant, which reads the target's cache and has none of its own.

    Its input for a node is the embedding of the node's token and the feature of its parent. All nodes have the position
    of the pending token; they see the target's cache, but not each other, so trees cost no more than chains.

    Args:
        model: of one of CLASSES; it stays on its device.
    """

    method = "assistant"
    features = (FINAL,)
    head = ModelHead()

    def __init__(self, model: GenerativeModel) -> None:
        self.model, self.options = model, _USUAL

    def __repr__(self) -> str:
        return f"AssistantDrafter({stock(self.model).__name__}, {self.options})"

    def fit(self, target: TargetInfo, given: Options) -> AssistantDrafter:
        """The same assistant with the user's options.

        Raises:
            ValueError: made for another target, or an option that it does not use.
        """
        options = _USUAL.with_(given, "the assistant")
        if options.named or options.prune:
            what = "an assistant has a head of its own and reads the target's cache"
            raise ValueError(f"{what}; leave draft_vocab and prune out")
        own = gemma.sizes(self.model)
        needed = {"width": target.hidden, "vocabulary": target.vocab}
        wrong = [f"{name} {own[name]} (target: {needed[name]})" for name in own if own[name] != needed[name]]
        if wrong:
            raise ValueError(f"this assistant does not fit {target.name}: {', '.join(wrong)}. Use the one made for it")
        options.check_branches(target.vocab)
        fitted = AssistantDrafter(self.model)
        fitted.options = options
        return fitted

    def start(self, session: SessionView, target: Any, prompt: Prompt) -> None:
        """Nothing to read, since it uses the target's cache.

        Raises:
            ValueError: a target that shares no keys and values.
        """
        _shared(target)

    @torch.no_grad()
    def propose(self, session: SessionView, target: Any) -> Draft:
        hidden, _, count, _ = decided(session.last)
        f = self._read(session, target, session.pending[:, None], gather_rows(hidden, count[:, None] - 1))
        return grown(self, session, target, f, draws(self.options, session))

    def step(
        self, session: SessionView, target: Target, tokens: Tensor, f: Tensor, appended: int, ahead: Tensor,
        seen: Tensor | None, level: int,
    ) -> Tensor:  # fmt: skip
        return self._read(session, target, tokens, f[..., : gemma.sizes(self.model)["width"]])

    def _read(self, session: Any, target: Any, tokens: Tensor, hidden: Tensor) -> Tensor:
        """Features [B, n, H + H_a], for the next step and for its head, of tokens [B, n] after features [B, n, H]."""
        model, state, n = self.model, session.cache, tokens.shape[1]
        home, dtype = gemma.enters(model).device, gemma.enters(model).dtype
        x = torch.cat([target.embed(tokens), hidden.to(target.embed(tokens).dtype)], -1).to(home, dtype)
        slots = {kind: state.cache.slots[i] for kind, i in _shared(target).items()}
        longest = state.cache.lengths.longest
        shared = {
            kind: (s.keys[:, :, :longest].to(home), s.values[:, :, :longest].to(home)) for kind, s in slots.items()
        }
        places = state.places.at((session.emitted - 1)[:, None]).expand(-1, n).to(home)
        return gemma.read(model, x, self._masks(state, n, home), places, shared).to(tokens.device)

    def _masks(self, state: State, n: int, home: torch.device) -> dict[str, Tensor]:
        """Masks [B, 1, n, T] over each row's cache for each layer type: all of it, or the last part."""
        at = state.cache.lengths
        slot = torch.arange(at.longest, device=at.device.device)
        more = max(0, at.longest - state.open_slots.shape[1])
        past = torch.nn.functional.pad(state.open_slots, (0, more), value=True)
        every = past[:, : at.longest] & (slot < at.device[:, None])
        near = every & (slot >= at.device[:, None] - 1 - gemma.window(self.model))
        both = {"full_attention": every, "sliding_attention": near}
        masks = {kind: seen[:, None, None].expand(-1, 1, n, -1).to(home) for kind, seen in both.items()}
        if gemma.eager(self.model):
            return {kind: additive(mask, self.model.dtype) for kind, mask in masks.items()}
        return masks

    def logits(self, hidden: Tensor, target: Target) -> Tensor:
        return gemma.logits(self.model, hidden).to(hidden.device)


def _shared(target: Any) -> dict[str, int]:
    """Layer type → the index of the target's layer whose keys and values an assistant reads; see `gemma.shared`.

    Raises:
        ValueError: the target is of another architecture.
    """
    layers = gemma.shared(target.model)
    if not layers or target.streams > 1:
        name = stock(target.model).__name__
        raise ValueError(f"{name} shares no keys and values with an assistant; Gemma-4 does, without guidance_scale")
    return layers
