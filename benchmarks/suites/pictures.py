"""The pictures suite: quality measures for any folders of pictures."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.suites import measures
from mmspec.app.bench.command import BenchError, Outcome
from mmspec.app.bench.report import Record
from mmspec.app.devices import find_device
from mmspec.app.media.inputs import images
from mmspec.app.options import where
from mmspec.app.provenance import provenance
from mmspec.media import load_image


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("folders", nargs="+", type=Path, metavar="FOLDER", help="pictures, named in the order of the prompts")
    add("--prompts", type=measures.read_captions, metavar="FILE", help=measures.CAPTIONS + "; for --clip")
    where(parser)
    measures.configure(parser)


def measure(args: argparse.Namespace, outcome: Outcome) -> Iterator[None]:
    """Measure each folder; yields after each record."""
    if not measures.wanted(args):
        raise BenchError("nothing to do; give --clip or --inception")
    if args.clip and args.prompts is None:
        raise BenchError("--clip compares pictures with their prompts; name the file with --prompts")
    prompts = args.prompts if args.clip else []
    device = find_device(args.device)
    networks = measures.Measures(args, device)
    outcome.provenance = provenance(device, torch.float32) | {"model": "pictures"}
    for folder in args.folders:
        drawn = [load_image(path) for path in images(folder)]
        if args.clip and len(prompts) < len(drawn):
            raise BenchError(f"{folder} has {len(drawn)} pictures, --prompts only {len(prompts)} prompts")
        facts: Record = {"suite": measures.SUITE, "method": folder.name, "lossless": None, "setting": ""}
        facts |= measures.NOTHING | {"n": len(drawn), "folder": str(folder)}
        outcome.records.append(facts | networks(drawn, prompts[: len(drawn)] if args.clip else None))
        yield
