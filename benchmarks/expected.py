"""What a round is expected to cost on a GPU: bytes, arithmetic and launches, counted, before anything is measured.

    python benchmarks/expected.py --out benchmarks/results/expected.json

Launches are counted in narrow models of the true class and of few layers, since they do not depend on the width, and
each layer adds as many: what a round asks of torch, and how many graphs it replays. The kernels of mmspec count as what
they launch; a graph is played by `tests/tape.py`. Bytes and arithmetic follow from the published shapes. The time of a
forward is that of its bytes or of its arithmetic, whichever is longer, or of its launches where the host is slower.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import tape  # noqa: E402
import transformers as T  # noqa: E402
from drafters import Scripted  # noqa: E402

import mmspec  # noqa: E402
from mmspec.app.bench.shapes_models import MODELS, REAL, TOY, Chat, on_paper  # noqa: E402
from mmspec.app.provenance import provenance  # noqa: E402
from mmspec.drafters.plain import Plain  # noqa: E402
from mmspec.kernels import dispatch, reference  # noqa: E402
from mmspec.piecewise import capture, graphs  # noqa: E402
from mmspec.pipelines.targets import vlm  # noqa: E402

PER_LAUNCH, PER_GRAPH = 5e-6, 8e-6  # seconds of the host, assumed: an operation of torch, the replay of a graph
REACHED = 0.85, 0.7  # of the memory's bandwidth and of the arithmetic that products reach, assumed
ROWS = (32768, 16384)  # of the target's head that drafts read, where they do not read all
BF16 = 2


@dataclass(frozen=True)
class Device:
    """By the vendors' data sheets: bytes a second, and dense bfloat16 operations a second."""

    memory: float
    arithmetic: float
    holds: float  # GB


DEVICES = {
    "H200": Device(4.8e12, 989e12, 141),
    "H100": Device(3.35e12, 989e12, 80),
    "A100 80GB": Device(2.04e12, 312e12, 80),
    "RTX 4090": Device(1.008e12, 165e12, 24),
}
# What an operation of mmspec's launches on CUDA; all else is counted as torch is asked for it.
KERNELS = {
    "uniform": 1, "tree_attention": 2, "compact_rows": 1, "draw": 2, "verify_point_mass": 2, "residual_sample": 3,
}  # fmt: skip
_VIEWS = (
    "view", "_unsafe_view", "reshape", "expand", "transpose", "permute", "t", "slice", "select", "unsqueeze", "squeeze",
    "split", "split_with_sizes", "unbind", "detach", "alias", "as_strided", "unfold", "diagonal", "chunk",
    "empty", "empty_strided", "empty_like", "new_empty", "_local_scalar_dense", "lift_fresh", "new_empty_strided",
)  # fmt: skip


# -- launches ----------------------------------------------------------------------------------------------------------


class Launched(TorchDispatchMode):
    """Operations that launch something on a GPU."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func._schema.name.partition("::")[2] not in _VIEWS
        return func(*args, **(kwargs or {}))


class Tape(tape.Tape):
    """Counts its replays, and keeps what is played from being counted again."""

    played = 0

    def __call__(self, function: Any, inputs: Any) -> Any:
        outputs, play = super().__call__(function, inputs)

        def replay() -> None:
            Tape.played += 1
            play()

        return outputs, replay


@contextmanager
def counting() -> Iterator[Launched]:
    """What is launched meanwhile; kernels are reckoned, and computed as they are defined."""
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
        patch.object(
            vlm, "mode_of", lambda model: torch.no_grad
        ),  # in inference mode an operation may stand for several
        launched,
    ):
        yield launched


def chat(name: str, layers: int) -> tuple[Any, Chat]:
    """A narrow model of the class, and its shape."""
    shape = MODELS[name]
    assert isinstance(shape, Chat)
    text = {**shape.text, TOY: {**shape.text[TOY], "num_hidden_layers": layers, "vocab_size": 512}}
    shape = replace(shape, text=text)
    model = shape.target(TOY, torch.float32).eval()
    model.generation_config.pad_token_id = 0
    return model, shape


def launches(model: Any, inputs: dict[str, Any], drafter: Any, tokens: tuple[int, int] = (4, 10), **how: Any) -> Any:
    """Operations and replays a round (of stock, a step): a long call less a short one, over the rounds between them."""
    found, stock = [], drafter is None
    model.set_attn_implementation("sdpa" if stock else "mmspec_tree")
    handle = None if stock else mmspec.enable(model, drafter, **how)
    for count in (tokens[1], *tokens):  # the first one warms up
        before = 0 if handle is None else handle.stats.rounds
        played = Tape.played
        with counting() as launched, torch.no_grad():
            model.generate(**inputs, max_new_tokens=count, min_new_tokens=count, do_sample=False, eos_token_id=None)
        rounds = count if handle is None else handle.stats.rounds - before
        found.append((rounds, launched.count, Tape.played - played))
    if handle is not None:
        handle.disable()
    (_, short, long) = found
    rounds = long[0] - short[0]
    return {"operations": round((long[1] - short[1]) / rounds), "graphs": round((long[2] - short[2]) / rounds)}


Counts = dict[str, dict[str, int]]


def grown(count: Callable[[int], Counts], few: int, more: int, layers: int) -> Counts:
    """Counts at `layers`, from those at `few` and `more`: every layer adds as many."""
    low, high = count(few), count(more)
    return {
        way: {kind: n + (high[way][kind] - n) * (layers - few) // (more - few) for kind, n in counts.items()}
        for way, counts in low.items()
    }


def chats(layers: int, method: str = "vispec") -> Counts:
    """What a step of stock, a plain round and a drafted one launch, uncompiled and captured."""
    model, shape = chat("qwen2.5-vl-7b", layers)
    drafter, inputs = shape.drafter(method, TOY), shape.prompt(model, TOY, 40, 1)
    return {
        "stock step": launches(model, inputs, None),
        "plain round": launches(model, inputs, Plain()),
        "plain round, compiled": launches(model, inputs, Plain(), compile=True),
        f"{method} round": launches(model, inputs, drafter),
        f"{method} round, compiled": launches(model, inputs, drafter, compile=True),
    }


def hybrids(layers: int) -> Counts:
    """The same of text with gated delta layers, three of four; of a chain, what reading it launches."""
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
    return {
        "stock step": launches(model, inputs, None),
        "plain round": launches(model, inputs, Plain()),
        "plain round, compiled": launches(model, inputs, Plain(), compile=True),
        "a chain of 8 read": launches(model, inputs, chain),
        "a chain of 8 read, compiled": launches(model, inputs, chain, compile=True),
    }


# -- bytes and arithmetic ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Text:
    """Of a text model: numbers that every forward reads, numbers a cached token keeps, and a state of fixed size."""

    read: float
    per_token: float
    state: float
    head: float  # of `read`, the head's
    hidden: int


def text(name: str) -> Text:
    """Of a published shape: all but the vision tower and the table of embeddings is read."""
    t = MODELS[name].text[REAL]  # type: ignore[union-attr]
    H, V, width = t["hidden_size"], t["vocab_size"], t["hidden_size"] // t["num_attention_heads"]
    kv = width * t["num_key_value_heads"]
    layer = 2 * H * H + 2 * H * kv + 3 * H * t["intermediate_size"]
    return Text(t["num_hidden_layers"] * layer + V * H, 2 * t["num_hidden_layers"] * kv, 0.0, V * H, H)


def hybrid_text() -> Text:
    """Of the shape that Qwen3.5's configuration has where nothing is said, some 9 billion."""
    c = T.Qwen3_5TextConfig()
    full = sum(kind == "full_attention" for kind in c.layer_types)
    linear, kv = c.num_hidden_layers - full, c.num_key_value_heads * c.head_dim
    keys, values = c.linear_num_key_heads * c.linear_key_head_dim, c.linear_num_value_heads * c.linear_value_head_dim
    H, q = c.hidden_size, c.num_attention_heads * c.head_dim
    attention, delta = H * (2 * q + 2 * kv) + q * H, H * (2 * keys + 2 * values) + values * H
    read = full * attention + linear * delta + c.num_hidden_layers * 3 * H * c.intermediate_size + c.vocab_size * H
    state = linear * c.linear_num_value_heads * c.linear_key_head_dim * c.linear_value_head_dim * 2  # kept in float32
    return Text(read, 2 * full * kv, state, c.vocab_size * H, H)


def seconds(device: Device, numbers: float, tokens: float, products: float, operations: int, replays: int) -> float:
    """Of one forward: its numbers read, `tokens` times its products done, or its launches made."""
    memory, arithmetic = numbers * BF16 / (REACHED[0] * device.memory), tokens * 2 * products
    return max(memory, arithmetic / (REACHED[1] * device.arithmetic), operations * PER_LAUNCH + replays * PER_GRAPH)


def forward(t: Text, device: Device, context: int, batch: int, nodes: int, launched: dict[str, int]) -> float:
    kept = batch * (context * t.per_token + 2 * t.state)
    return seconds(device, t.read + kept, batch * nodes, t.read, launched["operations"], launched["graphs"])


def drafting(t: Text, device: Device, own: float, depth: int, width: int, nodes: int, batch: int, rows: float) -> float:
    """Of a feature drafter: every level reads its layer, and the rows of the target's head that it drafts by."""
    each = own + rows * t.hidden
    tokens = batch * (nodes / depth + width)
    return depth * seconds(device, each, tokens, each, 0, 0)


def expected(launched: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """c of ViSpec's published tree at the shapes of Qwen2.5-VL-7B, for each device, context and batch."""
    name, method = "qwen2.5-vl-7b", "vispec"
    t, shape, numbers = text(name), MODELS[name], on_paper(MODELS[name], REAL)
    assert isinstance(shape, Chat)
    c = shape.drafter(method, TOY).config
    vocab, nodes = shape.text[REAL]["vocab_size"], c.size + 1
    with torch.device("meta"):
        parts = shape.drafter(method, REAL).named_parameters()
        own = sum(p.numel() for part, p in parts if part.startswith(("fc", "block")))
    for title, device in DEVICES.items():
        for context, batch in ((1024, 1), (4096, 1), (16384, 1), (4096, 4), (4096, 16)):
            if BF16 * (sum(numbers.values()) + batch * context * t.per_token) > 0.95e9 * device.holds:
                continue
            eager = forward(t, device, context, batch, 1, launched["stock step"])
            step = forward(t, device, context, batch, 1, launched["plain round, compiled"])
            verify = forward(t, device, context, batch, nodes, launched[f"{method} round, compiled"])
            drafts = {
                which: drafting(t, device, own, c.depth, c.width, nodes, batch, rows)
                for which, rows in (("all rows", vocab), *((f"{rows} rows", rows) for rows in ROWS))
            }
            found = {which: verify + draft for which, draft in drafts.items()}
            yield {
                "device": title, "context": context, "batch": batch, "stock_ms": 1e3 * eager, "step_ms": 1e3 * step,
                **{f"round_ms, {which}": 1e3 * spent for which, spent in found.items()},
                **{f"c, {which}": spent / step for which, spent in found.items()},
                **{f"c over eager stock, {which}": spent / eager for which, spent in found.items()},
                "measured": None,
            }  # fmt: skip


def sizes() -> dict[str, Any]:
    """GB that a plain step reads at 4k tokens, and that a round reads besides."""
    found = {}
    for name, t in {"llava-1.5-7b": text("llava-1.5-7b"), "qwen2.5-vl-7b": text("qwen2.5-vl-7b"),
                    "a hybrid of 9B": hybrid_text()}.items():  # fmt: skip
        found[name] = {
            "weights_gb": BF16 * t.read / 1e9, "cache_gb_at_4k": BF16 * 4096 * t.per_token / 1e9,
            "states_gb": 2 * BF16 * t.state / 1e9, "head_gb": BF16 * t.head / 1e9,
        }  # fmt: skip
    return found


def report() -> dict[str, Any]:
    deep = MODELS["qwen2.5-vl-7b"].text[REAL]["num_hidden_layers"]  # type: ignore[union-attr]
    launched = {
        "qwen2.5-vl-7b": grown(chats, 2, 3, deep),
        "a hybrid of 9B": grown(hybrids, 4, 8, T.Qwen3_5TextConfig().num_hidden_layers),
    }
    assumed = {"seconds per launch": PER_LAUNCH, "per graph": PER_GRAPH, "share of bandwidth, of arithmetic": REACHED}
    return {
        "provenance": provenance(torch.device("cpu"), torch.bfloat16) | {"assumed": assumed},
        "launches": launched,
        "sizes": sizes(),
        "expected": list(expected(launched["qwen2.5-vl-7b"])),
    }


def tables(found: dict[str, Any]) -> str:
    """The page's tables."""
    lines = ["| | operations a round | graphs replayed |", "|---|--:|--:|"]
    for model, ways in found["launches"].items():
        lines += [f"| {model}: {way} | {n['operations']:,} | {n['graphs'] or '-'} |" for way, n in ways.items()]
    lines += ["", "| | weights read, GB | cache at 4k, GB | states, GB | of the weights, the head, GB |",
              "|---|--:|--:|--:|--:|"]  # fmt: skip
    for model, gb in found["sizes"].items():
        lines.append(f"| {model} | " + " | ".join(f"{value:.2f}" for value in gb.values()) + " |")
    cut = [f"{rows} rows" for rows in ROWS]
    lines += ["", "| device | context | batch | stock eager, ms | compiled step, ms | c, all rows | "
              f"c, {' | c, '.join(cut)} | measured |", "|---|--:|--:|--:|--:|--:|--:|--:|---|"]  # fmt: skip
    for r in found["expected"]:
        lines.append(
            f"| {r['device']} | {r['context']:,} | {r['batch']} | {r['stock_ms']:.1f} | {r['step_ms']:.1f} | "
            f"{' | '.join(format(r[f'c, {which}'], '.2f') for which in ('all rows', *cut))} | {r['measured'] or ''} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="the figures as JSON; the tables are printed")
    args = parser.parse_args()
    torch.manual_seed(0)
    found = report()
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")
    print(tables(found))


if __name__ == "__main__":
    main()
