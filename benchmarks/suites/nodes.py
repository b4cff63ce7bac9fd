"""The nodes suite: the cost of verifying N draft nodes relative to one, on a hybrid with random weights."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from typing import Any, cast

import torch
import transformers as T
from torch import Tensor

from benchmarks.suites import shapes, subject
from benchmarks.suites.shapes_ways import STOCK, Cost, ShapeMethod
from mmspec.app.bench import report
from mmspec.app.bench.answers import VlmBench
from mmspec.app.bench.command import BenchError, Outcome, say
from mmspec.app.compare import Method
from mmspec.app.options import count
from mmspec.app.provenance import provenance
from mmspec.drafters.plain import NoOptions, Plain
from mmspec.pipelines.host.kinds import GenerativeModel
from mmspec.protocols import SessionView, Target
from mmspec.tree import chain
from mmspec.types import Draft

VOCAB = 8192


class Blind(Plain):
    """Proposes a chain of tokens that are almost always wrong."""

    options = NoOptions()

    def __init__(self, nodes: int) -> None:
        self.nodes = nodes

    def propose(self, session: SessionView[None], target: Target) -> Draft:
        root = session.pending[:, None]
        wrong = 3 + (root * 31 + torch.arange(17, 16 + self.nodes, device=root.device)) % (VOCAB - 99)
        return Draft(torch.cat([root, wrong], 1), chain(self.nodes, root.device).expand(len(root)))


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--width", type=count, default=768, help="a multiple of 128 (default: %(default)s)")
    add("--depth", type=count, default=8, help="layers, a multiple of 4 (default: %(default)s)")
    add("--nodes", type=count, nargs="+", default=[8], help="nodes of a draft, its root included (default: 8)")
    add("--context", type=count, default=256, help="prompt tokens (default: %(default)s)")
    add("--tokens", type=count, default=24, help="new tokens per call (default: %(default)s)")
    add("--batch", type=count, nargs="+", default=[1])
    add("--repeats", type=count, default=5, help="timed calls (default: %(default)s)")
    add("--compile", action=argparse.BooleanOptionalAction, default=True, help="also with compile=True (default)")
    add("--device", default="auto")
    add("--seed", type=int, default=0)


def measure(args: argparse.Namespace, outcome: Outcome) -> Iterator[None]:
    if args.width % 128 or args.depth % 4 or min(args.width, args.depth, args.tokens - 1, *args.nodes) < 1:
        raise BenchError(
            f"--width is a multiple of 128, --depth of 4, --nodes from 1 on, --tokens from 2 on; got {args.width}, "
            f"{args.depth}, {args.nodes}, {args.tokens}"
        )
    device = subject.device(args.device)
    model = torch.nn.Module.to(hybrid(args.width, args.depth, args.seed), device)
    megabytes = sum(p.numel() * p.element_size() for p in model.parameters()) / 2**20
    outcome.provenance = provenance(device, torch.float32) | {
        "model": f"Qwen3.5's class, random weights, width {args.width}, {args.depth} layers",
        "weights_mb": round(megabytes, 1),
        "tokens": args.tokens,
    }
    for batch in args.batch:
        cell = shapes.ShapeCell("hybrid", "random", args.context, batch)
        records = told(shapes.measure_cell(cell, list(ways(model, args, batch)), args.repeats, device, {}))
        outcome.records += records
        say(f"{cell}: " + ", ".join(f"{r['method']} {report.number(r['over_one'], '{:.2f}')}" for r in records))
        yield


def hybrid(width: int, depth: int, seed: int) -> T.Qwen3_5ForConditionalGeneration:
    """A float32 model of Qwen3.5's class with random weights and no end token; every fourth layer has attention."""
    torch.manual_seed(seed)
    text = {
        "vocab_size": VOCAB, "hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": depth,
        "num_attention_heads": width // 128, "num_key_value_heads": 1, "head_dim": 128,
        "linear_num_key_heads": width // 128, "linear_num_value_heads": width // 64, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "max_position_embeddings": 32768,
        "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
                            "mrope_section": [6, 5, 5]},
    }  # fmt: skip
    vision = {"depth": 1, "hidden_size": 64, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": width}
    tokens: dict[str, Any] = {"image_token_id": VOCAB - 1, "video_token_id": VOCAB - 2}
    config = T.Qwen3_5Config(text_config=text, vision_config=vision, **tokens)
    model = T.Qwen3_5ForConditionalGeneration._from_config(config, dtype=torch.float32).eval()
    model.generation_config.pad_token_id = 0
    return model


def ways(model: T.Qwen3_5ForConditionalGeneration, args: argparse.Namespace, batch: int) -> Iterator[ShapeMethod]:
    """Stock steps, then rounds of one node and of more nodes, eager and compiled."""
    bench = VlmBench(cast(GenerativeModel, model), None, args.tokens, args.seed)
    ids = torch.randint(3, VOCAB - 99, (batch, args.context), device=model.device)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    methods = [Method(STOCK)]
    for how, options in {"": {}, " compiled": {"compile": True}}.items():
        if args.compile or not options:
            methods += [Method(f"{n} nodes{how}", Blind(n), options) for n in sorted({1, *args.nodes})]
    for method in methods:
        call = partial(_call, bench, method, inputs)
        yield ShapeMethod(method.name, call, plain=method.drafter is None)


def _call(bench: VlmBench, method: Method, inputs: dict[str, Tensor]) -> Cost:
    call = bench.call(method, 0.0, inputs, bench.seed)
    assert call.per_step is not None
    return Cost.of(call.per_step, call.stats)


def told(records: list[report.Record]) -> list[report.Record]:
    """The records, with the times of a round's forward and commit relative to one node, eager and compiled."""
    steps = {r["method"]: r["parts_ms"].get("verify", 0.0) + r["parts_ms"].get("commit", 0.0) for r in records}
    for record in records:
        one = steps.get("1 nodes compiled" if record["method"].endswith("compiled") else "1 nodes")
        own = steps[record["method"]]
        record |= {"suite": "nodes", "over_one": own / one if own and one else None}
    return records
