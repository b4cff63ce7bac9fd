"""Builds untrained drafters in the shape of a target's own layers for `mmspec train`, and checks what that is given."""

from __future__ import annotations

from typing import Any

from mmspec.config import Options
from mmspec.drafters.block_config import PUBLISHED, BlockConfig
from mmspec.drafters.dflash import BlockDrafter
from mmspec.drafters.heads import HeadsConfig, HeadsDrafter
from mmspec.pipelines.drafters.mtp import MtpDrafter
from mmspec.pipelines.families import table as families
from mmspec.pipelines.host import wrappers
from mmspec.pipelines.host.decoder import embedding, key_heads, layer_of
from mmspec.pipelines.host.image_models import SIZE, ImageModel
from mmspec.pipelines.host.kinds import GenerativeModel, Processor
from mmspec.pipelines.host.vision import mask_token
from mmspec.protocols import TargetInfo
from mmspec.registry import drafter_class
from mmspec.train.recipes import Recipe
from mmspec.types import FINAL

FEATURES = 5  # minimum number of layers whose features a block drafter reads; the number in most published files
DRAWING = ("eagle", "heads")  # methods for models that draw


def draftable(method: str) -> None:
    """ValueError for a method that does not support models that draw."""
    if method not in DRAWING:
        allowed = " or ".join(map(repr, DRAWING))
        raise ValueError(f"{method!r} is for models that look at pictures; for one that draws them use {allowed}")


def _on_final(method: str, info: TargetInfo, shape: dict[str, Any], **values: object) -> Any:
    """An untrained drafter on the target's final feature, with all norms and no bias."""
    kind = drafter_class(method)
    values = {
        "features": (FINAL,), "input_norm": True, "embed_norm": True, "out_norm": True, "fc_bias": False,
        "hidden": info.hidden, "kv_heads": values["heads"], "vocab": info.vocab, "target": info.name, **values,
    }  # fmt: skip
    return kind(kind.Config.of({**values, **shape}))


def build(method: str, model: GenerativeModel, **shape: object) -> Any:
    """An untrained drafter in the shape of the target's own decoder layer; `mtp` is its own head, or a new one.

    `shape` has other values of the method's config; ValueError if it does not have or does not allow one of them.
    """
    if method == "mtp":
        if shape:
            raise ValueError("'mtp' trains a layer of the target's own classes, in its shape; leave --shape out")
        return MtpDrafter.untrained(model)
    info = families.of(model).describe(model)
    if method in PUBLISHED:
        return _block(method, model, info, **shape)
    return _on_final(method, info, shape, **layer_of(model, info.hidden))


def build_for_pictures(method: str, pipe: Any, **shape: object) -> Any:
    """An untrained drafter in the shape of the image model's own layer; for a LlamaGen, with 2-D positions."""
    draftable(method)
    if isinstance(pipe, ImageModel):
        if method == "heads":
            raise ValueError("'heads' draft for LlamaGen alone; for another model that draws use 'eagle'")
        model, info = _what_draws(pipe)
        return _on_final(method, info, shape, **layer_of(model, info.hidden))
    c, about = pipe.transformer.config, families.of(pipe).describe(pipe)
    if method == "heads":
        streams = 2 if pipe._settings({}, "latent", 1)["guidance_scale"] > 1 else 1
        if shape.get("streams", streams) != streams:
            raise ValueError(f"this pipeline has {streams} streams; got streams={shape['streams']}, so leave it out")
        values = {"hidden": c.dim, "intermediate": 192, "vocab": c.vocab, "grid": c.grid}
        return HeadsDrafter(HeadsConfig.of({**values, "streams": streams, "target": about.name, **shape}))
    return _on_final(
        method, about, shape, heads=c.heads, rope="2d", grid=c.grid, rope_theta=c.rope_base,
        norm_eps=c.norm_eps, intermediate=pipe.transformer.layers[0].feed_forward.w2.in_features,
    )  # fmt: skip


def _what_draws(painter: Any) -> tuple[Any, TargetInfo]:
    """The model or pipeline that draws the tokens, and the TargetInfo that a drafter for its pictures must fit."""
    model: Any = wrappers.unwrap(painter.target) if isinstance(painter, ImageModel) else painter
    family = families.of(model)
    return model, family.pictures(model) or family.describe(model)


def check(drafter: Any, model: Any, processor: Processor | None, recipe: Recipe, drawing: Options) -> None:
    """ValueError for a drafter that cannot be trained for this model, or by this recipe."""
    c = drafter.config
    if processor is None:
        check_drawing(drafter, model, recipe, drawing)
    elif drawing:
        raise ValueError("--draw is for models that draw, and this one generates text; leave it out")
    else:
        drafter.fit(families.of(model).describe(model), {})
    if recipe.confidence_weight and not getattr(c, "confidence", False):
        raise ValueError("confidence_weight is for drafters with a confidence head, as dspark's; leave it out")
    if drafter.method == "block":
        check_block(drafter, recipe)
    heads = getattr(c, "tokens", 1)
    if heads not in (1, recipe.unroll):
        raise ValueError(f"a drafter of {heads} tokens per pass needs {heads} steps: set unroll={heads}, or tokens")


def check_drawing(drafter: Any, painter: Any, recipe: Recipe, settings: Options) -> None:
    """ValueError, before anything is drawn, for a drafter, recipe or setting that does not fit the image model."""
    info = _what_draws(painter)[1]
    drafter.fit(info, {})
    if recipe.vocabulary and info.ends is None:
        raise ValueError(f"vocabulary={recipe.vocabulary}: the head of {info.name} has codes alone, so leave it out")
    if not isinstance(painter, ImageModel) and settings.get(SIZE):
        raise ValueError(f"{SIZE} is for Emu3; a LlamaGen's pictures have a fixed size, so leave it out")
    if drafter.method == "heads" and settings:
        raise ValueError("'heads' train with the pipeline's own settings; leave --draw out, or change its defaults")


def layers_read(layers: int, count: int) -> tuple[int, ...]:
    """The decoder layers whose inputs are read: outputs of `count` layers, evenly spaced up to L − 3 (z-lab's code)."""
    last = max(1, layers - 3)
    ids = {round(1 + i * (last - 1) / max(1, count - 1)) if count > 1 else layers // 2 for i in range(count)}
    return tuple(sorted({min(i + 1, layers - 1) for i in ids}))


def _block(method: str, model: GenerativeModel, info: TargetInfo, **shape: Any) -> Any:
    """An untrained block drafter; by default it has five layers and reads features of five of the target's layers.

    Raises ValueError: a value that its config does not have or does not allow; or a mask without an embedding.
    """
    layers = shape.get("layers", 5)
    usual = {
        "hidden": info.hidden, "vocab": info.vocab, "target": info.name, **layer_of(model, info.hidden),
        "kv_heads": key_heads(model), "layers": layers, "mask_token": mask_token(model),
        "features": layers_read(info.layers, max(layers, FEATURES)),
    }  # fmt: skip
    config = BlockConfig.of({**usual, **PUBLISHED[method], **shape})
    table, mask = embedding(model).weight, config.mask_token
    if not (0 <= mask < len(table) and table[mask].any()):
        raise ValueError(
            f"mask_token {mask} has no embedding, or one of zeros, so that all rows of a block would be the same; "
            "name a token that has one and that does not occur in text: --shape mask_token=ID"
        )
    return BlockDrafter(config)


def check_block(drafter: BlockDrafter, recipe: Recipe) -> None:
    """ValueError for a part that cannot be trained here, or more steps than a block drafts."""
    c = drafter.config
    if c.selector_rank or c.markov == "rnn":
        raise ValueError("a selector, or a recurrent Markov head, cannot be trained here; leave them out")
    if recipe.unroll > c.most:
        raise ValueError(
            f"a block of {c.block} learns at most {c.most} steps: --set unroll={c.most}, or a larger block"
        )
    if recipe.rollouts:
        raise ValueError("a block drafter has no rollouts: it does not read its own predictions; --set rollouts=0")
