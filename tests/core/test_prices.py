"""What drafts cost: measured where it was, else as usual; and drafters that draft what is worth it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from mmspec.drafters.likely import worthwhile
from mmspec.drafters.ngram import NgramDrafter
from mmspec.switch import KEPT, STALE, SURE, Prices


def test_what_was_measured_counts_and_what_was_not_follows_it() -> None:
    prices = Prices()
    usual = [prices.costs(1)(n) for n in (1, 2, 8, 16)]
    assert usual[0] == 1.0 and usual == sorted(usual) and prices.costs(1, "cuda")(8) < 1.2 < usual[1]
    for _ in range(SURE):
        for nodes, seconds in ((1, 2.0), (4, 4.0), (12, 8.0)):
            prices.book(1, nodes, seconds)
    assert prices.costs(1)(4) == 2.0 and prices.costs(1)(12) == 4.0 and prices.costs(1)(8) == 3.0
    assert prices.costs(1)(24) == pytest.approx(4.0 * usual_ratio(24, 12))
    assert prices.costs(2)(4) == Prices().costs(2)(4)  # of other batches nothing is known


def usual_ratio(one: int, other: int) -> float:
    return Prices().costs(1)(one) / Prices().costs(1)(other)


def test_a_size_that_was_measured_badly_is_measured_again() -> None:
    prices = Prices()
    for _ in range(KEPT):
        prices.book(1, 1, 1.0)
        prices.book(1, 4, 50.0)
    assert prices.costs(1)(4) == 50.0
    for _ in range(KEPT * STALE):
        prices.book(1, 1, 1.0)
    assert prices.costs(1)(4) == Prices().costs(1)(4)


def test_the_draft_that_gains_most_for_its_price() -> None:
    def price(nodes: int) -> float:
        return 2.0 + 0.1 * nodes if nodes > 1 else 1.0

    assert worthwhile([1.0, 1.9, 2.8, 3.7, 4.6, 5.5], price) == 6
    assert worthwhile([1.0, 1.9, 2.8, 3.7, 3.7, 3.7], price) == 4
    assert worthwhile([1.0, 1.3, 1.4, 1.5], price) == worthwhile([1.0], price) == 1


def test_prompt_lookup_drafts_what_is_worth_it() -> None:
    """A chain where copies came true; none where they did not, or where a draft is dear."""

    def lengths(text: list[int], cost: float, rounds: int = 40) -> list[int]:
        prices = Prices()
        prices.of = lambda batch, device: lambda nodes: 1.0 if nodes == 1 else cost  # type: ignore[method-assign]
        drafter = NgramDrafter(prices=prices)
        row = SimpleNamespace(tokens=text[:20])
        session = SimpleNamespace(rows=[row], pending=torch.zeros(1).long())
        session.memory = drafter.start(session, None, None)  # type: ignore[arg-type]
        found = []
        for _ in range(rounds):
            found.append(drafter.propose(session, None).tree.size - 1)  # type: ignore[arg-type]
            row.tokens = text[: len(row.tokens) + 1]
        return found

    repeated = list(range(10)) * 10
    assert lengths(repeated, 2.0)[-1] == NgramDrafter().options.depth
    assert not any(lengths(repeated, 20.0))
    never = [token for n in range(50) for token in (3, 10 + n)]  # 3 is never followed by what followed it last
    assert not any(lengths(never, 1.5)[20:])
