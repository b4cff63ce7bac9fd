"""Processors that read history: for every node of a tree bit for bit what the stock one gives for the node's prefix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.generation import logits_process as stock

from mmspec.pipelines.host.processors.history import Texts
from mmspec.pipelines.host.processors.table import HISTORY, PURE, Processors
from mmspec.session import Row, Session
from mmspec.tree import chain, from_parents
from mmspec.types import NO_TOKEN, Draft

CPU = torch.device("cpu")
V, B, N = 12, 3, 9


def lawful(row: int, ids: Tensor) -> list[int]:
    return [i for i in range(V) if (i + int(ids[-1]) + row) % 3]


setattr(lawful, PURE, True)
CASES: dict[str, Callable[[], Any]] = {
    "penalty": lambda: stock.RepetitionPenaltyLogitsProcessor(1.3),
    "reward": lambda: stock.RepetitionPenaltyLogitsProcessor(0.7),
    "penalty past the prompt": lambda: stock.RepetitionPenaltyLogitsProcessor(1.3, prompt_ignore_length=9),
    "penalty past each prompt": lambda: stock.RepetitionPenaltyLogitsProcessor(1.3, torch.tensor([3, 40, 0, 11])),
    **{f"{n}-gram": lambda n=n: stock.NoRepeatNGramLogitsProcessor(n) for n in (1, 2, 3, 4)},
    "bias": lambda: stock.SequenceBiasLogitsProcessor([[[3], 2.0], [[1, 2], -1.5], [[4, 5, 6], 9.0], [[7, 2], 0.1]]),
    "bad words": lambda: stock.NoBadWordsLogitsProcessor([[3], *[[i, j] for i in range(6) for j in (4, 5)]], [1]),
    "min length": lambda: stock.MinLengthLogitsProcessor(13, [2, V + 3]),
    "min new tokens": lambda: stock.MinNewTokensLengthLogitsProcessor(8, 5, 2),
    "forced BOS": lambda: stock.ForcedBOSTokenLogitsProcessor(4),
    "forced EOS": lambda: stock.ForcedEOSTokenLogitsProcessor(14, [2, 6]),
    "suppressed at the beginning": lambda: stock.SuppressTokensAtBeginLogitsProcessor([1, 2, 8], 11),
    "decay": lambda: stock.ExponentialDecayLengthPenalty((2, 1.37), [2, 9], 9),
    "grammar": lambda: stock.PrefixConstrainedLogitsProcessor(lawful, 1),
    "grammar of prompts with two rows": lambda: stock.PrefixConstrainedLogitsProcessor(lawful, 2),
}


def test_every_processor_of_the_table_has_a_case() -> None:
    assert {type(make()) for make in CASES.values()} == set(HISTORY)


def words(*shape: int) -> Tensor:
    """Mostly two tokens, so that long n-grams repeat too."""
    return torch.where(torch.rand(shape) < 0.7, torch.randint(2, shape), torch.randint(V, shape))


def session(lengths: list[int]) -> Session:
    rows = [Row([*words(n - 1).tolist(), V + 1], 1, 99, 0, index=i) for n, i in zip(lengths, (0, 2, 3), strict=True)]
    return Session(rows, CPU)


def draft(at: Session, size: int, shape: str) -> Draft:
    """Some nodes are holes; node 0 is the row's last token."""
    tokens = words(B, size).masked_fill(torch.rand(B, size) < 0.1, NO_TOKEN)
    tokens[:, 0] = torch.tensor([row.tokens[-1] for row in at.rows])
    if shape == "chain":
        return Draft(tokens, chain(size, CPU).expand(B))
    parents = torch.stack(
        [torch.cat([torch.zeros(1), (torch.rand(size - 1) * torch.arange(1, size))]) for _ in at.rows]
    )
    return Draft(tokens, from_parents(parents.long(), size))


def expected(processor: Any, logits: Tensor, at: Session, proposed: Draft) -> tuple[Tensor, Tensor]:
    """Each node by itself, and which nodes are no descendants of holes (or of what a grammar forbids)."""
    out, real = logits.clone(), torch.zeros(logits.shape[:2], dtype=torch.bool)
    for b, row in enumerate(at.rows):
        for n in range(logits.shape[1]):
            line = [k for k in range(1, n + 1) if proposed.tree.ancestors[b, n, k]]
            tokens = proposed.tokens[b, line].tolist()
            ids = torch.tensor([[*row.tokens, *tokens]])
            told = processor()
            if isinstance(told, stock.PrefixConstrainedLogitsProcessor):
                place = row.index // told._num_beams
                steps = [[*row.tokens, *tokens][: len(row.tokens) + i] for i in range(len(tokens))]
                if any(t not in lawful(place, torch.tensor(s)) for t, s in zip(tokens, steps, strict=True)):
                    continue
                told = stock.PrefixConstrainedLogitsProcessor(lambda _, ids, i=place: lawful(i, ids), 1)
            if NO_TOKEN in tokens:
                continue
            if isinstance(getattr(told, "prompt_ignore_length", None), Tensor):
                told.prompt_ignore_length = told.prompt_ignore_length[row.index : row.index + 1]
            out[b, n], real[b, n] = told(ids, logits[b, n : n + 1])[0], True
    return out, real


@pytest.mark.parametrize("shape", ["tree", "chain"])
@pytest.mark.parametrize("case", CASES)
def test_a_tree_is_processed_as_stock_processes_each_prefix(case: str, shape: str) -> None:
    changed = 0
    for lengths in ([1, 1, 2], [9, 14, 4], [30, 8, 10]):
        at, processors = session(lengths), Processors(stock.LogitsProcessorList([CASES[case]()]))
        for size in (1, N, 4, N):  # rounds: the texts grow in between
            proposed, logits = draft(at, size, shape), 4 * torch.randn(B, size, V)
            logits[torch.rand(B, size, V) < 0.05] = -torch.inf
            before = logits.clone()
            got = processors(logits, at, proposed)
            wanted, real = expected(CASES[case], logits, at, proposed)
            assert torch.equal(got[real], wanted[real]) and torch.equal(logits, before)
            changed += int((got != logits).any())
            for row in at.rows:
                row.tokens += words(int(torch.randint(1, 4, ()))).tolist()
    assert changed, "it had nothing to do"


def test_a_grammar_may_answer_with_tensors_and_an_empty_answer_raises_as_in_stock() -> None:
    def told(row: int, ids: Tensor) -> Any:
        return torch.tensor(lawful(row, ids)) if len(ids) < 20 else []

    at = session([9, 14, 4])
    proposed, logits = draft(at, N, "tree"), torch.randn(B, N, V)
    lists = Processors(stock.LogitsProcessorList([stock.PrefixConstrainedLogitsProcessor(lawful, 1)]))
    tensors = Processors(stock.LogitsProcessorList([stock.PrefixConstrainedLogitsProcessor(told, 1)]))
    assert torch.equal(lists(logits, at, proposed), tensors(logits, at, proposed))
    at.rows[1].tokens += [3] * 9
    with pytest.raises(ValueError, match="empty list"):
        tensors(logits, at, proposed)


def test_texts_copy_what_is_new_and_start_again_with_other_rows() -> None:
    texts, lists = Texts(), [[1, 2, 3], [4]]
    for more in ([5], [], [6] * 200):
        lists[0] += more
        lists[1] += [7]
        ids, lengths = texts.of(lists, CPU, room=2)
        assert lengths.tolist() == [*map(len, lists)] and ids.shape[1] == max(map(len, lists)) + 2
        assert [row[:n].tolist() for row, n in zip(ids, lengths, strict=True)] == lists
        assert all((row[n:] > 10**6).all() for row, n in zip(ids, lengths, strict=True))
    ids, lengths = texts.of(lists[1:], CPU)
    assert ids.tolist() == lists[1:]
    del lists[1][2:]
    assert texts.of(lists[1:], CPU)[0].tolist() == lists[1:]
