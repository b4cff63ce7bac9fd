"""Variants of each operation to time: the kernel, its reference definition, and torch's own if there is one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks import kernel_cases as cases
from mmspec.kernels import dispatch, reference

Call = Callable[[], cases.Result]


@dataclass(frozen=True)
class KernelMethod:
    """One way to compute an operation.

    Attributes:
        prepare: does the work that a caller would do once, and returns the call to time.
        shown: converts the call's result to that of the definition.
    """

    prepare: Callable[[], Call]
    shown: Callable[[cases.Result], cases.Result] = lambda result: result


def contenders(name: str, given: cases.Arguments, compiled: bool) -> Iterator[tuple[str, dict[str, KernelMethod]]]:
    """The contenders for an operation and their variants, by name; each has its own copy of the arguments."""
    definition = getattr(reference, name)
    yield "triton", {"": KernelMethod(lambda: cases.bound(name, dispatch.chosen(name, "cuda", "triton"), given))}
    yield "definition", {"": KernelMethod(lambda: cases.bound(name, definition, given))}
    if compiled:
        yield "compiled", {"": KernelMethod(lambda: cases.bound(name, torch.compile(definition, dynamic=False), given))}
    if name == "tree_attention":
        yield "sdpa", _sdpa(given)
        if given["q"].is_cuda:
            yield "flex", _flex(given)


def _visible(given: cases.Arguments, b: Tensor, i: Tensor, slot: Tensor) -> Tensor:
    """Whether query i of row b sees a slot."""
    node, words = slot - given["lengths"][b], given["bits"].shape[2]
    word = given["bits"][b, i, (node.clamp(min=0) // 64).clamp(max=words - 1)]
    return (node < 0) | ((node < 64 * words) & (((word >> (node & 63)) & 1) == 1))


def _mask(given: cases.Arguments) -> Tensor:
    """Bool [B, n, T], which slots each query sees."""
    sizes = (len(given["q"]), given["q"].shape[2], given["keys"].shape[2])
    index = (torch.arange(size, device=given["q"].device) for size in sizes)
    return _visible(given, *torch.meshgrid(*index, indexing="ij"))


def _finite(given: cases.Arguments) -> list[Tensor]:
    """Queries, keys and values; torch needs finite values even where no query looks."""
    return [given["q"], given["keys"].nan_to_num(), given["values"].nan_to_num()]


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """An additive mask whose rows are aligned to 16 bytes, as fused kernels require."""
    width = -(-mask.shape[-1] // 16) * 16
    numbers = torch.zeros(*mask.shape[:-1], width, dtype=dtype, device=mask.device)
    return numbers[..., : mask.shape[-1]].masked_fill_(~mask, -torch.inf)


def _sdpa(given: cases.Arguments) -> dict[str, KernelMethod]:
    """SDPA with repeated keys and values, stacked queries of a group, or torch's grouping; with either kind of mask."""
    groups, n = given["keys"].shape[1], given["q"].shape[2]
    share = given["q"].shape[1] // groups

    def prepare(grouping: str, added: bool) -> Call:
        (q, k, v), mask = _finite(given), _mask(given)[:, None]
        if grouping == "K and V repeated":
            k, v = (t.repeat_interleave(share, 1) for t in (k, v))
        elif grouping == "queries packed":
            q, mask = q.unflatten(1, (groups, share)).flatten(2, 3), mask.repeat(1, 1, share, 1)
        mask = _added(mask, q.dtype) if added else mask
        attend = torch.nn.functional.scaled_dot_product_attention
        return lambda: attend(q, k, v, attn_mask=mask, enable_gqa=grouping == "enable_gqa")

    def unpacked(out: cases.Result) -> Tensor:
        assert isinstance(out, Tensor)
        return out.unflatten(2, (-1, n)).flatten(1, 2)

    return {
        f"{grouping}, {kind} mask": KernelMethod(lambda g=grouping, a=kind == "added": prepare(g, a), unpacked)  # type: ignore[misc]
        for grouping in ("K and V repeated", "queries packed", "enable_gqa")
        for kind in ("bool", "added")
    }


def _flex(given: cases.Arguments) -> dict[str, KernelMethod]:
    """Flex attention with a prepared block mask; inside a block, from the tree's bits or from a mask in memory."""

    def prepare(dense: bool) -> Call:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        (q, k, v), seen = _finite(given), _mask(given)

        def sees(b: Tensor, h: Tensor, i: Tensor, slot: Tensor) -> Tensor:
            return seen[b, i, slot] if dense else _visible(given, b, i, slot)

        mask = create_block_mask(sees, q.shape[0], None, q.shape[2], k.shape[2], device=str(q.device))
        attend = torch.compile(flex_attention, dynamic=False)
        return lambda: attend(q, k, v, block_mask=mask, enable_gqa=True)

    return {"tree bits": KernelMethod(lambda: prepare(False)), "mask in memory": KernelMethod(lambda: prepare(True))}
