"""Indexers that choose among blocks or pools of the cache (MiniMax-M3, GLM-5-next): what padding does to them."""

from __future__ import annotations

from torch import Tensor

from mmspec.pipelines.host.kinds import PretrainedConfig


def why(config: PretrainedConfig, mask: Tensor) -> str | None:
    """Padding whose blocks tie, where stock's sort chooses among them, or that shifts all pools; None: neither."""
    blocks = "minimax_m3_sparse" in (getattr(config, "layer_types", None) or ())
    if not (blocks or getattr(config, "index_kpool", None)):
        return None
    padding = (mask.cumsum(1) == 0).sum(1)
    if not blocks:
        pools = "its indexer counts pools from the first token on; leave out the padding that all rows have"
        return pools if int(padding.min()) else None
    size, most = config.index_block_size, int(padding.max())
    if most < size:
        return None
    return (
        f"its indexer chooses among blocks of {size} slots, and a row has {most} slots of padding; such blocks tie, "
        f"and stock breaks ties as its sort pleases. Batch prompts that differ by fewer than {size} tokens"
    )
