"""Train a drafter for a model from its own answers, then use it.

python examples/train_drafter.py [--method eagle] [--out runs/my-drafter] [--steps 100]     # run it again to resume
"""

import argparse
from pathlib import Path

from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor, logging

import mmspec
from mmspec import zoo
from mmspec.app.train import train
from mmspec.train.recipes import RECIPES

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--method", choices=("eagle", "vispec", "msd", "specvlm"), default="eagle")
parser.add_argument("--out", type=Path, default=Path("runs/my-drafter"))
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--samples", type=int, default=160, help="prompts; the model itself writes the answers")
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--max-new-tokens", type=int, default=96, help="longest answer")
args = parser.parse_args()

logging.disable_progress_bar()  # of loading weights
processor = AutoProcessor.from_pretrained(zoo.path("scenes-video"))
model = AutoModelForImageTextToText.from_pretrained(zoo.path("scenes-video"), dtype="float32")

recipe = RECIPES["scenes-eagle"].with_(
    steps=args.steps,
    batch=args.batch,
    held_out=max(1, args.samples // 10),
    max_new_tokens=args.max_new_tokens,
)
train(model, processor, args.method, f"scenes:{args.samples}", args.out, recipe)  # for yours: a folder of pictures

with mmspec.enable(model, drafter=args.out / "drafter"):
    content = [
        {"type": "image", "image": Image.open(zoo.samples() / "scene-01.png")},
        {"type": "text", "text": "Describe this image."},
    ]
    inputs = processor.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=True,
        return_dict=True, return_tensors="pt",
    )  # fmt: skip
    print(mmspec.verify(model, inputs))
