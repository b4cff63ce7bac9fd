"""Suffix decoding: propose what followed the text's longest match in this run's prompts and answers. No weights."""

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

_SUFFIXES = 3  # predictions come from a match and its longest suffixes with more occurrences, so many in all
_DOUBT = 2.0  # weight of the prior of a rate, the share in the counts, in tests
_LATEST = 400  # tests of a rate after which their weight is halved


@dataclass(frozen=True)
class SuffixOptions(Sizes):
    """The sizes of a draft, and of the memory.

    Attributes:
        memory: how many of the latest tokens of prompts and answers are remembered; 131072 take up to about 50 MB.
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
    """A token that may follow, predicted by one of the suffixes of a match."""

    token: int
    state: int  # after the token
    length: int  # of the match with the token
    cell: tuple[int, ...]  # class of guesses, whose rate estimates its probability
    share: float  # its probability by the counts alone


@dataclass
class _Match:
    """The longest suffix of a row's text that occurred before in one automaton."""

    automaton: SuffixAutomaton
    state: int = 0
    length: int = 0
    last: int = 0  # the state of the row's whole text


class Phrases:
    """The prompts and answers of this run, for all rows and calls; a lock serialises threads.

    Two automata hold the texts. When the younger is full, the older is dropped and a new one begins.

    Args:
        memory: as in SuffixOptions.
    """

    def __init__(self, memory: int = _USUAL.memory) -> None:
        self.memory, self.lock = memory, threading.Lock()
        self.automata = [SuffixAutomaton()]  # the younger first
        self.rates = Rates(_DOUBT, _LATEST)

    def opened(self, texts: Sequence[Sequence[int]]) -> list[_Match]:
        """Read a prompt, as the pieces of text between its pictures; returns the matches at the end of the last one."""
        matches: list[_Match] = []
        for text in texts or [[]]:
            matches = []
            for token in text:
                matches = self._current(matches)
                self._read(matches, token)
        return self._current(matches)

    def read(self, matches: list[_Match], tokens: Sequence[int]) -> list[_Match]:
        """Read a row's new tokens, and test with them what would have been guessed."""
        for token in tokens:
            matches = self._current(matches)
            for guess in self._guesses(*_longest(matches)):
                self.rates.test(guess.cell, guess.token == token)
            self._read(matches, token)
        return matches

    def _current(self, matches: list[_Match]) -> list[_Match]:
        """A row's matches in the current automata."""
        if self.automata[0].states > self.memory // 2:  # a token adds at least one state if it is new
            self.automata = [SuffixAutomaton(), self.automata[0]]
        if [match.automaton for match in matches] == self.automata:
            return matches
        matched = {id(match.automaton): match for match in matches}
        return [matched.get(id(each)) or _Match(each) for each in self.automata]

    def _read(self, matches: list[_Match], token: int) -> None:
        for match in matches:
            match.state, match.length = match.automaton.follow(match.state, match.length, token)
        matches[0].last = matches[0].automaton.extend(matches[0].last, token)

    def _guesses(self, automaton: SuffixAutomaton, state: int, length: int, most: int = _USUAL.width) -> list[_Guess]:
        """Tokens that may follow a match, each once: those predicted by the match, then those by its suffixes."""
        guesses: dict[int, _Guess] = {}
        state = automaton.place(state, length)
        for suffix in range(_SUFFIXES):
            if state <= 0:
                break
            n = automaton.count[state] or 1
            reach = min(length, 6) if length < 9 else 7 + (length >= 14)
            for rank, (count, token, there) in enumerate(automaton.after(state, most)):
                if token not in guesses:
                    certainty = 0 if n == 1 else 1 if count == n else 2 if 2 * count >= n else 3
                    cell = (suffix, reach, certainty, rank)
                    guesses[token] = _Guess(token, there, length + 1, cell, count / (n + 1))
            state = automaton.link[state]
            length = automaton.length[state]
        return list(guesses.values())

    def drafted(
        self, matches: list[_Match], options: SuffixOptions, least: float, price: Price | None = None
    ) -> list[tuple[int, int]]:
        """Tokens of the likeliest continuations and their parents (the root is node 0); empty if no draft is worth its
        cost."""
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
    """How many of a row's tokens have been read, and its current matches."""

    read: int
    matches: list[_Match]


@dataclass(frozen=True)
class SuffixDrafter:
    """Trees of what followed the longest match most often (SuffixDecoding, Oliaro et al. 2024, arXiv 2411.04975).

    Suffix automata hold the latest prompts and answers of all rows and calls since `enable`; each row keeps its state
    in them. The probability of a continuation is the rate at which such guesses were right in this run, classified by
    the length of the match and by how often the token followed it: long matches draft far, and texts without repetition
    draft nothing. Everything runs on the host, on tokens that the loop has read already.

    Attributes:
        phrases: the texts so far; `fit` starts with none.
        prices: measured costs of drafts; None: the usual costs on a GPU.
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
        """Fits any target. Raises ValueError: an option of another drafter."""
        options = _USUAL.with_(given, "the suffix drafter")
        return replace(self, options=options, phrases=Phrases(options.memory))

    def start(self, session: SessionView[PerRow[_Cursor]], target: Target, prompt: Prompt) -> PerRow[_Cursor]:
        """Read the prompts' text tokens, without those of pictures."""
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
    """The runs of tokens other than NO_TOKEN, which marks pictures and padding."""
    for is_text, piece in groupby(line, key=lambda token: token != NO_TOKEN):
        if is_text:
            yield list(piece)
