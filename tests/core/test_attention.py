"""Attention in groups: as torch defines it, folded or not, and never its slow path on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mmspec.functional import folded, sdpa
from mmspec.pipelines.host.masks import additive

MASKS = ("bool", "additive", "none")


def made(kind: str, n: int, heads: int, groups: int, rows: int = 2) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """q, k, v as a model hands them on, of slots with room to spare, and a mask of `rows` rows."""
    T, D, E = 11, 8, 12
    q = torch.randn(2, n, heads, D).transpose(1, 2)
    k, v = (torch.randn(2, groups, T + 3, width)[:, :, :T] for width in (D, E))
    seen = torch.rand(rows, 1, n, T) > 0.4
    seen[..., 0] = True
    return q, k, v, {"bool": seen, "additive": additive(seen, q.dtype), "none": None}[kind]


@pytest.mark.parametrize("heads, groups", [(4, 4), (6, 2), (5, 1)])
@pytest.mark.parametrize("n", [1, 5])
@pytest.mark.parametrize("kind", MASKS)
def test_groups_attend_as_torch_defines_it(kind: str, n: int, heads: int, groups: int):
    for rows in (1, 2):
        q, k, v, mask = made(kind, n, heads, groups, rows)
        for scale in (None, 0.3):
            wanted = F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=True)
            for function in (sdpa, folded):
                out = function(q, k, v, mask, scale)
                torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-6)
                assert out.transpose(1, 2).is_contiguous(), "in memory as [B, n, heads, E]"


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_is_asked_for_groups_only_where_flash_attention_serves_them(
    kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
):
    """On another device than a CPU, here one without memory."""
    asked, stock = [], F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *a, **k: asked.append((a, k)) or stock(*a, **k))
    q, k, v, mask = (t if t is None else t.to("meta") for t in made(kind, 5, 6, 2))
    q, k, v = (t.to(dtype) for t in (q, k, v))
    out = sdpa(q, k, v, mask if mask is None or mask.dtype == torch.bool else mask.to(dtype))
    ((given, named),) = asked
    whole = kind == "none" and dtype == torch.bfloat16
    assert bool(named.get("enable_gqa")) is whole and given[0].shape[1] == (6 if whole else 2)
    assert out.shape == (2, 6, 5, 12)
