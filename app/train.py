"""`mmspec train`: trains a drafter by distillation from a frozen target."""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mmspec.app.devices import EngineError, find_device, find_model, first_line, load_quietly
from mmspec.app.embedded import resolve
from mmspec.app.enabling import value_of
from mmspec.app.extras import terminable
from mmspec.app.files import hold, write_whole
from mmspec.app.media.decoder import HELP, USUAL, VideoReader
from mmspec.app.media.video import FramePolicy
from mmspec.app.options import count, from_zero
from mmspec.drafters import block_config
from mmspec.registry import DRAFTERS, drafter_class
from mmspec.train.data import TrainingSample, read
from mmspec.train.distil import Distillation
from mmspec.train.heads import HeadsTraining
from mmspec.train.recipes import RECIPES, Recipe

if TYPE_CHECKING:
    from mmspec.pipelines.host.kinds import Processor

DRAW = {"guidance_scale": 3.0, "temperature": 1.0, "top_k": 0, "image_area": 0}  # names of --draw, with their types
OWN = {"intermediate": 0}  # of --shape: by default the target's
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO)  # what a full disk gives
KINDS = {
    bool: "true or false", int: "a whole number from 0 on", float: "a number from 0 on", tuple: "a list", str: "a word",
}  # fmt: skip


def configure(parser: argparse.ArgumentParser) -> None:
    trained = [name for name, entry in DRAFTERS.items() if entry.trained]
    others = [name for name in block_config.PUBLISHED if name not in trained]
    methods = [*trained, *others, "mtp"]
    parser.description = "Train a drafter on the target's own answers about your data. Rerun the command to resume."
    add = parser.add_argument
    add("--method", choices=methods, default="eagle", metavar="NAME", help=f"{', '.join(methods)} (%(default)s)")
    add("--target", required=True, help="folder or hub name of the model to draft for")
    add("--data", required=True, help="folder of images (subfolders too), .jsonl with image, images or video, and "
        "prompt (for a text model prompt alone), hf:owner/name[:split], or drawn: scenes:N; for a model that draws "
        "(LlamaGen, Janus, Emu3, Anole, or a Python file as for `mmspec bench image`): "
        "prompts:FILE (one per line; class numbers for a class-conditional model) or pictures:N")  # fmt: skip
    add("--text", help="prompts without pictures, for recipes with a stage on text: prompts:FILE, .jsonl or "
        "hf:owner/name[:split]; 'none': leave these stages out")  # fmt: skip
    add("--out", type=Path, required=True, help="folder of the run")
    add("--recipe", choices=sorted(RECIPES), metavar="NAME", help="default: the published recipe of the method; of "
        f"{', '.join(sorted(RECIPES))}")  # fmt: skip
    sets: dict[str, Any] = {"nargs": "*", "default": [], "metavar": "NAME=VALUE", "action": "extend"}
    add("--set", help="change values of the recipe, such as steps=200 held_out=8", **sets)
    add("--shape", help="other values of the drafter's config, such as draft_vocab=8192 (its own output head for the "
        "most frequent tokens of the answers), intermediate=1024 (width of its MLP, by default the target's) or "
        "depth=6", **sets)  # fmt: skip
    add("--draw", help="how to call a model that draws while its drafter is trained, such as guidance_scale=3.0 "
        "or temperature=0.9 top_k=2000", **sets)  # fmt: skip
    add("--answers", type=Path, help="folder of the target's answers, to share between runs")
    add("--keep", type=from_zero, default=0.0, metavar="GB", help="memory for caching features")
    add("--limit", type=count, help="maximum number of samples")
    add("--video-frames", type=FramePolicy.parse, metavar="POLICY", default=USUAL, help=HELP)
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps ... (%(default)s); of one process alone")


def _recipe(args: argparse.Namespace) -> Recipe:
    from mmspec.pipelines.untrained import draftable

    pictures = draws(args.target, args.data)
    if pictures:
        draftable(args.method)
    elif args.method == "heads":
        raise ValueError("'heads' is for models that draw; give a pipeline's folder and prompts:FILE or pictures:N")
    recipe = RECIPES[args.recipe or (f"{args.method}-image" if pictures else args.method)]
    recipe = recipe.without_texts() if args.text == "none" else recipe
    usual = {f.name: getattr(recipe, f.name) for f in fields(recipe) if f.name != "stages"}
    return recipe.with_(**_values("--set", args.set, usual))


def _values(option: str, items: list[str], now: dict[str, Any]) -> dict[str, Any]:
    """Parse NAME=VALUE items, with the types of the current values in `now`; `option` is for messages.

    Raises ValueError: an unknown name, or a value of another type.
    """
    chosen: dict[str, Any] = {}
    for item in items:
        name, equals, text = item.partition("=")
        if name not in now:
            raise ValueError(f"{option}: there is no {name!r}; choose from {', '.join(sorted(now))}")
        kind = type(now[name])
        value = text if kind is str else value_of(text)
        if (kind, type(value)) in ((float, int), (tuple, list)):
            value = kind(value)
        if not equals or type(value) is not kind or (isinstance(value, int | float) and value < 0):
            raise ValueError(f"{option}: {name} is {KINDS[kind]}, such as {now[name]!r}; got {item!r}")
        chosen[name] = value
    return chosen


def draws(target: str, data: str) -> bool:
    """Whether a target draws pictures: it is a diffusers pipeline or a Python file; or the data are prompts:FILE or
    pictures:N, and it is not a local transformers model that only writes text."""
    from mmspec.pipelines.host.image_models import CALLS

    where = Path(resolve(target))
    if target.endswith(".py") or (where / "model_index.json").is_file():
        return True
    known = where / "config.json"
    writes = known.is_file() and json.loads(known.read_text(encoding="utf-8")).get("model_type") not in CALLS
    return data.startswith(("prompts:", "pictures:")) and not writes


def train(
    model: Any, processor: Processor | None, method: str, data: str, out: Path, recipe: Recipe, *, drafter: Any = None,
    shape: dict[str, Any] | None = None, limit: int | None = None, text: str | None = None,
    answers: Path | None = None, keep: float = 0.0, frames: FramePolicy | None = None,
    drawing: dict[str, Any] | None = None,
) -> Any:  # fmt: skip
    """Train a drafter for a loaded model, write it to `out` and return it. Resumes a run that `out` holds.

    Without a processor the model must be one that draws: a LlamaGenPipeline or an ImageModel.

    Args:
        drafter: a drafter to continue from; None: an untrained one with these values of its config.
        limit: maximum number of samples.
        text: a source of prompts without pictures.
        answers: a folder of the target's answers, to share between runs.
        keep: GB of memory for cached features.
        frames: which frames of a video the model sees; None: eight, evenly spaced.
        drawing: how a model that draws is called, such as its `guidance_scale`.
    """
    from mmspec.pipelines.drafters import mtp_files
    from mmspec.pipelines.host.training import Accelerator
    from mmspec.pipelines.image_teacher import ImageTeacher
    from mmspec.pipelines.teacher import Teacher
    from mmspec.pipelines.untrained import build, build_for_pictures, check

    torch.manual_seed(recipe.seed)
    given, shaped = drafter, build_for_pictures if processor is None else build
    drafter = given.float().requires_grad_(True) if given else shaped(method, model, **(shape or {}))
    check(drafter, model, processor, recipe, drawing or {})
    frames = frames or FramePolicy.parse(USUAL)
    clips = VideoReader(frames)
    samples = read(data, limit, recipe.seed, clips)
    _check_data(data, samples, text, processor, recipe)
    texts = read(text, limit, recipe.seed) if text else ()
    features, of = drafter.features, getattr(drafter.config, "target", "") or model.config._name_or_path
    clipped = frames if any(sample.clip for sample in samples) else ""
    drawn = sorted(drawing.items()) if drawing else ""
    about = " ".join(filter(None, map(str, [of, data, clipped, drawn, getattr(model, "about", "")])))
    context: Any = Teacher(model, processor, features) if processor else ImageTeacher(model, features, drawing)
    if context.dtype != torch.float32 and not recipe.bf16:  # its features come in half precision
        recipe = recipe.with_(bf16=True)
    with clips, context as teacher:
        if processor is None:
            teacher.open(samples[0])
            if teacher.target.streams > 1 and getattr(getattr(drafter, "head", None), "own", False):
                raise ValueError("a drafter with its own output head does not support guidance; leave draft_vocab out")
        drafter.to(teacher.model.device)
        kind = HeadsTraining if drafter.method == "heads" else Distillation
        run = kind(
            drafter, teacher, samples, recipe, out, texts, answers, about, int(keep * 2**30),
            accelerator=Accelerator(device_placement=False), trained=given is not None,  # all is on the target's device
        )  # fmt: skip
        tau = run.run()
    if run.accelerator.is_main_process:
        mtp_files.save_trained(model, drafter.eval(), out / "drafter")
        facts = {"method": method, "data": data, "samples": len(samples), **({"draw": drawing} if drawing else {})}
        _report(run, tau, facts)
    return drafter


def _check_data(
    data: str, samples: Sequence[TrainingSample], text: str | None, processor: Processor | None, recipe: Recipe
) -> None:
    """ValueError for pictures that the target would not see, or texts that the recipe would not use."""
    from mmspec.pipelines.prompts import text_alone

    if (processor is None or text_alone(processor)) and any(sample.images for sample in samples):
        how, give = ("draws", "prompts:FILE or pictures:N") if processor is None else ("reads text alone", "a .jsonl")
        raise ValueError(f"the target {how}, and {data} has pictures; give {give}, of prompts without")
    if text and not recipe.texts:
        raise ValueError("this recipe has no stage on text, as those of msd and vispec have; leave --text out")


def _report(run: Distillation, tau: float, facts: dict[str, Any]) -> None:
    """Write the results of a run to its folder, and print them."""
    recipe, out, minutes = run.recipe, run.out, (time.monotonic() - run.began) / 60
    report = {
        "held_out_tau": tau, "curve": run.curve, "minutes": minutes, "cpu_minutes_of_steps": run.seconds / 60,
        "recipe": asdict(recipe), **facts,
    }  # fmt: skip
    write_whole(out / "report.json", json.dumps(report, indent=2).encode())
    chain = "drawn chain" if recipe.overlap else "chain"
    what = "window" if run.drafter.method == "heads" else f"{chain} of {recipe.unroll}"
    print(f"held-out tau {tau:.2f} ({what}, bonus token included); drafter in {out / 'drafter'}")


@contextlib.contextmanager
def _alone(out: Path) -> Iterator[None]:
    """ValueError if another run trains in this folder; of the processes of one run the first holds it."""
    out.mkdir(parents=True, exist_ok=True)
    with open(out / ".lock", "wb") as file:
        if os.environ.get("RANK", "0") == "0" and not hold(file.fileno()):
            raise ValueError(f"another run trains in {out}; wait until it has ended, or choose another --out")
        yield


def _opened(target: str, pictures: bool, device_name: str) -> tuple[Any, Any]:
    """Load a model and its processor; for a model that draws, the processor is None.

    Raises EngineError: there is no such model, or it cannot be loaded.
    """
    from mmspec.app import image_model
    from mmspec.pipelines.host.loading import model_and_processor
    from mmspec.pipelines.host.training import own_device

    device = own_device() or find_device(device_name)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if pictures:
        return image_model.open_model(target, device, dtype, decoded=False), None
    where = find_model(target)
    try:
        load_quietly("transformers")
        model, processor = model_and_processor(where, dtype)
    except Exception as error:  # a missing folder, no network, an unknown architecture, damaged files
        raise EngineError(f"cannot load the target {target!r}. {first_line(error)}") from error
    return model.to(device), processor


def run(args: argparse.Namespace) -> int:
    config = getattr(drafter_class("block" if args.method in block_config.PUBLISHED else args.method), "Config", None)
    known = {name: one for name, one in config.usual().items() if one is not MISSING} | OWN if config else {}
    try:
        if args.out.exists() and not args.out.is_dir():
            raise ValueError(f"--out {str(args.out)!r} is a file; name a folder, which may be new")
        recipe = _recipe(args)
        shape = _values("--shape", args.shape, known)
        own = args.target.endswith(".py")  # the user's file, whose `draw` may take any setting
        words = (word.partition("=") for word in args.draw)
        drawing = {name: value_of(text) for name, _, text in words} if own else _values("--draw", args.draw, DRAW)
        with terminable():
            model, processor = _opened(args.target, draws(args.target, args.data), args.device)
            with _alone(args.out):
                train(
                    model, processor, args.method, args.data, args.out, recipe, shape=shape, limit=args.limit,
                    text=None if args.text == "none" else args.text, answers=args.answers, keep=args.keep,
                    frames=args.video_frames, drawing=drawing,
                )  # fmt: skip
    except (ValueError, EngineError, OSError) as error:  # OSError: no such target or data set, a full disk
        free = "; free space and run the same command again" if getattr(error, "errno", None) in FULL else ""
        print(f"mmspec train: {' '.join(str(error).split())}{free}", file=sys.stderr)
        return 1
    except torch.OutOfMemoryError as error:
        advice = "lower batch or anchors by --set, or writing or max_new_tokens if the target was answering. What is "
        advice += f"saved is kept; if that includes steps, give another --out, and --answers {args.answers or args.out}"
        print(f"mmspec train: {first_line(error)}\n{advice}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as stop:
        said = ", ".join(filter(None, ["stopped", str(stop)]))
        print(f"\nmmspec train: {said}; run the same command again to resume", file=sys.stderr)
        return 130
    return 0
