"""`mmspec convert`: converts a drafter between published layouts, or LlamaGen's or MAR's files to a pipeline."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from mmspec.app.embedded import resolve
from mmspec.app.options import count

LLAMAGEN, MAR = "llamagen", "mar"  # given in place of SRC


def configure(parser: argparse.ArgumentParser) -> None:
    from mmspec.checkpoints.layouts import LAYOUTS

    parser.usage = (
        "mmspec convert SRC DST [options]\n       mmspec convert llamagen FILE --vq FILE [--text-encoder T5] -o FOLDER"
        "\n       mmspec convert mar FILE --vae FILE -o FOLDER"
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = "Read a drafter in any known layout and write it in another, as safetensors.\n\nlayouts:\n"
    parser.description += "\n".join(f"  {name:18} {layout.about}" for name, layout in LAYOUTS.items())
    add = parser.add_argument
    add("src", help="folder, file with config.json beside it, or owner/name on the Hub; or `llamagen`, `mar`")
    add("dst", type=Path, help="folder to write; after `llamagen` or `mar`, the transformer's file")
    add("--layout", choices=tuple(LAYOUTS), metavar="NAME", default="mmspec", help="layout to write (%(default)s)")
    add("--from", dest="source", choices=tuple(LAYOUTS), metavar="NAME", help="layout to read; default: detected")
    add("--target", help="model it drafts for, name or folder; needed if the files do not say which layers it reads")
    add("--revision", help="branch, tag or commit of SRC on the hub")
    add("--allow-pickle", action="store_true", help="run the code in a .bin file; only if you trust its author "
        "(llamagen: no code is run, see there)")  # fmt: skip
    add("--overwrite", action="store_true", help="replace files in the folder to write")
    group = parser.add_argument_group(
        LLAMAGEN,
        "Read the authors' .pt files, or a folder with the Llama-like names of LANTERN's repositories, and write a "
        "pipeline that mmspec.LlamaGenPipeline loads. Files of the training scripts hold an "
        "argparse.Namespace; --allow-pickle allows that and nothing else.",
    )
    add = group.add_argument
    add("--vq", type=Path, help="the VQ tokenizer's file, such as vq_ds16_t2i.pt")
    add("--text-encoder", help="T5 for a text-conditional model: folder or hub name, such as google/flan-t5-xl")
    add("-o", "--output", type=Path, help="folder to write")
    add("--image-size", type=count, help="pixels along a side of its pictures, if the file does not say")
    add("--heads", type=count, help="attention heads, for sizes other than the published ones")
    group = parser.add_argument_group(
        MAR,
        "Read the authors' checkpoint-last.pth (its averaged weights) or a .safetensors file, and write a pipeline "
        "that mmspec.MARPipeline loads. -o, --heads and --allow-pickle mean the same as for llamagen.",
    )
    group.add_argument("--vae", type=Path, help="the VAE's file, kl16.ckpt")


def run(args: argparse.Namespace) -> int:
    try:
        print((_pipeline if args.src in (LLAMAGEN, MAR) else _drafter)(args))
    except (OSError, ValueError) as error:
        absent = isinstance(error, FileNotFoundError) and error.filename
        print(f"mmspec convert: {f'there is no file {absent!r}' if absent else error}", file=sys.stderr)
        return 1
    return 0


def _drafter(args: argparse.Namespace) -> str:
    """Convert a drafter; returns the line to print."""
    from mmspec.checkpoints.files import CONFIG, WEIGHTS
    from mmspec.checkpoints.save import save_drafter
    from mmspec.pipelines.host.loading import load_drafter

    drafter = load_drafter(
        resolve(args.src), target=args.target, revision=args.revision, allow_pickle=args.allow_pickle,
        layout=args.source,
    )  # fmt: skip
    _refuse_existing(args.dst, (WEIGHTS, CONFIG), args.overwrite)
    save_drafter(drafter, args.dst, args.layout)
    target = drafter.config.target or "not recorded; name it with --target"
    return f"{args.src} written to {args.dst} in the layout {args.layout}; target: {target}"


def _pipeline(args: argparse.Namespace) -> str:
    """Write a pipeline from LlamaGen's or MAR's files; returns the line to print."""
    part, what = (args.vae, "--vae FILE") if args.src == MAR else (args.vq, "--vq FILE, the VQ tokenizer")
    if part is None or args.output is None:
        raise ValueError(f"`mmspec convert {args.src} FILE` needs {what}, and -o FOLDER to write")
    _refuse_existing(args.output, ("model_index.json",), args.overwrite)
    how = {"heads": args.heads, "allow_pickle": args.allow_pickle}
    pipe: Any
    if args.src == MAR:
        from mmspec.pipelines.mar import files as of_mar

        pipe = of_mar.pipeline(args.dst, part, **how)
        pixels = pipe.image_processor.config.vae_scale_factor  # side of a token in pixels
    else:
        from mmspec.pipelines.llamagen import files

        pipe = files.pipeline(args.dst, part, args.text_encoder, image_size=args.image_size, **how)
        pixels = pipe.vqvae.downsample
    pipe.save_pretrained(args.output)
    c = pipe.transformer.config
    kind, g, side = f"{c.classes} classes" if c.classes else "text", c.grid, c.grid * pixels
    lacks = "" if c.classes or args.text_encoder else "; it has no text encoder yet, name one with --text-encoder"
    return f"{args.dst} written to {args.output}: {kind} to {side}x{side} pixels in {g}x{g} tokens{lacks}"


def _refuse_existing(folder: Path, names: tuple[str, ...], overwrite: bool) -> None:
    if folder.is_file():
        raise FileExistsError(f"{folder} is a file; name a folder")
    existing = [name for name in names if (folder / name).exists()]
    if existing and not overwrite:
        raise FileExistsError(f"{folder} holds {' and '.join(existing)} already; pass another folder, or --overwrite")
