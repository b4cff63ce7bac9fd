"""A suffix automaton over many texts, token by token: where the longest match of a context is, and what followed it."""

from __future__ import annotations

from heapq import nlargest

_LINKS = 64  # states whose count one token raises at most, the longest contexts first: a run of one token has a chain
# of links as long as itself


class SuffixAutomaton:
    """The substrings of all texts read so far, in at most two states a token (Blumer et al. 1985), with their counts.

    A state stands for strings that end at the same places. Texts may grow in turn: each keeps the state that it has
    come to. State 0 is the empty string.

    Attributes:
        onward: of each state, token → the state of the longer string.
        link: of each state the one of its longest suffix that ends at more places; −1 for state 0.
        length: of the longest string of each state, in tokens.
        count: at how many places the strings of each state end.
    """

    def __init__(self) -> None:
        self.onward: list[dict[int, int]] = [{}]
        self.link, self.length, self.count = [-1], [0], [0]

    @property
    def states(self) -> int:
        return len(self.link)

    def extend(self, last: int, token: int) -> int:
        """Read one more token of the text that has come to state `last`; the state that it comes to."""
        known = self.onward[last].get(token)
        if known is None:
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
        """The state after `token` whose longest string is that of `before` and the token; split off where need be."""
        there = self.onward[before][token]
        if self.length[there] == self.length[before] + 1:
            return there
        apart = self._state(dict(self.onward[there]), self.link[there], self.length[before] + 1, self.count[there])
        self.link[there] = apart
        at = before
        while at >= 0 and self.onward[at].get(token) == there:
            self.onward[at][token] = apart
            at = self.link[at]
        return apart

    def place(self, state: int, length: int) -> int:
        """The state of the string of so many tokens that once was in `state`: states are split as texts grow."""
        while state > 0 and length <= self.length[self.link[state]]:
            state = self.link[state]
        return state

    def follow(self, state: int, length: int, token: int) -> tuple[int, int]:
        """The longest suffix of a match and the next token that was read before: its state and length."""
        state = self.place(state, length)
        while state > 0 and token not in self.onward[state]:
            state = self.link[state]
            length = self.length[state]
        onward = self.onward[state].get(token)
        return (0, 0) if onward is None else (onward, length + 1)

    def after(self, state: int, most: int) -> list[tuple[int, int, int]]:
        """What followed a state's strings most often, at most so many: counts, tokens and the states after these."""
        onward, count = self.onward[state], self.count
        followers = [(count[there], token, there) for token, there in onward.items()]
        return followers if len(followers) == 1 else nlargest(most, followers)
