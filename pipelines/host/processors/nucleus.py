"""Top-p without sorting: keeps the same tokens as `TopPLogitsWarper` of transformers, by a search for the threshold."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor
from transformers.generation.logits_process import TopPLogitsWarper

_BITS = 53  # fractional bits of a probability
_DIGIT, _BINS = 8, 256  # bits of a digit of the keys, and the number of values of a digit


def top_p(warper: TopPLogitsWarper, logits: Tensor) -> Tensor:
    """Logits [R, V] filtered as by `warper`; equal logits are removed in the order of their ids.

    A token is removed if its probability and those of all smaller ones sum to at most 1 - top_p; the last
    `min_tokens_to_keep` stay. Stock sorts for that, so the order of equal logits depends on the sort. Here the logit at
    which the sum exceeds the bound is found digit by digit, from a sum for each digit value: a fixed number of passes,
    without waiting on the host. The sums are of integers, so they do not depend on the order of addition; stock adds in
    float64 on a CPU, and in float32 on a GPU. All tokens stay if the logits are no distribution.
    """
    p, key, width = logits.float().softmax(-1), _ordered(logits), logits.shape[-1]
    mass = p.double().mul_(2.0**_BITS).ceil_().nan_to_num_().long()
    bound, stay = _bound(1 - warper.top_p), min(warper.min_tokens_to_keep, width)
    end = torch.minimum(_passed(key, mass, bound), key.topk(stay).values[:, -1:])
    under, tied = key < end, key == end
    left = bound - (mass * under).sum(-1, keepdim=True)  # the mass of tied tokens that may be removed
    place, each = tied.cumsum(-1), (mass * tied).amax(-1, keepdim=True)
    first = tied & (place * each <= left) & (place <= width - stay - under.sum(-1, keepdim=True))
    return logits.masked_fill((under | first) & ~p.isnan(), warper.filter_value)


def _ordered(logits: Tensor) -> Tensor:
    """Int64 keys in [0, 2^32) with the order of the logits; -0 counts as 0."""
    bits = (logits.float() + 0.0).view(torch.int32).long()
    return torch.where(bits < 0, -1 - bits, bits + (1 << 31))


@lru_cache(maxsize=64)
def _bound(rest: float) -> int:
    """The largest sum, in units of 2^-53, that is at most `rest` after both are rounded to float32, as in stock."""
    with torch.device("cpu"):
        below = torch.tensor(rest, dtype=torch.float32)
        above = torch.nextafter(below, torch.tensor(math.inf))
    middle = (below.double().item() + above.double().item()) / 2 * 2.0**_BITS
    odd = int(below.view(torch.int32).item()) & 1  # a sum halfway in between is rounded to the even one
    return math.ceil(middle) - 1 if odd else math.floor(middle)


def _passed(key: Tensor, mass: Tensor, bound: int) -> Tensor:
    """The first key [R, 1] up to which masses sum to more than the bound; if there is none, one above all others."""
    prefix, under = torch.zeros_like(key[:, :1]), torch.zeros_like(mass[:, :1])
    for shift in range(32 - _DIGIT, -1, -_DIGIT):
        here = (key >> shift + _DIGIT) == prefix
        bins = mass.new_zeros(len(key), _BINS).scatter_add_(1, (key >> shift) & (_BINS - 1), mass * here)
        sums = bins.cumsum(-1) + under
        digit = (sums <= bound).sum(-1, keepdim=True).clamp_(max=_BINS - 1)
        under = (sums - bins).gather(1, digit)
        prefix = (prefix << _DIGIT) | digit
    return prefix
