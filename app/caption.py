"""`mmspec caption`: a folder of images in, a caption for each out; a bad file, a kill or a second run costs nothing."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

from mmspec import zoo
from mmspec.app import embedded, media
from mmspec.app.bulk import ModelFailsError, Run, plain
from mmspec.app.outputs import OutputError, Outputs
from mmspec.app.plan import Plan, Settings, plan

PROMPT = "Describe this image in two or three sentences."  # for models other than the embedded one
OK, FATAL, SOME_FAILED, INTERRUPTED = 0, 1, 3, 130
BESIDE = "beside"


def configure(parser: argparse.ArgumentParser) -> None:
    """The options of `mmspec caption`."""
    parser.description = (
        "Caption every image of a folder. Run it again to go on after a stop: what is done is not done twice. "
        "Exit code: 0 all well, 3 some images failed (see failed.jsonl), 1 nothing could be done."
    )
    add = parser.add_argument
    add("folder", type=Path, nargs="?", help="folder of images, or one image (default: the sample drawings)")
    add("--recursive", action="store_true", help="look into subfolders too")
    add("--out", default="captions", help="folder for the captions, or 'beside' for beside the images (%(default)s)")
    add("--model", default=embedded.MODEL, help="name on the Hugging Face Hub, or a folder (%(default)s)")
    add("--drafter", help="name, folder, 'ngram' (needs no weights) or 'none' (stock generate); default: what fits")
    add("--prompt", help="what to ask about every image")
    add("--max-new-tokens", type=_count, default=128, metavar="N", help="longest caption, in tokens (%(default)s)")
    add("--temperature", type=_warmth, default=0.0, metavar="T", help="0 takes the likeliest token (%(default)s)")
    add("--seed", type=int, default=0, help="of the draws at a temperature above 0 (%(default)s)")
    add("--batch-size", type=_count, default=1, metavar="N", help="images per batch (%(default)s)")
    add("--limit", type=_count, metavar="N", help="caption at most N images in this run")
    add("--on-existing", choices=("skip", "overwrite"), default="skip", help="captions that are there (%(default)s)")
    add("--retry-failed", action="store_true", help="try again what failed before")
    add("--max-pixels", type=_count, default=media.MAX_PIXELS, metavar="N", help="largest image (%(default)s)")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps ... (%(default)s)")
    add("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto", help="(%(default)s)")
    add("--no-compare", action="store_true", help="do not measure the speed-up over stock generate")


def run(args: argparse.Namespace) -> int:
    """Caption as the options say; the exit code."""
    from_samples = args.folder is None
    folder = zoo.samples() if from_samples else args.folder
    try:
        images = media.find(folder, args.recursive)
        root = folder if folder.is_dir() else folder.parent
        neighbours = images if folder.is_dir() else media.neighbours(folder)  # they decide how a .txt is named
        outputs = Outputs(root if args.out == BESIDE else Path(args.out), root, neighbours)
        try:
            return _with_outputs(args, outputs, images)
        finally:
            outputs.close()
    except (media.MediaError, OutputError, ModelFailsError) as error:
        print(f"mmspec caption: {plain(str(error))}", file=sys.stderr)
        return FATAL
    except OSError as error:
        print(f"mmspec caption: {error}; what was finished before is safe", file=sys.stderr)
        return FATAL


def _with_outputs(args: argparse.Namespace, outputs: Outputs, images: list[Path]) -> int:
    settings = _settings(args)
    todo = plan(outputs, images, settings, args.on_existing, args.retry_failed)
    _say_plan(args, outputs, images, todo)
    pending = todo.pending[: args.limit]
    failed = todo.failed_before + len(todo.unwritable)
    if not pending:
        return SOME_FAILED if failed else OK
    from mmspec.app import engine as engines
    from mmspec.app.compare import Comparison

    try:
        options = (args.device, args.dtype, args.max_new_tokens, args.temperature)
        engine = engines.load(settings.model, settings.drafter, *options)
    except engines.EngineError as error:
        print(f"mmspec caption: {plain(str(error))}", file=sys.stderr)
        return FATAL
    for note in engine.notes:
        print(f"note: {plain(note)}", file=sys.stderr)
    work = Run(engine, outputs, settings, args.max_pixels)
    if engine.drafter is not None and not args.no_compare:
        work.comparison = Comparison(engine, math.ceil(len(pending) / args.batch_size), args.batch_size)
    try:
        work.caption(pending, args.batch_size)
    except KeyboardInterrupt:
        print(f"\nstopped: {_count_of(work)} are in {outputs.folder}; the same command again goes on from there")
        return INTERRUPTED
    outputs.tidy()
    _say_result(outputs, work)
    return SOME_FAILED if work.failed or failed else OK


def _settings(args: argparse.Namespace) -> Settings:
    own = args.model == embedded.MODEL
    return Settings(
        prompt=args.prompt or (embedded.prompt() if own else PROMPT),
        model=args.model,
        drafter=args.drafter or (embedded.DRAFTER if own else "ngram"),
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        seed=args.seed if args.temperature > 0 else None,
    )


def _say_plan(args: argparse.Namespace, outputs: Outputs, images: list[Path], todo: Plan) -> None:
    print(f"{len(images)} image{'s' * (len(images) != 1)}: {todo}")
    if outputs.damaged:
        print(f"{outputs.damaged} broken line(s) in {outputs.folder} (a run was killed there) were dropped")
    for trouble in todo.unwritable:
        print(f"failed: {plain(trouble)}", file=sys.stderr)
    samples = zoo.samples().resolve()
    if todo.pending and args.model == embedded.MODEL and outputs.root.resolve() != samples:
        print(embedded.NOTE)


def _say_result(outputs: Outputs, work: Run) -> None:
    if work.failed:
        print(f"{work.failed} failed" + f": {outputs.folder / 'failed.jsonl'} says why" * bool(outputs.failures))
    print(f"captions: {outputs.folder / 'metadata.jsonl'}, and a .txt for each image")
    rate = work.captions / max(work.seconds, 1e-9)
    pace = f"{rate:.1f} images/s" if rate >= 1 else f"{1 / rate:.1f} s per image" if rate else ""
    print("; ".join(filter(None, [", ".join(filter(None, [_count_of(work), pace])), str(work.comparison or "")])))


def _count_of(work: Run) -> str:
    return f"{work.captions} caption{'s' * (work.captions != 1)}"


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


def _warmth(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 on")
    return value
