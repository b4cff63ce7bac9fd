"""Finds padding that changes the choices of indexers over blocks or pools of the cache (MiniMax-M3, GLM-5-next)."""

from __future__ import annotations

from torch import Tensor

from mmspec.pipelines.host.kinds import PretrainedConfig


def why(config: PretrainedConfig, mask: Tensor) -> str | None:
    """Why padding in this mask changes an indexer's choice: its blocks tie, or it shifts all pools; None: neither."""
    blocks = "minimax_m3_sparse" in (getattr(config, "layer_types", None) or ())
    if not (blocks or getattr(config, "index_kpool", None)):
        return None
    padding = (mask.cumsum(1) == 0).sum(1)
    if not blocks:
        pools = "its indexer counts pools from the first slot on; remove the padding that all rows have"
        return pools if int(padding.min()) else None
    size, most = config.index_block_size, int(padding.max())
    if most < size:
        return None
    return (
        f"its indexer selects blocks of {size} slots, and a row has {most} slots of padding; such blocks tie, and in "
        f"stock the order of ties depends on the sort. Batch prompts that differ by fewer than {size} tokens"
    )
