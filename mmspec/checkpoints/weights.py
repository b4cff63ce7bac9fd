"""Conversion between a layout's tensors and a drafter: strict checks of keys and shapes; projections fused or split."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from mmspec.checkpoints.layout import Layout
from mmspec.drafters.dflash import BlockDrafter
from mmspec.drafters.eagle import EagleConfig
from mmspec.drafters.feature import FeatureDrafter
from mmspec.drafters.heads import HeadsDrafter
from mmspec.drafters.trained import FileConfig, TrainedConfig

TrainedDrafter = FeatureDrafter | BlockDrafter | HeadsDrafter
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # dtypes in which a drafter can run


def check_keys(layout: Layout, found: Collection[str], ours: Collection[str] | None = None) -> None:
    """Check for missing and extra tensors.

    Args:
        layout: the file's layout.
        found: names in the file.
        ours: our tensors that must be there; None: those that are not optional; an optional one must be complete.

    Raises:
        ValueError: with both lists.
    """
    allowed = set(layout.keys if ours is None else ours)
    lacks = {name for name in layout.optional if not any(theirs in found for theirs in layout.theirs(name))}
    wanted = allowed - lacks if ours is None else allowed
    needed = {theirs for name in wanted for theirs in layout.theirs(name)}
    names = {theirs for name in allowed for theirs in layout.theirs(name)}
    missing = sorted(needed - set(found))
    extra = sorted(key for key in set(found) - names if not layout.drops(key))
    if missing or extra:
        raise ValueError(
            f"the tensors do not fit ({layout.about}): missing: {', '.join(missing) or 'none'}; "
            f"extra: {', '.join(extra) or 'none'}. Is the file complete, and of this layout?"
        )


def build(layout: Layout, tensors: dict[str, Tensor], cls: type[FeatureDrafter], config: EagleConfig) -> FeatureDrafter:
    """A drafter of this class with these tensors, in their dtypes; only tensors that are fused are copied.

    Raises ValueError: a missing or extra tensor, a wrong shape, its own embedding, or token ids outside the vocabulary.
    """
    with torch.device("meta"):
        drafter: FeatureDrafter = cls(config)
    expected = drafter.state_dict()
    tensors = {**_zeros(layout, tensors, config), **tensors}
    check_keys(layout, tensors, expected)
    _check_shapes(layout, tensors, expected, config)
    _check_embedding(layout, tensors, config)
    fused = {}
    for ours in expected:
        parts = [tensors[theirs] for theirs in layout.theirs(ours)]
        fused[ours] = parts[0] if len(parts) == 1 else torch.cat(parts)
    if "head.ids" in fused:
        fused["head.ids"] = _target_ids(layout, fused["head.ids"].long(), tensors.get("t2d"), config)
    drafter.load_state_dict(fused, assign=True)
    return drafter


def _zeros(layout: Layout, found: Mapping[str, Tensor], config: EagleConfig) -> dict[str, Tensor]:
    """Tensors that a file may omit because they are all zeros."""
    zeros = {}
    if "head.ids" in layout.optional and config.draft_vocab == config.vocab:  # the head has every row, in order
        zeros["d2t"] = torch.zeros(config.vocab, dtype=torch.long)
    if _one_bias_switch(layout, config):
        zeros["img_fc.bias"] = torch.zeros(config.hidden, dtype=found["img_fc.weight"].dtype)
    return zeros


def _one_bias_switch(layout: Layout, config: FileConfig) -> bool:
    """Whether ViSpec's `img_fc` has no bias in this layout because `fc` has none; mmspec's always has one."""
    return "img_fc.bias" in layout.optional and not getattr(config, "fc_bias", True)


def split(layout: Layout, drafter: TrainedDrafter) -> dict[str, Tensor]:
    """The drafter's tensors in a layout, contiguous and on the CPU; token ids as offsets if the layout has `d2t`.

    Raises ValueError: the layout cannot represent one of them.
    """
    tensors: dict[str, Tensor] = {}
    config = drafter.config
    for ours, tensor in drafter.state_dict().items():
        theirs = layout.theirs(ours)
        parts: Sequence[Tensor] = [tensor]
        if isinstance(config, TrainedConfig) and len(theirs) > 1:
            parts = tensor.split(_rows(config, ours))
        tensors.update(zip(theirs, parts, strict=True))
    if "d2t" in tensors:
        ids = tensors["d2t"].cpu()
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(config.vocab, dtype=torch.bool).index_fill_(0, ids, True)
    if _one_bias_switch(layout, config) and tensors.pop("img_fc.bias").any():
        raise ValueError(f"{layout.about}, has a bias in img_fc only where fc has one. Use layout 'mmspec'")
    return {key: tensor.detach().cpu().contiguous().clone() for key, tensor in tensors.items()}


def _rows(c: TrainedConfig, ours: str) -> list[int]:
    """The number of rows of each part of one of our fused tensors."""
    width = c.head_dim or c.hidden // c.heads
    return {
        "kv": [c.heads * width, c.heads * width],
        "qkv": [c.heads * width, c.kv_heads * width, c.kv_heads * width],
        "gate_up": [c.intermediate, c.intermediate],
    }[ours.split(".")[-2]]


def _check_shapes(
    layout: Layout, found: Mapping[str, Tensor], expected: Mapping[str, Tensor], config: EagleConfig
) -> None:
    wrong = []
    for ours, whole in expected.items():
        theirs = layout.theirs(ours)
        parts = [(n, *whole.shape[1:]) for n in _rows(config, ours)] if len(theirs) > 1 else [tuple(whole.shape)]
        for key, shape in zip(theirs, parts, strict=True):
            if tuple(found[key].shape) != shape:
                wrong.append(f"{key} is {list(found[key].shape)}, expected {list(shape)}")
            elif found[key].is_floating_point() != whole.is_floating_point():
                kind = "floats" if whole.is_floating_point() else "int64"
                wrong.append(f"{key} holds {found[key].dtype}, expected {kind}")
            elif whole.is_floating_point() and found[key].dtype not in FLOATS:
                wrong.append(
                    f"{key} holds {found[key].dtype}, expected float32, bfloat16 or float16: write it in one of these"
                )
    if wrong:
        raise ValueError(f"wrong shapes or types: {'; '.join(wrong)}")


def _check_embedding(layout: Layout, tensors: Mapping[str, Tensor], config: EagleConfig) -> None:
    """A drafter reads its target's embedding: a copy in the file is dropped, one of another width is an error."""
    embedding = tensors.get("embed_tokens.weight") if layout.keys else None
    width = getattr(config, "target_hidden", 0) or config.hidden
    if embedding is not None and tuple(embedding.shape[1:]) != (width,):
        raise ValueError(
            f"embed_tokens.weight is {list(embedding.shape)}, expected {[config.vocab, width]}: this drafter has "
            "its own embedding, of another width than its target's; mmspec supports only drafters with the target's"
        )


def _target_ids(layout: Layout, ids: Tensor, marked: Tensor | None, config: EagleConfig) -> Tensor:
    if layout.keys:
        ids = ids + torch.arange(len(ids), device=ids.device)
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < config.vocab:
        raise ValueError(
            f"{layout.theirs('head.ids')[0]} gives token ids from {int(ids.min())} to {int(ids.max())}, outside the "
            f"vocabulary of {config.vocab}" + ("; it must hold offsets: target id − row" if layout.keys else "")
        )
    if layout.keys and marked is not None and not bool(marked.bool()[ids].all()):
        raise ValueError("d2t and t2d disagree: a token that d2t gives is not marked in t2d")
    return ids
