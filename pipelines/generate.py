"""What `model.generate` runs on an enabled model: one session from the stock arguments to the stock return value."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, QuantizedCache
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerationMixin

from mmspec.loop import begin, decode
from mmspec.modes import each_module
from mmspec.pipelines import guided
from mmspec.pipelines.cache import SlotCache
from mmspec.pipelines.processors import Endings, Processors, unsafe
from mmspec.pipelines.sampling import TorchNoise
from mmspec.pipelines.vlm import VlmTarget
from mmspec.rules import Rule, exact
from mmspec.session import Row, Session, Stats
from mmspec.tree import lone
from mmspec.types import Round

_CACHES_ARE_MARKED = "_is_user_defined" in GenerationMixin._prepare_cache_for_generation.__code__.co_names
_RESERVE = 1024  # slots to reserve at once at most, beyond the prompt

watching: ContextVar[Callable[[Round], None] | None] = ContextVar("mmspec_watching", default=None)  # see stream.py


@dataclass
class Call:
    """The arguments that `generate` hands to `_sample`."""

    input_ids: Tensor
    logits_processor: Any
    stopping_criteria: Any
    generation_config: Any
    synced_gpus: bool = False
    streamer: Any = None
    arguments: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def endings(self) -> Endings:
        return Endings(self.stopping_criteria, len(self.input_ids), self.input_ids.device)

    @property
    def cache(self) -> Any:
        """The cache that came with the call: the caller's own, or an empty one that `generate` made."""
        return self.arguments.get("past_key_values")

    @property
    def filled(self) -> bool:
        """Whether it already holds something, as in a second turn of a conversation."""
        return self.cache is not None and int(self.cache.get_seq_length()) > 0

    @property
    def returns_cache(self) -> bool:
        """Whether anybody may look at it afterwards; older transformers do not say whose it is."""
        unknown = type(self.cache) is DynamicCache and not _CACHES_ARE_MARKED
        owned = getattr(self.cache, "_is_user_defined", unknown)
        return bool(self.generation_config.return_dict_in_generate or self.filled or owned)


def _stateful(model: Any, call: Call) -> str | None:
    processors = list(call.logits_processor)
    if model._mmspec_guided and processors and guided.stands_for(processors[0], model):
        processors = processors[1:]
    names = unsafe(processors)
    return f"the logits processor {names[0]} may keep state that rejected drafts would disturb" if names else None


# Why a call cannot be accelerated: (condition, reason). The first that holds is reported.
_OBSTACLES: tuple[tuple[Callable[[Call], Any], str], ...] = (
    (lambda c: c.input_ids.shape[1] == 0, "a prompt of inputs_embeds alone has no token ids to draft from"),
    (lambda c: not c.arguments.get("use_cache", True), "use_cache=False re-reads the whole prefix for every token"),
    (lambda c: c.synced_gpus, "synced_gpus needs every process to run the same number of forwards"),
    (lambda c: c.generation_config.output_attentions, "attention maps of a tree are not those of single steps"),
    (lambda c: c.generation_config.output_hidden_states, "output_hidden_states is not collected over tree steps"),
    (lambda c: isinstance(c.cache, QuantizedCache), "a quantized cache rounds the keys, and so changes the law"),
    (lambda c: c.filled and len(c.input_ids) > 1, "continuing a filled cache works for one row only"),
    (lambda c: c.filled and not SlotCache.can_adopt(c.cache), "a filled cache with sliding windows has lost keys"),
)


def obstacle(model: Any, call: Call) -> str | None:
    """Why this call on an enabled model has to run the stock path, or None."""
    return next((why for holds, why in _OBSTACLES if holds(call)), None) or _stateful(model, call) or _cacheless(model)


def _cacheless(model: Any) -> str | None:
    held = (vars(module) for module in each_module(model.get_decoder()))
    if any(own.get("gradient_checkpointing") and own.get("training", True) for own in held):
        return "gradient checkpointing in training mode takes the cache away from the layers; call model.eval() first"
    return None


def generate(model: Any, handle: Any, call: Call) -> tuple[Any, Stats]:
    """Run one call to its end: the stock return value, and what happened."""
    config, drafter = call.generation_config, handle.proposer
    keep = bool(config.return_dict_in_generate and (config.output_scores or config.output_logits))
    guidance, rest = guided.split(call.logits_processor, call.input_ids)
    noise = TorchNoise() if handle.config.reproducible and config.do_sample else None
    target = model._mmspec_target(
        model, drafter.features, Processors(rest), bool(config.do_sample), keep, noise, guidance
    )
    collected = _Collected(call, keep)
    cache, watch = None, watching.get()
    with torch.no_grad():
        for session, round_ in _rounds(target, drafter, call, model._mmspec_rule(call)):
            if watch is not None:
                watch(round_)
            collected.take(session, round_)
            cache = session.cache.cache
    if noise is not None:
        noise.close(collected.length())
    return collected.result(cache), collected.stats


def row_seeds(count: int, drawing: bool) -> list[int]:
    """Seeds of the rows' noise, from torch's global generator; it is left alone where nothing is drawn by them."""
    return torch.randint(2**62, (count,)).tolist() if drawing else [0] * count


def _rounds(target: VlmTarget, drafter: Any, call: Call, rule: Rule = exact) -> Iterator[tuple[Session, Round]]:
    """The prefill's round and all that follow."""
    ids, ends = call.input_ids, call.endings
    seeds = row_seeds(len(ids), target.sampler.sample and target.sampler.noise is None)
    rows = [
        Row(tokens, len(tokens), ends.limit, seed, ends.eos, ends.of(b), index=b)
        for b, (tokens, seed) in enumerate(zip(ids.tolist(), seeds, strict=True))
    ]
    session, round_ = opened(target, drafter, call, rows, rule)
    yield session, round_
    for round_ in decode(session, target, drafter):
        yield session, round_


def opened(target: VlmTarget, drafter: Any, call: Call, rows: list[Row], rule: Rule = exact) -> tuple[Session, Round]:
    """A session of these rows after the prefill of their call, and the round of that prefill."""
    ids, config = call.input_ids, call.generation_config
    reserve = ids.shape[1] + min(max(0, *(row.limit - row.start for row in rows)), _RESERVE) + drafter.nodes
    session = Session(rows, None, ids.device, rule)
    config.prefill_chunk_size, chunk = None, config.prefill_chunk_size  # a SlotCache takes a prompt in one piece
    try:
        session.cache, prompt, raw = session.timed(
            "prefill", target.prefill, ids, config, call.arguments, call.cache, reserve
        )
    finally:
        config.prefill_chunk_size = chunk
    root = lone(ids[:, -1:])
    hidden = None if prompt.hidden is None else prompt.hidden[:, -1:]
    return session, begin(session, target, drafter, prompt, target.law(raw, session, root, hidden))


class _Collected:
    """Gathers rounds into what the caller asked for: tokens, scores, logits, streamed columns."""

    def __init__(self, call: Call, keep: bool) -> None:
        self.call = call
        self.keep = keep
        self.rows: list[Row] = []
        self.kept: dict[int, list[tuple[Tensor, Tensor]]] = {}  # row id → (processed, raw) of each generated token
        self.streamed = 0
        self.stats = Stats()

    def take(self, session: Session, round_: Round) -> None:
        if not self.rows:
            self.rows = list(session.rows)
        self.stats = session.stats
        if self.keep:
            for b, row in enumerate(session.rows):
                nodes = round_.kept[b, : len(round_.new[b])]
                assert round_.scores.processed is not None and round_.scores.raw is not None
                pairs = zip(round_.scores.processed[b, nodes], round_.scores.raw[b, nodes], strict=True)
                self.kept.setdefault(id(row), []).extend(pairs)
        self._stream()

    @cached_property
    def _pad(self) -> int:  # read from the device once, not for every column
        pad = self.call.generation_config._pad_token_tensor
        return int(pad) if pad is not None else 0

    def length(self) -> int:
        longest, cut = max(len(row.tokens) for row in self.rows), self.call.endings.cut
        return (longest if cut is None else min(longest, cut)) - self.rows[0].start

    def _column(self, index: int) -> list[int]:
        return [row.tokens[row.start + index] if index < row.generated else self._pad for row in self.rows]

    def _stream(self) -> None:
        """Put each column once no row can change it any more, as stock decoding would."""
        if self.call.streamer is None:
            return
        ready = min((row.generated for row in self.rows if not row.done), default=self.length())
        for index in range(self.streamed, ready):
            self.call.streamer.put(torch.tensor(self._column(index)))
        self.streamed = max(self.streamed, ready)

    def result(self, cache: SlotCache | None) -> Any:
        if self.call.streamer is not None:
            self.call.streamer.end()
        ids, config = self.call.input_ids, self.call.generation_config
        length = self.length()
        columns = [self._column(index) for index in range(length)]
        sequences = torch.cat([ids, torch.tensor(columns, dtype=ids.dtype, device=ids.device).view(length, -1).T], 1)
        mine = None
        if self.call.returns_cache and cache is not None and len(ids) == 1:  # ragged rows have no common cache
            mine = cache.hand_back(self.call.cache, sequences.shape[1] - 1)
        if not config.return_dict_in_generate:
            return sequences
        return GenerateDecoderOnlyOutput(
            sequences=sequences,
            scores=self._steps(0, length) if config.output_scores else None,
            logits=self._steps(1, length) if config.output_logits else None,
            past_key_values=mine,
        )

    def _steps(self, which: int, length: int) -> tuple[Tensor, ...]:
        """One [B, V] a step; rows that had ended before repeat their last one."""
        rows = [[pair[which] for pair in self.kept[id(row)]] for row in self.rows]
        return tuple(torch.stack([steps[min(t, len(steps) - 1)] for steps in rows]) for t in range(length))
