"""Counts what a round launches on a GPU: the operations of torch, and the graphs that it replays.

    python -m benchmarks.launches --out benchmarks/results/launches.json

They are counted on narrow models of the real class with few layers, because they do not depend on the width and every
layer adds the same number. Each of mmspec's kernels counts as its launches; `tests/support/pretend_graphs.py` stands in
for CUDA graphs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton: whole graphs contain a kernel of mmspec

sys.path.append("tests/support")

import pretend_graphs
import transformers as T
from hostile_drafters import Scripted

import mmspec
from benchmarks.page import command
from benchmarks.suites.shapes_models import MODELS, REAL, TOY, Chat
from mmspec.app.provenance import provenance
from mmspec.compile import capture, graphs
from mmspec.drafters.plain import Plain
from mmspec.kernels import dispatch, reference
from mmspec.pipelines.host import model as host_model
from mmspec.protocols import Drafter

# Launches of each of mmspec's operations on CUDA; everything else counts as one launch per torch operation.
KERNELS = {
    "uniform": 1, "tree_attention": 2, "compact_rows": 1, "draw": 2, "verify_point_mass": 4, "residual_sample": 3,
}  # fmt: skip
_VIEWS = (
    "view", "_unsafe_view", "reshape", "expand", "transpose", "permute", "t", "slice", "select", "unsqueeze", "squeeze",
    "split", "split_with_sizes", "unbind", "detach", "alias", "as_strided", "unfold", "diagonal", "chunk",
    "empty", "empty_strided", "empty_like", "new_empty", "_local_scalar_dense", "lift_fresh", "new_empty_strided",
)  # fmt: skip


class Launched(TorchDispatchMode):
    """Counts the operations that launch a kernel on a GPU."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func._schema.name.partition("::")[2] not in _VIEWS
        return func(*args, **(kwargs or {}))


class Tape(pretend_graphs.Tape):
    """A graph that counts its replays; operations inside a replay are not counted."""

    played = 0

    def __call__(self, function: Any, inputs: Any) -> Any:
        outputs, play = super().__call__(function, inputs)

        def replay() -> None:
            Tape.played += 1
            play()

        return outputs, replay


@contextmanager
def counting() -> Iterator[Launched]:
    """Count the launches inside the block; kernels count by the table and run as their reference definition."""
    launched = Launched()

    def kernel(operation: str, device: str, wish: str) -> Any:
        def run(*given: Any, **named: Any) -> Any:
            launched.count += KERNELS.get(operation, 1)
            with _disable_current_modes():
                return getattr(reference, operation)(*given, **named)

        return run

    with (
        patch.object(graphs, "wanted", lambda tensors: True),
        patch.object(graphs, "Recorder", Tape),
        patch.object(capture, "inductor", lambda piece, examples: piece),
        patch.object(dispatch, "chosen", kernel),
        patch.object(host_model, "mode_of", lambda model: torch.no_grad),  # in inference mode one may stand for several
        launched,
    ):
        yield launched


def chat(name: str, layers: int) -> tuple[Any, Chat]:
    """A narrow model of this class, and its shape."""
    shape = MODELS[name]
    text = {**shape.text, TOY: {**shape.text[TOY], "num_hidden_layers": layers, "vocab_size": 512}}
    shape = replace(shape, text=text)
    model = shape.target(TOY, torch.float32).eval()
    model.generation_config.pad_token_id = 0
    return model, shape


def launches(model: Any, inputs: dict[str, Any], drafter: Any, tokens: tuple[int, int] = (4, 10), **how: Any) -> Any:
    """Operations and replays per round (stock: per step): a long call minus a short one, over the rounds between."""
    samples, stock = [], drafter is None
    model.set_attn_implementation("sdpa" if stock else "mmspec_tree")
    handle = None if stock else mmspec.enable(model, drafter, **how)
    warm_up = [tokens[1]] * 4  # a prompt is captured once it has come back
    for count in (*warm_up, *tokens):
        before = 0 if handle is None else handle.stats.rounds
        played = Tape.played
        with counting() as launched, torch.no_grad():
            model.generate(**inputs, max_new_tokens=count, min_new_tokens=count, do_sample=False, eos_token_id=None)
        rounds = count if handle is None else handle.stats.rounds - before
        samples.append((rounds, launched.count, Tape.played - played))
    if handle is not None:
        handle.disable()
    *_, short, long = samples
    rounds = long[0] - short[0]
    return {"operations": round((long[1] - short[1]) / rounds), "graphs": round((long[2] - short[2]) / rounds)}


Counts = dict[str, dict[str, int]]


def grown(count: Callable[[int], Counts], few: int, more: int, layers: int) -> Counts:
    """Counts for `layers` layers, extrapolated from `few` and `more` layers: every layer adds the same number."""
    low, high = count(few), count(more)
    return {
        way: {kind: n + (high[way][kind] - n) * (layers - few) // (more - few) for kind, n in counts.items()}
        for way, counts in low.items()
    }


def ways(model: Any, inputs: dict[str, torch.Tensor], name: str, drafter: Drafter[Any]) -> Counts:
    """Launches of a stock step, a plain round and a round with drafts, uncompiled and captured."""
    counts = {"stock step": launches(model, inputs, None)}
    for title, one in (("plain round", Plain()), (name, drafter)):
        counts[title], counts[f"{title}, compiled"] = (launches(model, inputs, one, compile=c) for c in (False, True))
    return counts


def chats(layers: int, method: str = "vispec") -> Counts:
    """Launches of a vision-language model with a feature drafter."""
    model, shape = chat("qwen2.5-vl-7b", layers)
    drafter = shape.feature_drafter(method, TOY)
    return ways(model, shape.prompt(model, TOY, 40, 1), f"{method} round", drafter)


def hybrids(layers: int) -> Counts:
    """Launches of a text model with gated delta layers, three of four; for a chain, those of reading it."""
    kinds = ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(layers)]
    config = T.Qwen3_5TextConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, vocab_size=512, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
        linear_value_head_dim=8, layer_types=kinds, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = T.Qwen3_5ForCausalLM(config).eval()
    ids = torch.randint(3, 500, (1, 8)).repeat(1, 5)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    chain = Scripted(lambda row, g: ([5] * 8, [*range(8)]), chained=True)
    return ways(model, inputs, "a chain of 8 read", chain)


def table(launched: dict[str, Counts]) -> str:
    """The table of docs/speed.md."""
    lines = ["| | operations a round | graphs replayed |", "|---|--:|--:|"]
    for model, ways in launched.items():
        lines += [f"| {model}: {way} | {n['operations']:,} | {n['graphs'] or '-'} |" for way, n in ways.items()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="file for the counts as JSON; the table is printed")
    args = parser.parse_args()
    torch.manual_seed(0)
    launched = {
        "qwen2.5-vl-7b": grown(chats, 2, 3, MODELS["qwen2.5-vl-7b"].text[REAL]["num_hidden_layers"]),
        "a hybrid of 9B": grown(hybrids, 4, 8, T.Qwen3_5TextConfig().num_hidden_layers),
    }
    if args.out:
        facts = provenance(torch.device("cpu"), torch.bfloat16) | {"argv": command()}
        args.out.write_text(json.dumps({"provenance": facts, "launches": launched}, separators=(",", ":")) + "\n")
    print(table(launched))


if __name__ == "__main__":
    main()
