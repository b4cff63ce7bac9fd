"""Suffix decoding: what followed the longest match of the text in the prompts and answers of this run. No weights."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import itemgetter
from typing import ClassVar, NamedTuple

import torch

from mmspec.config import Options, whole
from mmspec.drafters.automaton import SuffixAutomaton
from mmspec.drafters.likely import LEAST, Rates, filled, likeliest, worth
from mmspec.drafters.shape import Sizes
from mmspec.protocols import PerRow, SessionView, Target, TargetInfo
from mmspec.switch import Price, Prices
from mmspec.tree import chain, from_parents, lone
from mmspec.types import NO_TOKEN, Draft, Prompt

_SUFFIXES = 3  # a match and its longest suffixes that also stood elsewhere: where predictions come from
_DOUBT = 2.0  # tests that the counts of a text are worth before any prediction was tested
_LATEST = 400  # tests after which a rate forgets half of them


@dataclass(frozen=True)
class SuffixOptions(Sizes):
    """How far a draft goes, and how much is remembered.

    Attributes:
        memory: tokens of prompts and answers that are remembered at most, the latest; 131072 take some 50 MB at most.
    """

    depth: int = 16
    width: int = 8
    size: int = 32
    memory: int = 131072

    def __post_init__(self) -> None:
        super().__post_init__()
        whole("memory", self.memory)


_USUAL = SuffixOptions()


class _Guess(NamedTuple):
    """A token that may follow, by one of the suffixes of a match."""

    token: int
    state: int  # after it
    length: int  # of the match with it
    cell: tuple[int, ...]  # whose rate says how likely it is
    share: float  # how likely it is by the counts alone


@dataclass
class _Match:
    """The longest suffix of a row's text that was read before, in one automaton."""

    automaton: SuffixAutomaton
    state: int = 0
    length: int = 0
    last: int = 0  # the state of the row's whole text


class Phrases:
    """What this run has read and written, for all rows and calls; calls of several threads take turns.

    Two automata hold the texts. When the younger is full, the older is forgotten and a new one begins.

    Args:
        memory: as in SuffixOptions.
    """

    def __init__(self, memory: int = _USUAL.memory) -> None:
        self.memory, self.lock = memory, threading.Lock()
        self.automata = [SuffixAutomaton()]  # the younger first
        self.rates = Rates(_DOUBT, _LATEST)

    def opened(self, texts: Sequence[Sequence[int]]) -> list[_Match]:
        """Read a prompt, in the pieces that pictures leave of it; where its last one has come to."""
        matches: list[_Match] = []
        for text in texts or [[]]:
            matches = []
            for token in text:
                matches = self._turned(matches)
                self._read(matches, token)
        return self._turned(matches)

    def read(self, matches: list[_Match], tokens: Sequence[int]) -> list[_Match]:
        """Read what a row has gained, and test by it what would have been guessed."""
        for token in tokens:
            matches = self._turned(matches)
            for guess in self._guesses(*_longest(matches)):
                self.rates.test(guess.cell, guess.token == token)
            self._read(matches, token)
        return matches

    def _turned(self, matches: list[_Match]) -> list[_Match]:
        """A row's matches in the automata that there are now."""
        if self.automata[0].states > self.memory // 2:  # a new word makes a state at least
            self.automata = [SuffixAutomaton(), self.automata[0]]
        if [match.automaton for match in matches] == self.automata:
            return matches
        known = {id(match.automaton): match for match in matches}
        return [known.get(id(each)) or _Match(each) for each in self.automata]

    def _read(self, matches: list[_Match], token: int) -> None:
        for match in matches:
            match.state, match.length = match.automaton.follow(match.state, match.length, token)
        matches[0].last = matches[0].automaton.extend(matches[0].last, token)

    def _guesses(self, automaton: SuffixAutomaton, state: int, length: int, most: int = _USUAL.width) -> list[_Guess]:
        """What may follow a match, each token once: by the match, then by its suffixes."""
        guesses: dict[int, _Guess] = {}
        state = automaton.place(state, length)
        for suffix in range(_SUFFIXES):
            if state <= 0:
                break
            n = automaton.count[state] or 1
            reach = min(length, 6) if length < 9 else 7 + (length >= 14)
            for rank, (count, token, there) in enumerate(automaton.after(state, most)):
                if token not in guesses:
                    sure = 0 if n == 1 else 1 if count == n else 2 if 2 * count >= n else 3
                    cell = (suffix, reach, sure, rank)
                    guesses[token] = _Guess(token, there, length + 1, cell, count / (n + 1))
            state = automaton.link[state]
            length = automaton.length[state]
        return list(guesses.values())

    def drafted(
        self, matches: list[_Match], options: SuffixOptions, least: float, price: Price | None = None
    ) -> list[tuple[int, int]]:
        """Tokens of the likeliest continuations and the nodes above them, the root being 0; nothing if it is not worth
        a draft."""
        automaton, state, length = _longest(matches)

        def after(guess: _Guess) -> list[tuple[float, _Guess]]:
            guesses = self._guesses(automaton, guess.state, guess.length)
            chances = [(self.rates.of(one.cell, one.share), one) for one in guesses]
            return heapq.nlargest(options.width, chances, key=itemgetter(0))

        root = _Guess(NO_TOKEN, state, length, (), 1.0)
        nodes = likeliest(root, after, options.depth, options.size, least, price)
        return [(guess.token, above) for guess, above in nodes]


def _longest(matches: list[_Match]) -> tuple[SuffixAutomaton, int, int]:
    best = max(matches, key=lambda match: match.length)
    return best.automaton, best.state, best.length


@dataclass
class _Cursor:
    """How far a row's text has been read, and where it has come to."""

    read: int
    matches: list[_Match]


@dataclass(frozen=True)
class SuffixDrafter:
    """Trees of what followed the longest match most often (SuffixDecoding, Oliaro et al. 2024, arXiv 2411.04975).

    One suffix automaton holds prompts and answers of all rows and calls since `enable`; each row keeps its place in it.
    How likely a continuation is says the rate at which such guesses came true in this run, by the length of the match
    and by how often it was followed so: long matches draft far, and texts that share nothing draft nothing.

    All of it runs on the host, on tokens that the loop has read already.

    Attributes:
        phrases: what was read so far; `fit` begins anew.
        prices: what drafts cost, where that is measured; None: what they cost usually on a GPU.
    """

    options: SuffixOptions = _USUAL
    features: tuple[int, ...] = ()
    shares: ClassVar[bool] = True
    phrases: Phrases = field(default_factory=Phrases, repr=False, compare=False)
    prices: Prices | None = field(default=None, repr=False, compare=False)

    @property
    def nodes(self) -> int:
        return self.options.size

    def fit(self, target: TargetInfo, given: Options) -> SuffixDrafter:
        """Any target will do.

        Raises:
            ValueError: an option of another drafter.
        """
        options = _USUAL.with_(given, "the suffix drafter")
        return replace(self, options=options, phrases=Phrases(options.memory))

    def start(self, session: SessionView[PerRow[_Cursor]], target: Target, prompt: Prompt) -> PerRow[_Cursor]:
        """Read the prompts' text tokens; those of pictures are left out."""
        words = torch.where((prompt.visual == 0) & prompt.valid, prompt.ids, NO_TOKEN).tolist()
        with self.phrases.lock:
            cursors = [
                _Cursor(row.start, self.phrases.opened(list(_pieces(line))))
                for row, line in zip(session.rows, words, strict=True)
            ]
        return PerRow(cursors)

    def propose(self, session: SessionView[PerRow[_Cursor]], target: Target) -> Draft:
        price = None if self.prices is None else self.prices.of(len(session.rows), session.pending.device.type)
        least = worth(len(session.rows)) if price is None else LEAST
        with self.phrases.lock:
            drafts = [
                self._line(row.tokens, cursor, least, price)
                for row, cursor in zip(session.rows, session.memory.values, strict=True)
            ]
        longest = max(map(len, drafts))
        if not longest:
            return lone(session.pending[:, None])
        chained = self.options.width == 1
        size = longest if chained else min(filled(longest + 1), self.options.size) - 1
        lines = [line + [(NO_TOKEN, 0)] * (size - len(line)) for line in drafts]
        below = torch.tensor(lines, device=session.pending.device)  # [B, N − 1, 2], tokens and parents
        tokens = torch.cat([session.pending[:, None], below[..., 0]], 1)
        if chained:
            return Draft(tokens, chain(size + 1, tokens.device).expand(len(drafts)))
        root = torch.zeros_like(session.pending)[:, None]
        return Draft(tokens, from_parents(torch.cat([root, below[..., 1]], 1), self.options.depth))

    def _line(self, tokens: list[int], cursor: _Cursor, least: float, price: Price | None) -> list[tuple[int, int]]:
        cursor.matches = self.phrases.read(cursor.matches, tokens[cursor.read :])
        cursor.read = len(tokens)
        return self.phrases.drafted(cursor.matches, self.options, least, price)


def _pieces(line: list[int]) -> Iterator[list[int]]:
    """What stands between pictures and padding."""
    for word, piece in groupby(line, key=lambda token: token != NO_TOKEN):
        if word:
            yield list(piece)
