"""Cached prefixes: keys, values and states of texts that were read, in segments that continue each other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from mmspec.modes import lasting

Held = dict[tuple[int, str], Tensor]  # [heads, n, width] each: what n tokens left behind, by layer and name


@dataclass(eq=False)
class Segment:
    """Tokens that follow another segment, or begin a text, and what reading them left.

    Attributes:
        key: int64 [T, C] on the CPU: what tells each token apart, from the text's first to the segment's last.
        cuts: bool [T + 1]: whether so many of the tokens know nothing of those behind them.
        start: how many of the T stand in segments before.
        held: of the tokens from `start` on.
        state: what layers with a recurrence hold after the last token, the only one after which a text may then be
            resumed; empty: that is not known; None: there are none, and a text may be resumed at every cut.
        before: the segment that this one follows.
        used: the time of its last use.
        after: the segments that follow this one, by their first token.
    """

    key: Tensor
    cuts: Tensor
    start: int
    held: Held
    state: Any = None
    before: Segment | None = None
    used: int = 0
    after: dict[bytes, list[Segment]] = field(default_factory=dict)

    @property
    def end(self) -> int:
        return len(self.key)

    @property
    def bytes(self) -> int:
        state = (self.state or {}).values()
        tensors = [*self.held.values(), self.key, self.cuts, *(t for layer in state for t in layer.held())]
        return sum(t.numel() * t.element_size() for t in tensors)

    @property
    def line(self) -> Iterator[Segment]:
        """This segment and those before it, back to the beginning of the text."""
        one: Segment | None = self
        while one is not None:
            yield one
            one = one.before

    def common(self, key: Tensor) -> int:
        """How many tokens it and another text [T', C], which has those before it, begin with alike."""
        n = min(len(key), self.end)
        differ = (self.key[self.start : n] != key[self.start : n]).any(1)
        return self.start + int(differ.int().argmax()) if bool(differ.any()) else n

    def first(self, count: int) -> Held:
        """What the first `count` tokens of the text left, `count` ≤ `end`."""
        parts, end = [], count
        for one in self.line:
            parts.append({name: t[:, : max(0, end - one.start)] for name, t in one.held.items()})
            end = min(end, one.start)
        return {name: torch.cat([part[name] for part in reversed(parts)], 1) for name in parts[0]}


@dataclass
class PrefixStore:
    """Segments of all texts that were read, shared by all calls and threads; the least recently used go first.

    They form a tree (as in SGLang's RadixAttention, Zheng et al. 2024): a text is followed from its first token on, so
    that it does not matter how many others are kept.

    Attributes:
        budget: bytes that may be kept.
        bytes: that are kept.
        age: how often all was forgotten. What was read at another age is not kept.
    """

    budget: int
    bytes: int = 0
    age: int = 0
    _root: Segment = field(default_factory=lambda: _root(), repr=False)
    _world: object = field(default=None, repr=False)
    _clock: int = 0
    _lock: Any = field(default_factory=threading.RLock, repr=False)

    def read_by(self, world: object) -> int:
        """Forget everything that was read with another `world`; returns the age.

        Args:
            world: what the result of reading depends on (weights, dtype, …); equal where it is the same.
        """
        with self._lock:
            if world != self._world:
                self._world, self._root, self.bytes, self.age = world, _root(), 0, self.age + 1
            return self.age

    def find(self, age: int, key: Tensor, allowed: Tensor) -> tuple[int, Segment | None]:
        """How many of the first tokens of a text [T, C] need not be read again, and the segment that has them.

        Args:
            age: as `read_by` gave it.
            allowed: bool [T + 1], after how many tokens this text may be resumed.
        """
        with self._lock:
            best: tuple[int, Segment | None] = (0, None)
            for one, n in self._along(key) if age == self.age else ():
                if one.state is None:
                    fit = (one.cuts[: n + 1] & allowed[: n + 1]).nonzero()
                    n = int(fit[-1]) if len(fit) else 0
                elif n < one.end or not one.state or not allowed[n]:
                    continue
                if n > best[0]:
                    best = n, one
            if best[1] is not None:
                self._touch(best[1])
            return best

    def shared(self, age: int, key: Tensor) -> int:
        """How many tokens this text begins with as another one does, whether it can be resumed there or not."""
        with self._lock:
            return max((n for _, n in self._along(key)), default=0) if age == self.age else 0

    def keep(self, age: int, key: Tensor, cuts: Tensor, held: Callable[[int], Held], state: Any = None) -> None:
        """Keep a copy of what a text left that is not kept yet, as far as the budget goes.

        Args:
            key, cuts, state: as a Segment has them.
            held: what its tokens left, from one on.
        """
        with self._lock, lasting():
            if age != self.age:
                return
            before, start = self._followed(key, cuts)
            if start == len(key):
                whole = [one for one, n in self._along(key) if n == one.end == len(key)]
                if not state or any(one.state for one in whole):
                    self._touch(whole[0] if whole else before)
                    return
            new = Segment(key, cuts, start, held(start), state, before)
            if new.bytes > self.budget:
                return
            if before is not None and start < before.end:
                new.before = self._cut(before, start)
            self._add(new := _copied(new))
            self._touch(new)
            while self.bytes > self.budget:
                self._drop(min((one for one in self._each() if not one.after), key=lambda one: one.used))

    def _along(self, key: Tensor) -> Iterator[tuple[Segment, int]]:
        """Segments whose texts begin as this one [T, C] does, and how many tokens are alike."""
        pending = [self._root]
        for one in pending:
            here = one.after.get(_token(key, one.end), ()) if one.end < len(key) else ()
            for other in (*here, *one.after.get(b"", ())):
                n = other.common(key)
                yield other, n
                if n == other.end:
                    pending.append(other)

    def _each(self) -> Iterator[Segment]:
        pending = [self._root]
        for one in pending:
            found = [other for others in one.after.values() for other in others]
            yield from found
            pending += found

    def _followed(self, key: Tensor, cuts: Tensor) -> tuple[Segment | None, int]:
        """The segment that a text follows longest, and after how many tokens of all."""
        best: tuple[int, Segment | None] = (0, None)
        for one, n in self._along(key):
            fit = (one.cuts[: n + 1] & cuts[: n + 1]).nonzero()
            n = int(fit[-1]) if len(fit) else 0
            if n > max(best[0], one.start):
                best = n, one
        return best[1], best[0]

    def _cut(self, one: Segment, at: int) -> Segment:
        """Split a segment into two, so that its second part can be dropped alone; returns the first part. Readers of
        the old segment keep it unchanged."""
        n = at - one.start
        state: Any = None if one.state is None else {}
        first = {name: t[:, :n] for name, t in one.held.items()}
        head = _copied(Segment(one.key[:at], one.cuts[: at + 1], one.start, first, state, one.before, one.used))
        rest = {name: t[:, n:] for name, t in one.held.items()}
        tail = _copied(Segment(one.key, one.cuts, at, rest, one.state, head, one.used))
        self._drop(one)
        self._add(head)
        self._add(tail)
        tail.after = one.after
        for other in (other for others in tail.after.values() for other in others):
            other.before = tail
        return head

    def _touch(self, segment: Segment | None) -> None:
        self._clock += 1
        for one in segment.line if segment is not None else ():
            one.used = self._clock

    def _add(self, segment: Segment) -> None:
        around = (segment.before or self._root).after
        around.setdefault(_token(segment.key, segment.start), []).append(segment)
        self.bytes += segment.bytes

    def _drop(self, segment: Segment) -> None:
        around, token = (segment.before or self._root).after, _token(segment.key, segment.start)
        around[token] = [one for one in around[token] if one is not segment]
        if not around[token]:
            del around[token]
        self.bytes -= segment.bytes


def _root() -> Segment:
    """What all texts follow: no token."""
    return Segment(torch.empty(0, 0, dtype=torch.long), torch.ones(1, dtype=torch.bool), 0, {})


def _token(key: Tensor, at: int) -> bytes:
    """What tells the token at a place from others; nothing behind the last one."""
    return key[at].numpy().tobytes() if at < len(key) else b""


def _copied(one: Segment) -> Segment:
    """The same in tensors of its own."""
    held = {name: t.clone(memory_format=torch.contiguous_format) for name, t in one.held.items()}
    return replace(one, key=one.key.clone(), cuts=one.cuts.clone(), held=held)
