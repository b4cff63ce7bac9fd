"""Untrained block drafters in the shape of a target's own layers, for `mmspec train --method dflash` and `dspark`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mmspec.drafters.block_config import BlockConfig
from mmspec.drafters.dflash import BlockDrafter
from mmspec.train.recipes import Recipe

if TYPE_CHECKING:
    from mmspec.pipelines.host.kinds import GenerativeModel

FEATURES = 5  # the least that are read, however few layers a drafter has; that many in most published files
BLOCKS: dict[str, dict[str, Any]] = {  # method: what its published drafters have beside DFlash's layers
    "block": {},
    "dflash": {},
    "dspark": {"markov_rank": 256, "confidence": True, "confidence_markov": True, "anchored": True, "block": 8},
}


def layer_of(model: GenerativeModel, hidden: int, intermediate: int | None) -> dict[str, Any]:
    """The shape of a target's own decoder layer, as configs of drafters have it."""
    c = model.get_decoder().config
    theta = (getattr(c, "rope_parameters", None) or {}).get("rope_theta", 10000.0)
    return {
        "intermediate": intermediate or c.intermediate_size, "heads": c.num_attention_heads,
        "head_dim": getattr(c, "head_dim", None) or hidden // c.num_attention_heads, "rope_theta": float(theta),
        "norm_eps": float(getattr(c, "rms_norm_eps", 1e-6)),
        "target_revision": getattr(model.config, "_commit_hash", None) or "",
    }  # fmt: skip


def layers_read(layers: int, count: int) -> tuple[int, ...]:
    """The decoder layers whose inputs are read: the outputs of `count` layers, evenly to L − 3 (z-lab's code)."""
    last = max(1, layers - 3)
    ids = {round(1 + i * (last - 1) / max(1, count - 1)) if count > 1 else layers // 2 for i in range(count)}
    return tuple(sorted({min(i + 1, layers - 1) for i in ids}))


def mask_token(model: GenerativeModel) -> int:
    """The token whose embedding stands for a mask: the padding's, or that of pictures, which no text holds either.

    A padding token that was never anything else often has an embedding of zeros. Norms keep it so, hence queries of
    zeros: all rows of a block would be one and the same.
    """
    from mmspec.pipelines.host.vision import placeholders

    pad, table = getattr(model.get_decoder().config, "pad_token_id", None), model.get_input_embeddings().weight
    known = [*([] if pad is None else [pad]), *placeholders(model.config), len(table) - 1]
    return next(i for i in known if i == known[-1] or (i < len(table) and bool(table[i].any())))


def build(method: str, model: GenerativeModel, intermediate: int | None, **shape: Any) -> BlockDrafter:
    """An untrained drafter of five layers that read five of the target's.

    Args:
        shape: other values of the drafter's config.

    Raises ValueError: a value that its config does not have, or does not allow; or a mask whose embedding is zero.
    """
    from mmspec.pipelines.families import table as families

    c, info = model.get_decoder().config, families.of(model).describe(model)
    layers = shape.get("layers", 5)
    usual = {
        "hidden": info.hidden, "vocab": info.vocab, "target": info.name, **layer_of(model, info.hidden, intermediate),
        "kv_heads": getattr(c, "num_key_value_heads", None) or c.num_attention_heads, "layers": layers,
        "features": layers_read(info.layers, max(layers, FEATURES)), "mask_token": mask_token(model),
    }  # fmt: skip
    config = BlockConfig.of({**usual, **BLOCKS[method], **shape})
    table, mask = model.get_input_embeddings().weight, config.mask_token
    if not (0 <= mask < len(table) and table[mask].any()):
        raise ValueError(
            f"mask_token {mask} has no embedding, or one of zeros, by which all rows of a block would be the same; "
            "name a token that has one and that no text holds: --shape mask_token=ID"
        )
    return BlockDrafter(config)


def check(drafter: BlockDrafter, recipe: Recipe) -> None:
    """Refuse a block drafter and a recipe that do not go together.

    Raises ValueError: what cannot be learnt here, or more steps than a block drafts.
    """
    c = drafter.config
    if c.selector_rank or c.markov == "rnn":
        raise ValueError("a selector, or a recurrent Markov head, cannot be trained here; leave them out")
    if recipe.unroll > c.most:
        raise ValueError(
            f"a block of {c.block} learns at most {c.most} steps: --set unroll={c.most}, or a larger block"
        )
    if recipe.rollouts:
        raise ValueError("a block drafter has no rollouts: it does not read what it predicts; --set rollouts=0")
