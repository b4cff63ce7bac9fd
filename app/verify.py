"""`mmspec verify`: prove on one's own model and image that the output is the stock one and that the image matters."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import mmspec
from mmspec.app import embedded
from mmspec.app.caption import media
from mmspec.pipelines.prompts import chat_inputs


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("image", type=Path, help="a picture to ask about")
    parser.add_argument("--model", help="folder or hub name; default: the embedded one")
    parser.add_argument("--drafter", help="ngram, folder or hub name; default: the embedded one's")
    parser.add_argument("--prompt", default="Describe this image.")
    parser.add_argument("--max-new-tokens", type=int, default=64)


def run(args: argparse.Namespace) -> int:
    """Print the report; 0 if it is well, 1 if not."""
    from mmspec.app import engine as engines

    model = args.model or embedded.MODEL
    drafter = args.drafter or embedded.drafter(model)
    try:
        loaded = engines.load(model, drafter, "auto", "auto", args.max_new_tokens, 0.0)
        inputs = chat_inputs(loaded.processor, [args.prompt], [[media.load_image(args.image)]])
    except (engines.EngineError, media.MediaError) as error:
        print(f"mmspec verify: {error}", file=sys.stderr)
        return 1
    inputs = inputs.to(loaded.model.device, loaded.model.dtype)
    report = mmspec.verify(loaded.model, inputs, args.max_new_tokens)
    print(report)
    return 0 if report.ok else 1
