"""Top-p without a sort keeps what transformers' own keeps, equal logits in the order of their ids."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from transformers.generation.logits_process import TopPLogitsWarper

from mmspec.pipelines.host.processors.nucleus import top_p

SHARES = (0.0, 1e-9, 0.01, 0.1, 0.5, 0.9, 0.95, 0.999, 1.0)
INF = float("inf")


def stock(warper: TopPLogitsWarper, logits: Tensor, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """Its own sort leaves the order of equal logits open; here it is that of their ids."""
    sort = torch.sort
    with monkeypatch.context() as patched:
        patched.setattr(torch, "sort", lambda t, descending: sort(t, stable=True, descending=descending))
        return warper(None, logits)


def lines(vocab: int, spread: float) -> Tensor:
    """Logits without equal ones and with many, of every sign of zero, without probability, all the same."""
    logits = torch.randn(6, vocab) * spread
    logits[1, ::2] = logits[1, 0]
    logits[2] = (logits[2] * 4).round() / 4
    logits[3, logits[3] < logits[3].median()] = -INF
    logits[4] = 0.0
    logits[4, ::3] = -0.0
    logits[5, vocab // 2 :] -= 90.0
    return logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1, 2, 10, 301, 3000])
def test_what_transformers_keeps(vocab: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(vocab)
    for spread, share, least in itertools.product((0.0, 0.01, 1.0, 8.0, 60.0), SHARES, (1, 2, 5)):
        if least > vocab:
            continue
        logits, warper = lines(vocab, spread).to(dtype), TopPLogitsWarper(share, min_tokens_to_keep=least)
        # in float32: stock sums bfloat16 with 8 bits, and mmspec's processors are given float32
        wanted, out = stock(warper, logits.float(), monkeypatch), top_p(warper, logits)
        assert out.dtype == dtype and torch.equal(out.float(), wanted), (spread, share, least)


@pytest.mark.parametrize("broken", [float("nan"), INF])
def test_what_is_no_law_is_left_as_it_is(broken: float) -> None:
    logits = torch.tensor([[1.0, broken, 0.0], [-INF, -INF, -INF]])
    assert torch.equal(top_p(TopPLogitsWarper(0.5), logits).nan_to_num(7.0), logits.nan_to_num(7.0))


def test_rows_do_not_see_each_other() -> None:
    torch.manual_seed(0)
    logits, warper = lines(301, 3.0), TopPLogitsWarper(0.9)
    alone = torch.cat([top_p(warper, logits[i : i + 1]) for i in range(len(logits))])
    assert torch.equal(top_p(warper, logits), alone)
