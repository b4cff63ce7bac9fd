"""Computes the bytes and arithmetic of a round at published shapes, and their time by a GPU's data sheet."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers as T

from benchmarks.suites.shapes_models import REAL, TOY, Chat, on_paper
from benchmarks.suites.shapes_published import MODELS

PER_LAUNCH, PER_GRAPH = 5e-6, 8e-6  # assumed seconds on the host for a torch operation and for the replay of a graph
REACHED = 0.85, 0.7  # assumed shares of the memory bandwidth and of the arithmetic peak that matrix products reach
ROWS = (32768, 16384)  # rows of the target's head that a drafter reads, if not all
BF16 = 2


@dataclass(frozen=True)
class Device:
    """A GPU by its data sheet: bytes per second, and dense bfloat16 operations per second."""

    memory: float
    arithmetic: float
    holds: float  # GB


DEVICES = {
    "H200": Device(4.8e12, 989e12, 141),
    "H100": Device(3.35e12, 989e12, 80),
    "A100 80GB": Device(2.04e12, 312e12, 80),
    "RTX 4090": Device(1.008e12, 165e12, 24),
}


@dataclass(frozen=True)
class TextShape:
    """A text model: numbers that every forward reads, numbers per token in the cache, and the size of a fixed state."""

    read: float
    per_token: float
    state: float
    head: float  # the part of `read` that is the head's
    hidden: int


def text(name: str) -> TextShape:
    """From a published shape; everything is read except the vision tower and the table of embeddings."""
    t = MODELS[name].text[REAL]  # type: ignore[union-attr]
    H, V, width = t["hidden_size"], t["vocab_size"], t["hidden_size"] // t["num_attention_heads"]
    kv = width * t["num_key_value_heads"]
    layer = 2 * H * H + 2 * H * kv + 3 * H * t["intermediate_size"]
    return TextShape(t["num_hidden_layers"] * layer + V * H, 2 * t["num_hidden_layers"] * kv, 0.0, V * H, H)


def attention(c: T.Qwen3_5TextConfig) -> int:
    """Parameters of one gated attention: queries and their gates, keys and values, and the output projection."""
    queries, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    return c.hidden_size * (2 * queries + 2 * kv) + queries * c.hidden_size


def hybrid_text() -> TextShape:
    """The default shape of Qwen3.5's configuration, about 9 billion parameters."""
    c = T.Qwen3_5TextConfig()
    full = sum(kind == "full_attention" for kind in c.layer_types or ())
    linear, kv = c.num_hidden_layers - full, c.num_key_value_heads * c.head_dim
    keys, values = c.linear_num_key_heads * c.linear_key_head_dim, c.linear_num_value_heads * c.linear_value_head_dim
    H, delta = c.hidden_size, c.hidden_size * (2 * keys + 2 * values) + values * c.hidden_size
    read = full * attention(c) + linear * delta + c.num_hidden_layers * 3 * H * c.intermediate_size + c.vocab_size * H
    state = linear * c.linear_num_value_heads * c.linear_key_head_dim * c.linear_value_head_dim * 2  # kept in float32
    return TextShape(read, 2 * full * kv, state, c.vocab_size * H, H)


def seconds(device: Device, numbers: float, tokens: float, products: float, operations: int, replays: int) -> float:
    """Time of one forward: the longest of reading its numbers, its products for `tokens` tokens, and its launches."""
    memory, arithmetic = numbers * BF16 / (REACHED[0] * device.memory), tokens * 2 * products
    return max(memory, arithmetic / (REACHED[1] * device.arithmetic), operations * PER_LAUNCH + replays * PER_GRAPH)


def forward(t: TextShape, device: Device, context: int, batch: int, nodes: int, launched: dict[str, int]) -> float:
    kept = batch * (context * t.per_token + 2 * t.state)
    return seconds(device, t.read + kept, batch * nodes, t.read, launched["operations"], launched["graphs"])


def drafting(
    t: TextShape, device: Device, own: float, depth: int, width: int, nodes: int, batch: int, rows: float
) -> float:
    """Time of a feature drafter's draft: every level reads the drafter's layer and its rows of the target's head."""
    each = own + rows * t.hidden
    tokens = batch * (nodes / depth + width)
    return depth * seconds(device, each, tokens, each, 0, 0)


@dataclass(frozen=True)
class ExpectedRound:
    """A model with a drafter and the shape of its drafts.

    Attributes:
        model, drafts: names of the model and of the drafts, as in the counts of launches.
        text: the target's text model.
        own: parameters of the drafter's layer, which each of its levels reads.
        resident: parameters in memory, those of the drafter included.
        vocab: rows of the target's head.
        depth, width, nodes: of the draft; the root is one of the nodes.
    """

    model: str
    drafts: str
    text: TextShape
    own: float
    resident: float
    vocab: int
    depth: int
    width: int
    nodes: int


def vispec(name: str = "qwen2.5-vl-7b") -> ExpectedRound:
    """ViSpec's published tree at the shapes of Qwen2.5-VL-7B."""
    shape, numbers = MODELS[name], on_paper(MODELS[name], REAL)
    assert isinstance(shape, Chat)
    c = shape.feature_drafter("vispec", TOY).config.shape
    with torch.device("meta"):
        parts = shape.feature_drafter("vispec", REAL).named_parameters()
        own = sum(p.numel() for part, p in parts if part.startswith(("fc", "block")))
    vocab = shape.text[REAL]["vocab_size"]
    return ExpectedRound(name, "vispec round", text(name), own, sum(numbers.values()), vocab, c.depth, c.width, c.size)


def heads(depth: int = 8) -> ExpectedRound:
    """A chain from a hybrid's multi-token-prediction head: an attention layer after a projection of two inputs."""
    c, t = T.Qwen3_5TextConfig(), hybrid_text()
    own = 2 * c.hidden_size**2 + attention(c) + 3 * c.hidden_size * c.intermediate_size
    resident = t.read + own + t.head  # the table of embeddings is as large as the head
    return ExpectedRound("a hybrid of 9B", "a chain of 8 read", t, own, resident, c.vocab_size, depth, 1, depth + 1)


def expected(plan: ExpectedRound, launched: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """c for each device, context and batch."""
    t = plan.text
    for title, device in DEVICES.items():
        for context, batch in ((1024, 1), (4096, 1), (16384, 1), (4096, 4), (4096, 16)):
            if BF16 * (plan.resident + batch * (context * t.per_token + 2 * t.state)) > 0.95e9 * device.holds:
                continue
            eager = forward(t, device, context, batch, 1, launched["stock step"])
            step = forward(t, device, context, batch, 1, launched["plain round, compiled"])
            verify = forward(t, device, context, batch, plan.nodes, launched[f"{plan.drafts}, compiled"])
            drafts = {
                which: drafting(t, device, plan.own, plan.depth, plan.width, plan.nodes, batch, rows)
                for which, rows in (("all rows", plan.vocab), *((f"{rows} rows", rows) for rows in ROWS))
            }
            rounds = {which: verify + draft for which, draft in drafts.items()}
            yield {
                "model": plan.model, "device": title, "context": context, "batch": batch,
                "stock_ms": 1e3 * eager, "step_ms": 1e3 * step,
                **{f"round_ms, {which}": 1e3 * spent for which, spent in rounds.items()},
                **{f"c, {which}": spent / step for which, spent in rounds.items()},
                **{f"c over eager stock, {which}": spent / eager for which, spent in rounds.items()},
                "measured": None,
            }  # fmt: skip


def sizes() -> dict[str, Any]:
    """GB that a plain step reads at a context of 4k tokens, and that a round reads in addition."""
    gigabytes = {}
    for name, t in {"llava-1.5-7b": text("llava-1.5-7b"), "qwen2.5-vl-7b": text("qwen2.5-vl-7b"),
                    "a hybrid of 9B": hybrid_text()}.items():  # fmt: skip
        gigabytes[name] = {
            "weights_gb": BF16 * t.read / 1e9, "cache_gb_at_4k": BF16 * 4096 * t.per_token / 1e9,
            "states_gb": 2 * BF16 * t.state / 1e9, "head_gb": BF16 * t.head / 1e9,
        }  # fmt: skip
    return gigabytes
