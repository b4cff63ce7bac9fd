"""Trains the embedded models of the zoo and writes them into the package: `mmspec zoo`."""
import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch

from mmspec import zoo
from mmspec.app import zoo_eval, zoo_vlm
from mmspec.zoo.recipes import RECIPES, VlmRecipe

WORK = Path("runs/zoo")  # where checkpoints and logs go
LOOK_EVERY = 200  # steps between two looks at held-out scenes


def journal(path: Path) -> Callable[[str], None]:
    """A function that prints a line and appends it to the file, with the time of day."""
    path.parent.mkdir(parents=True, exist_ok=True)

    def say(line: str) -> None:
        line = f"{time.strftime('%H:%M:%S')} {line}"
        print(line, flush=True)
        with path.open("a") as out:
            out.write(line + "\n")

    return say


def train_vlm(recipe: VlmRecipe, out_dir: Path, resume: bool = True, work: Path | None = None) -> None:
    """Train from scratch, or on from the checkpoints in `work`; then export to `out_dir` a folder for from_pretrained.

    Every LOOK_EVERY steps the log gets a line of held-out scores and `work`/preview the model as it stands. Without
    `resume`, checkpoints of an earlier run are deleted.
    """
    work = work or WORK / recipe.name
    if not resume:
        for old in (work / f"{stage}.pt" for stage in ("tower", "decoder", "polish")):
            old.unlink(missing_ok=True)
    say = journal(work / "log.txt")
    processor = zoo_vlm.build_processor(recipe, zoo_vlm.build_tokenizer(recipe))
    tower = zoo_vlm.train_tower(recipe, work, say)
    model = zoo_vlm.build_model(recipe)
    model.model.vision_tower.load_state_dict(tower.state_dict())

    def watch(step: int) -> None:
        if step % LOOK_EVERY == 0:
            zoo_vlm.export(model, processor, work / "preview")
            say(f"step {step}: " + zoo_eval.glance(recipe, model, processor))

    zoo_vlm.train_decoder(recipe, model, processor.tokenizer, work, say, watch)
    zoo_vlm.export(model, processor, out_dir)
    say(f"exported to {out_dir}")


def main(argv: list[str] | None = None) -> int:
    """`train NAME` trains and exports; `eval NAME` scores the exported model on held-out scenes and writes its card."""
    parser = argparse.ArgumentParser(prog="mmspec zoo", description=__doc__)
    parser.add_argument("verb", choices=("train", "eval"))
    parser.add_argument("name", choices=sorted(RECIPES))
    parser.add_argument("--out", type=Path, help="folder to export to (default: inside the package)")
    parser.add_argument("--work", type=Path, help=f"folder of checkpoints and the log (default: {WORK}/NAME)")
    parser.add_argument("--fresh", action="store_true", help="ignore checkpoints of an earlier run")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--scenes", type=int, default=300, help="held-out scenes to score")
    asked = parser.parse_args(argv)
    torch.set_num_threads(asked.threads)
    recipe = RECIPES[asked.name]
    out, work = asked.out or zoo.weights() / recipe.name, asked.work or WORK / recipe.name
    if asked.verb == "train":
        train_vlm(recipe, out, resume=not asked.fresh, work=work)
    else:
        zoo_eval.evaluate(recipe, out, work, asked.scenes)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
