"""The store of cached prefixes against its definition: the longest beginning that any kept text has in common."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mmspec.prefix_store import PrefixStore, Segment


def texts(seed: int, count: int = 60) -> list[Tensor]:
    """Token keys [T, 2] that often begin alike, among them some that continue others."""
    drawn, made = torch.Generator().manual_seed(seed), list[Tensor]()
    for _ in range(count):
        key = torch.randint(2, (int(torch.randint(1, 9, (), generator=drawn)), 2), generator=drawn)
        if made and torch.rand((), generator=drawn) < 0.4:
            key = torch.cat([made[int(torch.randint(len(made), (), generator=drawn))], key])
        made.append(key)
    return made


def left(key: Tensor) -> Tensor:
    """What reading leaves of each token, [1, T, 2]: it depends on all tokens before."""
    return key.float().cumsum(0)[None]


def keep(store: PrefixStore, age: int, key: Tensor, cuts: Tensor, state: Any = None) -> None:
    store.keep(age, key, cuts, lambda start: {(0, "keys"): left(key)[:, start:]}, state)


def alike(one: Tensor, other: Tensor) -> int:
    n = min(len(one), len(other))
    differ = (one[:n] != other[:n]).any(1).nonzero()
    return int(differ[0]) if len(differ) else n


def counted(store: PrefixStore) -> list[Segment]:
    found = list(store._each())
    assert store.bytes == sum(one.bytes for one in found)
    for one in found:
        assert one.start == (0 if one.before is None else one.before.end) and len(one.cuts) == one.end + 1
    return found


@pytest.mark.parametrize("seed", range(4))
def test_it_finds_the_longest_beginning_of_all_that_is_kept(seed: int) -> None:
    store, kept = PrefixStore(1 << 30), list[Tensor]()
    age, drawn = store.read_by("a model"), torch.Generator().manual_seed(seed)
    for key in texts(seed):
        allowed = torch.rand(len(key) + 1, generator=drawn) < 0.6
        best = max((alike(one, key) for one in kept), default=0)
        assert store.shared(age, key) == best
        want = max((n for n in range(1, best + 1) if allowed[n]), default=0)
        n, segment = store.find(age, key, allowed)
        assert n == want and (segment is None) == (n == 0)
        if segment is not None:
            assert torch.equal(segment.first(n)[0, "keys"], left(key)[:, :n])
        keep(store, age, key, torch.ones(len(key) + 1, dtype=torch.bool))
        kept.append(key)
        counted(store)
    beginnings = {str(key[:n].tolist()) for key in kept for n in range(1, len(key) + 1)}
    assert sum(one.end - one.start for one in counted(store)) == len(beginnings), "nothing is kept twice"


@pytest.mark.parametrize("seed", range(4))
def test_states_are_resumed_only_where_a_text_ended(seed: int) -> None:
    store, ends = PrefixStore(1 << 30), list[Tensor]()
    age = store.read_by("a model")
    for key in texts(seed):
        want = max((len(one) for one in ends if alike(one, key) == len(one)), default=0)
        n, segment = store.find(age, key, torch.ones(len(key) + 1, dtype=torch.bool))
        assert n == want
        if segment is not None:
            assert segment.state == {0: Recorded(n)} and torch.equal(segment.first(n)[0, "keys"], left(key)[:, :n])
        keep(store, age, key, torch.ones(len(key) + 1, dtype=torch.bool), {0: Recorded(len(key))})
        ends.append(key)
        counted(store)


class Recorded(int):
    """A layer's state after so many tokens."""

    def held(self) -> tuple[Tensor, ...]:
        return ()


@pytest.mark.parametrize("seed", range(4))
def test_the_oldest_go_first_and_what_is_left_is_right(seed: int) -> None:
    store = PrefixStore(600)
    age = store.read_by("a model")
    for key in texts(seed):
        n, segment = store.find(age, key, torch.ones(len(key) + 1, dtype=torch.bool))
        if segment is not None:
            assert torch.equal(segment.first(n)[0, "keys"], left(key)[:, :n])
        keep(store, age, key, torch.ones(len(key) + 1, dtype=torch.bool))
        assert len(counted(store)) > 0 and store.bytes <= 600
    assert store.read_by("another") == age + 1 and not counted(store) and store.find(age, key, key[:, 0] > 0)[0] == 0


def test_other_texts_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a thousand pictures under one prompt a second question meets the prompt and its own picture alone."""
    store = PrefixStore(1 << 30)
    age = store.read_by("a model")
    for i in range(1000):
        key = torch.tensor([[1, 0], [2, 0], [3, i], [4, 0]])
        keep(store, age, key, torch.ones(5, dtype=torch.bool))
    met, common = list[int](), Segment.common
    monkeypatch.setattr(Segment, "common", lambda one, key: met.append(1) or common(one, key))
    assert store.find(age, torch.tensor([[1, 0], [2, 0], [3, 500], [5, 0]]), torch.ones(5, dtype=torch.bool))[0] == 3
    assert len(met) <= 4
