"""The prefix cache: prompts that begin like an earlier text start from its cached keys and values.

Up to `MOST` remaining tokens are read like a draft that is accepted whole, for all rows at once. More tokens, or
images, are read by the model's own prefill, row by row, on a cache that is filled with the prefix.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmspec.pipelines.host.cache import RaggedCache
from mmspec.pipelines.host.call import BOTH_WAYS, ONCE, TYPES, Call
from mmspec.pipelines.host.names import CACHE
from mmspec.pipelines.host.vision import encoded, media
from mmspec.pipelines.target import prefix_keys
from mmspec.pipelines.target.prefix_keys import ASIDE, POSITIONS, Text
from mmspec.pipelines.target.state import Onward, State, positions_read
from mmspec.prefix_store import Segment
from mmspec.session import Session
from mmspec.tree import chain
from mmspec.types import Prompt, Round, gather_rows

MOST = 64  # the maximum number of tokens that are read like a draft, for all rows at once
Starts = list[tuple[int, Segment | None]]  # for each row: the number of cached tokens, and their segment


def read(target: Any, session: Session, call: Call, reserve: int) -> tuple[State, Prompt, Tensor]:
    """Like `target.first`, but cached prefixes of the rows are not read again, and the new prompts are cached."""
    store, stats, B = target.prefixes, session.stats, len(call.input_ids)
    texts, why = prefix_keys.texts(target, call)
    if why is not None:
        stats.read_whole[why] += B
        return target.first(call, reserve)
    starts = [store.find(text.age, text.key, text.allowed) for text in texts]
    tokens = sum(len(text.key) for text in texts)
    shared = [max(at, _shared(target, text)) for text, (at, _) in zip(texts, starts, strict=True)]
    by_row = B == 1 or 2 * sum(shared) >= tokens  # prefilling row by row has to pay off
    resumed = sum(at for at, _ in starts) if by_row else 0
    if by_row and all(_short(text, *start) for text, start in zip(texts, starts, strict=True)):
        state, raw = _drafted(target, session, call, texts, starts, reserve)
    elif by_row:
        parts = [_resumed(target, call, text, reserve, *start) for text, start in zip(texts, starts, strict=True)]
        state, raw = reduce(State.join, [state for _, state, _ in parts]), torch.cat([raw for *_, raw in parts])
        texts = [text for text, *_ in parts]
    else:
        state, prompt, raw = target.first(call, reserve)
        texts = [replace(text, cuts=state.cuts[text.row, text.pad :]) for text in texts]
    if by_row:
        prompt = _prompt(target, call, state, [text.pad for text in texts])
        texts = [replace(text, pad=0) for text in texts]
    state.arguments = {name: v for name, v in state.arguments.items() if name not in encoded(target.model)}
    placed = by_row or _as_called(prompt, call)
    for row, text in zip(session.rows, texts, strict=True):
        assert text.cuts is not None
        if not bool((text.cuts | ~text.free).all()):  # the keys of a token would depend on tokens after it
            stats.read_whole["its prompts are read in both directions"] += 1
        elif not placed:
            stats.read_whole["its positions count the padding of the batch"] += 1
        else:
            row.text = text
            _keep(target, state, text, text.key, text.cuts)
    stats.prefix = {"prompts": B, "tokens": tokens, "reused tokens": resumed}
    stats.kept_bytes = store.bytes
    return state, prompt, raw


def _as_called(prompt: Prompt, call: Call) -> bool:
    """Whether the decoder read the prompts at the call's positions, which the keys hold; some models drop these."""
    assert prompt.positions is not None
    differ = prompt.positions[:, -1, :-1] != call.arguments["position_ids"].reshape(-1, *call.input_ids.shape)[-1]
    return not bool((differ & prompt.valid).any())


def follow(target: Any, session: Session, round_: Round) -> None:
    """Before a round is committed: store the drafter's inputs for its nodes, and cache the answers of ended rows."""
    cache = session.cache.cache
    if cache.features is not None:
        cache.keep_features(round_.scores.hidden, target.embed(round_.draft.tokens.clamp(min=0)))
    for b, row in enumerate(session.rows):
        if row.done and row.text is not None:
            answer = cache.lengths.host[b] - row.text.pad - len(row.text.key)
            key, cuts = row.text.grown(row.tokens[row.start : row.start + answer])
            _keep(target, session.cache, replace(row.text, row=b), key, cuts)
            session.stats.kept_bytes = target.prefixes.bytes


def _keep(target: Any, state: State, text: Text, key: Tensor, cuts: Any) -> None:
    """Put the row's keys and values for the tokens of this key into the prefix cache."""
    cache, row, first = state.cache, text.row, text.pad
    views = lambda start: cache.held(row, first + start, first + len(key))  # noqa: E731
    target.prefixes.keep(text.age, key, cuts, views, cache.states(row))


def _resumed(
    target: Any, call: Call, text: Text, reserve: int, at: int, cached: Segment | None
) -> tuple[Text, State, Tensor]:
    """Read one row from its token number `at` on: its text with all cuts, its state, and raw logits [1, 1, V]."""
    slots, cuts = RaggedCache(1, call.input_ids.device, reserve), text.free.new_ones(1)
    if cached is not None:
        slots.resume(cached.first(at), cached.state)
        cuts = cached.cuts[: at + 1]
    elif target.recurrent and (at := _stop(target, text)):  # a recurrent state can be resumed only where it was stored
        state, *_ = target.first(_row(target, call, text, 0, at), reserve, slots)
        cuts = cuts.new_ones(at + 1)
        _keep(target, state, replace(text, row=0, pad=0), text.key[:at], cuts)
    state, _, raw = target.first(_row(target, call, text, at, len(text.key)), reserve, slots)
    return replace(text, cuts=torch.cat([cuts, state.cuts[0, 1:]])), state, raw


def _short(text: Text, at: int, cached: Segment | None) -> bool:
    """Whether the rest of a prompt is a few tokens of text, which can be read like a draft."""
    types = text.key[at:, :POSITIONS][:, 5:]
    return cached is not None and text.behind <= at and len(text.key) <= at + MOST and bool((types == types[-1]).all())


def _drafted(
    target: Any, session: Session, call: Call, texts: list[Text], starts: Starts, reserve: int
) -> tuple[State, Tensor]:
    """Read the rest of all rows in one forward, as a fully accepted draft; the state, and raw logits [B, 1, V]."""
    ids, B, caches = call.input_ids, len(texts), []
    for at, cached in starts:
        assert cached is not None
        caches.append(RaggedCache(1, ids.device, reserve))
        caches[-1].resume(cached.first(at), cached.state)
    cache = reduce(RaggedCache.join, caches)
    counts = [len(text.key) - at for text, (at, _) in zip(texts, starts, strict=True)]
    N = max(counts)
    count = torch.tensor(counts, device=ids.device)
    place = (ids.shape[1] - count[:, None] + torch.arange(N, device=ids.device)).clamp(max=ids.shape[1] - 1)
    positions = call.arguments["position_ids"]
    types = {name: t[:, -1:] for name in TYPES if (t := call.arguments.get(name)) is not None}
    dropped = {"position_ids", *types, CACHE, *encoded(target.model)}
    arguments = {name: v for name, v in call.arguments.items() if name not in dropped} | {"attention_mask": None}
    lengths = torch.tensor([len(text.key) for text in texts], device=ids.device)
    open_slots = ids.new_ones(B, max(len(text.key) for text in texts), dtype=torch.bool)
    state = State(cache, Onward(positions[..., -1:] + 1), open_slots, types, arguments, padded=False, prompt=lengths)
    tree, tokens = chain(N, ids.device).expand(B), ids.gather(1, place)
    where = positions.gather(-1, place.expand(*positions.shape[:-2], -1, -1))
    with target.inference(), target.reads(tree, cache.lengths):
        # not by a capture: each length would be one, for a single forward
        raw, *hidden = target.read(state, tokens, where, target.mask(state, tree.ancestors, tree.depth, True))
    if hidden:
        cache.keep_features(hidden[0], target.embed(tokens))
    cache.commit(torch.arange(N, device=ids.device).expand(B, N), tuple(counts), count, True)
    for b, (text, (at, cached)) in enumerate(zip(texts, starts, strict=True)):
        assert cached is not None
        texts[b] = replace(text, cuts=pad(cached.cuts[: at + 1], (0, counts[b]), value=True))
    return state, gather_rows(raw, count[:, None] - 1).clone()


def _stop(target: Any, text: Text) -> int:
    """Where to split a prompt's prefill: after the prefix that it shares with another text, else after its images."""
    return max(text.behind if text.allowed[text.behind] else 0, _shared(target, text))


def _shared(target: Any, text: Text) -> int:
    """For recurrent layers: how many tokens it shares with a cached text, if it may be resumed there; else 0."""
    at = target.prefixes.shared(text.age, text.key) if target.recurrent else 0
    return at if text.allowed[at] else 0


def _row(target: Any, call: Call, text: Text, begin: int, end: int) -> Call:
    """The call of one row up to its token number `end`, with `begin` tokens cached."""
    row, B, tower = text.row, len(call.input_ids), encoded(target.model)
    one, part = slice(row, row + 1), slice(text.pad, text.pad + end)
    ids = call.input_ids[one, part]
    arguments: dict[str, Any] = {"attention_mask": torch.ones_like(ids)}
    for name, value in call.arguments.items():
        if name == "position_ids" or name in TYPES:
            arguments[name] = None if value is None else value[..., one, part]
        elif name not in tower and name not in ASIDE:
            by_row = isinstance(value, Tensor) and value.dim() and len(value) == B
            arguments[name] = value[one] if by_row else value
    arguments |= {name: call.arguments[name] for name in ONCE if name in call.arguments}
    arguments |= text.media if begin < text.behind <= end else {}
    return replace(call, input_ids=ids, arguments=arguments)


def _prompt(target: Any, call: Call, state: State, pads: list[int]) -> Prompt:
    """The Prompt for the drafter; unlike the call's ids, the rows of the state have no padding."""
    ids, stored = call.input_ids, state.cache.features
    place = torch.arange(ids.shape[1], device=ids.device) - torch.tensor(pads, device=ids.device)[:, None]
    embeds, hidden = None, None
    if stored is not None and stored.keys is not None and stored.values is not None:
        hidden, embeds = (gather_rows(t[:, 0], place.clamp(min=0)) for t in (stored.keys, stored.values))
    return Prompt(
        ids=ids,
        embeds=embeds,
        hidden=hidden,
        visual=media(ids, target.model.config, call.arguments),
        valid=place >= 0,
        positions=positions_read(
            call.arguments["position_ids"], state.places, ids.new_zeros(len(ids), 1), ids.shape[1]
        ),
        given=call.given,
    )


def cuts(arguments: Mapping[str, Any], valid: Tensor, past: int) -> Tensor:
    """bool [B, n + 1], on the CPU: whether a prefix may be cut after so many of a forward's n tokens, since none before
    attends to one after. It may not within an image with bidirectional attention, or in a bidirectional prompt.

    Args:
        arguments: the decoder's arguments. A mask that it builds by itself is causal unless there are block arguments.
        valid: bool [B, past + n], false on padding.
    """
    B, n = len(valid), valid.shape[1] - past
    mask, place = arguments.get("attention_mask"), torch.arange(past, past + n, device=valid.device)
    furthest = place.expand(B, n)
    if any(arguments.get(name) is not None for name in BOTH_WAYS):
        furthest = furthest + n
    for one in mask.values() if isinstance(mask, dict) else [mask]:
        if isinstance(one, Tensor) and one.dim() == 4:
            seen = one if one.dtype == torch.bool else one > torch.finfo(one.dtype).min / 2
            slot = torch.arange(seen.shape[3], device=seen.device)
            furthest = furthest.maximum((seen * slot).amax((1, 3)).to(furthest.device))
        elif one is not None and not (isinstance(one, Tensor) and one.dim() == 2):  # a mask of an unknown kind
            furthest = furthest + n
    furthest = torch.where(valid[:, past:], furthest, place).cummax(1).values
    return pad(furthest <= place, (1, 0), value=True).cpu()
