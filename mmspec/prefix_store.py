"""The prefix cache: keys, values and recurrent states of earlier texts, stored as a tree of segments."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from mmspec.modes import lasting

LayerTensors = dict[tuple[int, str], Tensor]  # [heads, n, width] each: cached tensors of n tokens, by layer and name


@dataclass(eq=False)
class Segment:
    """Tokens that follow another segment, or begin a text, and their cached tensors.

    Attributes:
        key: int64 [T, C] on the CPU: a key for each token.
        cuts: bool [start + T + 1]: whether the first n tokens of the text attend to none of the later ones, so that it
            may be cut.
        start: how many tokens of the text are in earlier segments.
        tensors: of its tokens.
        state: of recurrent layers after the last token, the only place where such a text may be resumed; empty: the
            state is not known; None: there are no recurrent layers, and a text may be resumed at every cut.
        before: the segment that this one follows.
        used: the time of its last use.
        after: the segments that follow this one, by their first token.
    """

    key: Tensor
    cuts: Tensor
    start: int
    tensors: LayerTensors
    state: Any = None
    before: Segment | None = None
    used: int = 0
    after: dict[bytes, list[Segment]] = field(default_factory=dict)

    @property
    def end(self) -> int:
        return self.start + len(self.key)

    @property
    def bytes(self) -> int:
        state = (self.state or {}).values()
        tensors = [*self.tensors.values(), self.key, self.cuts, *(t for layer in state for t in layer.held())]
        return sum(t.numel() * t.element_size() for t in tensors)

    @property
    def line(self) -> Iterator[Segment]:
        """This segment and those before it, back to the beginning of the text."""
        one: Segment | None = self
        while one is not None:
            yield one
            one = one.before

    def common(self, key: Tensor) -> int:
        """Length of the common prefix with another text [T', C] that begins with the tokens before this segment."""
        n = min(len(key), self.end)
        differ = (self.key[: n - self.start] != key[self.start : n]).any(1)
        return self.start + int(differ.int().argmax()) if bool(differ.any()) else n

    def first(self, count: int) -> LayerTensors:
        """The tensors of the first `count` tokens of the text, `count` ≤ `end`."""
        parts, end = [], count
        for one in self.line:
            parts.append({name: t[:, : max(0, end - one.start)] for name, t in one.tensors.items()})
            end = min(end, one.start)
        return {name: torch.cat([part[name] for part in reversed(parts)], 1) for name in parts[0]}


@dataclass
class PrefixStore:
    """Segments of earlier texts, shared by all calls and threads; the least recently used are evicted first.

    They form a tree (as in SGLang's RadixAttention, Zheng et al. 2024): a text is looked up from its first token on, so
    the time of a lookup does not depend on the number of cached texts.

    Attributes:
        budget: bytes that may be cached.
        bytes: that are cached.
        age: the number of times that the cache was cleared. Results of a call that began at another age are not kept.
    """

    budget: int
    bytes: int = 0
    age: int = 0
    _root: Segment = field(default_factory=lambda: _root(), repr=False)
    _world: object = field(default=None, repr=False)
    _clock: int = 0
    _lock: Any = field(default_factory=threading.RLock, repr=False)

    def read_by(self, world: object) -> int:
        """Clear the cache if it was filled with another `world`, everything that cached tensors depend on (weights,
        dtype, …), compared by ==; returns the age."""
        with self._lock:
            if world != self._world:
                self.clear()
                self._world = world
            return self.age

    def clear(self) -> None:
        """Drop all texts."""
        with self._lock:
            self._world, self._root, self.bytes, self.age = None, _root(), 0, self.age + 1

    def find(self, age: int, key: Tensor, allowed: Tensor) -> tuple[int, Segment | None]:
        """The number of tokens of a text [T, C] that need not be read again, and the segment that ends with them.

        Args:
            age: the result of `read_by`.
            allowed: bool [T + 1], whether this text may be resumed after n tokens.
        """
        with self._lock:
            best: tuple[int, Segment | None] = (0, None)
            for one, n in self._along(key) if age == self.age else ():
                if one.state is None:
                    places = (one.cuts[: n + 1] & allowed[: n + 1]).nonzero()
                    n = int(places[-1]) if len(places) else 0
                elif n < one.end or not one.state or not allowed[n]:
                    continue
                if n > best[0]:
                    best = n, one
            if best[1] is not None:
                self._touch(best[1])
            return best

    def shared(self, age: int, key: Tensor) -> int:
        """Length of the longest prefix that this text shares with a cached one, even if it cannot be resumed there."""
        with self._lock:
            return max((n for _, n in self._along(key)), default=0) if age == self.age else 0

    def keep(self, age: int, key: Tensor, cuts: Tensor, rest: Callable[[int], LayerTensors], state: Any = None) -> None:
        """Copy the part of a text that is not cached yet into the cache, if it fits into the budget.

        Args:
            key, cuts, state: as in Segment, of the whole text.
            rest: maps n to the tensors of the tokens from the n-th on.
        """
        with self._lock, lasting():
            if age != self.age:
                return
            before, start = self._followed(key, cuts)
            if start == len(key):
                same = [one for one, n in self._along(key) if n == one.end == len(key)]
                if not state or any(one.state for one in same):
                    self._touch(same[0] if same else before)
                    return
            new = Segment(key[start:], cuts, start, rest(start), state, before)
            if new.bytes > self.budget:
                return
            if before is not None and start < before.end:
                new.before = self._cut(before, start)
            self._add(new := _copied(new))
            self._touch(new)
            while self.bytes > self.budget:
                self._drop(min((one for one in self._each() if not one.after), key=lambda one: one.used))

    def _along(self, key: Tensor) -> Iterator[tuple[Segment, int]]:
        """Segments whose texts share a prefix with this one [T, C], and the length of that prefix."""
        pending = [self._root]
        for one in pending:
            matching = one.after.get(_token(key, one.end), ()) if one.end < len(key) else ()
            for other in (*matching, *one.after.get(b"", ())):
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
        """The segment after which a text may be continued with the longest shared prefix, and that prefix's length."""
        best: tuple[int, Segment | None] = (0, None)
        for one, n in self._along(key):
            places = (one.cuts[: n + 1] & cuts[: n + 1]).nonzero()
            n = int(places[-1]) if len(places) else 0
            if n > max(best[0], one.start):
                best = n, one
        return best[1], best[0]

    def _cut(self, one: Segment, at: int) -> Segment:
        """Split a segment into two, so that the second part can be evicted alone; returns the first part. Threads that
        still read the old segment see it unchanged."""
        n = at - one.start
        state: Any = None if one.state is None else {}
        first = {name: t[:, :n] for name, t in one.tensors.items()}
        head = _copied(Segment(one.key[:n], one.cuts[: at + 1], one.start, first, state, one.before, one.used))
        rest = {name: t[:, n:] for name, t in one.tensors.items()}
        tail = _copied(Segment(one.key[n:], one.cuts, at, rest, one.state, head, one.used))
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
        siblings = (segment.before or self._root).after
        siblings.setdefault(_token(segment.key, 0), []).append(segment)
        self.bytes += segment.bytes

    def _drop(self, segment: Segment) -> None:
        siblings, token = (segment.before or self._root).after, _token(segment.key, 0)
        siblings[token] = [one for one in siblings[token] if one is not segment]
        if not siblings[token]:
            del siblings[token]
        self.bytes -= segment.bytes


def _root() -> Segment:
    """The empty segment before all texts."""
    key = torch.empty(0, 0, dtype=torch.long, device="cpu")
    return Segment(key, torch.ones(1, dtype=torch.bool, device="cpu"), 0, {})


def _token(key: Tensor, at: int) -> bytes:
    """The key of one token as bytes; empty past the last token."""
    return key[at].numpy().tobytes() if at < len(key) else b""


def _copied(one: Segment) -> Segment:
    """The same segment with copies of its tensors."""
    tensors = {name: t.clone(memory_format=torch.contiguous_format) for name, t in one.tensors.items()}
    return replace(one, key=one.key.clone(), cuts=one.cuts.clone(), tensors=tensors)
