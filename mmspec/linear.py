"""Products of a few rows with a weight, in the order of operands that a CPU is fastest with.

On several threads MKL multiplies 2 to 8 rows of float32 by a weight as `nn.Linear` keeps it, [N, K], in about twice the
time that one row takes. With the weight as the left operand the threads share it, and it is read once: four rows take
little longer than one, and eight less than half as long again (docs/speed.md). No weight is copied.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ROWS, ROWS_OF_ONE_THREAD = 8, 4  # at most; with more, the usual order is as fast
ENTRIES = 1 << 16  # of a weight, at least; a smaller one stays in the CPU's cache
_HAS_MKL = torch.backends.mkl.is_available()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` of x [..., K] with a weight [N, K]; sums may round otherwise in their last digits."""
    if torch.compiler.is_compiling():  # the compiler chooses an order of its own
        return F.linear(x, weight, bias)
    rows = x.numel() // x.shape[-1] if x.numel() else 0
    if not (1 < rows <= (ROWS if torch.get_num_threads() > 1 else ROWS_OF_ONE_THREAD) and gains(x, weight)):
        return F.linear(x, weight, bias)
    found = (weight @ x.reshape(rows, -1).t()).t().contiguous().view(*x.shape[:-1], -1)
    return found if bias is None else found + bias


def fits(weight: Tensor) -> bool:
    """Whether the order matters to a weight: a plain float32 tensor on a CPU, too large for its cache."""
    plain = type(weight) in (Tensor, nn.Parameter) and weight.dtype == torch.float32
    return _HAS_MKL and plain and weight.device.type == "cpu" and weight.numel() >= ENTRIES


def gains(x: Tensor, weight: Tensor) -> bool:
    """Whether the weight comes first: such a weight, a plain input, and nobody traces the product or casts it."""
    return (
        fits(weight)
        and type(x) is Tensor
        and x.dtype == torch.float32
        and x.device.type == "cpu"
        and torch._C._len_torch_dispatch_stack() == 0
        and not torch.is_autocast_enabled("cpu")
        and not (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad))
    )


class Linear(nn.Linear):
    """An `nn.Linear` that multiplies by `linear`."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)
