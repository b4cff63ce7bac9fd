"""`mmspec convert`: a drafter from one published layout to another."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

OK, FAILED = 0, 1


def configure(parser: argparse.ArgumentParser) -> None:
    """The options of `mmspec convert`."""
    from mmspec.checkpoints.layouts import LAYOUTS

    known = "; ".join(f"{name}: {layout.about}" for name, layout in LAYOUTS.items())
    parser.description = f"Read a drafter in any known layout and write it in another, as safetensors. Layouts: {known}"
    add = parser.add_argument
    add("src", help="folder, file with config.json beside it, or owner/name on the Hugging Face Hub")
    add("dst", type=Path, help="folder to write")
    add("--layout", choices=tuple(LAYOUTS), default="mmspec", help="layout to write (%(default)s)")
    add("--from", dest="source", choices=tuple(LAYOUTS), help="layout to read (default: what the files show)")
    add("--target", help="model it drafts for, name or folder; needed where the files do not say which layers it reads")
    add("--revision", help="branch, tag or commit of SRC on the hub")
    add("--allow-pickle", action="store_true", help="run the code in a .bin file; only if you trust its author")
    add("--overwrite", action="store_true", help="replace a drafter that stands in DST")


def run(args: argparse.Namespace) -> int:
    """Convert as the options say; the exit code."""
    from mmspec.checkpoints.files import CONFIG, WEIGHTS
    from mmspec.checkpoints.load import load_drafter
    from mmspec.checkpoints.save import save_drafter

    standing = [name for name in (WEIGHTS, CONFIG) if (args.dst / name).exists()]
    try:
        if standing and not args.overwrite:
            there = " and ".join(standing)
            raise FileExistsError(f"{args.dst} holds {there} already; pass another folder, or --overwrite")
        drafter = load_drafter(
            args.src,
            target=args.target,
            revision=args.revision,
            allow_pickle=args.allow_pickle,
            layout=args.source,
        )
        save_drafter(drafter, args.dst, args.layout)
    except (OSError, ValueError) as error:
        print(f"mmspec convert: {error}", file=sys.stderr)
        return FAILED
    target = drafter.config.target or "not noted; name it with --target"
    print(f"{args.src} written to {args.dst} in the layout {args.layout}; target: {target}")
    return OK
