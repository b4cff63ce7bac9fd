"""A suffix automaton over many texts, built token by token: finds the longest match of a context and what followed."""

from __future__ import annotations

from heapq import nlargest

# a token raises the counts of at most this many states, those of the longest contexts; in a run of n equal tokens there
# would be n of them
_LINKS = 64


class SuffixAutomaton:
    """The substrings of all texts read so far, in at most two states a token (Blumer et al. 1985), with their counts.

    A state represents the strings that end at the same positions. Texts may grow in turn: each remembers its current
    state. State 0 is the empty string.

    Attributes:
        onward: for each state, token → the state of the string extended by it.
        link: for each state, the state of its longest suffix that ends at more positions; −1 for state 0.
        length: for each state, the length of its longest string in tokens.
        count: for each state, the number of positions where its strings end.
    """

    def __init__(self) -> None:
        self.onward: list[dict[int, int]] = [{}]
        self.link, self.length, self.count = [-1], [0], [0]

    @property
    def states(self) -> int:
        return len(self.link)

    def extend(self, last: int, token: int) -> int:
        """Append a token to the text whose current state is `last`; returns its new state."""
        if self.onward[last].get(token) is None:
            here = self._state({}, -1, self.length[last] + 1, 0)
            at = last
            while at >= 0 and token not in self.onward[at]:
                self.onward[at][token] = here
                at = self.link[at]
            self.link[here] = 0 if at < 0 else self._whole(at, token)
        else:
            here = self._whole(last, token)
        at = here
        for _ in range(_LINKS):
            if at <= 0:
                break
            self.count[at] += 1
            at = self.link[at]
        return here

    def _state(self, onward: dict[int, int], link: int, length: int, count: int) -> int:
        self.onward.append(onward)
        self.link.append(link)
        self.length.append(length)
        self.count.append(count)
        return len(self.link) - 1

    def _whole(self, before: int, token: int) -> int:
        """The state whose longest string is that of `before` plus the token; splits the state after it if needed."""
        there = self.onward[before][token]
        if self.length[there] == self.length[before] + 1:
            return there
        clone = self._state(dict(self.onward[there]), self.link[there], self.length[before] + 1, self.count[there])
        self.link[there] = clone
        at = before
        while at >= 0 and self.onward[at].get(token) == there:
            self.onward[at][token] = clone
            at = self.link[at]
        return clone

    def place(self, state: int, length: int) -> int:
        """The current state of a string of `length` tokens that was in `state` before: states split as texts grow."""
        while state > 0 and length <= self.length[self.link[state]]:
            state = self.link[state]
        return state

    def follow(self, state: int, length: int, token: int) -> tuple[int, int]:
        """Extend a match by a token: state and length of its longest suffix that occurred before with this token."""
        state = self.place(state, length)
        while state > 0 and token not in self.onward[state]:
            state = self.link[state]
            length = self.length[state]
        onward = self.onward[state].get(token)
        return (0, 0) if onward is None else (onward, length + 1)

    def after(self, state: int, most: int) -> list[tuple[int, int, int]]:
        """The `most` tokens that most often followed a state's strings: (count, token, state after it), sorted."""
        onward, count = self.onward[state], self.count
        followers = [(count[there], token, there) for token, there in onward.items()]
        return followers if len(followers) == 1 else nlargest(most, followers)
