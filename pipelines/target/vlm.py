"""The Target for vision-language and text models of transformers: stock forwards, explicit masks and positions."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.functional import pad

from mmspec.drafters.draft_vocab import DraftVocab
from mmspec.pipelines.host import callers_cache, devices, forward, reach, tree_attention
from mmspec.pipelines.host.cache import RaggedCache
from mmspec.pipelines.host.call import Call
from mmspec.pipelines.host.decoder import dtype_of
from mmspec.pipelines.host.exotic import by_path
from mmspec.pipelines.host.forward import Read, during, reading
from mmspec.pipelines.host.kinds import GenerativeModel, Mask, ModelOutput
from mmspec.pipelines.host.masks import Masks, Visibility
from mmspec.pipelines.host.model import HostModel
from mmspec.pipelines.host.processors.guidance import Guidance, NegativePrompt
from mmspec.pipelines.host.vision import media
from mmspec.pipelines.target import captured_prompt, captures, prefixes
from mmspec.pipelines.target.model import ModelTarget
from mmspec.pipelines.target.state import Onward, Places, State, interleaved, positions_read
from mmspec.ragged_cache import Lengths
from mmspec.session import Session
from mmspec.tree import lone
from mmspec.types import Prompt, Round, Scores, Tree

_RESERVE = 1024  # maximum number of cache slots that are reserved at once, beyond the prompt


class VlmTarget(ModelTarget):
    """A view of a model whose features `enable` records by hooks.

    Args:
        model: an enabled model.
        features: the features that the drafter reads.
        guidance: of the call.
        prefixes: the prefix cache; None: prompts are read whole.
    """

    def __init__(
        self, model: GenerativeModel, features: tuple[int, ...], guidance: Guidance | None = None, prefixes: Any = None
    ) -> None:
        super().__init__(features, guidance)
        self.host = host = HostModel.of(model)
        self.prefixes, self.recurrent = prefixes, bool(prefixes and host.recurrent)
        assert host.head is not None  # of an enabled model
        self.model, self.output = model, host.head
        self.device, self.dtype = devices.execution(host.embedding), dtype_of(model)
        self.inference = host.mode
        patch = getattr(model, "_mmspec_patch", None)
        self.captured = captures.of(model, patch.config.compile) if patch is not None else None
        self.compiles_prompts = patch is not None and patch.config.compile
        self.stateful, self.by_tree = host.stateful, not host.only_keys
        self.apart, self.table, self.shares = host.apart, host.table, host.shares
        self.draft_attention = host.draft_attention
        ends = (n - 1 for n in (host.table, host.rotary_limit) if n is not None)
        self.last = min(ends, default=None)
        name = host.draft_attention or host.attention
        self.eager, self.tree = name == "eager", name == tree_attention.NAME
        self.masks = Masks.of(host, name)
        self.mixed, self.kinds = self.masks.mixed, host.kinds
        # FlashAttention can read a chain of a single row, whose nodes follow each other at the end of the text
        self.flash = host.flash and self.last is None and self.masks.kinds <= set(tree_attention.KINDS)

    @property
    def tables(self) -> tuple[nn.Module, ...]:
        return self.host.embedding, self.output

    def embed(self, ids: Tensor) -> Tensor:
        return self.host.embedding(ids).to(ids.device)

    def logits(self, hidden: Tensor, vocab: DraftVocab | None = None) -> Tensor:
        return self.output(hidden) if vocab is None else vocab.logits(self.output, hidden)

    def bare_embed(self, ids: Tensor) -> Tensor:
        """Input embeddings [..., H] without the norm that some embedding tables have (Muse-Glimmer's); else `embed`."""
        table = self.host.embedding
        return F.embedding(ids, table.weight).to(ids.device) if hasattr(table, "embed_norm") else self.embed(ids)

    def prefill(self, session: Session, inputs: Call, nodes: int) -> tuple[Prompt, Scores]:
        """Run the model's own prefill on a RaggedCache, and that of the negative prompt if the call is guided.

        The call's ids [B, L] are the whole text or, on a filled cache, its new tokens. With soft prompts before them
        they are fewer than `inputs_embeds`.
        """
        ids = inputs.input_ids
        reserve = ids.shape[1] + min(max(0, *(row.limit - row.start for row in session.rows)), _RESERVE) + nodes
        read = self.first if self.prefixes is None else partial(prefixes.read, self, session)
        state, prompt, raw = read(inputs, reserve)
        if inputs.negative is not None:
            state, prompt, raw = self._second(inputs.negative, state, prompt, raw, reserve)
        session.cache = state
        if self.table is not None:
            reach.bound(session, self.table)
        hidden = None if prompt.hidden is None else prompt.hidden[:, -1:]
        return prompt, self.scores(raw, session, lone(prompt.ids[:, -1:]), hidden)

    def commit(self, session: Session, round_: Round) -> None:
        if self.prefixes is not None:
            prefixes.follow(self, session, round_)
        super().commit(session, round_)

    def first(self, call: Call, reserve: int, slots: RaggedCache | None = None) -> tuple[State, Prompt, Tensor]:
        """Read the prompt of a call, with room for `reserve` slots in all.

        Args:
            slots: a cache that holds the first tokens of the call's only row; None: an empty one, or the call's own.

        Returns:
            The state, the Prompt for the drafter, and the raw logits [B, 1, V] after the prompt.
        """
        ids, arguments = call.input_ids, call.arguments
        if slots is None:
            slots = callers_cache.adopt(call.cache, ids.shape[0], ids.device, reserve, self.host.crossed)
        past = slots.lengths.longest
        read = call.unread(past)
        new = pad(ids, (max(0, read - ids.shape[1]), 0))[:, -read:]  # soft prompts have no ids
        mask = arguments.get("attention_mask")
        valid = ids.new_ones(len(ids), past + read, dtype=torch.bool) if mask is None else mask.bool()
        valid = valid.expand(len(ids), -1)  # stock takes one row of a mask, or of positions, for all
        visual = media(new, self.model.config, arguments)
        decode = captured_prompt.reader(self, slots, valid)
        given, out, arguments = forward.prefill(self.model, call, slots, decode, self.shares)
        _check(slots, given.final.shape[1], read)
        embeds, hidden = self._embeds(given, new), self._features(given)
        if self.prefixes is not None and hidden is not None and self.streams == 1:
            slots.keep_features(hidden, embeds)
        slots.advance(read)
        positions = forward.next_positions(self.model, ids, arguments)
        places = self._places(positions, given, past + read)
        types, arguments = forward.split(arguments)
        state = State(slots, places, valid, types, arguments, padded=not bool(valid.all()))
        if self.prefixes is not None:
            state.cuts = prefixes.cuts(given.arguments, valid, past)
        prompt = Prompt(
            ids=new, embeds=embeds, hidden=hidden, visual=visual, valid=valid[:, past:], grid=self._grid(given),
            positions=positions_read(given.arguments.get("position_ids"), places, ids.new_zeros(len(ids), 1), read),
            given=call.given,
        )  # fmt: skip
        return state, prompt, self._logits(out, given)[:, -1:]

    def _second(
        self, negative: NegativePrompt, state: State, prompt: Prompt, raw: Tensor, reserve: int
    ) -> tuple[State, Prompt, Tensor]:
        """The same with the negative prompt's stream; the drafter gets both along the feature axis, ends aligned."""
        ids, mask = negative.ids, negative.mask
        slots = RaggedCache(len(ids), ids.device, reserve)
        read, out = forward.plain(self.model, ids, mask, slots)
        slots.advance(ids.shape[1])
        first = torch.full_like(prompt.ids[:, :1], slots.lengths.longest)
        both = interleaved(state, State(slots, Onward(first), mask.bool(), state.types))
        assert prompt.embeds is not None
        features = self._features(read)
        prompt = replace(
            prompt,
            embeds=_concatenated(prompt.embeds, self._embeds(read, ids)),
            hidden=None if prompt.hidden is None or features is None else _concatenated(prompt.hidden, features),
        )
        return both, prompt, torch.stack([raw, self._logits(out, read)[:, -1:]], 1).flatten(0, 1)

    def _grid(self, read: Read) -> tuple[int, int] | None:
        """Rows and columns of the image that is generated, if any."""
        return None

    def _places(self, positions: Tensor | None, read: Read, length: int) -> Places:
        """Positions of the tokens to generate: from the call's position ids, else from those passed to the decoder.

        Without either, the decoder counts the cache slots, `length` of them with padding.
        """
        given = read.arguments.get("position_ids")
        if positions is not None:
            first = positions[..., -1:]
        else:
            first = torch.tensor([[length]], device=self.model.device) if given is None else given[..., -1:] + 1
        return Onward(first.expand(*first.shape[:-2], len(read.final), 1))

    def _embeds(self, read: Read, ids: Tensor) -> Tensor:
        embeds = read.arguments.get("inputs_embeds")
        return self.embed(ids) if embeds is None else embeds.to(self.device)

    def _features(self, read: Read) -> Tensor | None:
        """The features [B·S, N, F] of one forward, or None if the drafter needs none."""
        if not self.features:
            return None
        each = [t.to(self.device) for t in read.features(self.features)]
        return torch.cat(each, -1) if each[1:] else each[0]

    def _logits(self, out: Any, read: Read) -> Tensor:
        """Raw logits [B·S, N, V] of one forward."""
        return out.logits.to(self.device)

    def read(self, state: State, tokens: Tensor, places: Tensor, mask: Mask) -> tuple[Tensor, ...]:
        with reading() as read:
            out = self._forward(state, tokens, places, mask)
        hidden, raw = self._features(read), self._logits(out, read)
        return (raw,) if hidden is None else (raw, hidden)

    def _forward(self, state: State, ids: Tensor, places: Tensor, mask: Mask) -> ModelOutput | Tensor:
        """The model's own decoding step, over nodes [B·S, N]."""
        with nullcontext() if mask is None or self.draft_attention is None else during(attention=self.draft_attention):
            return forward.step(self.model, state.arguments, state.types, state.cache, ids, places, mask)

    def reads(self, tree: Tree, lengths: Lengths) -> AbstractContextManager[None]:
        if not self.by_tree:
            return nullcontext()
        return by_path.reads(tree.parents, tree.depth, tree.ancestors, lengths)

    def mask(self, state: State, ancestors: Tensor, depth: Tensor, chain: bool = False) -> Mask:
        """bool or additive [B, 1, N, T], or one for each layer type if these differ; None: no mask is needed."""
        if state.cache.lengths.even and not state.padded and self.captured is None:
            alone = depth.shape[1] == 1 and self.masks.plain
            if alone or (chain and self.flash and len(state.open_slots) == 1):
                return None
        lengths = state.cache.lengths
        visible = Visibility(lengths, state.open_slots, state.padded, state.prompt, ancestors, depth)
        return self.masks.build(visible, self.dtype, chain)


def _check(slots: RaggedCache, appended: int, read: int) -> None:
    """Raise RuntimeError if the prefill did not append `read` tokens, before a wrong count overwrites cached keys."""
    if appended != read or not slots.slots:
        raise RuntimeError(
            f"the prefill should have appended {read} tokens to the cache, but the decoder read {appended}, into "
            f"{'this' if slots.slots else 'another'} cache. Call mmspec.disable(model) for this call"
        )


def _concatenated(cond: Tensor, uncond: Tensor) -> Tensor:
    """[B, L, 2·H] from [B, L, H] and [B, L', H], aligned at their ends; a shorter second one is padded with zeros."""
    missing = cond.shape[1] - uncond.shape[1]
    return torch.cat([cond, pad(uncond, (0, 0, missing, 0))], -1)
