"""Trains the embedded models of the zoo and writes them into the package: `python -m benchmarks zoo`."""

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from benchmarks.zoo import card, evaluate, sheets, sources
from benchmarks.zoo import image as zoo_image
from benchmarks.zoo import mar as zoo_mar
from benchmarks.zoo import vlm as zoo_vlm
from benchmarks.zoo import watch as zoo_watch
from benchmarks.zoo.fit import Say
from benchmarks.zoo.recipes.drafters import DRAFTERS, DrafterRecipe
from benchmarks.zoo.recipes.pictures import IMAGES, MARS, ImageRecipe
from benchmarks.zoo.recipes.vlm import RECIPES, VlmRecipe
from mmspec import zoo
from mmspec.app.train import train
from mmspec.checkpoints.files import WEIGHTS
from mmspec.checkpoints.save import save_drafter
from mmspec.pipelines.llamagen.pipeline import LlamaGenPipeline
from mmspec.train import data
from mmspec.train.recipes import RECIPES as HOW
from mmspec.train.recipes import Recipe

KNOWN = [*RECIPES, *IMAGES, *DRAFTERS, *MARS]
WORK = Path("runs/zoo")  # where checkpoints and logs go
data.DRAWN |= sources.DRAWN
TRACES = 2.0  # GB of memory for what a drafter learns from


def journal(work: Path) -> Say:
    """A function that prints a line and appends it to log.txt, with the time of day."""
    work.mkdir(parents=True, exist_ok=True)

    def say(line: str) -> None:
        line = f"{time.strftime('%H:%M:%S')} {line}"
        print(line, flush=True)
        with (work / "log.txt").open("a") as out:
            out.write(line + "\n")

    return say


def train_vlm(recipe: VlmRecipe, out_dir: Path, work: Path) -> None:
    """Train from what the recipe starts with, or on from the checkpoints in `work`; then export to `out_dir`."""
    say = journal(work)
    if recipe.start is not None:
        processor, model = evaluate.load(_begun(recipe.start, work.parent))
    else:
        processor = zoo_vlm.build_processor(recipe, zoo_vlm.build_tokenizer(recipe))
        tower = zoo_vlm.train_tower(recipe, work, say)
        model = zoo_vlm.build_model(recipe)
        zoo_vlm.kind(recipe).tower_of(model).load_state_dict(tower.state_dict())

    if recipe.watching is not None:
        zoo_watch.train(recipe, model, work, say)
    zoo_vlm.train_decoder(recipe, model, processor.tokenizer, work, say)
    zoo_vlm.export(model, processor, out_dir)
    if recipe.head is not None:
        train_head(recipe, HOW[recipe.head], out_dir, work)
    say(f"exported to {out_dir}")


def _begun(name: str, work: Path) -> Path:
    """Folder of the model that another one starts from, trained first if it is not there yet."""
    folder = work / name / "model"
    if not (folder / "config.json").is_file():
        train_vlm(RECIPES[name], folder, work / name)
    return folder


def train_head(recipe: VlmRecipe, how: Recipe, folder: Path, work: Path) -> None:
    """Distil the multi-token-prediction head of an exported model, and put it among the model's own tensors."""
    processor, model = evaluate.load(folder)
    model.config._name_or_path = recipe.name
    told = work / "head"
    train(model, processor, "mtp", recipe.head_data, told, how, answers=work / "answers", keep=TRACES)
    tensors = load_file(folder / WEIGHTS) | {
        name: weight.to(torch.bfloat16) for name, weight in load_file(told / "drafter" / WEIGHTS).items()
    }
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    model.generation_config.update(num_assistant_tokens=recipe.head_depth)
    model.generation_config.save_pretrained(folder)
    sheets.readable(folder)


def train_image(recipe: ImageRecipe, out_dir: Path, work: Path) -> None:
    """Train an image generator from scratch, or on from the checkpoints in `work`; then export it, with a card."""
    say = journal(work)
    pipe = zoo_image.build_pipeline(recipe, zoo_image.train_vq(recipe, work, say))
    meaning = zoo_image.train_reading(recipe, pipe, work, say)
    zoo_image.train_generator(recipe, pipe, meaning, work, say)
    results: card.Results = {**zoo_image.score_vq(pipe.vqvae), **zoo_image.score_generator(pipe)}
    results |= {"parameters": sheets.parameters(pipe.components), "read": zoo_image.faithfulness(pipe)}
    out_dir.mkdir(parents=True, exist_ok=True)
    zoo_image.sheet(pipe).save(out_dir / "samples.webp", quality=80)
    zoo_image.export(pipe, out_dir)
    (out_dir / "README.md").write_text(card.image_card(recipe, results, card.wall_minutes(work)))
    say(f"exported to {out_dir}")


def train_drafter(recipe: DrafterRecipe, out_dir: Path, work: Path) -> None:
    """Distil the drafter of an embedded model from that model's own answers; then export it, with a card."""
    target, draws = zoo.path(recipe.target), recipe.target in IMAGES
    how = HOW[recipe.recipe]
    if draws:
        model, processor = LlamaGenPipeline.from_pretrained(target, torch_dtype=torch.float32), None
        model.set_progress_bar_config(disable=True)
    else:
        processor, model = evaluate.load(target)
        model.config._name_or_path = recipe.target
    drafter = train(
        model, processor, recipe.method, recipe.data, work, how, shape=recipe.whole_shape,
        answers=work.parent / f"{recipe.target}-answers", keep=0.0 if draws else TRACES,
    )  # fmt: skip
    drafter.config = replace(
        drafter.config, target=recipe.target, **({} if recipe.method == "heads" else {"shape": recipe.drafts})
    )
    out_dir.mkdir(parents=True, exist_ok=True)
    (out_dir / "README.md").write_text(card.drafter_card(recipe, json.loads((work / "report.json").read_text())))
    save_drafter(drafter.to(torch.bfloat16), out_dir)


def configure(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m benchmarks zoo`."""
    parser.description = "Train the embedded models from nothing, or on from where it was stopped; then score them."
    add = parser.add_argument
    add("names", nargs="*", metavar="NAME", help=f"which ({', '.join(KNOWN)}); default: all, in order")
    add("--out", type=Path, help="folder to export to, a subfolder each (default: inside the package)")
    add("--work", type=Path, default=WORK, help="folder of checkpoints and logs, a subfolder each (%(default)s)")
    add("--eval-only", action="store_true", help="score what is exported already")
    add("--threads", type=int, default=2, help="CPU threads (%(default)s)")
    add("--scenes", type=int, default=300, help="held-out scenes to score (%(default)s)")


def run(args: argparse.Namespace) -> int:
    """Train and score each of the named models."""
    torch.set_num_threads(args.threads)
    names = args.names or [name for name in KNOWN if name not in RECIPES or RECIPES[name].embedded]
    unknown = [name for name in names if name not in KNOWN]
    if unknown:
        print(f"zoo: unknown model {unknown[0]!r}; choose from {', '.join(KNOWN)}", file=sys.stderr)
        return 1
    for name in names:
        out, work = (args.out or zoo.weights()) / name, args.work / name
        if name in MARS and args.eval_only:
            zoo_mar.evaluate(MARS[name], out, journal(work))
        elif name in MARS:
            zoo_mar.train(MARS[name], out, work, journal(work))
        elif name in DRAFTERS and not args.eval_only:
            train_drafter(DRAFTERS[name], out, work)
        elif name in IMAGES and not args.eval_only:
            train_image(IMAGES[name], out, work)
        elif name in RECIPES:
            if not args.eval_only:
                train_vlm(RECIPES[name], out, work)
            evaluate.evaluate(RECIPES[name], out, work, args.scenes)
    return 0
