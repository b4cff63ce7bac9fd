"""What our networks compute with: products of a few rows with a weight, and attention, by torch's fastest paths.

On several threads MKL multiplies 2 to 8 rows of float32 by a weight as `nn.Linear` keeps it, [N, K], in about twice the
time that one row takes. With the weight as the left operand the threads share it, and it is read once: four rows take
little longer than one, and eight less than half as long again (docs/speed.md). No weight is copied.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmspec.modes import computed_in

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
    product = (weight @ x.reshape(rows, -1).t()).t().contiguous().view(*x.shape[:-1], -1)
    return product if bias is None else product + bias


def fits(weight: Tensor) -> bool:
    """Whether the order matters to a weight: a plain float32 tensor on a CPU, too large for its cache."""
    plain = type(weight) in (Tensor, nn.Parameter) and weight.dtype == torch.float32
    return _HAS_MKL and plain and weight.device.type == "cpu" and weight.numel() >= ENTRIES


def gains(x: Tensor, weight: Tensor) -> bool:
    """Whether the weight comes first: such a weight, a plain input, and nobody traces the product or casts it."""
    plain = type(x) is Tensor and x.dtype == torch.float32 and x.device.type == "cpu"
    if not (fits(weight) and plain) or torch._C._len_torch_dispatch_stack() or torch.is_autocast_enabled("cpu"):
        return False
    return not (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad))


class Linear(nn.Linear):
    """An `nn.Linear` that multiplies by `linear`."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


# -- attention; heads may share keys and values, and a capture is cut here ---------------------------------------------

# Layer, scale, q, k, v of the new rows and, where that is computed, which rows these see → like q.
LayerAttention = Callable[..., Tensor]


def sdpa(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, scale: float | None = None, causal: bool = False
) -> Tensor:
    """Heads in groups, each with keys and values of its own (Ainslie et al. 2023).

    Args:
        q: [B, heads, n, D]; k [B, kv_heads, T, D] and v [B, kv_heads, T, E], where kv_heads divides heads.
        mask: bool, true where visible, or additive; [B or 1, 1, n, T].
        scale: of the scores; None: 1/√D.
        causal: without a mask, T = n tokens each see themselves and those before.

    Returns:
        [B, heads, n, E], which lies in memory as [B, n, heads, E].
    """
    grouped = q.shape[1] != k.shape[1]
    if grouped and not _served(q, mask):
        if not causal:
            return folded(q, k, v, mask, scale)
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
        grouped = False
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, is_causal=causal, enable_gqa=grouped)
    return out.transpose(1, 2).contiguous().transpose(1, 2)


def _served(q: Tensor, mask: Tensor | None) -> bool:
    """Whether torch is fast with groups as they are: on a CPU but for one query, elsewhere flash attention alone."""
    return q.shape[2] > 1 if q.device.type == "cpu" else mask is None and q.dtype != torch.float32


def folded(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, scale: float | None = None) -> Tensor:
    """As `sdpa`, the heads of a group below each other as queries of one head: no key is repeated, no score kept."""
    (_, heads, n, _), groups = q.shape, k.shape[1]
    share = heads // groups
    q = q.unflatten(1, (groups, share)).flatten(2, 3)
    if mask is not None and n > 1:
        mask = mask.repeat(1, 1, share, 1)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return out.unflatten(2, (share, n)).permute(0, 3, 1, 2, 4).flatten(2, 3).contiguous().transpose(1, 2)


@torch.library.custom_op("mmspec::attend", mutates_args=())
def attend(layer: int, scale: float, q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None = None) -> Tensor:
    """Stands for an attention while a function is captured: q [B, heads, n, D], k and v [B, kv_heads, n, D].

    A mask that the function itself computes is passed on as `seen`; without one the attention is called with five
    arguments. The result lies in memory as [B, n, heads, D], and so must that of the attention that replaces it.
    """
    B, heads, n, _ = q.shape
    return q.new_zeros(B, n, heads, v.shape[3]).transpose(1, 2)


@attend.register_fake
def _(layer: int, scale: float, q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None = None) -> Tensor:
    B, heads, n, _ = q.shape
    return q.new_empty(B, n, heads, v.shape[3]).transpose(1, 2)


def cut(layer: int, scale: float, q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None = None) -> Tensor:
    """`attend` in the dtype in which attentions are computed here: autocast would say nothing of it."""
    return attend(layer, scale, q.to(computed_in(q.dtype, q.device)), k, v, seen)
