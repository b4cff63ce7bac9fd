"""The suffix drafter: what its automaton counts, what it proposes, what it forgets, and that rows share it."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest
import tiny_vlms
import torch
from compared import as_alone
from torch import Tensor

import mmspec
from mmspec.drafters.automaton import SuffixAutomaton
from mmspec.drafters.suffix import Phrases, SuffixDrafter, SuffixOptions
from mmspec.protocols import TargetInfo
from mmspec.session import Row, Session
from mmspec.types import NO_TOKEN, Draft, Prompt

ANY = TargetInfo("any", tiny_vlms.VOCAB, 1, 1, 1, torch.device("cpu"), torch.float32)


def places(texts: list[list[int]], words: list[int]) -> int:
    """How often these words stand in the texts."""
    n = len(words)
    return sum(text[i : i + n] == words for text in texts for i in range(len(text) - n + 1))


def longest(texts: list[list[int]], text: list[int]) -> int:
    """The longest suffix of a text that stands in the texts."""
    return max(n for n in range(len(text) + 1) if not n or places(texts, text[len(text) - n :]))


def state_of(automaton: SuffixAutomaton, words: list[int]) -> int:
    state = 0
    for word in words:
        state = automaton.onward[state][word]
    return state


@pytest.mark.parametrize("in_turn", [False, True])
@pytest.mark.parametrize("vocab", [2, 3, 9])
def test_the_automaton_knows_every_substring(vocab: int, in_turn: bool) -> None:
    """Texts one after the other, or growing in turn; then a match may miss what others have written since."""
    g = torch.Generator().manual_seed(vocab)
    rows, words = (torch.randint(n, (90,), generator=g).tolist() for n in (3, vocab))
    automaton, texts, ends, matches = SuffixAutomaton(), [[], [], []], [0, 0, 0], [(0, 0)] * 3
    for b, x in zip(rows if in_turn else sorted(rows), words, strict=True):
        want, line = longest(texts, [*texts[b], x]), [*texts[b], x]
        matches[b] = automaton.follow(*matches[b], x)
        length = matches[b][1]
        assert length == want or (in_turn and length < want and places(texts, line[len(line) - length :]))
        texts[b].append(x)
        ends[b] = automaton.extend(ends[b], x)
        assert automaton.length[ends[b]] == len(texts[b])
    assert automaton.states <= 2 * 90 + 1
    for text in texts:
        for i in range(len(text)):
            for n in range(1, 8):
                words = text[i : i + n]
                state = automaton.place(state_of(automaton, words), len(words))
                assert automaton.count[state] == places(texts, words)


def test_what_followed_most_often_comes_first() -> None:
    automaton = SuffixAutomaton()
    for text in ([1, 2, 3], [1, 2, 4], [1, 2, 4], [1, 2, 5]):
        end = 0
        for word in text:
            end = automaton.extend(end, word)
    assert [(n, token) for n, token, _ in automaton.after(state_of(automaton, [1, 2]), 2)] == [(2, 4), (1, 5)]


def walked(drafter: SuffixDrafter, prompt: list[int], answer: list[int], pictures: tuple[int, ...] = ()) -> list[Draft]:
    """The drafts of a row whose answer is known, one token a round."""
    row = Row([*prompt, answer[0]], len(prompt), 10**6, 0)
    session = Session([row], ANY.device)
    ids = torch.tensor([prompt])
    visual = torch.tensor([[int(i in pictures) for i in prompt]])
    session.memory = drafter.start(session, None, Prompt(ids, None, None, visual, torch.ones_like(ids).bool()))
    drafts = []
    for token in [*answer[1:], None]:
        session.pending = torch.tensor([row.tokens[-1]])
        drafts.append(drafter.propose(session, None))
        if token is not None:
            row.tokens.append(token)
    return drafts


def paths(draft: Draft) -> list[list[int]]:
    """The tokens from below the root to each node."""
    tokens, parents, found = draft.tokens[0].tolist(), draft.tree.parents[0].tolist(), [[]]
    for node in range(1, len(tokens)):
        found.append([*found[parents[node]], tokens[node]])
    return found[1:]


def test_a_text_that_comes_again_is_drafted_to_its_depth() -> None:
    drafter = SuffixDrafter().fit(ANY, {"depth": 7})
    answer = torch.randperm(60)[:30].tolist()
    first = walked(drafter, [70, 71], answer)
    assert all(draft.tokens.shape[1] == 1 for draft in first)  # every token is new
    for _ in range(3):
        again = walked(drafter, [70, 71], answer)
    assert answer[10:17] in paths(again[9]) and max(map(len, paths(again[9]))) == 7
    assert again[9].tokens.shape[1] == 8
    chained = SuffixDrafter().fit(ANY, {"width": 1, "depth": 4})
    for _ in range(3):
        again = walked(chained, [70, 71], answer)
    assert again[9].tree.is_chain and again[9].tokens.tolist() == [answer[9:14]]


def test_two_continuations_make_a_tree() -> None:
    drafter, common = SuffixDrafter().fit(ANY, {}), [1, 2, 3, 4]
    for k in range(8):
        drafts = walked(drafter, [70], [*common, *((20, 21) if k % 2 else (30, 31)), 50 + k])
    assert {(20, 21), (30, 31)} <= {tuple(path[:2]) for path in paths(drafts[3])}


@pytest.mark.parametrize("vocab", [40, 4000])
def test_texts_that_share_nothing_are_not_drafted_for(vocab: int) -> None:
    """After the first few guesses have failed, however often a token by itself comes again."""
    drafter, g = SuffixDrafter().fit(ANY, {}), torch.Generator().manual_seed(1)
    texts = torch.randint(100, 100 + vocab, (40, 60), generator=g).tolist()
    sizes = [draft.tokens.shape[1] for text in texts for draft in walked(drafter, [1, 2, 3], text)]
    drafted = [size > 1 for size in sizes]
    early, late = (sum(part) for part in (drafted[: len(drafted) // 2], drafted[len(drafted) // 2 :]))
    assert late <= early and early + late <= 0.03 * len(drafted)


def test_placeholders_are_never_proposed() -> None:
    drafter, picture = SuffixDrafter().fit(ANY, {}), tiny_vlms.IMAGE
    prompt = [5, 6, *[picture] * 9, 7, 8]
    drafts = [d for _ in range(4) for d in walked(drafter, prompt, [5, 6, 9, 5, 6, 9, 5, 6, 7, 8], (picture,))]
    proposed = {int(t) for draft in drafts for t in draft.tokens[0, 1:]}
    assert proposed - {NO_TOKEN} and picture not in proposed and picture not in drafter.phrases.automata[0].onward[0]


def test_the_oldest_texts_are_forgotten() -> None:
    phrases, options = Phrases(memory=400), SuffixOptions()
    texts = [list(range(1000 * k, 1000 * k + 40)) for k in range(50)]

    def known(text: list[int]) -> int:
        matches = phrases.opened([text[:20]])
        return len(phrases.drafted(matches, options, 0.01))

    for text in texts:
        phrases.read(phrases.opened([text]), [])
        assert sum(each.states for each in phrases.automata) <= 400 + 4 * 2
    assert known(texts[-1]) and not known(texts[0])


# -- on a model ------------------------------------------------------------------------------------------------------


def fresh() -> Any:
    return tiny_vlms.model.__wrapped__("llava")


def inputs(kind: str = "ragged") -> dict[str, Tensor]:
    return tiny_vlms.prompt("llava", kind)


def test_calls_share_what_was_written_until_it_is_disabled() -> None:
    model = fresh()
    stock, rounds = tiny_vlms.generate(model, inputs()), []
    handle = mmspec.enable(model, "suffix")
    for _ in range(3):
        before = handle.stats.rounds
        assert torch.equal(tiny_vlms.generate(model, inputs()), stock)
        rounds.append(handle.stats.rounds - before)
    assert rounds[1] < 0.6 * rounds[0] and rounds[2] <= rounds[1]
    mmspec.disable(model)
    with mmspec.enable(model, handle.drafter) as anew:
        assert torch.equal(tiny_vlms.generate(model, inputs()), stock) and anew.stats.rounds == rounds[0]


def test_rows_of_a_flow_share_it() -> None:
    """Each is answered as alone, in fewer rounds."""
    model, call = fresh(), {"max_new_tokens": 16, "do_sample": False}
    asked = [tiny_vlms.prompt("llava", "image first", seed) for seed in (1, 2, 1, 3, 1, 2)]
    by_themselves = sum(as_alone(model, [one], "suffix", 1, call).stats.row_rounds for one in asked)
    assert as_alone(model, asked, "suffix", 2, call).stats.row_rounds < 0.8 * by_themselves


def test_options() -> None:
    model = fresh()
    with mmspec.enable(model, depth=3, memory=100) as handle:
        assert handle.drafter.options == SuffixOptions(3, 8, 32, 100)


@pytest.mark.parametrize("vocab", [40, 4000, 150_000])
def test_a_token_that_is_remembered_takes_400_bytes_at_most(vocab: int) -> None:
    memory, g = 16384, torch.Generator().manual_seed(0)
    texts = torch.randint(vocab, (40, 500), generator=g).tolist()
    tracemalloc.start()
    try:
        phrases = Phrases(memory)
        for text in texts:
            phrases.opened([text])
        assert tracemalloc.get_traced_memory()[1] < 400 * memory
        assert sum(each.states for each in phrases.automata) <= memory + 1000
    finally:
        tracemalloc.stop()
