"""Codebooks on a language model's vocabulary, for rules that ask which picture tokens look alike."""

from __future__ import annotations

import torch
from torch import Tensor


def by_token(codes: Tensor, place: dict[int, int], vocab: int) -> Tensor:
    """[vocab, c + 1]: each code in the row of its token; all other tokens stand at right angles to every code.

    Args:
        codes: [K, c].
        place: code → token id; tokens beyond the vocabulary (a head that leaves them out) are left out.
        vocab: tokens of the head.
    """
    K, c = codes.shape
    index = torch.tensor([(code, token) for code, token in place.items() if code < K and token < vocab])
    rows = torch.zeros(vocab, c + 1, dtype=torch.float32, device=codes.device)
    rows[:, c] = 1.0
    code, token = index.to(codes.device).unbind(1)
    rows[token] = torch.cat([codes.detach()[code].float(), torch.zeros(len(code), 1, device=codes.device)], 1)
    return rows
