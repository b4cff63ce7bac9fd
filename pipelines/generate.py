"""What `model.generate` runs on an enabled model: one session from the stock arguments to the stock return value."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from transformers.cache_utils import DynamicCache, QuantizedCache
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerationMixin

from mmspec.loop import begin, decode
from mmspec.pipelines import guided, obstacles, reach
from mmspec.pipelines.cache import SlotCache
from mmspec.pipelines.endings import Endings, unheard
from mmspec.pipelines.obstacles import Obstacle
from mmspec.pipelines.processors import Processors, unsafe
from mmspec.pipelines.sampling import TorchNoise
from mmspec.pipelines.state import State
from mmspec.pipelines.vlm import VlmTarget
from mmspec.rules import Rule, exact
from mmspec.session import Row, Session, Stats
from mmspec.tree import lone
from mmspec.types import Round

_CACHES_ARE_MARKED = "_is_user_defined" in GenerationMixin._prepare_cache_for_generation.__code__.co_names
_RESERVE = 1024  # slots to reserve at once at most, beyond the prompt

_custom: ContextVar[list[Call] | None] = ContextVar("mmspec_custom", default=None)  # the calls that one makes
asking: ContextVar[dict[str, Any]] = ContextVar("mmspec_asking", default={})  # noqa: B039 nobody writes into it
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
    given: dict[str, Any] = field(default_factory=lambda: asking.get())  # what the user gave `generate`, by name

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
    def scored(self) -> bool:
        """Whether the processed scores of each step are collected."""
        return bool(self.generation_config.return_dict_in_generate and self.generation_config.output_scores)

    @property
    def owned(self) -> bool | None:
        """Whether it is the caller's own, or seen by a `custom_generate`; None: older transformers do not say whose."""
        if _custom.get() is not None:
            return True
        unknown = type(self.cache) is DynamicCache and not _CACHES_ARE_MARKED
        return getattr(self.cache, "_is_user_defined", None if unknown else False)

    @property
    def returns_cache(self) -> bool:
        """Whether anybody may look at it afterwards."""
        return bool(self.generation_config.return_dict_in_generate or self.filled or self.owned in (True, None))

    def for_model(self, model: Any) -> Call:
        """The same call with int64 ids, and with all that a forward reads on the model's device, where stock moves it.

        A model that lies on the CPU may be one that moves at its forward, so it draws nothing there.
        """
        ids, device = self.input_ids.long(), model.device
        if device.type in ("cpu", "meta") or device == ids.device:
            return replace(self, input_ids=ids)

        def moved(thing: Any) -> Any:
            return tree_map_only(Tensor, lambda t: t.to(device), thing)

        processors = [copy.copy(processor) for processor in self.logits_processor]
        for processor in processors:
            vars(processor).update(moved(vars(processor)))
        cache = {} if self.cache is None else {"past_key_values": self.cache}
        others = {name: value for name, value in self.arguments.items() if name not in cache}
        arguments = {**moved(others), **cache}
        return replace(
            self, input_ids=ids.to(device), logits_processor=LogitsProcessorList(processors), arguments=arguments
        )


def _stateful(model: Any, call: Call, kind: Any) -> Obstacle | None:
    """A processor that may not be asked about drafts: it is never skipped, never guessed."""
    processors = list(call.logits_processor)
    if kind._mmspec_guided and processors and guided.stands_for(processors[0], model):
        processors = processors[1:]
    why = unsafe(processors) or unheard(call.stopping_criteria, len(call.input_ids), call.scored)
    return Obstacle(why, always_falls_back=True) if why else None


# Why a call cannot be accelerated: (condition, reason). The first that holds is reported.
_OBSTACLES: tuple[tuple[Callable[[Call], Any], str], ...] = (
    (lambda c: c.input_ids.shape[1] == 0, "a prompt of inputs_embeds alone has no token ids to draft from"),
    (lambda c: not c.arguments.get("use_cache", True), "use_cache=False re-reads the whole prefix for every token"),
    (lambda c: c.synced_gpus, "synced_gpus needs every process to run the same number of forwards"),
    (lambda c: c.generation_config.output_attentions, "attention maps of a tree are not those of single steps"),
    (lambda c: c.generation_config.output_hidden_states, "output_hidden_states is not collected over tree steps"),
    (lambda c: isinstance(c.cache, QuantizedCache), "a quantized cache rounds the keys, and so changes the law"),
    (lambda c: getattr(c.cache, "offloading", False), "an offloading cache saves memory that a draft needs at once"),
    (lambda c: c.filled and len(c.input_ids) > 1, "continuing a filled cache works for one row only"),
    (lambda c: c.owned and len(c.input_ids) > 1, "a cache of the caller's own is filled for one row only"),
    (lambda c: c.filled and not SlotCache.can_adopt(c.cache), "a filled cache with sliding windows has lost keys"),
)


def obstacle(model: Any, call: Call, kind: Any) -> Obstacle | None:
    """Why this call on an enabled model has to run the stock path, or None; `kind` is the mixin of its class."""
    found = next((Obstacle(why) for holds, why in _OBSTACLES if holds(call)), None)
    here = obstacles.now(model, call.generation_config, len(call.input_ids))
    return here or found or _turning(model, call) or _elsewhere(model, call) or _stateful(model, call, kind)


def _turning(model: Any, call: Call) -> Obstacle | None:
    """Of a model whose rotary frequencies change with the length: whether they may do so in this call."""
    turn = reach.turn(model.get_decoder())
    if turn is None:
        return None
    L, told = call.input_ids.shape[1], call.arguments.get("position_ids")
    read = L if told is None else max(L, int(told.max()) + 1)
    longest = read + call.endings.limit - L - 1  # the last token is not read any more
    if longest <= turn:
        return None
    return Obstacle(
        f"its rotary frequencies (dynamic or longrope) change past {turn} positions, and this call may reach "
        f"{longest}; a prompt and max_new_tokens of {turn + 1} together do not"
    )


def _elsewhere(model: Any, call: Call) -> Obstacle | None:
    """Noise on another device than the law is not what stock would draw there."""
    fixed = model._mmspec_handle.config.reproducible and call.generation_config.do_sample
    if fixed and call.for_model(model).input_ids.device != call.input_ids.device:
        why = "reproducible=True draws on the model's device, stock on that of input_ids; move them to the model's"
        return Obstacle(why)
    return None


def generate(model: Any, handle: Any, call: Call) -> tuple[Any, Stats]:
    """Run one call to its end: the stock return value, and what happened."""
    config, drafter = call.generation_config, handle.fitting(model)
    for what in _left_out(call):
        handle.say(what)
    if (calls := _custom.get()) is not None:
        calls.append(call)
    keep = bool(config.return_dict_in_generate and (config.output_scores or config.output_logits))
    ours = call.for_model(model)
    guidance, rest = guided.split(ours.logits_processor, ours.input_ids)
    noise = TorchNoise() if handle.config.reproducible and config.do_sample else None
    target = handle.kind._mmspec_target(
        model, drafter.features, Processors(rest), bool(config.do_sample), keep, noise, guidance
    )
    collected = _Collected(call, keep)
    state, watch = None, watching.get()
    with torch.no_grad():
        for session, round_ in _rounds(target, drafter, call, handle.kind._mmspec_rule(handle, call)):
            if watch is not None:
                session.watched = True
                watch(round_)
            collected.take(session, round_)
            state = session.cache
    if noise is not None:
        noise.close(collected.length())
    return collected.result(state), collected.stats


def overheard(custom: Callable[..., Any], handle: Any) -> Callable[..., Any]:
    """A `custom_generate` that is told of where it never asks for what mmspec accelerates."""

    @functools.wraps(custom)
    def run(*args: Any, **kwargs: Any) -> Any:
        token = _custom.set(calls := [])
        try:
            found = custom(*args, **kwargs)
        finally:
            _custom.reset(token)
        if not calls:
            handle.say("mmspec does not accelerate this custom_generate: its loop is its own")
        return found

    return run


def _left_out(call: Call) -> Iterator[str]:
    """What stock would have done besides, where the tokens do not depend on it."""
    config = call.generation_config
    if config.prefill_chunk_size is not None:
        yield "mmspec reads a prompt in one piece; prefill_chunk_size has no effect"
    if config.return_dict_in_generate and len(call.input_ids) > 1:
        yield "mmspec returns past_key_values for one row only: rows that ended at different times share no cache"


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
    call = call.for_model(target.model)
    target.given = call.given
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
    if target.table is not None:
        _bound(session, target.table)
    root = lone(ids[:, -1:])
    hidden = None if prompt.hidden is None else prompt.hidden[:, -1:]
    return session, begin(session, target, drafter, prompt, target.law(raw, session, root, hidden))


def _bound(session: Session, table: int) -> None:
    """Let rows fail where they go on past the model's learned positions, and not where a draft would."""
    begin = torch.zeros(len(session.cache.open_slots), 1, dtype=torch.long, device=session.pending.device)
    first = session.cache.places.at(begin).reshape(-1, len(session.rows)).amax(0).tolist()  # of all streams
    for row, place in zip(session.rows, first, strict=True):
        row.stop = reach.within(row.stop, row.start + table - place, table)


class _Collected:
    """Gathers rounds into what the caller asked for: tokens, scores, logits, streamed columns."""

    def __init__(self, call: Call, keep: bool) -> None:
        self.call = call
        self.keep = keep
        self.rows: list[Row] = []
        self.read = 0  # slots that the prompt takes
        self.kept: dict[int, list[tuple[Tensor, Tensor]]] = {}  # row id → (processed, raw) of each generated token
        self.streamed = 0
        self.stats = Stats()

    def take(self, session: Session, round_: Round) -> None:
        if not self.rows:
            self.rows, self.read = list(session.rows), session.cache.cache.lengths.host[0]
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

    def result(self, state: State | None) -> Any:
        if self.call.streamer is not None:
            self.call.streamer.end()
        ids, config = self.call.input_ids, self.call.generation_config
        length = self.length()
        columns = [self._column(index) for index in range(length)]
        new = torch.tensor(columns, dtype=torch.long, device=ids.device)
        sequences = torch.cat([ids, new.view(length, -1).T], 1)  # int64, whatever integers came
        mine = None
        if self.call.returns_cache and state is not None and len(ids) == 1:  # ragged rows have no common cache
            first = state.open_slots.new_zeros(1, dtype=torch.long)
            slots = state.cache if state.streams == 1 else state.cache.select(first)
            mine = slots.hand_back(self.call.cache, self.read + length - 1)
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
        device = self.call.input_ids.device
        rows = [[pair[which].to(device) for pair in self.kept[id(row)]] for row in self.rows]
        return tuple(torch.stack([steps[min(t, len(steps) - 1)] for steps in rows]) for t in range(length))
