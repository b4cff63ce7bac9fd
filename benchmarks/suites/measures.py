"""Quality measures of generated pictures: CLIP and preference scores, inception score and FID."""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from benchmarks.suites.gallery import gallery_of
from mmspec.app.bench.command import BenchError, Outcome
from mmspec.app.bench.image import ImageBench, facts
from mmspec.app.bench.report import OWN, Record, number
from mmspec.app.compare import Method
from mmspec.app.devices import EngineError, find_model, first_line, load_quietly
from mmspec.app.extras import installing
from mmspec.app.media.inputs import images
from mmspec.app.prompt import PromptError, read_prompts
from mmspec.media import load_image

NETWORK = "inception-v3-compat"  # torch-fidelity's name for the network of the published FID and IS
POOLED, LOGITS = "2048", "logits_unbiased"  # its layers for FID and for the inception score
FETCHED = ""  # --inception without a file
BATCH = 32
SPLITS = 10  # of the inception score
CAPTIONS = "your own prompts, one per line, or the captions of COCO (.json)"
SUITE = "image-measures"  # the suite of these records
NOTHING: Record = dict.fromkeys(
    ("clip", "inception_score", "inception_score_std", "fid", "compression", "seconds_per_image")
)
Statistics = dict[str, np.ndarray]  # mu [D] and sigma [D, D]


def configure(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("measures of the pictures")
    add = group.add_argument
    add("--clip", nargs="+", default=[], metavar="MODEL", help="score pictures and prompts by these CLIPs: folders or "
        "names on the Hub, such as openai/clip-vit-base-patch16 or adams-story/HPSv2-hf")  # fmt: skip
    add("--inception", nargs="?", const=FETCHED, metavar="FILE", help="inception score, by this file of the Inception "
        "weights of torch-fidelity (default: downloaded)")  # fmt: skip
    add("--reference", type=Path, metavar="PATH", help="with --inception also FID, to a folder of pictures or to an "
        ".npz of mu and sigma")  # fmt: skip


def read_captions(path: str | Path) -> list[str]:
    """The prompts in a file: one per line, or the first caption of each picture in COCO's .json.

    Raises PromptError: it cannot be read, or holds none.
    """
    lines = read_prompts(path)
    if Path(path).suffix.lower() != ".json":
        return lines
    try:
        captions = json.loads("\n".join(lines))["annotations"]
        first = {one["image_id"]: " ".join(one["caption"].split()) for one in reversed(captions)}
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise PromptError(
            f"{path} is not a file of COCO captions, whose `annotations` have `image_id` and `caption`; write your "
            "own prompts in a text file, one per line"
        ) from error
    return [first[image] for image in dict.fromkeys(one["image_id"] for one in captions)]


def wanted(args: argparse.Namespace) -> bool:
    """Whether any measure is requested. Raises BenchError: --reference without --inception."""
    if args.reference is not None and args.inception is None:
        raise BenchError("--reference is for FID, which needs the Inception network; add --inception")
    return bool(args.clip) or args.inception is not None


class Measures:
    """The networks and the reference statistics of a command, loaded once.

    Raises BenchError: a model, a file or a package is missing or of the wrong kind.
    """

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.clips = {name: _clip(name, device) for name in args.clip}
        self.inception = None if args.inception is None else Inception(args.inception, device)
        self.reference = None
        if args.reference is not None:
            assert self.inception is not None, "wanted() refuses this"
            self.reference = self.inception.reference(args.reference)

    def __call__(self, pictures: Sequence[Image.Image], prompts: Sequence[str] | None) -> Record:
        """The requested measures of these pictures.

        Args:
            prompts: one for each picture; only needed for CLIP.
        """
        measured: Record = {}
        if self.clips:
            assert prompts is not None and len(prompts) == len(pictures), "CLIPs compare with prompts"
            measured["clip"] = {name: float(score(pictures, prompts).mean()) for name, score in self.clips.items()}
        if self.inception is not None:
            features, logits = self.inception.read(pictures)
            measured["inception_score"], measured["inception_score_std"] = self.inception.score(logits)
            if self.reference is not None:
                measured["fid"] = self.inception.distance(features, self.reference)
        return measured


def _clip(name: str, device: torch.device) -> ClipScorer:
    load_quietly("transformers")
    try:
        return ClipScorer(find_model(name), device)
    except (OSError, ValueError, EngineError) as error:
        raise BenchError(f"--clip {name}: {str(error).strip().partition(chr(10))[0]}") from error


class ClipScorer:
    """CLIP score (Hessel et al. 2021, arXiv 2104.08718) as libraries report it: 100 · max(cos, 0).

    Args:
        where: a folder or a name on the Hub. HPSv2 and PickScore are also CLIPs, and loaded in the same way.

    Raises:
        OSError, ValueError: there is no such model, its processor is missing, or it does not embed texts and images.
    """

    def __init__(self, where: str, device: torch.device) -> None:
        from transformers import AutoConfig, AutoModel, AutoProcessor

        model = type(AutoConfig.from_pretrained(where)).__name__.removesuffix("Config")
        self.model = AutoModel.from_pretrained(where, dtype=torch.float32).to(device).eval()
        if not hasattr(self.model, "get_text_features") or not hasattr(self.model, "get_image_features"):
            raise ValueError(f"a {model} does not embed texts and pictures in one space; choose a CLIP or SigLIP")
        self.processor = AutoProcessor.from_pretrained(where)
        if not hasattr(self.processor, "image_processor"):
            raise ValueError(
                "its processor takes no pictures; save one beside it, for a CLIP that of openai/clip-vit-base-patch32"
            )

    @torch.inference_mode()
    def __call__(self, pictures: Sequence[object], texts: Sequence[str]) -> Tensor:
        """Scores [n] of images and their texts, in float64; texts that are too long for the model are truncated."""
        cosines = []
        for start in range(0, len(pictures), BATCH):
            some = slice(start, start + BATCH)
            inputs = self.processor(
                text=list(texts[some]), images=list(pictures[some]), return_tensors="pt", padding="max_length",
                truncation=True, max_length=self.model.config.text_config.max_position_embeddings,
            )  # fmt: skip
            out = self.model(**inputs.to(self.model.device))
            cosines.append(torch.cosine_similarity(out.image_embeds, out.text_embeds).double().cpu())
        return 100 * torch.cat(cosines).clamp_min(0)


class Inception:
    """torch-fidelity's Inception network, FID and inception score.

    Args:
        weights: the file of the network's weights; FETCHED: torch-fidelity downloads them.

    Raises BenchError: torch-fidelity is not installed, or the weights cannot be read.
    """

    def __init__(self, weights: str, device: torch.device, network: str = NETWORK) -> None:
        if importlib.util.find_spec("torch_fidelity") is None:
            raise BenchError(f"--inception needs torch-fidelity: {installing('measures')}")
        from torch_fidelity.utils import create_feature_extractor

        try:
            if weights:
                torch.load(weights, map_location="cpu", weights_only=True)  # refuses a pickle that would run code
            self.network: Any = create_feature_extractor(
                network, [POOLED, LOGITS], cuda=False, verbose=False, feature_extractor_weights_path=weights or None
            )
        except Exception as error:  # no file, no network, other tensors
            raise BenchError(
                f"no Inception weights in {weights or 'the network'} ({first_line(error)[:200]}); --inception takes "
                "the file weights-inception-2015-12-05-6726825d.pth of torch-fidelity's releases"
            ) from error
        self.network.to(device)
        self.device = device

    @torch.inference_mode()
    def read(self, pictures: Iterable[Image.Image]) -> tuple[Tensor, Tensor]:
        """Pooled features [n, D] and logits [n, C] of pictures of any sizes, in float64.

        Raises BenchError: fewer than two pictures.
        """
        parts: list[tuple[Tensor, ...]] = []
        for _, some in groupby(pictures, key=lambda picture: picture.size):
            while batch := [np.asarray(picture.convert("RGB")) for picture in islice(some, BATCH)]:
                pixels = torch.from_numpy(np.stack(batch)).permute(0, 3, 1, 2)  # [b, 3, H, W] in uint8
                parts.append(tuple(part.double().cpu() for part in self.network(pixels.to(self.device))))
        if sum(len(part[0]) for part in parts) < 2:
            raise BenchError("FID and inception score are measures of a set; give at least 2 pictures")
        features, logits = (torch.cat(each) for each in zip(*parts, strict=True))
        return features, logits

    @staticmethod
    def score(logits: Tensor) -> tuple[float, float]:
        """Inception score (Salimans et al. 2016, arXiv 1606.03498, §4): mean and deviation over SPLITS parts."""
        from torch_fidelity.metric_isc import isc_features_to_metric

        mean, deviation = isc_features_to_metric(logits, min(SPLITS, len(logits))).values()
        return mean, deviation

    @staticmethod
    def distance(features: Tensor, reference: Statistics) -> float:
        """FID (Heusel et al. 2017, arXiv 1706.08500) of features [n, D] to the statistics of a reference."""
        from torch_fidelity.metric_fid import fid_features_to_statistics, fid_statistics_to_metric

        (fid,) = fid_statistics_to_metric(fid_features_to_statistics(features), reference, verbose=False).values()
        return float(fid)

    def reference(self, where: Path) -> Statistics:
        """The statistics of a folder of pictures, or of an .npz file.

        Raises BenchError: it is neither of these, or has statistics of another network.
        """
        from torch_fidelity.metric_fid import fid_features_to_statistics

        if where.suffix.lower() != ".npz":
            return fid_features_to_statistics(self.read(load_image(path) for path in images(where))[0])
        try:
            with np.load(where) as file:
                known = {name: np.asarray(file[name], dtype=np.float64) for name in ("mu", "sigma")}
        except (OSError, ValueError, KeyError) as error:
            raise BenchError(f"{where} has no statistics, arrays `mu` and `sigma`: {first_line(error)}") from error
        width = self.read([Image.new("RGB", (64, 64))] * 2)[0].shape[1]
        if known["mu"].shape != (width,) or known["sigma"].shape != (width, width):
            raise BenchError(f"the statistics of {where} are of {known['mu'].shape[0]} features; Inception has {width}")
        return known


def measure_pictures(
    bench: ImageBench, left: Sequence[Method], conditions: Sequence[str | int], args: argparse.Namespace,
    outcome: Outcome,
) -> Iterator[None]:  # fmt: skip
    """Draw many pictures with each method and measure their quality; yields after each record."""
    if args.clip and bench.painter.classes:
        raise BenchError(f"--clip compares with prompts, and {args.model} draws classes; leave it out")
    networks = Measures(args, bench.painter.model.device)
    for method in left:
        record: Record = {"suite": SUITE, "n": len(conditions), **facts(method), **NOTHING, "note": ""}
        try:
            drawn = gallery_of(bench, method, 1, conditions, args)
            record |= networks(drawn.images, None if bench.painter.classes else [*map(str, conditions)])
            record |= {"compression": drawn.compression, "seconds_per_image": drawn.seconds / len(conditions)}
        except EngineError as error:
            record["note"] = f"failed: {str(error)[:200]}"
        outcome.records.append(record)
        yield


OWN |= {  # CLIP scores are in the order of --clip
    "clip": lambda r: " ".join(f"{score:.2f}" for score in r["clip"].values()) if r["clip"] else "-",
    "inception_score": lambda r: number(r["inception_score"], f"{{:.2f}} ± {r['inception_score_std'] or 0:.2f}"),
}
