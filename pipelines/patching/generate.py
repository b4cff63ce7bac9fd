"""Runs a `generate` call on an enabled model: one session, from the stock arguments to the stock return value."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from mmspec.config import UnsupportedError
from mmspec.loop import decode, prefill, read
from mmspec.pipelines.drafters import forced
from mmspec.pipelines.host import callers_cache, devices, reach, release
from mmspec.pipelines.host.call import Call, Custom, current, output
from mmspec.pipelines.host.kinds import GenerativeModel, ModelOutput
from mmspec.pipelines.host.model import HostModel
from mmspec.pipelines.host.names import CACHE
from mmspec.pipelines.host.processors import followed, stopping
from mmspec.pipelines.host.processors import guidance as guided
from mmspec.pipelines.host.processors.table import Processors, unsafe
from mmspec.pipelines.patching import drafting, obstacles
from mmspec.pipelines.patching.handle import Patch
from mmspec.pipelines.patching.obstacles import Obstacle
from mmspec.pipelines.target.model import Request
from mmspec.pipelines.target.noise import CounterNoise, Noise, TorchNoise
from mmspec.pipelines.target.state import State
from mmspec.protocols import Proposer, Target
from mmspec.rules import Rule
from mmspec.session import Row, Session
from mmspec.statistics import Stats
from mmspec.types import Round


def _stateful(model: GenerativeModel, host: HostModel, call: Call, patch: Patch) -> Obstacle | None:
    """A logits processor or stopping criterion that cannot be applied to drafts; such a call runs the stock path."""
    processors, rows = list(call.logits_processor), len(call.input_ids)
    if patch.family.guided and processors and guided.stands_for(processors[0], model):
        processors = processors[1:]
    why = unsafe(processors) or followed.unfit(processors, rows, not host.only_keys)
    why = why or stopping.unsupported(call.stopping_criteria, rows, call.scored)
    return Obstacle(why, always_falls_back=True) if why else None


# Why a call cannot be accelerated: (condition, reason). The first whose condition is true is reported.
_OBSTACLES: tuple[tuple[Callable[[Call], object], str], ...] = (
    (lambda c: not c.input_ids.numel() and c.arguments.get("inputs_embeds") is None, "input_ids is empty"),
    (lambda c: c.input_ids.shape[1] == 0, "a prompt of inputs_embeds alone has no token ids to draft from"),
    (lambda c: not c.arguments.get("use_cache", True), "use_cache=False reads the whole text again for every token"),
    (lambda c: (c.generation_config.num_beams or 1) > 1, obstacles.BEAMS),
    (lambda c: c.synced_gpus, "synced_gpus needs every process to run the same number of forwards"),
    (lambda c: c.collects("output_attentions"), "the attention maps of a draft tree are not those of single steps"),
    (lambda c: c.collects("output_hidden_states"), "output_hidden_states is not collected from draft trees"),
    (lambda c: callers_cache.quantized(c.cache), "a quantized cache rounds the keys, and so changes the distribution"),
    (lambda c: getattr(c.cache, "offloading", False), "an offloading cache moves layers that a draft needs at once"),
    (lambda c: c.filled and len(c.input_ids) > 1, "continuing a filled cache works for one row only"),
    (lambda c: c.owned and len(c.input_ids) > 1, "a cache of the caller's own is filled for one row only"),
)


def obstacle(model: GenerativeModel, call: Call, patch: Patch) -> Obstacle | None:
    """Why this call on an enabled model has to run the stock path, or None."""
    first = next((Obstacle(why) for holds, why in _OBSTACLES if holds(call)), None)
    state, host = obstacles.now(model, call.generation_config, len(call.input_ids)), HostModel.of(model)
    if host.both_ways and call.pieces is not None:
        why = "prefill_chunk_size hides later tokens from those that would see them in a whole prompt"
        state = state or Obstacle(why, always_falls_back=True)
    first = state or first or _own_cache(host, call) or _rotary_change(host, call)
    if first is None and (tied := host.tied(call.arguments.get("attention_mask"))) is not None:
        first = Obstacle(tied)
    first = first or _other_device(model, patch, call)
    if first is None and host.cacheless:  # for example generate inside a training loop
        why = "gradient checkpointing in training mode takes the cache away from the layers; call model.eval() first"
        first = Obstacle(why, always_falls_back=True)
    return first or _stateful(model, host, call, patch)


def _own_cache(host: HostModel, call: Call) -> Obstacle | None:
    """A cache that the caller passed in, if it could not be filled as stock fills it, or gone on from."""
    if call.filled and not callers_cache.can_adopt(call.cache):  # it may be one that an accelerated call has filled
        why = "the layers of this filled cache share keys, or keep them out of order"
        return Obstacle(why, always_falls_back=True)
    if call.filled and host.apart and any(call.cache.is_sliding if call.cache is not None else ()):
        return Obstacle("this model applies its window to a filled cache, but not to the tokens of a prompt")
    if call.owned and host.stateful:
        return Obstacle("mmspec fills a caller's cache with keys, values and states, but these layers keep more")
    if call.owned and host.recurrent and not callers_cache.keeps_states(call.cache):
        return Obstacle(
            "this cache has no place for the states of the model's layers; make it with config=model.config"
        )
    if call.owned and not callers_cache.stores_plainly(call.cache):
        return Obstacle("a cache that is not of transformers' plain classes may change the keys and values given to it")
    return None


def _rotary_change(host: HostModel, call: Call) -> Obstacle | None:
    """For a model whose rotary frequencies change at some length: whether this call may reach that length."""
    limit = host.rotary_limit
    if limit is None:
        return None
    L, given = call.input_ids.shape[1], call.arguments.get("position_ids")
    read = L if given is None else max(L, int(given.max()) + 1)
    longest = read + call.endings.limit - L - 1  # the last token is not read
    if longest <= limit:
        return None
    what = "its rotary frequencies (dynamic, longrope) or scales change"
    if limit < 1:
        return Obstacle(f"{what} within the first {reach.MARGIN} positions, which any draft may reach")
    return Obstacle(
        f"{what} past {limit} positions, and this call may reach {longest}; a prompt and max_new_tokens of {limit + 1} "
        "together do not"
    )


def _other_device(model: GenerativeModel, patch: Patch, call: Call) -> Obstacle | None:
    """With `reproducible`, input_ids on another device than the model, where stock would draw other noise."""
    fixed = patch.config.reproducible and call.generation_config.do_sample
    if fixed and call.for_model(model).input_ids.device != call.input_ids.device:
        why = "reproducible=True draws noise on the model's device, stock on that of input_ids; move input_ids there"
        return Obstacle(why)
    return None


def generate(model: GenerativeModel, handle: Patch, call: Call) -> tuple[Tensor | ModelOutput, Stats]:
    """Run one call to its end; returns the stock return value and the statistics."""
    config, drafter = call.generation_config, handle.fitted_proposer(model)
    for message in _ignored(call):
        handle.warn_once(message)
    ours, ends = call.for_model(model), call.endings
    keep = bool(config.return_dict_in_generate and (config.output_scores or config.output_logits))
    request, rule = requested(handle, ours, keep)
    seeds = row_seeds(model, len(ours.input_ids), request.sample and not isinstance(request.noise, TorchNoise))
    rows = [
        Row(tokens, len(tokens), ends.limit, seed, ends.eos, ends.of(b), b, rule, request)
        for b, (tokens, seed) in enumerate(zip(ours.input_ids.tolist(), seeds, strict=True))
    ]
    drafter = forced.with_forced(drafter, rows)
    target = handle.family.target(model, drafter.features, ours.guidance)
    collected = _Collected(call, ends, keep, handle.warn_once)
    state = None
    with torch.no_grad():
        for session, round_ in rounds(target, drafter, rows, ours):
            call.begun = call.begun or session.watched
            collected.take(session, round_)
            state = session.cache
    if isinstance(request.noise, TorchNoise):
        request.noise.close(collected.length())
    return collected.result(state), collected.stats


@contextmanager
def or_stock(patch: Patch, call: Call) -> Iterator[None]:
    """On a release of transformers that mmspec was not tested with: if the block raises an error before any part of the
    answer was streamed, warn and restore the random state, so that stock can run after the block."""
    if release.tested():
        yield
        return
    before = torch.get_rng_state(), [torch.cuda.get_rng_state(n) for n in range(torch.cuda.device_count())]
    try:
        yield
    except UnsupportedError as refused:
        raise release.with_advice(refused) from refused
    except Exception as error:
        if call.begun:
            raise
        patch.warn_once(f"mmspec runs the stock path: {release.changed(error)}")
        torch.set_rng_state(before[0])
        for number, state in enumerate(before[1]):
            torch.cuda.set_rng_state(state, number)


def requested(patch: Patch, call: Call, keep: bool) -> tuple[Request, Rule]:
    """What a call's logits go through, and its acceptance rule.

    Args:
        keep: return processed and raw logits with the scores.
    """
    sample = bool(call.generation_config.do_sample)
    rule = patch.rule_of(call, sample)
    noise = _fixed_noise(patch, rule) if sample else None
    return patch.family.request(Request(Processors(call.processors), sample, noise, keep)), rule


def _fixed_noise(patch: Patch, rule: Rule) -> Noise | None:
    """The noise that fixes a call's draws before anything is drafted: stock's noise with `reproducible`, else noise
    from the row's own seed if drafts depend on other rows (`shares`) and the rule is lossless, so that the output does
    not depend on them; else None."""
    if patch.config.reproducible:
        return TorchNoise()
    return CounterNoise() if drafting.shares(patch.proposer) and rule.lossless else None


def rounds(target: Target, drafter: Proposer, rows: list[Row], inputs: Any) -> Iterator[tuple[Session, Round]]:
    """The prefill's round and all following rounds; each is also passed to the call's `watch` callback, if any."""
    watch = None if (now := current.get()) is None else now.watch
    session, round_, prompt = prefill(target, drafter, rows, inputs)
    session.watched = watch is not None
    if watch is not None:
        watch(round_)
    yield session, round_
    if not all(row.done for row in rows):  # only now, so that the first token does not wait for the drafter
        read(session, target, drafter, prompt)
    del prompt, round_  # the features of whole prompts
    for round_ in decode(session, target, drafter):
        if watch is not None:
            watch(round_)
        yield session, round_


def watched(custom: Callable[..., object], model: GenerativeModel, handle: Patch) -> Callable[..., object]:
    """The same `custom_generate`, with a warning if it makes no call that mmspec could accelerate."""

    @functools.wraps(custom)
    def run(*args: object, **kwargs: object) -> object:
        now, seen = current.get(), Custom(kwargs.get(CACHE))
        assert now is not None
        before, now.custom = now.custom, seen
        try:
            output = custom(*args, **kwargs)
        finally:
            now.custom = before
        if not seen.called and Patch.of(model) is handle:  # else it was disabled, or enabled again, meanwhile
            handle.warn_once("mmspec does not accelerate this custom_generate, which has a loop of its own")
        return output

    return run


def _ignored(call: Call) -> Iterator[str]:
    """Warnings on arguments that have no effect here; the tokens do not depend on them."""
    config = call.generation_config
    if call.pieces is not None:
        yield "mmspec reads a prompt in one piece; prefill_chunk_size has no effect"
    if config.return_dict_in_generate and len(call.input_ids) > 1:
        yield "mmspec returns a KV cache for one row only: rows that ended at different times share no cache"


def row_seeds(model: GenerativeModel, count: int, drawing: bool) -> list[int]:
    """Seeds of the rows' noise from torch's global generator; zeros, and no use of it, if nothing is drawn by them."""
    return devices.agreed(model, torch.randint(2**62, (count,), device="cpu").tolist() if drawing else [0] * count)


class _Collected:
    """Collects rounds into the caller's output: tokens, scores, logits, streamed columns."""

    def __init__(self, call: Call, ends: stopping.Endings, keep: bool, warn: Callable[[str], None]) -> None:
        self.call, self.ends = call, ends
        self.keep, self.warn = keep, warn
        self.rows: list[Row] = []
        self.read = 0  # cache slots of the prompt
        self.kept: dict[int, list[tuple[Tensor, Tensor]]] = {}  # row id → (processed, raw) of each generated token
        self.streamed = self.rounds = 0
        self.stats = Stats()

    def take(self, session: Session, round_: Round) -> None:
        self.rounds += 1
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

    def length(self) -> int:
        longest, cut = max(len(row.tokens) for row in self.rows), self.ends.cut
        return (longest if cut is None else min(longest, cut)) - self.rows[0].start

    def _column(self, index: int) -> list[int]:
        return [row.tokens[row.start + index] if index < row.generated else self.call.pad for row in self.rows]

    def _stream(self, last: bool = False) -> None:
        """Put each column to the streamer once every row has its token, as stock decoding would."""
        early = self.rounds < 2 and not (last or self.call.begun or release.tested())  # `or_stock` may still fall back
        if self.call.streamer is None or early:
            return
        ready = min([self.length(), *(row.generated for row in self.rows if not row.done)])
        self.call.begun = True
        for index in range(self.streamed, ready):
            self.call.streamer.put(torch.tensor(self._column(index), device="cpu"))
        self.streamed = max(self.streamed, ready)

    def result(self, state: State | None) -> Tensor | ModelOutput:
        if self.call.streamer is not None:
            self._stream(last=True)
            self.call.streamer.end()
        ids, config = self.call.input_ids, self.call.generation_config
        length = self.length()
        columns = [self._column(index) for index in range(length)]
        new = torch.tensor(columns, dtype=torch.long, device=ids.device)
        sequences = torch.cat([ids, new.view(length, -1).T], 1)  # int64, whatever the dtype of input_ids
        cache = None
        if self.call.returns_cache and state is not None and len(ids) == 1:  # ragged rows have no common cache
            first = state.open_slots.new_zeros(1, dtype=torch.long)
            slots = state.cache if state.streams == 1 else state.cache.select(first)
            if callers_cache.has_places(self.call.cache, slots):
                cache = callers_cache.fill(self.call.cache, slots, self.read + length - 1)
            else:
                self.warn("mmspec returns no KV cache: it has no place for all that this model's layers keep")
        if not config.return_dict_in_generate:
            return sequences
        scores = self._steps(0, length) if config.output_scores else None
        return output(sequences, cache, scores, self._steps(1, length) if config.output_logits else None)

    def _steps(self, which: int, length: int) -> tuple[Tensor, ...]:
        """One [B, V] for each step; rows that ended earlier repeat their last one."""
        device = self.call.input_ids.device
        rows = [[pair[which].to(device) for pair in self.kept[id(row)]] for row in self.rows]
        return tuple(torch.stack([steps[min(t, len(steps) - 1)] for steps in rows]) for t in range(length))
