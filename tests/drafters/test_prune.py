"""Pruning without training: evenly spaced rows by brute force, exact output on fewer rows."""

from __future__ import annotations

import pytest
import tiny_vlms
import torch
from compared import as_stock
from hostile_drafters import feature_drafter

import mmspec
from mmspec.drafters.prune import kept

METHODS = ("eagle", "vispec", "msd", "flash", "specvlm")


@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 0.9, 0.97, 1.0])
@pytest.mark.parametrize("count", [1, 2, 7, 40, 200])
def test_what_stays_is_evenly_spaced(count: int, share: float) -> None:
    parts = [torch.zeros(3), torch.ones(count), torch.zeros(2), torch.full((count,), 2), torch.zeros(1)]
    visual = torch.cat(parts)[None]
    stay = kept(visual, share)[0]
    seen = (visual[0] > 0).nonzero()[:, 0]
    budget = round(1e9 * 2 * count * (1 - share)) // 10**9
    wanted = [round(k * (2 * count - 1) / (budget - 1)) if budget > 1 else 0 for k in range(budget)]
    assert stay[seen].nonzero()[:, 0].tolist() == wanted and len(wanted) == budget
    assert stay[visual[0] == 0].all()


def test_more_is_kept_as_less_is_left_out() -> None:
    counts = [int(kept(torch.ones(1, 50, dtype=torch.long), share / 20).sum()) for share in range(21)]
    assert counts == sorted(counts, reverse=True) and counts[0] == 50 and counts[-1] == 0


CASES = [("llava", "ragged", method) for method in METHODS]
CASES += [("qwen2_5_vl", "ragged video", method) for method in ("eagle", "specvlm")]


@pytest.mark.parametrize(("name", "kind", "method"), CASES)
@pytest.mark.every(4)
def test_every_method_drafts_on_fewer_rows_and_the_output_is_the_targets(name: str, kind: str, method: str) -> None:
    model, inputs = tiny_vlms.model(name), tiny_vlms.prompt(name, kind)
    drafter = feature_drafter(method, model, **({"latents": 3, "least": 1} if method == "flash" else {}))
    told = [as_stock(model, inputs, drafter, prune=share).stats.drafter for share in (0.0, 0.5, 1.0)]
    rows = [each["visual rows"] for each in told]
    assert rows == sorted(rows, reverse=True) and rows[0] > rows[-1] == 0


def test_leaving_nothing_out_drafts_the_same() -> None:
    model, inputs = tiny_vlms.model("llava"), tiny_vlms.prompt("llava", "ragged")
    drafted = []
    for options in ({}, {"prune": 0.0}):
        with mmspec.enable(model, drafter=feature_drafter("eagle", model), **options) as handle:
            tiny_vlms.generate(model, inputs)
            drafted.append((handle.stats.accepted, handle.stats.drafter["rows"]))
    assert drafted[0] == drafted[1]
