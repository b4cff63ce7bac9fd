"""Rows that come and go while a session runs: each gets exactly what it would have got alone."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_vlms
import torch
from compared import as_stock
from hostile_drafters import DRAFTERS, Oracle, eagle

import mmspec
from mmspec.loop import decode, start
from mmspec.pipelines.families import decoder_only
from mmspec.pipelines.families import table as families
from mmspec.pipelines.host.call import Call
from mmspec.pipelines.host.processors.table import Processors
from mmspec.pipelines.patching.generate import row_seeds
from mmspec.pipelines.target.model import Request
from mmspec.protocols import Target
from mmspec.session import Row, Session
from mmspec.statistics import Stats

NAME = "llava"
# (kind, seed) of six rows that arrive one by one
ROWS = [
    ("image first", 1),
    ("text only", 2),
    ("several images", 3),
    ("image last", 4),
    ("image first", 5),
    ("text only", 6),
]
GUESTS = {
    "ngram": lambda model: "ngram",
    "eagle chain": lambda model: eagle(model, depth=3, width=1, size=4),
    "eagle tree": lambda model: eagle(model, depth=3, width=3, size=9),
    "eagle-3": lambda model: eagle(model, depth=3, width=3, size=9, draft_vocab=60),
}


def call_of(model: Any, inputs: dict[str, Any], **options: Any) -> Call:
    """What stock `generate` hands to its decoding method."""
    calls: list[Call] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            decoder_only, "generate", lambda model, handle, call: calls.append(call) or (call.input_ids, Stats())
        )
        tiny_vlms.generate(model, inputs, **options)
    return calls[0]


def opened(handle: Any, call: Call, seed: int = 0) -> tuple[Session, Target]:
    """A session after its prefill; `seed` decides the noise of its rows."""
    torch.manual_seed(seed)
    model, family = handle.model, families.of(handle.model)
    sample, ids, ends = bool(call.generation_config.do_sample), call.input_ids, call.endings
    request = family.request(Request(Processors(call.processors), sample))
    rows = [
        Row(tokens, len(tokens), ends.limit, noise, ends.eos, ends.of(b), b, handle.rule, request)
        for b, (tokens, noise) in enumerate(zip(ids.tolist(), row_seeds(model, len(ids), sample), strict=True))
    ]
    target = family.target(model, handle.drafter.features, call.guidance)
    return start(target, handle.drafter, rows, call)[0], target


def texts(rows: list[Row]) -> list[list[int]]:
    return [row.tokens[row.start :] for row in rows]


def together(handle: Any, calls: list[Call], gap: int) -> list[Row]:
    """Rows admitted one by one, `gap` rounds apart, each retired when it ends; in order of arrival, seeded by it."""
    with torch.no_grad():
        session, target = opened(handle, calls[0])
        everyone, rounds = list(session.rows), 0
        waiting = list(enumerate(calls))[1:]
        while session.rows or waiting:
            if waiting and (not session.rows or rounds % gap == 0):
                seed, call = waiting.pop(0)
                guest, _ = opened(handle, call, seed)
                everyone += guest.rows
                session.admit(guest)
            for _round in decode(session, target, handle.drafter):
                rounds += 1
                if waiting and rounds % gap == 0:
                    break
            session.retire()
    return everyone


@pytest.mark.parametrize("drafter", GUESTS)
@pytest.mark.parametrize("gap", [1, 3])
@pytest.mark.every(2)
def test_rows_admitted_one_by_one_are_as_if_alone(drafter: str, gap: int) -> None:
    model = tiny_vlms.model(NAME)
    lengths = [21, 5, 17, 9, 1, 12]
    asked = [(tiny_vlms.prompt(NAME, *row), {"max_new_tokens": n}) for row, n in zip(ROWS, lengths, strict=True)]
    alone = [tiny_vlms.generate(model, inputs, **told) for inputs, told in asked]
    with torch.no_grad(), mmspec.enable(model, drafter=GUESTS[drafter](model)) as handle:
        rows = together(handle, [call_of(model, inputs, **told) for inputs, told in asked], gap)
    assert [row.tokens for row in rows] == [one[0].tolist() for one in alone]
    assert all(row.done for row in rows)


@pytest.mark.parametrize("drafter", GUESTS)
def test_rows_can_be_dropped_and_reordered_in_the_middle(drafter: str) -> None:
    """`select` on a ragged batch: the rows that stay do not notice, in whatever order."""
    model, inputs = tiny_vlms.model(NAME), tiny_vlms.prompt(NAME, "ragged")
    alone = tiny_vlms.generate(model, inputs)
    with torch.no_grad(), mmspec.enable(model, drafter=GUESTS[drafter](model)) as handle:
        session, target = opened(handle, call_of(model, inputs))
        rows = list(session.rows)
        for count, _round in enumerate(decode(session, target, handle.drafter), 1):
            if count == 2:
                session.select([3, 0, 2])
            if count == 4:
                session.select([2, 0])
    assert [rows[b].tokens for b in (2, 3)] == alone[[2, 3]].tolist()
    assert not rows[0].done and rows[0].tokens == alone[0, : len(rows[0].tokens)].tolist()


def test_sampled_rows_do_not_depend_on_the_batch() -> None:
    """Same seed, same text: alone, or admitted into a running batch."""
    model, options = tiny_vlms.model(NAME), {"do_sample": True, "temperature": 1.3, "max_new_tokens": 16}
    with torch.no_grad(), mmspec.enable(model, "ngram") as handle:

        def calls() -> list[Call]:
            return [call_of(model, tiny_vlms.prompt(NAME, *row), **options) for row in ROWS]

        joined = texts(together(handle, calls(), 2))
        alone = []
        for seed, call in enumerate(calls()):
            session, target = opened(handle, call, seed)
            rows = list(session.rows)
            list(decode(session, target, handle.drafter))
            alone += texts(rows)
    assert joined == alone
    assert len({tuple(text) for text in alone}) == len(ROWS)


@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl"])
def test_sampled_rows_do_not_depend_on_padding_or_neighbours(name: str) -> None:
    """Row b of a ragged batch takes the b-th seed: with that seed it samples the same tokens alone."""
    model, options = tiny_vlms.model(name), {"do_sample": True, "temperature": 1.3, "max_new_tokens": 16}
    with mmspec.enable(model):
        torch.manual_seed(5)
        batch = tiny_vlms.generate(model, tiny_vlms.prompt(name, "ragged"), **options)[:, -16:]
        for b in range(4):
            torch.manual_seed(5)
            torch.randint(2**62, (b,))
            alone = tiny_vlms.generate(model, tiny_vlms.prompt(name, "ragged", rows=[b]), **options)[:, -16:]
            assert torch.equal(alone[0], batch[b])


@pytest.mark.parametrize("length", range(1, 10))
def test_an_end_inside_a_draft(length: int) -> None:
    """The drafter is right and drafts past the end, by token or by length; the text stops there, wherever it lies."""
    model, inputs = tiny_vlms.model(NAME), tiny_vlms.prompt(NAME, "image first")
    full = tiny_vlms.generate(model, inputs)
    drafter = DRAFTERS["always right"](model, Oracle.of(inputs["input_ids"], full))
    last = full[0, inputs["input_ids"].shape[1] + length - 1]
    for call in ({"eos_token_id": int(last)}, {"max_new_tokens": length}):
        as_stock(model, inputs, drafter, call=call)


def test_row_ends_by_token_by_length_or_by_condition() -> None:
    def twice(tokens: list[int], new: int) -> int | None:
        ends = range(len(tokens) - new + 1, len(tokens) + 1)
        return next((end for end in ends if tokens[end - 2 : end] == [5, 5]), None)

    row = Row([1, 2, 3], start=3, limit=9, seed=0, eos=frozenset({7}), stop=twice)
    assert row.take([5]) == [5] and not row.done
    assert row.take([5, 5, 4]) == [5] and row.done and row.generated == 2
    row = Row([1], 1, 9, 0, frozenset({7}))
    assert row.take([3, 7, 7]) == [3, 7] and row.done
    row = Row([1], 1, 4, 0)
    assert row.take([4, 4]) == [4, 4] and not row.done and row.take([4, 4]) == [4] and row.done


def test_a_row_that_has_ended_does_not_mind_what_comes_after() -> None:
    row = Row([1], 1, 9, 0, frozenset({7}), index=3)
    with pytest.raises(RuntimeError, match=r"after token 2 of row 3.*nan or inf"):
        row.take([4, -1])
    assert row.take([7, -1]) == [7]


# -- stats -----------------------------------------------------------------------------------------------------------


def counted(drafter: str, kind: str, **options: Any) -> Stats:
    model, inputs = tiny_vlms.model(NAME), tiny_vlms.prompt(NAME, kind)
    full = tiny_vlms.generate(model, inputs, **{**options, "eos_token_id": None})
    with mmspec.enable(model, drafter=DRAFTERS[drafter](model, Oracle.of(inputs["input_ids"], full))) as handle:
        tiny_vlms.generate(model, inputs, **options)
        assert mmspec.stats(model) is handle.stats
    return handle.stats


def test_stats_of_a_drafter_that_is_always_right() -> None:
    stats = counted("always right", "image first", max_new_tokens=1 + 3 * 7)  # the prefill's token, three full rounds
    assert (stats.rounds, stats.target_calls, stats.row_rounds, stats.tokens) == (3, 3, 3, 22)
    assert (stats.drafted, stats.accepted) == (18, 18)
    assert stats.tokens_per_target_call == 7.0 and stats.accepted_draft_tokens_per_call == 6.0
    assert [stats.acceptance(d) for d in range(1, 8)] == [1.0] * 6 + [0.0]
    assert set(stats.seconds) == {"prefill", "draft", "verify", "accept", "commit"} and min(stats.seconds.values()) > 0
    assert "22 tokens in 3 target calls" in str(stats)


def test_stats_of_a_drafter_that_is_always_wrong() -> None:
    stats = counted("always wrong", "ragged", max_new_tokens=9)
    assert (stats.rounds, stats.row_rounds, stats.tokens, stats.accepted) == (8, 32, 36, 0)
    assert stats.tokens_per_target_call == 1.0 and not stats.accepted_by_depth


@pytest.mark.parametrize(
    ("drafter", "kind"), [("always right", "image first"), ("right within", "ragged"), ("ngram", "ragged")]
)
@pytest.mark.parametrize("tokens", [5, 24])
def test_stats_never_count_more_than_the_rows_gained(drafter: str, kind: str, tokens: int) -> None:
    """Drafts past a row's end helped nobody: τ · row-rounds is what the rows gained after their first token."""
    stats = counted(drafter, kind, max_new_tokens=tokens)
    first = len(tiny_vlms.KINDS[kind])
    assert stats.tokens == tokens * first
    assert stats.tokens_per_target_call * stats.row_rounds == pytest.approx(stats.tokens - first)


def test_stats_add_up() -> None:
    a, b = (counted("right within", kind, max_new_tokens=12) for kind in ("ragged", "image first"))
    total = Stats()
    total.add(a)
    total.add(b)
    for name in ("rounds", "tokens", "row_rounds", "drafted", "accepted"):
        assert getattr(total, name) == getattr(a, name) + getattr(b, name)
    assert total.accepted_by_depth == a.accepted_by_depth + b.accepted_by_depth
    assert sum(total.seconds.values()) == pytest.approx(sum(a.seconds.values()) + sum(b.seconds.values()))
    assert Stats().tokens_per_target_call == 0.0 and "none" in str(Stats())
