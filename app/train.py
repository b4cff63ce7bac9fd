"""`mmspec train`: distil a drafter from a frozen target."""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch

from mmspec.app import embedded
from mmspec.app.engine import find_device
from mmspec.registry import DRAFTERS, drafter_class
from mmspec.train.data import read
from mmspec.train.distil import Distillation
from mmspec.train.recipes import RECIPES, EagleRecipe
from mmspec.types import FINAL


def configure(parser: argparse.ArgumentParser) -> None:
    trained = [name for name, entry in DRAFTERS.items() if entry.trained]
    parser.add_argument("--method", choices=trained, default="eagle")
    parser.add_argument("--target", required=True, help="folder or hub name of the model to draft for")
    parser.add_argument(
        "--data",
        required=True,
        help="folder of images, .jsonl with image and prompt, hf:owner/name[:split], or scenes:N; for a model that "
        "draws: prompts:FILE (one per line; class numbers for a class-conditional model) or pictures:N",
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the run; rerun the command to resume")
    parser.add_argument("--recipe", choices=sorted(RECIPES), help="default: the published recipe of the method")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="change values of the recipe")
    parser.add_argument("--intermediate", type=int, help="width of the drafter's MLP; default: the target's")
    parser.add_argument("--limit", type=int, help="use at most so many samples")
    parser.add_argument("--device", default="auto")


def _recipe(args: argparse.Namespace) -> EagleRecipe:
    recipe = RECIPES[args.recipe or (f"{args.method}-image" if draws(args.target, args.data) else args.method)]
    types = {f.name: type(getattr(recipe, f.name)) for f in fields(recipe)}
    changes: dict[str, Any] = {}
    for item in args.set:
        name, _, value = item.partition("=")
        kind = types.get(name, str)
        changes[name] = value.lower() in ("1", "true", "yes") if kind is bool else kind(value)
    return recipe.with_(**changes)


def draws(target: str, data: str) -> bool:
    """Whether a target makes pictures: it is a diffusers pipeline, or the data are bare prompts."""
    return data.startswith(("prompts:", "pictures:")) or (Path(target) / "model_index.json").is_file()


# An EAGLE layer with norms throughout, on the final feature: what is trained here.
NORMED: dict[str, Any] = {
    "features": (FINAL,), "input_norm": True, "embed_norm": True, "out_norm": True, "fc_bias": False,
}  # fmt: skip


def build(method: str, model: Any, intermediate: int | None) -> Any:
    """An untrained drafter in the shape of the target's own decoder layer, with norms throughout."""
    from mmspec.drafters.eagle import EagleConfig
    from mmspec.pipelines.families import home

    c, info = model.get_decoder().config, home(model).describe(model)
    theta = (getattr(c, "rope_parameters", None) or {}).get("rope_theta", 10000.0)
    config = EagleConfig(
        hidden=info.hidden,
        intermediate=intermediate or c.intermediate_size,
        heads=c.num_attention_heads,
        kv_heads=c.num_attention_heads,
        head_dim=getattr(c, "head_dim", None) or info.hidden // c.num_attention_heads,
        vocab=info.vocab,
        rope_theta=float(theta),
        norm_eps=float(getattr(c, "rms_norm_eps", 1e-6)),
        **NORMED,
        target=info.name,
        target_revision=getattr(model.config, "_commit_hash", None) or "",
    )
    return drafter_class(method)(config)


def build_for_pictures(method: str, pipe: Any, intermediate: int | None) -> Any:
    """An untrained drafter in the shape of a LlamaGen's own layer, rows and columns as its positions."""
    from mmspec.drafters.eagle import EagleConfig
    from mmspec.pipelines.families import home

    c, info = pipe.transformer.config, home(pipe).describe(pipe)
    config = EagleConfig(
        hidden=c.dim,
        intermediate=intermediate or pipe.transformer.layers[0].feed_forward.w2.in_features,
        heads=c.heads,
        kv_heads=c.heads,
        vocab=c.vocab,
        rope="2d",
        grid=c.grid,
        rope_theta=c.rope_base,
        norm_eps=c.norm_eps,
        **NORMED,
        target=info.name,
    )
    return drafter_class(method)(config)


def train(model: Any, processor: Any, method: str, data: str, out: Path, recipe: EagleRecipe, **options: Any) -> Any:
    """Train a drafter for a loaded model and write it to `out`; returns it. Resumes what `out` already holds.

    Without a processor the model is a pipeline that draws.
    """
    from mmspec.pipelines.image_teacher import ImageTeacher
    from mmspec.pipelines.teacher import Teacher

    torch.manual_seed(recipe.seed)
    shaped = build if processor else build_for_pictures
    drafter = options.get("drafter") or shaped(method, model, options.get("intermediate"))
    samples = read(data, options.get("limit"), recipe.seed)
    began = time.monotonic()
    features = drafter.features
    with Teacher(model, processor, features) if processor else ImageTeacher(model, features) as teacher:
        drafter.to(model.device)
        run = Distillation(drafter, teacher, samples, recipe, out)
        tau = run.run()
    if run.accelerator.is_main_process:
        drafter.save_pretrained(out / "drafter")
        report = {
            "held_out_tau": tau,
            "minutes": (time.monotonic() - began) / 60,
            "recipe": asdict(recipe),
            "data": data,
        }
        part = out / "report.json.part"
        part.write_text(json.dumps(report, indent=2))
        os.replace(part, out / "report.json")
        kind = "drawn chain" if recipe.overlap else "chain"
        print(f"held-out tau {tau:.2f} ({kind} of {recipe.unroll}, bonus token included); drafter in {out / 'drafter'}")
    return drafter


def _opened(target: str, pictures: bool, dtype: torch.dtype) -> tuple[Any, Any]:
    """A model and its processor, or a pipeline and None."""
    if pictures:
        from mmspec.pipelines.llamagen import LlamaGenPipeline

        pipe = LlamaGenPipeline.from_pretrained(target, torch_dtype=dtype)
        pipe.set_progress_bar_config(disable=True)
        return pipe, None
    from transformers import AutoModelForImageTextToText, AutoProcessor

    return AutoModelForImageTextToText.from_pretrained(target, dtype=dtype), AutoProcessor.from_pretrained(target)


def run(args: argparse.Namespace) -> int:
    device = find_device(args.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model, processor = _opened(embedded.resolve(args.target), draws(args.target, args.data), dtype)
    model.to(device)
    train(
        model,
        processor,
        args.method,
        args.data,
        args.out,
        _recipe(args),
        intermediate=args.intermediate,
        limit=args.limit,
    )
    return 0
