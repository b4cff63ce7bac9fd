"""`mmspec verify`: checks on your own model and image that the output equals stock, and that the image matters."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import mmspec
from mmspec import media
from mmspec.app import embedded, enabling
from mmspec.app.options import count, where
from mmspec.config import UnsupportedError
from mmspec.pipelines.prompts import chat_inputs


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Answer a question about a picture with mmspec and on the stock path of transformers, greedily, and compare "
        "the tokens; then ask about another picture, which should change them. Exit code: 0 identical, 1 different, or "
        "nothing could be compared."
    )
    add = parser.add_argument
    add("image", type=Path, help="a picture to ask about")
    add("--model", default=embedded.MODEL, help="folder or hub name (%(default)s)")
    add("--drafter", help="name, folder or hub name; default: what the model ships with")
    add("--prompt", default="Describe this image.", help="question about the picture (%(default)s)")
    add("--max-new-tokens", type=count, default=64, metavar="N", help="number of tokens to compare (%(default)s)")
    enabling.add(parser)
    where(parser)


def run(args: argparse.Namespace) -> int:
    from mmspec.app import engine as engines
    from mmspec.app.devices import EngineError

    drafter = args.drafter or embedded.drafter(args.model)
    try:
        options, picture = enabling.given(args.enable, drafter), media.load_image(args.image)
        loaded = engines.load(args.model, drafter, args.device, args.dtype, args.max_new_tokens, 0.0, **options)
        if loaded.drafter is None:
            why = "; ".join(loaded.notes) or "no drafter was given"
            raise UnsupportedError(f"{args.model} is not accelerated, so there is nothing to compare: {why}")
        inputs = chat_inputs(loaded.processor, [args.prompt], [[picture]])
        report = mmspec.verify(loaded.model, inputs.to(loaded.model.device, loaded.model.dtype), args.max_new_tokens)
    except (enabling.EnableError, EngineError, media.MediaError, UnsupportedError) as error:
        print(f"mmspec verify: {error}", file=sys.stderr)
        return 1
    print(report)
    return 0 if report.ok else 1
