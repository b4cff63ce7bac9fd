"""Linear layers for a few rows, attention, and recurrent layers, by the fastest paths."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmspec.kernels import few_rows
from mmspec.kernels import reference_recurrent as recurrent
from mmspec.modes import computed_in

ENTRIES = 1 << 14  # size of a weight from which `few_rows` is faster


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` of x [..., K] with a weight [N, K]; a few rows on a CPU by `few_rows`, which rounds differently."""
    rows = x.numel() // x.shape[-1] if x.numel() else 0
    few = 0 < rows <= few_rows.ROWS and gains(x, weight) and (bias is None or not few_rows.learns(bias))
    return few_rows.linear(x, weight, bias) if few else F.linear(x, weight, bias)


def fits(weight: Tensor) -> bool:
    """Whether `few_rows` can use a weight: a plain, contiguous float32 tensor on a CPU, large enough.

    16-bit weights use torch's products, since there the rounding more often decides which token is the likeliest.
    """
    plain = type(weight) in (Tensor, nn.Parameter) and weight.dtype is torch.float32 and weight.is_cpu
    large = plain and weight.numel() >= ENTRIES and weight.is_contiguous()
    return large and few_rows.available(torch.float32)


def gains(x: Tensor, weight: Tensor) -> bool:
    """Whether to use `few_rows`: the weight `fits`, x is plain, and no tracing, autocast or grad is on."""
    plain = type(x) is Tensor and x.dtype is torch.float32 and x.is_cpu
    return plain and _plain(x, weight) and fits(weight)


class Linear(nn.Linear):
    """An `nn.Linear` that computes with `linear`."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


# -- attention; heads may share keys and values, and captured graphs are cut here --------------------------------------

# (layer, scale, q, k, v of the new rows, and optionally the mask of the rows that they see) → like q
LayerAttention = Callable[..., Tensor]


def sdpa(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, scale: float | None = None, causal: bool = False
) -> Tensor:
    """Scaled dot-product attention with grouped query heads (GQA, Ainslie et al. 2023).

    Args:
        q: [B, heads, n, D]; k [B, kv_heads, T, D] and v [B, kv_heads, T, E], where kv_heads divides heads.
        mask: bool, true where visible, or additive; [B or 1, 1, n, T].
        scale: of the scores; None: 1/√D.
        causal: without a mask, T = n tokens each see themselves and those before.

    Returns:
        [B, heads, n, E], with the memory layout [B, n, heads, E].
    """
    few = q.is_cpu and not causal and q.shape[1] // k.shape[1] * q.shape[2] <= few_rows.ROWS
    if few and _plain(q, k, v) and few_rows.attends(q, k, v, mask):
        return few_rows.attend(q, k, v, mask, q.shape[-1] ** -0.5 if scale is None else scale).transpose(1, 2)
    grouped = q.shape[1] != k.shape[1]
    if grouped and not _served(q, mask):
        if not causal:
            return folded(q, k, v, mask, scale)
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
        grouped = False
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, is_causal=causal, enable_gqa=grouped)
    return out.transpose(1, 2).contiguous().transpose(1, 2)


def _plain(*tensors: Tensor) -> bool:
    """Whether no tracing, autocast or grad is on for these tensors; `mmspec/compile/products.py` serves traced ones."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() or torch.is_autocast_enabled("cpu"):
        return False
    return not few_rows.learns(*tensors)


def _served(q: Tensor, mask: Tensor | None) -> bool:
    """Whether torch's own GQA is fast: on a CPU for more than one query, elsewhere only with flash attention."""
    return q.shape[2] > 1 if q.device.type == "cpu" else mask is None and q.dtype != torch.float32


def folded(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, scale: float | None = None) -> Tensor:
    """`sdpa` with the heads of a group stacked as queries of one head, so that no key is repeated."""
    (_, heads, n, _), groups = q.shape, k.shape[1]
    share = heads // groups
    q = q.unflatten(1, (groups, share)).flatten(2, 3)
    if mask is not None and n > 1:
        mask = mask.repeat(1, 1, share, 1)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return out.unflatten(2, (share, n)).permute(0, 3, 1, 2, 4).flatten(2, 3).contiguous().transpose(1, 2)


@torch.library.custom_op("mmspec::attend", mutates_args=())
def attend(layer: int, scale: float, q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None = None) -> Tensor:
    """A placeholder for an attention while a function is captured: q [B, heads, n, D], k and v [B, kv_heads, n, D].

    A mask that the function itself computes is passed on as `seen`; without one the attention is called with five
    arguments. The result has the memory layout [B, n, heads, D], as the attention that replaces it must have.
    """
    B, heads, n, _ = q.shape
    return q.new_zeros(B, n, heads, v.shape[3]).transpose(1, 2)


@attend.register_fake
def _(layer: int, scale: float, q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None = None) -> Tensor:
    B, heads, n, _ = q.shape
    return q.new_empty(B, n, heads, v.shape[3]).transpose(1, 2)


def cut(layer: int, scale: float, q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None = None) -> Tensor:
    """`attend` in the dtype in which attention is computed here, since autocast does not apply to custom ops."""
    return attend(layer, scale, q.to(computed_in(q.dtype, q.device)), k, v, seen)


# -- recurrent layers --------------------------------------------------------------------------------------------------


def scan(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, g: Tensor, state: Tensor, ancestors: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The nodes of a tree through a layer with a recurrent state: the reads o and writes u of `recurrent_tree`, and
    the decay G of `path_decay`.

    Args:
        g: log decay of each node, [B, H, n] or [B, H, n, K]; the others as in `kernels/reference_recurrent.py`.
    """
    if few_rows.scans(q, k, v, g, state):
        o, u, G = few_rows.scan(q, k, v, beta, g, state, ancestors)
        return o.transpose(1, 2), u, G
    G = recurrent.path_decay(g, ancestors)
    return *recurrent.recurrent_tree(q, k, v, beta, G, state, ancestors), G
