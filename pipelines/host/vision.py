"""Finds a model's vision tower, and which tokens of a prompt are placeholders of which image or video frame."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mmspec.pipelines.host.decoder import embedding
from mmspec.pipelines.host.kinds import GenerativeModel, PretrainedConfig

# kind → names of its token in the config, and names of the arguments with its grids of patches and its pixels
_KINDS = {
    "image": (("image_token_id", "image_token_index"), "image_grid_thw", "pixel_values"),
    "video": (("video_token_id", "video_token_index"), "video_grid_thw", "pixel_values_videos"),
}
_AXES = {"image": 4, "video": 5}  # images [n, 3, height, width], clips [n, frames, 3, height, width]


def placeholders(config: PretrainedConfig) -> list[int]:
    """Token ids that are placeholders for visual features in a prompt."""
    return sorted({token for names, *_ in _KINDS.values() for token in _tokens(config, names)})


def mask_token(model: GenerativeModel) -> int:
    """A token that does not occur in text: the padding token, or the placeholder of pictures.

    A padding token whose embedding is zero is not used: all positions of a drafted block would be the same.
    """
    padding, table = getattr(model.get_decoder().config, "pad_token_id", None), embedding(model).weight
    known = [*([] if padding is None else [padding]), *placeholders(model.config), len(table) - 1]
    return next(i for i in known if i == known[-1] or (i < len(table) and bool(table[i].any())))


def media(ids: Tensor, config: PretrainedConfig, arguments: Mapping[str, Any]) -> Tensor:
    """int64 [B, L]: k ≥ 1 at the tokens of a row's k-th image or video frame, 0 at all others.

    Borders between adjacent media are found from the grids of patches, from the vision tower's output for each, or by
    equal division among the images (a tile then counts as an image); borders between frames also from the times in the
    position ids. If none of these is there, adjacent placeholders are one medium.

    Args:
        ids: [B, L], padded on either side.
        config: the model's.
        arguments: of the model's forward, or those of `generate` that are passed on to it.
    """
    begins, visual = torch.zeros_like(ids, dtype=torch.bool), torch.zeros_like(ids, dtype=torch.bool)
    for kind, (names, *_) in _KINDS.items():
        here = torch.isin(ids, torch.tensor(_tokens(config, names), device=ids.device, dtype=ids.dtype))
        run = here.clone()  # true at the first token of each run
        run[:, 1:] &= ~here[:, :-1]
        place = here.flatten().nonzero()[:, 0]
        sizes = _sizes(kind, config, arguments, len(place))
        if sizes is not None and int(sizes.sum()) == len(place) and int(sizes.min()) > 0:
            first = place[(sizes.cumsum(0) - sizes).to(place.device)]
            borders = torch.zeros_like(run).flatten().index_fill(0, first, True).view_as(run)
            run = run | borders if bool((borders | ~run).all()) else run  # each run has to begin with a medium
        begins, visual = begins | run | (_new_time(arguments, ids) & here), visual | here
    return begins.cumsum(1) * visual


def tower(model: GenerativeModel) -> nn.Module | None:
    """The vision tower, if the model has one that attends by sdpa: a trace does not see other packages' kernels."""
    found: Any = model.get_encoder(modality="image")
    if found is model or found is model.base_model or not isinstance(found, nn.Module):
        return None
    return found if getattr(getattr(found, "config", None), "_attn_implementation", "") == "sdpa" else None


def encoded(model: GenerativeModel) -> set[str]:
    """Names of the arguments that a model's vision tower reads, found in the same way as by stock."""
    base = getattr(model, "base_model", model)
    towers = [getattr(base, f"get_{kind}_features", None) for kind in _KINDS]
    return {name for read in towers if read is not None for name in inspect.signature(read).parameters}


def by_row(pictures: Mapping[str, Tensor], ids: Tensor, config: PretrainedConfig) -> list[dict[str, Tensor]] | None:
    """Split the vision tower's inputs for a batch [B, L] by row; None: that is not possible."""
    B = len(ids)
    if B == 1 or not pictures:
        return [dict(pictures) for _ in range(B)]
    rows: list[dict[str, Tensor]] = [{} for _ in range(B)]
    rest = dict(pictures)
    for kind, (names, grids, pixels) in _KINDS.items():
        here = torch.isin(ids, torch.tensor(_tokens(config, names), device=ids.device, dtype=ids.dtype)).sum(1)
        grid, images = rest.get(grids), rest.get(pixels)
        if images is None or (grid is None and images.dim() != _AXES[kind]):
            continue
        if grid is None:
            patches = torch.ones(len(images), dtype=torch.long, device="cpu")
            sizes = _sizes(kind, config, pictures, int(here.sum()))
        else:
            patches = grid.prod(1).cpu()
            sizes = patches // getattr(config.vision_config, "spatial_merge_size", 1) ** 2
        counts = None if sizes is None else _counts(here.tolist(), sizes.tolist())
        if counts is None or int(patches.sum()) != len(images):
            return None
        of_kind = {name: t for name, t in rest.items() if name == grids or (grid is None and name == pixels)}
        shares = {name: t.split(counts) for name, t in of_kind.items()}
        if grid is not None:
            shares[pixels] = images.split([int(part.sum()) for part in patches.split(counts)])
        for row, parts in enumerate(zip(*shares.values(), strict=True)):
            rows[row] |= {name: part for name, part in zip(shares, parts, strict=True) if counts[row]}
        rest = {name: t for name, t in rest.items() if name not in shares}
    each = (media(ids, config, {}) > 0).any(1).all()
    if any(not t.dim() or len(t) != B for t in rest.values()) or (rest and not each):  # not one for each row
        return None
    return [own | {name: t[row : row + 1] for name, t in rest.items()} for row, own in enumerate(rows)]


def _counts(tokens: list[int], sizes: list[int]) -> list[int] | None:
    """How many media each row has, from its number of placeholders and the media's sizes in order; None: no match."""
    left, counts = list(sizes), []
    for remaining in tokens:
        before = len(left)
        while remaining > 0 and left:
            remaining -= left.pop(0)
        if remaining:
            return None
        counts.append(before - len(left))
    return None if left else counts


def _tokens(config: PretrainedConfig, names: tuple[str, ...]) -> list[int]:
    return sorted({token for name in names if (token := getattr(config, name, None)) is not None})


def _sizes(kind: str, config: PretrainedConfig, arguments: Mapping[str, Any], tokens: int) -> Tensor | None:
    """The number of tokens of each medium of a kind, in the order of the batch; None: unknown."""
    _, grids, pixels = _KINDS[kind]
    grid, images = arguments.get(grids), arguments.get(pixels)
    merge = getattr(getattr(config, "vision_config", None), "spatial_merge_size", None)
    if grid is not None and merge:  # frames, rows and columns of patches
        return (grid[:, 1] * grid[:, 2] // merge**2).repeat_interleave(grid[:, 0])
    encoded = getattr((arguments.get("mm_encoder_outputs") or {}).get(kind), "pooler_output", None)
    if encoded is not None and len(encoded) and all(isinstance(one, Tensor) and one.dim() == 2 for one in encoded):
        return torch.tensor([len(one) for one in encoded], device="cpu")
    if isinstance(images, Tensor) and images.dim() == _AXES[kind]:
        count = images.shape[:-3].numel()
        return torch.full((count,), tokens // count, device="cpu") if count and tokens % count == 0 else None
    return None


def _new_time(arguments: Mapping[str, object], ids: Tensor) -> Tensor:
    """bool [B, L]: whether a token's time differs from that of the one before, by M-RoPE positions [3 or 4, B, L]."""
    new, positions = torch.zeros_like(ids, dtype=torch.bool), arguments.get("position_ids")
    if isinstance(positions, Tensor) and positions.dim() == 3 and positions.shape[1:] == ids.shape:
        new[:, 1:] = positions[-3].diff(dim=-1) != 0
    return new
